"""`mlx-mtp` with an engine that says what a script says; all above the engine is the real code.

    python -m tests.clients.scripted SCRIPT.json serve --port 9000

SCRIPT.json is a list of rules, or null for the real engine: {"when": text, "say": text, "endless":
true}. A rule fits when the last 2000 characters of the prompt, without control tokens, hold its
"when" (default: always); of those that fit the one that was used least is taken, the first where
several were. "say" may hold Gemma's control tokens; with "endless" it is said over and over. None
fits: "OK.". Each prompt's end and its answer are added to SCRIPT.json.prompts, and each HTTP
request to SCRIPT.json.requests, one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mlx_mtp.engine.requests import Event, Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import ContextError
from mlx_mtp.pair import Pair

TAIL, CONTEXT, CHUNK, STEP = 2000, 131072, 2048, 8


class ScriptedEngine(Engine):
    """Reads a prompt CHUNK tokens a step and says STEP tokens a step, of all requests at once."""

    def __init__(self, pair: Pair, rules: list[dict[str, Any]], log: Path, **how: Any) -> None:
        super().__init__(pair.target, **how)
        self.context = CONTEXT
        self._pair, self._rules, self._log = pair, rules, log
        self._used = [0] * len(rules)
        self._left: dict[Request, Any] = {}
        self._read: dict[Request, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def add(self, request: Request) -> None:
        if len(request.prompt) >= self.context:
            raise ContextError(len(request.prompt), self.context)
        request.max_tokens = min(request.max_tokens, self.context - len(request.prompt))
        request.stats.prompt_tokens = len(request.prompt)
        end = self._pair.tokenizer.decode(request.prompt)[-TAIL:]
        fits = [i for i, rule in enumerate(self._rules) if rule.get("when", "") in end]
        rule = {"say": "OK."}
        if fits:
            used = min(fits, key=lambda i: self._used[i])
            self._used[used] += 1
            rule = self._rules[used]
        ids = self._pair.tokenizer.encode(rule["say"], bos=False, parse_special=True)
        # What ends a turn of calls is not in every checkpoint's list, but in every request's.
        self._left[request] = cycle(ids) if rule.get("endless") else iter([*ids, min(request.eos)])
        self._read[request] = 0
        note(self._log, {"prompt": end, "say": rule["say"]})

    def step(self) -> list[Event]:
        time.sleep(0.002)
        events = []
        for request, left in list(self._left.items()):
            before = len(request.tokens)
            if self._read[request] < len(request.prompt):
                self._read[request] = min(self._read[request] + CHUNK, len(request.prompt))
            else:
                for token in islice(left, STEP):
                    if not request.take(token) or request.finish_reason:
                        break
            new = request.tokens[before:]
            events.append(Event(request, new, [False] * len(new), self._read[request]))
            if request.finish_reason:
                self._drop(request)
        return events

    def cancel(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "cancelled"
            self._drop(request)

    def close(self) -> None:
        for request in list(self._left):
            self.cancel(request)

    def _drop(self, request: Request) -> None:
        del self._left[request], self._read[request]


def note(log: Path, seen: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(seen) + "\n")


def record_http(log: Path) -> None:
    """Have every Starlette app note what it was asked and how it answered."""
    from starlette.applications import Starlette

    handle = Starlette.__call__

    async def noted(app: Starlette, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await handle(app, scope, receive, send)
        body, answer = bytearray(), bytearray()
        status: list[int] = []

        async def receive_noted() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def send_noted(message: Any) -> None:
            status.extend([message["status"]] if "status" in message else [])
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await handle(app, scope, receive_noted, send_noted)
        finally:
            seen = {
                "method": scope["method"],
                "path": scope["path"],
                "status": max(status, default=0),
            }
            texts = {"body": body.decode(), "answer": answer.decode()}
            note(log, seen | texts)

    Starlette.__call__ = noted  # type: ignore[method-assign]


def main() -> None:
    script, *arguments = sys.argv[1:]
    rules = json.loads(Path(script).read_text())
    sys.argv = ["mlx-mtp", *arguments]
    if rules is not None:
        prompts = Path(script + ".prompts")
        Pair.engine = lambda pair, **how: ScriptedEngine(pair, rules, prompts, **how)  # type: ignore
    if "serve" in arguments:
        record_http(Path(script + ".requests"))
    from mlx_mtp.cli.entry import run

    run()


if __name__ == "__main__":
    main()
