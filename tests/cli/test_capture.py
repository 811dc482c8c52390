"""The verb `capture`: options match the Python API, invalid ones fail before loading, the report is exact."""

from __future__ import annotations

import json
import os

import pytest

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.cli.parsers import parse_hooks, parse_positions
from birkhoff.errors import OptionError
from tests.capture.sample_chunks import chunk
from tests.cli.conftest import birkhoff, no_trace_of_python


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"body": f"text number {n}"}) + "\n" for n in range(4)) + '{"body": 7}\n'
    )
    return path


@pytest.mark.parametrize(
    ("text", "hooks"),
    [
        ("mlp_out=*", {"mlp_out": "all"}),
        ("mlp_out", {"mlp_out": "all"}),
        ("mhc_streams_pre_attn=4,6;mlp_out=*", {"mhc_streams_pre_attn": [4, 6], "mlp_out": "all"}),
        (
            " mlp_out = 1 , 3..5 ; post_attn=-1;",
            {"mlp_out": {"layers": [1], "ranges": [[3, 5]]}, "post_attn": [-1]},
        ),
        ("mlp_out=-3..-1", {"mlp_out": {"ranges": [[-3, -1]]}}),
    ],
)
def test_hooks_are_written_as_in_the_steering_grammar(text, hooks):
    assert parse_hooks(text) == hooks


@pytest.mark.parametrize(
    "text", ["", ";", "=3", "mlp_out=", "mlp_out=x", "mlp_out=1..", "mlp_out=1;mlp_out=2", "a=1,,2"]
)
def test_hooks_that_cannot_be_read_are_refused(text):
    with pytest.raises(OptionError, match="hooks"):
        parse_hooks(text)


def test_positions_are_a_name_or_json():
    assert parse_positions("last_prompt") == "last_prompt" and parse_positions("[0, -1]") == [0, -1]
    assert parse_positions('{"prompt": {"window": [0, 4]}}') == {"prompt": {"window": [0, 4]}}
    with pytest.raises(OptionError, match="not JSON"):
        parse_positions("[1,")


def test_estimate_files_and_resumption_of_a_run(birkhoff_here, tiny, data, tmp_path):
    out = tmp_path / "out"
    hooks = "mhc_streams_pre_attn=1,-1;mlp_out=0..2"
    flags = [
        "capture",
        data,
        "--model",
        tiny,
        "--hooks",
        hooks,
        "--text-field",
        "body",
        "--dtype",
        "bf16",
        "--streams",
        "0,3",
        "--positions",
        "[0,-1]",
        "--skip-bad",
        "--json",
    ]
    dry = birkhoff_here(*flags, "--dry-run")
    assert dry.returncode == 0 and b"skipped: " in dry.stderr and b"line 5 has 7 as 'body'" in dry.stderr
    expected = json.loads(dry.stdout)
    assert (expected["texts"], expected["rows"], expected["skipped"], expected["exact"]) == (
        4,
        4 * 2 * 5,
        1,
        True,
    )
    assert not out.exists()
    done = birkhoff(*flags, "--out", out)
    assert done.returncode == 0 and no_trace_of_python(done.stderr), done.stderr.decode()
    report = json.loads(done.stdout)
    assert [report[name] for name in ("texts", "rows", "bytes", "skipped")] == [4, 40, expected["bytes"], 1]
    read = read_sharded(out / "harvest")
    assert sorted(read) == [f"{n:09d}" for n in range(4)]
    for entries in read.values():
        assert sorted(entries) == [
            ("mhc_streams_pre_attn", 1),
            ("mhc_streams_pre_attn", 5),
            ("mlp_out", 0),
            ("mlp_out", 1),
            ("mlp_out", 2),
        ]
        assert entries["mhc_streams_pre_attn", 1].array.shape == (2, 2, 64)
        assert {entry.dtype for entry in entries.values()} == {"bfloat16"}
    again = birkhoff_here(*flags[:-1], "--out", out)
    assert (
        again.returncode == 0
        and again.stdout.decode() == f"{out}\n"
        and b"added 0 texts and 0 rows" in again.stderr
    )
    other = birkhoff_here(*flags, "--out", out, "--layout", "packed")
    assert other.returncode == 1 and other.stderr.decode().splitlines()[-1].startswith("capture-settings  ")
    assert b'capture.layout was "sharded" and is "packed"' in other.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["DATA"], 2, "option-invalid  capture needs DATA"),
        (["DATA", "--hooks", "mlp_out=*"], 2, "option-invalid  capture needs DATA"),
        (["DATA", "--hooks", "mlp_out=x", "--out", "o"], 2, "option-invalid  hooks has 'mlp_out=x'"),
        (["DATA", "--hooks", "nonsense", "--out", "o"], 1, "capture-invalid  capture.hooks.nonsense"),
        (
            ["DATA", "--hooks", "mlp_out", "--out", "o", "--dtype", "int8"],
            1,
            "capture-invalid  capture.dtype",
        ),
        (["DATA", "--hooks", "mlp_out", "--out", "o", "--limit", "0"], 2, "option-invalid  limit is 0"),
        (["nowhere.jsonl", "--hooks", "mlp_out", "--out", "o"], 1, "data-invalid  nowhere.jsonl is missing"),
        (
            ["texts.csv", "--hooks", "mlp_out", "--out", "o"],
            1,
            "data-invalid  texts.csv has the ending '.csv'",
        ),
        (["--repair", "nowhere"], 1, "capture-file  nowhere is not a directory"),
        (["DATA", "--repair", "o"], 2, "option-invalid  --repair stands alone"),
    ],
)
def test_wrong_usage_is_one_error_line_before_a_model_is_loaded(
    birkhoff_here, data, arguments, status, words
):
    done = birkhoff_here(
        "capture", *(data if word == "DATA" else word for word in arguments), "--model", "nowhere"
    )
    assert (done.returncode, done.stdout) == (status, b"") and no_trace_of_python(done.stderr)
    assert done.stderr.decode().startswith(words), done.stderr.decode()


def test_a_bad_line_ends_the_run_and_is_named(tiny, data, tmp_path):
    done = birkhoff(
        "capture", data, "--model", tiny, "--hooks", "mlp_out=0", "--text-field", "body", "--out", tmp_path
    )
    assert done.returncode == 1 and no_trace_of_python(done.stderr)
    assert done.stderr.decode().splitlines()[-1].startswith(f"data-invalid  {data} line 5 has 7 as 'body'")


def test_repair_finalizes_files_of_an_aborted_run(birkhoff_here, tmp_path):
    """A child process that exits with an open capture, as in a crash."""
    child = os.fork()
    if not child:  # pragma: no cover - in another process, which never returns
        writer = CaptureWriter(FileOptions(tmp_path, default_layout="packed"))
        writer.begin(CaptureRequest("r", "r", "run"))
        writer.append(chunk("r", "mlp_out", 0, 0, 6))
        writer._states["r"].files[0].flush()
        writer.begin(CaptureRequest("done", "done", "run"))
        writer.append(chunk("done", "mlp_out", 0, 0, 2))
        writer.finish(CaptureFinish("done", "length", 2)).result(300)
        os._exit(9)
    os.waitpid(child, 0)
    assert list(tmp_path.rglob("*.journal"))
    done = birkhoff("capture", "--repair", tmp_path, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and (report["kept_records"], report["dropped_records"]) == (1, 0)
    assert report["sealed"] == ["run/r/packed.bin"] and b"sealed 1 payloads with 1 records" in done.stderr
    entry = read_request(tmp_path / "run" / "r")["mlp_out", 0]
    assert len(entry) == 6 and entry.meta["complete"] is False
    again = birkhoff_here("capture", "--repair", tmp_path)
    assert (
        again.returncode == 0
        and again.stdout.decode() == f"{tmp_path}\n"
        and b"sealed 0 payloads" in again.stderr
    )
