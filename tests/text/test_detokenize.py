from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.text.detokenize import Detokenizer
from mlx_mtp.text.tokenizer import Tokenizer
from tests.text import folders

ODD = "👩‍👩‍👧‍👦 🏳️‍🌈 é 한국어 עברית\r\n\x00\ttabs"


def streamed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


def test_f01_an_emoji_over_four_byte_tokens_comes_whole(tmp_path):
    tokenizer = Tokenizer.from_folder(folders.gemma_like(tmp_path))
    ids = tokenizer.encode("a🦙b", bos=False)
    assert len(ids) == 6
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🦙", "b", ""]


def test_f02_byte_fallback_tokens_are_never_written_out(tokenizer):
    ids = tokenizer.encode("한", bos=False)
    assert len(ids) == 3
    assert streamed(tokenizer, ids) == ["", "", "한", ""]


def test_a_character_cut_off_by_the_end_is_one_replacement(tokenizer):
    ids = tokenizer.encode("a한", bos=False)[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "�"]
    assert tokenizer.decode(ids) == "a�"


def test_f06_odd_text_comes_out_unchanged(tokenizer):
    ids = tokenizer.encode(ODD, bos=False)
    assert "".join(streamed(tokenizer, ids)) == ODD


def test_a_control_token_inside_a_character_does_not_split_it(tokenizer):
    first, *rest = tokenizer.encode("한", bos=False)
    assert "".join(streamed(tokenizer, [first, 1, *rest])) == "한"


@given(data=st.data())
def test_deltas_are_the_full_decode_for_any_tokens(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1)))
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(text=st.text())
def test_any_text_is_what_the_tokenizers_library_decodes(gemma, text):
    ours, theirs = gemma
    ids = ours.encode(text, bos=False)
    assert "".join(streamed(ours, ids)) == theirs.decode(ids, skip_special_tokens=False)
