"""A hub on 127.0.0.1 that answers what huggingface_hub asks for: revisions, files, ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SECRET = "hf_doNotShowThis"  # a token that must not be seen


@dataclass
class FakeHub:
    """repos: id -> revision (branch, tag or commit) -> folder. A commit is made from the folder's
    path. refuse: id -> (status, X-Error-Code). broken: files whose body ends half-way.
    asked: every request as (method, path, range)."""

    repos: dict[str, dict[str, Path]] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    refuse_files: dict[str, tuple[int, str]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, repo: str, folder: Path, *revisions: str) -> str:
        """Serves `folder` as `repo` at main or those revisions, and at its commit, returned."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        for revision in (*(revisions or ("main",)), commit):
            self.repos.setdefault(repo, {})[revision] = folder
        return commit

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> set[str]:
        """Names of files whose whole body was asked for."""
        return {
            path.rpartition("/")[2]
            for method, path, ranged in self.asked
            if method == "GET" and "/resolve/" in path and not ranged
        }

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, request.headers.get("Range", "")))
        self.tokens.append(request.headers.get("Authorization", ""))
        if path.startswith("/api/models/"):
            repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            file = ""
        else:
            repo, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
        refused = self.refuse.get(repo) or (self.refuse_files.get(repo) if file else None)
        if refused or repo not in self.repos:
            return self._fail(request, *(refused or (401, "RepoNotFound")))
        folder = self.repos[repo].get(revision)
        if folder is None:
            return self._fail(request, 404, "RevisionNotFound")
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        commit = revision if len(revision) == len(commit) else commit
        if not file:
            return self.body(request, json.dumps(self._info(repo, commit, folder)).encode())
        if not (folder / file).is_file():
            return self._fail(request, 404, "EntryNotFound")
        return self._file(request, folder / file, commit)

    def _info(self, repo: str, commit: str, folder: Path) -> dict[str, object]:
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        siblings = [
            {"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size} for p in files
        ]
        return {"id": repo, "modelId": repo, "sha": commit, "tags": [], "siblings": siblings}

    def _file(self, request: BaseHTTPRequestHandler, path: Path, commit: str) -> None:
        data = path.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        status, extra = 200, {}
        if wanted := request.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(data) - 1), len(data) - 1)
            extra["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            status, data = 206, data[int(first) : end + 1]
        request.send_response(status)
        for key, value in {
            **extra,
            "X-Repo-Commit": commit,
            "ETag": f'"{etag}"',
            "Content-Length": str(len(data)),
            "Accept-Ranges": "bytes",
        }.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            broken = path.name in self.broken and status == 200
            request.wfile.write(data[: len(data) // 2] if broken else data)
            if broken:
                request.close_connection = True

    def body(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _fail(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", f"refused: {code}")
        request.send_header("Content-Length", "0")
        request.end_headers()
