import json

import pytest
import tokenizers

from mlx_mtp.errors import LoadError, UsageError
from mlx_mtp.text.tokenizer import Tokenizer
from tests.text import folders

TEXT = "Hello there\n\tdef add(a, b):  café 🦙 x"


def test_text_survives_the_way_there_and_back(tokenizer):
    ids = tokenizer.encode(TEXT, bos=False)
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < tokenizer.vocab_size


def test_e14_one_bos_although_the_file_adds_one_and_the_text_has_two(tokenizer):
    ids = tokenizer.encode("<bos><bos>Hello", bos=True, parse_special=True)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id == 2
    assert ids[1:] == tokenizer.encode("Hello", bos=False)


@pytest.mark.parametrize("asked", [{}, {"add_bos_token": False}, {"add_bos_token": None}])
def test_e15_one_bos_whatever_tokenizer_config_says(asked, tmp_path):
    tokenizer = Tokenizer.from_folder(folders.byte_level(tmp_path, **asked))
    assert tokenizer.encode("Hello", bos=True).count(2) == 1
    assert tokenizer.encode("", bos=True) == [2]


def test_bos_is_found_without_tokenizer_config(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert Tokenizer.from_folder(tmp_path).bos_id == 2


def test_control_tokens_are_text_unless_asked_for(tokenizer):
    parsed = tokenizer.encode("a<|turn>b", bos=False, parse_special=True)
    plain = tokenizer.encode("a<|turn>b", bos=False)
    assert [i for i in parsed if i in tokenizer.control_ids] == [4]
    assert not tokenizer.control_ids & set(plain)
    assert tokenizer.decode(plain) == "a<|turn>b"
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.control["<|turn>"] == 4
    assert "<|nothing>" not in tokenizer.control


def test_control_tokens_named_only_in_tokenizer_config(tmp_path):
    names = {"extra_special_tokens": {"greeting": "Hello"}, "additional_special_tokens": ["def"]}
    tokenizer = Tokenizer.from_folder(folders.byte_level(tmp_path, **names))
    assert tokenizer.decode(tokenizer.encode("1Hello2def3", bos=False, parse_special=True)) == "123"
    assert tokenizer.decode(tokenizer.encode("1Hello2def3", bos=False)) == "1Hello2def3"


def test_f04_a_leading_space_is_kept_as_in_the_full_decode(tmp_path):
    tokenizer = Tokenizer.from_folder(folders.gemma_like(tmp_path))
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    for text in (" Hello", "Hello", "  Hello ", "▁", "\n Hello"):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_added_words_and_ids_beyond_the_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_folder(folders.byte_level(tmp_path))
    ids = tokenizer.encode("two words", bos=False)
    assert len(ids) == 1
    assert tokenizer.decode([*ids, 5000]) == "two words"


def test_a_lone_surrogate_is_a_usage_error(tokenizer):
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode("a\ud800", bos=False)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(LoadError, match="neither"):
        Tokenizer.from_folder(tmp_path)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("}")
        with pytest.raises(LoadError, match=name):
            Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_gemma_never_has_is_refused(tmp_path):
    folders.byte_level(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match="WordPiece"):
        Tokenizer.from_folder(tmp_path)
