"""The part of the Hub's API that downloads use, on loopback, with what can go wrong with it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants


class Hub:
    """Repositories with commits and branches.

    `fault(where, what, times)` lets the next `times` requests whose path holds `where` go wrong: a status such as 503,
    or one of "cut" (the body ends at 60 %, whatever was asked for), "cut here" (each reply at 60 % of what is left),
    "slow" (the body takes 1 s), "hang up" (no reply), "longer", "other bytes", "login page" or "not JSON".
    """

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.bare = False
        """A mirror that lists names alone, without sizes and digests."""
        self.log: list[tuple[str, str]] = []
        self._faults: list[list[Any]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                path = unquote(self.path.split("?")[0])
                hub.log.append((self.command, path))
                hub.answer(self, path, hub.next_fault(path))

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Make it the branch's newest commit."""
        commit = hashlib.sha1(repr((repo, len(self.commits))).encode()).hexdigest()
        self.commits[commit] = files
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def fault(self, where: str, what: Any, times: int = 10**9) -> None:
        self._faults.append([where, what, times])

    def heal(self) -> None:
        self._faults.clear()

    def next_fault(self, path: str) -> Any:
        for fault in self._faults:
            if fault[0] in path and fault[2]:
                fault[2] -= 1
                return fault[1]
        return None

    def bodies(self) -> list[str]:
        """Files that were sent, or begun."""
        return [path.rsplit("/", 1)[1] for method, path in self.log if method == "GET" and "/resolve/" in path]

    def asked(self) -> int:
        """How often somebody asked what a repository holds."""
        return sum(path.startswith("/api/models/") for _, path in self.log)

    def answer(self, to: BaseHTTPRequestHandler, path: str, fault: Any) -> None:
        if fault == "hang up":
            to.close_connection = True
            to.connection.close()
        elif isinstance(fault, int):
            reply(to, fault, b"{}", {"Retry-After": "0"})
        elif fault == "login page":
            reply(to, 200, b"<html>Please log in</html>", {"X-Repo-Commit": "0" * 40, "ETag": '"x"'})
        elif fault == "not JSON":
            reply(to, 200, b"{", {})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.tell(to, found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            self.send(to, found[1], found[2], found[3], fault)
        else:
            reply(to, 404, b"{}", {})

    def tell(self, to: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        if repo in self.gated:
            return reply(to, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if repo not in self.branches:
            return reply(to, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = self.branches[repo].get(revision, revision)
        if commit not in self.commits:
            return reply(to, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = [self.listed(name, data) for name, data in self.commits[commit].items()]
        return reply(to, 200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), {})

    def listed(self, name: str, data: bytes) -> dict[str, Any]:
        if self.bare:
            return {"rfilename": name}
        large = {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 1}} if is_large(name) else {}
        return {"rfilename": name, "size": len(data), "blobId": git_id(data), **large}

    def send(self, to: BaseHTTPRequestHandler, repo: str, commit: str, name: str, fault: Any) -> None:
        data = self.commits[commit].get(name)
        if data is None:
            return reply(to, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        etag = sha256(data) if is_large(name) else git_id(data)
        about = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if fault == "other bytes":
            data = bytes(byte ^ 1 for byte in data)
        if fault == "longer":
            data += b"more"
        asked = re.fullmatch(r"bytes=(\d+)-", to.headers.get("Range", ""))
        status = 200
        if asked and fault != "cut":
            status, data = 206, data[int(asked[1]) :]
        if fault == "slow":
            time.sleep(1)
        ends = len(data) * 6 // 10 if fault in ("cut", "cut here") else len(data)
        return reply(to, status, data, about, ends=ends)


def reply(
    to: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], ends: int | None = None
) -> None:
    to.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(data))}.items():
        to.send_header(name, value)
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(data[:ends])
    if ends is not None and ends < len(data):
        to.wfile.flush()
        to.close_connection = True
        to.connection.shutdown(2)


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pth"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: Any) -> Iterator[Hub]:
    """A Hub that this process, and those that it forks, take for the real one; with a cache of their own."""
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    use_cache(monkeypatch, cache)
    yield hub
    hub.close()


def use_cache(monkeypatch: pytest.MonkeyPatch, cache: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
