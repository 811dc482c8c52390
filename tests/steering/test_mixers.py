"""Edits of mixers: equal to `transformers` with the same hook, else to a float64 tap on a whole forward pass; the same
alone and in a batch, in chunks and whole, eager and recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Capture, Clamp, Patch, Scale
from birkhoff.errors import BirkhoffError, SteeringSyntax
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteEdit, doubly_stochastic
from birkhoff.hooks.graph_tap import GraphTap, plan_graph
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import MHC_ATTN_RES_MIX
from birkhoff.steering.edit_syntax import parse_line, print_line
from birkhoff.steering.steering_fields import intervention, parse_steering
from tests.hooks.test_vector_table import Everywhere
from tests.sizes import scaled
from tests.steering.hooked import Hooked
from tests.steering.test_state import reference

LAYER, STEPS = 2, 3
PROMPT = [0, *range(40, 60)]
M = 4
RES = ("mhc_attn_res_mix", "mhc_ffn_res_mix")
WEIGHTS = ("mhc_attn_pre_mix", "mhc_ffn_pre_mix", "mhc_attn_post_mix", "mhc_ffn_post_mix", "mhc_head_mix")
GIVEN = [[0.7, 0.1, 0.1, 0.1], [0.0, 0.4, 0.7, 0.0], [0.2, 0.2, 0.3, 0.3], [0.1, 0.2, 0.1, 0.9]]


def sinkhorn(x, iters=2000):
    """In float64 to convergence, by its definition."""
    x = x.double().clamp_min(1e-6).unflatten(-1, (M, M))
    for _ in range(iters):
        x = x / x.sum(-1, keepdim=True)
        x = x / x.sum(-2, keepdim=True)
    return x.flatten(-2)


def touching(stream):
    mask = torch.zeros(M, M, dtype=torch.bool)
    mask[stream], mask[:, stream] = True, True
    return mask.flatten()


EYE = torch.eye(M, dtype=torch.float64).flatten()
SWAP = torch.eye(M, dtype=torch.float64)[[1, 0, 2, 3]].flatten()
ORDER = torch.eye(M, dtype=torch.float64)[[1, 2, 3, 0]].flatten()  # stream 0 becomes stream 1
FLAT = torch.tensor(GIVEN, dtype=torch.float64).flatten()
MATRICES = {
    "identity": (lambda at: Patch("identity", *at), lambda x: EYE.expand_as(x)),
    "half identity": (lambda at: Patch("identity", *at, scale=0.5), lambda x: (x + EYE) / 2),
    "uniform": (lambda at: Patch("uniform", *at), lambda x: torch.full_like(x, 1 / M)),
    "swap": (lambda at: Patch({"permutation": [1, 0, 2, 3]}, *at), lambda x: SWAP.expand_as(x)),
    "permutation": (lambda at: Patch({"permutation": [1, 2, 3, 0]}, *at), lambda x: ORDER.expand_as(x)),
    "given": (lambda at: Patch(GIVEN, *at), lambda x: FLAT.expand_as(x)),
    "given, renormalised": (
        lambda at: Patch(GIVEN, *at, renormalise=True),
        lambda x: sinkhorn(FLAT).expand_as(x),
    ),
    "stream cut off": (
        lambda at: Patch("identity", *at, streams=[2]),
        lambda x: torch.where(touching(2), EYE, x),
    ),
    "clamp": (lambda at: Clamp(None, *at, min=0.2, max=0.3), lambda x: x.clamp(0.2, 0.3)),
    "half clamp": (
        lambda at: Clamp(None, *at, max=0.2, scale=0.5, streams=[1]),
        lambda x: torch.where(touching(1), (x + x.clamp(max=0.2)) / 2, x),
    ),
    "scale": (lambda at: Scale(0.5, *at), lambda x: 0.5 * x),
    "scale a stream, renormalised": (
        lambda at: Scale(0.25, *at, streams=[3], renormalise=True),
        lambda x: sinkhorn(torch.where(touching(3), 0.25 * x, x)),
    ),
}
ROWS = {
    "given": (
        lambda at: Patch([0.5, 0.0, 1.0, 0.25], *at),
        lambda x: x * 0 + x.new_tensor([0.5, 0, 1, 0.25]),
    ),
    "uniform": (lambda at: Patch("uniform", *at), lambda x: torch.full_like(x, 1 / M)),
    "clamp": (lambda at: Clamp(None, *at, max=0.5), lambda x: x.clamp(max=0.5)),
    "drop a stream": (lambda at: Scale(0, *at, streams=[1]), lambda x: x * x.new_tensor([1, 0, 1, 1])),
    "zeros": (lambda at: Patch(0, *at), lambda x: 0 * x),
}
TABLE = [(hook, name, *MATRICES[name]) for name in MATRICES for hook in RES]
TABLE += [(hook, name, *ROWS[name]) for name in ROWS for hook in WEIGHTS]


PHASES = ("both", "prefill", "decode")


@pytest.mark.parametrize("index", range(len(TABLE)), ids=lambda index: "-".join(TABLE[index][:2]))
def test_every_edit_of_every_mixer_equals_a_float64_tap(engine, index):
    hook, _, make, change = TABLE[index]
    for phase in PHASES if scaled(1, 0) else [PHASES[index % 3]]:
        edit = replace(make((hook, [LAYER])), phase=phase)
        out = engine.generate(
            PROMPT, steer=[edit], max_tokens=STEPS + 1, temperature=0, ignore_eos=True, logprobs=20
        )
        ids = PROMPT + out.token_ids[:-1]
        theirs = reference(engine, ids, hook, lambda x, _, __: change(x), phase, "both")
        plain = reference(engine, ids, hook, lambda x, _, __: x, phase, "both")
        pairs = [
            (value, float(theirs[len(PROMPT) - 1 + step, token]), float(plain[len(PROMPT) - 1 + step, token]))
            for step, logprob in enumerate(out.logprobs)
            for token, value in logprob.top
        ]
        assert max(abs(ours - other) for ours, other, _ in pairs) <= 1e-4
        assert max(abs(ours - other) for ours, _, other in pairs) > 1e-4  # the edit has an effect


def hooked(oracle, hook, change):
    """`transformers` with the same change of the mixer."""
    h = Hooked(oracle)
    if hook == "mhc_head_mix":
        streams = {}
        h.handles.append(
            oracle.model.hc_head.register_forward_pre_hook(lambda _, args: streams.update(x=args[0]))
        )
        h.output(
            oracle.model.hc_head,
            lambda merged: torch.einsum("bnm,bnmd->bnd", change(streams["x"][..., 0]), streams["x"]),
        )
        return h
    module = getattr(oracle.model.layers[LAYER], "attn_hc" if "attn" in hook else "ffn_hc")
    if hook.endswith("_pre_mix"):
        streams = {}
        h.handles.append(module.register_forward_pre_hook(lambda _, args: streams.update(x=args[0])))
        h.output(
            module,
            lambda u: torch.einsum("bnm,bnmd->bnd", change(streams["x"][..., 0]), streams["x"]),
            part=2,
        )
    elif hook.endswith("_post_mix"):
        h.output(module, change, part=0)
    else:
        h.output(module, lambda mix: change(mix.flatten(-2)).view(mix.shape).to(mix.dtype), part=1)
    return h


@pytest.mark.parametrize(
    ("hook", "name"),
    [(hook, name) for hook in RES for name in MATRICES]
    + [(hook, name) for hook in WEIGHTS if "post" in hook for name in ROWS]
    + [(hook, "given") for hook in WEIGHTS if "post" not in hook],  # their weights are not visible there
)
def test_every_edit_equals_transformers_with_the_same_hook(engine, oracle, hook, name):
    make, change = (MATRICES if hook in RES else ROWS)[name]
    steered = engine.logits(PROMPT, steer=[make((hook, [LAYER]))])
    theirs = hooked(oracle, hook, lambda x: change(x.double()).float()).logits(PROMPT)
    assert (steered - theirs).abs().max() <= 1e-4


def test_one_line_each(engine):
    """Freeze mixing at identity; cut a stream off; swap two streams."""
    frozen = engine.trace(PROMPT, steer=[Patch("identity", "mhc_res_mix", "all")])
    for layer in range(engine.config.num_hidden_layers - 1):
        x, y = frozen["mhc_streams_pre_attn", layer], frozen["post_attn", layer]
        expected = x + frozen["mhc_attn_post_mix", layer].unsqueeze(-1) * y.unsqueeze(1)
        assert (frozen["mhc_streams_pre_mlp", layer] - expected).abs().max() < 1e-5
    last = engine.config.num_hidden_layers - 1
    cut = [
        Patch("identity", "mhc_res_mix", {"ranges": [[LAYER, -1]]}, streams=[2], renormalise=True),
        Scale(0, "mhc_post_mix", {"ranges": [[LAYER, -1]]}, streams=[2]),
    ]
    trace = engine.trace(PROMPT, steer=cut)
    before = trace["mhc_streams_pre_attn", LAYER][:, 2]
    assert (
        trace["mhc_streams_final", last][:, 2] - before
    ).abs().max() < 1e-3  # carried past everything alone
    assert (
        trace["mhc_streams_final", last][:, 1] - trace["mhc_streams_pre_attn", LAYER][:, 1]
    ).abs().max() > 0.1
    swap = engine.trace(
        PROMPT,
        steer=[
            Patch({"permutation": [1, 0, 2, 3]}, "mhc_attn_res_mix", [LAYER]),
            Scale(0, "mhc_attn_post_mix", [LAYER]),
        ],
    )
    x, after = swap["mhc_streams_pre_attn", LAYER], swap["mhc_streams_pre_mlp", LAYER]
    assert torch.equal(after, x[:, [1, 0, 2, 3]])


def test_another_runs_mixers(engine):
    """Mixers of another text at the same positions; patching a run with its own mixers changes nothing."""
    hooks = {hook: [LAYER] for hook in RES}
    other = engine.generate([0, *range(70, 90)], max_tokens=1, capture=Capture(hooks))
    edits = [Patch(other.acts[hook, LAYER], hook, [LAYER]) for hook in RES]
    out = engine.generate(PROMPT, max_tokens=1, steer=edits, capture=Capture(hooks, capture_point="after"))
    for hook in RES:
        assert torch.equal(out.acts[hook, LAYER].tensor, other.acts[hook, LAYER].tensor)
    own = engine.generate(PROMPT, max_tokens=1, capture=Capture(hooks))
    same = engine.logits(PROMPT, steer=[Patch(own.acts[hook, LAYER], hook, [LAYER]) for hook in RES])
    assert torch.equal(same, engine.logits(PROMPT))


NOTHING = [
    Scale(1.0, "mhc_res_mix", "all", renormalise=True),
    Scale(1.0, "mhc_pre_mix", "all"),
    Patch("identity", "mhc_res_mix", "all", scale=0, renormalise=True),
    Clamp(None, "mhc_res_mix", "all", min=-1.0, max=2.0, renormalise=True),
    Clamp(None, "mhc_head_mix", "all", max=5.0),
    Scale(0.0, "mhc_post_mix", "all", where=[3], scale=0.0),
]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_zero_edit_changes_no_bit(path, kernels):
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    with birkhoff.load(path, kernels=kernels) as engine:
        plain = engine.generate(PROMPT, **options)
        for edit in NOTHING:
            assert torch.equal(engine.logits(PROMPT, steer=[edit]), engine.logits(PROMPT)), edit
            assert engine.generate(PROMPT, steer=[edit], **options).logprobs == plain.logprobs, edit


def test_alone_equals_batched_and_other_requests_keep_their_bits(path):
    steers = [
        [Patch("identity", "mhc_res_mix", "all")],
        None,
        [Scale(0, "mhc_pre_mix", [1, 3], streams=[1])],
        [Clamp(None, "mhc_attn_res_mix", [2], max=0.3, renormalise=True), Scale(2.0, "mlp_out", [1])],
        [Scale(0.5, "mhc_post_mix", [0], phase="decode")],
        [Patch([1.0, 0, 0, 0], "mhc_head_mix", "all")],
    ]
    prompts = [[0, *range(3 + index, 30 + 2 * index)] for index in range(len(steers))]
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True}
    with birkhoff.load(path, batch_invariant=True) as engine:
        together = engine.generate(prompts, steer=steers, **options)
        for prompt, steer, out in zip(prompts, steers, together):
            alone = engine.generate(prompt, steer=steer, **options)
            assert alone.token_ids == out.token_ids and alone.logprobs == out.logprobs


def test_any_chunking_equals_the_whole(path, engine):
    text = [0] + [5 + n % 200 for n in range(90)]
    edits = [
        Scale(0.5, "mhc_res_mix", [1], renormalise=True, streams=[0], where={"prompt": {"window": [10, 70]}}),
        Scale(0, "mhc_pre_mix", [2], streams=[3]),
    ]
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 5, "steer": edits}
    chunked = engine.generate(text, **options)  # 24 tokens a step
    with birkhoff.load(path, kernels="reference") as whole_engine:
        whole = whole_engine.generate(text, **options)
    assert near(chunked, whole)


def near(one, other):
    """Whether two outputs have the same tokens with nearly the same probabilities."""
    pairs = [(a, b) for x, y in zip(one.logprobs, other.logprobs) for a, b in zip(x.top, y.top)]
    return one.token_ids == other.token_ids and all(abs(a[1] - b[1]) <= 1e-4 for a, b in pairs)


def test_cached_prompts_are_shared_with_equal_edits_only(engine):
    text = [0] + [9 + n % 150 for n in range(300)]
    options = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    plain = engine.generate(text, **options)
    edit = [Patch("identity", "mhc_res_mix", [1])]
    first, again = engine.generate(text, steer=edit, **options), engine.generate(text, steer=edit, **options)
    other = engine.generate(text, steer=[Patch("uniform", "mhc_res_mix", [1])], **options)
    assert near(engine.generate(text, **options), plain) and near(first, again) and not near(first, plain)
    assert not near(first, other)
    hashes = {out.interp["steering_hash"]["prefill"] for out in (first, other)}
    masked = Patch("identity", "mhc_res_mix", [1], streams=[1])
    for more in (masked, Scale(0.5, "mhc_res_mix", [1], streams=[1], renormalise=True)):
        hashes.add(engine.generate(PROMPT, steer=[more], max_tokens=1).interp["steering_hash"]["prefill"])
    assert len(hashes) == 4
    assert first.interp["steering_hash"] == again.interp["steering_hash"]


def test_the_output_says_whether_mixers_are_doubly_stochastic(engine):
    def mixers(*edits):
        return engine.generate(PROMPT, steer=list(edits), max_tokens=1).interp.get("mixers")

    site = "mhc_attn_res_mix[2]"
    assert mixers(Patch(GIVEN, "mhc_attn_res_mix", [2])) == [
        {"sites": [site], "mixer": "as given", "doubly_stochastic": False}
    ]
    assert mixers(Patch(GIVEN, "mhc_attn_res_mix", [2], renormalise=True)) == [
        {"sites": [site], "mixer": "renormalised", "doubly_stochastic": True}
    ]
    assert mixers(Patch("identity", "mhc_attn_res_mix", [2]), Scale(0.5, "mhc_attn_res_mix", [2])) == [
        {"sites": [site], "mixer": "as given", "doubly_stochastic": True},
        {"sites": [site], "mixer": "as given", "doubly_stochastic": False},
    ]
    assert mixers(Scale(0.5, "mhc_pre_mix", [2])) is None


REFUSED = [
    (lambda: Patch("identity", "mhc_pre_mix", [0]), "identity is a matrix"),
    (lambda: Patch({"permutation": [0, 1, 2]}, "mhc_res_mix", [0]), "3 streams, this model has 4"),
    (lambda: Patch({"permutation": [0, 0, 2, 3]}, "mhc_res_mix", [0]), "every stream from 0 once"),
    (lambda: Patch("identity", "mlp_out", [0]), "is none"),
    (lambda: Patch([1.0] * 5, "mhc_res_mix", [0]), "5 numbers.*4x4"),
    (lambda: Patch("uniform", "mhc_res_mix", [0], streams=[7]), "0..3"),
    (lambda: Patch("uniform", "mhc_res_mix", [0], streams="post_mix"), "Name streams"),
    (lambda: Patch("uniform", "mhc_pre_mix", [0], renormalise=True), "one weight for each stream"),
    (lambda: Scale(0.5, "mlp_out", [0], renormalise=True), "renormalise is for mixers"),
    (lambda: Scale(0.5, "mhc_res_mix", [0], renormalise="yes"), "expected True or False"),
    (lambda: Scale(float("nan"), "mhc_res_mix", [0]), "factor"),
    (lambda: Clamp(None, "mlp_out", [0], max=1.0), "Give a vector"),
    (lambda: birkhoff.Add([1.0] * 16, "mhc_res_mix", [0]), "takes clamp, patch, scale, not add"),
    (lambda: Scale(0.5, "mhc_res_mix", [99]), "99"),
    (lambda: Scale(0.5, "moe_router_logits", [0]), "capture-only"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_with_a_reason(engine, make, words):
    with pytest.raises(BirkhoffError, match=words):
        engine.generate(PROMPT, max_tokens=1, steer=[make()])


EDITS = [
    Patch("identity", "mhc_res_mix", "all"),
    Patch({"permutation": [1, 0, 2, 3]}, "mhc_attn_res_mix", [2], renormalise=True, streams=[1]),
    Patch("uniform", "mhc_head_mix", "all", scale=0.5),
    Scale(0.0, "mhc_pre_mix", {"ranges": [[6, -1]]}, streams=[2]),
    Scale(0.3, "mlp_out", [1], phase="decode"),
    Clamp(None, "mhc_post_mix", [0, 2], min=0.5, max=0.5),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.op} {edit.hook}")
def test_python_wire_and_line_make_the_same_edit(engine, edit):
    (wired,) = parse_steering({"interventions": [intervention(edit)]}, {})
    assert wired.edit == edit and type(edit).from_json(edit.to_json()) == edit
    assert parse_line(print_line([edit])) == [edit]


def test_lines_name_what_is_missing():
    for line, words in {
        "0.5 @ mlp_out[2]": "expected the name",
        "0.5 happy @ mlp_out[2] op=scale": "which have none",
        "happy @ mhc_res_mix[2] permute=1,0": "which have none",
        "@ mhc_res_mix[2] permute=1,0,2,3": "for op=patch",
        "happy @ mlp_out[2] renormalise=yes": "for op=patch",
        "happy @ mlp_out[2] op=patch renormalise=maybe": "yes, no",
    }.items():
        with pytest.raises(SteeringSyntax, match=words):
            parse_line(line)


@settings(max_examples=scaled(300, 60), deadline=None)
@given(st.lists(st.floats(0.015625, 1.0, width=32), min_size=16, max_size=16))
def test_sinkhorn_makes_rows_and_columns_sum_to_one(numbers):
    mix = doubly_stochastic(torch.tensor(numbers).view(4, 4))
    assert (mix.sum(-2) - 1).abs().max() < 1e-5 and (mix.sum(-1) - 1).abs().max() < 2e-3 and (mix >= 0).all()


KINDS = {
    "patch": SiteEdit("patch", EYE.float(), 0.7),
    "patch of entries": SiteEdit("patch", EYE.float(), 0.7, entries=(2, 5, 7)),
    "bound": SiteEdit("bound", torch.zeros(16), 0.9, low=0.1, high=0.3),
    "bound of entries": SiteEdit("bound", torch.zeros(16), low=0.1, high=0.3, entries=(0, 3, 15)),
    "renormalised": SiteEdit("patch", torch.zeros(16), 0.5, entries=(2, 5, 7), renormalise=True),
    "all renormalised": SiteEdit("bound", torch.zeros(16), high=0.2, renormalise=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_in_a_batch_and_in_a_recorded_step_has_equal_bits(kind):
    mix = torch.rand(8, M, M, generator=torch.Generator().manual_seed(1))
    mix = doubly_stochastic(mix)

    def tap_of(count):
        plans = [Plan(edits=(Everywhere({("mhc_attn_res_mix", 1): KINDS[kind]}),)) for _ in range(count)]
        return arm(StepStaging(), [Span(plan, row, 10, [5], 4) for row, plan in enumerate(plans)], count)

    tap = tap_of(5)
    plan = plan_graph(tap, {"mhc_attn_res_mix": 16})
    graph = GraphTap(plan, tap.edits, 8, torch.device("cpu"))
    graph.fill(tap, plan)
    recorded = graph.at(1)(MHC_ATTN_RES_MIX, mix)
    batched = tap_of(5).at(1)(MHC_ATTN_RES_MIX, mix[:5])
    alone = tap_of(1).at(1)(MHC_ATTN_RES_MIX, mix[:1])
    assert torch.equal(recorded[:5], batched) and torch.equal(alone, batched[:1])
    assert torch.equal(recorded[5:], mix[5:]) and not torch.equal(batched, mix[:5])
