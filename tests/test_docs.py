"""Every fenced command and snippet of README.md and docs/*.md runs as written.

A fence names its language: `sh` and `python` are run in document order in one folder and one namespace per document,
`json` is sent to a server, `toml` is read as settings, `text` is a picture. HTML comments before a fence, which readers
do not see, say what it needs:

    <!-- setup: CODE -->     run before it, in its language: files and names the reader has
    <!-- needs: REASON -->   not run, because of REASON; its commands must still exist with their options
    <!-- full -->            run by `make test-all` only
    <!-- post: ROUTE -->     where a `json` fence is sent, as fields of a small request

Commands that start with `birkhoff` run in this process, which saves their imports; the rest runs in bash. Addresses of
a server on port 8000 are those of a server started here."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from birkhoff.api.engine import Engine
from birkhoff.cli.config_file import read_defaults
from birkhoff.cli.main import run
from birkhoff.cli.verbs import app
from birkhoff.cli.vllm_flags import RENAMED, REPLACED_SWITCHES, REPLACED_VALUES
from tests.cli.conftest import COMMAND, clean_environment
from tests.server.conftest import Served, serving
from tests.sizes import FULL

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LANGUAGES = {"sh", "python", "json", "toml", "text"}
NEEDS = {
    "a GPU",
    "real weights",
    "hours",
    "a container engine",
    "a Ray cluster",
    "the network",
    "the source tree",
}
FOREIGN = {
    "no",
    "no-deps",
    "force-reinstall",
    "gpus",
    "now",
    "rm",
    "porcelain",
    "show-toplevel",
    "error-unmatch",
    "untracked-files",
    "short",
    "worker-cls",
    "scheduler-cls",
    "middleware",
    "no-async-scheduling",
    "additional-config",
}  # options of other programs that documents name
FENCE = re.compile(r"(?P<notes>(?:<!--.*?-->\s*\n)*)^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.S | re.M)
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|#.*")
NOTE = re.compile(r"<!--\s*(setup|needs|full|post)(?::[ \t]*(.*?))?\s*-->", re.S)


@dataclass
class Fence:
    """One fenced block with the notes before it."""

    document: str
    line: int
    language: str
    body: str
    notes: dict[str, str]


def fences(document: str) -> list[Fence]:
    text = (ROOT / document).read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text[: match.start("body")].count("\n") + 1
        notes = {note[1]: note[2] or "" for note in NOTE.finditer(match["notes"])}
        found.append(Fence(document, line, match["language"], match["body"], notes))
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.M)), f"{document}: a fence was not recognised"
    return found


def commands(fence: Fence) -> list[str]:
    """The logical lines of a shell fence, without comment lines; a here-document belongs to its command."""
    lines, current, end = [], "", ""
    for line in fence.body.splitlines():
        current += line + "\n"
        if end:
            end = "" if line == end else end
        elif here := re.search(r"<<'?(\w+)'?", line):
            end = here[1]
        elif line.endswith("\\") or QUOTED.sub("", current).count("'") % 2:
            continue
        if not end:
            lines.append(current)
            current = ""
    assert not current, f"{fence.document}:{fence.line}: an unfinished command"
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def click_group() -> Any:
    import typer.main

    return typer.main.get_command(app)


def all_options(command: Any) -> set[str]:
    own = {opt for parameter in command.params for opt in (*parameter.opts, *parameter.secondary_opts)}
    return (
        own
        | {"--help", "-h"}
        | {o for c in getattr(command, "commands", {}).values() for o in all_options(c)}
    )


def check_command(words: list[str]) -> None:
    """The verb and all options of a `birkhoff` command exist."""
    command, rest = click_group(), words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    for word in rest:
        if word.startswith("--"):
            assert word.split("=")[0] in all_options(command) | {"--config"}, (words, word)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with serving(
        tmp_path_factory.mktemp("documents"), "--sae", "features=nano", "--sae-full", "full=nano"
    ) as it:
        yield it


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with the programs a reader has after `make demo`."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (("birkhoff", "-m birkhoff"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_command(line: str, programs: Path, server_url: Any) -> None:
    line = re.sub(r"(?:localhost|127\.0\.0\.1):8000", lambda _: server_url().removeprefix("http://"), line)
    words = shlex.split(line.replace("\\\n", ""), comments=True)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], check=True, capture_output=True, cwd=ROOT)
    elif words[:2] == ["birkhoff", "serve"]:
        command = [*COMMAND, *words[1:], "--port", "0"]
        with Path("log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=clean_environment())
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http"), (line, Path("log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, line
        process.stdout.close()
    elif words[0] == "birkhoff" and not re.search(r"[|<>&;]", QUOTED.sub("", line)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the libraries, as in the command
            assert run(words[1:]) == 0, line
    else:
        path = f"{programs}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", line],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=clean_environment(PATH=path),
            timeout=300,
        )
        assert done.returncode == 0, (line, done.stderr)
        if words[0] == "curl":
            assert "error" not in json.loads(done.stdout), (line, done.stdout)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if fences(name)])
def test_fences_run(document, tmp_path, monkeypatch, programs, request):
    monkeypatch.chdir(tmp_path)
    nothing = open(os.devnull)  # noqa: SIM115
    request.addfinalizer(nothing.close)
    monkeypatch.setattr(sys, "stdin", nothing)
    namespace: dict[str, Any] = {}
    group = click_group()

    def server_url() -> str:
        return str(request.getfixturevalue("server").url)

    try:
        for fence in fences(document):
            where = f"{document}:{fence.line}"
            assert fence.language in LANGUAGES, f"{where}: name the language, one of {LANGUAGES}"
            assert set(fence.notes) <= {"setup", "needs", "full", "post"}
            if fence.language == "text":
                continue
            skipped = "needs" in fence.notes or ("full" in fence.notes and not FULL)
            assert fence.notes.get("needs", "a GPU") in NEEDS, f"{where}: needs one of {NEEDS}"
            if fence.language == "sh":
                if "setup" in fence.notes and not skipped:
                    run_command(fence.notes["setup"], programs, server_url)
                for line in commands(fence):
                    if line.startswith("birkhoff "):
                        check_command(shlex.split(line.replace("\\\n", ""), comments=True))
                    if not skipped:
                        run_command(line, programs, server_url)
            elif fence.language == "python":
                code = compile(fence.body.replace("http://127.0.0.1:8000", "{URL}"), where, "exec")
                if not skipped:
                    exec(compile(fence.notes.get("setup", ""), where, "exec"), namespace)
                    if "http://127.0.0.1:8000" in fence.body:
                        code = compile(
                            fence.body.replace("http://127.0.0.1:8000", server_url()), where, "exec"
                        )
                    exec(code, namespace)
            elif fence.language == "json":
                fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | json.loads(
                    fence.body
                )
                answer = request.getfixturevalue("server").post(fence.notes["post"], fields)
                assert answer.status_code == 200, (where, answer.text)
            else:
                (tmp_path / "settings.toml").write_text(fence.body)
                read_defaults(tmp_path / "settings.toml", group)
    finally:
        for value in namespace.values():
            if isinstance(value, Engine):
                value.close()


def test_documents_and_messages_name_only_options_that_exist():
    known = {option.removeprefix("--") for option in all_options(click_group())} | FOREIGN
    translated = {*RENAMED, *REPLACED_SWITCHES, *REPLACED_VALUES}  # accepted, though no options of ours
    known |= {option.removeprefix("--").partition(".")[0] for option in translated}
    texts = {name: (ROOT / name).read_text() for name in (*DOCUMENTS, "CONTRIBUTING.md")}
    for path in (ROOT / "birkhoff").rglob("*.py"):  # of code only sentences, such as messages and help texts
        texts[str(path.relative_to(ROOT))] = " ".join(
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
        )
    wrong = {
        f"{name}: --{option}"
        for name, text in texts.items()
        for option in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", text)
        if option not in known and name != "docs/log.md"
    }
    assert not wrong


def test_every_measurement_is_in_the_table_of_commands():
    page = (ROOT / "docs/cli.md").read_text()
    assert not [
        name for name in click_group().commands["bench"].commands if f"| `bench {name}` |" not in page
    ]


def _without_fences(name: str) -> str:
    return re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)


def _anchors(name: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _without_fences(name), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def test_relative_links_lead_to_files_and_headings():
    pages = [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md"]
    broken = []
    links = 0
    for name in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", _without_fences(name)):
            if re.match(r"https?:|mailto:", link):
                continue
            links += 1
            path, _, anchor = link.partition("#")
            target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
            if not target.exists():
                broken.append(f"{name}: {link}")
            elif anchor and anchor not in _anchors(str(target.relative_to(ROOT))):
                broken.append(f"{name}: {link} has no such heading")
    assert links > 100 and not broken, broken


def test_documents_name_only_files_that_exist():
    """Files in code font with a folder, such as `hooks/sites.py`: relative to the repository, the package or a room."""
    bases = [ROOT, ROOT / "birkhoff", *(path for path in (ROOT / "birkhoff").iterdir() if path.is_dir())]
    pattern = re.compile(
        r"`([\w.-]+(?:/[\w.-]+)*/[\w.-]+\.(?:py|md|js|css|cu|cuh|h|toml|jsonl))(?::[\w.]+)?`"
    )
    pages = [name for name in (*DOCUMENTS, "CONTRIBUTING.md") if name != "docs/log.md"]
    named = {(name, path) for name in pages for path in pattern.findall((ROOT / name).read_text())}
    missing = [pair for pair in sorted(named) if not any((base / pair[1]).exists() for base in bases)]
    assert len(named) > 50 and not missing, missing
