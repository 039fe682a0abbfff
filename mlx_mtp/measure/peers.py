"""Other programs on the same weights and prompts, for `bench --vs` and `benchmarks.compare`.

    python -m mlx_mtp.measure.peers ours|mlx-lm|mlx-vlm TARGET DRAFTER

is one contestant: a request a line in, a result out. A request is {"prompt", "max_tokens", "eos",
"draft_len", "compiled"}, a result {"tokens", "seconds", "cpu_seconds", "counted", "rounds"}:
`counted` tokens came in `rounds` and `seconds` after the first one. The last round is left out: a
loop that runs ahead has less left to do there than one that waits. `cpu_seconds` are the process's,
which a busy machine moves less. mlx-lm decodes plainly and ignores `draft_len`; neither peer has
anything to compile. Ollama is a server with models of its own and is only asked.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.errors import MtpError
from mlx_mtp.models.layers import on_cpu

Stream = Generator[tuple[int, int]]  # token, number of the round that brought it


class Worker:
    """A contestant's process. Raises MtpError where it ends."""

    def __init__(self, name: str, target: Path, drafter: Path, scratch: Path):
        scratch.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, scratch / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_mtp.measure.peers", name, str(target), str(drafter)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=os.environ | {"TMPDIR": str(scratch)},
            text=True,
            start_new_session=True,  # Ctrl-C is ours to answer
        )
        self.version = self._answer()["version"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; the answer says why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise MtpError(f"{self.name} ended: {''.join(last) or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()


class Ollama:
    """A model of the Ollama server at `host` (OLLAMA_HOST's form). Raises MtpError where there is
    no server, or none that answers as Ollama does, or no such model."""

    def __init__(self, model: str, host: str | None):
        host = host or "127.0.0.1"
        host = host if "://" in host else f"http://{host}"
        self.url = host if host.rpartition(":")[2].strip("/").isdigit() else f"{host}:11434"
        if not host.lower().startswith(("http://", "https://")):
            raise MtpError(f"OLLAMA_HOST is {host}; it must be an http or https address")
        self.model = model
        self.version = str(self._ask("version", None, 10).get("version", ""))[:20]
        self.run("Hello", 1, raw=False)  # loads it

    def run(self, prompt: str, max_tokens: int, *, raw: bool) -> tuple[int, float]:
        """Tokens and seconds of a greedy answer, as the server counts them; WAITS for it."""
        asked: dict[str, Any] = {
            "model": self.model,
            "stream": False,
            "options": {"temperature": 0, "num_predict": max_tokens},
        }
        if raw:
            answer = self._ask("generate", asked | {"prompt": prompt, "raw": True}, 600)
        else:
            turn = {"role": "user", "content": prompt}
            answer = self._ask("chat", asked | {"messages": [turn], "think": False}, 600)
        count, nanoseconds = (answer.get(key, 0) for key in ("eval_count", "eval_duration"))
        if not all(isinstance(n, int) and 0 < n < 1 << 62 for n in (count, nanoseconds)):
            raise self._strange("it gives no counts")
        return count, nanoseconds / 1e9

    def _strange(self, why: str) -> MtpError:
        return MtpError(f"Ollama at {self.url}: does not answer as Ollama does: {why}")

    def _ask(self, what: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Raises MtpError, at the latest after so many `seconds` without an answer's end."""
        data = None if body is None else json.dumps(body).encode()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        said, end = b"", time.monotonic() + seconds
        try:
            asked = urllib.request.Request(f"{self.url}/api/{what}", data)
            with direct.open(asked, timeout=seconds) as response:
                while part := response.read1(1 << 16):
                    said += part
                    if len(said) > 1 << 20:
                        raise self._strange("over 1 MB")
                    if time.monotonic() > end:
                        raise TimeoutError
            answer = json.loads(said)
        except urllib.error.HTTPError as error:
            with suppress(OSError, http.client.HTTPException):
                said = error.read(1000)
            line = " ".join(said.decode(errors="replace").split())[:200]
            raise MtpError(f"Ollama at {self.url} refuses {self.model}: {line}") from None
        except OSError as error:
            why = getattr(error, "reason", error)
            if isinstance(why, TimeoutError):
                raise self._strange(f"no answer in {seconds:g} s") from None
            known = getattr(why, "strerror", None) or "no connection"
            raise MtpError(f"Ollama cannot be reached at {self.url}: {known}") from None
        except (ValueError, RecursionError, http.client.HTTPException):
            line = " ".join(said.decode(errors="replace").split())[:200]
            raise self._strange(line or "nothing that can be read") from None
        if not isinstance(answer, dict):
            raise self._strange("no JSON object")
        return answer


class Ours:
    def __init__(self, target: Path, drafter: Path):
        from mlx_mtp.weights.load import load_drafter, load_target

        self.pair = load_target(target, float32=on_cpu()), load_drafter(drafter, float32=on_cpu())
        self.engines: dict[bool, Any] = {}

    def stream(self, request: dict[str, Any]) -> Stream:
        from mlx_mtp.engine.session import Engine, Request

        k, compiled = request["draft_len"], request["compiled"]
        if compiled not in self.engines:
            self.engines[compiled] = Engine(*self.pair, compile=compiled or None)
        engine = self.engines[compiled]
        asked = Request(
            request["prompt"], request["max_tokens"], eos=frozenset(request["eos"]), draft_len=k
        )
        engine.add(asked)
        number = 0
        try:
            while engine.busy:
                for event in engine.step():
                    yield from ((token, number) for token in event.tokens)
                    number += bool(event.tokens)
        finally:
            while engine.busy:
                engine.step()


class MlxLm:
    def __init__(self, target: Path, drafter: Path):
        from mlx_lm.utils import load_model

        self.model, _ = load_model(target)
        if on_cpu():
            self.model.set_dtype(mx.float32)
        mx.eval(self.model.parameters())

    def stream(self, request: dict[str, Any]) -> Stream:
        from mlx_lm.generate import generate_step

        prompt = mx.array(request["prompt"])
        steps = generate_step(prompt, self.model, max_tokens=request["max_tokens"])
        yield from ((int(token), number) for number, (token, _) in enumerate(steps))


class MlxVlm:
    """Its text-only path has no MTP, so the full model is made, with towers that are never run."""

    def __init__(self, target: Path, drafter: Path):
        from mlx_vlm.models import gemma4
        from mlx_vlm.speculative.drafters import gemma4_assistant

        raw = json.loads((target / "config.json").read_text())
        text = gemma4.config.TextConfig.from_dict(raw.get("text_config", raw))
        vision = gemma4.config.VisionConfig(num_hidden_layers=1, hidden_size=64)
        self.model = gemma4.Model(gemma4.ModelConfig(text_config=text, vision_config=vision))
        named = {text_name(name): array for name, array in read(target).items()}
        weights = {name: array for name, array in named.items() if name.startswith("model.")}
        fill(self.model.language_model, weights, raw)
        raw = json.loads((drafter / "config.json").read_text())
        self.drafter = gemma4_assistant.Model(gemma4_assistant.ModelConfig.from_dict(raw))
        fill(self.drafter, self.drafter.sanitize(read(drafter)), raw)
        mx.eval(self.model.language_model.parameters(), self.drafter.parameters())

    def stream(self, request: dict[str, Any]) -> Stream:
        from mlx_vlm.generate.ar import generate_step

        block = request["draft_len"] + 1
        # A block beyond the configured size would be tried only after many good rounds.
        self.drafter.config.block_size = block
        steps = generate_step(
            mx.array([request["prompt"]]),
            self.model,
            None,
            None,
            # Its last blocks shrink with what is left: kept out of what is counted.
            max_tokens=request["max_tokens"] + block,
            temperature=0.0,
            draft_model=self.drafter,
            draft_kind="mtp",
            draft_block_size=block,
        )
        first, _ = next(steps)
        yield int(first), 0
        for token, _ in steps:
            yield int(token), len(self.drafter.accept_lens)


CONTESTANTS: dict[str, Any] = {"ours": Ours, "mlx-lm": MlxLm, "mlx-vlm": MlxVlm}


def text_name(name: str) -> str:
    """A text weight's name in any published layout -> that in mlx-vlm's language model."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name


def fill(module: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Load weights, packed as the config says: as the most are, or as is said of one."""
    scheme = config.get("quantization", {})
    own = {text_name(name): how for name, how in scheme.items() if isinstance(how, dict)}
    if how := {key: scheme[key] for key in ("group_size", "bits", "mode") if key in scheme}:
        nn.quantize(
            module,
            class_predicate=lambda path, _: f"{path}.scales" in weights and own.get(path, True),
            **how,
        )
    module.load_weights(list(weights.items()))


def read(folder: Path) -> dict[str, mx.array]:
    """A checkpoint's weights, in the dtype that this engine would use."""
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    floats = {n for n, a in weights.items() if on_cpu() and mx.issubdtype(a.dtype, mx.floating)}
    return {n: a.astype(mx.float32) if n in floats else a for n, a in weights.items()}


def timed(stream: Stream, max_tokens: int, eos: list[int]) -> dict[str, Any]:
    """Runs `stream` to the end of its text and takes the time; WAITS where the contestant does."""
    tokens: list[int] = []
    times: list[tuple[float, float]] = []
    numbers: list[int] = []
    for token, number in stream:
        if token in eos:
            break
        tokens.append(token)
        times.append((time.perf_counter(), time.process_time()))
        numbers.append(number)
        if len(tokens) == max_tokens:
            break
    last = max((i for i, number in enumerate(numbers) if number < numbers[-1]), default=0)
    if not tokens:
        return dict.fromkeys(("seconds", "cpu_seconds", "counted", "rounds"), 0) | {"tokens": []}
    seconds, cpu = (b - a for a, b in zip(times[0], times[last], strict=True))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "counted": last,
        "rounds": numbers[last],
    }


def main() -> None:
    # Whatever a library prints goes to stderr; results have the real stdout for themselves.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, *folders = sys.argv[1:]
    contestant = CONTESTANTS[name](*map(Path, folders))
    version = importlib.metadata.version("mlx-mtp" if name == "ours" else name)
    print(json.dumps({"version": version}), file=results, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        stream = contestant.stream(request)
        result = timed(stream, request["max_tokens"], request["eos"])
        stream.close()
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
