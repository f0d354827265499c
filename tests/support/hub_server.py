"""Stand-in for the HTTP interface of the Hugging Face hub on 127.0.0.1, as far as uploads and downloads use it."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
"""The one token that may write, and read what is private."""


@dataclass
class Repository:
    """Files of the commits of one repository."""

    private: bool
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        name = hashlib.sha1(f"{message}{len(self.commits)}".encode()).hexdigest()
        self.commits[name] = files
        self.messages.append(message)
        return name


@dataclass
class Hub:
    """A hub with its repositories, and where it listens."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    endpoint: str = ""

    def add(self, name: str, private: bool = False) -> Repository:
        self.repositories[name] = Repository(private)
        self.repositories[name].commit({}, "initial commit")
        return self.repositories[name]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens within the ``with`` block."""
    hub = Hub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._path()
        if path == "/api/validate-yaml":
            return self._json(200, {"errors": [], "warnings": []})
        if not self._known:
            return self._json(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path)
        if found is None or found[1] not in self.of.repositories:
            return self._missing()
        if found[2] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._json(200, {"files": files})
        return self._commit(self.of.repositories[found[1]], [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.of.repositories:
            return self._json(409, {"error": "exists", "url": f"{self.of.endpoint}/{name}"})
        if name.startswith("others/"):
            return self._json(403, {"error": "You don't have the rights to create a model under this namespace"})
        self.of.add(name, bool(asked.get("private") or asked.get("visibility") == "private"))
        return self._json(200, {"url": f"{self.of.endpoint}/{name}", "name": name})

    def _commit(self, repository: Repository, lines: list[dict[str, Any]]) -> None:
        files, message = dict(repository.commits[repository.head]), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        name = repository.commit(files, message)
        self._json(200, {"success": True, "commitOid": name, "commitUrl": f"{self.of.endpoint}/x/y/commit/{name}"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._path()
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+)(?:/)?)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name = api[1] if api else file[1] if file else ""
        repository = self.of.repositories.get(name)
        if repository is None or (repository.private and not self._known):
            return self._missing()
        if repository.gated:
            return self._json(403, {"error": "Access to this model is restricted"}, "GatedRepo")
        revision = (api[3] if api else file[2] if file else None) or "main"
        commit = repository.head if revision == "main" else revision
        if commit not in repository.commits:
            return self._json(404, {"error": f"Invalid rev id: {revision}"}, "RevisionNotFound")
        files = repository.commits[commit]
        if file:
            return self._file(commit, files.get(file[3]))
        if api and api[2] == "tree":
            return self._json(200, [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ])  # fmt: skip
        return self._json(200, {
            "_id": name, "id": name, "modelId": name, "sha": commit, "private": repository.private,
            "gated": repository.gated, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": path, "size": len(content)} for path, content in files.items()],
        })  # fmt: skip

    def _file(self, commit: str, content: bytes | None) -> None:
        if content is None:
            return self._json(404, {"error": "Entry not found"}, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        return self._send(200, content, headers)

    def _missing(self) -> None:
        self._json(401, {"error": "Repository not found"}, "RepoNotFound")

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.of.requests.append((self.command, path))
        return path

    def _json(self, status: int, content: Any, code: str = "") -> None:
        body = json.dumps(content).encode()
        headers = {"Content-Type": "application/json", **({"X-Error-Code": code} if code else {})}
        self._send(status, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
