"""Attaching and detaching are atomic, and running requests keep the module they started with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import SaeReconstruct, SaeSet
from birkhoff.convert.synth import synth
from birkhoff.errors import CapacityError, SaeBusy, SaeError
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.sae.feature_edits import check_together
from birkhoff.sae.registry import RowPool, SaeRegistry
from birkhoff.sae.sae_manifest import save_manifest
from tests.sae.reference import random_sae
from tests.sizes import scaled

D, M, L = 16, 3, 6
SCHEMA = build_hook_schema(D, "float32", M, 4, 2)
PROMPT = [0, *range(40, 60)]


def new_registry(rows=256):
    return SaeRegistry(SCHEMA, L, "cpu", rows)


def sae(seed=0, hook="mlp_out", layer=2, **more):
    return random_sae("relu", 24, D, seed, hook=hook, layer=layer, **more)


class Fault(Exception):
    pass


def steps_of(attach):
    """The names of the steps of an attach, in order."""
    seen: list[str] = []
    attach(seen.append)
    return seen


@pytest.mark.parametrize("kind", ["delta", "full"])
@pytest.mark.parametrize("swap", [False, True], ids=["new", "replacing"])
def test_t_sae_4_a_fault_at_any_step_leaves_the_state_unchanged(kind, swap):
    sites = [sae(1), sae(2, layer=3), sae(3, "mhc_streams_final", L - 1, view="mean")]

    def prepared():
        registry = new_registry()
        registry.attach("other", sae(9, layer=4), kind="full")
        if swap:
            registry.attach("m", sae(8), kind=kind)
            reservation = registry.reservation(
                [registry["m"]], {kind: {b"row"}}, {(1, ("mlp_out", 2), 5, "prefill")}
            )
            assert reservation.reserve()
        return registry

    steps = steps_of(lambda reached: prepared().attach("m", sites, kind, None, swap, reached))
    assert len(steps) == 1 + 3 + 3 + 4 + swap and len(set(steps)) == len(steps)
    for step in steps:
        registry = prepared()
        before = registry.state()

        def fail(name, step=step):
            if name == step:
                raise Fault(name)

        with pytest.raises(Fault):
            registry.attach("m", sites, kind, None, swap, fail)
        assert registry.state() == before, step
        registry.attach("m", sites, kind, None, swap)  # a retry succeeds
        assert list(registry["m"].saes) == [("mlp_out", 2), ("mlp_out", 3), ("mhc_streams_final", L - 1)]


def test_running_out_of_memory_leaves_the_state_unchanged(monkeypatch):
    registry = new_registry()
    before, allocated = registry.state(), torch.Tensor.to

    def no_more(self, *args, **kwargs):
        if self.shape == (24, D) and args and str(args[0]) == "cpu":
            raise torch.OutOfMemoryError("no room")
        return allocated(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", no_more)
    with pytest.raises(torch.OutOfMemoryError):
        registry.attach("m", sae())
    monkeypatch.undo()
    assert registry.state() == before


def test_a_site_has_one_full_module_and_any_number_of_delta_modules():
    registry = new_registry()
    registry.attach("f", sae(1), kind="full")
    for index in range(3):
        registry.attach(f"d{index}", sae(index))
    with pytest.raises(SaeError, match=r"mlp_out\[2\] already has the full module 'f'"):
        registry.attach("g", sae(2), kind="full")
    registry.attach("g", sae(2, layer=3), kind="full")
    registry.detach("f")
    registry.attach("f2", sae(2), kind="full")
    assert [registry[name].order for name in ("d0", "d1", "d2")] == [1, 2, 3]


STREAMS = "mhc_streams_pre_mlp"
BAD = [
    ({"name": ""}, "named by a text"),
    ({"name": "taken"}, "attached already"),
    ({"kind": "half"}, "kind is 'half'"),
    ({"saes": "weights"}, "expected an Sae"),
    ({"saes": []}, "expected an Sae"),
    ({"saes": [sae(1), sae(2)]}, "two dictionaries for one site"),
    ({"saes": random_sae("relu", 24, D)}, "says no hook"),
    ({"saes": sae(hook="mlp_up")}, "not a hook of this model"),
    ({"saes": sae(layer=6)}, r"layers 0\.\.5"),
    ({"saes": sae(hook="mhc_attn_pre_mix")}, "capture-only"),
    (
        {"saes": random_sae("relu", 24, 17, hook="mlp_out", layer=1)},
        "rows of 17, and view 'single' of mlp_out has rows of 16",
    ),
    (
        {"saes": random_sae("relu", 24, D, hook=STREAMS, layer=1, view="flat")},
        r"rows of 16, .* m\*d = 3\*16 = 48",
    ),
    ({"saes": sae(hook=STREAMS)}, "has 3 streams: use flat, per_stream, read or mean"),
    ({"saes": sae(view="mean")}, "has one stream: use single"),
    (
        {"saes": sae(hook="mhc_streams_pre_attn", layer=0, view="read", spread="post")},
        "no sublayer has written",
    ),
    ({"features": [3, 99]}, "feature 99 does not exist"),
    ({"features": []}, "at least one, and each once"),
    ({"features": [3, 3]}, "at least one, and each once"),
    ({"features": "bridge"}, "expected a list of features"),
    ({"features": ["bridge"]}, "no feature is labelled 'bridge'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:36] for _, message in BAD])
def test_invalid_attachments_are_refused_and_leave_no_trace(change, message):
    registry = new_registry()
    registry.attach("taken", sae())
    before = registry.state()
    arguments = {"name": "m", "saes": sae(), "kind": "delta", "features": None, **change}
    with pytest.raises(SaeError, match=message):
        registry.attach(**arguments)
    assert registry.state() == before


MESSAGES = [message for _, message in BAD]
assert len(set(MESSAGES)) >= len(MESSAGES) - 3


def resolved(registry, *edits):
    resolved_edits = [edit.resolve(registry, [1, 2, 3], 4) for edit in edits]
    check_together(resolved_edits)
    return resolved_edits


REFUSED = [
    (lambda: SaeSet("x", {3: 1.0}), "no module named 'x'; attached: d, f, r, s"),
    (lambda: SaeSet("f", {3: 1.0}), "attached as 'full', and SaeSet"),
    (lambda: SaeReconstruct("d"), "attached as 'delta', and SaeReconstruct"),
    (lambda: SaeSet("d", {24: 1.0}), r"0\.\.23"),
    (lambda: SaeSet("d", {"fog": 1.0}), "no feature is labelled 'fog'"),
    (lambda: SaeSet("d", {"bridge": 1.0, 3: 2.0}), "feature 3 is given twice"),
    (lambda: SaeSet("d", {3: {"x_max": 2.0}}), "none recorded"),
    (lambda: SaeSet("r", {5: 1.0}), r"cannot be clamped: this module was attached with features \[3, 4\]"),
    (
        lambda: SaeSet("d", {("mlp_out", 3): {3: 1.0}}),
        r"no dictionary at mlp_out\[3\]; it covers mlp_out\[2\]",
    ),
    (lambda: SaeSet("d", {("nowhere", 3): {3: 1.0}}), "not a hook of this model"),
    (lambda: SaeSet("d", {3: 1.0}, streams=[0]), "only view 'per_stream'"),
    (lambda: SaeSet("s", {3: 1.0}, streams=[3]), r"streams 0\.\.2"),
    (lambda: SaeSet("d", {3: 1.0}, where={"prompt": [7]}), "position 7 is out of range"),
    (lambda: SaeSet("d", {}), "names no feature"),
    (lambda: SaeSet("d", [3]), "expected {feature: value}"),
    (lambda: SaeSet("", {3: 1.0}), "expected the name of an attached dictionary"),
    (lambda: SaeSet("d", {3: float("nan")}), "expected a finite number"),
    (lambda: SaeSet("d", {3: True}), "value is True"),
    (lambda: SaeSet("d", {-3: 1.0}), "feature -3"),
    (lambda: SaeSet("d", {True: 1.0}), "feature True"),
    (lambda: SaeSet("d", {3: 1.0, "3": 2.0}), "names one feature twice"),
    (lambda: SaeSet("d", {3: 1.0}, kind="set"), "kind is 'set'"),
    (lambda: SaeSet("d", {3: 1.0}, kind="bound"), "a bound is 1.0"),
    (lambda: SaeSet("d", {3: {"min": 2.0, "max": 1.0}}, kind="bound"), "minimum 2.0 is above"),
    (lambda: SaeSet("d", {3: {"x_max": 1.0}}, kind="multiply"), "plain factor"),
    (lambda: SaeSet("d", {3: {"value": 1.0, "colour": 2}}), "'colour' is no field"),
    (lambda: SaeSet("d", {3: 1.0}, only_if_active=1), "only_if_active is 1"),
    (lambda: SaeSet("d", {3: 1.0}, phase="later"), "phase is 'later'"),
    (lambda: SaeSet("d", {3: 1.0}, path="across"), "path is 'across'"),
    (lambda: SaeSet("d", {3: 1.0}, streams="all"), "list of stream numbers"),
    (lambda: SaeReconstruct("f", error="ignore"), "error is 'ignore'"),
]


@pytest.fixture(scope="module")
def full_registry():
    registry = new_registry()
    registry.attach("d", sae(labels={3: "bridge"}))
    registry.attach("f", sae(1), kind="full")
    registry.attach("r", sae(2), features=[3, 4])
    registry.attach("s", sae(3, STREAMS, 2, view="per_stream"))
    return registry


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:36] for _, message in REFUSED])
def test_invalid_edits_are_refused_before_anything_runs(make, message, full_registry):
    before = full_registry.state()
    with pytest.raises(birkhoff.BirkhoffError, match=message):
        resolved(full_registry, make())
    assert full_registry.state() == before


def test_two_edits_of_one_feature_in_one_phase_are_refused(full_registry):
    registry = full_registry
    for pair in (
        (SaeSet("d", {3: 1.0}), SaeSet("d", {3: 2.0}, phase="decode")),
        (SaeSet("d", {3: 1.0}, phase="prefill"), SaeSet("d", {"bridge": 2.0})),
        (SaeReconstruct("f"), SaeReconstruct("f", {3: 1.0}, phase="prefill")),
    ):
        with pytest.raises(SaeError, match="two edits set"):
            resolved(registry, *pair)
    resolved(registry, SaeSet("d", {3: 1.0}, phase="prefill"), SaeSet("d", {3: 2.0}, phase="decode"))
    resolved(registry, SaeSet("d", {3: 1.0}), SaeSet("d", {4: 2.0}), SaeSet("r", {3: 1.0}))
    resolved(registry, SaeReconstruct("f", phase="prefill"), SaeReconstruct("f", {3: 1.0}, phase="decode"))


def test_digests_depend_on_the_effect_of_edits(full_registry):
    registry = full_registry

    def content(edit, phase="prefill"):
        return tuple(edit.resolve(registry, [1, 2, 3], 4).digest_parts(phase))

    plain = content(SaeSet("d", {3: 1.0, 4: 2.0}))
    assert plain == content(SaeSet("d", {4: 2.0, "bridge": 1.0})) != ()
    assert (
        plain
        == content(SaeSet("d", {("mlp_out", 2): {3: 1.0, 4: 2.0}}))
        == content(SaeSet("d", {3: 1, 4: 2}, phase="prefill"))
    )
    assert (
        content(SaeSet("d", {3: 1.0}, phase="decode"))
        == ()
        == content(SaeSet("d", {3: 1.0}, where={"generated": "all"}))
    )
    different = [
        SaeSet("d", {3: 1.0}),
        SaeSet("d", {3: 1.0, 4: 2.5}),
        SaeSet("d", {3: 1.0, 4: 2.0}, kind="additive"),
        SaeSet("d", {3: 1.0, 4: 2.0}, only_if_active=True),
        SaeSet("r", {3: 1.0, 4: 2.0}),
        SaeSet("d", {3: 1.0, 4: 2.0}, where={"prompt": [1]}),
        SaeReconstruct("f", {3: 1.0, 4: 2.0}),
        SaeReconstruct("f", {3: 1.0, 4: 2.0}, error="keep"),
        SaeSet("s", {3: 1.0}),
        SaeSet("s", {3: 1.0}, streams=[1]),
        SaeSet("s", {3: 1.0}, path="read"),
    ]
    assert len({plain, *map(content, different)}) == len(different) + 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=40))
@settings(max_examples=scaled(200, 40), deadline=None)
def test_no_row_leaks_in_any_order_of_reserve_and_release(moves):
    """Six requests, some with equal rows, in a pool of three rows."""
    registry = new_registry(rows=3)
    registry.attach("d", sae())
    edits = [
        SaeSet("d", {index % 4: 1.0}, phase=("both", "prefill", "decode")[index % 3]) for index in range(6)
    ]
    resolved_edits = [edit.resolve(registry, [1, 2], 3) for edit in edits]
    reservations = [
        registry.reservation([one.module], {"delta": one.rows()}, one.writes()) for one in resolved_edits
    ]
    for index, _, take in moves:
        reservation = reservations[index]
        if take and not reservation.reserved:
            wanted = set(reservation.rows["delta"]).union(
                *(h.rows["delta"] for h in reservations if h.reserved)
            )
            assert reservation.reserve() is (len(wanted) <= 3)
        elif not take:
            reservation.release()
        assert registry.pools["delta"].used == len(
            set().union(*(h.rows["delta"] for h in reservations if h.reserved))
        )
        assert registry["d"].live == sum(h.reserved for h in reservations)
    for reservation in reservations:
        reservation.release()
    assert registry.pools["delta"].used == 0 and registry["d"].live == 0 and not registry.state()[-1]


def test_requests_that_never_fit_are_refused_with_the_sizes():
    registry = new_registry(rows=1)
    registry.attach("d", sae())
    edit = SaeSet("d", {3: 1.0}).resolve(registry, [1], 2)
    with pytest.raises(CapacityError, match="needs 2 rows of delta clamps, and 1"):
        registry.reservation([edit.module], {"delta": edit.rows()}, ())
    pool = RowPool("delta", 1)
    assert pool.take([b"a"]) and pool.take([b"a"]) and not pool.take([b"b"])


# In a running engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference") as engine:
        yield engine


def at_64(seed, hook="mlp_out", layer=2, **more):
    return random_sae("jumprelu", 32, 64, seed, hook=hook, layer=layer, **more)


GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def read_logprobs(stream):
    list(stream)
    return [one.logprob for one in stream.output.logprobs]


def test_running_requests_keep_the_module_they_started_with(engine):
    """The module is replaced and then detached while two requests run; their outputs are unaffected."""
    edit = [SaeSet("m", {3: 9.0})]
    expected = []
    for seed in (1, 2):
        with engine.attach("m", at_64(seed)):
            expected.append(read_logprobs(engine.stream(PROMPT, steer=edit, **GREEDY)))
    assert expected[0] != expected[1]
    engine.attach("m", at_64(1))
    first = engine.stream(PROMPT, steer=edit, **GREEDY)
    next(first), next(first)
    with pytest.raises(SaeBusy, match="1 running requests use 'm'"):
        engine.detach("m")
    engine.attach("m", at_64(2), replace=True)
    second = engine.stream(PROMPT, steer=edit, **GREEDY)
    next(second), next(second)
    engine.detach("m", drain=True)
    with pytest.raises(SaeError, match="no module named 'm'"):
        engine.generate(PROMPT, steer=edit, **GREEDY)
    assert len(engine.saes.registry.state()[3]) == 2  # both are draining
    assert [read_logprobs(first), read_logprobs(second)] == expected
    assert engine.saes.registry.state()[3] == () and engine.saes.registry.pools["delta"].used == 0


def test_the_global_tier_and_its_conflicts(engine):
    alone = engine.generate(PROMPT, **GREEDY)
    engine.attach("m", at_64(1, labels={5: "fog"}))
    engine.attach("f", at_64(2), kind="full")
    expected = engine.generate(PROMPT, steer=[SaeSet("m", {3: 9.0}), SaeSet("m", {5: 2.0})], **GREEDY)
    with engine.steering(SaeSet("m", {3: 9.0})):
        both = engine.generate(PROMPT, steer=[SaeSet("m", {"fog": 2.0})], **GREEDY)
        assert both.logprobs == expected.logprobs
        assert engine.settings["saes"] is not None
        with pytest.raises(SaeError, match="two edits set feature 3"):
            engine.generate(PROMPT, steer=[SaeSet("m", {3: 1.0})], **GREEDY)
        with pytest.raises(SaeError, match="two edits set feature 3"), engine.steering(SaeSet("m", {3: 1.0})):
            pass
        with pytest.raises(SaeError, match="Clear that first"):
            engine.detach("m")
    assert engine.generate(PROMPT, **GREEDY).logprobs == alone.logprobs and engine.settings["saes"] is None
    running = engine.stream(PROMPT, steer=[SaeSet("m", {3: 9.0}, phase="decode")], **GREEDY)
    next(running), next(running)
    with pytest.raises(SaeError, match="a running request already sets feature 3 of m"):
        engine.saes.set_for_all([SaeSet("m", {3: 1.0})])
    engine.saes.set_for_all([SaeSet("m", {3: 1.0}, phase="prefill")])  # no conflict: another phase
    engine.saes.set_for_all([SaeSet("m", {5: 1.0})], replace=False)
    assert len(engine.saes.status()["for_all"]) == 2
    running.close()
    engine.saes.clear_for_all()
    with pytest.raises(SaeError, match="single requests"):
        engine.saes.set_for_all([SaeReconstruct("f")])
    engine.detach("m")
    engine.detach("f")


def test_requests_wait_for_rows_and_all_finish(engine):
    """Eight requests with room for two at a time: they take turns, and the outputs equal those of single runs."""
    with engine.attach("m", at_64(1)):
        pool = engine.saes.registry.pools["delta"]
        steer = [[SaeSet("m", {index: 9.0})] for index in range(8)]
        expected = [engine.generate(PROMPT, steer=edits, **GREEDY).logprobs for edits in steer]
        size, pool.size = pool.size, 4  # two rows per request: prefill and decode
        try:
            outputs = engine.generate([PROMPT] * 8, steer=steer, **GREEDY)
        finally:
            pool.size = size
        assert [one.logprobs for one in outputs] == expected and pool.used == 0
        assert len({str(one) for one in expected}) == 8


def test_features_of_a_text(engine):
    dictionary = at_64(1, labels={7: "seven"})
    f = dictionary.encode(engine.trace(PROMPT)["mlp_out", 2])
    with engine.attach("m", dictionary), engine.attach("few", dictionary, features=[7, 9]):
        hits_by_token = engine.features(PROMPT, "m", k=4)
        few = engine.features(PROMPT, "few", k=4)
        with pytest.raises(SaeError, match="k is 0"):
            engine.features(PROMPT, "m", k=0)
        with pytest.raises(SaeError, match="no dictionary at"):
            engine.features(PROMPT, "m", at=("mlp_out", 3))
    assert len(hits_by_token) == len(PROMPT)
    for row, hits, some in zip(f, hits_by_token, few):
        live = sorted(((float(v), i) for i, v in enumerate(row) if v > 0), key=lambda hit: (-hit[0], hit[1]))
        assert [hit.feature for hit in hits] == [i for _, i in live[:4]]
        assert [hit.activation for hit in hits] == pytest.approx([v for v, _ in live[:4]], abs=1e-4)
        assert {hit.feature for hit in some} == {i for _, i in live if i in (7, 9)}
        assert all(hit.label == ("seven" if hit.feature == 7 else None) for hit in (*hits, *some))


def test_features_of_streams_have_a_stream_index(engine):
    dictionary = at_64(1, "mhc_streams_pre_attn", 2, view="per_stream")
    f = dictionary.encode(engine.trace(PROMPT)["mhc_streams_pre_attn", 2])
    with engine.attach("m", [dictionary, at_64(3)]):
        with pytest.raises(SaeError, match="Say which"):
            engine.features(PROMPT, "m")
        hits_by_token = engine.features(PROMPT, "m", k=3, at=("mhc_streams_pre_attn", 2))
    for token, hits in enumerate(hits_by_token):
        assert hits == sorted(hits, key=lambda hit: -hit.activation)
        assert all(
            float(f[token, hit.stream, hit.feature]) == pytest.approx(hit.activation, abs=1e-4)
            for hit in hits
        )
        assert hits[0].activation == pytest.approx(float(f[token].max()), abs=1e-4)


def test_a_module_from_files(engine, tmp_path):
    path = at_64(4).save(tmp_path / "sae")
    with engine.attach("m", path) as attachment:
        assert attachment.name == "m" and list(attachment.module.saes) == [("mlp_out", 2)]
    assert "m" not in engine.saes.registry
    save_manifest([at_64(4), at_64(5, layer=3)], tmp_path / "module", clampable=[2, 7])
    with engine.attach("m", tmp_path / "module") as attachment:
        assert attachment.module.features == {2, 7} and list(attachment.module.saes) == [
            ("mlp_out", 2),
            ("mlp_out", 3),
        ]
