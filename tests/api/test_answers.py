"""`generate` and `chat`: shapes, fields, finish reasons, seeds, log-probabilities; results of `logits` and `trace`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff.errors import EngineClosed, SiteError
from tests.api.conftest import CONTEXT, open_engine

GREEDY = {"temperature": 0, "max_tokens": 12}
IDS = [5, 80, 200, 7, 91]


def test_every_public_name_is_exported():
    for name in birkhoff.__all__:
        assert getattr(birkhoff, name) is not None, name
    assert len(set(birkhoff.__all__)) == len(birkhoff.__all__) and birkhoff.__all__ == sorted(
        birkhoff.__all__
    )
    assert (
        {"load", "Engine", "Output", "Trace", "BirkhoffError", "mhc"}
        <= set(birkhoff.__all__)
        <= set(dir(birkhoff))
    )
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        birkhoff.lod  # noqa: B018


def test_an_output_has_its_documented_fields(idle):
    out = idle.generate("hello", logprobs=2, **GREEDY)
    promised = {
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "logprobs",
        "acts",
        "interp",
        "timings",
    }
    assert promised <= set(vars(out)) and isinstance(out, birkhoff.Output)
    assert out.prompt_token_ids == [0, *idle.tokenizer.encode("hello")]  # BOS and the text
    assert len(out.token_ids) == 12 and out.finish_reason == "length" and out.error is None
    assert out.text == idle.tokenizer.decode(out.token_ids, skip_special=True) and out.acts == {}
    t = out.timings
    assert t["prompt_tokens"] == 6 and t["output_tokens"] == 12 and t["preemptions"] == 0
    assert min(t["queue_ms"], t["prefill_ms"], t["decode_ms"], t["tokens_per_second"]) > 0


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(idle):
    one = idle.generate("ab", **GREEDY)
    listed = idle.generate(["ab"], **GREEDY)
    several = idle.generate(["ab", [0, 100, 101], "cd"], **GREEDY)
    assert isinstance(one, birkhoff.Output) and isinstance(listed, list) and len(several) == 3
    assert (
        listed[0].token_ids == one.token_ids == several[0].token_ids == several[1].token_ids
    )  # "ab" is 100, 101
    choices = idle.generate("ab", n=3, **GREEDY)
    assert [c.token_ids for c in choices] == [one.token_ids] * 3
    nested = idle.generate(["ab", "cd"], n=2, **GREEDY)
    assert [[c.token_ids for c in pair] for pair in nested] == [[several[i].token_ids] * 2 for i in (0, 2)]


CONTAINERS = {
    "tuple": tuple(IDS),
    "tensor": torch.tensor(IDS),
    "short tensor": torch.tensor(IDS, dtype=torch.int16),
    "array": np.array(IDS),
    "numpy numbers": [np.int64(i) for i in IDS],
}


@pytest.mark.parametrize("prompt", CONTAINERS.values(), ids=CONTAINERS)
def test_token_ids_are_accepted_in_any_container(idle, prompt):
    out = idle.generate(prompt, **GREEDY)
    assert out.prompt_token_ids == IDS and out.token_ids == idle.generate(IDS, **GREEDY).token_ids
    assert all(type(token) is int for token in out.prompt_token_ids)
    assert torch.equal(idle.logits(prompt), idle.logits(IDS))


def test_rows_of_a_matrix_are_prompts(idle):
    rows = torch.tensor([IDS, IDS[::-1]])
    assert [o.prompt_token_ids for o in idle.generate(rows, **GREEDY)] == rows.tolist()


def test_more_prompts_than_slots(idle):
    prompts = [[5 + i, 9] for i in range(11)]
    outputs = idle.generate(prompts, **GREEDY)
    assert [o.token_ids for o in outputs] == [idle.generate(p, **GREEDY).token_ids for p in prompts]


def test_stop_strings_may_span_tokens(idle, letters):
    """Every letter is one token here, so a stop string of several letters spans several tokens."""
    plain = idle.generate("x", temperature=0, max_tokens=40, logit_bias=letters)
    assert len(plain.text) == 40 and plain.text.isalpha()
    stop = plain.text[10:14]
    at = plain.text.index(stop)
    out = idle.generate("x", temperature=0, max_tokens=40, logit_bias=letters, stop=["zzzz", stop])
    assert out.text == plain.text[:at] and out.finish_reason == "stop"
    assert (
        out.token_ids == plain.token_ids[: at + 4]
    )  # the tokens of the stop string are kept, its text is not
    assert idle.generate("x", temperature=0, max_tokens=40, logit_bias=letters, stop=stop).text == out.text


def test_text_withheld_for_an_incomplete_stop_string_is_returned_at_the_end(idle, letters):
    plain = idle.generate("x", temperature=0, max_tokens=20, logit_bias=letters)
    out = idle.generate("x", temperature=0, max_tokens=20, logit_bias=letters, stop=plain.text[-3:] + "!")
    assert out.text == plain.text and out.finish_reason == "length"


def test_a_stop_string_within_min_tokens_is_ignored(idle, letters):
    plain = idle.generate("x", temperature=0, max_tokens=40, logit_bias=letters)
    early, late = plain.text[2:4], plain.text[20:24]
    out = idle.generate(
        "x", temperature=0, max_tokens=40, logit_bias=letters, stop=[early, late], min_tokens=6
    )
    indices = [plain.text.find(s, 6) for s in (early, late)]
    at = min(p for p in indices if p >= 0)
    assert out.finish_reason == "stop" and out.text == plain.text[:at] and len(out.token_ids) > 6


def test_end_tokens(idle):
    """A bias makes the end token the most likely one at every position."""
    eos = {1: 100.0}
    out = idle.generate("x", logit_bias=eos, **GREEDY)
    assert out.token_ids == [1] and out.finish_reason == "stop" and out.text == ""
    waited = idle.generate("x", logit_bias=eos, min_tokens=5, **GREEDY)
    assert len(waited.token_ids) == 6 and waited.token_ids[5] == 1 and 1 not in waited.token_ids[:5]
    ignored = idle.generate("x", logit_bias=eos, ignore_eos=True, **GREEDY)
    assert ignored.token_ids == [1] * 12 and ignored.finish_reason == "length" and ignored.text == ""
    other = idle.generate("x", logit_bias={77: 100.0}, stop_token_ids=[77, 78], **GREEDY)
    assert other.token_ids == [77] and other.finish_reason == "stop" and other.text == ""
    both = idle.generate("x", logit_bias={77: 100.0}, stop_token_ids=[77], min_tokens=3, **GREEDY)
    assert len(both.token_ids) == 4 and both.token_ids[3] == 77


def test_logprobs_equal_those_of_the_model(idle):
    """Independent of temperature, bias and penalties: the float64 log-softmax of the unprocessed logits."""
    out = idle.generate(
        IDS,
        max_tokens=15,
        temperature=0.7,
        top_p=0.9,
        seed=4,
        logprobs=5,
        logit_bias={9: 3.0},
        frequency_penalty=0.5,
    )
    everything = [*IDS, *out.token_ids]
    true = idle.logits(everything).double().log_softmax(-1)[len(IDS) - 1 : -1]
    assert len(out.logprobs) == len(out.token_ids) == 15
    worst = 0.0
    for index, (reported, row) in enumerate(zip(out.logprobs, true)):
        assert reported.token_id == out.token_ids[index] and len(reported.top) == 5
        worst = max(worst, abs(reported.logprob - row[reported.token_id].item()))
        best = row.topk(5)
        worst = max([worst, *(abs(value - t) for (_, value), t in zip(reported.top, best.values.tolist()))])
        assert [value for _, value in reported.top] == sorted((v for _, v in reported.top), reverse=True)
        assert all(abs(row[token].item() - value) < 1e-4 for token, value in reported.top)
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst < 1e-4
    assert idle.generate(IDS, **GREEDY).logprobs is None
    assert all(p.top == () for p in idle.generate(IDS, logprobs=0, **GREEDY).logprobs)


def test_seeds_repeat_and_differ(idle):
    def draw(**options):
        return idle.generate(IDS, **{"max_tokens": 12, **options}).token_ids

    assert draw(seed=7) == draw(seed=7) != draw(seed=8)
    assert draw() != draw()  # random seeds: twelve draws from 512 tokens
    first, second, third = (c.token_ids for c in idle.generate(IDS, max_tokens=12, seed=7, n=3))
    assert first == draw(seed=7) and len({tuple(first), tuple(second), tuple(third)}) == 3
    assert [c.token_ids for c in idle.generate(IDS, max_tokens=12, seed=7, n=3)] == [first, second, third]
    assert idle.generate([IDS, IDS], max_tokens=12, seed=7)[1].token_ids == first


def test_without_max_tokens_the_remaining_context_is_the_limit(idle):
    prompt = [5] * (CONTEXT - 7)
    for options in ({}, {"max_tokens": None}):
        out = idle.generate(prompt, temperature=0, ignore_eos=True, **options)
        assert len(out.token_ids) == 7 and out.finish_reason == "length"
    assert len(idle.generate([5] * (CONTEXT - 1), temperature=0).token_ids) == 1


def test_threads_can_call_generate_concurrently(idle):
    prompts = [[9 + i, 30, 31] for i in range(10)]
    expected, got = [idle.generate(p, **GREEDY).token_ids for p in prompts], {}

    def answer(i):
        got[i] = idle.generate(prompts[i], **GREEDY).token_ids

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [got[i] for i in range(10)] == expected


CHAT = [{"role": "user", "content": "Say something."}]


def test_chat_equals_generate_on_the_encoded_messages(idle, letters):
    prompt = idle.encode_chat(CHAT)
    out = idle.chat(CHAT, logit_bias=letters, **GREEDY)
    plain = idle.generate(prompt, logit_bias=letters, **GREEDY)
    assert out.prompt_token_ids == prompt and out.token_ids == plain.token_ids
    assert out.text == out.message.content == plain.text and out.message.reasoning == ""
    thinking = idle.chat(CHAT, thinking=True, logit_bias=letters, **GREEDY)
    assert (
        thinking.text == "" and thinking.message.reasoning.isalpha() and len(thinking.message.reasoning) == 12
    )
    pair = idle.chat(CHAT, n=2, seed=1, max_tokens=5, logit_bias=letters)
    assert [c.text for c in pair] == [c.message.content for c in pair] and pair[0].text != pair[1].text


def test_chat_text_excludes_the_stop_string(idle, letters):
    whole = idle.chat(CHAT, temperature=0, max_tokens=30, logit_bias=letters).text
    stop = whole[8:11]
    out = idle.chat(CHAT, temperature=0, max_tokens=30, logit_bias=letters, stop=stop)
    assert out.finish_reason == "stop" and out.text == out.message.content == whole[: whole.index(stop)]
    late = idle.chat(
        CHAT, temperature=0, max_tokens=30, logit_bias=letters, stop=[whole[2:4], stop], min_tokens=6
    )
    assert late.finish_reason == "stop" and len(late.token_ids) > 6
    thought = idle.chat(CHAT, thinking=True, temperature=0, max_tokens=30, logit_bias=letters)
    stop = thought.message.reasoning[5:8]
    cut = idle.chat(CHAT, thinking=True, temperature=0, max_tokens=30, logit_bias=letters, stop=stop)
    assert cut.message.reasoning == thought.message.reasoning[: thought.message.reasoning.index(stop)]


def test_a_trace_contains_every_site_and_does_not_change_the_logits(idle):
    trace, layers = idle.trace(IDS), idle.config.num_hidden_layers
    expected = {
        (hook, layer)
        for hook, row in idle.schema.items()
        if row.ragged is None
        for layer in ([layers - 1] if row.once else range(layers))
    }
    assert trace.sites == set(trace) == expected and len(trace) == len(expected)
    for hook, layer in expected:
        tensor, row = trace[hook, layer], idle.schema[hook]
        assert tensor.shape == (len(IDS), *row.logical_shape) and str(tensor.dtype) == f"torch.{row.dtype}", (
            hook
        )
    assert torch.equal(trace.logits, idle.logits(IDS)) and trace.logits.shape == (5, idle.config.vocab_size)
    x, y = trace["mhc_streams_pre_attn", 3], trace["post_attn", 3]
    post, mix = trace["mhc_attn_post_mix", 3], trace["mhc_attn_res_mix", 3]
    rebuilt = torch.einsum("njk,njd->nkd", mix, x) + post.unsqueeze(-1) * y.unsqueeze(1)
    assert (rebuilt - trace["mhc_streams_pre_mlp", 3]).abs().max() < 1e-5  # fails with a transposed mixer


def test_a_trace_of_some_hooks(idle):
    assert idle.trace(IDS, hooks="mlp_out").sites == {("mlp_out", layer) for layer in range(6)}
    assert idle.trace(IDS, hooks=("final_hidden", "post_attn")).sites == {("final_hidden", 5)} | {
        ("post_attn", layer) for layer in range(6)
    }
    assert len(idle.trace(IDS, hooks=[])) == 0
    for bad in ("post_mlp", ["mlp_out", "nowhere"], 5, [5], [["mlp_out"]], None):
        with pytest.raises(SiteError, match=r"(It|This model) has: attn_head_out"):
            idle.trace(IDS, hooks=bad)
    trace = idle.trace(IDS, hooks="mlp_out")
    for key in (
        ("mlp_out", 6),
        ("mlp_out", -7),
        ("mlp_out", True),
        ("pre_attn", 0),
        "pre_attn",
        5,
        "blocks.7.hook_in",
    ):
        with pytest.raises(SiteError, match="This trace holds mlp_out"):
            trace[key]


def test_returned_tensors_are_writable_and_trainable(idle):
    """Tensors of `logits` and `trace` can be written to and trained on."""
    logits, acts = idle.logits(IDS), idle.trace(IDS, hooks="mlp_out")["mlp_out", 2]
    logits[0] = 0
    acts += 1
    probe = torch.nn.Linear(acts.shape[-1], 3)
    probe(acts).sum().backward()
    assert probe.weight.grad.abs().sum() > 0
    assert idle.logits(IDS)[0].abs().sum() > 0  # the edits above are not visible to later calls


def test_logits_equal_those_of_the_model_which_has_gradients(idle):
    out = idle.model(torch.tensor(IDS))
    assert out.requires_grad and (out - idle.logits(IDS)).abs().max() < 1e-4
    out[-1, 7].backward()
    grads = [p.grad for p in idle.model.layers[0].parameters() if p.grad is not None]
    idle.model.zero_grad(set_to_none=True)
    assert grads and all(g.isfinite().all() for g in grads)


def test_close_ends_a_request_of_another_thread(checkpoint):
    opened, got = open_engine(checkpoint), []
    caller = threading.Thread(
        target=lambda: got.append(opened.generate(IDS, max_tokens=CONTEXT - 5, ignore_eos=True))
    )
    caller.start()
    while not opened._core.scheduler.running:
        time.sleep(0.001)
    opened.close()
    caller.join(300)
    assert got[0].finish_reason == "cancelled" and len(got[0].token_ids) < CONTEXT - 5


def test_after_close_every_call_is_refused(checkpoint):
    opened = open_engine(checkpoint)
    stream = opened.stream("x", max_tokens=50)
    next(stream)
    opened.close()
    opened.close()
    *_, last = stream
    assert last.finish_reason == "cancelled" and stream.output.finish_reason == "cancelled"
    calls = [
        lambda: opened.generate("x"),
        lambda: opened.chat(CHAT),
        lambda: next(opened.stream("x")),
        lambda: opened.logits(IDS),
        lambda: opened.trace(IDS),
        lambda: opened.attach("features", "nano"),
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match=r"closed. Load the model again") as caught:
            call()
        assert caught.value.code == "engine-closed"
    assert opened.config.vocab_size == 512 and opened.tokenizer.encode(
        "a"
    )  # attributes that need no engine remain available
