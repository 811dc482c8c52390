"""Ollama's routes about models, called with its own client: list, show, ps, and names that are not served."""

from __future__ import annotations

import datetime
import shutil

import ollama
import pytest

import birkhoff
from birkhoff.config import V4Config
from birkhoff.convert.convert import convert
from birkhoff.embedded import EMBEDDED
from birkhoff.server.model_files import WHOLE_BYTES, describe_files
from tests.server.conftest import serving, user

NANO = EMBEDDED / "nano"


@pytest.fixture
def client(served):
    with ollama.Client(host=served.url) as client:
        yield client


def test_list_has_the_size_of_the_files_and_a_digest_of_them(client):
    (model,) = client.list().models
    files = list(NANO.glob("*.safetensors"))
    assert model.model == "nano" and model.size == sum(file.stat().st_size for file in files)
    assert model.modified_at.timestamp() == pytest.approx(max(file.stat().st_mtime for file in files))
    assert len(model.digest) == 64 and model.digest == client.list().models[0].digest
    assert model.details.format == "safetensors" and model.details.family == "deepseek4"
    assert model.details.parameter_size == "33.65M" and model.details.quantization_level == "FP4"


def test_show_describes_the_model(client):
    shown, config = client.show("nano:latest"), V4Config.from_file(NANO / "config.json")
    info = shown.modelinfo
    assert info["general.architecture"] == "deepseek4" and info["general.parameter_count"] == 33_650_390
    assert info["deepseek4.context_length"] == config.max_position_embeddings
    assert info["deepseek4.block_count"] == config.num_hidden_layers
    assert info["deepseek4.expert_count"] == config.n_routed_experts
    assert shown.capabilities == ["completion", "tools", "thinking"]
    parameters = dict(line.split() for line in shown.parameters.splitlines())
    assert int(parameters["num_ctx"]) == client.ps().models[0].context_length
    assert shown.modelfile.startswith("FROM nano:latest\n")
    assert shown.details == client.list().models[0].details
    assert shown.modified_at == client.list().models[0].modified_at


def test_ps_lists_the_model_in_memory_for_good(client, served):
    (running,) = client.ps().models
    (listed,) = client.list().models
    assert running.name == running.model == "nano" and running.digest == listed.digest
    assert running.size > 10**7 and running.size_vram == 0
    assert running.expires_at > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=36_500)
    assert running.context_length == served.get("/props").json()["max_context"]


def test_names_that_are_not_served(client, served):
    for call in (
        lambda: client.show("llama3"),
        lambda: client.chat("llama3", user("Hi")),
        lambda: client.generate("llama3", "Hi"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"llama3.*not served here") as caught:
            call()
        assert caught.value.status_code == 404
    assert served.post("/api/show", {"name": "nano"}).status_code == 200  # older clients
    missing = served.post("/api/show", {})
    assert missing.status_code == 400 and "model" in missing.json()["error"]
    assert served.get("/api/version").json() == {"version": birkhoff.__version__}


def test_a_copy_under_other_names_and_options_has_the_same_digest(tmp_path, client):
    copy = tmp_path / "copy"
    shutil.copytree(NANO, copy)
    with serving(
        tmp_path / "served", "--served-name", "a,b", "--dtype", "bfloat16", model=str(copy)
    ) as other:
        with ollama.Client(host=other.url) as other_client:
            models = other_client.list().models
            assert [model.model for model in models] == ["a", "b"]
            assert [model.model for model in other_client.ps().models] == ["a", "b"]
            assert {model.digest for model in models} == {client.list().models[0].digest}
            assert other_client.show("b").details == client.show("nano").details


def test_other_weights_have_another_digest(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(NANO, copy)
    before = describe_files(copy)
    file = max(copy.glob("*.safetensors"))
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        byte = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte[0] ^ 1]))
    after = describe_files(copy)
    assert after.digest != before.digest and after.size == before.size
    assert file.stat().st_size < WHOLE_BYTES


def test_a_gguf_file_is_described_by_its_own_types(tmp_path):
    convert("nano", tmp_path / "nano.gguf")
    described = describe_files(tmp_path / "nano.gguf")
    assert described.format == "gguf" and described.quantization == "MXFP4"
    assert described.size >= (tmp_path / "nano.gguf").stat().st_size
