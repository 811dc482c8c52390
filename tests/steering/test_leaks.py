"""Requests do not affect each other: random requests that run concurrently give the results of single runs.

Requests are drawn from a set of prompts, edits and captures; the result of each single run is computed once. In
`batch_invariant` mode tokens, log-probabilities and captured rows must be bit-identical in every batch.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Add, Capture, Clamp, Patch, Project, SaeReconstruct, SaeSet
from birkhoff.convert.synth import synth
from birkhoff.output import Output
from birkhoff.steering.position_rows import PositionRows
from tests.sae.reference import random_sae
from tests.sizes import scaled

SLOTS, REQUESTS = 6, scaled(64, 12)
OPTIONS = {"max_tokens": 4, "temperature": 1.0, "seed": 5, "logprobs": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("leaks") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference", max_requests=SLOTS) as engine:
        d = engine.config.hidden_size
        engine.attach("delta", random_sae("relu", 24, d, hook="mlp_out", layer=1))
        engine.attach("whole", random_sae("jumprelu", 24, d, 1, hook="mlp_in", layer=3), kind="full")
        yield engine


def vector(width, seed):
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v / v.norm() * 5


def request_choices(engine):
    m, d, last = engine.config.hc_mult, engine.config.hidden_size, engine.config.num_hidden_layers - 1
    prompts = [[0, *range(9, 9 + 7 * n)] for n in (1, 3, 6)]
    rows = PositionRows({position: vector(d, position) for position in (0, 4, 6)})
    steers = [
        None,
        [Add(vector(d, 1), "mlp_out", "all", 2.0)],
        [
            Add(vector(m * d, 2), "mhc_streams_pre_attn", [2], path="carry"),
            Add(vector(d, 1), "mlp_out", "all", -2.0),
        ],
        [
            Add(vector(d, 3), "mhc_streams_pre_mlp", [1, 3], streams=[1], phase="decode"),
            Clamp(vector(d, 4), "post_attn", "all", max=0.0),
        ],
        [Project(vector(d, 5), "mhc_streams_pre_attn", "all", streams="all", path="read")],
        [
            Add(
                vector(d, 6),
                "mhc_streams_pre_attn",
                [3],
                streams="post_mix",
                where={"generated": {"window": [1, 2]}},
            )
        ],
        [
            Patch(rows, "pre_attn", [2]),
            Patch(0, "mlp_in", [0], where=[-1]),
            Add(vector(d, 1), "mlp_out", "all", 2.0),
        ],
        [Add(vector(m * d, 7), "mhc_streams_final", [last], norm_match=True, phase="prefill")],
        [SaeSet("delta", {3: 5.0, 7: -2.0}), Add(vector(d, 1), "mlp_out", [1])],
        [SaeReconstruct("whole", {1: 4.0}, error="keep", phase="decode")],
        [SaeReconstruct("whole", error="drop"), SaeSet("delta", {3: 1.0}, kind="additive")],
    ]
    captures = [
        None,
        Capture({"mhc_streams_pre_attn": [2], "mlp_out": "all"}, positions="all"),
        Capture({"mhc_streams_final": "all", "mhc_ffn_res_mix": [1]}, positions="all", capture_point="after"),
        Capture({"pre_attn": [2, 3]}, positions=[0, -1]),
    ]
    return prompts, steers, captures


def outcome(output):
    rows = {key: (rows.tensor, rows.positions) for key, rows in output.acts.items()}
    return output.token_ids, output.logprobs, output.interp, rows


def same(one, other):
    return (
        one[:3] == other[:3]
        and one[3].keys() == other[3].keys()
        and all(
            torch.equal(rows, other[3][key][0]) and positions == other[3][key][1]
            for key, (rows, positions) in one[3].items()
        )
    )


numbers = st.integers(0, 10**6)


@settings(max_examples=scaled(200, 12))
@given(
    chosen=st.lists(
        st.tuples(numbers, numbers, numbers, st.integers(0, 12), st.none() | st.integers(0, 9)),
        min_size=REQUESTS // 2,
        max_size=REQUESTS,
    )
)
def test_leaks_requests_in_any_batch_equal_single_runs(engine, chosen):
    """Each tuple: prompt, edits, capture, the step of submission, and the number of steps until it is cancelled."""
    prompts, steers, captures = request_choices(engine)
    running = []
    for prompt, steer, capture, _, _ in chosen:
        key = (prompt % len(prompts), steer % len(steers), capture % len(captures))
        options = {"steer": steers[key[1]], "capture": captures[key[2]], **OPTIONS}
        if key not in alone:
            alone[key] = outcome(engine.generate(prompts[key[0]], **options))
        (request,) = engine.requests(prompts[key[0]], **options)
        running.append((key, request))
    for step in range(10**4):
        for (_, request), (_, _, _, submit_step, cancel_after) in zip(running, chosen):
            if submit_step == step:
                engine._core.submit(request)
            if cancel_after is not None and submit_step + cancel_after == step:
                engine._core.cancel(request)
        if not engine._core.step() and step > 12 + 9:
            break
    finished = 0
    for key, request in running:
        if request.finish_reason == "cancelled":
            assert request.output_ids == alone[key][0][: len(request.output_ids)]
        else:
            finished += 1
            assert same(outcome(Output.of(request)), alone[key])
    assert finished or all(cancel_after is not None for *_, cancel_after in chosen)
    tables = engine._steering.tables
    assert tables.rows_used == 0 and not any(slab.uses for slab in tables.slabs.values())
    assert engine._core.scheduler.idle and engine._core.scheduler.slots.num_free == SLOTS
    assert not any(pool.used for pool in engine.saes.registry.pools.values())


alone: dict = {}


def test_leaks_every_edit_has_an_effect(engine):
    prompts, steers, _ = request_choices(engine)
    plain = engine.generate(prompts[1], **OPTIONS)
    for steer in steers[1:]:
        assert engine.generate(prompts[1], steer=steer, **OPTIONS).logprobs != plain.logprobs


def test_leaks_sixteen_configurations_in_one_batch_equal_single_runs(engine):
    prompts, steers, _ = request_choices(engine)
    many = [(prompts[index % 3], steers[index % len(steers)]) for index in range(16)]
    together = engine.generate([p for p, _ in many], steer=[s for _, s in many], **OPTIONS)
    for (prompt, steer), out in zip(many, together):
        assert same(outcome(engine.generate(prompt, steer=steer, **OPTIONS)), outcome(out))
