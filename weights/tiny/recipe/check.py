"""Compare the exported pair with transformers' own Gemma 4 in float32.

python check.py ..
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from evaluate import read
from gemma import Drafter, Target
from tokenizers import Tokenizer
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    target, drafter = Target(), Drafter()
    read(folder / "target", target)
    read(folder / "drafter", drafter)
    theirs = Gemma4ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    drafts = Gemma4AssistantForCausalLM.from_pretrained(folder / "drafter", dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    texts = [
        e["prompt"]
        for part in json.loads((folder / "prompts.json").read_text()).values()
        for e in part
    ]
    ids = torch.tensor([tokenizer.encode("<bos>" + "\n\n".join(texts)).ids[:640]])
    hidden, donors = target(ids)
    wanted = theirs(ids, return_shared_kv_states=True, output_hidden_states=True)
    print("logits differ by", (target.head(hidden) - wanted.logits).abs().max().item())
    worst, same = 0.0, 0
    anchors = list(range(8, 620, 9))
    states = drafter.unroll(target, ids, hidden, donors, 2)
    for a in anchors:
        cut = theirs(ids[:, : a + 1], return_shared_kv_states=True, output_hidden_states=True)
        shared = {
            k: (v[0][:, :, -128:], v[1][:, :, -128:]) if k.startswith("sliding") else v
            for k, v in dict(cut.shared_kv_states).items()
        }
        state = cut.hidden_states[-1][:, -1:]
        for j in (1, 2):
            pair = torch.cat([target.embed(ids[:, a + j : a + j + 1]), state], -1)
            at = torch.tensor([[a]])
            out = drafts(inputs_embeds=pair, position_ids=at, shared_kv_states=shared)
            mine = drafter.masked_head(states[j - 1][:, a])
            seen = mine.isfinite()
            worst = max(worst, (mine - out.logits[:, 0])[seen].abs().max().item())
            same += int(mine.argmax() == out.logits.argmax())
            state = out.last_hidden_state
    print("drafter logits differ by", worst, "-", same, "of", 2 * len(anchors), "drafts equal")


if __name__ == "__main__":
    main()
