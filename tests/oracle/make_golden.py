"""Write tests/golden/*.safetensors: for each of the five shapes, a model and what it computes.

    pip install -e '.[oracle]'
    python -m tests.oracle.make_golden

One file a shape, so that the tests need no torch. Tensors:

- `target.*`, `drafter.*`: the checkpoints as transformers saves them, names unchanged; bfloat16
  (every value is exact in it). The metadata's one entry, `golden`, is JSON: their config.json
  contents as `target` and `drafter`, and the versions as `made_with`.
- `ids` [T]; `logits` [T, V] and `hidden` [T, H] (after the final norm), from one float32 pass over
  more than five windows without a cache.
- `kv.{sliding_attention,full_attention}.{k,v}` [kv heads, T, head dim]: the donors' KV.
- For each row of `draft.committed` [R] (N committed KV slots): the target's greedy token
  `draft.bonus` [R], four greedy drafts `draft.tokens` [R, 4], their `draft.logits` [R, 4, V]
  (tokens outside the chosen centroids hold one value below all others) and the states handed from
  step to step, `draft.hidden` [R, 4, H].

The same versions of torch and transformers give the same files, byte for byte.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.oracle import reference
from tests.oracle.shapes import DRAFTERS, TARGETS, VOCAB, WINDOW

FOLDER = Path(__file__).parents[1] / "golden"
SEED = 4
LENGTH = 5 * WINDOW + 5
# Inside the first window, at its edges, and several windows on.
COMMITTED = (3, WINDOW, WINDOW + 1, 3 * WINDOW + 5, LENGTH - 1)
STEPS = 4


def make(name: str) -> Path:
    """The golden file of one shape."""
    target = reference.build(TARGETS[name], SEED)
    drafter = reference.build(DRAFTERS[name], SEED + 1)
    ids = reference.random_ids(LENGTH, VOCAB, SEED + 2)
    run = reference.run(target, ids)
    bonus = [int(run.logits[n - 1].argmax()) for n in COMMITTED]
    drafts = [
        reference.draft(drafter, target, run.kv, run.hidden[n - 1], b, n, STEPS)
        for n, b in zip(COMMITTED, bonus, strict=True)
    ]
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.int32),
        "logits": run.logits,
        "hidden": run.hidden,
        "draft.committed": torch.tensor(COMMITTED, dtype=torch.int32),
        "draft.bonus": torch.tensor(bonus, dtype=torch.int32),
        "draft.tokens": torch.tensor([d.tokens for d in drafts], dtype=torch.int32),
        "draft.logits": torch.stack([d.logits for d in drafts]),
        "draft.hidden": torch.stack([d.hidden for d in drafts]),
    }
    for kind, (k, v) in run.kv.items():
        tensors |= {f"kv.{kind}.k": k[0].contiguous(), f"kv.{kind}.v": v[0].contiguous()}
    golden: dict[str, Any] = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "seed": SEED,
    }
    for role, model in (("target", target), ("drafter", drafter)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = reference.save(model, Path(temporary))
            golden[role] = json.loads((folder / "config.json").read_text())
            for key, value in load_file(folder / "model.safetensors").items():
                exact = value.bfloat16() if value.is_floating_point() else value
                tensors[f"{role}.{key}"] = exact
    path = FOLDER / f"{name}.safetensors"
    # One entry: safetensors writes several in a random order.
    save_file(tensors, path, {"golden": json.dumps(golden, sort_keys=True)})
    return path


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in TARGETS:
        path = make(name)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
