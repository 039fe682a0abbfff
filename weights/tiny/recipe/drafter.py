"""Train the drafter of a trained target.

    python drafter.py texts CORPUS OUT --minutes 6      text written by the target: texts.json
    python drafter.py train CORPUS OUT --minutes 16     drafter.pt

Every position of a text is an anchor, unrolled four steps. Two thirds of the time go to the plain
head; then the centroids are fixed by balanced k-means over the drafter's table, and the rest is
trained with the top-k mask that decoding will use.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from chats import Mix
from data import encode, load, pack
from gemma import CENTROIDS, STOPS, Drafter, Target, generate
from optimizer import Optimizer, schedule
from tokenizers import Tokenizer
from torch import Tensor

STEPS, TOKENS, OWN_TEXT, PLAIN_HEAD = 4, 2048, 0.35, 0.6
Text = tuple[list[int], list[bool]]


def load_target(folder: Path) -> Target:
    """The target as it will be stored: bf16 values in float32."""
    target = Target()
    target.load_state_dict(torch.load(folder / "target.pt"))
    for parameter in target.parameters():
        parameter.data = parameter.data.bfloat16().float()
        parameter.requires_grad = False
    return target


def write_texts(target: Target, tokenizer: Tokenizer, mix: Mix, seconds: float) -> list[Text]:
    """Documents whose learnt part the target wrote itself, mostly greedily, until time is up."""
    begun, texts = time.monotonic(), []
    while time.monotonic() - begun < seconds:
        prompts = []
        while len(prompts) < 128:
            ids, learn = encode(tokenizer, mix.draw(), mix.rng)
            starts = [i for i in range(1, len(ids)) if learn[i] and not learn[i - 1]]
            ahead = [10, 18, 28] if ids[1] > 106 else [0, 0, 0, 12]
            at = mix.rng.choice(starts) + mix.rng.choice(ahead)
            if at < min(len(ids), 320):
                prompts.append(ids[:at])
        temperature = mix.rng.choice([0.0, 0.0, 0.0, 0.8])
        for prompt, out in zip(prompts, generate(target, prompts, 160, temperature), strict=True):
            if out[-1] in STOPS:
                texts.append((prompt + out, [False] * len(prompt) + [True] * len(out)))
    return texts


def rows(texts: list[Text], tokenizer: Tokenizer, mix: Mix) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, learn) [B, T] with B * T = TOKENS, from own texts and from the corpus."""
    rng = random.Random(3)
    own = iter(())
    while True:
        length = 1024 if rng.random() < 0.1 else 256

        def draw() -> Text:
            nonlocal own
            if rng.random() >= OWN_TEXT:
                return encode(tokenizer, mix.draw(), rng)
            text = next(own, None)
            if text is None:
                own = iter(rng.sample(texts, len(texts)))
                text = next(own)
            return text

        yield pack(draw, TOKENS // length, length)


def balanced_clusters(points: Tensor, rounds: int = 15) -> Tensor:
    """Cluster of every point [N] in CENTROIDS clusters of equal size, by cosine."""
    points = F.normalize(points, dim=-1)
    size = len(points) // CENTROIDS
    centers = points[torch.randperm(len(points))[:CENTROIDS]]
    for _ in range(rounds):
        order = (points @ centers.T).flatten().argsort(descending=True)
        cluster, room = [-1] * len(points), [size] * CENTROIDS
        for pair in order.tolist():
            point, center = divmod(pair, CENTROIDS)
            if cluster[point] < 0 and room[center]:
                cluster[point] = center
                room[center] -= 1
        assigned = torch.tensor(cluster)
        centers = F.normalize(torch.zeros_like(centers).index_add_(0, assigned, points), dim=-1)
    return assigned


def fix_centroids(drafter: Drafter) -> None:
    """Set the token ordering for good, and the centroids to the means of their clusters."""
    table = drafter.model.embed_tokens.weight.detach()
    cluster = balanced_clusters(table)
    head = drafter.masked_embedding
    head.token_ordering.copy_(cluster.argsort(stable=True))
    clusters = table[head.token_ordering].view(CENTROIDS, -1, table.shape[1])
    head.centroids.weight.data.copy_(clusters.mean(1))


def draft_loss(
    drafter: Drafter, target: Target, ids: Tensor, learn: Tensor, centroids: bool
) -> tuple[Tensor, list[float]]:
    """The loss over all anchors and steps, and the share of right drafts at each step."""
    with torch.no_grad():
        hidden, donors = target(ids)
        logits = target.head(hidden)
    labels = logits.argmax(-1)
    losses, right = [], []
    states = drafter.unroll(target, ids, hidden, donors, STEPS)
    for j, state in enumerate(states, 1):
        # anchor a drafts the token at a+j+1, which the target predicts at a+j
        counted = learn.roll(-j - 1, 1).clone()
        counted[:, -j - 1 :] = False
        state, wanted = state[counted], labels.roll(-j, 1)[counted]
        soft = logits.roll(-j, 1)[counted].softmax(-1)
        scores, extra = drafter.head(state), torch.zeros(())
        if centroids:
            head = drafter.masked_embedding
            allowed = head.allowed(state)
            shares = soft[:, head.token_ordering].view(len(soft), CENTROIDS, -1).sum(-1)
            extra = F.cross_entropy(head.centroids(state).float(), shares)
            best = scores.detach().masked_fill(~allowed, -1e9).argmax(-1)
            scores = scores.masked_fill(~allowed.scatter(1, wanted[:, None], True), -1e4)
            soft = soft.masked_fill(~allowed, 0)
            soft = soft / soft.sum(-1, True).clamp(1e-6)
        else:
            best = scores.argmax(-1)
        log = scores.log_softmax(-1)
        hard = F.nll_loss(log, wanted)
        losses.append((0.5 * hard - 0.5 * (soft * log).sum(-1).mean() + extra) * 0.85 ** (j - 1))
        right.append((best == wanted).float().mean().item())
    return torch.stack(losses).sum(), right


def train(
    target: Target,
    batches: Iterator[tuple[Tensor, Tensor]],
    seconds: float,
    out: Path,
    begin: float,
) -> Drafter:
    drafter = Drafter()
    width = drafter.model.shape.hidden
    left, sizes, _ = torch.linalg.svd(target.model.embed_tokens.weight, full_matrices=False)
    table = left[:, :width] * sizes[:width]
    drafter.model.embed_tokens.weight.data.copy_(0.06 * table / table.std())
    if begin:
        drafter.load_state_dict(torch.load(out / "drafter.pt"))
    optimizer, begun, centroids = Optimizer(drafter, others=2e-3), time.monotonic(), False
    print(sum(p.numel() for p in drafter.parameters()), "parameters", flush=True)
    mean = torch.zeros(STEPS)
    for step, (ids, learn) in enumerate(batches, 1):
        done = begin + (time.monotonic() - begun) / seconds
        if done >= 1:
            break
        if done > PLAIN_HEAD and not centroids:
            fix_centroids(drafter)
            centroids = True
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = draft_loss(drafter, target, ids, learn, centroids)
        if not centroids:
            loss = loss + 0 * drafter.masked_embedding.centroids.weight.sum()
        loss.backward()
        optimizer.step(schedule(done))
        mean = mean.lerp(torch.tensor(right), 0.05)
        if step % 25 == 0:
            print(f"step {step} done {done:.3f} loss {loss.item():.3f}", mean.tolist(), flush=True)
        if step % 50 == 0:
            torch.save(drafter.state_dict(), out / "drafter.pt")
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["texts", "train"])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument(
        "--begin",
        type=float,
        default=0.0,
        help="go on from OUT/drafter.pt at this share of the schedule",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    codes, _, words, _ = load(options.corpus)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    target, file = load_target(options.out), options.out / "texts.json"
    if options.what == "texts":
        texts = write_texts(target, tokenizer, Mix(codes, words, 7), 60 * options.minutes)
        file.write_text(json.dumps(texts))
        print(len(texts), "texts,", sum(len(ids) for ids, _ in texts), "tokens")
        return
    batches = rows(json.loads(file.read_text()), tokenizer, Mix(codes, words, 8))
    drafter = train(target, batches, 60 * options.minutes, options.out, options.begin)
    torch.save(drafter.state_dict(), options.out / "drafter.pt")


if __name__ == "__main__":
    main()
