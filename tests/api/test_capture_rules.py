"""Capture limits and named projections of an engine, and what results report."""

from __future__ import annotations

import json

import pytest
import torch

from birkhoff import Capture
from birkhoff.analysis.harvest import estimate_harvest, harvest
from birkhoff.capture.store.reader import read_request, read_sharded, to_torch
from birkhoff.errors import (
    CaptureError,
    CaptureSettings,
    CaptureValidationError,
    DataError,
    OptionError,
    SiteError,
)
from birkhoff.output import Output
from tests.api.conftest import open_engine

GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
TEXT = "rows and columns"


@pytest.fixture
def filing(checkpoint, tmp_path):
    with open_engine(checkpoint, capture_root=tmp_path / "captures", batch_invariant=True) as engine:
        yield engine


def probe(width: int, columns: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(width, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "hook", ["mlp_out", "mhc_streams_pre_attn", "mhc_attn_res_mix", "moe_topk", "final_hidden"]
)
def test_projected_rows_equal_traced_rows_times_the_matrix(filing, tmp_path, hook):
    width, last = filing.schema[hook].width, filing.config.num_hidden_layers - 1
    layer = last if filing.schema[hook].once else 2
    filing.projections["probe"] = matrix = probe(width)
    spec = Capture({hook: [layer]}, positions="all", project="probe")
    out = filing.generate(TEXT, **GREEDY, capture=spec)
    rows = out.acts[hook, layer]
    ids = [*out.prompt_token_ids, *out.token_ids[:-1]]
    plain = filing.trace(ids, hooks=hook)[hook, layer].flatten(1).double()
    bound = 1e-5 + 1e-4 * (plain.abs() @ matrix.double().abs())
    assert rows.tensor.shape == (len(ids), 3) and rows.tensor.dtype == torch.float32
    assert ((rows.tensor - plain @ matrix.double()).abs() <= bound).all()
    assert out.capture_results["memory"].bytes == rows.tensor.nbytes == len(ids) * 12  # the estimate of V11
    filed = filing.generate(
        TEXT,
        **GREEDY,
        capture=Capture.from_json(spec.to_json() | {"return": "file", "request_id": "p", "tag": "t"}),
    )
    entry = read_request(tmp_path / "captures" / "t" / "p")[hook, layer]
    assert torch.equal(to_torch(entry), rows.tensor) and entry.array.shape == (len(ids), 3)
    sidecar = json.loads((tmp_path / "captures" / "t" / "p" / "packed.json").read_text())
    assert (
        sidecar["project"] == "probe" and sidecar["project_digest"] == filing.projections.find("probe").digest
    )
    assert sidecar["capture_hash"] == filed.interp["capture_hash"]
    assert "axes" not in sidecar["entries"][0] and sidecar["entries"][0]["shape"] == [len(ids), 3]


def test_some_streams_projected_reduced_and_cast(filing):
    d = filing.config.hidden_size
    filing.projections["pair"] = matrix = probe(2 * d, 2)
    spec = Capture({"mhc_streams_pre_mlp": [1]}, streams=[0, 3], project="pair", reduce="mean", dtype="bf16")
    whole = filing.generate(TEXT, **GREEDY, capture=Capture({"mhc_streams_pre_mlp": [1]})).acts[
        "mhc_streams_pre_mlp", 1
    ]
    got = filing.generate(TEXT, **GREEDY, capture=spec).acts["mhc_streams_pre_mlp", 1].tensor
    expected = (whole.tensor[:, [0, 3]].flatten(1).double() @ matrix.double()).mean(0)
    assert got.dtype == torch.bfloat16 and torch.allclose(got[0].double(), expected, rtol=2**-7, atol=1e-4)


def test_a_running_request_keeps_its_projection_matrix(filing):
    width = filing.schema["mlp_out"].width
    filing.projections["p"] = probe(width)
    spec = Capture({"mlp_out": [0]}, positions="all", project="p")
    alone = filing.generate(TEXT, **GREEDY, capture=spec)
    with filing.stream(TEXT, **GREEDY, capture=spec) as stream:
        next(stream)
        filing.projections["p"] = torch.zeros(width, 3)
        for _ in stream:
            pass
        output = stream.output
    assert torch.equal(output.acts["mlp_out", 0].tensor, alone.acts["mlp_out", 0].tensor)
    assert output.interp["capture_hash"] == alone.interp["capture_hash"]
    assert (
        filing.generate(TEXT, **GREEDY, capture=spec).interp["capture_hash"] != alone.interp["capture_hash"]
    )


def test_a_bad_projection_is_refused_with_the_path_of_its_field(idle):
    idle.projections["narrow"] = probe(idle.config.hidden_size)
    try:
        for project, hook, words in (
            ("nope", "mlp_out", "Registered: narrow"),
            ("narrow", "moe_topk", "takes rows of"),
        ):
            with pytest.raises(CaptureValidationError, match=words) as caught:
                idle.generate("x", max_tokens=1, capture=Capture({hook: [0]}, project=project))
            assert (caught.value.path, caught.value.rule) == ("capture.memory.project", "V12")
    finally:
        del idle.projections["narrow"]


def test_a_harvest_projects_and_stores_the_projection(filing, tmp_path):
    width = filing.schema["mlp_out"].width
    filing.projections["p"] = matrix = probe(width, 2)
    texts, spec, out = ["one", "two texts"], Capture({"mlp_out": [1]}, project="p"), tmp_path / "out"
    cost = estimate_harvest(filing, texts, spec)
    report = harvest(filing, texts, spec, out)
    assert cost.bytes == report.bytes == cost.rows * 8 and cost.rows == report.rows
    for index, text in enumerate(texts):
        rows = (
            filing.generate(text, max_tokens=1, capture=Capture({"mlp_out": [1]})).acts["mlp_out", 1].tensor
        )
        kept = read_sharded(out / "harvest")[f"{index:09d}"]["mlp_out", 1]
        assert torch.allclose(to_torch(kept), rows @ matrix, atol=1e-4)
    assert harvest(filing, texts, spec, out).new_texts == 0
    filing.projections["p"] = -matrix
    with pytest.raises(CaptureSettings, match="projection"):
        harvest(filing, texts, spec, out)


def test_byte_limits_of_a_request(idle):
    spec = Capture({"mlp_out": "all"}, positions="all")
    before = idle.capture_max_request_bytes, idle.capture_inline_max_bytes
    needed = idle.generate("abcd", **GREEDY, capture=spec).capture_results["memory"].bytes
    try:
        for name, words in (("capture_max_request_bytes", "store"), ("capture_inline_max_bytes", "return")):
            setattr(idle, name, needed)
            assert idle.generate("abcd", **GREEDY, capture=spec).finish_reason == "length"
            setattr(idle, name, needed - 1)
            with pytest.raises(
                CaptureValidationError, match=f"would {words} up to {needed} bytes.*{name}"
            ) as caught:
                idle.generate("abcd", **GREEDY, capture=spec)
            assert (caught.value.path, caught.value.rule) == ("capture.memory", "V11")
            setattr(idle, name, None)
    finally:
        idle.capture_max_request_bytes, idle.capture_inline_max_bytes = before
    assert before == (32 << 30, 4 << 30)


def test_a_harvest_has_the_same_byte_limit(filing, tmp_path):
    filing.capture_max_request_bytes = 10
    with pytest.raises(CaptureValidationError, match="a request may store 10"):
        filing.generate("a", max_tokens=1, capture=Capture({"mlp_out": [0]}))
    with pytest.raises(DataError, match="a request may store 10"):
        harvest(filing, ["a"], Capture({"mlp_out": [0]}), tmp_path / "out")


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1 GB"])
def test_a_limit_must_be_a_number_of_bytes(engine, limit):
    before = engine.capture_max_request_bytes
    with pytest.raises(OptionError, match="expected a number of bytes, or None"):
        engine.capture_max_request_bytes = limit
    assert engine.capture_max_request_bytes == before


def test_capture_hash_depends_on_the_captured_rows_only(filing):
    def hash_of(**fields):
        return filing.generate("x", max_tokens=1, capture=Capture({"mlp_out": [0]}, **fields)).interp[
            "capture_hash"
        ]

    plain = hash_of()
    assert len(plain) == 32 and plain == hash_of() and hash_of(dtype="bf16") != plain
    assert hash_of(returns="file", tag="a") == hash_of(
        returns="file", tag="b"
    )  # the destination is not part of the hash
    assert "capture_hash" not in filing.generate("x", max_tokens=1).interp


def test_positions_that_were_never_reached_are_reported_by_consumer(filing):
    spec = Capture({"mlp_out": [0]}, positions=[0, 90], returns="file")
    out = filing.generate(
        "abc", max_tokens=90, capture=spec, stop_token_ids=list(range(filing.config.vocab_size))
    )
    assert out.interp["positions_that_never_came"] == {"filesystem": [90]}


def test_a_failed_capture_keeps_the_output_and_raises_when_rows_are_read(idle):
    plain = idle.generate(TEXT, **GREEDY)
    request = idle.submit_prompt(TEXT, Capture({"mlp_out": [0], "pre_attn": [0]}))
    (job,) = request.plan.jobs

    def full(*_):
        raise OSError(28, "No space left on device")

    job.sink.append = full
    idle.wait(request)
    out = Output.of(request)
    assert out.token_ids == plain.token_ids[:1]
    assert "No space left" in repr(out) and "No space left" in out._repr_html_()
    assert out.capture_results["memory"].status == "error"
    assert "No space left" in out.capture_results["memory"].error
    for look in (
        lambda: out.acts["mlp_out", 0],
        lambda: len(out.acts),
        lambda: list(out.acts),
        out.acts.items,
    ):
        with pytest.raises(CaptureError, match=r"OSError.*No space left on device"):
            list(look())


def test_reading_rows_that_are_not_in_memory_raises_a_capture_error(filing):
    out = filing.generate("x", max_tokens=1, capture=Capture({"mlp_out": [0]}, returns="file"))
    with pytest.raises(CaptureError, match="went to 'filesystem', not to memory"):
        out.acts["mlp_out", 0]
    out = filing.generate("x", max_tokens=1)
    with pytest.raises(SiteError, match=r"nothing was captured\. Say what to keep"):
        out.acts["mlp_out", 0]
    assert out.acts == {} and ("mlp_out", 0) not in out.acts
