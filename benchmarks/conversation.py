"""What a chat's later turns cost, and what a grammar costs, on the embedded pair.

    python -m benchmarks.conversation [--turns 5] [--answers 100] [--json FILE]

First a conversation with tools of five user turns, the whole history sent with each, as agents do:
time to the first token of every user turn's first step, beside that of an engine that holds
nothing, in turns, medians; the share of the earlier turn that was cached; whether both say the
same. Then answers under a JSON schema: how many are valid at draft lengths 0, 4 and 8, whether
these agree for a seed, tokens/s beside free text of the same lengths; and how much longer a round
takes for three rows without a grammar when a fourth has one, beside a fourth without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx_mtp
from mlx_mtp.conversation import Ask, Conversations, Turn
from mlx_mtp.engine.session import Engine
from mlx_mtp.generation import Options

ROOM = 1 << 30
FILE = "".join(f"def part_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(16))
SYSTEM = {"role": "system", "content": "You are a coding assistant. Be brief."}
ASKED = (
    "Read the file util.py.",
    "Write a function that adds two numbers to calc.py.",
    "Run the tests.",
    "Read the file main.py and tell me what it does.",
    "Write a function gcd(a, b).",
)


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {one: {"type": "string", "description": f"The {one}."} for one in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("read_file", "path"), tool("write_file", "path", "content"), tool("run", "command")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["class", "function", "module"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "kind", "lines", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}


def run(
    conversations: Conversations, engine: Engine, ask: Ask, options: Options
) -> tuple[Turn, float]:
    """A turn, and the seconds to its first token: rendering, tokenising and prefill."""
    started, first = time.perf_counter(), 0.0
    turn = conversations.start(engine, ask, options)
    while engine.busy:
        for event in engine.step():
            turn.take(event)
            first = first or (time.perf_counter() - started if event.tokens else 0.0)
    return turn, first


def conversation(pair: Any, repeats: int) -> dict[str, Any]:
    options = Options(max_tokens=120, temperature=0)
    warm: list[list[float]] = [[] for _ in ASKED]
    cold: list[list[float]] = [[] for _ in ASKED]
    cached, same, prompts = [1.0] * len(ASKED), True, [0] * len(ASKED)
    for _ in range(repeats):
        kept, engine = Conversations(pair), pair.engine(cache_bytes=ROOM)
        messages, held = [SYSTEM], 0
        for i, text in enumerate(ASKED):
            messages.append({"role": "user", "content": text})
            for step in range(3):
                ask = Ask(messages, TOOLS)
                turn, seconds = run(kept, engine, ask, options)
                stats = turn.request.stats
                if held:
                    cached[i] = min(cached[i], stats.cached_tokens / held)
                held = stats.prompt_tokens + stats.completion_tokens
                if step == 0:
                    alone, other = Conversations(pair), pair.engine()
                    alone.memory = kept.memory  # the same prompt, token for token
                    again, slow = run(alone, other, ask, options)
                    warm[i].append(seconds)
                    cold[i].append(slow)
                    same &= again.request.tokens == turn.request.tokens
                    prompts[i] = stats.prompt_tokens
                messages.append(turn.message())
                results = [
                    {"role": "tool", "tool_call_id": name, "content": FILE}
                    for name, _ in turn.calls
                ]
                messages += results
                if not results:
                    break
    ms = [[round(1000 * statistics.median(times), 1) for times in way] for way in (warm, cold)]
    ratios = [
        round(statistics.median(a / b for a, b in zip(w, c, strict=True)), 3)
        for w, c in zip(warm, cold, strict=True)
    ]
    return {
        "prompt_tokens": prompts,
        "first_token_ms": ms[0],
        "cold_ms": ms[1],
        "ratio": ratios,
        "cached_share": [round(share, 3) for share in cached],
        "same_text": same,
    }


def grammar(pair: Any, answers: int) -> dict[str, Any]:
    import jsonschema

    kept, lengths = Conversations(pair), (0, 4, 8)
    valid, agree = dict.fromkeys(lengths, 0), 0
    rate: dict[str, list[float]] = {f"{w} {n}": [] for w in ("json", "free") for n in lengths}
    for seed in range(answers):
        said = set()
        for n in lengths:
            ask = Ask([{"role": "user", "content": f"Describe part {seed}."}])
            ruled = Ask(ask.messages, response_format=FORMAT)
            options = Options(max_tokens=400, temperature=1.0, seed=seed, draft_len=n)
            engine = pair.engine()
            turn, _ = run(kept, engine, ruled, options)
            text = turn.message()["content"]
            said.add(text)
            try:
                jsonschema.validate(json.loads(text), SCHEMA)
                valid[n] += turn.finish_reason == "stop"
            except (ValueError, jsonschema.ValidationError):
                print(f"seed {seed}, draft length {n}, {turn.finish_reason}: {text!r}")
            rate[f"json {n}"].append(turn.request.stats.decode_tps)
            length = len(turn.request.tokens)
            options = Options(
                max_tokens=length, min_tokens=length, temperature=1.0, seed=seed, draft_len=n
            )
            rate[f"free {n}"].append(run(kept, engine, ask, options)[0].request.stats.decode_tps)
        agree += len(said) == 1
    return {
        "answers": answers,
        "valid": valid,
        "same_at_all_lengths": agree,
        "tokens_per_s": {name: round(statistics.median(r), 1) for name, r in rate.items() if r},
    }


def beside(pair: Any, repeats: int) -> dict[str, float]:
    """Seconds that three free rows take, beside a fourth row with and without a grammar."""
    kept, engine = Conversations(pair), pair.engine(rows=4)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * repeats + 2):
        ruled = bool(i % 2)
        options = Options(max_tokens=96, min_tokens=96, temperature=1.0, seed=i // 2, draft_len=4)
        asks = [Ask([{"role": "user", "content": f"Write function {n}."}]) for n in range(4)]
        if ruled:
            pattern = {"type": "regex", "regex": r"(?s).{2000}"}
            asks[3] = Ask(asks[3].messages, response_format=pattern)
        turns = [kept.start(engine, ask, options) for ask in asks]
        while engine.busy:
            for event in engine.step():
                next(turn for turn in turns if turn.request is event.request).take(event)
        if i >= 2:  # the first of each warm up
            free = [turn.request.stats for turn in turns[:3]]
            seconds[ruled].append(sum(one.decode_s / one.rounds for one in free))
    ratio = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
    return {"round_with_a_grammar_beside": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="conversations [5]")
    parser.add_argument("--answers", type=int, default=100, help="answers under a schema [100]")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args()
    pair = mlx_mtp.load()
    found = {
        "conversation": conversation(pair, given.turns),
        "grammar": grammar(pair, given.answers),
        "batch": beside(pair, given.turns),
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
