"""The server and the command line on an ordinary model: a real process, a real client."""

from __future__ import annotations

import json
import time

import numpy as np
import openai
import pytest
import torch
import transformers
from safetensors.torch import save_file

from birkhoff.capture.store.reader import read_request
from birkhoff.cli import main
from tests.hf.models import LAYERS, D, make
from tests.hf.reference import Reference
from tests.hf.test_loading import TEMPLATE, byte_level, own
from tests.sae.reference import random_sae
from tests.server.conftest import serving

TEXT = "once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    tokenizer = own(byte_level(), TEMPLATE)
    make("qwen2", folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    random_sae("jumprelu", 48, D, seed=4, hook="post_mlp", layer=1, view="single").save(folder / "sae")
    save_file({"vector": torch.ones(D)}, folder / "v.safetensors")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    flags = ("--backend", "transformers", "--sae", f"features={folder / 'sae'}")
    with serving(folder / "server", *flags, model=str(folder / "model")) as served:
        yield served


@pytest.fixture(scope="module")
def theirs(folder):
    network = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    return transformers.AutoTokenizer.from_pretrained(folder / "model"), Reference(network.eval())


def test_completions_and_chats_equal_transformers(served, theirs):
    tokenizer, reference = theirs
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
    ids = tokenizer(TEXT).input_ids
    want = reference.generate(ids, 6)[0]
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=TEXT,
        max_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == tokenizer.decode(want, skip_special_tokens=True)
    messages = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    want = tokenizer.decode(reference.generate(ids, 6)[0], skip_special_tokens=True)
    options = {"messages": messages, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(model="", **options)
    assert chat.choices[0].message.content == want
    chunks = client.chat.completions.create(model="", stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == want


def test_a_message_is_continued_and_a_prompt_is_scored_alone(served, theirs):
    tokenizer, reference = theirs
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "It is"}]
    ids = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    want = tokenizer.decode(reference.generate(ids, 6)[0], skip_special_tokens=True)
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/chat/completions", {**body, "continue_final_message": True}).json()
    assert answer["choices"][0]["message"]["content"] == want and answer["usage"]["prompt_tokens"] == len(ids)
    before = served.metric("birkhoff_generated_tokens_total")
    scored = served.post("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0})
    (choice,) = scored.json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer(TEXT).input_ids)
    assert served.metric("birkhoff_generated_tokens_total") == before


def test_a_steered_and_captured_request(served, theirs):
    tokenizer, reference = theirs
    vector = torch.linspace(-2, 2, D)
    body = {
        "prompt": TEXT,
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "interventions": [
            {"op": "add", "at": {"hook": "post_attn", "layers": [1]}, "vector": vector.tolist(), "scale": 2.0}
        ],
        "capture": {
            "filesystem": {"hooks": {"post_mlp": "all"}, "positions": "all", "request_id": "http", "tag": "t"}
        },
    }
    answer = served.post("/v1/completions", body).json()
    assert "choices" in answer, answer
    ids = tokenizer(TEXT).input_ids

    def edit(hook, layer, x, prompt_len):
        return x + 2 * vector if (hook, layer) == ("post_attn", 1) else None

    tokens, seen = reference.generate(ids, 3, edit)
    assert answer["choices"][0]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    until = time.monotonic() + 300
    while not list((served.root / "t" / "http").glob("*.json")) and time.monotonic() < until:
        time.sleep(0.05)  # the answer may come before its rows are on disk
    entries = read_request(served.root / "t" / "http")
    assert set(entries) == {("post_mlp", layer) for layer in range(LAYERS)}
    for (hook, layer), entry in entries.items():
        np.testing.assert_allclose(entry.values(), seen[hook, layer].numpy(), rtol=1e-4, atol=1e-4)


def test_lens_features_schema_and_props(served):
    schema = served.get("/v1/interp/schema").json()
    assert schema["streams"] is None and {"pre_attn", "attn_out", "final_hidden"} <= schema["hooks"].keys()
    props = served.get("/props").json()
    assert props["streams"] is None and props["signals"] == [] and props["experts"] is None
    assert props["chat"] == {"chat": True, "tools": False, "reasoning": False, "system": True}
    (listed,) = served.get("/api/tags").json()["models"]
    assert listed["details"]["family"] == "qwen2"
    lens = served.post("/v1/lens", {"prompt": TEXT, "k": 2})
    assert lens.status_code == 200 and lens.json()["views"] == ["head"]
    features = served.post("/v1/interp/features", {"prompt": TEXT, "sae": "features"})
    assert features.status_code == 200, features.text
    grammar = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["fox", "dog"]}}}
    assert json.loads(served.chat(response_format=grammar)["choices"][0]["message"]["content"]) in (
        "fox",
        "dog",
    )


@pytest.mark.parametrize(
    "path, body, says",
    [
        ("/v1/interp/attention", {"prompt": TEXT}, "no DeepSeek-V4"),
        ("/v1/completions", {"prompt": TEXT, "signals": ["res_mix"]}, "no DeepSeek-V4"),
        (
            "/v1/completions",
            {"prompt": TEXT, "capture": {"memory": {"hooks": {"mhc_head_mix": [0]}}}},
            "mhc_head_mix",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "tools",
        ),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(served, path, body, says):
    answer = served.post(path, body)
    assert 400 <= answer.status_code < 500 and says in answer.text, answer.text


def test_the_command_line(folder, theirs, tmp_path, capsys):
    def run(*arguments):
        status = main.run(arguments)
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    tokenizer, reference = theirs
    model = str(folder / "model")
    flags = ["--model", model, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json"]
    printed = json.loads(run("generate", TEXT, *flags))
    assert printed["token_ids"] == reference.generate(tokenizer(TEXT).input_ids, 4)[0]
    assert json.loads(run("generate", "--chat", TEXT, *flags))["finish_reason"] == "length"
    (tmp_path / "texts.txt").write_text("the quick brown fox\na lazy dog\n")
    data = tmp_path / "rows"
    run("capture", str(tmp_path / "texts.txt"), "--out", str(data), "--hooks", "post_mlp=1", "--model", model)
    assert (data / "harvest.json").is_file()
    report = json.loads(run("inspect", model, "--json"))
    assert report["backend"] == "transformers" and report["family"] == "qwen2" and report["layers"] == LAYERS
    assert "post_attn" in report["hooks"] and report["problems"] == []
    assert "Qwen 2" in run("inspect", model)
