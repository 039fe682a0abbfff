"""Whether `mlx-mtp tune` finds what pays: then auto, against every fixed draft length.

    python -m benchmarks.tune [--shape embedded,compute] [--prompts 12] [--repeats 3]

The profile goes into a folder of its own. Then, in one process, every prompt is answered at all
lengths 0 to 8, by a controller that starts from the profile and by one that starts from nothing,
turn by turn, with another one first in every turn. Both controllers go on learning from prompt to
prompt, as in a server; `fresh` ones start anew with every answer, as `mlx-mtp generate` does. The
best fixed length is the one whose median over all answers is best: it knows the whole sweep
beforehand. What is printed are medians of ratios to it within a turn: of tokens/s, and, as other
programs may run beside it, of the chosen rounds at the seconds that the sweep's own rounds took.

`embedded`: the embedded pair, on prompts that it never saw. `compute`: the compute-bound shape of
benchmarks/shapes.py, on random prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from benchmarks.embedded import loops
from benchmarks.shapes import SHAPES, write_pair
from mlx_mtp.engine.draft_length import MAX_DRAFT, AutoLength, FixedLength, Shape
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.measure.bench import rotated
from mlx_mtp.measure.tune import tune
from mlx_mtp.pair import Pair
from mlx_mtp.weights.find import TINY
from mlx_mtp.weights.load import load_pair
from mlx_mtp.weights.tuned import Tuned
from tests import checkpoints

LEAST = 24  # tokens of an answer


@contextmanager
def own_data_folder() -> Iterator[None]:
    before = os.environ.get("XDG_DATA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        yield
    del os.environ["XDG_DATA_HOME"]
    os.environ |= {} if before is None else {"XDG_DATA_HOME": before}


def embedded_prompts(pair: Pair, count: int) -> list[list[int]]:
    listed = json.loads((TINY / "prompts.json").read_text())
    texts = [e["prompt"] for kind in ("template", "real") for e in listed[kind]]
    random.Random(1).shuffle(texts)
    kept = []
    for text in texts:
        ids = pair.tokenizer.encode(text, bos=True)
        answer = decode(pair, pair.engine(), ids, 0, 160)
        if len(answer.tokens) >= LEAST and not loops(pair.tokenizer.decode(answer.tokens), answer):
            kept.append(ids)
        if len(kept) == count:
            break
    return kept


def decode(pair: Pair, engine: Engine, ids: list[int], length: int | None, most: int) -> Request:
    eos = frozenset(pair.defaults.eos_token_ids)
    request = Request(ids, most, eos=eos, draft_len=length)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request


def sweep(
    pair: Pair, tuned: Tuned, step: float, prompts: list[list[int]], repeats: int, most: int
) -> None:
    """step: seconds of a draft step."""

    def from_profile() -> AutoLength:
        return AutoLength(tuned.seconds, acceptance=tuned.acceptance)

    fixed = pair.engine(draft_length=FixedLength(0))
    kept: dict[str, AutoLength] = {"auto, tuned": from_profile(), "auto, cold": AutoLength()}
    fresh = {"fresh, tuned": from_profile, "fresh, cold": AutoLength}
    engines = {name: pair.engine(draft_length=controller) for name, controller in kept.items()}
    ways: list[int | str] = [*range(MAX_DRAFT + 1), *kept, *fresh]
    speeds: dict[int | str, list[float]] = {way: [] for way in ways}
    rounds: dict[int | str, list[Counter[Shape]]] = {way: [] for way in ways}
    took: dict[int, list[float]] = {n: [] for n in range(MAX_DRAFT + 1)}
    for way in ways[: MAX_DRAFT + 1]:
        assert isinstance(way, int)
        decode(pair, fixed, prompts[0], way, 16)
    tokens = []
    for turn in range(repeats * len(prompts)):
        ids, texts = prompts[turn % len(prompts)], []
        for way in rotated(ways, turn):
            length = way if isinstance(way, int) else None
            if way in fresh:
                engine = pair.engine(draft_length=fresh[str(way)]())
            else:
                engine = fixed if isinstance(way, int) else engines[way]
            auto = engine.draft_length
            before = Counter(auto.chosen) if isinstance(auto, AutoLength) else Counter()
            answer = decode(pair, engine, ids, length, most)
            stats = answer.stats
            if isinstance(auto, AutoLength):
                rounds[way].append(auto.chosen - before)
            else:
                assert isinstance(way, int)
                rounds[way].append(Counter({Shape(way): stats.rounds}))
                took[way].append(stats.decode_s / stats.rounds)
            texts.append(answer.tokens)
            speeds[way].append(answer.stats.decode_tps)
        assert all(text == texts[0] for text in texts), f"texts differ in turn {turn}"
        tokens.append(len(texts[0]))
    seconds = {n: statistics.median(its) for n, its in took.items()}

    def price(chosen: Counter[Shape]) -> float:
        """A copied draft costs its place in the verify pass alone."""
        return sum(
            n * (seconds[s.draft_len] - step * (s.draft_len - s.steps)) for s, n in chosen.items()
        )

    priced = {way: [price(chosen) for chosen in its] for way, its in rounds.items()}
    plain = speeds[0]
    medians = {
        way: statistics.median(s / p for s, p in zip(its, plain, strict=True))
        for way, its in speeds.items()
    }
    best = max(range(MAX_DRAFT + 1), key=lambda way: medians[way])
    cheapest = min(range(MAX_DRAFT + 1), key=lambda n: sum(priced[n]))
    lengths = " ".join(f"{n}:{medians[n]:.2f}" for n in range(MAX_DRAFT + 1))
    print(f"  {len(tokens)} turns, answers of {min(tokens)} to {max(tokens)} tokens")
    print(f"  x plain by draft length {lengths}; best {best}")
    for way in (*kept, *fresh):
        ratios = [a / b for a, b in zip(speeds[way], speeds[best], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        shares = [a / b for a, b in zip(priced[cheapest], priced[way], strict=True)]
        chosen = ""
        if way in kept:
            chosen = f"; chose {kept[str(way)].describe()['chosen']}"
        print(
            f"  {way:13} {middle:.3f} of the best fixed length (quartiles {low:.3f} {high:.3f}); "
            f"by its rounds {statistics.median(shares):.3f} of length {cheapest}, in all "
            f"{sum(priced[cheapest]) / sum(priced[way]):.3f}{chosen}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="embedded,compute", help="default: embedded,compute")
    parser.add_argument("--prompts", type=int, default=12, help="default: 12")
    parser.add_argument("--repeats", type=int, default=3, help="turns a prompt (default: 3)")
    parser.add_argument("--rounds", type=int, default=40, help="of tune, a length (default: 40)")
    given = parser.parse_args()
    print(f"MLX {mx.__version__}, {mx.default_device()}, load {os.getloadavg()[0]:.1f}")
    with own_data_folder(), tempfile.TemporaryDirectory() as scratch:
        for shape in given.shape.split(","):
            model, drafter = None, "auto"
            if shape != "embedded":
                target, assistant = write_pair(Path(scratch), SHAPES[shape])
                checkpoints.add_tokenizer(target, SHAPES[shape].shared["vocab_size"])
                model, drafter = str(target), str(assistant)
            report = tune(model, drafter, rounds=given.rounds)
            pair = load_pair(model, drafter=drafter)
            assert pair.draft_length.tuned, pair.notices
            print(f"{shape}: {pair.notices}")
            times = " ".join(f"{n}:{1e3 * s:.1f}" for n, s in report.tuned.seconds.items())
            print(f"  tuned: ms by drafts {times}, acceptance {report.tuned.acceptance[0]:.2f}")
            if shape == "embedded":
                prompts, most = embedded_prompts(pair, given.prompts), 160
            else:
                chance = random.Random(1)
                words = range(200, SHAPES[shape].shared["vocab_size"])
                prompts = [chance.sample(words, 48) for _ in range(given.prompts)]
                most = 24
            sweep(pair, report.tuned, report.parts[8].draft / 8, prompts, given.repeats, most)


if __name__ == "__main__":
    main()
