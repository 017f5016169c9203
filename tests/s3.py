"""A real S3 server on loopback, in a thread of the test: it logs each request, and fails, waits or cuts as told."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import pyarrow.fs as pafs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>by the test</Message></Error>'
_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Request:
    """What a client asked for. `kind`: GET, HEAD, PUT, DELETE, LIST, COPY, CREATE (of a multipart upload), PART,
    COMPLETE, ABORT, or DELETES (many at once)."""

    kind: str
    key: str
    sent: int
    """Bytes of the answer's body."""
    status: int
    begun: float
    ended: float


@dataclass
class Fault:
    """Applies to the next `times` requests of these kinds whose key matches, after `skip` of them."""

    kinds: tuple[str, ...]
    key: str = ""
    times: float = float("inf")
    skip: int = 0
    status: int = 0
    wait: float = 0.0
    cut: bool = False
    """Send the headers and half of the body, then close the connection."""
    before: Callable[[], None] = lambda: None
    """Called when half of the request has come; an error in it drops the request."""
    after: Callable[[], None] = lambda: None
    """Called when the request has taken effect, before it is answered."""
    hits: int = field(default=0, init=False)

    def meets(self, kind: str, key: str) -> bool:
        if kind not in self.kinds or re.search(self.key, key) is None:
            return False
        self.hits += 1
        return self.skip < self.hits <= self.skip + self.times


class S3Server:
    """Serves until the process ends. `late`: GET, HEAD and LIST see a new object so many seconds after its PUT."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Silent)
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        self._born: dict[str, float] = {}
        self._lock = threading.Lock()
        self.reset()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.late = 0.0

    def filesystem(self, **settings: Any) -> pafs.S3FileSystem:
        known = {"access_key": "test", "secret_key": "test", "region": "us-east-1", "scheme": "http"}
        return pafs.S3FileSystem(**{**known, "endpoint_override": self.endpoint, **settings})

    def uri(self, path: str) -> str:
        return f"s3://test:test@{path}?scheme=http&region=us-east-1&endpoint_override={quote(self.endpoint)}"

    def fail(self, *kinds: str, **settings: Any) -> Fault:
        fault = Fault(kinds, **settings)
        self.faults.append(fault)
        return fault

    def seen(self, *kinds: str, key: str = "") -> list[Request]:
        """The logged requests of these kinds whose key matches, in the order they were answered."""
        return [one for one in self.requests if one.kind in kinds and re.search(key, one.key)]

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        kind, key = _what(environ)
        begun = time.monotonic()
        with self._lock:
            faults = [fault for fault in self.faults if fault.meets(kind, key)]
        time.sleep(sum(fault.wait for fault in faults))
        status = next((fault.status for fault in faults if fault.status), 0)
        for fault in faults:
            fault.before()
        if not status and kind in ("GET", "HEAD") and begun - self._born.get(key, 0.0) < self.late:
            status = 404
        if status:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            headers, body = [("Content-Type", "application/xml")], _ERROR.format(_CODES[status]).encode()
        else:
            answered: list[Any] = []
            body = b"".join(self._app(environ, lambda *given: answered.extend(given[:2])))
            status, headers = int(answered[0].split()[0]), answered[1]
        for fault in faults:
            fault.after()
        if kind in ("PUT", "COMPLETE", "COPY") and status < 300 and "/" in key:
            self._born.setdefault(key, time.monotonic())
        if kind == "DELETE":
            self._born.pop(key, None)
        if kind == "LIST" and self.late:
            body = self._hide_young(body, begun)
        with self._lock:
            self.requests.append(Request(kind, key, len(body), status, begun, time.monotonic()))
        named = [(name, value) for name, value in headers if kind == "HEAD" or name.lower() != "content-length"]
        if kind != "HEAD":
            named.append(("Content-Length", str(len(body))))
        start_response(f"{status} said", named)
        if any(fault.cut for fault in faults):
            return _half(body, environ["werkzeug.socket"])
        return [b"" if kind == "HEAD" else body]

    def _hide_young(self, body: bytes, now: float) -> bytes:
        text = body.decode()
        bucket = re.search("<Name>(.*?)</Name>", text)
        young = {key for key, born in self._born.items() if now - born < self.late}

        def shown(match: re.Match[str]) -> str:
            path = f"{bucket and bucket[1]}/{match[1]}".rstrip("/")
            inside = {key for key in self._born if f"{key}/".startswith(f"{path}/")}
            return "" if inside and inside <= young else match[0]

        text = re.sub(r"<Contents>\s*<Key>(.*?)</Key>.*?</Contents>", shown, text, flags=re.DOTALL)
        text = re.sub(r"<CommonPrefixes>\s*<Prefix>(.*?)</Prefix>\s*</CommonPrefixes>", shown, text, flags=re.DOTALL)
        return text.encode()


def _what(environ: dict[str, Any]) -> tuple[str, str]:
    """The kind of a request, and `bucket/key`."""
    method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    key = unquote(environ["PATH_INFO"]).strip("/")
    if method == "GET" and ("list-type" in query or "prefix" in query):
        return "LIST", f"{key}/{query.get('prefix', [''])[0]}".rstrip("/")
    if method == "GET" and "uploads" in query:
        return "LIST-UPLOADS", key
    if method == "POST":
        return "CREATE" if "uploads" in query else "COMPLETE" if "uploadId" in query else "DELETES", key
    if "uploadId" in query:
        return {"PUT": "PART", "DELETE": "ABORT"}[method], key
    if "HTTP_X_AMZ_COPY_SOURCE" in environ:
        return "COPY", key
    return method, key + ("/" if environ["PATH_INFO"].endswith("/") and "/" in key else "")


def _half(body: bytes, connection: socket.socket) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    connection.shutdown(socket.SHUT_RDWR)


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass
