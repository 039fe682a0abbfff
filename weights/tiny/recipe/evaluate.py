"""Greedy acceptance of the exported pair on the committed prompts.

    python evaluate.py ..                      prints a table
    python evaluate.py .. --select CORPUS      chooses the prompts anew and writes prompts.json

An output is left out as a loop when it does not stop within LIMIT tokens, or when one line of it
comes more than three times. Every round drafts DRAFTS tokens; those after the stop token don't
count. Position j is accepted when drafts 1..j are all right.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from pathlib import Path

import torch
from data import load
from gemma import STOPS, Drafter, Target, generate
from safetensors.torch import load_file
from templates import BLOCKS, fill
from tokenizers import Tokenizer

DRAFTS, LIMIT, PROMPTS = 4, 256, 60


def select(corpus: Path) -> dict[str, list[dict[str, str]]]:
    """Prompts that end after the docstring: held-out functions in turn by project, and templates
    filled with unseen words only."""
    _, held_out, _, words = load(corpus)
    rng = random.Random(11)
    rng.shuffle(held_out)
    by_project: dict[str, list[str]] = collections.defaultdict(list)
    for entry in held_out:
        head = entry["code"].split("\n")
        if head[1].endswith('"""') and len(head) > 3:
            by_project[entry["project"]].append("\n".join(head[:2]))
    chosen = []
    while len(chosen) < PROMPTS:
        for project, prompts in by_project.items():
            if prompts and len(chosen) < PROMPTS:
                chosen.append({"prompt": prompts.pop(), "source": project})
    slotted = [b for b in BLOCKS if "$x" in b or "$v" in b]
    templates = []
    for block in rng.sample(slotted, min(len(slotted), 44)):
        function = fill(block, words, rng, classic=0).documented()
        head = "\n".join(function.code.split("\n")[:2])
        templates.append({"prompt": head, "source": function.source})
    return {"real": chosen, "template": templates}


def read(folder: Path, model: Target | Drafter) -> None:
    """Load the stored bf16 values as float32."""
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    model.requires_grad_(False)


def loops(text: str, ids: list[int]) -> bool:
    lines = collections.Counter(line for line in text.split("\n") if line.strip())
    return ids[-1] not in STOPS or max(lines.values(), default=0) > 3


@torch.no_grad()
def drafts(target: Target, drafter: Drafter, ids: list[int]) -> torch.Tensor:
    """Drafted tokens [T, DRAFTS] of every anchor of one sequence, in float32."""
    padded = torch.tensor(ids + [0] * (-len(ids) % 128))[None]
    hidden, donors = target(padded)
    states = drafter.unroll(target, padded, hidden, donors, DRAFTS)
    return torch.stack([drafter.masked_head(state).argmax(-1) for state in states], -1)[0]


def rounds(prompt: list[int], out: list[int], drafted: torch.Tensor) -> list[list[bool]]:
    """For every round: whether each counted draft was accepted."""
    ids, at, result = prompt + out, len(prompt), []
    while at < len(ids) - 1:
        real = ids[at + 1 : at + 1 + DRAFTS]
        right = [a == b for a, b in zip(real, drafted[at - 1].tolist(), strict=False)]
        accepted = [all(right[: j + 1]) for j in range(len(right))]
        result.append(accepted)
        at += sum(accepted) + 1
    return result


def measure(folder: Path, entries: list[dict[str, str]]) -> tuple[dict[str, object], list[str]]:
    """Acceptance over the outputs that don't loop, and the outputs."""
    target, drafter = Target(), Drafter()
    read(folder / "target", target)
    read(folder / "drafter", drafter)
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    prompts = [tokenizer.encode("<bos>" + e["prompt"]).ids for e in entries]
    tried, right = [0] * DRAFTS, [0] * DRAFTS
    count = tokens = kept = 0
    texts = []
    for prompt, out in zip(prompts, generate(target, prompts, LIMIT), strict=True):
        texts.append(tokenizer.decode(prompt + out))
        if loops(texts[-1], out):
            continue
        kept += 1
        tokens += len(out) - 1
        for accepted in rounds(prompt, out, drafts(target, drafter, prompt + out)):
            count += 1
            for j, good in enumerate(accepted):
                tried[j] += 1
                right[j] += good
    return {
        "prompts": len(prompts),
        "kept": kept,
        "rounds": count,
        "by position": [round(r / t, 3) for r, t in zip(right, tried, strict=True)],
        "accepted": round(sum(right) / sum(tried), 3),
        "tokens a round": round(tokens / count, 2),
    }, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--select", type=Path, help="corpus folder to choose prompts from")
    parser.add_argument("--show", type=int, default=0, help="print so many outputs of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.folder / "prompts.json"
    if options.select:
        file.write_text(json.dumps(select(options.select), indent=1) + "\n")
    for kind, entries in json.loads(file.read_text()).items():
        result, texts = measure(options.folder, entries)
        print(kind, json.dumps(result))
        print("\n\n".join(texts[: options.show]))


if __name__ == "__main__":
    main()
