"""Results are saved and reopened, all in one way, in files that other programs read; and they are pickled."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import birkhoff
from birkhoff import Attribution, Capture, Trace
from birkhoff.analysis.attribution import AttributionBatch
from birkhoff.analysis.logit_attribution import LogitAttribution
from birkhoff.analysis.patching import PatchSweep, PatchSweepBatch
from birkhoff.capture.sinks.captured_rows import Acts
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, DataError, SiteError
from birkhoff.trace import TraceBatch

CLEAN, CORRUPT = [0, 17, 300, 4], [0, 17, 301, 4]
LAYERS = 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "tiny"
    synth(path, "tiny", seed=6)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def results(engine):
    capture = Capture(
        {"mlp_out": [2, 3], "mhc_streams_post_mlp": [1], "blocks.4.hook_in": "all", "index_scores": "all"},
        "all",
    )
    return [
        engine.trace(CLEAN),
        engine.trace([CLEAN, CORRUPT[:2]], "mlp_out"),
        engine.patch_sweep(CLEAN, CORRUPT, (7, 9), ["mlp_out", "post_attn"]),
        engine.patch_sweep([CLEAN, CORRUPT], [CORRUPT, CLEAN], (7, 9), "mlp_out"),
        engine.attribute(CLEAN, 7, ["sublayers", "experts"], baseline=CORRUPT),
        engine.attribute([CLEAN, CORRUPT], 7, layers=[1]),
        engine.logit_attribution(CLEAN, (7, 9)),
        engine.generate(CLEAN, max_tokens=3, temperature=0, capture=capture).acts,
        engine.generate(CLEAN, max_tokens=1, capture=Capture({"mlp_out": [1]}, dtype="fp8_e4m3")).acts,
    ]


def test_every_result_is_what_it_was(results, tmp_path):
    kinds = [
        Trace, TraceBatch, PatchSweep, PatchSweepBatch, Attribution, AttributionBatch, LogitAttribution, Acts, Acts
    ]  # fmt: skip
    for number, (kind, result) in enumerate(zip(kinds, results, strict=True)):
        path = tmp_path / f"{number}.safetensors"
        assert type(result) is kind
        result.save(path)
        for again in (kind.load(path), pickle.loads(pickle.dumps(result))):
            assert type(again) is kind and repr(again) == repr(result)
            same(again.file_parts().tensors, result.file_parts().tensors)
            assert again.file_parts().facts == result.file_parts().facts
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        assert metadata["format"] == f"birkhoff {kind.kind} 1" and json.loads(metadata[kind.kind])


def same(one, other):
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.view(torch.uint8).equal(other[name].contiguous().view(torch.uint8)), name


def test_what_is_computed_from_them_is_the_same(results, tmp_path):
    reopened = []
    for number, result in enumerate(results):
        result.save(tmp_path / f"{number}.safetensors")
        reopened.append(type(result).load(tmp_path / f"{number}.safetensors"))
    trace, traces, sweep, sweeps, scores, batch, terms, acts, _ = reopened
    assert trace["blocks.1.hook_in"].equal(results[0]["blocks.1.hook_in"])
    assert traces["mlp_out", 3].equal(results[1]["mlp_out", 3]) and traces.lengths == [4, 2]
    assert sweep.top(2) == results[2].top(2) and sweep.grid() == results[2].grid()
    assert sweeps.mean.values.equal(results[3].mean.values) and sweeps.passes == results[3].passes
    assert scores.top(3) == results[4].top(3) and scores["mlp_out", -1].equal(results[4]["mlp_out", -1])
    assert batch.mean.sum("layer") == results[5].mean.sum("layer")
    for unit in ("layer", "sublayer", "head", "expert", "stream"):
        assert terms.by(unit) == results[6].by(unit)
    for key in (("mlp_out", -3), ("mhc_streams_post_mlp", 1), "blocks.4.hook_in", "blocks.3.mlp.hook_out"):
        assert acts[key].tensor.equal(results[7][key].tensor)
        assert acts[key].positions == results[7][key].positions == (0, 1, 2, 3, 4, 5)
        assert acts[key].token_ids == results[7][key].token_ids
    assert acts["index_scores", 4].tensor.shape[0] == len(results[7]["index_scores", 4].tensor)
    assert list(acts) == list(results[7])
    with pytest.raises(SiteError, match="was captured at layers"):
        acts["mlp_out"]


def test_in_takes_the_keys_of_the_brackets(results):
    acts = results[7]
    inside = [
        ("mlp_out", 3), ("mlp_out", 3 - LAYERS), ("blocks.3.mlp.hook_out", 3), "blocks.3.mlp.hook_out",
        "blocks.4.hook_in",
        ("mhc_streams_post_mlp", 1), ("mhc_streams_pre_attn", 2), ("mhc_streams_pre_attn", -2), ("index_scores", 4),
        "model.layers.3.mlp:output",
    ]  # fmt: skip
    for key in inside:
        assert key in acts and acts[key] is not None, key
    assert "mlp_out" in acts, "captured at several layers"
    for key in (("mlp_out", 1), ("mlp_out", -1), ("mlp_out", 99), "post_attn", "blocks.1.mlp.hook_out", ("mlp_out",), 3,
                ("mlp_out", "3"), ("mlp_out", None), None, (3, "mlp_out")):  # fmt: skip
        assert key not in acts, key


def test_other_files_are_refused(results, tmp_path):
    results[2].save(tmp_path / "sweep.safetensors")
    with pytest.raises(
        DataError, match=r"is no trace: its format is 'birkhoff patch sweep 1', expected .*class that"
    ):
        Trace.load(tmp_path / "sweep.safetensors")
    (tmp_path / "text").write_bytes(b"no result")
    for name in ("text", "missing"):
        with pytest.raises(
            DataError, match=r"cannot be read as a patch sweep: .*Write it with PatchSweep\.save"
        ):
            PatchSweep.load(tmp_path / name)
    for facts in ("[]", "{", '{"axes": 3}', "null"):
        save_file(
            {"values": torch.zeros(2)},
            tmp_path / "damaged",
            {"format": "birkhoff patch sweep 1", "patch sweep": facts},
        )
        with pytest.raises(DataError, match="cannot be read as a patch sweep"):
            PatchSweep.load(tmp_path / "damaged")


def test_results_with_a_graph_and_outputs(engine, tmp_path):
    with engine.grad("mlp_out"):
        trace = engine.trace(CLEAN, "mlp_out")
    trace.save(tmp_path / "trace.safetensors")
    assert not Trace.load(tmp_path / "trace.safetensors")["mlp_out", 1].requires_grad
    output = engine.generate(CLEAN, max_tokens=2, temperature=0)
    assert pickle.loads(pickle.dumps(output)).token_ids == output.token_ids
    with pytest.raises(BirkhoffError, match="there are no rows"):
        pickle.loads(pickle.dumps(output)).acts["mlp_out", 1]
