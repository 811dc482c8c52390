"""T-STATE-1: every operation at every hook in every mode is either correct or refused with a reason.

The oracle is a plain forward pass of the model over the whole text, with a tap that applies the edit in float64 by its
definition. The engine reads the same text in chunks, caches it and decodes the rest.
"""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Clamp, Patch, Project
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError
from birkhoff.hooks.sites import BY_NAME, SITES
from birkhoff.hooks.tap import EagerTap
from birkhoff.steering.position_rows import PositionRows
from tests.sizes import scaled

LAYER, STEPS = 2, 3
PROMPT = [0, *range(40, 40 + 20)]
PHASES, PATHS = ("both", "prefill", "decode"), ("both", "read", "carry")
STREAMS = ("mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final")
STEERABLE = ("pre_attn", "post_attn", "mlp_in", "mlp_out", "final_hidden", "attn_head_out", *STREAMS)
HEADS = 4 * 32  # numbers of a row of attn_head_out
READ_ONLY = tuple(site.name for site in SITES if not site.editable)
OPERATIONS = (
    "add",
    "norm_match",
    "post_mix",
    "streams",
    "project",
    "project streams",
    "clamp",
    "patch",
    "patch rows",
    "zeros",
    "two adds",
    "add then clamp",
)
ONLY_STREAMS = ("post_mix", "streams", "project streams")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, kernels="reference", max_batch_tokens=24) as engine:
        yield engine


def vector(width, seed, norm=4.0):
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v / v.norm() * norm


def unit(v):
    return v.double() / v.double().norm()


def edits_and_change(operation, hook, options, m, d):
    """The edits, and the equivalent change of float64 rows [n, width], called with the rows, their positions and the
    write-out weights."""
    width = m * d if hook in STREAMS else HEADS if hook == "attn_head_out" else d
    v, w, narrow = vector(width, 1), vector(width, 2), vector(d, 3)
    at = {"hook": hook, "layers": [LAYER], **options}
    by_position = PositionRows(
        {position: vector(width, 10 + position) for position in (2, 5, len(PROMPT) + 1)}
    )
    e, u, en = unit(v), unit(w), unit(narrow)

    def on_streams(x, change):
        parts = x.view(-1, m, d).clone()
        parts[:, [1, 3]] = change(parts[:, [1, 3]])
        return parts.flatten(1)

    def put_rows(x, positions, post):
        out = x.clone()
        for index, position in enumerate(positions.tolist()):
            if position in by_position.positions:
                out[index] += 0.5 * (vector(width, 10 + position).double() - x[index])
        return out

    def clamped(x):
        along = x @ u
        return x + (along.clamp(-0.3, 0.2) - along).unsqueeze(-1) * u

    table = {
        "add": ([Add(v, scale=1.5, **at)], lambda x, _, __: x + 1.5 * v.double()),
        "norm_match": (
            [Add(v, scale=0.5, norm_match=True, **at)],
            lambda x, _, __: x + 0.5 * x.norm(dim=-1, keepdim=True) * e,
        ),
        "post_mix": (
            [Add(narrow, streams="post_mix", **at)],
            lambda x, _, post: x + (post.double().unsqueeze(-1) * narrow.double()).flatten(1),
        ),
        "streams": (
            [Add(narrow, scale=2.0, streams=[3, 1], **at)],
            lambda x, _, __: on_streams(x, lambda s: s + 2 * narrow.double()),
        ),
        "project": ([Project(v, scale=0.7, **at)], lambda x, _, __: x - 0.7 * (x @ e).unsqueeze(-1) * e),
        "project streams": (
            [Project(narrow, streams=[1, 3], **at)],
            lambda x, _, __: on_streams(x, lambda s: s - (s @ en).unsqueeze(-1) * en),
        ),
        "clamp": ([Clamp(w, min=-0.3, max=0.2, **at)], lambda x, _, __: clamped(x)),
        "patch": ([Patch(v, scale=0.25, **at)], lambda x, _, __: x + 0.25 * (v.double() - x)),
        "patch rows": ([Patch(by_position, scale=0.5, **at)], put_rows),
        "zeros": ([Patch(0, scale=0.5, **at)], lambda x, _, __: 0.5 * x),
        "two adds": (
            [Add(w, **at), Add(v, scale=-0.5, **at)],
            lambda x, _, __: x + w.double() - 0.5 * v.double(),
        ),
        # listed in reverse order: clamps run last, so their bounds hold for the output of the site
        "add then clamp": (
            [Clamp(w, min=-0.3, max=0.2, **at), Add(v, **at)],
            lambda x, _, __: clamped(x + v.double()),
        ),
    }
    return table[operation]


def reference(engine, ids, hook, change, phase, path):
    """Log-probabilities of one plain forward pass with the edit applied by a tap."""
    layer = engine.config.num_hidden_layers - 1 if BY_NAME[hook].once else LAYER
    positions = torch.arange(len(ids))
    generated = positions >= len(PROMPT)
    chosen = {"both": torch.ones_like(generated), "prefill": ~generated, "decode": generated}[phase]
    post = {}

    def seen(site, at, x):
        if site.name in ("mhc_attn_post_mix", "mhc_ffn_post_mix"):
            post["last"] = x

    def changed(x):
        rows = x.flatten(1).double()[chosen]
        weights = post["last"][chosen] if "last" in post else None
        out = x.flatten(1).double().clone()
        out[chosen] = change(rows, positions[chosen], weights)
        return out.view(x.shape).to(x.dtype)

    def edit(site, at, x):
        return changed(x) if (site.name, at) == (hook, layer) and hook not in STREAMS else None

    def part(site, at, x):
        if (site.name, at) != (hook, layer):
            return None
        new = changed(x)
        seen_path = "both" if hook == "mhc_streams_final" and path == "carry" else path
        return new if seen_path != "carry" else x, new if seen_path != "read" else x

    with torch.no_grad():
        logits = engine.model(torch.tensor(ids), EagerTap(seen, edit, part))
    return logits.log_softmax(-1)


def state_of(engine, operation, hook, phase, path):
    """The state of one cell: `right`, `refused: REASON` or `wrong: by DIFFERENCE`."""
    m, d = engine.config.hc_mult, engine.config.hidden_size
    try:
        edits, change = edits_and_change(operation, hook, {"phase": phase, "path": path}, m, d)
        out = engine.generate(
            PROMPT, steer=edits, max_tokens=STEPS + 1, temperature=0, ignore_eos=True, logprobs=20
        )
    except BirkhoffError as error:
        return f"refused: {error}"
    ids = PROMPT + out.token_ids[:-1]
    theirs = reference(engine, ids, hook, change, phase, path)
    worst = max(
        abs(value - float(theirs[len(PROMPT) - 1 + step, token]))
        for step, logprob in enumerate(out.logprobs)
        for token, value in logprob.top
    )
    return "right" if worst <= 1e-4 else f"wrong: by {worst:.2g}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_t_state_1_every_cell_is_right_or_refused(engine, operation):
    cells = [
        (hook, phase, path)
        for hook in STEERABLE
        for phase in PHASES
        for path in PATHS
        if path == "both" or hook in STREAMS
    ]
    full = scaled(1, 0)
    for index, (hook, phase, path) in enumerate(cells):
        if not full and index % 5 != OPERATIONS.index(operation) % 5:
            continue  # a fifth of the cells, a different fifth for neighbouring operations
        state = state_of(engine, operation, hook, phase, path)
        if operation in ONLY_STREAMS and hook not in STREAMS:
            assert state.startswith("refused: ") and "stream" in state, (hook, phase, path, state)
        else:
            assert state == "right", (hook, phase, path, state)


@pytest.mark.parametrize("hook", [*READ_ONLY, "post_mlp", "nowhere"])
def test_t_state_1_read_only_hooks_are_refused(engine, hook):
    why = {"post_mlp": "mhc_streams_final", "nowhere": "not a hook"}.get(hook, "capture-only")
    for operation in OPERATIONS:
        state = state_of(engine, operation, hook, "both", "both")
        assert state.startswith("refused: ") and why in state


def test_t_state_1_the_alias_of_a_layer_output(engine):
    """`mhc_streams_post_mlp` is the input of the next layer, and for the last layer the input of the head."""
    m, d = engine.config.hc_mult, engine.config.hidden_size
    last = engine.config.num_hidden_layers - 1
    for layer, hook, at in ((1, "mhc_streams_pre_attn", 2), (last, "mhc_streams_final", last)):
        edit = {"vector": vector(m * d, 1), "scale": 2.0}
        one = engine.logits(PROMPT, steer=[Add(hook="mhc_streams_post_mlp", layers=[layer], **edit)])
        assert torch.equal(one, engine.logits(PROMPT, steer=[Add(hook=hook, layers=[at], **edit)]))


def test_the_oracle_detects_small_errors(engine):
    """The oracle detects small errors of scale, path and phase."""
    m, d = engine.config.hc_mult, engine.config.hidden_size
    edits, change = edits_and_change("add", "mhc_streams_pre_attn", {}, m, d)
    out = engine.generate(PROMPT, steer=edits, max_tokens=2, temperature=0, ignore_eos=True, logprobs=20)
    ids = PROMPT + out.token_ids[:-1]

    def worst(other, phase="both", path="both"):
        theirs = reference(engine, ids, "mhc_streams_pre_attn", other, phase, path)
        return max(abs(value - float(theirs[len(PROMPT) - 1, token])) for token, value in out.logprobs[0].top)

    assert worst(change) <= 1e-4
    assert worst(lambda *a: 0.98 * change(*a) + 0.02 * a[0]) > 1e-4
    assert (
        worst(change, path="read") > 1e-4
        and worst(change, path="carry") > 1e-4
        and worst(change, "decode") > 1e-4
    )
