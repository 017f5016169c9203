"""What the Hub answers to one who uploads, on loopback: the commits are kept."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Uploads:
    """Repositories by name, as {file: bytes}. A token other than "good" is refused."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.fail_commits = False
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append(f"{self.command} {self.path}")
                status, answer = hub.answer(self.command, self.path, self.headers, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-Repo-Commit", "0" * 40)
                self.send_header("ETag", '"x"')
                if status == 404:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path = path.split("?")[0]
        if path.startswith("/store/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if headers.get("Authorization") != "Bearer good":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            told = json.loads(body)
            name = "/".join(filter(None, [told.get("organization"), told["name"]]))
            self.repositories.setdefault(name, {})
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            put = [{**one, "actions": {"upload": {"href": f"{self.url}/store/{one['oid']}"}}} for one in wanted]
            return 200, {"transfer": "basic", "objects": put}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": mode_of(one["path"]), "shouldIgnore": False} for one in files]
            return 200, {"files": modes}
        if "/commit/" in path:
            return self.commit(path.split("/api/models/")[1].split("/commit/")[0], body)
        for name, files in self.repositories.items():
            if path == f"/api/models/{name}" or path.startswith(f"/api/models/{name}/revision/"):
                return 200, {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]}
            if path.startswith(f"/api/models/{name}/tree/"):
                entries = [{"type": "file", "path": file, "size": len(data)} for file, data in files.items()]
                return 200, [{**entry, "oid": "0"} for entry in entries]
            if path.startswith(f"/{name}/resolve/"):
                found = files.get(path.split("/resolve/")[1].partition("/")[2])
                return (404, {"error": "Entry not found"}) if found is None else (200, found)
        return 404, {"error": f"nothing at {path}"}

    def commit(self, name: str, body: bytes) -> tuple[int, Any]:
        if self.fail_commits:
            return 403, {"error": "over the quota"}
        files = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/0", "commitOid": "0" * 40, "success": True}


def mode_of(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"
