"""Nobody's edits reach anybody else: random requests that come, run together and go, each as if it were alone.

Requests are drawn from a set of prompts, edits and captures; what each gives alone is computed once. In
`batch_invariant` mode tokens, log-probabilities and captured rows have to be the same bits in every company.
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
from tests.sae.made import random_sae
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


def wishes(engine):
    m, d, last = engine.config.hc_mult, engine.config.hidden_size, engine.config.num_hidden_layers - 1
    prompts = [[0, *range(9, 9 + 7 * n)] for n in (1, 3, 6)]
    rows = PositionRows({place: vector(d, place) for place in (0, 4, 6)})
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
            torch.equal(rows, other[3][key][0]) and places == other[3][key][1]
            for key, (rows, places) in one[3].items()
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
def test_leaks_requests_in_any_company_give_what_they_give_alone(engine, chosen):
    """Each tuple: prompt, edits, capture, the step at which it comes, and after how many steps it is cancelled."""
    prompts, steers, captures = wishes(engine)
    running = []
    for prompt, steer, capture, _, _ in chosen:
        key = (prompt % len(prompts), steer % len(steers), capture % len(captures))
        wish = {"steer": steers[key[1]], "capture": captures[key[2]], **OPTIONS}
        if key not in alone:
            alone[key] = outcome(engine.generate(prompts[key[0]], **wish))
        (request,) = engine.requests(prompts[key[0]], **wish)
        running.append((key, request))
    for step in range(10**4):
        for (_, request), (_, _, _, comes, leaves) in zip(running, chosen):
            if comes == step:
                engine._core.submit(request)
            if leaves is not None and comes + leaves == step:
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
    assert finished or all(leaves is not None for *_, leaves in chosen)
    tables = engine._steering.tables
    assert tables.rows_used == 0 and not any(slab.uses for slab in tables.slabs.values())
    assert engine._core.scheduler.idle and engine._core.scheduler.slots.num_free == SLOTS
    assert not any(pool.used for pool in engine.saes.registry.pools.values())


alone: dict = {}


def test_leaks_the_edits_of_this_test_all_do_something(engine):
    prompts, steers, _ = wishes(engine)
    plain = engine.generate(prompts[1], **OPTIONS)
    for steer in steers[1:]:
        assert engine.generate(prompts[1], steer=steer, **OPTIONS).logprobs != plain.logprobs


def test_leaks_sixteen_configurations_in_one_batch_are_sixteen_single_runs(engine):
    prompts, steers, _ = wishes(engine)
    many = [(prompts[number % 3], steers[number % len(steers)]) for number in range(16)]
    together = engine.generate([p for p, _ in many], steer=[s for _, s in many], **OPTIONS)
    for (prompt, steer), out in zip(many, together):
        assert same(outcome(engine.generate(prompt, steer=steer, **OPTIONS)), outcome(out))
