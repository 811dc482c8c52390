"""`kill -9` at random moments: real processes, real files. Nothing acknowledged is lost, and what is resumed is equal.

`python -m tests.kills --kills 40` kills each of six victims that often and prints a table: a server with captures and
steering, a capture writer, a conversion, a random checkpoint, a download and a training. What a killed process was
making is refused by its reader. Most victims are forked, so that a kill costs
seconds and not the import of a library.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from birkhoff.analysis.sae_train import train_sae
from birkhoff.api.load import load
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.convert.convert import _plan
from birkhoff.convert.synth import synth
from birkhoff.convert.write import journal_path, run_conversion
from birkhoff.errors import BirkhoffError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.train import TrainOptions
from birkhoff.server.process import serve
from birkhoff.server.server_settings import ServerSettings
from birkhoff.weights.checkpoint import open_checkpoint
from tests.capture import victim
from tests.capture.test_repair import assert_is_prefix
from tests.hub_server import hub_server
from tests.server.conftest import user
from tests.test_hf_hub import PRELUDE, PULL, environment


@dataclass
class Count:
    """One row of the table."""

    victim: str
    kills: int = 0
    in_time: int = 0  # the victim was still at work
    acknowledged: int = 0
    lost: int = 0
    unequal: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    def row(self) -> str:
        return f"| {self.victim} | {self.kills} | {self.in_time} | {self.acknowledged} | {self.lost} | {self.unequal} |"


def forked(work: Callable[[], object], stdout: int | None = None) -> int:
    """Run `work` in a forked child, whose output goes to `stdout`; returns its process id."""
    child = os.fork()
    if child:
        return child
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet if stdout is None else stdout, 1)
    os.dup2(quiet, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # a test runner has replaced them
    torch.set_num_threads(1)  # the threads of OpenMP are not in a child, and a product would wait for them
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def kill(child: int, seconds: float) -> bool:
    """Kill a child after some time; whether it was still running, and no other end than success before that."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the victim failed before it was killed"
        return False
    return True


@dataclass
class Units:
    """Called by a victim before each unit of its work: says so on its standard output, and waits at `most` for its end.

    So a kill after that many units or fewer finds it at work, however slow or busy the machine is."""

    most: int
    done: int = 0
    parent: int = field(default_factory=os.getppid)

    def __call__(self, *_: object) -> None:
        os.write(1, b".")
        self.done += 1
        while self.done >= self.most and os.getppid() == self.parent:
            time.sleep(0.05)


def kill_within(work: Callable[[Units], object], units: int, dice: random.Random) -> bool:
    """Run `work` in a forked child and kill it within the `units`-th unit or a few later; whether it was running."""
    reader, writer = os.pipe()
    child = forked(lambda: work(Units(units + 4)), writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while units and pipe.read(1):
            units -= 1
        return kill(child, dice.uniform(0.0, 0.03))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def kill_captures(root: Path, kills: int, dice: random.Random) -> Count:
    """A writer of three threads that prints a line per acknowledged capture."""
    count = Count("capture writer")
    for number in range(kills):
        folder, seed = root / str(number), dice.randrange(10**6)
        reader, writer = os.pipe()
        child = forked(lambda folder=folder, seed=seed: victim.main(str(folder), seed), writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            lines = [pipe.readline()]
            count.in_time += kill(child, dice.uniform(0.01, 0.4))
            lines += pipe.read().splitlines(keepends=True)
        count.kills += 1
        acknowledged = [json.loads(line) for line in lines if line.endswith(b"\n")]
        with CaptureWriter(FileOptions(folder)) as files:  # opening repairs
            assert files.repaired is not None and not files.repaired.failed
        sharded = read_sharded(folder / "run")
        for line in acknowledged:
            name = line["request"]
            count.acknowledged += 1
            try:
                entries = (
                    sharded[name] if line["layout"] == "sharded" else read_request(folder / "run" / name)
                )
            except (KeyError, OSError):
                count.lost += 1
                continue
            try:
                assert set(entries) == set(victim.SITES)
                for entry in entries.values():
                    assert_is_prefix(entry, name, line["rows"])
            except AssertionError:
                count.unequal += 1
        shutil.rmtree(folder)
    return count


def kill_conversions(root: Path, kills: int, dice: random.Random) -> Count:
    """A conversion is killed again and again, resumed with the same plan, and compared with an undisturbed one."""
    count = Count("convert")
    synth(root / "tiny", "tiny", seed=9)

    def run(out: Path, units: Units | None = None) -> None:
        formats = ("gguf", "fp4", "bf16") if out.suffix else ("safetensors", "bf16", "fp8")
        plan = _plan(open_checkpoint(root / "tiny"), out, *formats, "upstream", True, 400_000)
        run_conversion(plan, 2, False, progress=units, sync_bytes=20_000)

    def complete(out: Path) -> bool:
        last = out if out.suffix else out / "conversion.json"
        return last.exists() and not journal_path(out).exists()

    expected: dict[str, dict[str, str]] = {}
    for name in itertools.cycle(("m.gguf", "m")):
        if count.kills >= kills:
            return count
        if name not in expected:
            run(root / "whole" / name)
            expected[name] = digests(root / "whole")
            shutil.rmtree(root / "whole")
        out = root / "again" / name
        for _ in range(min(8, kills - count.kills)):
            work = lambda units, out=out: run(out, units)  # noqa: E731
            count.in_time += kill_within(work, dice.randrange(1, 12), dice)
            count.kills += 1
            if complete(out):  # another start would refuse to overwrite it
                break
            count.unequal += loads(open_checkpoint, out)
        if not complete(out):
            run(out)
        count.acknowledged += 1
        count.unequal += digests(out.parent) != expected[name]
        shutil.rmtree(out.parent)
    return count


def loads(reader: Callable[[Path], object], path: Path) -> bool:
    """Whether a reader accepts what a killed process left."""
    try:
        reader(path)
    except BirkhoffError:
        return False
    return True


def kill_synths(root: Path, kills: int, dice: random.Random) -> Count:
    """A random checkpoint is killed while it is written, and started again from the beginning."""
    count = Count("synth")
    synth(root / "whole", "tiny", seed=9, shard_bytes=200_000)
    expected = digests(root / "whole")
    while count.kills < kills:
        again = root / "again"
        for _ in range(min(4, kills - count.kills)):
            work = lambda units, again=again: synth(  # noqa: E731
                again, "tiny", seed=9, shard_bytes=200_000, progress=units
            )
            count.in_time += kill_within(work, dice.randrange(1, 250), dice)
            count.kills += 1
            count.unequal += loads(open_checkpoint, again)
        synth(again, "tiny", seed=9, shard_bytes=200_000)
        count.acknowledged += 1
        count.unequal += digests(again) != expected
        shutil.rmtree(again)
    return count


def kill_downloads(root: Path, kills: int, dice: random.Random) -> Count:
    """A download from a slow hub is killed, resumed, and compared with the files of the hub."""
    count = Count("pull")
    synth(root / "tiny", "tiny", shard_bytes=300_000)
    expected = digests(root / "tiny")
    with hub_server({"org/tiny": root / "tiny"}) as server:
        while count.kills < kills:
            home = root / "home"
            command = [sys.executable, "-c", PRELUDE + PULL]
            server.delay = 0.03
            server.hold(max(expected, key=lambda name: (root / "tiny" / name).stat().st_size))
            for _ in range(min(5, kills - count.kills)):
                asked = len(server.log)
                process = subprocess.Popen(command, env=environment(server, home), stderr=subprocess.DEVNULL)
                while len(server.log) == asked and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(dice.uniform(0.0, 0.8))
                process.kill()
                count.in_time += process.wait() == -signal.SIGKILL
                count.kills += 1
            server.delay = 0.0
            server.release()
            subprocess.run(command, env=environment(server, home), check=True, capture_output=True)
            snapshots = [path for path in home.rglob("snapshots/*") if path.is_dir()]
            count.acknowledged += 1
            count.unequal += len(snapshots) != 1 or digests(snapshots[0]) != expected
            shutil.rmtree(home)
    return count


@dataclass
class Rows:
    """Training rows that are the same in every process."""

    hook: str = "mlp_out"
    layer: int = 1
    view: str = "single"
    batch_rows: int = 64
    each: Callable[[], object] = lambda: None

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(epoch)
        for _ in range(16):
            self.each()
            yield torch.randn(self.batch_rows, 16, generator=generator)


def kill_trainings(root: Path, kills: int, dice: random.Random) -> Count:
    """A training that writes its state every three steps is killed, resumed, and compared bit for bit."""
    count = Count("training")
    options = TrainOptions(features=32, steps=60)
    train_sae(Rows(), options, root / "whole", every=3)
    expected = digests(root / "whole")
    while count.kills < kills:
        again = root / "again"
        for _ in range(min(6, kills - count.kills)):
            work = lambda units, again=again: train_sae(Rows(each=units), options, again, every=3)  # noqa: E731
            count.in_time += kill_within(work, dice.randrange(1, 50), dice)
            count.kills += 1
            count.unequal += loads(Sae.load, again)
        train_sae(Rows(), options, again, every=3)
        count.acknowledged += 1
        count.unequal += digests(again) != expected
        shutil.rmtree(again)
    return count


PROMPTS = ("Once upon a time", "Tell me a story.", "The fox said", "Hello there")
STEER = {"op": "add", "at": {"hook": "mlp_out", "layers": [3]}, "vector": [0.05] * 384, "scale": 1.0}


def capture_body(prompt: str, request_id: str) -> dict[str, Any]:
    spec = {"hooks": {"mlp_out": [1, 4]}, "positions": "all", "request_id": request_id, "tag": "k"}
    return {
        "messages": user(prompt),
        "temperature": 0,
        "max_tokens": 6,
        "interventions": [STEER],
        "capture": {"filesystem": spec},
        "capture_wait": True,
    }


def kill_servers(root: Path, kills: int, dice: random.Random) -> Count:
    """A server that writes captures of steered answers is killed under load. Every capture it acknowledged is on disk
    and equals the first of its prompt, byte for byte; so does the answer."""
    count = Count("server")
    captures = root / "captures"
    acknowledged: dict[str, tuple[str, str]] = {}  # request id -> prompt, answer
    lock = threading.Lock()

    def run(writer: int) -> None:
        settings = ServerSettings(port=0, log="off", capture_root=str(captures))
        options = {"model": "nano", "capture_root": str(captures)}
        announce = lambda url: os.write(writer, url.encode() + b"\n")  # noqa: E731
        serve(settings, lambda: load("nano", capture_root=captures, batch_invariant=True), announce, options)

    def ask(url: str, number: int, worker: int, stop: threading.Event) -> None:
        for index in range(1000):
            if stop.is_set():
                return
            prompt, name = PROMPTS[(worker + index) % len(PROMPTS)], f"{number}-{worker}-{index}"
            try:
                answer = httpx2.post(
                    f"{url}/v1/chat/completions", json=capture_body(prompt, name), timeout=300
                )
            except httpx2.HTTPError:
                return
            if answer.status_code == 200:
                fields = answer.json()
                if fields["capture_results"]["filesystem"]["status"] == "ok":
                    with lock:
                        acknowledged[name] = prompt, fields["choices"][0]["message"]["content"]

    for number in range(kills):
        reader, writer = os.pipe()
        child = forked(lambda writer=writer: run(writer))
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            url = pipe.readline().decode().strip()
        assert url, "the server did not start"
        stop = threading.Event()
        arguments = [(url, number, worker, stop) for worker in range(3)]
        clients = [threading.Thread(target=ask, args=each, daemon=True) for each in arguments]
        for client in clients:
            client.start()
        if number == 0:
            while len({prompt for prompt, _ in acknowledged.values()}) < len(PROMPTS):
                time.sleep(0.05)  # one complete answer for every prompt, to compare the others with
        count.in_time += kill(child, dice.uniform(0.2, 5.0))
        stop.set()
        for client in clients:
            client.join(300)
        count.kills += 1
    with CaptureWriter(FileOptions(captures)) as files:
        assert files.repaired is None or not files.repaired.failed
    first: dict[str, tuple[str, dict[Any, bytes]]] = {}
    for name, (prompt, text) in acknowledged.items():
        count.acknowledged += 1
        folder = captures / "k" / name
        if not folder.is_dir():
            count.lost += 1
            continue
        rows = {key: entry.array.tobytes() for key, entry in read_request(folder).items()}
        count.unequal += first.setdefault(prompt, (text, rows)) != (text, rows)
    return count


VICTIMS: dict[str, Callable[[Path, int, random.Random], Count]] = {
    "training": kill_trainings,
    "convert": kill_conversions,
    "synth": kill_synths,
    "capture": kill_captures,
    "pull": kill_downloads,
    "server": kill_servers,
}
HEAD = "| victim | kills | while at work | acknowledged or resumed | lost | not byte-equal |\n|---|---|---|---|---|---|"


def run_all(names: list[str], kills: int, seed: int) -> list[Count]:
    counts = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="birkhoff-kills-") as folder:
            counts.append(VICTIMS[name](Path(folder), kills, random.Random(f"{name} {seed}")))
        print(counts[-1].row(), flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--kills", type=int, default=40, help="of each victim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("victims", nargs="*", default=list(VICTIMS))
    options = parser.parse_args()
    print(HEAD, flush=True)
    counts = run_all(options.victims, options.kills, options.seed)
    return 1 if any(count.lost or count.unequal for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
