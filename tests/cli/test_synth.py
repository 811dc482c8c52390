"""The verb `synth`: the report matches the written files, also with --dry-run."""

import json

import pytest
import typer
from typer.testing import CliRunner

from birkhoff.cli.synth import synth
from birkhoff.weights import open_checkpoint
from tests.capture.test_faults import small_disk  # noqa: F401 (a fixture)
from tests.cli.conftest import birkhoff


@pytest.fixture(scope="module")
def app():
    app = typer.Typer()
    app.command()(synth)
    return app


def test_the_directory_on_stdout_and_status_on_stderr(app, tmp_path):
    out = tmp_path / "c"
    result = CliRunner().invoke(app, [str(out), "--layers", "3", "--seed", "4", "--no-mtp"])
    assert result.exit_code == 0 and result.stdout == f"{out}\n"
    assert "tiny, 3 layers, seed 4" in result.stderr
    assert open_checkpoint(out).config.num_hidden_layers == 3


@pytest.mark.parametrize("where", ["c", "new/c", "."])
def test_a_disk_that_is_too_small_is_known_before_anything_is_written(small_disk, where):  # noqa: F811
    done = birkhoff("synth", str(small_disk / where))
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(b"disk-full  "), done.stderr
    assert b"MiB more on disk, and " in done.stderr and not list(small_disk.iterdir())


def test_a_dry_run_counts_and_writes_nothing(app, tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path / "c"), "--like", "flash", "--dry-run", "--json"])
    report = json.loads(result.stdout)
    assert (report["tensors"], report["written"]) == (69187, False) and round(
        report["bytes"] / 1e9, 1
    ) == 159.6
    assert not (tmp_path / "c").exists()


def test_json_matches_what_is_on_disk(app, tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path / "c"), "--json"])
    report = json.loads(result.stdout)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert report["tensors"] == len(checkpoint) and report["bytes"] == sum(
        ref.nbytes for ref in checkpoint.values()
    )
