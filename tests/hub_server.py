"""A local HTTP server that answers like the Hugging Face hub, for clients with HF_ENDPOINT set to it.

It serves folders as repositories: revisions, the file tree, files with ranges. `log` has every request; `delay` slows
the sending of files down and `hold` stops it, so that a client can be killed in between; `break_once` cuts the first
answer of a file."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

BLOCK = 1 << 14


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, repos: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.log: list[tuple[str, str, str | None]] = []  # method, path, range
        self.sent: dict[str, int] = {}  # bytes of each file sent in all
        self.delay = 0.0
        self.held: set[str] = set()
        self._released = threading.Event()
        self.break_once: set[str] = set()
        self.token: str | None = None
        self.gated: set[str] = set()

    def hold(self, *names: str) -> None:
        """Send nothing of the second halves of these files until `release`."""
        self._released.clear()
        self.held = set(names)

    def release(self) -> None:
        self.held = set()
        self._released.set()

    def await_release(self) -> None:
        self._released.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str) -> str:
        tree = "".join(f"{name} {digest}\n" for name, (_, digest) in sorted(self.files(repo).items()))
        return hashlib.sha1(tree.encode()).hexdigest()

    def files(self, repo: str) -> dict[str, tuple[Path, str]]:
        root = self.repos[repo]
        return {
            path.relative_to(root).as_posix(): (path, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.log.append((self.command, path, self.headers.get("range")))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = tree or file or info
        repo = match[1] if match else ""
        if repo not in self.server.repos:
            return self._error(404, "RepoNotFound")
        if repo in self.server.gated and self.headers.get("authorization") != f"Bearer {self.server.token}":
            return self._error(403, "GatedRepo")
        commit = self.server.commit(repo)
        assert match is not None
        if match[2] not in (None, "main", commit):
            return self._error(404, "RevisionNotFound")
        files = self.server.files(repo)
        if tree:
            rows = [
                {
                    "type": "file",
                    "path": name,
                    "size": path.stat().st_size,
                    "oid": digest[:40],
                    "lfs": {"oid": digest, "size": path.stat().st_size, "pointerSize": 130},
                }
                for name, (path, digest) in files.items()
            ]
            return self._json(rows)
        if not file:
            return self._json({"id": repo, "modelId": repo, "sha": commit, "siblings": [], "private": False})
        if file[3] not in files:
            return self._error(404, "EntryNotFound", commit)
        return self._send(file[3], *files[file[3]], commit)

    def _send(self, name: str, path: Path, digest: str, commit: str) -> None:
        data = path.read_bytes()
        start, stop = 0, len(data)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if wanted:
            start, stop = int(wanted[1]), min(int(wanted[2] or stop - 1) + 1, stop)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        for key, value in {
            "Content-Length": str(stop - start),
            "ETag": f'"{digest}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.server.break_once:
            self.server.break_once.remove(name)
            stop = start + (stop - start) // 2
            self.close_connection = True
        for at in range(start, stop, BLOCK):
            if name in self.server.held and at >= len(data) // 2:
                self.server.await_release()
            block = data[at : min(at + BLOCK, stop)]
            try:
                self.wfile.write(block)
            except OSError:
                self.close_connection = True
                return
            self.server.sent[name] = self.server.sent.get(name, 0) + len(block)
            time.sleep(self.server.delay)

    def _json(self, value: object) -> None:
        self._body(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, commit: str = "") -> None:
        self._body(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": commit})

    def _body(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server(repos: dict[str, Path]) -> Iterator[HubServer]:
    """Run a server in a thread."""
    server = HubServer(repos)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prepare_cache(cache: Path, repo: str) -> Path:
    """The snapshot folder of `repo` in a hub cache, to write files to."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(repo.encode()).hexdigest()
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    return folder / "snapshots" / commit
