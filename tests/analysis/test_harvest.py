"""Harvests: stored rows equal those the engine computes, also after the process is killed; memory is bounded."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff import Add, Capture
from birkhoff.analysis.harvest import estimate_harvest, harvest
from birkhoff.capture.store.finished import survey
from birkhoff.capture.store.reader import read_request, read_sharded, to_torch
from birkhoff.capture.store.repair import repair
from birkhoff.convert.synth import synth
from birkhoff.data.texts import DatasetText, open_texts
from birkhoff.errors import CaptureLocked, CaptureSettings, CaptureValidationError, DataError, OptionError
from tests.cli.conftest import COMMAND, clean_environment
from tests.sizes import scaled

HOOKS = {"mhc_streams_pre_attn": [1, 4], "mlp_out": "all", "mhc_ffn_res_mix": [2], "mhc_streams_final": "all"}
HOOK_FLAG = "mhc_streams_pre_attn=1,4;mlp_out=*;mhc_ffn_res_mix=2;mhc_streams_final=*"
WORDS = "the river stone and moon went over under hill cat sang so quietly that nobody heard it".split()


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Short texts, and some long ones whose rows are written in several parts."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS, k=120 if n % 10 == 9 else draw.randint(2, 25))) for n in range(count)
    ]


def write_jsonl(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("harvest") / "tiny"
    synth(path, like="tiny")
    return path


@pytest.fixture(scope="module")
def engine(checkpoint):
    with birkhoff.load(checkpoint, batch_invariant=True) as engine:
        yield engine


def contents(tag: Path) -> dict[str, dict]:
    """The whole content of a store, as plain values and bytes."""
    read = read_sharded(tag) if any(tag.glob("shard-*")) else {d.name: read_request(d) for d in tag.iterdir()}
    return {
        request: {
            at: (
                e.array.tobytes(),
                e.array.shape,
                e.dtype,
                e.positions,
                e.token_ids,
                e.phases,
                e.meta["complete"],
            )
            for at, e in entries.items()
        }
        for request, entries in read.items()
    }


def rows_in(tag: Path) -> int:
    return sum(shape[0] for entries in contents(tag).values() for _, shape, *_ in entries.values())


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_files_hold_what_the_engine_computes_for_each_text_alone(engine, tmp_path, layout):
    texts = texts_of(9)
    spec = Capture(HOOKS)
    report = harvest(engine, texts, Capture(HOOKS, layout=layout), tmp_path / "out")
    tag = tmp_path / "out" / "harvest"
    read = read_sharded(tag) if layout == "sharded" else {d.name: read_request(d) for d in tag.iterdir()}
    assert sorted(read) == [f"{index:09d}" for index in range(len(texts))]
    rows = 0
    for index, text in enumerate(texts):
        acts = engine.generate(text, max_tokens=1, temperature=0, capture=spec).acts
        entries = read[f"{index:09d}"]
        assert set(entries) == set(acts)
        for (hook, layer), entry in entries.items():
            kept = acts[hook, layer]
            assert torch.equal(to_torch(entry), kept.tensor) and entry.token_ids == list(kept.token_ids)
            rows += len(entry)
    assert (report.texts, report.rows, report.skipped) == (len(texts), rows, 0)


def test_an_estimate_equals_the_stored_size(engine, tmp_path):
    for index, spec in enumerate(
        (
            Capture(HOOKS),
            Capture(HOOKS, positions="last_prompt", dtype="bf16", streams=[0]),
            Capture(HOOKS, reduce="mean"),
        )
    ):
        texts = texts_of(6, seed=index)
        estimate = estimate_harvest(engine, texts, spec)
        report = harvest(engine, texts, spec, tmp_path / str(index))
        assert (estimate.texts, estimate.rows, estimate.bytes, estimate.exact) == (
            6,
            report.rows,
            report.bytes,
            True,
        )
        assert sum(estimate.bytes_by_hook.values()) == estimate.bytes
        assert estimate.tokens == sum(len(engine.prompt_ids(text)) for text in texts)


def test_killed_at_any_moment_and_resumed_the_store_is_the_same(checkpoint, engine, tmp_path):
    """Separate processes killed by SIGKILL, which cannot clean up."""
    texts = [{"text": text} for text in texts_of(scaled(1000, 60))]
    data = write_jsonl(tmp_path / "texts.jsonl", texts)
    out, kills, draw = tmp_path / "out", scaled(5, 2), random.Random(11)
    command = [
        *COMMAND,
        "capture",
        str(data),
        "--model",
        str(checkpoint),
        "--hooks",
        HOOK_FLAG,
        "--out",
        str(out),
        "--json",
    ]
    whole = harvest(engine, open_texts(data), Capture(HOOKS), tmp_path / "whole")
    interrupted, pause = 0, whole.seconds / (2 * kills)
    while interrupted < kills or not _complete_texts(out, tmp_path / "copy"):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(BIRKHOFF_DEVICE="cpu"),
        )
        _until_rows_are_written(process, out, more_than=_bytes_under(out))
        time.sleep(draw.uniform(0, pause))
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        interrupted += 1
        assert process.returncode in (-signal.SIGKILL, 0), stderr.decode()
        print(f"kill {interrupted}: status {process.returncode}, {_bytes_under(out)} bytes under the root")
        if (
            process.returncode == 0
        ):  # it ended before it could be killed: again from the beginning, and sooner
            shutil.rmtree(out)
            interrupted, pause = 0, pause / 4
    done = subprocess.run(
        command, capture_output=True, env=clean_environment(BIRKHOFF_DEVICE="cpu"), timeout=500
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    print(
        f"resumed: {report['new_texts']} of {report['texts']} texts left, {report['forgotten_texts']} begun anew"
    )
    assert (report["texts"], report["rows"], report["bytes"]) == (whole.texts, whole.rows, whole.bytes)
    assert report["new_texts"] < report["texts"], "nothing of the killed runs was of use"
    assert rows_in(out / "harvest") == whole.rows
    assert contents(out / "harvest") == contents(tmp_path / "whole" / "harvest")
    assert not list(out.rglob("*.journal")) and not list(out.rglob("*.tmp"))


def _bytes_under(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.bin*")) if root.exists() else 0


def _complete_texts(out: Path, copy: Path) -> int:
    """How many texts a next run will find complete, counted in a copy."""
    shutil.copytree(out, copy)
    repair(copy)
    count = len(survey(copy / "harvest").finished)
    shutil.rmtree(copy)
    return count


def _until_rows_are_written(process: subprocess.Popen, out: Path, more_than: int) -> None:
    while process.poll() is None:
        try:
            if _bytes_under(out) > more_than:
                return
        except FileNotFoundError:  # renamed since it was listed
            pass
        time.sleep(0.01)


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_an_error_leaves_complete_texts_only_and_a_rerun_adds_the_rest(engine, tmp_path, layout):
    texts, spec = texts_of(28), Capture(HOOKS, layout=layout)
    whole = harvest(engine, texts, spec, tmp_path / "whole")

    class Trouble(Exception):
        pass

    def source(until: int):
        yield from texts[:until]
        raise Trouble

    out = tmp_path / "out"
    for until in (3, 21):
        with pytest.raises(Trouble):
            harvest(engine, source(until), spec, out)
        half = contents(out / "harvest")
        assert all(complete for entries in half.values() for *_, complete in entries.values())
        assert half.items() <= contents(tmp_path / "whole" / "harvest").items()
    report = harvest(engine, texts, spec, out)
    assert (report.texts, report.rows) == (whole.texts, whole.rows) and 0 < report.new_texts < 28
    assert contents(out / "harvest") == contents(tmp_path / "whole" / "harvest")
    again = harvest(engine, texts, spec, out)
    assert (again.new_texts, again.rows) == (0, whole.rows)
    assert engine._core.scheduler.idle


def test_a_larger_limit_adds_texts(engine, tmp_path):
    texts = texts_of(12)
    first = harvest(engine, texts[:5], Capture(HOOKS), tmp_path / "a")
    both = harvest(engine, texts, Capture(HOOKS), tmp_path / "a")
    whole = harvest(engine, texts, Capture(HOOKS), tmp_path / "b")
    assert (first.texts, both.new_texts, both.rows) == (5, 7, whole.rows)
    assert contents(tmp_path / "a" / "harvest") == contents(tmp_path / "b" / "harvest")


def test_other_settings_are_refused_by_name(engine, checkpoint, tmp_path):
    out = tmp_path / "out"
    harvest(engine, texts_of(2), Capture({"mlp_out": [1]}), out, source={"sha256": "a"})
    before = contents(out / "harvest")
    for spec, source, words in (
        (Capture({"mlp_out": [2]}), {"sha256": "a"}, r"capture.hooks.mlp_out was \[1\] and is \[2\]"),
        (
            Capture({"mlp_out": [1]}, dtype="bf16"),
            {"sha256": "a"},
            'capture.dtype was not given and is "bf16"',
        ),
        (Capture({"mlp_out": [1]}), {"sha256": "b"}, 'source.sha256 was "a" and is "b"'),
    ):
        with pytest.raises(CaptureSettings, match=words):
            harvest(engine, texts_of(2), spec, out, source=source)
    engine.modules["push"] = torch.ones(engine.config.hidden_size)
    with engine.steering(Add("push", hook="mlp_out", layers=[0])):
        with pytest.raises(CaptureSettings, match=r"engine\.steering was not given and is"):
            harvest(engine, texts_of(2), Capture({"mlp_out": [1]}), out, source={"sha256": "a"})
    synth(tmp_path / "other", like="tiny", seed=5)
    with birkhoff.load(tmp_path / "other", batch_invariant=True) as other:
        with pytest.raises(CaptureSettings, match="model was"):
            harvest(other, texts_of(2), Capture({"mlp_out": [1]}), out, source={"sha256": "a"})
    with birkhoff.load(checkpoint) as loose:
        with pytest.raises(CaptureSettings, match=r"engine.batch_invariant was true and is false"):
            harvest(loose, texts_of(2), Capture({"mlp_out": [1]}), out, source={"sha256": "a"})
    assert contents(out / "harvest") == before


def test_a_run_that_stored_nothing_does_not_bind_the_next_one(engine, tmp_path):
    data, out, spec = tmp_path / "texts.jsonl", tmp_path / "out", Capture({"mlp_out": [1]})
    data.write_text('{"txt": "a fox"}\n')
    with pytest.raises(DataError, match="--text-field"):
        harvest(engine, open_texts(data), spec, out, source={"sha256": "wrong"})
    data.write_text('{"text": "a fox"}\n')
    report = harvest(engine, open_texts(data), spec, out, source={"sha256": "mended"})
    assert report.new_texts == 1 and set(read_sharded(out / "harvest")) == {"000000000"}
    assert json.loads((out / "harvest.json").read_text())["settings"]["source"] == {"sha256": "mended"}
    with pytest.raises(CaptureSettings, match=r'source\.sha256 was "mended"'):
        harvest(engine, open_texts(data), spec, out, source={"sha256": "third"})


def test_a_directory_with_other_files_is_refused(engine, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CaptureSettings, match=r"holds no harvest\.json"):
        harvest(engine, ["hello"], Capture({"mlp_out": [0]}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_harvests_into_one_directory_at_once_are_refused(engine, tmp_path):
    spec, seen = Capture({"mlp_out": [0]}), []

    def texts():
        yield "one"
        with pytest.raises(CaptureLocked):
            harvest(engine, ["two"], spec, tmp_path / "out")
        seen.append(True)
        yield "three"

    assert harvest(engine, texts(), spec, tmp_path / "out").texts == 2 and seen


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"txt": "hello"}', r"texts\.jsonl line 3 has neither 'text' nor 'messages', but 'txt'"),
        ('{"text": 5}', r"line 3 has 5 as 'text', expected a text"),
        ('{"text": null}', r"line 3 has None as 'text'"),
        ('{"text": ""}', "line 3 has an empty text"),
        ('{"prompt": [1], "text": "x"}', r"line 3 has \[1\] as 'prompt'"),
        ('["text"]', r"line 3 is \['text'\], expected an object"),
        ('{"text": "cut', "line 3 is not JSON"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "line 3: "),
        ('{"messages": "hello"}', "line 3: "),
        (json.dumps({"text": "much too long " * 2000}), r"line 3 has 28001 tokens"),
    ],
)
def test_a_bad_text_is_named_by_its_line_or_skipped_and_counted(engine, tmp_path, line, words):
    data = tmp_path / "texts.jsonl"
    data.write_text(f'{{"text": "good"}}\n\n{line}\n{{"prompt": "also ", "text": "good"}}\n')
    spec = Capture({"mlp_out": [0]})
    with pytest.raises(DataError, match=words):
        harvest(engine, open_texts(data), spec, tmp_path / "strict")
    with pytest.raises(DataError, match=words):
        estimate_harvest(engine, open_texts(data), spec)
    report = harvest(engine, open_texts(data), spec, tmp_path / "out", skip_bad=True)
    assert (report.texts, report.skipped, len(report.bad_texts)) == (2, 1, 1)
    read = read_sharded(tmp_path / "out" / "harvest")
    assert sorted(read) == ["000000000", "000000002"]  # the invalid text keeps its index
    assert read["000000002"]["mlp_out", 0].token_ids == engine.prompt_ids("also good")
    assert estimate_harvest(engine, open_texts(data), spec, skip_bad=True).skipped == 1


def test_an_invalid_capture_is_not_attributed_to_a_text(engine, tmp_path):
    """Skipping bad texts must not turn a misspelt hook into an empty store."""
    for spec in (Capture({"mlp_out": [99]}), Capture({"mlp_out": [0]}, positions="all_generated")):
        with pytest.raises(CaptureValidationError):
            harvest(engine, ["hello"], spec, tmp_path / "out", skip_bad=True)
    with pytest.raises(OptionError, match="request_id"):
        harvest(engine, ["hello"], Capture({"mlp_out": [0]}, request_id="x"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lines_and_whole_files(engine, tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes("first line\r\n\n  second – line\n".encode())
    lines, whole = list(open_texts(file)), list(open_texts(file, whole_file=True))
    assert lines == [
        DatasetText(0, f"{file} line 1", "first line"),
        DatasetText(1, f"{file} line 3", "  second – line"),
    ]
    assert [text.prompt for text in whole] == ["first line\r\n\n  second – line"]
    assert (open_texts(file).describe()["texts"], open_texts(file, whole_file=True).describe()["texts"]) == (
        2,
        1,
    )
    file.write_bytes(b"good\n\xff\xfe\n")
    assert [text.problem for text in open_texts(file)] == [None, "is not UTF-8 (byte 0)"]
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "none.txt", "missing"),
        (tmp_path / "a.csv", "csv"),
        (tmp_path / "empty", "without data files"),
    ):
        with pytest.raises(DataError, match=words):
            open_texts(path)


def test_conversations_are_encoded_as_chats(engine, tmp_path):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages}])
    harvest(engine, open_texts(data), Capture({"mlp_out": [0]}), tmp_path / "out")
    (entries,) = read_sharded(tmp_path / "out" / "harvest").values()
    assert entries["mlp_out", 0].token_ids == engine.encode_chat(messages)


MEMORY = """
import gc, sys
import birkhoff
from birkhoff import Add, Capture
from birkhoff.analysis.harvest import harvest
checkpoint, out, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
seen = []
def texts():
    for number in range(count):
        if number % (count // 12) == 0:
            gc.collect()
            seen.append(resident())
        yield "a line of text that has its number %06d in it" % number
with birkhoff.load(checkpoint, batch_invariant=True, max_context=512) as engine:
    report = harvest(engine, texts(), Capture({"mlp_out": "all", "mhc_ffn_res_mix": "all"}), out)
print(report.rows, report.bytes, *seen)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_is_flat_over_a_million_rows(checkpoint, tmp_path):
    count = scaled(1_000_000, 80_000) // (12 * 47)  # sites times tokens per text
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(checkpoint), str(tmp_path / "out"), str(count)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows, nbytes, *seen = map(int, done.stdout.split())
    print(f"{rows} rows, {nbytes} bytes; resident KiB at each twelfth: {seen}")
    assert rows >= scaled(950_000, 70_000) and len(seen) >= 12
    early, late = (
        np.median(seen[3:6]),
        np.median(seen[-3:]),
    )  # the first texts fill buffers that stay allocated
    assert late <= 1.05 * early, seen
