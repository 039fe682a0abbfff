"""Small checkpoint folders, with nothing in them but words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from tokenizers.trainers import BpeTrainer

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"]
CORPUS = [
    "Hello there world, hello again.\n\tdef add(a, b):\n    return a + b\n",
    "one two three",
] * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n"
    "{% endfor %}<|turn>model\n{% if enable_thinking %}<|channel>thought\n{% endif %}"
)


def gemma_like(folder: Path, **config: Any) -> Path:
    """tokenizer.json as Gemma's: ▁ for a space, bytes as <0xNN>, a post-processor that adds BOS."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    specials = CONTROL + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Bytes are ordinary vocabulary: only the control tokens are declared.
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in CONTROL]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.post_processor = post.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return _write(folder, tokenizer, config)


def byte_level(folder: Path, **config: Any) -> Path:
    """tokenizer.json as GPT-2's: every token is a run of bytes, written in the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return _write(folder, tokenizer, config)


def sentencepiece(folder: Path, **config: Any) -> Path:
    """Only tokenizer.model, with Gemma's settings."""
    from sentencepiece import SentencePieceTrainer

    folder.mkdir(parents=True, exist_ok=True)
    SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(CORPUS).split("\n")),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        user_defined_symbols=CONTROL[4:],
        minloglevel=9,
    )
    (folder / "tokenizer.vocab").unlink()
    names = {"bos_token": "<bos>", "additional_special_tokens": CONTROL[4:]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    return folder


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
