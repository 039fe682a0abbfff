"""What drafting brings on the embedded pair: tokens/s at draft length N against plain decoding.

    python -m benchmarks.embedded [--draft-len 1,2,4,8,auto] [--prompts 48] [--repeats 3]

One process, all ways turn by turn on every prompt, medians of the prompts' ratios, so that a busy
machine slows all alike. `auto` has one controller for all prompts, as a server has. Prompts are
those of weights/tiny/prompts.json, which the pair never saw: templates with unseen words, and real
functions of other projects. They are completed raw, up to EOS; answers that loop (see `loops`) or
have under 8 tokens are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

import mlx.core as mx

import mlx_mtp
from mlx_mtp.engine.requests import Request, Stats
from mlx_mtp.pair import Pair
from mlx_mtp.weights.find import TINY


def decode(pair: Pair, prompt: str, draft_len: int | None, max_tokens: int) -> Request:
    request = Request(
        prompt=pair.tokenizer.encode(prompt, bos=True),
        max_tokens=max_tokens,
        eos=frozenset(pair.defaults.eos_token_ids),
        draft_len=draft_len,
    )
    engine = pair.engine()
    engine.add(request)
    while engine.busy:
        engine.step()
    return request


def loops(text: str, request: Request) -> bool:
    """The card's rule: it does not stop by itself, or one line comes more than three times."""
    lines = Counter(line for line in text.split("\n") if line.strip())
    return request.finish_reason != "stop" or max(lines.values(), default=0) > 3


def measure(
    pair: Pair, prompts: list[str], lengths: list[int | None], repeats: int, max_tokens: int
) -> dict[str, dict[str, float]]:
    """For each draft length medians over prompts, each prompt's tokens/s a median of `repeats`."""
    ways = [0, *lengths]
    speeds: dict[int | None, list[float]] = {way: [] for way in ways}
    stats: dict[int | None, list[Stats]] = {way: [] for way in ways}
    for prompt in prompts:
        first = decode(pair, prompt, 0, max_tokens)
        if len(first.tokens) < 8 or loops(pair.tokenizer.decode(first.tokens), first):
            continue
        runs: dict[int | None, list[Request]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                runs[way].append(decode(pair, prompt, way, max_tokens))
        for way, requests in runs.items():
            same = all(request.tokens == first.tokens for request in requests)
            assert same, f"the text differs for {prompt!r} at draft length {way}"
            speeds[way].append(statistics.median(r.stats.decode_tps for r in requests))
            stats[way].append(requests[-1].stats)
    figures = {}
    for way in ways:
        ratios = [a / b for a, b in zip(speeds[way], speeds[0], strict=True)]
        rounds = sum(s.rounds for s in stats[way])
        figures["auto" if way is None else str(way)] = {
            "prompts": len(ratios),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "tps": statistics.median(speeds[way]),
            "tokens_per_round": sum(s.completion_tokens - 1 for s in stats[way]) / rounds,
            "acceptance": sum(s.accepted for s in stats[way])
            / max(1, sum(s.drafted for s in stats[way])),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--draft-len", default="4,auto", help="lengths to compare, or auto (default: 4,auto)"
    )
    parser.add_argument("--prompts", type=int, default=48, help="of each kind (default: 48)")
    parser.add_argument("--repeats", type=int, default=3, help="runs a prompt (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=160, help="a run (default: 160)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    lengths = [None if way == "auto" else int(way) for way in given.draft_len.split(",")]
    pair = mlx_mtp.load()
    listed = json.loads((TINY / "prompts.json").read_text())
    print(f"MLX {mx.__version__}, {mx.default_device()}")
    figures = {}
    for kind in ("template", "real"):
        prompts = [entry["prompt"] for entry in listed[kind][: given.prompts]]
        decode(pair, prompts[0], 4, 8)
        figures[kind] = measure(pair, prompts, lengths, given.repeats, given.max_tokens)
        for way, f in figures[kind].items():
            print(
                f"{kind:9} {way:>4}  {f['ratio']:.2f}x plain (lowest {f['ratio_lowest']:.2f}), "
                f"{f['tps']:.0f} tokens/s, {f['tokens_per_round']:.2f} tokens a round, "
                f"acceptance {f['acceptance']:.0%}, {f['prompts']:.0f} prompts"
            )
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
