"""`bench harvest` and `bench sae`: every rate stands beside its limit, on a CPU at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from birkhoff.api.engine import Engine
from birkhoff.bench.harvest import HarvestSetting, measure
from birkhoff.bench.sae import SaeSetting, bench_sae
from birkhoff.cli.bench import app
from birkhoff.engine.engine import EngineCore
from birkhoff.sae.train import KINDS
from tests.models import random_model


def test_all_destinations_are_measured_beside_prompts_alone(tmp_path: Path):
    """An engine without a tokenizer, as the one of random weights is."""
    core = EngineCore(random_model(), max_requests=2, max_context=64, num_pages=8, max_batch_tokens=64)
    with Engine(core, None, None, name="tiny") as engine:
        rows = list(measure(engine, HarvestSetting(4, 12, 8, 16, 2), tmp_path))
    kinds = [(row["kind"], row.get("sites")) for row in rows]
    each = [
        (kind, sites)
        for sites in ("one layer", "all layers")
        for kind in ("device", "shuffled", "host", "files")
    ]
    assert kinds == [("prompts", None), *each]
    assert all(row["tokens_per_second"] > 0 and row["bench"] == "harvest" for row in rows)
    assert all("share_of_prompts" in row for row in rows if row["kind"] in ("device", "shuffled", "host"))
    assert all(row["disk_gb_per_second"] > 0 for row in rows if row["kind"] == "files")


def test_every_kind_is_measured_beside_the_plain_loop():
    setting = SaeSetting(64, 16, 4, 32, steps=2, warm_steps=1, products="float32")
    rows = list(bench_sae("cpu", setting))
    assert [row["contender"] for row in rows] == ["plain loop", "encoder", *KINDS]
    assert all(row["times_plain"] > 0 and row["features_per_row"] > 0 for row in rows[2:])


def test_the_command_prints_lines_and_refuses_a_missing_device():
    options = "--features 32 --width 8 --k 2 --batch-rows 16 --steps 1 --kind topk"
    result = CliRunner().invoke(app, f"sae --device cpu {options}".split())
    assert (
        result.exit_code == 0
        and [json.loads(line)["contender"] for line in result.stdout.splitlines()][2] == "topk"
    )
    if not torch.cuda.is_available():
        for verb in ("sae", "harvest"):
            refused = CliRunner().invoke(app, [verb])
            assert refused.exit_code != 0
