"""`validate --engine` accepts the engine of this machine and finds an engine that computes something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import torch
from typer.testing import CliRunner

import birkhoff
from birkhoff.cli.verbs import app
from birkhoff.convert.convert import convert
from birkhoff.errors import OptionError
from birkhoff.validate.engine_check import validate_engine
from tests.weights.files import edit

LENGTH = 40


@pytest.mark.parametrize("numerics", ["plain", "released"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_agrees(tiny, dtype, numerics):
    result = validate_engine(tiny, length=LENGTH, batches=(1, 3), dtype=dtype, numerics=numerics)
    print("\n".join(result.lines()))
    assert result.ok and [run.batch for run in result.runs] == [1, 3]
    assert all(run.rows == LENGTH + 31 and run.greedy.tokens == 32 for run in result.runs)
    exact = dtype == "float32" and numerics == "plain"
    assert all((run.exact is not None) == exact and bool(run.ratios) != exact for run in result.runs)
    assert json.loads(json.dumps(result.to_dict()))["ok"]


def test_packed_weights_agree(tmp_path):
    path = tmp_path / "nano.gguf"
    convert("nano", path, experts="mxfp4", dense="q8_0", mtp=False)
    result = validate_engine(path, length=LENGTH, batches=(2,))
    assert result.ok and max(row.rel_rmse for row in result.runs[0].exact.sites) < 1e-5


def with_other_weights(tiny: Path, tmp_path: Path, name: str) -> Path:
    """A copy of the checkpoint with half of the columns of one matrix exchanged."""
    path = Path(copytree(tiny, tmp_path / "other"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        stored = tensors[name].view(torch.uint8)
        tensors[name] = stored.roll(stored.shape[-1] // 2, -1).view(tensors[name].dtype)

    edit(path, change)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "site"),
    [("layers.2.attn.wo_b.weight", "post_attn[2]"), ("layers.1.ffn.gate.weight", "moe_router_logits[1]")],
)
def test_an_engine_with_other_weights_is_found(tiny, tmp_path, dtype, name, site):
    other = with_other_weights(tiny, tmp_path, name)
    with birkhoff.load(other, dtype=dtype, max_requests=2, prefix_cache=False, speculative=False) as engine:
        result = validate_engine(tiny, length=LENGTH, batches=(2,), engine=engine)
    text = "\n".join(result.lines())
    assert not result.ok and "does not agree" in text and site in text, text


def test_the_command(tiny, tmp_path):
    runner = CliRunner()
    good = runner.invoke(app, ["validate", str(tiny), "--engine", "--length", "20", "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout.splitlines()[-1])["ok"]
    shown = runner.invoke(app, ["validate", str(tiny), "--engine", "--length", "20", "--dtype", "bfloat16"])
    assert shown.exit_code == 0 and "agrees with the reference kernels" in shown.stdout
    for options in (
        [str(tiny), str(tiny), "--engine"],
        [str(tiny), "--engine", "--gate", "float32"],
        [str(tiny), "--engine", "--html", str(tmp_path / "x.html")],
        [str(tiny), str(tiny), "--device", "cpu"],
    ):
        refused = runner.invoke(app, ["validate", *options])
        assert isinstance(refused.exception, OptionError), options


def test_options_beside_an_engine_are_refused(tiny):
    with birkhoff.load(tiny) as engine, pytest.raises(OptionError, match="dtype"):
        validate_engine(tiny, engine=engine, dtype="float32")
    with pytest.raises(OptionError, match="at least 1"):
        validate_engine(tiny, batches=())


BUILD_IN_LITTLE_MEMORY = """
import resource
from birkhoff.errors import CapacityError
from birkhoff.validate.runs import build
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.locate import locate
checkpoint = open_checkpoint(locate("nano"))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    build(checkpoint)
except CapacityError as error:
    print(error)
"""


def test_a_model_that_does_not_fit_is_refused():
    """115 MiB of unpacked weights in 64 MiB of address space."""
    ended = subprocess.run(
        [sys.executable, "-c", BUILD_IN_LITTLE_MEMORY], capture_output=True, text=True, timeout=120
    )
    assert "run unpacked" in ended.stdout and "fewer layers" in ended.stdout, ended.stderr
