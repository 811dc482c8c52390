"""Advisories, the SBOM, and a package that reaches no network unless it is asked to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests import supply_chain
from tests.cli.conftest import clean_environment

ROOT = Path(__file__).parent.parent


class Advisories(BaseHTTPRequestHandler):
    """Answers like an OSV service that knows one advisory, about jinja2."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
        results = [
            {"vulns": [{"id": "TEST-1"}]} if query["package"]["name"] == "jinja2" else {} for query in queries
        ]
        raw = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def advisory_source():
    server = HTTPServer(("127.0.0.1", 0), Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_audit_lists_advisories_and_says_when_it_cannot(monkeypatch, capsys):
    with advisory_source() as source:
        monkeypatch.setenv("ADVISORY_SOURCE", source)
        assert supply_chain.main(["audit"]) == 1
    said = capsys.readouterr().out
    assert "jinja2" in said and "TEST-1" in said and "1 of them" in said
    monkeypatch.setenv("ADVISORY_SOURCE", "http://127.0.0.1:9")
    assert supply_chain.main(["audit"]) == 0
    assert "NOT checked" in capsys.readouterr().out


def test_the_bill_of_materials_is_closed(tmp_path):
    assert supply_chain.main(["sbom", str(tmp_path / "sbom.json")]) == 0
    bill = json.loads((tmp_path / "sbom.json").read_bytes())
    assert bill["bomFormat"] == "CycloneDX" and bill["specVersion"] == "1.6"
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    pinned = supply_chain.pinned(ROOT / "requirements.txt")
    names = {component["name"] for component in bill["components"]}
    assert {"torch", "numpy", "safetensors", "tokenizers", "uvicorn"} <= names <= {*pinned, *names}
    known = {*references, bill["metadata"]["component"]["bom-ref"]}
    for entry in bill["dependencies"]:
        assert entry["ref"] in known and set(entry["dependsOn"]) <= known
    torch = next(component for component in bill["components"] if component["name"] == "torch")
    assert torch["purl"].startswith("pkg:") and "/torch@2" in torch["purl"]


WATCH = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        where = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
        host = where[0] if isinstance(where, tuple) else str(where)
        if host not in ("127.0.0.1", "localhost", "::1") and not str(host).startswith("/"):
            with open(os.environ["WATCH_LOG"], "a") as log:
                log.write(f"{event} {where!r}\\n")
sys.addaudithook(watch)
"""
SESSION = """
import json, subprocess, sys, urllib.request
import birkhoff
with birkhoff.load("nano") as engine:
    assert engine.generate("Once", max_tokens=2).token_ids
    engine.lens(engine.tokenizer.encode("a b"))
server = subprocess.Popen([sys.executable, "-m", "birkhoff", "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
try:
    url = server.stdout.readline().strip()
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"content-type": "application/json"})
    assert json.load(urllib.request.urlopen(request, timeout=300))["choices"]
    assert b"<html" in urllib.request.urlopen(url + "/", timeout=300).read().lower()
finally:
    server.terminate()
    server.wait(300)
print("works")
"""


def test_nothing_reaches_the_network(tmp_path):
    """A model, a server and its page in a network namespace with nothing but a loopback device, watched as well."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    up = (
        "import fcntl, socket, struct; s = socket.socket(); "
        "fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x49))"  # SIOCSIFFLAGS: up, running, loopback
    )
    log = tmp_path / "log"
    environment = clean_environment(WATCH_LOG=str(log), HF_HUB_OFFLINE="0")
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    inner = f'"{sys.executable}" -c "{up}" && exec "{sys.executable}" -c "$SESSION"'
    done = subprocess.run(
        [unshare, "-rn", "sh", "-c", inner],
        env={**environment, "SESSION": SESSION},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "works" in done.stdout, done.stderr[-2000:]
    assert not log.exists(), log.read_text()


def test_the_watch_notices_a_connection(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    code = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 9), 0.01)\nexcept OSError: pass"
    environment = clean_environment(WATCH_LOG=str(tmp_path / "log"))
    environment["PYTHONPATH"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    assert "192.0.2.1" in (tmp_path / "log").read_text()
