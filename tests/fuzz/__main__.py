"""`python -m tests.fuzz --seconds 3600 --seed 1`: attack bodies, connections and files for a given time.

A finding is shrunk, written to `tests/fuzz/cases/` and printed; the exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.fuzz import files, raw
from tests.fuzz.attack import Attacker, ProcessMeter, as_case, store
from tests.fuzz.bodies import random_body
from tests.fuzz.cases import FOLDER
from tests.fuzz.conftest import victim
from tests.fuzz.shrink import shrunk, shrunk_bytes


def attack_bodies(
    root: Path, until: float, dice: random.Random, count: int | None = None
) -> tuple[dict, list[Path]]:
    """Send mutated bodies and connections to a server until the time is over, or `count` bodies were sent."""
    found: list[Path] = []
    kinds: Counter[str] = Counter()
    with victim(root) as served:
        attacker, meter = Attacker(served.port), ProcessMeter(served.process.pid)
        first = meter.resident()
        while time.monotonic() < until and (count is None or kinds["bodies"] < count):
            path, body = random_body(dice)
            wrong = attacker.verdict(path, body)
            kinds["bodies"] += 1
            if wrong and served.process.poll() is None:
                small = _smaller(attacker, path, body, wrong)
                found.append(store(as_case(path, small, wrong), FOLDER))
            elif wrong:
                found.append(store(as_case(path, body, f"the server died: {served.process.poll()}"), FOLDER))
                break
            if kinds["bodies"] % 10 == 0:
                connection = raw.random_connection(dice)
                kinds["connections"] += 1
                wrong = raw.verdict(served.port, connection)
                if wrong:
                    found.append(
                        store(
                            {"path": "connection", "raw": connection.decode("latin-1"), "found": wrong},
                            FOLDER,
                        )
                    )
        attacker.close()
        numbers = {**kinds, "statuses": dict(sorted(attacker.statuses.items()))}
        if served.process.poll() is None:
            numbers |= {"resident_mb": [first // 1024, meter.resident() // 1024]}
    return numbers, found


def _smaller(attacker: Attacker, path: str, body: bytes, wrong: str) -> bytes:
    """The smallest body that still gets the same wrong answer."""

    def fails(raw_body: bytes) -> bool:
        return attacker.verdict(path, raw_body)[:60] == wrong[:60]

    try:
        value = json.loads(body)
    except ValueError:
        return shrunk_bytes(body, fails)
    small = shrunk(value, lambda each: fails(json.dumps(each).encode()))
    return json.dumps(small).encode()


def _same_fault(kind: files.FileKind, copy: Path, wrong: str, damaged: bytes) -> bool:
    return files.verdict(kind, copy, damaged) == wrong


def attack_files(
    root: Path, until: float, dice: random.Random, count: int | None = None
) -> tuple[dict, list[Path]]:
    """Load damaged files of all kinds until the time is over, or `count` of them were loaded."""
    found: list[Path] = []
    kinds: Counter[str] = Counter()
    samples = files.samples(root / "samples")
    names = sorted(samples)
    while time.monotonic() < until and (count is None or kinds.total() < count):
        name = names[kinds.total() % len(names)]
        kind = samples[name]
        copy = root / "work" / name
        if not copy.exists():
            shutil.copytree(kind.folder, copy)
        whole = (kind.folder / kind.name).read_bytes()
        damaged = files.damaged_file(whole, kind.name, dice, kind.reach)
        wrong = files.verdict(kind, copy, damaged)
        kinds[name] += 1
        if wrong:
            fails = partial(_same_fault, kind, copy, wrong)
            text = shrunk_bytes(damaged, fails, 100).decode("latin-1")
            case = {"path": f"file {name}", "kind": name, "raw": text, "found": wrong}
            found.append(store(case, FOLDER))
    return dict(kinds), found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--bodies", type=int, help="stop after this many bodies, however long they take")
    parser.add_argument("--files", type=int, help="stop after this many files, however long they take")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    dice = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    findings = []
    for name, attack, count in (
        ("bodies", attack_bodies, options.bodies),
        ("files", attack_files, options.files),
    ):
        with tempfile.TemporaryDirectory(prefix="birkhoff-fuzz-") as folder:
            seconds = options.seconds / 2 if count is None else 1e9
            numbers, found = attack(Path(folder), time.monotonic() + seconds, dice, count)
        print(json.dumps({name: numbers, "findings": len(found)}), flush=True)
        findings += found
    for path in findings:
        print(f"finding: {path}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
