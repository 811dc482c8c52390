"""The per-step contract and the request planner, driven by an engine that is not ours: a few matrices in plain PyTorch.

The oracle is the same network without hooks: rows equal its tensors, edits equal the same arithmetic inline."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff import Add, Capture
from birkhoff.capture.store.reader import read_request
from birkhoff.hooks.digest import salt
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.hooks.sites import BY_NAME
from birkhoff.hooks.step_hooks import StepHooks
from birkhoff.planning.plan_results import acts_of, capture_results_of, plan_report
from birkhoff.planning.request_planner import RequestPlanner, cache_salt

D, LAYERS, VOCAB = 8, 3, 50
SCHEMA = build_hook_schema(D, "float32", None)
GENERATOR = torch.Generator().manual_seed(0)
EMBED = torch.randn(VOCAB, D, generator=GENERATOR)
WEIGHTS = torch.randn(LAYERS, 2, D, D, generator=GENERATOR) / D**0.5


def forward(ids, site):
    """Rows of token ids through a network without attention; `site(layer, name, x)` sees and replaces each residual."""
    x = EMBED[torch.tensor(ids)]
    for layer in range(LAYERS):
        x = site(layer, "pre_attn", x)
        x = site(layer, "post_attn", x + torch.tanh(x @ WEIGHTS[layer, 0]))
        x = site(layer, "post_mlp", x + torch.tanh(x @ WEIGHTS[layer, 1]))
    return x


def plain(ids, edit=lambda layer, name, x: x):
    """Every site of the sequence, before `edit` changes it."""
    seen = {}

    def site(layer, name, x):
        seen[name, layer] = x
        return edit(layer, name, x)

    forward(ids, site)
    return seen


def step(hooks, spans, ids):
    hooks.begin(spans, len(ids))
    forward(ids, lambda layer, name, x: hooks.site(layer, BY_NAME[name], x))


def captured(planner, ids, edits=(), max_tokens=8, **capture):
    spec = Capture({"pre_attn": "all", "post_mlp": [1]}, "all", **capture)
    plan = planner.plan(ids, max_tokens, planner.edits(list(edits), ids, max_tokens), spec)
    assert plan is not None and plan.reserve()
    plan.open()
    return plan


def check(plan, ids, edit=lambda layer, name, x: x):
    """All rows of the plan are those of the plain network, each position once and in order."""
    want = plain(ids, edit)
    acts = acts_of(plan)
    assert set(acts) == {*(("pre_attn", layer) for layer in range(LAYERS)), ("post_mlp", 1)}
    for key, rows in acts.items():
        assert list(rows.positions) == list(range(len(ids))) and list(rows.token_ids) == list(ids)
        torch.testing.assert_close(rows.tensor, want[key], rtol=1e-6, atol=1e-6)


@pytest.fixture
def planner():
    planner = RequestPlanner(SCHEMA, LAYERS, "toy")
    yield planner
    planner.close()


def test_contract_and_planners_import_no_engine():
    """Nor does anything else of the rooms that hold captures, steering and dictionaries."""
    code = (
        "import importlib, pkgutil, sys, birkhoff\n"
        "import birkhoff.hooks.step_hooks, birkhoff.planning.request_planner, birkhoff.planning.plan_results\n"
        "assert 'birkhoff.kernels' not in sys.modules\n"
        "for room in ('hooks', 'capture', 'steering', 'sae', 'planning'):\n"
        "    package = importlib.import_module('birkhoff.' + room)\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "bad = ('birkhoff.engine', 'birkhoff.model', 'birkhoff.decode', 'birkhoff.api', 'birkhoff.hf.', 'numba',\n"
        "       'llvmlite', 'triton', 'transformers', 'vllm')\n"
        "print(len([name for name in sys.modules if name.startswith('birkhoff.')]))\n"
        "print(*[name for name in sys.modules if name.startswith(bad)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *others = done.stdout.split()
    assert int(count) > 80 and others == []


def test_padding_chunks_and_preemption_deliver_every_position_once(planner):
    vector = torch.arange(D).float()
    ids, other = [3, 1, 4, 1, 5, 9], [2, 7]
    plan = captured(planner, ids, [Add(vector, "post_attn", [0], scale=0.5)])
    twin = captured(planner, other)
    hooks = StepHooks()
    pad = [0, 0]
    step(hooks, [Span(plan, 2, 0, ids[:4], 6), Span(twin, 6, 0, other, 2)], pad + ids[:4] + other + pad)
    hooks.end()
    plan.release()  # preempted: computed again from the beginning
    assert plan.reserve()
    step(hooks, [Span(plan, 0, 0, ids[:5], 6)], ids[:5])
    hooks.end()
    step(hooks, [Span(plan, 1, 5, ids[5:], 6)], [8, *ids[5:]])
    hooks.end()
    hooks.finish(plan, "length", len(ids) + 1)
    hooks.finish(twin, "stop", len(other) + 1)

    def edit(layer, name, x):
        return x + 0.5 * vector if (layer, name) == (0, "post_attn") else x

    check(plan, ids, edit)
    check(twin, other)
    assert plan_report(plan)["steered_positions"] == list(range(6)) and "steering_hash" not in plan_report(
        twin
    )
    assert planner.steering.tables.rows_used == 0


@pytest.mark.parametrize("by", ["settle", "next begin", "finish"])
def test_rows_of_draft_tokens_wait_until_they_are_kept(planner, by):
    ids, rejected = [3, 1, 4, 1], [7, 8]
    plan = captured(planner, ids[:2], [Add(torch.ones(D), "post_mlp", [2])])
    hooks = StepHooks()
    step(hooks, [Span(plan, 0, 0, ids[:2], 2)], ids[:2])
    hooks.end()
    step(hooks, [Span(plan, 0, 2, ids[2:] + rejected, 2)], ids[2:] + rejected)
    hooks.end([plan])
    assert plan.withheld is not None and plan.steered == set(range(6))
    if by == "settle":
        hooks.settle(plan, 4)
    elif by == "next begin":  # an engine that learns at the next step how far its drafts were right
        hooks.begin([Span(plan, 0, 4, [5], 2)], 1)
        hooks.fail()
    hooks.finish(plan, "length", len(ids) + 1)
    check(plan, ids)
    assert plan.steered - {4} == set(range(4)) and plan.withheld is None


def test_a_failed_step_delivers_nothing_and_is_repeated(planner):
    ids = [3, 1, 4]
    plan = captured(planner, ids)
    hooks = StepHooks()
    hooks.begin([Span(plan, 0, 0, ids, 3)], 3)
    hooks.site(0, BY_NAME["pre_attn"], EMBED[torch.tensor(ids)])
    hooks.fail()
    assert plan.delivered_until == 0
    x = torch.ones(1, D)
    assert hooks.site(0, BY_NAME["pre_attn"], x) is x, "outside a step nothing happens"
    step(hooks, [Span(plan, 0, 0, ids, 3)], ids)
    hooks.end()
    hooks.finish(plan, "stop", 4)
    check(plan, ids)


def test_an_idle_plan_costs_nothing_and_returns_the_same_tensor(planner):
    plan = planner.plan(
        [1, 2], 4, planner.edits([Add(torch.ones(D), "pre_attn", [0], phase="prefill")], [1, 2], 4)
    )
    assert plan.reserve()
    hooks = StepHooks()
    assert hooks.begin([Span(plan, 0, 2, [5], 2)], 1) is None
    x = EMBED[:1]
    assert hooks.site(0, BY_NAME["pre_attn"], x) is x
    hooks.end()


def test_each_rank_writes_its_layers_and_one_reader_joins_them(tmp_path):
    ids = [3, 1, 4, 1]
    ranks = [
        RequestPlanner(
            SCHEMA,
            LAYERS,
            "toy",
            capture_root=tmp_path,
            layers=layers,
            file_options={"pp_rank": rank, "pp_size": 2},
        )
        for rank, layers in enumerate([range(2), range(2, 3)])
    ]
    specs = {
        "both": Capture({"pre_attn": "all"}, "all", request_id="both", returns="file"),
        "first": Capture({"pre_attn": [0]}, "all", request_id="first", returns="file"),
    }
    for planner in ranks:
        hooks = StepHooks()
        for spec in specs.values():
            plan = planner.plan(ids, 2, (), spec)
            plan.open()
            step(hooks, [Span(plan, 0, 0, ids, 4)], ids)
            hooks.end()
            hooks.finish(plan, "stop", 5)
            assert capture_results_of(plan)["filesystem"].status == "ok"
        planner.close()
    want = plain(ids)
    for name, layers in (("both", range(3)), ("first", [0])):
        entries = read_request(tmp_path / "captures" / name)
        assert set(entries) == {("pre_attn", layer) for layer in layers}
        for (hook, layer), entry in entries.items():
            np.testing.assert_allclose(entry.values(), want[hook, layer].numpy(), rtol=1e-6, atol=1e-6)


def test_a_plan_from_json_equals_the_plan_from_python(planner):
    add = {"op": "add", "vector": [1.0] * D, "at": {"hook": "pre_attn", "layers": [1]}, "scale": 2.0}
    capture = {"memory": {"hooks": {"pre_attn": [1]}, "positions": "all"}}
    plan = planner.from_json({"interventions": [add], "capture": capture}, [1], 2)
    same = Plan(edits=planner.edits([Add(torch.ones(D), "pre_attn", [1], scale=2.0)], [1], 2))
    assert plan.prefill_digest == same.prefill_digest and len(plan.jobs) == 1
    assert planner.from_json({}, [1], 2) is None


digests = st.none() | st.binary(min_size=16, max_size=16)


@settings(deadline=None, max_examples=50)
@given(digests, digests, st.integers(1, 99), st.integers(1, 99))
def test_the_salt_names_the_edits_and_where_the_prompt_ends(prefill, decode, first, second):
    ours, other = salt(prefill, decode, first), salt(prefill, decode, second)
    assert (ours is None) == (prefill is None and decode is None)
    assert (ours == other) == (first == second or prefill == decode)
    assert ours is None or ours != salt(prefill, b"x" * 15, first)


def test_plans_that_only_capture_share_the_cache(planner):
    assert cache_salt(captured(planner, [1, 2]), 2) is None and cache_salt(None, 2) is None
    assert cache_salt(captured(planner, [1, 2], [Add(torch.ones(D), "pre_attn", [0])]), 2) is not None
