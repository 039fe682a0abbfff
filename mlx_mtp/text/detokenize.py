"""Token ids to text while they come."""

from __future__ import annotations

import codecs

from mlx_mtp.text.tokenizer import Tokenizer


class Detokenizer:
    """Text token by token, never half a character.

    The deltas put together are `tokenizer.decode` of all ids, however a character's bytes are
    spread over tokens; each token costs what its own bytes cost.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: "" or, for a character cut off in the middle, U+FFFD."""
        return self._decoder.decode(b"", final=True)
