"""Every family: sites equal plain forward hooks, edits equal the same edits by hand, alone and in a mixed batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from birkhoff import Add, Call, Capture, Clamp, Patch, Project, Sae, SaeReconstruct, SaeSet, Scale
from birkhoff.capture.store.reader import read_request
from birkhoff.errors import SiteError, UnsupportedModel
from birkhoff.hooks.site_names import resolve
from birkhoff.steering.position_rows import PositionRows
from tests.hf.models import LAYERS, VOCAB, D
from tests.sizes import FULL

COUNT = 5
LAYOUTS = ("llama", "gemma2", "olmo2", "gpt2", "gpt_neox")  # one family of each order of norms and sublayers
# Relative to the largest number of the tensor; the cache, the batch and a GPU's kernels change the order of sums.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
LOGIT_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}  # of logits of size 10, not relative
GENERATOR = torch.Generator().manual_seed(7)
PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=GENERATOR).tolist() for n in (30, 9, 14, 3, 11, 9, 20, 5, 7)
]
V1, V2, V3 = (torch.randn(D, generator=GENERATOR) * 2 for _ in range(3))
SAE = Sae(
    torch.randn(40, D, generator=GENERATOR) / D**0.5,
    torch.randn(40, generator=GENERATOR) * 0.1,
    torch.randn(40, D, generator=GENERATOR) / 4,
    torch.randn(D, generator=GENERATOR) * 0.1,
    hook="post_mlp",
    layer=1,
)


def unit(vector):
    return vector / vector.norm()


@pytest.fixture(scope="module")
def close(device):
    def check(ours, theirs, what):
        ours, theirs = ours.float().cpu(), theirs.cpu()
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < TOLERANCE[device], f"{what}: {error:.1e}"

    return check


def with_features(rows, clamps):
    """The rows after their features were set, in the words of the dictionary's own encode and decoder."""
    features = SAE.encode(rows)
    changed = features.clone()
    for feature, value in clamps.items():
        changed[..., feature] = value
    return changed, (changed - features) @ SAE.decoder


def rows_from(x, first, change):
    new = x.clone()
    new[first:] = change(x[first:])
    return new


def cases(middle):
    """Steering of a request, and the same by hand: `edit(hook, layer, x, prompt_len)`."""

    def add(hook, layer, x, prompt):
        return x + 3 * V1 if (hook, layer) == ("pre_attn", 1) else None

    def project(hook, layer, x, prompt):  # generated tokens only
        if (hook, layer) != ("post_mlp", 0):
            return None
        return rows_from(x, prompt, lambda rows: rows - (rows @ unit(V2))[:, None] * unit(V2))

    def clamp(hook, layer, x, prompt):
        if (hook, layer) != (middle, 2):
            return None
        along = x @ unit(V1)
        return x + (along.clamp(5, 6) - along)[:, None] * unit(V1)

    def patch(hook, layer, x, prompt):  # chosen positions of the prompt
        if (hook, layer) != ("mlp_out", 1):
            return None
        new = x.clone()
        new[[0, prompt - 1]] = V3
        return new

    def feature(hook, layer, x, prompt):
        return x + with_features(x, {5: 6.0, 9: 4.0})[1] if (hook, layer) == ("post_mlp", 1) else None

    def full(hook, layer, x, prompt):
        if (hook, layer) != ("post_mlp", 1):
            return None
        return rows_from(x, prompt, lambda rows: SAE.decode(with_features(rows, {3: 5.0})[0]))

    def prefill(hook, layer, x, prompt):
        if (hook, layer) == ("attn_out", 0):
            return torch.cat((x[:prompt] + V2, x[prompt:]))
        return x + V1 if (hook, layer) == ("final_hidden", LAYERS - 1) else None

    return {
        "plain": ([], None),
        "add": ([Add(V1, "pre_attn", [1], scale=3.0)], add),
        "project": ([Project(V2, "post_mlp", [0], phase="decode")], project),
        "clamp": ([Clamp(V1, middle, [2], min=5.0, max=6.0)], clamp),
        "patch": ([Patch(V3, "mlp_out", [1], where=[0, -1], phase="prefill")], patch),
        "feature": ([SaeSet("delta", {5: 6.0, 9: 4.0})], feature),
        "full": ([SaeReconstruct("full", {3: 5.0}, error="drop", phase="decode")], full),
        "two tiers": (
            [Add(V2, "attn_out", [0], phase="prefill"), Add(V1, "final_hidden", [LAYERS - 1])],
            prefill,
        ),
    }


def _as_prompt(edit, prompt_len, hook, layer, x):
    return edit(hook, layer, x, prompt_len)


@pytest.fixture(scope="module")
def steered(pair):
    engine, reference = pair
    engine.attach("delta", SAE)
    engine.attach("full", SAE, kind="full")
    return engine, reference, cases("mlp_in" if reference.parallel else "post_attn")


def test_several_prompts_run_padded_and_give_what_each_gives_alone(pair, close):
    """Texts of different lengths in one pass, with edits of one of them; padding at the end changes nothing."""
    engine, _ = pair
    edits = [None, [Add(V1, "mlp_out", [1])], None]
    batch = engine.trace(PROMPTS[:3], steer=edits)
    assert batch.lengths == [30, 9, 14] and batch["mlp_out", 1].shape == (3, 30, D)
    for prompt, steer, trace in zip(PROMPTS, edits, batch):
        alone = engine.trace(prompt, steer=steer)
        close(trace.logits, alone.logits, "logits")
        for key in alone:
            close(trace[key], alone[key].float(), key)
    assert torch.equal(trace["blocks.1.hook_resid_pre"], trace["pre_attn", 1])
    assert torch.equal(trace["blocks.2.hook_resid_post"], trace["post_mlp", 2])


def test_a_patch_sweep_equals_single_patches(pair, device):
    engine, _ = pair
    clean, corrupt = PROMPTS[1], PROMPTS[5]
    sweep = engine.patch_sweep(clean, corrupt, 7, "mlp_out", layers=[0, 2], positions=[3, -1])
    source = engine.trace(clean, "mlp_out")
    for i, layer in enumerate((0, 2)):
        for j, position in enumerate((3, 8)):
            alone = engine.logits(corrupt, [Patch(source, "mlp_out", [layer], where=[position])])
            assert abs(float(sweep.values[i, j]) - float(alone[-1, 7])) < LOGIT_TOLERANCE[device]
    heads = engine.patch_sweep(clean, corrupt, 7, "heads", layers=[1], positions=[-1])
    source, target = (engine.trace(text, "attn_z")["attn_z", 1][8].cpu() for text in (clean, corrupt))
    width = len(target) // heads.values.shape[-1]
    row = torch.cat((target[:width], source[width : 2 * width], target[2 * width :]))
    alone = engine.logits(corrupt, [Patch(PositionRows({8: row}), "attn_z", [1])])
    assert abs(float(heads.values[0, 0, 1]) - float(alone[-1, 7])) < LOGIT_TOLERANCE[device]


def test_the_terms_of_a_logit(pair, device):
    """They sum to the logit; without biases the outputs of the sublayers alone do. Heads sum to their sublayer."""
    engine, _ = pair
    ids, network = PROMPTS[1], engine.model.network
    found = engine.logit_attribution(ids, 7, position=4)
    logit = float(engine.logits(ids)[4, 7])
    cap = engine.config.raw.get("final_logit_softcapping")
    capped = found.logit if cap is None else cap * float(np.tanh(found.logit / cap))
    assert (
        abs(capped - logit) < LOGIT_TOLERANCE[device]
        and abs(found.total - found.logit) < LOGIT_TOLERANCE[device]
    )
    norm = network.get_submodule(engine.model.family.norm)
    bias = getattr(norm, "bias", None)
    constant = (
        0.0
        if bias is None
        else float((network.get_output_embeddings().weight[7].double() @ bias.double()).detach())
    )
    assert abs(float(found.rest) - constant) < LOGIT_TOLERANCE[device]
    with pytest.raises(UnsupportedModel, match=r"not visible one by one|has no experts"):
        found.by("expert")
    if "head" in found.missing:
        with pytest.raises(UnsupportedModel, match="normalises the output of its attention"):
            found.by("head")
    else:
        terms = found.by("head")
        assert abs(sum(terms.values()) - found.logit) < LOGIT_TOLERANCE[device]
        assert found.heads.shape[0] == LAYERS
        if not any(
            name.endswith(("o_proj.bias", "c_proj.bias", "dense.bias"))
            for name, _ in network.named_parameters()
        ):
            assert all(abs(v) < LOGIT_TOLERANCE[device] for name, v in terms.items() if name.endswith("rest"))
    assert abs(sum(found.by("stream").values()) - found.logit) < LOGIT_TOLERANCE[device]


def test_every_site_equals_a_plain_forward_hook(pair, close):
    engine, reference = pair
    logits, seen = reference.forward(PROMPTS[0])
    trace = engine.trace(PROMPTS[0])
    for key, tensor in seen.items():
        close(trace[key], tensor, key)
    rest = {hook for hook, _ in trace.sites - seen.keys()}
    assert rest == (
        {"moe_router_logits", "moe_topk"} if "num_experts_per_tok" in engine.config.raw else set()
    )
    close(trace.logits, logits, "logits")
    for key in trace.sites:  # shapes and dtypes as the schema says
        row = engine.schema[key[0]]
        assert trace[key].shape[1:] == row.logical_shape and str(trace[key].dtype) == f"torch.{row.dtype}"
    last = LAYERS - 1
    torch.testing.assert_close(trace["final_hidden", last], trace["post_mlp", last])
    close(engine.lens(PROMPTS[0]).logits(-1), logits, "the lens at the last depth is the model's output")


def test_router_sites_are_what_the_router_returned(pair, close):
    engine, _ = pair
    if "moe_topk" not in engine.schema:
        return
    trace = engine.trace(PROMPTS[1], ["mlp_in", "moe_router_logits", "moe_topk"])
    for layer in range(LAYERS):
        gate = engine.model.layers[layer].mlp.gate
        with torch.no_grad():
            logits, weights, ids = gate(trace["mlp_in", layer].to(engine.model.device))
        close(trace["moe_router_logits", layer], logits, "router logits")
        assert torch.equal(trace["moe_topk", layer][..., 0].long().cpu(), ids.cpu())
        close(trace["moe_topk", layer][..., 1], weights, "weights")


def test_a_mixed_batch_equals_each_request_by_hand(steered, close):
    engine, reference, every = steered
    hooks = dict.fromkeys(("pre_attn", "post_mlp", "mlp_out", "final_hidden"), "all")
    prompts = PROMPTS[: len(every)]
    outputs = engine.generate(
        prompts,
        steer=[steer or None for steer, _ in every.values()],
        capture=Capture(hooks, "all"),
        max_tokens=COUNT,
        temperature=0,
        ignore_eos=True,
    )
    for name, prompt, output in zip(every, prompts, outputs):
        tokens, seen = reference.generate(prompt, COUNT, every[name][1])
        assert output.token_ids == tokens, name
        for key, rows in output.acts.items():
            assert list(rows.positions) == list(range(len(prompt) + COUNT - 1))
            close(rows.tensor, seen[key], (name, key))
    plain, added = outputs[0].interp, outputs[1].interp
    assert "steering_hash" not in plain and added["rows_steered"] == len(prompts[1]) + COUNT - 1


def test_an_edit_gives_the_same_alone(steered, close):
    engine, reference, every = steered
    for prompt, (name, (steer, edit)) in zip(PROMPTS, every.items()):
        output = engine.generate(prompt, steer=steer, max_tokens=COUNT, temperature=0, ignore_eos=True)
        assert output.token_ids == reference.generate(prompt, COUNT, edit)[0], name
        by_hand = None if edit is None else partial(_as_prompt, edit, len(prompt))
        close(engine.logits(prompt, steer=steer), reference.forward(prompt, by_hand)[0], name)


def edits_at(hook, layer, sae, width):
    """Every kind of edit at a site, and what each does to the rows there."""
    g = torch.Generator().manual_seed(11)
    v = torch.randn(width, generator=g)
    where = [0, 4]

    def some(x, change):
        new = x.clone()
        new[where] = change(x[where])
        return new

    def clamped(x):
        features = sae.encode(x)
        changed = features.clone()
        changed[:, 3] = 2.0
        return features, changed

    def delta(x):
        features, changed = clamped(x)
        return x + (changed - features) @ sae.decoder

    along = v / v.norm()
    return {
        "add": (Add(v, hook, [layer], scale=2.0), lambda x: x + 2 * v),
        "add where": (Add(v, hook, [layer], where=where), lambda x: some(x, lambda rows: rows + v)),
        "project": (Project(v, hook, [layer]), lambda x: x - (x @ along)[:, None] * along),
        "clamp": (
            Clamp(v, hook, [layer], min=0.5, max=0.6),
            lambda x: x + ((x @ along).clamp(0.5, 0.6) - x @ along)[:, None] * along,
        ),
        "scale": (Scale(0.5, hook, [layer]), lambda x: 0.5 * x),
        "patch": (Patch(v, hook, [layer], where=where), lambda x: some(x, lambda rows: v.expand_as(rows))),
        "call": (Call(lambda rows, site: rows.tanh(), hook, [layer]), torch.tanh),
        "feature": (SaeSet("clamps", {3: 2.0}), delta),
        "full": (SaeReconstruct("splices", {3: 2.0}, error="drop"), lambda x: sae.decode(clamped(x)[1])),
    }


def test_every_edit_at_every_editable_site(pair, close):
    """The table of docs/models.md, cell by cell: every edit equals the same edit by hand on Transformers."""
    engine, reference = pair
    if engine.model.family.model_type not in LAYOUTS and not FULL:
        return
    prompt = PROMPTS[1]
    for hook, entry in engine.schema.items():
        if not entry.steerable:
            assert hook in ("moe_router_logits", "moe_topk")
            continue
        width, layer = entry.logical_shape[0], LAYERS - 1 if entry.once else 2
        g = torch.Generator().manual_seed(12)
        weights = (
            torch.randn(24, width, generator=g),
            torch.zeros(24),
            torch.randn(24, width, generator=g) / 8,
        )
        sae = Sae(*weights, torch.zeros(width), hook=hook, layer=layer)
        with engine.attach("clamps", sae), engine.attach("splices", sae, kind="full"):
            for name, (edit, by_hand) in edits_at(hook, layer, sae, width).items():

                def change(at, index, x, by_hand=by_hand, hook=hook, layer=layer):
                    return by_hand(x) if (at, index) == (hook, layer) else None

                wanted, _ = reference.forward(prompt, change)
                close(engine.logits(prompt, steer=[edit]), wanted, (hook, name))


def test_captures_after_edits_and_files(steered, close):
    engine, reference, _ = steered
    edits = [Add(V1, "post_mlp", [0])]
    capture = Capture({"post_mlp": [0]}, "all", capture_point="after", returns="file", request_id="after")
    output = engine.generate(
        PROMPTS[2], steer=edits, capture=capture, max_tokens=2, temperature=0, ignore_eos=True
    )
    assert output.capture_results["filesystem"].status == "ok"
    root = engine.capture_roots["filesystem"]
    (entry,) = read_request(root / "captures" / "after").values()
    want = reference.generate(
        PROMPTS[2], 2, lambda h, l, x, p: x + V1 if (h, l) == ("post_mlp", 0) else None
    )[1]
    values = torch.from_numpy(np.asarray(entry.values()))
    close(values, want["post_mlp", 0] + V1, "rows in the file are those after the edit")


def test_hooks_of_v4_are_refused_by_name(pair):
    engine, reference = pair
    for hook in ("mhc_streams_pre_attn", "mhc_head_mix"):
        with pytest.raises(SiteError, match=hook):
            resolve(hook, 0, engine.schema, LAYERS)
        with pytest.raises(Exception, match=hook):
            engine.generate(PROMPTS[3], capture=Capture({hook: [0]}, "all"), max_tokens=1)
    if reference.parallel:
        with pytest.raises(Exception, match="post_attn"):
            engine.generate(PROMPTS[3], steer=[Add(V1, "post_attn", [0])], max_tokens=1)
