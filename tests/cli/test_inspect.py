"""The verb `inspect`: data on stdout, exit status 1 if there are problems."""

import json

import pytest
import typer
from typer.testing import CliRunner

from birkhoff.cli.inspect import inspect
from birkhoff.convert.presets import preset
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


def test_the_text_report(app, path):
    result = CliRunner().invoke(app, [str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (
        "released, 585 tensors in 1 files",
        "routed experts",
        "2 swa, 2 csa, 2 hca, 1 mtp",
        "no problems",
        "B per token",
        "fits",
    ):
        assert words in result.stdout


def test_the_json_report(app, path):
    result = CliRunner().invoke(app, [str(path), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["tensors"] == 585 and report["problems"] == []


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_problems_set_the_exit_status(app, tmp_path, flags):
    synth(tmp_path / "c", "tiny", shard_bytes=300_000)
    sorted((tmp_path / "c").glob("*.safetensors"))[1].unlink()
    result = CliRunner().invoke(app, [str(tmp_path / "c"), *flags], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "are missing" in result.stdout


def test_files_without_tensors_have_no_active_parameters(app, tmp_path):
    synth(tmp_path / "c", "tiny")
    for shard in (tmp_path / "c").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:1000])
    result = CliRunner().invoke(app, [str(tmp_path / "c")], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "cut short" in result.stdout + result.stderr
    assert "active per token" not in result.stdout and "fits " not in result.stdout


def test_a_gpu_plan_from_a_config_only(app, tmp_path):
    """V4-Flash on 24 GiB: memory by kind, expert placement and speed limits."""
    result = CliRunner().invoke(app, ["flash", "--gpu", "24GiB", "--requests", "2"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (
        "24.00 GiB: 2 x 32768 tokens",
        "projections",
        "4.45 GiB",
        "hot experts, spare slots",
        "of 11008 on the",
        "64 spare slots of 12.75 MiB",
        "of host memory",
        "csa 6720 B, hca 160 B a token",
        "4.3 TB/s of the GPU, 55 GB/s of the bus",
        "(random placement): 1",
        "(no misses): 383 at batch 1, 1036 at batch 8, 2243 at batch 64 tokens/s",
    ):
        assert words in result.stdout, words
    forecast = json.loads(CliRunner().invoke(app, ["flash", "--gpu", "24GiB", "--json"]).stdout)
    plan = forecast["plan"]
    parts = sum(plan["weights"].values()) + plan["cache_bytes"] + plan["working_bytes"] + plan["hot_bytes"]
    assert parts + plan["left_bytes"] == plan["device_bytes"] == 24 * 2**30
    slower = CliRunner().invoke(
        app, ["flash", "--gpu", "24GiB", "--json", "--gpu-speed", "1TB", "--bus-speed", "25GB"]
    )
    for one, two in zip(forecast["limits"], json.loads(slower.stdout)["limits"]):
        assert two["tokens_per_second"]["1"] < one["tokens_per_second"]["1"] / 2
    (tmp_path / "config.json").write_text(json.dumps(preset("flash").to_dict()))
    for where in (tmp_path, tmp_path / "config.json"):
        again = CliRunner().invoke(app, [str(where), "--gpu", "24GiB", "--json"])
        assert json.loads(again.stdout) == forecast


def test_a_gpu_that_is_too_small_is_refused_with_sizes(app):
    result = CliRunner().invoke(app, ["flash", "--gpu", "8GiB"], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and "does not fit: the model needs" in result.stdout
    assert "without a single routed expert (weights" in result.stdout and "may use 8.00 GiB" in result.stdout
    assert "write it as" not in result.stdout
    result = CliRunner().invoke(app, ["flash", "--gpu", "24"], env={"COLUMNS": "400"})
    assert "A size without a unit is bytes: write it as 24GiB" in result.stdout
    result = CliRunner().invoke(app, ["flash"])
    assert result.exit_code != 0 and "nothing to inspect" in str(result.exception)


def test_a_plan_for_local_files_uses_their_config(app, path):
    result = CliRunner().invoke(app, [str(path), "--gpu", "2MiB", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and "model" not in report
    assert report["gpu"]["plan"]["experts"] == 56 and report["gpu"]["context"]["requests"] == 1
    assert CliRunner().invoke(app, [str(path), "--gpu", "64KiB"]).exit_code == 1, "it does not fit"
    text = (
        CliRunner()
        .invoke(app, [str(path), "--gpu", "2MiB", "--context", "512"], env={"COLUMNS": "200"})
        .stdout
    )
    assert "1 x 512 tokens" in text and "memory      bfloat16" in text and "memory      stored" not in text


def test_the_plan_of_a_cpu_names_what_is_held_and_what_is_mapped(app, path):
    result = CliRunner().invoke(app, [str(path), "--ram", "1GiB", "--json"])
    plan = json.loads(result.stdout)["host"]
    assert result.exit_code == 0 and not plan["mapped"] and plan["experts"] == 56
    assert plan["used_bytes"] + plan["left_bytes"] == plan["host_bytes"] == 1 << 30
    text = CliRunner().invoke(app, ["flash", "--ram", "24GiB"], env={"COLUMNS": "200"}).stdout
    assert "11264 experts stay in their files (140.25 GiB), read from page cache and disk" in text
    refused = CliRunner().invoke(app, ["flash", "--ram", "4GiB"], env={"COLUMNS": "200"})
    assert refused.exit_code == 1 and "and 4.00 GiB are free" in refused.stdout
    beside = CliRunner().invoke(app, ["flash", "--gpu", "24GiB", "--ram", "64GiB"], env={"COLUMNS": "200"})
    assert beside.exit_code == 1 and "of host memory, and 64.00 GiB are free" in beside.stdout
