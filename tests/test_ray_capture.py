"""A harvest by two actors of a local Ray: the bytes of one process, also after an actor is killed.

Needs Ray, which is large and takes its time to start: `make test-ray` installs it and sets BIRKHOFF_RAY. All tests
share one cluster, the one that the address `local` starts; the command joins it by its address."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from birkhoff import Capture
from birkhoff.capture.store.finished import survey
from birkhoff.capture.store.reader import read_sharded
from birkhoff.errors import CaptureSettings, DataError, OptionError
from birkhoff.ray_capture import _connect, capture_on_ray
from tests.cli.conftest import birkhoff

pytestmark = [
    pytest.mark.skipif("BIRKHOFF_RAY" not in os.environ, reason="needs Ray: make test-ray"),
    pytest.mark.timeout(1200),
]
SPEC = Capture({"mlp_out": [3], "mhc_streams_pre_attn": [4]}, dtype="bf16")
HOOKS = "mlp_out=3;mhc_streams_pre_attn=4"
POOL = {"actors": 2, "cpus": 0.5}  # also fits one core


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Rows depend on the number of threads in their last bits."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = (
        json.dumps({"text": f"Once upon a time a fox had {n} stones. " * (1 + n % 5)}) for n in range(48)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    done = birkhoff("capture", data, "--hooks", HOOKS, "--dtype", "bf16", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    assert _connect(ray, "local") and not _connect(ray, "auto")
    yield ray
    ray.shutdown()


def bytes_of(root):
    rows = {
        (request, site): (entry.dtype, entry.array.tobytes(), entry.positions, entry.token_ids)
        for request, entries in read_sharded(root / "harvest").items()
        for site, entry in entries.items()
    }
    return rows, json.loads((root / "harvest.json").read_text())["settings"]


def test_two_actors_write_the_bytes_of_one_process_and_resume(cluster, data, whole, tmp_path):
    options = {**POOL, "part_texts": 5}
    report = capture_on_ray("auto", data, SPEC, tmp_path / "out", limit=20, **options)
    assert (report.texts, report.new_texts) == (20, 20)
    report = capture_on_ray("auto", data, SPEC, tmp_path / "out", **options)
    assert (report.texts, report.new_texts) == (48, 28)
    assert bytes_of(tmp_path / "out") == bytes_of(whole)
    assert not (tmp_path / "out" / ".parts").exists()
    report = capture_on_ray("auto", data, SPEC, tmp_path / "out", **options)
    assert (report.texts, report.new_texts) == (48, 0)
    other = data.with_name("other.jsonl")
    other.write_text('{"text": "something else"}\n')
    with pytest.raises(CaptureSettings, match="other texts"):
        capture_on_ray("auto", other, SPEC, tmp_path / "out", **options)


def kill_an_actor(out: Path, killed: list[int], stop: threading.Event) -> None:
    """Kill the process that writes a part, once it has begun."""
    while not stop.is_set() and not killed:
        for lock in out.glob(".parts/*/.lock"):
            words = lock.read_text().split() if lock.exists() else []
            if words[:2] == ["open", "pid"] and list(lock.parent.glob("*/*.journal")):
                os.kill(int(words[2]), signal.SIGKILL)
                killed.append(int(words[2]))
                return
        time.sleep(0.005)


def test_a_killed_actor_loses_nothing_and_repeats_nothing_committed(cluster, data, whole, tmp_path):
    killed: list[int] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_an_actor, args=(tmp_path / "out", killed, stop))
    killer.start()
    try:
        report = capture_on_ray("auto", data, SPEC, tmp_path / "out", **POOL, part_texts=12)
    finally:
        stop.set()
        killer.join()
    assert killed and report.texts == report.new_texts == 48
    assert bytes_of(tmp_path / "out") == bytes_of(whole)
    assert len(survey(tmp_path / "out" / "harvest").finished) == 48  # each with its rows once


def test_a_bad_text_is_the_error_of_one_process(cluster, data, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(data.read_text() + "\nnot JSON\n")
    with pytest.raises(DataError, match="line 50 is not JSON") as kept:
        capture_on_ray("auto", bad, SPEC, tmp_path / "out", actors=1, part_texts=50)
    while cluster.available_resources().get("CPU") != cluster.cluster_resources()["CPU"]:
        time.sleep(0.1)  # the actors end although the error is still there
    del kept
    report = capture_on_ray("auto", bad, SPEC, tmp_path / "out", actors=1, part_texts=50, skip_bad=True)
    assert (report.texts, report.skipped) == (48, 1) and "line 50" in report.bad_texts[0]


def test_the_command_runs_on_the_cluster_of_an_address(cluster, data, whole, tmp_path):
    arguments = ("capture", data, "--hooks", HOOKS, "--dtype", "bf16", "--out", tmp_path / "out", "--json")
    address = cluster.get_runtime_context().gcs_address
    pool = ("--ray-actors", "2", "--ray-cpus", "0.5", "--ray-part", "24")
    done = birkhoff(*arguments, "--ray", address, *pool)
    assert done.returncode == 0 and json.loads(done.stdout)["new_texts"] == 48, done.stderr
    assert bytes_of(tmp_path / "out") == bytes_of(whole)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_where_nothing_listens_is_refused_at_once(address, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OptionError, match=r"there is no Ray cluster at .*ray start"):
        _connect(ray, address)


def test_an_address_is_needed(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OptionError, match="the address of Ray is empty"):
        _connect(ray, "")
