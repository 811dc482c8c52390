"""The model benchmark on a small checkpoint: all rows, ratios within a round, and an agreement check that can fail."""

import importlib.metadata
import json

import pytest
import torch

import birkhoff
from birkhoff.bench import agreement
from birkhoff.bench import model as bench
from birkhoff.bench.baselines import EXPERT_VARIANTS, OurModel, Transformers
from birkhoff.cli.main import run
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from tests.models import TINY, random_model, random_tokens

QUICK = bench.ModelSetting(
    prompt_tokens=24, steps=3, rounds=2, batches=(1, 2), dtypes=("float32",), threads=1
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    synth(path, "tiny")
    return path


@pytest.fixture(scope="module")
def rows(path):
    progress = []
    rows = list(bench.bench_model(path, QUICK, progress=lambda *step: progress.append(step)))
    assert [done for done, _ in progress] == list(range(1, len(progress) + 1))
    assert progress[-1][0] == progress[-1][1]
    return rows


def test_every_row_carries_its_machine_and_its_setting(rows):
    for row in rows:
        assert {
            "commit",
            "machine",
            "threads",
            "versions",
            "shape",
            "dtype",
            "prompt_tokens",
            "steps",
        } <= set(row)
        assert row["bench"] == "model" and row["threads"] == 1 and json.loads(json.dumps(row)) == row


def test_both_implementations_agree(rows):
    verdicts = [row for row in rows if row["kind"] == "agreement"]
    assert len(verdicts) == 1 and verdicts[0]["passed"] is True
    assert verdicts[0]["logits"]["drift_most"] < 1e-4 and verdicts[0]["tokens"]["same_for"] == 3


def test_every_contender_has_a_row_for_every_phase_and_batch(rows):
    speeds = {(r["contender"], r["phase"], r["batch"]): r for r in rows if r["kind"] == "speed"}
    assert set(speeds) == {
        (contender, phase, batch)
        for contender in ("engine", "model", "transformers")
        for phase in ("prefill", "decode")
        for batch in (1, 2)
    }
    for (contender, *_), row in speeds.items():
        speed = row["tokens_per_second"]
        assert 0 < speed["p10"] <= speed["median"] <= speed["p90"] and row["rounds"] == 2
        assert ("times_transformers" in row) == (contender != "transformers")
        assert (row.get("experts_implementation") in EXPERT_VARIANTS) == (contender == "transformers")


def test_time_shares_are_reported(rows):
    shares = [row for row in rows if row["kind"] == "shares"]
    assert [row["batch"] for row in shares] == [1, 2]
    assert set(shares[0]["model_ms"]) == {"other", "mhc", "attention", "experts", "head"}
    assert set(shares[0]["engine_step_ms"]) == {"model", "sampling", "engine"}


def test_ratios_are_taken_within_a_round():
    speeds = {"transformers": {"decode": [1.0, 100.0, 10.0]}}
    rival = type("Rival", (), {"name": "transformers"})()
    ratios = bench._against(rival, speeds, [3.0, 300.0, 30.0], "decode", "engine")
    assert ratios == {"times_transformers": {"median": 3.0, "p10": 3.0, "p90": 3.0}}


def test_timing_measures_the_work_and_not_the_returned_tokens():
    class Slow(OurModel):
        def step(self, tokens):
            for _ in range(3):
                super().step(tokens)
                self.length -= 1
            return tokens

    prompts = [random_tokens(TINY, 24).tolist()]
    model = random_model()
    quick = max(bench._tokens_per_second(OurModel(model, 1, 24, 8), prompts, 8)[1] for _ in range(3))
    slow = max(bench._tokens_per_second(Slow(model, 1, 24, 8), prompts, 8)[1] for _ in range(3))
    assert slow < 0.7 * quick


def test_another_model_fails_the_agreement(path, tmp_path):
    synth(tmp_path / "other", "tiny", seed=1, dense="f32", experts="f32")
    rival = Transformers(tmp_path / "other", torch.float32)
    with birkhoff.load(path, max_requests=1) as engine:
        verdict = bench._agreement(engine, rival, [5, 6, 7, 8], 4, exact=True)
        assert verdict["passed"] is False and verdict["logits"]["share_beyond_tolerance"] == 1.0
        assert bench._agreement(engine, rival, [5, 6, 7, 8], 4, exact=False)["passed"] is None


def test_the_command_prints_json_lines_and_fails_without_agreement(path, monkeypatch, capfd):
    flags = ["--prompt-tokens", "16", "--steps", "2", "--rounds", "1", "--batch", "1", "--dtype", "float32"]
    arguments = ["bench", "model", "--model", str(path), "--threads", "1", *flags]
    assert run(arguments) == 0
    kinds = [json.loads(line)["kind"] for line in capfd.readouterr().out.splitlines()]
    assert kinds == ["agreement", *["speed"] * 6, "shares"]
    monkeypatch.setattr(agreement, "TOLERANCE", 0.0)  # no two roundings agree
    assert run(arguments) == 1


def test_alone_needs_no_other_package(path, monkeypatch):
    def raise_not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", raise_not_found)
    with pytest.raises(OptionError, match="--alone"):
        next(bench.bench_model(path, QUICK))
    rows = list(bench.bench_model(path, bench.ModelSetting(16, 2, 1, (1,), ("bfloat16",), 1), alone=True))
    assert {row["kind"] for row in rows} == {"speed", "shares"} and rows[0]["dtype"] == "bfloat16"
    assert not any("times_transformers" in row for row in rows)


@pytest.mark.parametrize(
    "invalid", [{"steps": 0}, {"rounds": -1}, {"batches": ()}, {"batches": (0,)}, {"dtypes": ("f8",)}]
)
def test_an_invalid_setting_is_refused(invalid):
    with pytest.raises(OptionError, match=next(iter(invalid))[:5]):
        bench.ModelSetting(**invalid)
