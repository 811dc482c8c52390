"""Splices on the rows of a step, against float64 arithmetic row by row and against their plain twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from birkhoff.hooks.edit import SiteContext, edit_stages
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.sae import encode
from birkhoff.sae.clamps import parse_clamp, resolve_clamps
from birkhoff.sae.dictionary import VIEWS
from birkhoff.sae.encode import DeviceSae, encode_topk, reconstruct, top
from birkhoff.sae.splice import SaeHost, SaeUse, padded_units
from birkhoff.sae.views import make_view
from tests.sae.reference import FAMILIES, changed_row, plain, random_sae
from tests.sizes import scaled

D, M, F = 16, 3, 24
SCHEMA = build_hook_schema(D, "float32", M, 4, 2)
CLAMPS = {
    3: ("absolute", 2.5, False),
    7: ("additive", -1.5, False),
    8: ("multiply", -2.0, False),
    11: ("bound", (0.2, 0.6), False),
    20: ("bound", (None, 0.1), True),
}


def rows_of(count, view, seed=0):
    shape = (count, D) if view == "single" else (count, M, D)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def around_of(count, seed=1):
    g = torch.Generator().manual_seed(seed)
    weights, post = torch.rand(M, D, generator=g), torch.rand(count, M, generator=g) * 2
    # The read weights may be any function of the streams.
    return SiteContext(post, lambda streams: torch.sigmoid((streams * weights).sum(-1)))


def apply(x, edits, context):
    for stage in edit_stages(edits):
        x = stage(x, context)
    return x


def host_of(sae, features=None, order=0):
    hook = "mlp_out" if sae.view == "single" else "mhc_streams_pre_mlp"
    view = make_view(sae.view, sae.spread, sae.d_model, hook, 2, SCHEMA[hook])
    return SaeHost(sae, view, features, torch.device("cpu"), order)


def host_of_width(sae, width):
    schema = build_hook_schema(width, "float32", M, 4, 2)
    view = make_view(sae.view, sae.spread, sae.d_model, "mlp_out", 2, schema["mlp_out"])
    return SaeHost(sae, view, None, torch.device("cpu"))


def use_of(host, sae, clamps, mode="delta", streams=None):
    parsed = [
        parse_clamp(
            i,
            {"min": v[0], "max": v[1]}
            if kind == "bound" and None not in v
            else {"max": v[1]}
            if kind == "bound"
            else v,
            kind,
            gate,
            "",
        )
        for i, (kind, v, gate) in clamps.items()
    ]
    op = "delta" if mode == "delta" else "full"
    return SaeUse(
        host, resolve_clamps(parsed, sae, None), op, "both", "drop" if mode == "drop" else "keep", streams
    )


def expected_of(sae, x, rows, clamps, mode, around, streams=None):
    out = x.double().numpy().copy()
    for row in rows:
        a = None if x.ndim == 2 else around.read(x[row : row + 1])[0].double().numpy()
        out[row] = changed_row(sae, out[row], clamps, mode, a, around.post[row].double().numpy(), streams)
    return out


def sae_for(family, view, seed=0, features=F):
    width = M * D if view == "flat" else D
    return random_sae(family, features, width, seed, view=view, spread="read" if view == "read" else None)


@pytest.mark.parametrize("gate", [False, True], ids=["always", "only_if_active"])
@pytest.mark.parametrize("kind", ["absolute", "multiply", "bound"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_an_eager_step_leaves_out_changes_no_bit(view, kind, gate):
    """Gathering, bounds and gates are skipped where they do nothing; recorded steps (`clone`) always run them."""
    sae, around = sae_for("relu", view), around_of(8)
    x, value = rows_of(8, view), (0.3, 0.5) if kind == "bound" else 1.75
    host = host_of(sae)
    use = use_of(host, sae, dict.fromkeys((0, 5, 13), (kind, value, gate)))
    units = 8 * (M if view == "per_stream" else 1)
    data = host.splice_data([(use, list(range(8)))])
    assert data.every_unit == (units in (8, 24)) and (data.bounded, data.gated) == (kind == "bound", gate)
    whole = host.run_splice(x, data.clone(), around)
    assert torch.equal(host.run_splice(x, data, around), whole) and not torch.equal(whole, x)


@pytest.mark.parametrize("gate", [False, True], ids=["always", "only_if_active"])
@pytest.mark.parametrize("kind", ["absolute", "additive", "multiply", "bound"])
@pytest.mark.parametrize("family", FAMILIES)
def test_t_sae_1_delta_matches_float64(family, kind, gate):
    value = (0.3, 0.5) if kind == "bound" else 1.75
    sae, x, around = random_sae(family), rows_of(12, "single"), around_of(12)
    clamps = dict.fromkeys((0, 5, 13, 23), (kind, value, gate))
    host, rows = host_of(sae, features=[0, 5, 13, 23, 2]), [0, 3, 4, 9]
    out = host.run(x, [(use_of(host, sae, clamps), rows)], around)
    np.testing.assert_allclose(out.numpy(), expected_of(sae, x, rows, clamps, "delta", around), atol=3e-5)
    untouched = [row for row in range(12) if row not in rows]
    assert torch.equal(out[untouched], x[untouched]) and not torch.equal(out, x)


@pytest.mark.parametrize("clamps", [{}, CLAMPS], ids=["pure", "clamped"])
@pytest.mark.parametrize("error", ["drop", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_t_sae_2_full_reconstruction_matches_float64(family, error, clamps):
    sae, x, around = random_sae(family), rows_of(12, "single"), around_of(12)
    host, rows = host_of(sae), [1, 2, 8]
    out = host.run(x, [(use_of(host, sae, clamps, error), rows)], around)
    np.testing.assert_allclose(out.numpy(), expected_of(sae, x, rows, clamps, error, around), atol=5e-5)
    untouched = [row for row in range(12) if row not in rows]
    assert torch.equal(out[untouched], x[untouched])


@pytest.mark.parametrize("mask", ["none", "one", "all"])
@pytest.mark.parametrize("mode", ["delta", "keep", "drop"])
@pytest.mark.parametrize("family", FAMILIES)
def test_t_sae_3_compaction_equals_masked_dense(family, mode, mask):
    sae, x = random_sae(family), rows_of(9, "single")
    host = host_of(sae)
    use = use_of(host, sae, CLAMPS, mode)
    rows = {"none": [], "one": [4], "all": list(range(9))}[mask]
    dense = plain(sae, x, use.row, use.error)
    marked = torch.zeros(9, 1, dtype=torch.bool)
    marked[rows] = True
    out = host.run(x, [(use, rows)], around_of(9))
    assert torch.allclose(out, torch.where(marked, dense, x), atol=3e-5)
    if mask == "none":
        assert out is x  # not copied


@pytest.mark.parametrize("family", FAMILIES)
def test_t_sae_5_keeping_the_error_is_the_identity_without_clamps_and_the_delta_with_them(family):
    sae, x, around = random_sae(family), rows_of(20, "single"), around_of(20)
    host, rows = host_of(sae), list(range(20))
    assert torch.equal(host.run(x, [(use_of(host, sae, {}, "keep"), rows)], around), x)
    kept = host.run(x, [(use_of(host, sae, CLAMPS, "keep"), rows)], around)
    delta = host.run(x, [(use_of(host, sae, CLAMPS, "delta"), rows)], around)
    assert torch.equal(kept, delta)
    literal = plain(sae, x, use_of(host, sae, CLAMPS).row, "keep")  # computed through the error
    assert torch.allclose(kept, literal, atol=3e-5)
    assert torch.allclose(plain(sae, x, use_of(host, sae, {}).row, "keep"), x, atol=1e-5)


SPREADS = [
    (view, spread)
    for view in VIEWS
    for spread in (("read", "post", "uniform") if view == "read" else (None,))
]


@pytest.mark.parametrize("mode", ["delta", "keep", "drop"])
@pytest.mark.parametrize(("view", "spread"), SPREADS)
@pytest.mark.parametrize("family", ["relu", "topk"])
def test_t_sae_7_every_view_matches_the_oracle(family, view, spread, mode):
    sae = random_sae(family, F, M * D if view == "flat" else D, view=view, spread=spread)
    x, around = rows_of(10, view), around_of(10)
    host, rows = host_of(sae), [0, 2, 7, 8]
    out = host.run(x, [(use_of(host, sae, CLAMPS, mode), rows)], around)
    np.testing.assert_allclose(out.numpy(), expected_of(sae, x, rows, CLAMPS, mode, around), atol=1e-4)
    untouched = [row for row in range(10) if row not in rows]
    assert torch.equal(out[untouched], x[untouched])


@pytest.mark.parametrize("mode", ["delta", "drop"])
def test_t_sae_7_the_read_spread_reads_back_as_the_new_row(mode):
    sae = random_sae("relu", F, D, view="read", spread="read")
    x, around = rows_of(30, "read"), around_of(30)
    host, rows = host_of(sae), list(range(30))
    use = use_of(host, sae, CLAMPS, mode)
    a = around.read(x)
    u = (a.unsqueeze(-1) * x).sum(1)
    new = plain(sae, u, use.row, use.error)
    again = (a.unsqueeze(-1) * host.run(x, [(use, rows)], around)).sum(1)
    assert not torch.allclose(u, new, atol=0.1)
    assert torch.allclose(again, new, atol=3e-5)


def test_edits_of_one_stream_leave_the_others_unchanged():
    sae, x, around = sae_for("jumprelu", "per_stream"), rows_of(6, "per_stream"), around_of(6)
    host = host_of(sae)
    out = host.run(x, [(use_of(host, sae, CLAMPS, "drop", streams=(1,)), [0, 5])], around)
    np.testing.assert_allclose(
        out.numpy(), expected_of(sae, x, [0, 5], CLAMPS, "drop", around, streams=(1,)), atol=5e-5
    )
    assert torch.equal(out[:, [0, 2]], x[:, [0, 2]]) and not torch.equal(out[0, 1], x[0, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_uses_of_one_step_are_independent(family):
    """Sixteen requests with different clamps in one call equal sixteen single calls."""
    sae, x, around = random_sae(family), rows_of(40, "single", seed=9), around_of(40)
    host, g = host_of(sae), torch.Generator().manual_seed(4)
    uses = []
    for index in range(16):
        features = torch.randperm(F, generator=g)[:3].tolist()
        kinds = [("absolute", "additive", "multiply")[(index + i) % 3] for i in range(3)]
        clamps = {
            feature: (kind, float(i + 1), index % 2 == 0)
            for i, (feature, kind) in enumerate(zip(features, kinds))
        }
        uses.append((use_of(host, sae, clamps), [index, index + 20]))
    together = host.run(x, uses, around)
    for use, rows in uses:
        assert torch.allclose(together[rows], host.run(x, [(use, rows)], around)[rows], atol=2e-5)
    untouched = [16, 17, 18, 19, 36, 37, 38, 39]
    assert torch.equal(together[untouched], x[untouched])


@pytest.mark.parametrize("family", FAMILIES)
def test_several_uses_of_one_row_all_read_the_incoming_row(family):
    """For example a clamp of the global tier and one of a request: all apply to the features of the incoming row."""
    sae, x, around = random_sae(family), rows_of(5, "single"), around_of(5)
    host = host_of(sae)
    parts = [{7: CLAMPS[7]}, {3: CLAMPS[3]}, {8: CLAMPS[8], 11: CLAMPS[11]}]
    uses = [(use_of(host, sae, part), rows) for part, rows in zip(parts, ([0, 1, 2], [1, 2], [2]))]
    out = host.run(x, uses, around)
    for row, count in ((0, 1), (1, 2), (2, 3)):
        applied = {feature: clamp for part in parts[:count] for feature, clamp in part.items()}
        expected = expected_of(sae, x, [row], applied, "delta", around)
        np.testing.assert_allclose(out[row].numpy(), expected[row], atol=3e-5)
    assert torch.equal(out[3:], x[3:])


def test_clamps_that_only_add_encode_nothing():
    sae, x = random_sae("topk"), rows_of(4, "single")
    host = host_of(sae)
    object.__setattr__(host.weights, "encoder", None)  # any use of it would fail
    out = host.run(
        x,
        [(use_of(host, sae, {2: ("additive", 3.0, False), 9: ("additive", -1.0, False)}), [1])],
        around_of(4),
    )
    assert torch.allclose(out[1], x[1] + 3 * sae.decoder[2] - sae.decoder[9], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_host_stores_only_the_named_features(family):
    sae = random_sae(family, features=64)
    whole, few = host_of(sae), host_of(sae, features=[5, 60])
    assert few.weights.decoder.shape == (2, D)
    assert few.weights.encoder.shape[0] == (64 if family == "topk" else 2)
    clamps = {5: ("absolute", 1.0, False), 60: ("additive", 2.0, True)}
    x, around = rows_of(8, "single"), around_of(8)
    a, b = (h.run(x, [(use_of(h, sae, clamps), list(range(8)))], around) for h in (whole, few))
    assert torch.allclose(a, b, atol=1e-6)


def test_rows_are_rounded_once_to_the_dtype_of_the_site():
    sae, x = random_sae("relu"), rows_of(6, "single").bfloat16()
    host = host_of(sae)
    use = use_of(host, sae, CLAMPS, "drop")
    out = host.run(x, [(use, [0, 1, 2])], around_of(6))
    assert out.dtype == torch.bfloat16 and torch.equal(out[3:], x[3:])
    assert torch.equal(out[:3], plain(sae, x[:3].float(), use.row, "drop").bfloat16())


def test_padded_units():
    assert [padded_units(n) for n in (1, 3, 9, 16, 17, 129, 1000)] == [1, 4, 12, 16, 24, 192, 1024]
    assert all(n <= padded_units(n) <= max(1.6 * n, n + 1) for n in range(1, 3000))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_results_do_not_depend_on_tile_size(family, rows, monkeypatch):
    """Dense or sparse, one tile or many: reconstructions equal those of the plain twin."""
    sae, x = random_sae(family, features=300, width=24, seed=3), torch.randn(rows, 24)
    weights_on_device, expected = DeviceSae.of(sae, "cpu"), sae.reconstruct(x)
    for tile in (7, 64, 300, 8192):
        for share in (0, 8, 10**6):  # always gather, choose by the rule, always multiply
            monkeypatch.setattr(encode, "TILE", tile)
            monkeypatch.setattr(encode, "CHUNK", 16)
            monkeypatch.setattr(encode, "SPARSE_SHARE", share)
            assert torch.allclose(
                reconstruct(weights_on_device, x, encode_topk(weights_on_device, x)), expected, atol=1e-4
            )


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["delta", "keep", "drop"])
def test_no_tensor_of_rows_times_features_is_allocated(family, mode, monkeypatch):
    sae, x = (
        random_sae(family, features=2000, width=8, seed=3, **({"k": 4} if family == "topk" else {})),
        torch.randn(200, 8),
    )
    monkeypatch.setattr(encode, "TILE", 64)
    monkeypatch.setattr(encode, "CHUNK", 16)
    host = host_of_width(sae, 8)
    use = use_of(host, sae, CLAMPS, mode)
    with Largest() as seen:
        host.run(x, [(use, list(range(200)))], around_of(200))
    assert seen.numel <= 2000 * 8 < 200 * 2000 / 20  # no tensor is larger than the dictionary


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6), st.booleans())
@settings(max_examples=scaled(200, 40), deadline=None)
def test_tiled_top_k_equals_top_k(features, rows, k, seed, ties):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g).round() if ties else torch.randn(rows, 6, generator=g)
    sae = random_sae("relu", features, 6, seed % 1000)
    if ties:
        sae.encoder.round_()
        sae.encoder_bias.zero_()
    weights_on_device, z = DeviceSae.of(sae, "cpu"), sae.pre_activations(x)
    k, tile = min(k, features), encode.TILE
    try:
        encode.TILE = 5
        values, indices = top(weights_on_device, x, k)
    finally:
        encode.TILE = tile
    for row in range(rows):
        order = sorted(range(features), key=lambda i: (-float(z[row, i]), i))[:k]
        if ties:
            assert indices[row].tolist() == sorted(order)
        assert torch.allclose(values[row].sort().values, z[row, order].sort().values, atol=1e-5)


def test_t_sae_6_the_order_of_operations_cannot_be_swapped():
    """patch, add, delta, full, clamp: the result equals the explicit sequence; every swap of two gives another row."""
    from birkhoff.hooks.edit import ORDER, SiteEdit

    delta_sae, full_sae = random_sae("relu", seed=1), random_sae("jumprelu", seed=2)
    delta_host, full_host = host_of(delta_sae), host_of(full_sae, order=1)
    x, g = rows_of(3, "single"), torch.Generator().manual_seed(8)
    vectors = [torch.randn(D, generator=g) for _ in range(3)]
    unit = vectors[2] / vectors[2].norm()
    use = {
        "delta": use_of(delta_host, delta_sae, CLAMPS),
        "full": use_of(full_host, full_sae, CLAMPS, "drop"),
    }
    steps = {
        "patch": lambda r: r + 0.5 * (vectors[0] - r),
        "add": lambda r: r + 3 * vectors[1],
        "delta": lambda r: plain(delta_sae, r[None], use["delta"].row, "keep")[0],
        "full": lambda r: plain(full_sae, r[None], use["full"].row, "drop")[0],
        "clamp": lambda r: r + (min(max(float(r @ unit), 0.1), 0.2) - float(r @ unit)) * unit,
    }
    edits = [
        (SiteEdit("clamp", unit, low=0.1, high=0.2), [1]),
        (use["full"], [1]),
        (SiteEdit("add", vectors[1], 3.0), [1]),
        (use["delta"], [1]),
        (SiteEdit("patch", vectors[0], 0.5), [1]),
    ]
    out = apply(x, edits, around_of(3))

    def in_order(order):
        row = x[1]
        for op in order:
            row = steps[op](row)
        return row

    order = [op for op in ORDER if op in steps]  # the others do not occur here
    assert len(order) == len(steps)
    assert torch.allclose(out[1], in_order(order), atol=1e-4)
    assert abs(float(out[1] @ unit) - 0.2) < 1e-5 or abs(float(out[1] @ unit) - 0.1) < 1e-5
    assert torch.equal(out[[0, 2]], x[[0, 2]])
    for i in range(5):
        for j in range(i + 1, 5):
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert not torch.allclose(in_order(swapped), in_order(order), atol=1e-2), swapped


def test_delta_modules_run_in_the_order_in_which_they_were_attached():
    """The order is that of the modules, whatever the order of the requests in the batch."""
    first, second = random_sae("relu", seed=1), random_sae("relu", seed=2)
    hosts = [host_of(first, order=0), host_of(second, order=1)]
    uses = [use_of(host, sae, CLAMPS) for host, sae in zip(hosts, (first, second))]
    x, around = rows_of(2, "single"), around_of(2)
    expected = plain(second, plain(first, x, uses[0].row, "keep"), uses[1].row, "keep")
    assert not torch.allclose(
        plain(first, plain(second, x, uses[1].row, "keep"), uses[0].row, "keep"), expected, atol=0.01
    )
    for edits in ([(uses[0], [0, 1]), (uses[1], [0, 1])], [(uses[1], [0, 1]), (uses[0], [0, 1])]):
        assert torch.allclose(apply(x, edits, around), expected, atol=1e-4)


def test_values_may_be_multiples_of_x_max():
    levels = torch.linspace(0.5, 12, F)
    sae = random_sae("relu", x_max=levels, labels={4: "four"})
    clamps = [
        parse_clamp("four", {"x_max": 2.0}, "absolute", False, ""),
        parse_clamp(7, {"x_max": -0.5}, "additive", False, ""),
        parse_clamp("9", {"min": {"x_max": 0.1}, "max": {"x_max": 0.2}}, "bound", True, ""),
    ]
    row = resolve_clamps(clamps, sae, None)
    by_hand = {
        4: ("absolute", 2 * float(levels[4]), False),
        7: ("additive", -0.5 * float(levels[7]), False),
        9: ("bound", (0.1 * float(levels[9]), 0.2 * float(levels[9])), True),
    }
    host, x, around = host_of(sae), rows_of(6, "single"), around_of(6)
    out = host.run(x, [(SaeUse(host, row, "delta"), [0, 1, 2, 3, 4, 5])], around)
    np.testing.assert_allclose(
        out.numpy(), expected_of(sae, x, range(6), by_hand, "delta", around), atol=5e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["delta", "drop"])
def test_a_nan_row_does_not_affect_other_rows(family, mode):
    """A NaN in the row of one request stays NaN and does not affect other rows."""
    sae, x, around = random_sae(family), rows_of(6, "single"), around_of(6)
    host = host_of(sae)
    uses = [(use_of(host, sae, CLAMPS, mode), [row]) for row in range(5)]
    whole = host.run(x, uses, around)
    broken = x.clone()
    broken[2, 3] = float("nan")
    out = host.run(broken, uses, around)
    assert out[2].isnan().any()
    others = [0, 1, 3, 4, 5]
    assert torch.allclose(out[others], whole[others], atol=1e-5)
