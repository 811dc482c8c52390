"""`birkhoff.load` of ordinary models: text, chat, refusals, options, and what it says without Transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import birkhoff
from birkhoff import Add, Capture
from birkhoff.errors import (
    BirkhoffError,
    CapacityError,
    CheckpointError,
    OptionError,
    PromptError,
    TextUnavailable,
    UnsupportedModel,
)
from birkhoff.hf.inspect_model import inspect_model
from birkhoff.hf.model_docs import document
from birkhoff.text.general_tokenizer import GeneralTokenizer
from tests.hf.models import VOCAB, D, make

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a b c\n\n  déjà vu 漢字",
    "once upon a time there was",
] * 4
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|bot|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ '<|user|>' if m['role'] != 'assistant' else '<|bot|>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
SMALL = {"cache_bytes": 1 << 24, "device": "cpu"}


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece():
    """BPE with byte fallback and `▁`, as Llama 2, Mistral and Gemma have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL, "<unk>", *fallback])
    tokenizer.train_from_iterator([text.replace(" ", "▁").replace("漢字", "") for text in TEXTS], trainer)
    raw = json.loads(tokenizer.to_str())  # the byte tokens and runs of newlines are part of the text
    raw["added_tokens"] = [each for each in raw["added_tokens"] if not each["content"].startswith("<0x")]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_tokens(["\n\n"])
    return tokenizer


def own(tokenizer, template=None):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = template
    return wrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = own(byte_level(), TEMPLATE)
    make("llama", folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with birkhoff.load(folder, backend="transformers", **SMALL) as engine:
        yield engine


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_tokens_of_a_text_are_those_of_the_models_own_tokenizer(kind):
    theirs = own(kind())
    ours = GeneralTokenizer(theirs.backend_tokenizer.to_str())
    for text in (*TEXTS[:3], "x\n\n\ny", "naïve ☃ 漢字 text"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == text == theirs.decode(ids)
    spelled = ours.encode("say <|user|> and </s>")
    assert not ours.special_ids & set(spelled) and ours.decode(spelled) == "say <|user|> and </s>"
    assert ours.decode([theirs.eos_token_id], skip_special=True) == ""


def test_text_is_encoded_and_generated_as_transformers_does(engine, folder):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = theirs("once upon a", return_tensors="pt")
    assert (
        engine.prompt_ids("once upon a") == prompt.input_ids[0].tolist() and engine.config.bos_token_id == 1
    )
    output = engine.generate("once upon a", max_tokens=8, temperature=0, ignore_eos=True)
    want = network.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[
        0, len(prompt.input_ids[0]) :
    ]
    assert output.token_ids == want.tolist() and output.text == theirs.decode(want, skip_special_tokens=True)
    streamed = list(engine.stream("once upon a", max_tokens=8, temperature=0, ignore_eos=True))
    assert "".join(event.text for event in streamed) == output.text


def test_chat_uses_the_models_template(engine, folder):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]
    asked = [*messages, {"role": "user", "content": [{"type": "text", "text": "over"}]}]
    assert theirs.decode(engine.encode_chat(asked)) == "<s><|user|>the fox<|bot|>a dog<|user|>over<|bot|>"
    assert theirs.decode(engine.encode_chat(messages)) == "<s><|user|>the fox<|bot|>a dog"
    output = engine.chat(asked, max_tokens=6, temperature=0, ignore_eos=True)
    assert output.message.content == output.text and output.message.reasoning == ""
    plain = engine.generate(engine.encode_chat(asked), max_tokens=6, temperature=0, ignore_eos=True)
    assert plain.token_ids == output.token_ids and plain.text == output.text
    with pytest.raises(PromptError, match="no such role"):
        engine.encode_chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(PromptError, match="text only"):
        engine.encode_chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])
    with pytest.raises(OptionError, match="effort"):
        engine.encode_chat(messages, effort="max")


def test_analyses_work_or_say_what_they_need(engine):
    ids = engine.prompt_ids("the quick brown fox")
    assert engine.num_streams is None and engine.lens(ids).views == ["head"]
    assert engine.identity()[1] == engine.identity()[1] and len(engine.identity()[1]) == 32
    assert engine.settings["backend"] == "transformers" and engine.reuse == {
        "prefix": None,
        "speculation": None,
    }
    with pytest.raises(UnsupportedModel, match="no DeepSeek-V4"):
        engine.attention(ids)
    with pytest.raises(UnsupportedModel, match="no DeepSeek-V4"):
        engine.generate("the", signals=["res_mix"], max_tokens=1)
    with pytest.raises(BirkhoffError, match="stream"):
        engine.generate("the", steer=[Add(torch.ones(D), "pre_attn", [0], streams=[0])], max_tokens=1)
    with pytest.raises(BirkhoffError, match="path is 'read', but edits of this model"):
        engine.generate("the", steer=[Add(torch.ones(D), "pre_attn", [0], path="read")], max_tokens=1)
    (batch,) = engine.stream_acts(["the fox", "a dog"], Capture({"post_mlp": [1]}, "all"), batch_rows=64)
    assert len(batch) == sum(len(engine.prompt_ids(text)) for text in ("the fox", "a dog"))


def test_batch_invariant_gives_equal_bits(folder):
    prompts = [[5, 6, 7], [9] * 20, [11, 12]]
    with birkhoff.load(folder, batch_invariant=True, max_batch_tokens=16, **SMALL) as engine:
        capture = Capture({"post_mlp": "all"}, "all")
        together = engine.generate(prompts, capture=capture, max_tokens=4, temperature=0, ignore_eos=True)
        for prompt, output in zip(prompts, together):
            alone = engine.generate(prompt, capture=capture, max_tokens=4, temperature=0, ignore_eos=True)
            for key, rows in alone.acts.items():
                assert torch.equal(rows.tensor, output.acts[key].tensor)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {}}, "multimodal"),
        ({"model_type": "strange", "auto_map": {"AutoModel": "code.py"}}, "never executed"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "mamba"}, "no row in the table"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, config, says):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for backend in ("auto", "transformers"):
        with pytest.raises(UnsupportedModel, match=says):
            birkhoff.load(tmp_path, backend=backend)


def test_code_beside_a_known_family_is_not_executed(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    with birkhoff.load(tmp_path, **SMALL) as engine:
        assert type(engine.model.network).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "executed").exists()


def test_options_of_the_other_backend_are_refused(folder):
    for option in (
        {"speculative": 2},
        {"kernels": "triton"},
        {"prefix_cache": True},
        {"numerics": "released"},
    ):
        with pytest.raises(OptionError, match=f"{next(iter(option))} is .*backend birkhoff"):
            birkhoff.load(folder, **option)
    with pytest.raises(OptionError, match=r"max_context is 999, the model's limit is 128"):
        birkhoff.load(folder, max_context=999, **SMALL)
    with pytest.raises(CapacityError, match="raise cache_bytes"):
        birkhoff.load(folder, max_context=100, cache_bytes=1000, device="cpu")
    with birkhoff.load(folder, speculative=False, prefix_cache=False, max_context=64, **SMALL) as engine:
        assert engine.max_context == 64
    with pytest.raises(UnsupportedModel, match="llama"):
        birkhoff.load(folder, backend="birkhoff")
    with pytest.raises(OptionError, match="backend is 'jax'"):
        birkhoff.load(folder, backend="jax")
    with pytest.raises(OptionError, match="tensor_parallel_size is 2, an option of the backend vllm"):
        birkhoff.load(folder, tensor_parallel_size=2)


def test_a_model_without_tokenizer_takes_ids_only(tmp_path):
    make("gpt2", tmp_path)
    with birkhoff.load(tmp_path, **SMALL) as engine:
        assert len(engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids) == 2
        with pytest.raises(TextUnavailable):
            engine.generate("text")
        with pytest.raises(TextUnavailable):
            engine.chat([{"role": "user", "content": "x"}])
        assert engine.config.vocab_size == VOCAB


def test_missing_weights_are_named(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        birkhoff.load(tmp_path)


def _drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _pack(tensors):
    tensors["model.layers.1.mlp.up_proj.qweight"] = tensors.pop("model.layers.1.mlp.up_proj.weight").int()


def _codes(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "change, config, error, says",
    [
        (_drop, {}, CheckpointError, r"lacks 1 tensors of the model, such as model\.layers\.1.*no others"),
        (_pack, {}, CheckpointError, r"1 others, such as model\.layers\.1\.mlp\.up_proj\.qweight"),
        (_codes, {}, UnsupportedModel, "stored as F8_E4M3: a quantised checkpoint"),
        (None, {"num_hidden_layers": 5}, CheckpointError, "lacks 18 tensors"),
        (None, {"intermediate_size": 50}, CheckpointError, "cannot load"),
        (None, {"hidden_act": "nosuch"}, CheckpointError, "nosuch"),
        (None, {"hidden_size": "x"}, CheckpointError, "hidden_size"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(folder, tmp_path, change, config, error, says):
    """Transformers fills what is missing with random numbers and goes on."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if change is not None:
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    changed = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(error, match=says):
        birkhoff.load(tmp_path, **SMALL)
    assert any("F8_E4M3" in problem for problem in inspect_model(tmp_path)["problems"]) == (change is _codes)


def test_without_transformers_the_extra_is_named(folder):
    code = (
        "import sys; sys.modules['transformers'] = None\nimport birkhoff\n"
        f"try: birkhoff.load({str(folder)!r})\nexcept birkhoff.BirkhoffError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "birkhoff-v4[transformers]" in done.stdout, done.stdout + done.stderr


def test_the_page_of_models_is_up_to_date():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == document(), "write it again: python -m birkhoff.hf.model_docs > docs/models.md"
