"""Hostile connections and damaged files, a small part of what `python -m tests.fuzz` does."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from tests.fuzz import files, raw
from tests.fuzz.cases import stored
from tests.sizes import FULL, scaled


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return files.samples(tmp_path_factory.mktemp("samples"))


def test_mutated_connections_are_answered_or_closed(attacked):
    dice, until = random.Random(6), time.monotonic() + (3600 if FULL else 3)
    for _ in range(scaled(10_000)):
        connection = raw.random_connection(dice)
        assert raw.verdict(attacked.port, connection) == "", connection
        if time.monotonic() > until:
            break
    assert attacked.get("/health").status_code == 200 and attacked.idle()


def test_samples_are_valid(samples, tmp_path):
    for name, kind in samples.items():
        copy = tmp_path / name
        shutil.copytree(kind.folder, copy)
        kind.load(copy)


def test_damaged_files_give_typed_errors_only(samples, tmp_path):
    dice, until = random.Random(7), time.monotonic() + (3600 if FULL else 6)
    copies = {name: shutil.copytree(kind.folder, tmp_path / name) for name, kind in samples.items()}
    for number in range(scaled(20_000)):
        name = list(samples)[number % len(samples)]
        kind = samples[name]
        damaged = files.damaged_file((kind.folder / kind.name).read_bytes(), kind.name, dice, kind.reach)
        assert files.verdict(kind, copies[name], damaged) == "", (name, damaged[:300])
        if time.monotonic() > until:
            break


def test_stored_files_stay_refused(samples, tmp_path):
    for name, case in stored("file-*").items():
        kind = samples[case["kind"]]
        copy = tmp_path / name
        shutil.copytree(kind.folder, copy)
        assert files.verdict(kind, copy, case["raw"].encode("latin-1")) == "", name


def test_stored_connections_stay_answered(attacked):
    for name, case in stored("connection-*").items():
        assert raw.verdict(attacked.port, case["raw"].encode("latin-1")) == "", name
