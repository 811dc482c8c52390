"""The verb `inspect`: data on stdout, exit status 1 when something is wrong."""

import json

import pytest
import typer
from typer.testing import CliRunner

from birkhoff.cli.inspect import inspect
from birkhoff.convert.synth import synth


@pytest.fixture(scope="module")
def app():
    app = typer.Typer()
    app.command()(inspect)
    return app


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "tiny"
    synth(path, "tiny")
    return path


def test_a_table_for_people(app, path):
    result = CliRunner().invoke(app, [str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in ("released, 585 tensors in 1 files", "routed experts", "2 swa, 2 csa, 2 hca, 1 mtp", "no problems",
                  "B per token", "fits"):  # fmt: skip
        assert words in result.stdout


def test_json_for_programs(app, path):
    result = CliRunner().invoke(app, [str(path), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["tensors"] == 585 and report["problems"] == []


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_problems_set_the_exit_status(app, tmp_path, flags):
    synth(tmp_path / "c", "tiny", shard_bytes=300_000)
    sorted((tmp_path / "c").glob("*.safetensors"))[1].unlink()
    result = CliRunner().invoke(app, [str(tmp_path / "c"), *flags], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "are missing" in result.stdout
