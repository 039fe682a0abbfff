"""Streams for minutes against the `mlx-mtp serve` process, a third of them cut off at random."""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment
from tests.cli.web import hang_up, until

STREAMS, SECONDS = 8, 300
LONG = 2000  # tokens of a prompt that takes several chunks of 512
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


class Server:
    def __init__(self):
        command = [*COMMAND, "serve", "--port", "0", "--parallel", str(STREAMS)]
        command += ["--cache-gb", "0.05"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment())
        (port,) = re.findall(rb":(\d+)/v1", self.process.stderr.readline())
        assert b"is ready" in self.process.stderr.readline()
        self.port = int(port)

    def open(self, path, body=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = body and json.dumps(body)
        connection.request("POST" if body else "GET", path, content)
        response = connection.getresponse()
        response.connection = connection
        assert response.status == 200, response.read()
        return response

    def ask(self, body):
        return json.loads(self.open("/v1/completions", body).read())["choices"][0]

    def metrics(self):
        text = self.open("/metrics").read().decode()
        return {name: float(value) for name, value in re.findall(r"(?m)^(\w+) (\S+)$", text)}

    def stream(self, body, cut=None):
        """The text, None if it was cut off behind so many deltas, and when each of them came."""
        response, text, times = self.open("/v1/completions", body | {"stream": True}), "", []
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                chunk = json.loads(line[6:])
                assert "error" not in chunk
                text += chunk["choices"][0]["text"]
                if len(times) == cut:
                    hang_up(response)
                    return None, times
        response.connection.close()
        assert line == b"\n"
        return text, times

    def chunk(self, start):
        """Seconds of one of the 4 passes of a prompt that begins so."""
        body = bodies()[-1]
        started = time.monotonic()
        self.ask(body | {"max_tokens": 1, "prompt": start + body["prompt"]})
        return (time.monotonic() - started) / 4

    def held(self):
        """Threads, descriptors and bytes; what is not there where there is no /proc."""
        of = Path(f"/proc/{self.process.pid}")
        if not of.exists():
            shown = subprocess.run(
                ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True
            )
            return 0, 0, int(shown.stdout) * 1024
        status = (of / "status").read_text()
        threads, rss = (int(re.search(rf"{n}:\s+(\d+)", status)[1]) for n in ("Threads", "VmRSS"))
        return threads, len(list((of / "fd").iterdir())), rss * 1024


@pytest.fixture
def server():
    server = Server()
    yield server
    server.process.kill()
    server.process.communicate()


def bodies():
    """Short and long ones, greedy and sampled, with each draft length."""
    starts = ["def gcd(a, b):", "class Stack:\n", "import os\n\n", "# Sum of a list\n"]
    found = [
        {"prompt": starts[i % 4], "max_tokens": 12 + 17 * (i % 7), "draft_len": i % 9, "seed": i}
        | ({"temperature": 0} if i % 3 else SAMPLED)
        for i in range(18)
    ]
    line = "def add(a, b):\n    return a + b\n\n\n" * (LONG // 10)
    return [*found, {"prompt": line[: 3 * LONG], "max_tokens": 20, "temperature": 0}]


@pytest.mark.long
def test_streams_that_end_and_that_are_cut_off(server):
    """J05, J06 over HTTP. A stream waits for one chunk of another's prompt and the round behind
    it; the bound of two leaves as much for a machine that does other things."""
    asked = bodies()
    alone = [server.ask(body)["text"] for body in asked]
    chunk = server.chunk("x")
    gaps, counts, levels = [], {True: 0, False: 0}, []
    lock = threading.Lock()

    def client(number, ends):
        rng = random.Random(number)
        while time.monotonic() < ends:
            i = rng.randrange(len(asked))
            cut = rng.randrange(1, 12) if rng.random() < 1 / 3 else None
            text, times = server.stream(asked[i], cut)
            assert text in (None, alone[i]), asked[i]
            with lock:
                counts[text is None] += 1
                gaps.extend(b - a for a, b in pairwise(times))

    for part in range(3):  # the first of them warms it up
        ends = time.monotonic() + SECONDS / 3
        with ThreadPoolExecutor(STREAMS) as pool:
            for done in [pool.submit(client, part * STREAMS + n, ends) for n in range(STREAMS)]:
                done.result()
        until(lambda: not server.metrics()["mlx_mtp_requests_running"])
        levels.append((*server.held(), server.metrics()))
    chunk = max(chunk, server.chunk("y"))
    print(f"{counts[False]} ended, {counts[True]} cut off; {chunk:.3f} s a chunk")
    print(f"waits of {sorted(gaps)[-5:]} s at most; {levels}")
    _, (threads, files, before, _), (*last, after, figures) = levels
    assert figures["mlx_mtp_requests_running"] == figures["mlx_mtp_requests_waiting"] == 0
    assert counts[True] > counts[False] / 4
    # A leak would be of every request, and there were hundreds.
    assert last[0] - threads < 8
    assert last[1] - files < 8
    assert after - before < 16 << 20
    assert max(gaps) < 2 * (chunk + sorted(gaps)[len(gaps) // 2])
