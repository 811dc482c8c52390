"""The API reference: one command, no network, and a page for every public name, option and route."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import birkhoff
from birkhoff import EngineOptions, SamplingParams
from birkhoff.server.app import openapi_document
from tests.cli.conftest import clean_environment

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs/coming-from.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. Sockets fail while it is built."""
    out = tmp_path_factory.mktemp("reference") / "site"
    blocked = out.parent / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import socket\n\ndef refuse(*_):\n    raise OSError('no network')\n\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
    )
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{blocked}:{ROOT}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/reference.py"), str(out)],
        capture_output=True,
        text=True,
        cwd=out.parent,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return out


def text_of(site: Path, name: str) -> str:
    page = (site / "reference" / f"{name}.html").read_text()
    return re.sub(r"<[^>]+>", "", page)


def test_every_public_name_has_a_page(site):
    for name in birkhoff.__all__:
        assert f"birkhoff.{name}" in text_of(site, name), name
    engine = text_of(site, "Engine")
    methods = [name for name in dir(birkhoff.Engine) if not name.startswith("_")]
    assert len(methods) > 40 and all(name in engine for name in methods)
    assert "token ids or chat messages" in engine  # a docstring, inherited
    assert "'delta'" in engine.replace("&#39;", "'").replace("’", "'")  # a default, with its quotes


def test_every_option_and_every_route_has_a_page(site):
    for kind in (EngineOptions, SamplingParams):
        for each in fields(kind):
            assert "Default:" in text_of(site, f"option.{kind.__name__}.{each.name}")
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("route.*.html")}
    operations = [(method, path) for path, each in openapi_document()["paths"].items() for method in each]
    assert len(pages) == len(operations) > 40
    for method, path in operations:
        heading = f"{method.upper()} {path}"
        assert any(heading in re.sub(r"<[^>]+>", "", page) for page in pages.values()), heading


def test_pages_load_nothing_from_elsewhere(site):
    """Scripts, styles and images are files of the site; only links that a reader clicks may leave it."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [source for source in loaded if "//" in source], page
    assert (site / "search.html").exists() and "capture" in (site / "searchindex.js").read_text()


def test_forms_of_the_table_are_lines_that_run():
    """What stands on the right of "coming from" is in the programs of that page, which another test runs."""
    text = GUIDE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    rows = [line for line in text.splitlines() if line.startswith("| `") or re.match(r"\| (two|a) ", line)]
    ours = [re.fullmatch(r"\| .* \| `([^`]+)` \|", line) for line in rows]
    assert len(rows) > 30 and all(ours)
    assert not [match[1] for match in ours if match[1] not in code]


@pytest.mark.parametrize("name", [name for name in birkhoff.__all__ if callable(getattr(birkhoff, name))])
def test_exported_names_have_a_docstring_of_their_own(name):
    text = getattr(birkhoff, name).__doc__ or ""
    assert text and not text.startswith(f"{name}("), "a dataclass without a docstring gets its signature"
