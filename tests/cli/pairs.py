"""A small random pair in a folder, with words: what the command line and generation are run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import checkpoints
from tests.text import folders

VOCAB = 512


def write_pair(
    folder: Path, *, positions: int = 4096, generation: dict[str, Any] | None = None, **config: Any
) -> Path:
    """The target's folder, with its drafter beside it; `config` goes into config.json."""
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    target = checkpoints.target_config("e2b", **sizes, max_position_embeddings=positions)
    model = checkpoints.write_target(folder / "model", config=target | config)
    drafter = checkpoints.drafter_config("e2b", vocab_size=VOCAB)
    checkpoints.write_drafter(folder / "model-assistant", config=drafter)
    folders.gemma_like(model, chat_template=folders.TEMPLATE)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    return model
