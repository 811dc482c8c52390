"""The verb `pull`, against a local server that answers like the hub: plan first, then bytes, in the hub cache."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import huggingface_hub.constants
import pytest
import typer
from typer.testing import CliRunner

import birkhoff
from birkhoff.cli.main import run as main
from birkhoff.cli.pull import pull
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.errors import CapacityError, CheckpointError, HubError, OptionError
from birkhoff.hf_hub import resolve
from birkhoff.sae.dictionary import Sae
from tests.cli.conftest import COMMAND, clean_environment
from tests.hub_server import HubServer, hub_server
from tests.sae.reference import random_sae


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pull") / "tiny"
    synth(path, "tiny", shard_bytes=300_000)
    return path


@pytest.fixture
def server(tiny, tmp_path, monkeypatch):
    """A server, and `huggingface_hub` of this process set to it and to a fresh cache."""
    with hub_server({"org/tiny": tiny}) as running:
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


def run(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(pull)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def downloads(server: HubServer) -> list[str]:
    """Weight files that were requested whole."""
    ends = (".safetensors", ".gguf")
    return [
        path for method, path, part in server.log if method == "GET" and path.endswith(ends) and part is None
    ]


def test_the_command_prints_the_plan_then_downloads(tiny, tmp_path):
    with hub_server({"org/tiny": tiny}) as server:
        environment = clean_environment(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path), COLUMNS="200")
        ran = subprocess.run(
            [*COMMAND, "pull", "org/tiny", "--gpu", "2MiB"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr
        path = Path(ran.stdout.strip())
        assert path.is_relative_to(tmp_path)
        assert all((path / f.name).read_bytes() == f.read_bytes() for f in tiny.iterdir())
        parts = [at for at, (_, _, part) in enumerate(server.log) if part is not None]
        whole = [
            at
            for at, (_, name, part) in enumerate(server.log)
            if part is None and name.endswith(".safetensors")
        ]
        assert len(parts) == 4 and max(parts) < min(whole), "headers of all shards come first"
    total = sum(f.stat().st_size for f in tiny.iterdir())
    output = ran.stderr
    marks = [
        "org/tiny, commit",
        "released, 585 tensors in 4 files",
        "experts     ",
        "no problems found",
        "gpu         2.00 MiB",
        "to download",
        "free on disk",
        f"1.27 MiB of {total / 2**20:.2f} MiB",
        "complete. Use it by its name: birkhoff chat --model org/tiny",
    ]
    places = [output.find(mark) for mark in marks]
    assert -1 not in places and places.index(max(places)) == len(places) - 1, (output, places)
    assert output.index("gpu   ") < output.index("to download") < output.index("complete")


def test_the_plan_as_json_and_a_second_pull(server):
    status, out, _ = run("org/tiny", "--json", "--gpu", "2MiB", "--dry-run")
    first = json.loads(out)
    assert status == 0 and not downloads(server) and first["path"] is None
    assert first["plan"]["tensors"] == 585 and first["plan"]["gpu"]["plan"]["experts"] == 56
    read = sum(first["files"][name] for name in ("config.json", "model.safetensors.index.json"))
    assert first["download_bytes"] + read == first["bytes"]
    status, out, _ = run("org/tiny", "--json", "--ram", "64MiB", "--context", "256", "--dry-run")
    host = json.loads(out)["plan"]["host"]
    assert host["host_bytes"] == 64 * 2**20 and "experts" in host["experts_text"]
    status, out, _ = run("org/tiny", "--json")
    path = Path(json.loads(out)["path"])
    assert path == resolve("org/tiny") and len(downloads(server)) == 4
    status, out, output = run("org/tiny", "--revision", server.commit("org/tiny"))
    assert status == 0 and Path(out.strip()) == path and len(downloads(server)) == 4
    assert "0 B to download" in output


def test_a_checkpoint_that_would_not_load_is_refused_before_the_download(server, tiny, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    server.repos["org/broken"] = broken
    with pytest.raises(CheckpointError, match=r"would not load: .*--force"):
        run("org/broken")
    assert run("org/broken", "--dry-run")[0] == 1
    (tmp_path / "images").mkdir()
    (tmp_path / "images/config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    (tmp_path / "images/model.safetensors").write_bytes(
        (tiny / "model-00001-of-00004.safetensors").read_bytes()
    )
    server.repos["org/images"] = tmp_path / "images"
    with pytest.raises(CheckpointError, match=r"would not load: .*multimodal"):
        run("org/images")
    assert not downloads(server)
    assert run("org/broken", "--force")[0] == 0 and len(downloads(server)) == 4


def test_another_architecture_and_plain_files_are_downloaded_without_a_plan(server, tiny, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    (other / "model.safetensors").write_bytes((tiny / "model-00001-of-00004.safetensors").read_bytes())
    (other / "pytorch_model.bin").write_bytes(b"x")
    (other / "layer_3").mkdir()
    (other / "layer_3/params.npz").write_bytes(b"archive")
    server.repos["org/other"] = other
    status, out, output = run("org/other")
    assert status == 0 and "no plan of our own engine: GPT-2 runs through Transformers" in output
    assert "Memory of the weights: stored" in output and "as stored" in output
    assert {file.name for file in Path(out.strip()).iterdir()} == {"config.json", "model.safetensors"}
    status, out, output = run("org/other/layer_3")
    assert status == 0 and "no checkpoint among these files" in output
    assert Path(out.strip()) == resolve("org/other/layer_3")
    assert (Path(out.strip()) / "params.npz").read_bytes() == b"archive"
    status, out, output = run(
        "org/other", "--include", "*.json", "--include", "*.npz", "--exclude", "config*", "--json"
    )
    assert list(json.loads(out)["files"]) == ["layer_3/params.npz"]


def test_a_published_sae_is_pulled_by_its_name(server, tmp_path):
    folder = tmp_path / "res-jb/blocks.8.hook_resid_pre"
    random_sae("relu", hook="pre_attn", layer=8).save(folder)
    random_sae("relu").save(tmp_path / "res-jb/blocks.9.hook_resid_pre")
    server.repos["jbloom/GPT2-Small-SAEs-Reformatted"] = tmp_path / "res-jb"
    name = "gpt2-small-res-jb/blocks.8.hook_resid_pre"
    with pytest.raises(
        HubError, match=r"birkhoff pull jbloom/GPT2-Small-SAEs-Reformatted/blocks\.8\.hook_resid_pre"
    ):
        Sae.load(name)
    status, out, output = run(name)
    assert status == 0 and f'Sae.load("{name}")' in output
    assert {path.name for path in Path(out.strip()).parent.iterdir()} == {"blocks.8.hook_resid_pre"}
    sae = Sae.load(name)
    assert (sae.hook, sae.layer, sae.metadata["centered"]) == ("pre_attn", 8, True)


def test_a_gguf_file(server, tiny, tmp_path):
    (tmp_path / "gguf").mkdir()
    convert(tiny, tmp_path / "gguf/tiny.gguf")
    (tmp_path / "gguf/second.gguf").write_bytes(b"GGUF")
    server.repos["org/gguf"] = tmp_path / "gguf"
    with pytest.raises(HubError, match=r"--gguf-file:\n.*second\.gguf\n.*tiny-mtp\.gguf\n.*tiny\.gguf"):
        run("org/gguf")
    status, out, output = run("org/gguf", "--gguf-file", "tiny.gguf")
    assert status == 0 and "tensors in 2 files" in output and "no problems found" in output
    assert resolve("org/gguf/tiny.gguf") == Path(out.strip())
    assert {Path(name).name for name in downloads(server)} == {"tiny.gguf", "tiny-mtp.gguf"}


def test_all_parts_of_a_split_gguf_file_are_taken(server, tmp_path):
    (tmp_path / "split/q4").mkdir(parents=True)
    parts = [f"q4/v4-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for name in (*parts, "q4/v4-00001-of-00002.gguf", "q4/other.gguf"):
        (tmp_path / "split" / name).write_bytes(b"GGUF")
    server.repos["org/split"] = tmp_path / "split"
    status, out, _ = run("org/split", "--gguf-file", parts[1], "--dry-run", "--json")
    assert status == 1 and "is cut short" in json.loads(out)["plan"]["reason"]
    assert list(json.loads(out)["files"]) == parts


def test_bad_arguments_and_a_full_disk(server, monkeypatch):
    with pytest.raises(OptionError, match="no name on the hub"):
        run("tiny")
    with pytest.raises(OptionError, match="one file to take"):
        run("org/tiny", "--gguf-file", "a.gguf", "--include", "*")
    with pytest.raises(HubError, match="no file of org/tiny matches nothing"):
        run("org/tiny", "--include", "nothing*")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**28})())
    with pytest.raises(CapacityError, match=r"more on disk, and 256\.00 MiB are free"):
        run("org/tiny")
    assert not downloads(server)


def test_load_reads_the_cache_and_downloads_only_when_asked(server, capsys):
    """Python and the command line: refused, then with `download`, then from the cache without network."""
    with pytest.raises(HubError, match="neither a local path nor in the hub cache"):
        birkhoff.load("org/tiny")
    assert not server.log
    with birkhoff.load("org/tiny", download=True, max_requests=1, kernels="reference") as engine:
        text = engine.generate("a b", max_tokens=2, temperature=0).text
    asked = len(server.log)
    commit = server.commit("org/tiny")
    command = [
        "generate",
        "--model",
        f"org/tiny@{commit}",
        "--kernels",
        "reference",
        "--temperature",
        "0",
        "a b",
    ]
    capsys.readouterr()
    assert main([*command, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.strip() == text.strip() and len(server.log) == asked
    assert main([*command[:2], "org/none", "a b"]) == 1
    assert "hub  org/none is neither" in capsys.readouterr().err
