from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.errors import UsageError
from mlx_mtp.text.stopping import StopStrings, TextStream


def shown_after(stops, pieces):
    """What may be shown after each piece, and at the end."""
    scan, text, shown = StopStrings(stops), "", []
    for piece in pieces:
        text += piece
        scan.feed(piece)
        shown.append(text[: scan.safe])
    scan.finish()
    return [*shown, text[: scan.safe]]


def test_a11_a_stop_string_over_three_pieces_is_never_shown():
    assert shown_after(["\n\nEND"], ["a\n", "\nE", "ND b"]) == ["a", "a", "a", "a"]


def test_a12_what_did_not_become_a_stop_string_is_shown_at_the_end():
    assert shown_after(["abcX"], ["1ab", "c"]) == ["1", "1", "1abc"]
    assert shown_after(["abcX"], ["1ab", "c", "Y"]) == ["1", "1", "1abcY", "1abcY"]


def test_overlapping_and_repeating_stop_strings():
    assert shown_after(["aab"], ["aaa", "b"])[-1] == "a"
    assert shown_after(["bc", "abc"], ["xab", "cd"])[-1] == "x"
    assert shown_after(["abcd", "bc"], ["xabc", "d"])[-1] == "xa"
    assert shown_after([], ["any", "thing"]) == ["any", "anything", "anything"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])


def first_completed(text, stops):
    """The definition, in plain words: the end comes first, then the longer one."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
)
def test_any_split_shows_the_same_and_never_takes_anything_back(pieces, stops):
    shown = shown_after(stops, pieces)
    assert shown[-1] == first_completed("".join(pieces), stops)
    assert all(later.startswith(sooner) for sooner, later in pairwise(shown))


def test_the_text_of_a_block_keeps_the_flag_of_each_token():
    stream = TextStream(["STOP"])
    assert not any(stream.add(delta) for delta in "abST")
    assert stream.release([False, True, True, False]) == [("a", False), ("b", True)]
    stream.add("x")
    assert stream.release([True]) == [("S", True), ("T", False), ("x", True)]
    assert stream.finish() == []


def test_the_token_that_completes_a_stop_string_is_cut_at_it():
    stream = TextStream(["ll"])
    assert [stream.add(delta) for delta in ("H", "ello")] == [False, True]
    assert stream.release([False, True]) == [("H", False), ("e", True)]
    assert stream.finish() == []
