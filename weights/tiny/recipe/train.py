"""Train the target on documents drawn without end, for a given number of minutes.

    python train.py CORPUS OUT --minutes 55

OUT gets tokenizer.json, target.pt (float32 masters, rewritten every few minutes) and a log.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chats import Mix
from data import batches, load
from gemma import Target
from optimizer import Optimizer, schedule
from tokenizer import CONTROL, save
from tokenizer import train as train_tokenizer
from tokenizers import Tokenizer

TOKENS = 1024


def make_tokenizer(mix: Mix, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        control = re.compile("|".join(map(re.escape, CONTROL)))
        texts = (control.sub("", "".join(t for t, _ in mix.draw())) for _ in range(15000))
        save(train_tokenizer(list(texts)), folder)
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=55)
    parser.add_argument(
        "--begin",
        type=float,
        default=0.0,
        help="go on from OUT/target.pt at this share of the schedule",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    codes, _, words, _ = load(options.corpus)
    tokenizer = make_tokenizer(Mix(codes, words, 1), options.out)
    target = Target()
    if options.begin:
        target.load_state_dict(torch.load(options.out / "target.pt"))
    optimizer = Optimizer(target)
    print(sum(p.numel() for p in target.parameters()), "parameters", flush=True)
    begun, step, seen, mean = time.monotonic(), 0, 0, 3.0
    for ids, learn in batches(tokenizer, Mix(codes, words, 2 + bool(options.begin)), TOKENS):
        done = options.begin + (time.monotonic() - begun) / (60 * options.minutes)
        if done >= 1:
            break
        with torch.autocast("cpu", torch.bfloat16):
            hidden, _ = target(ids[:, :-1])
            logits = target.head(hidden)
        counted = learn[:, 1:]
        loss = F.cross_entropy(logits[counted], ids[:, 1:][counted])
        loss.backward()
        optimizer.step(schedule(done))
        step, seen, mean = step + 1, seen + learn.numel(), 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step} done {done:.3f} loss {mean:.4f}", flush=True)
        if step % 400 == 0:
            torch.save(target.state_dict(), options.out / "target.pt")
    torch.save(target.state_dict(), options.out / "target.pt")
    print(f"{step} steps, {seen} tokens, loss {mean:.4f}")


if __name__ == "__main__":
    main()
