"""Harvests in parts: the joined store has the bytes of one process, whatever was killed, and computes nothing twice."""

from __future__ import annotations

import json
import shutil

import pytest

import birkhoff
from birkhoff import Capture
from birkhoff.analysis.harvest import harvest
from birkhoff.analysis.harvest_parts import PartJoiner, harvest_part, split_texts
from birkhoff.analysis.run_manifest import PARTS
from birkhoff.capture.store.finished import survey
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.convert.synth import synth
from birkhoff.data.texts import DatasetText
from birkhoff.errors import CaptureLocked, CaptureSettings
from tests.capture.disks import Stopped, StoppingDisk

TEXTS = [DatasetText(n, f"text {n}", f"the stone number {n} went over the hill") for n in range(14)]
SPEC = Capture({"mlp_out": "all", "mhc_streams_pre_attn": [1]}, dtype="bf16")
SOURCE = {"name": "stones"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, max_requests=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    root = tmp_path_factory.mktemp("whole") / "out"
    harvest(engine, TEXTS, SPEC, root, source=SOURCE)
    return root


def bytes_of(root):
    """Every array of every text with its labels, and the settings."""
    rows = {
        (request, site): (entry.dtype, entry.array.tobytes(), entry.positions, entry.token_ids)
        for request, entries in read_sharded(root / "harvest").items()
        for site, entry in entries.items()
    }
    return rows, json.loads((root / "harvest.json").read_text())


def test_parts_cover_the_texts_in_order_and_leave_out_what_is_done():
    parts = list(split_texts(TEXTS, 4, {0, 1, 2, 3, 9}))
    assert [(number, [text.index for text in texts]) for number, texts in parts] == [
        (1, [4, 5, 6, 7]),
        (2, [8, 10, 11]),
        (3, [12, 13]),
    ]


def test_joined_parts_have_the_bytes_of_one_process(engine, whole, tmp_path):
    out = tmp_path / "out"
    parts = list(split_texts(TEXTS, 4))
    for number, texts in parts[::-1]:  # in any order
        harvest_part(engine, texts, SPEC, out, number, source=SOURCE)
    with PartJoiner(out, SPEC, SOURCE) as joiner:  # joins what is there
        assert joiner.report.new_texts == len(TEXTS) and len(joiner.done) == len(TEXTS)
        assert joiner.commit(1) == 0  # joined already
        with pytest.raises(CaptureLocked):
            harvest(engine, TEXTS, SPEC, out, source=SOURCE)
    assert bytes_of(out) == bytes_of(whole) and not (out / PARTS).exists()
    again = harvest(engine, TEXTS, SPEC, out, source=SOURCE)  # an ordinary store, complete
    assert again.new_texts == 0 and again.rows == joiner.report.rows


def test_a_part_goes_on_where_another_process_left_it(engine, whole, tmp_path):
    out, ((_, texts), *others) = tmp_path / "out", split_texts(TEXTS, 6)
    harvest_part(engine, texts[:2], SPEC, out, 0, source=SOURCE)
    report = harvest_part(engine, texts, SPEC, out, 0, source=SOURCE)
    assert (report.texts, report.new_texts) == (6, 4)
    with PartJoiner(out, SPEC, SOURCE) as joiner:
        assert not (out / PARTS / "000000").exists()  # joined when it was opened
        for number, rest in others:
            harvest_part(engine, rest, SPEC, out, number, source=SOURCE)
            assert joiner.commit(number) == len(rest)
    assert bytes_of(out) == bytes_of(whole)


def test_a_joining_process_that_is_killed_anywhere_loses_and_repeats_nothing(engine, whole, tmp_path):
    out = tmp_path / "out"
    for number, texts in split_texts(TEXTS, 7):
        harvest_part(engine, texts, SPEC, out, number, source=SOURCE)
    stops = 0
    while True:
        copy = tmp_path / "copy"
        shutil.copytree(out, copy)
        try:
            PartJoiner(copy, SPEC, SOURCE, StoppingDisk(stops)).close()
            break
        except Stopped:
            stops += 6
        with PartJoiner(copy, SPEC, SOURCE) as joiner:
            assert joiner.done == set(range(len(TEXTS)))
        assert bytes_of(copy) == bytes_of(whole)
        assert len(survey(copy / "harvest").finished) == len(TEXTS)
        shutil.rmtree(copy)
    assert stops > 10


def test_other_texts_models_and_settings_are_refused(engine, whole, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    with pytest.raises(CaptureSettings, match="other texts"):
        PartJoiner(copy, SPEC, {"name": "other"})
    with PartJoiner(copy, SPEC, SOURCE) as joiner:
        harvest_part(engine, TEXTS[:1], Capture({"mlp_out": [0]}), copy, 0, source=SOURCE)
        with pytest.raises(CaptureSettings, match="begun with other settings"):
            joiner.commit(0)
    assert bytes_of(copy) == bytes_of(whole)


def test_texts_that_two_parts_hold_are_joined_once(engine, whole, tmp_path):
    """A run with another size of parts cuts the data set elsewhere."""
    out = tmp_path / "out"
    harvest_part(engine, TEXTS[:5], SPEC, out, 0, source=SOURCE)
    harvest_part(engine, TEXTS[3:], SPEC, out, 1, source=SOURCE)
    with PartJoiner(out, SPEC, SOURCE) as joiner:
        assert joiner.report.texts == joiner.report.new_texts == len(TEXTS)
    assert bytes_of(out) == bytes_of(whole)


def test_requests_in_their_own_folders_are_joined_too(engine, tmp_path):
    spec = SPEC.replace(layout="packed")
    out = tmp_path / "out"
    for number, texts in split_texts(TEXTS[:6], 3):
        harvest_part(engine, texts, spec, out, number)
    with PartJoiner(out, spec) as joiner:
        assert joiner.done == set(range(6))
    assert read_request(out / "harvest" / "000000004")["mlp_out", 0].token_ids == engine.prompt_ids(
        TEXTS[4].prompt
    )
