"""What vLLM's scheduler does to a request: prefix cache, preemption, many requests, n-gram drafts. One process."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Capture
from birkhoff.capture.store.reader import read_request
from birkhoff.errors import OptionError, SiteError, UnsupportedModel
from birkhoff.vllm.rank_requests import RankRequests
from tests.hf.reference import Reference
from tests.vllm.batch import reference_text, worst_error
from tests.vllm.models import CONTEXT, LAYERS, D, make_model, prompts_of

pytestmark = pytest.mark.vllm
VECTOR = torch.randn(D, generator=torch.Generator().manual_seed(1))
EDIT = [Add(VECTOR, "pre_attn", [1], scale=3.0)]
ARMED = [0, 1, 3]
DECODE = [Add(VECTOR, "pre_attn", [1], scale=3.0, phase="decode")]
GREEDY = {"temperature": 0, "ignore_eos": True}
SMALL = {
    "backend": "vllm",
    "dtype": "float32",
    "max_requests": 4,
    "max_batch_tokens": 64,
    "max_context": CONTEXT,
    "cache_bytes": 64 << 20,
}


def steered(hook, layer, x):
    return x + 3 * VECTOR if (hook, layer) == ("pre_attn", 1) else None


def steered_from(prompt_len):
    def edit(hook, layer, x):
        if (hook, layer) != ("pre_attn", 1):
            return None
        new = x.clone()
        new[prompt_len:] += 3 * VECTOR
        return new

    return edit


def text(reference, prompt, count, edit=None):
    return reference_text(reference, prompt, count, edit, stop_at=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, Reference(make_model("llama", folder / "model"))


@pytest.fixture(scope="module")
def engine(model):
    """Twelve blocks of 32 tokens: four requests of 140 tokens do not fit."""
    folder, _ = model
    further = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 13, "seed": 0}
    options = {"capture_root": folder / "captures", "vllm": further, **SMALL}
    with birkhoff.load(folder / "model", **options) as engine:
        yield engine


def cached_tokens(output):
    return output.interp.get("reuse", {}).get("cached_tokens", 0)


def test_edited_text_shares_no_cache_with_plain_text(engine, model):
    (prompt,) = prompts_of(140, seed=5)
    first = engine.generate(prompt, steer=EDIT, max_tokens=8, **GREEDY)
    plain = engine.generate(prompt, max_tokens=8, **GREEDY)
    again = engine.generate(prompt, steer=EDIT, max_tokens=8, **GREEDY)
    plain_again = engine.generate(prompt, max_tokens=8, **GREEDY)
    assert list(first.token_ids) == list(again.token_ids) == text(model[1], prompt, 8, steered)[0]
    assert list(plain.token_ids) == list(plain_again.token_ids) == text(model[1], prompt, 8)[0]
    assert [cached_tokens(output) for output in (first, plain, again, plain_again)] == [0, 0, 128, 128]


def test_the_border_of_prompt_and_answer_is_part_of_the_salt(engine, model):
    """What was generated under an edit of generated tokens is read as a prompt, where the edit does not apply."""
    (prompt,) = prompts_of(70, seed=6)
    answer = engine.generate(prompt, steer=DECODE, max_tokens=60, **GREEDY)
    longer = prompt + list(answer.token_ids)
    again = engine.generate(longer, steer=DECODE, max_tokens=6, **GREEDY)
    assert list(again.token_ids) == text(model[1], longer, 6, steered_from(len(longer)))[0]
    assert cached_tokens(again) == 0


def test_a_capture_has_the_rows_of_a_cached_prompt(engine, model):
    (prompt,) = prompts_of(140, seed=7)
    engine.generate(prompt, max_tokens=2, **GREEDY)
    output = engine.generate(prompt, capture=Capture({"post_mlp": [3]}, "all_prompt"), max_tokens=2, **GREEDY)
    rows = output.acts["post_mlp", 3]
    assert rows.positions == tuple(range(140)) and rows.token_ids == tuple(prompt)
    assert worst_error(rows.tensor, text(model[1], prompt, 1)[1]["post_mlp", 3]) < 1e-4


def test_a_preempted_request_is_captured_and_steered_once(engine, model, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    original = Scheduler._preempt_request

    def counted(self, request, *given, **named):
        preempted.append(request.request_id)
        return original(self, request, *given, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    prompts = prompts_of(60, 60, 60, 60, seed=8)
    capture = Capture({"pre_attn": "all", "post_mlp": "all"}, "all", request_id="p", returns="file")
    outputs = engine.generate(
        prompts,
        steer=[None, EDIT, None, EDIT],
        capture=[None, None, capture, capture],
        max_tokens=80,
        **GREEDY,
    )
    assert preempted
    for index, output in enumerate(outputs):
        edit = steered if index % 2 else None
        tokens, seen = text(model[1], prompts[index], 80, edit)
        assert list(output.token_ids) == tokens, index
        assert output.interp.get("rows_steered", 0) == (139 if edit else 0)
        if index >= 2:
            for (hook, layer), entry in read_request(
                engine.capture_roots["filesystem"] / "captures" / f"p-{index}"
            ).items():
                assert list(entry.positions) == list(range(139))
                assert worst_error(torch.from_numpy(entry.values()), seen[hook, layer]) < 1e-4, (hook, layer)


def test_forty_requests(engine, model):
    lengths = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = prompts_of(*lengths, seed=9)
    steer = [EDIT if index % 2 else None for index in range(40)]
    capture = [Capture({"post_mlp": [2]}, "last_prompt") if index % 3 == 0 else None for index in range(40)]
    outputs = engine.generate(prompts, steer=steer, capture=capture, max_tokens=6, **GREEDY)
    for index, (prompt, output) in enumerate(zip(prompts, outputs)):
        tokens, seen = text(model[1], prompt, 6, steered if index % 2 else None)
        assert list(output.token_ids) == tokens, index
        if index % 3 == 0:
            rows = output.acts["post_mlp", 2]
            assert rows.positions == (len(prompt) - 1,)
            assert worst_error(rows.tensor[0], seen["post_mlp", 2][len(prompt) - 1]) < 1e-4
    assert all(counts["running"] <= 4 for counts in engine._core.ranks.call("birkhoff_counts"))


def test_streams_harvests_and_cancelled_requests(engine, model, tmp_path):
    (prompt,) = prompts_of(20, seed=10)
    stream = engine.stream(prompt, steer=EDIT, max_tokens=12, **GREEDY)
    events = [next(stream) for _ in range(3)]
    stream.close()
    tokens, _ = text(model[1], prompt, 3, steered)
    assert [event.token_id for event in events] == tokens
    batches = list(engine.stream_acts(prompts_of(10, 20, seed=11), Capture({"post_mlp": [1]}, "all_prompt")))
    assert sum(len(batch) for batch in batches) == 30
    output = engine.generate(prompt, max_tokens=4, logprobs=2, **GREEDY)
    assert all(len(each.top) == 2 and each.top[0][0] == each.token_id for each in output.logprobs)


def test_what_vllm_cannot_do_is_refused(engine):
    for refused, says in (
        (lambda: engine.generate([5, 6], capture=Capture({"mlp_out": [1]}, "all")), "mlp_out"),
        (lambda: engine.generate([5, 6], steer=[Add([1.0] * D, "post_mlp", [LAYERS])]), "layer"),
        (lambda: engine.generate([5, 6], context="named", max_tokens=1), "context is 'named'"),
    ):
        with pytest.raises(birkhoff.BirkhoffError, match=says):
            refused()
    with pytest.raises(UnsupportedModel, match="forward pass outside its scheduler"):
        engine.logits([5, 6])
    assert len(engine.generate([5, 6], max_tokens=2, **GREEDY).token_ids) == 2


@pytest.fixture(scope="module")
def drafting(model):
    """An engine with n-gram drafts, in which one layer has no armed site."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    further = {"enforce_eager": True, "seed": 0, "speculative_config": drafts}
    hooks = {"pre_attn": ARMED, "post_mlp": ARMED}
    with birkhoff.load(model[0] / "model", hooks=hooks, vllm=further, **SMALL) as engine:
        yield engine


def test_drafts_that_are_rejected_leave_no_rows(drafting, model, monkeypatch):
    _, reference = model
    prompts = [
        (prompt * 4)[:length] for prompt, length in zip(prompts_of(12, 12, 12, 12, seed=1), (40, 33, 45, 20))
    ]
    steer = [None, EDIT, EDIT, None]
    every = Capture({"pre_attn": ARMED, "post_mlp": ARMED}, "all")
    drafted = []
    begin = RankRequests.begin

    def counted(self, rows, num_rows):
        plans = begin(self, rows, num_rows)
        drafted.append(len(plans))
        return plans

    monkeypatch.setattr(RankRequests, "begin", counted)
    outputs = drafting.generate(prompts, steer=steer, capture=every, max_tokens=40, **GREEDY)
    assert sum(drafted) > 20, "tokens were drafted"
    for prompt, edit, output in zip(prompts, steer, outputs):
        tokens, seen = text(reference, prompt, 40, steered if edit else None)
        assert list(output.token_ids) == tokens
        for key, rows in output.acts.items():
            assert rows.positions == tuple(range(len(prompt) + 39)) and rows.token_ids == tuple(
                (prompt + tokens)[:-1]
            )
            assert worst_error(rows.tensor, seen[key]) < 1e-4, key


def test_idle_steps_and_unarmed_layers_are_vllm_itself(drafting, model):
    (prompt,) = prompts_of(20, seed=12)
    inner = runner_of(drafting).get_model().model
    check_own(inner.own)
    same = [layer is own for layer, own in zip(inner.armed.layers, inner.own.layers)]
    assert same == [number not in ARMED for number in range(LAYERS)]
    own, armed = inner.own.layers[1], inner.armed.layers[1].layer
    assert armed.mlp is own.mlp
    ran = []
    own.register_forward_hook(lambda module, *_: ran.append(module))  # a copy has it too
    output = drafting.generate(prompt, max_tokens=6, **GREEDY)
    assert list(output.token_ids) == text(model[1], prompt, 6)[0] and set(ran) == {own}
    ran.clear()
    drafting.generate(prompt, capture=Capture({"post_mlp": [1]}, "all"), max_tokens=6, **GREEDY)
    assert set(ran) == {armed}


def test_nothing_armed_is_vllm_itself(model):
    """Identity, not equality: the same runner class, layers and code objects as without this package."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    folder, reference = model
    (prompt,) = prompts_of(20, seed=12)
    options = {"hooks": "none", "vllm": {"enforce_eager": True, "seed": 0}, **SMALL}
    with birkhoff.load(folder / "model", **options) as engine:
        runner = runner_of(engine)
        assert type(runner) is CPUModelRunner
        check_own(runner.get_model().model)
        output = engine.generate(prompt, max_tokens=6, **GREEDY)
        assert list(output.token_ids) == text(reference, prompt, 6)[0]
        with pytest.raises((SiteError, OptionError, birkhoff.BirkhoffError), match="pre_attn"):
            engine.generate(prompt, steer=EDIT, max_tokens=2, **GREEDY)


def runner_of(engine):
    return engine._core.engine.model_executor.driver_worker.worker.model_runner


def check_own(decoder):
    """The decoder and all of its layers are vLLM's, with its code."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaModel

    for module, kind in ((decoder, LlamaModel), *((layer, LlamaDecoderLayer) for layer in decoder.layers)):
        assert type(module) is kind and "forward" not in vars(module)
        assert module.forward.__func__.__code__ is kind.forward.__code__
