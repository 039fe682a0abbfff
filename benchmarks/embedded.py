"""What drafting brings on the embedded pair: tokens/s at draft length N against plain decoding.

    python -m benchmarks.embedded [--draft-len 4] [--prompts 48] [--repeats 3] [--json FILE]

One process, both ways turn by turn on every prompt, medians of the prompts' ratios, so that a busy
machine slows both alike. Prompts are those of weights/tiny/prompts.json, which the pair never saw:
templates with unseen words, and real functions of other projects. They are completed raw, up to
EOS; answers that loop (see `loops`) or have under 8 tokens are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

import mlx.core as mx

import mlx_mtp
from mlx_mtp.engine.session import Engine, Request
from mlx_mtp.pair import Pair
from mlx_mtp.weights.find import TINY


def decode(pair: Pair, prompt: str, draft_len: int, max_tokens: int) -> Request:
    request = Request(
        prompt=pair.tokenizer.encode(prompt, bos=True),
        max_tokens=max_tokens,
        eos=frozenset(pair.defaults.eos_token_ids),
        draft_len=draft_len,
    )
    engine = Engine(pair.target, pair.drafter)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request


def loops(text: str, request: Request) -> bool:
    """The card's rule: it does not stop by itself, or one line comes more than three times."""
    lines = Counter(line for line in text.split("\n") if line.strip())
    return request.finish_reason != "stop" or max(lines.values(), default=0) > 3


def measure(
    pair: Pair, prompts: list[str], draft_len: int, repeats: int, max_tokens: int
) -> dict[str, float]:
    """Medians over prompts; each prompt's tokens/s is its median over `repeats`."""
    ratios, plain, drafted = [], [], []
    emitted = rounds = accepted = proposed = 0
    for prompt in prompts:
        first = decode(pair, prompt, draft_len, max_tokens)
        if len(first.tokens) < 8 or loops(pair.tokenizer.decode(first.tokens), first):
            continue
        speeds: dict[int, list[float]] = {0: [], draft_len: []}
        for _ in range(repeats):
            texts = []
            for n in speeds:
                request = decode(pair, prompt, n, max_tokens)
                speeds[n].append(request.stats.decode_tps)
                texts.append(request.tokens)
            assert texts[0] == texts[1], f"the text differs for {prompt!r}"
        stats = first.stats
        emitted, rounds = emitted + stats.completion_tokens - 1, rounds + stats.rounds
        accepted, proposed = accepted + stats.accepted, proposed + stats.drafted
        plain.append(statistics.median(speeds[0]))
        drafted.append(statistics.median(speeds[draft_len]))
        ratios.append(drafted[-1] / plain[-1])
    return {
        "prompts": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "plain_tps": statistics.median(plain),
        "mtp_tps": statistics.median(drafted),
        "tokens_per_round": emitted / rounds,
        "acceptance": accepted / proposed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft-len", type=int, default=4, help="drafted tokens (default: 4)")
    parser.add_argument("--prompts", type=int, default=48, help="of each kind (default: 48)")
    parser.add_argument("--repeats", type=int, default=3, help="runs a prompt (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=160, help="a run (default: 160)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    pair = mlx_mtp.load()
    listed = json.loads((TINY / "prompts.json").read_text())
    print(f"MLX {mx.__version__}, {mx.default_device()}, draft length {given.draft_len}")
    figures = {}
    for kind in ("template", "real"):
        prompts = [entry["prompt"] for entry in listed[kind][: given.prompts]]
        decode(pair, prompts[0], given.draft_len, 8)
        figures[kind] = measure(pair, prompts, given.draft_len, given.repeats, given.max_tokens)
        f = figures[kind]
        print(
            f"{kind:9} {f['ratio']:.2f}x plain decoding (lowest {f['ratio_lowest']:.2f}), "
            f"{f['plain_tps']:.0f} -> {f['mtp_tps']:.0f} tokens/s, "
            f"{f['tokens_per_round']:.2f} tokens a round, acceptance {f['acceptance']:.0%}, "
            f"{f['prompts']} prompts"
        )
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
