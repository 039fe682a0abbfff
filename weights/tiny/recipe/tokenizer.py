"""Train the pair's tokenizer: Gemma's layout and control ids in a vocabulary of 2048.

BPE with byte fallback over text whose spaces are written as U+2581; a newline with the
indentation after it is one piece, so is a run of spaces; words keep the space or underscore before
them; digits stand alone. Ids that Gemma gives to unused tokens hold the 256 byte tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 2048
CONTROL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
PIECES = r"\n+▁*|▁+(?=▁)|[▁_]?[A-Za-z]+|▁?[0-9]|▁?[^\sA-Za-z0-9▁]+|▁+|\s"


def train(texts: list[str]) -> Tokenizer:
    """A tokenizer of exactly VOCAB tokens, learnt from texts without control tokens."""
    learner = Tokenizer(models.BPE(byte_fallback=True))
    normalizer = normalizers.Replace(" ", "▁")
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    learner.normalizer, learner.pre_tokenizer = normalizer, pieces
    letters = [chr(c) for c in range(32, 127)] + ["▁", "\n", "\t"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB - len(CONTROL) - len(byte_tokens),
            initial_alphabet=letters,
            limit_alphabet=len(letters),
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    words = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    free = (i for i in range(VOCAB) if i not in CONTROL.values())
    vocab = CONTROL | dict(zip(byte_tokens + words, free, strict=False))
    assert len(vocab) == VOCAB
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learnt["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pieces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
