"""Attaching and detaching: whole or not at all, and running requests finish on what they began with."""

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
from tests.sae.made import random_sae
from tests.sizes import scaled

D, M, L = 16, 3, 6
SCHEMA = build_hook_schema(D, "float32", M, 4, 2)
PROMPT = [0, *range(40, 60)]


def registry(rows=256):
    return SaeRegistry(SCHEMA, L, "cpu", rows)


def sae(seed=0, hook="mlp_out", layer=2, **more):
    return random_sae("relu", 24, D, seed, hook=hook, layer=layer, **more)


class Fault(Exception):
    pass


def steps_of(attach):
    """The names of the steps, in order."""
    seen: list[str] = []
    attach(seen.append)
    return seen


@pytest.mark.parametrize("kind", ["delta", "full"])
@pytest.mark.parametrize("swap", [False, True], ids=["new", "replacing"])
def test_t_sae_4_a_fault_at_any_step_leaves_the_state_as_it_was(kind, swap):
    sites = [sae(1), sae(2, layer=3), sae(3, "mhc_streams_final", L - 1, view="mean")]

    def prepared():
        made = registry()
        made.attach("other", sae(9, layer=4), kind="full")
        if swap:
            made.attach("m", sae(8), kind=kind)
            holding = made.reservation([made["m"]], {kind: {b"row"}}, {(1, ("mlp_out", 2), 5, "prefill")})
            assert holding.reserve()
        return made

    steps = steps_of(lambda reached: prepared().attach("m", sites, kind, None, swap, reached))
    assert len(steps) == 1 + 3 + 3 + 4 + swap and len(set(steps)) == len(steps)
    for step in steps:
        made = prepared()
        before = made.state()

        def fail(name, step=step):
            if name == step:
                raise Fault(name)

        with pytest.raises(Fault):
            made.attach("m", sites, kind, None, swap, fail)
        assert made.state() == before, step
        made.attach("m", sites, kind, None, swap)  # and nothing stands in the way of trying again
        assert list(made["m"].saes) == [("mlp_out", 2), ("mlp_out", 3), ("mhc_streams_final", L - 1)]


def test_memory_that_runs_out_leaves_the_state_as_it_was(monkeypatch):
    made = registry()
    before, allocated = made.state(), torch.Tensor.to

    def no_more(self, *args, **kwargs):
        if self.shape == (24, D) and args and str(args[0]) == "cpu":
            raise torch.OutOfMemoryError("no room")
        return allocated(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", no_more)
    with pytest.raises(torch.OutOfMemoryError):
        made.attach("m", sae())
    monkeypatch.undo()
    assert made.state() == before


def test_sites_of_full_modules_are_taken_once_and_those_of_delta_ones_shared():
    made = registry()
    made.attach("f", sae(1), kind="full")
    for number in range(3):
        made.attach(f"d{number}", sae(number))
    with pytest.raises(SaeError, match=r"mlp_out\[2\] already has the full module 'f'"):
        made.attach("g", sae(2), kind="full")
    made.attach("g", sae(2, layer=3), kind="full")
    made.detach("f")
    made.attach("f2", sae(2), kind="full")
    assert [made[name].order for name in ("d0", "d1", "d2")] == [1, 2, 3]


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


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said[:36] for _, said in BAD])
def test_what_cannot_be_attached_is_refused_and_leaves_nothing(change, said):
    made = registry()
    made.attach("taken", sae())
    before = made.state()
    arguments = {"name": "m", "saes": sae(), "kind": "delta", "features": None, **change}
    with pytest.raises(SaeError, match=said):
        made.attach(**arguments)
    assert made.state() == before


MESSAGES = [said for _, said in BAD]
assert len(set(MESSAGES)) >= len(MESSAGES) - 3


def resolved(made, *edits):
    found = [edit.resolve(made, [1, 2, 3], 4) for edit in edits]
    check_together(found)
    return found


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
    made = registry()
    made.attach("d", sae(labels={3: "bridge"}))
    made.attach("f", sae(1), kind="full")
    made.attach("r", sae(2), features=[3, 4])
    made.attach("s", sae(3, STREAMS, 2, view="per_stream"))
    return made


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:36] for _, said in REFUSED])
def test_edits_that_cannot_be_are_refused_before_anything_runs(make, said, full_registry):
    before = full_registry.state()
    with pytest.raises(birkhoff.BirkhoffError, match=said):
        resolved(full_registry, make())
    assert full_registry.state() == before


def test_two_writers_of_one_feature_in_one_phase_are_refused(full_registry):
    made = full_registry
    for pair in (
        (SaeSet("d", {3: 1.0}), SaeSet("d", {3: 2.0}, phase="decode")),
        (SaeSet("d", {3: 1.0}, phase="prefill"), SaeSet("d", {"bridge": 2.0})),
        (SaeReconstruct("f"), SaeReconstruct("f", {3: 1.0}, phase="prefill")),
    ):
        with pytest.raises(SaeError, match="two edits set"):
            resolved(made, *pair)
    resolved(made, SaeSet("d", {3: 1.0}, phase="prefill"), SaeSet("d", {3: 2.0}, phase="decode"))
    resolved(made, SaeSet("d", {3: 1.0}), SaeSet("d", {4: 2.0}), SaeSet("r", {3: 1.0}))
    resolved(made, SaeReconstruct("f", phase="prefill"), SaeReconstruct("f", {3: 1.0}, phase="decode"))


def test_digests_name_what_edits_do(full_registry):
    made = full_registry

    def content(edit, phase="prefill"):
        return tuple(edit.resolve(made, [1, 2, 3], 4).digest_parts(phase))

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
def test_no_row_leaks_whatever_order_requests_come_and_go_in(moves):
    """Six requests with contents that partly agree, in a pool that holds three rows."""
    made = registry(rows=3)
    made.attach("d", sae())
    edits = [
        SaeSet("d", {number % 4: 1.0}, phase=("both", "prefill", "decode")[number % 3]) for number in range(6)
    ]
    found = [edit.resolve(made, [1, 2], 3) for edit in edits]
    holdings = [made.reservation([one.module], {"delta": one.rows()}, one.writes()) for one in found]
    for number, _, take in moves:
        holding = holdings[number]
        if take and not holding.held:
            wanted = set(holding.rows["delta"]).union(*(h.rows["delta"] for h in holdings if h.held))
            assert holding.reserve() is (len(wanted) <= 3)
        elif not take:
            holding.release()
        assert made.pools["delta"].used == len(set().union(*(h.rows["delta"] for h in holdings if h.held)))
        assert made["d"].live == sum(h.held for h in holdings)
    for holding in holdings:
        holding.release()
    assert made.pools["delta"].used == 0 and made["d"].live == 0 and not made.state()[-1]


def test_what_can_never_fit_is_refused_with_the_numbers():
    made = registry(rows=1)
    made.attach("d", sae())
    edit = SaeSet("d", {3: 1.0}).resolve(made, [1], 2)
    with pytest.raises(CapacityError, match="needs 2 rows of delta clamps, and 1"):
        made.reservation([edit.module], {"delta": edit.rows()}, ())
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


def told(stream):
    list(stream)
    return [one.logprob for one in stream.output.logprobs]


def test_running_requests_finish_on_what_they_began_with(engine):
    """Swapped, then deleted, in the middle of two answers: each goes on as if nothing had happened."""
    edit = [SaeSet("m", {3: 9.0})]
    expected = []
    for seed in (1, 2):
        with engine.attach("m", at_64(seed)):
            expected.append(told(engine.stream(PROMPT, steer=edit, **GREEDY)))
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
    assert len(engine.saes.registry.state()[3]) == 2  # both are leaving
    assert [told(first), told(second)] == expected
    assert engine.saes.registry.state()[3] == () and engine.saes.registry.pools["delta"].used == 0


def test_the_tier_of_every_request_and_its_conflicts(engine):
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
    engine.saes.set_for_all([SaeSet("m", {3: 1.0}, phase="prefill")])  # another phase: no conflict
    engine.saes.set_for_all([SaeSet("m", {5: 1.0})], replace=False)
    assert len(engine.saes.status()["for_all"]) == 2
    running.close()
    engine.saes.clear_for_all()
    with pytest.raises(SaeError, match="single requests"):
        engine.saes.set_for_all([SaeReconstruct("f")])
    engine.detach("m")
    engine.detach("f")


def test_requests_wait_for_rows_and_all_end(engine):
    """Eight contents, room for two at a time: they take turns, and each answer is its own."""
    with engine.attach("m", at_64(1)):
        pool = engine.saes.registry.pools["delta"]
        steer = [[SaeSet("m", {number: 9.0})] for number in range(8)]
        expected = [engine.generate(PROMPT, steer=edits, **GREEDY).logprobs for edits in steer]
        size, pool.size = pool.size, 4  # two rows each: prompt and answer
        try:
            found = engine.generate([PROMPT] * 8, steer=steer, **GREEDY)
        finally:
            pool.size = size
        assert [one.logprobs for one in found] == expected and pool.used == 0
        assert len({str(one) for one in expected}) == 8


def test_features_of_a_text(engine):
    dictionary = at_64(1, labels={7: "seven"})
    f = dictionary.encode(engine.trace(PROMPT)["mlp_out", 2])
    with engine.attach("m", dictionary), engine.attach("few", dictionary, features=[7, 9]):
        found = engine.features(PROMPT, "m", k=4)
        few = engine.features(PROMPT, "few", k=4)
        with pytest.raises(SaeError, match="k is 0"):
            engine.features(PROMPT, "m", k=0)
        with pytest.raises(SaeError, match="no dictionary at"):
            engine.features(PROMPT, "m", at=("mlp_out", 3))
    assert len(found) == len(PROMPT)
    for row, hits, some in zip(f, found, few):
        live = sorted(((float(v), i) for i, v in enumerate(row) if v > 0), key=lambda hit: (-hit[0], hit[1]))
        assert [hit.feature for hit in hits] == [i for _, i in live[:4]]
        assert [hit.activation for hit in hits] == pytest.approx([v for v, _ in live[:4]], abs=1e-4)
        assert {hit.feature for hit in some} == {i for _, i in live if i in (7, 9)}
        assert all(hit.label == ("seven" if hit.feature == 7 else None) for hit in (*hits, *some))


def test_features_of_streams_say_which_stream(engine):
    dictionary = at_64(1, "mhc_streams_pre_attn", 2, view="per_stream")
    f = dictionary.encode(engine.trace(PROMPT)["mhc_streams_pre_attn", 2])
    with engine.attach("m", [dictionary, at_64(3)]):
        with pytest.raises(SaeError, match="Say which"):
            engine.features(PROMPT, "m")
        found = engine.features(PROMPT, "m", k=3, at=("mhc_streams_pre_attn", 2))
    for token, hits in enumerate(found):
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
