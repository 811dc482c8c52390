"""Hub names, the hub cache and downloads, against a local server that answers like the hub.

`huggingface_hub` reads its settings at import, so each check runs in its own process with HF_ENDPOINT and HF_HOME."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from birkhoff.hf_hub import RepoPath, resolve
from tests.capture.test_faults import small_disk  # noqa: F401 (a fixture)
from tests.hub_server import HubServer, hub_server

ROOT = Path(__file__).parent.parent
PRELUDE = "import json, sys\nfrom birkhoff.hf_hub import *\nfrom birkhoff.errors import *\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "tiny"
    synth(path, "tiny", shard_bytes=300_000)
    return path


@pytest.fixture
def server(tiny):
    with hub_server({"org/tiny": tiny}) as running:
        yield running


def environment(server: HubServer | None, home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "BIRKHOFF_"))}
    endpoint = server.url if server else "http://127.0.0.1:9"  # nothing listens on the discard port
    return {
        **kept,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def python(code: str, server: HubServer | None, home: Path, **more: str) -> str:
    """What a script prints to stdout."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=environment(server, home, **more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(code: str, server: HubServer | None, home: Path, **more: str) -> str:
    return python(
        f"try:\n    {code}\nexcept BirkhoffError as error:\n    print(error.code, error)",
        server,
        home,
        **more,
    )


PULL = "repo = RemoteRepo.open(RepoPath.parse('org/tiny')); repo.download(select_files(repo))"
part = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.]{0,6}[A-Za-z0-9_])?", fullmatch=True)


@given(st.lists(part, min_size=2, max_size=5), st.none() | part)
def test_a_name_is_read_and_written_back(parts, revision):
    text = "/".join(parts) + (f"@{revision}" if revision and revision != "main" else "")
    where = RepoPath.parse(text)
    assert where is not None and str(where) == text
    assert where.repo == "/".join(parts[:2]) and where.inside == "/".join(parts[2:])
    assert where.revision == (revision or "main")


@pytest.mark.parametrize(
    "text",
    [
        "nano",
        "/org/name",
        "./org/name",
        "~/name",
        "org/",
        "org/a--b",
        "org/na me",
        "org/name/../x",
        "org/name@",
        "",
    ],
)
def test_what_is_no_hub_name_stays_a_path(text):
    assert RepoPath.parse(text) is None


def test_one_revision_only(tmp_path):
    assert RepoPath.parse("org/name@v1", "v1") == RepoPath("org/name", "", "v1")
    with pytest.raises(OptionError, match="Give one of them"):
        RepoPath.parse("org/name@v1", "v2")
    with pytest.raises(OptionError, match="is a local path"):
        resolve(tmp_path, revision="v1")


def test_a_local_path_wins(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    assert resolve("nowhere") == Path("nowhere")


def test_a_name_resolves_only_after_a_download_and_without_network(server, tiny, tmp_path):
    output = refusal("resolve('org/tiny')", server, tmp_path)
    assert output.startswith("hub ") and "birkhoff pull org/tiny" in output and str(tmp_path) in output
    assert server.log == [], "resolve does not use the network"
    python(PULL, server, tmp_path)
    # the endpoint is gone: the cache alone answers
    snapshot = Path(python("print(resolve('org/tiny'))", None, tmp_path).strip())
    assert {f.name: f.read_bytes() for f in snapshot.iterdir()} == {
        f.name: f.read_bytes() for f in tiny.iterdir()
    }
    commit = server.commit("org/tiny")
    assert snapshot.name == commit
    code = f"print(resolve('org/tiny@{commit}')); print(resolve('org/tiny/config.json', revision='main'))"
    assert python(code, None, tmp_path).split() == [str(snapshot), str(snapshot / "config.json")]
    output = refusal("resolve('org/tiny/layer_3/x')", None, tmp_path)
    assert "has no layer_3/x" in output and "birkhoff pull org/tiny/layer_3/x" in output


def test_a_second_download_fetches_nothing(server, tmp_path):
    seen = python(
        "seen = []\nrepo = RemoteRepo.open(RepoPath.parse('org/tiny')); files = select_files(repo)\n"
        "repo.download(files, lambda *at: seen.append(at)); print(json.dumps(seen))",
        server,
        tmp_path,
    )
    progress = json.loads(seen)
    total = sum(path.stat().st_size for path in server.repos["org/tiny"].iterdir())
    assert progress[-1] == [total, total] and progress == sorted(progress)
    before = dict(server.sent)
    python(PULL + "; assert not repo.missing(repo.files)", server, tmp_path)
    assert server.sent == before


def test_a_broken_connection_continues_where_it_broke(tmp_path):
    """`huggingface_hub` writes blocks of 10 MiB, and continues after the last whole one."""
    (tmp_path / "repo").mkdir()
    data = os.urandom(1 << 20) * 24
    (tmp_path / "repo/data.bin").write_bytes(data)
    with hub_server({"org/big": tmp_path / "repo"}) as server:
        server.break_once = {"data.bin"}
        code = "repo = RemoteRepo.open(RepoPath.parse('org/big')); print(repo.download(['data.bin']))"
        snapshot = Path(python(code, server, tmp_path / "home").strip())
        assert (snapshot / "data.bin").read_bytes() == data
        ranges = [asked for _, path, asked in server.log if path.endswith("data.bin") and asked]
        assert ranges == [f"bytes={10 << 20}-"] and server.sent["data.bin"] == (12 + 14) << 20


def test_a_killed_download_is_not_a_model_and_is_resumed(server, tiny, tmp_path):
    held = server.files("org/tiny")
    name = max(held, key=lambda name: held[name][0].stat().st_size)
    server.hold(name)
    command = [sys.executable, "-m", "birkhoff", "pull", "org/tiny"]
    killed = subprocess.Popen(command, env=environment(server, tmp_path), stderr=subprocess.DEVNULL)
    blobs = tmp_path / "hub/models--org--tiny/blobs"
    whole: set[str] = set()
    while len(whole) < len(held) - 1 or not any(blobs.glob("*.incomplete")):
        assert killed.poll() is None, "it ended, although the server holds a file"
        time.sleep(0.02)
        whole = {path.name for path in blobs.glob("*") if path.suffix != ".incomplete"}
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    server.release()
    output = refusal("resolve('org/tiny')", None, tmp_path)
    assert (
        "is not complete" in output and "shards are missing" in output and "birkhoff pull org/tiny" in output
    )
    server.sent.clear()
    subprocess.run(command, env=environment(server, tmp_path), check=True, capture_output=True, timeout=300)
    digests = {digest: name for name, (_, digest) in server.files("org/tiny").items()}
    assert not any(server.sent.get(digests[name], 0) > 1 << 17 for name in whole), "complete files are kept"
    assert not list(blobs.glob("*.incomplete")), "what the killed process left is removed"
    snapshot = Path(python("print(resolve('org/tiny'))", None, tmp_path).strip())
    assert all((snapshot / f.name).read_bytes() == f.read_bytes() for f in tiny.iterdir())


def test_refusals_say_what_to_do(server, tmp_path):
    def opened(name: str, server: HubServer | None = server, **more: str) -> str:
        return refusal(f"RemoteRepo.open(RepoPath.parse({name!r}))", server, tmp_path, **more)

    assert "has no model org/other" in opened("org/other")
    assert "has no revision 'v2'" in opened("org/tiny@v2")
    assert "HF_HUB_OFFLINE is set" in opened("org/tiny", HF_HUB_OFFLINE="1")
    assert "Check the network" in opened("org/tiny", None)
    server.gated, server.token = {"org/tiny"}, "hf_secret"
    assert "is gated" in opened("org/tiny") and "HF_TOKEN" in opened("org/tiny")
    assert opened("org/tiny", HF_TOKEN="hf_secret") == ""


def test_the_disk_is_checked_before_a_download(server, tmp_path):
    code = (
        "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**30, 2**30, 2**28)\n"
        "repo = RemoteRepo.open(RepoPath.parse('org/tiny'))\n"
        "try: repo.check_disk(repo.files)\nexcept CapacityError as error: print(error)"
    )
    output = python(code, server, tmp_path)
    assert "more on disk" in output and "256.00 MiB are free" in output and "HF_HUB_CACHE" in output


def test_a_disk_that_runs_full_during_a_download_is_named_and_the_rest_is_fetched_later(
    server,
    tiny,
    small_disk,  # noqa: F811
    tmp_path,
):
    cache = {"HF_HUB_CACHE": str(small_disk), "HF_XET_CACHE": str(tmp_path / "xet")}
    output = refusal(PULL, server, tmp_path, **cache)
    assert output.startswith("disk-full org/tiny needs ") and f"are free in {small_disk}" in output
    assert "HF_HUB_CACHE=/path" in output and "The same command continues" in output
    assert "is not complete" in refusal("resolve('org/tiny')", None, tmp_path, **cache)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    python(PULL, server, tmp_path, **cache)
    snapshot = Path(python("print(resolve('org/tiny'))", None, tmp_path, **cache).strip())
    assert all((snapshot / f.name).read_bytes() == f.read_bytes() for f in tiny.iterdir())


def test_files_of_a_model_are_selected(tiny, tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    for file in tiny.iterdir():
        (repo / file.name).write_bytes(file.read_bytes())
    for name in (
        "consolidated.safetensors",
        "original/weights.pth",
        "onnx/model.onnx",
        "encoding/encoding.py",
        "q.gguf",
    ):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_bytes(b"x")
    (tmp_path / "saes/layer_1").mkdir(parents=True)
    (tmp_path / "saes/layer_1/params.npz").write_bytes(b"x")
    with hub_server({"org/model": repo, "org/saes": tmp_path / "saes"}) as server:
        code = (
            "def pick(name, *rest): return select_files(RemoteRepo.open(RepoPath.parse(name)), *rest)\n"
            "print(json.dumps([pick('org/model'), pick('org/model/q.gguf'), pick('org/model', ['*.json'], ['tok*']), "
            "pick('org/saes/layer_1')]))\n"
            "try: pick('org/saes')\nexcept HubError as error: print(error)\n"
            "try: pick('org/saes', ['*.bin'])\nexcept HubError as error: print(error)\n"
        )
        lines = python(code, server, tmp_path / "home").splitlines()
    model, gguf, chosen, inside = json.loads(lines[0])
    assert set(model) == {f.name for f in tiny.iterdir()} | {"encoding/encoding.py"}
    assert gguf == ["q.gguf"] and inside == ["layer_1/params.npz"]
    assert set(chosen) == {"config.json", "model.safetensors.index.json"}
    assert "holds no safetensors model; it holds 1 files of 1 B, such as layer_1/params.npz" in lines[1]
    assert "matches *.bin" in lines[2]
