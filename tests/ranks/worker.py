"""One rank of the texts that tests/ranks/test_texts.py compares: `python -m tests.ranks.worker
FOLDER`, where FOLDER has plan.json and takes one file of results from each rank."""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.engine.lockstep import Follower, Leader, follow
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine
from mlx_mtp.ranks import Link
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.load import load_drafter, load_target
from mlx_mtp.weights.planned import plan_target, shard
from tests import checkpoints
from tests.engine.pairs import ScriptedDrafter, run

TOKENS = 8
PROMPTS = [[2, 17, 5], [2, 44, 9, 101, 3], [2, *range(60, 73)], [2, 7, 200, 7, 31, 90]]
SAMPLINGS = [Sampling(), Sampling(), Sampling(1.0, seed=3), Sampling(0.8, seed=2**40 + 1)]
MODES = {"0": 0, "4": 4, "auto": None}


class Drafter(ScriptedDrafter):
    """What one process said, wrong now and then."""

    def __init__(self, script: list[list[int]]) -> None:
        super().__init__(script, lambda row, place: place % 5 == row)

    def scores(self, out: mx.array) -> tuple[mx.array, None]:
        return (mx.arange(checkpoints.VOCAB) == out[..., None]).astype(mx.float32) * 50, None


def requests(draft_len: int | None) -> list[Request]:
    return [
        Request(prompt, TOKENS, sampling, draft_len=draft_len)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


class Done(Exception):
    """Of a follower, with one model."""


class Until:
    """A link whose entry `next` ends `follow`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def read(self) -> Any:
        entry = self._link.read()
        if entry[0] == "next":
            raise Done
        return entry


def main(folder: Path) -> None:
    finished = False
    link = Link(lambda code, line: os._exit(0 if finished else 1))
    models = {}
    for name, given in json.loads((folder / "plan.json").read_text()).items():
        models[name] = one_model(link, given)
    finished = True
    (folder / f"rank{link.ranks.rank}of{link.ranks.size}.json").write_text(json.dumps(models))
    with mx.stream(mx.cpu):
        mx.eval(link.ranks.total(mx.zeros(1)))  # no one leaves before all have written


def one_model(link: Link, given: dict[str, Any]) -> dict[str, Any]:
    ranks, at = link.ranks, Path(given["target"])
    gc.collect()
    mx.clear_cache()  # a small array may get a larger buffer that is left there
    before = mx.get_active_memory()
    target = load_target(at, float32=True, ranks=ranks)
    gc.collect()
    held = mx.get_active_memory() - before
    planned = plan_target(Checkpoint.open(Folder.at(at)))
    whole = planned.nbytes(True)
    shard(planned, ranks)
    found = {"held": held, "planned": planned.nbytes(True), "whole": whole}
    own = load_drafter(given["drafter"], float32=True)
    drafters = {"0": None, "4": Drafter(given["script"]), "auto": own}
    modes = iter(MODES)

    def make(kind: type[Engine], **how: Any) -> Engine:
        drafter = drafters[next(modes)]
        engine = kind(target, drafter, journal=link, **how)
        if isinstance(drafter, Drafter):
            drafter.engine = engine
        return engine

    before = ranks.differences
    if not link.leads:
        try:
            follow(Until(link), partial(make, Follower))
        except Done:
            return found
    texts, accepted, rounds = {}, {}, {}
    for mode, draft_len in MODES.items():
        engine = make(Leader, rows=4)
        asked = requests(draft_len)
        texts[mode] = run(engine, *asked)
        accepted[mode] = sum(request.stats.accepted for request in asked)
        rounds[mode] = one_round(engine, draft_len)
        engine.close()
    link.write(("next", None))
    link.send()
    return found | {
        "texts": texts,
        "accepted": accepted,
        "rounds": rounds,
        "differences": ranks.differences - before,
        "width": target.config.text.hidden_size,
    }


def one_round(engine: Engine, draft_len: int | None) -> list[int] | None:
    """(rows, drafts, messages, bytes) of a round behind a prompt that was run, drafts as fixed."""
    if draft_len is None:
        return None
    request, ranks = Request(PROMPTS[0], 3, draft_len=draft_len), engine.target.ranks
    engine.add(request)
    while not request.tokens:
        engine.step()
    before = ranks.messages, ranks.bytes
    engine.step()
    after = ranks.messages - before[0], ranks.bytes - before[1]
    engine.cancel(request)
    return [len(engine._batch.rows), draft_len, *after]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # MLX's threads do not survive an ordinary exit
