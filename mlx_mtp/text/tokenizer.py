"""Text to token ids and back, for the two kinds of tokenizer that Gemma checkpoints bring.

`tokenizer.json` is read by `tokenizers`, a lone `tokenizer.model` by `sentencepiece`. Either way a
prompt gets exactly one BOS, whatever the file's post-processor would add, and decoding goes over
bytes: a token is a run of bytes, and text is what UTF-8 makes of all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from mlx_mtp.errors import ContextError, LoadError, UsageError

_SPACE = "▁"
PROBED = 8  # characters for each token of the context: more than any language has
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Backend(Protocol):
    """A tokenizer file: `control` maps each control token's text to its id."""

    control: dict[str, int]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids, control tokens parsed, nothing added."""

    def token_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """Encodes and decodes; `control` has the id of each token that is never shown as text."""

    def __init__(self, backend: _Backend, bos: str | None) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._control = _any_of(backend.control)
        self.vocab_size = backend.vocab_size
        self.most_tokens: int | None = None  # that any text may have: the model's context
        self.control: Mapping[str, int] = backend.control
        self.control_ids = frozenset(backend.control.values())
        self.bos_id = backend.control.get(bos or "<bos>")

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json or tokenizer.model; tokenizer_config.json and
        special_tokens_map.json may name more control tokens. Raises LoadError."""
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        names = {**read_json(folder / "special_tokens_map.json"), **config}
        bos = _content(names.get("bos_token"))
        if (folder / "tokenizer.json").exists():
            return cls(_Fast(folder / "tokenizer.json", _control_names(names)), bos)
        if (folder / "tokenizer.model").exists():
            return cls(_SentencePiece(folder / "tokenizer.model", _control_names(names)), bos)
        raise LoadError(f"{folder}: there is neither tokenizer.json nor tokenizer.model")

    def encode(self, text: str, *, bos: bool, parse_special: bool = False) -> list[int]:
        """Token ids; with `bos` exactly one BOS stands first, never two.

        `parse_special` makes `<|turn>` written in the text that control token; without it the
        characters are ordinary text. Raises UsageError for lone surrogates, and ContextError for a
        text so long that its beginning alone has more than `most_tokens`.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text is not valid Unicode (a lone surrogate)") from None
        pieces = [text] if parse_special else self._cut(text)
        ids: list[int] = []
        for piece in pieces:
            self._check_length(piece)
            ids += self._backend.encode(piece)
        if bos and self.bos_id is not None:
            first = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
            ids[:first] = [self.bos_id]
        return ids

    def _check_length(self, text: str) -> None:
        """A text of many MB takes a minute, only to be refused then."""
        most = self.most_tokens
        if most is not None and len(text) > PROBED * most:
            tokens = len(self._backend.encode(text[: PROBED * most]))
            if tokens > most + PROBED:
                raise ContextError(tokens, most, counted=False)

    def guard(self, text: str, mark: str) -> str:
        """`text` with `mark` put inside every control token, so that cutting the text at the marks
        and encoding the pieces cannot bring the token about."""
        if self._control is None:
            return text
        return self._control.sub(lambda found: found[0][0] + mark + found[0][1:], text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all ids without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text: part of a character, or b"" for a control token."""
        if token not in self._bytes:
            known = token not in self.control_ids
            self._bytes[token] = self._backend.token_bytes(token) if known else b""
        return self._bytes[token]

    def _cut(self, text: str) -> list[str]:
        if self._control is None:
            return [text]
        cuts = [0, *(found.start() + 1 for found in self._control.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]


class _Fast:
    """tokenizer.json."""

    def __init__(self, path: Path, names: set[str]) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_buffer(path.read_bytes())
        except Exception as error:  # tokenizers raises a bare Exception
            raise LoadError(f"{path}: not a readable tokenizer ({error})") from error
        # A file may carry the padding and the truncation of somebody's training run.
        self._rust.no_padding()
        self._rust.no_truncation()
        known = [name for name in sorted(names) if self._rust.token_to_id(name) is not None]
        self._rust.add_special_tokens(
            [AddedToken(n, special=True, normalized=False) for n in known]
        )
        added = self._rust.get_added_tokens_decoder()
        self.control = {token.content: i for i, token in added.items() if token.special}
        self.vocab_size = self._rust.get_vocab_size()
        self._replacements, self._byte_level = _decoder_of(self._rust, path)

    def encode(self, text: str) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        text = self._rust.id_to_token(token)
        if text is None:  # the embedding table may be longer than the vocabulary
            return b""
        if self._byte_level:
            alphabet = _byte_alphabet()
            known = all(char in alphabet for char in text)  # not so in an added token with a space
            return bytes(alphabet[char] for char in text) if known else text.encode()
        if found := _BYTE.fullmatch(text):
            return bytes([int(found[1], 16)])
        for pattern, content in self._replacements:
            text = text.replace(pattern, content)
        return text.encode()


class _SentencePiece:
    """tokenizer.model, whose own encoder never parses control tokens."""

    def __init__(self, path: Path, names: set[str]) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._model: Any = SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # sentencepiece raises RuntimeError, OSError and others
            raise LoadError(f"{path}: not a readable sentencepiece model") from error
        model = self._model
        self.vocab_size = model.get_piece_size()
        kinds = (model.is_control, model.is_unknown, model.is_unused)
        self.control = {
            piece: i
            for i, piece in ((i, model.id_to_piece(i)) for i in range(self.vocab_size))
            if piece in names or any(kind(i) for kind in kinds)
        }
        self._pattern = _any_of(self.control)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            ids += [*self._model.encode(text[end : found.start()]), self.control[found[0]]]
            end = found.end()
        return ids + list(self._model.encode(text[end:]))

    def token_bytes(self, token: int) -> bytes:
        if token >= self.vocab_size:
            return b""
        piece = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(_SPACE, " ").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} where there is no file. Raises LoadError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: not a JSON object")
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first; None when there is none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _content(token: Any) -> str | None:
    """A token as configs write it: its text, or an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _control_names(config: dict[str, Any]) -> set[str]:
    tokens: list[Any] = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        group = config.get(key) or []
        tokens += group.values() if isinstance(group, dict) else group
    added = config.get("added_tokens_decoder") or {}
    tokens += [token for token in added.values() if token.get("special")]
    return {name for name in map(_content, tokens) if name}


def _decoder_of(rust: Any, path: Path) -> tuple[list[tuple[str, str]], bool]:
    """(text replacements, whether token text is the byte alphabet) of a tokenizer.json."""
    decoder: Any = json.loads(rust.decoder.__getstate__()) if rust.decoder else {"type": "Fuse"}
    steps: list[Any] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "ByteLevel"}
    replaced = [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
    if unknown or any(pattern is None for pattern, _ in replaced):
        raise LoadError(f"{path}: its decoder ({', '.join(kinds)}) is not one that Gemma uses")
    return replaced, "ByteLevel" in kinds


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes (from GPT-2's encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}
