"""Muon orthogonalises each matrix separately, AdamW matches its definition, schedules have the configured values."""

from __future__ import annotations

import pytest
import torch

from birkhoff.errors import OptionError, TensorMissing, TensorShape
from tests.training.tiny import randomise, tiny_config
from training.initial import hash_table, initialise
from training.optim import Optimiser, orthogonalise
from training.parameters import Store, group_of, parameters_of
from training.settings import NANO, Settings, moment


@pytest.mark.parametrize("shape", [(5, 16, 48), (3, 48, 16), (2, 32, 32)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    stack = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 50.0, 7.0, 0.1])[: shape[0], None, None]
    )
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert values.min() > 0.3 and values.max() < 1.3
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    overlap = (orthogonalise(stack) * (left @ right)).sum((1, 2)) / min(shape[1:])
    assert (overlap > 0.7).all()  # the correct rotation, not just any orthogonal matrix


def test_every_matrix_of_a_stack_is_orthogonalised_alone():
    stack = torch.randn(4, 16, 32)
    torch.testing.assert_close(orthogonalise(stack)[2:3], orthogonalise(stack[2:3]), atol=1e-5, rtol=1e-5)


def test_one_step_is_muon_for_matrices_and_adamw_for_the_rest():
    config = tiny_config()
    store, settings = Store(config), Settings(clip=1e9)
    before = randomise(store, 0)
    optimiser = Optimiser(store, settings)
    draw = torch.Generator().manual_seed(1)
    grads = {group: torch.randn(master.shape, generator=draw) for group, master in store.masters.items()}
    one = torch.tensor(1.0)
    first, second = 1 - settings.adam_first, 1 - settings.adam_second
    optimiser.update(grads, one, torch.tensor(first), torch.tensor(second))
    after = store.export()
    # The first AdamW step changes every element by the rate, against the sign of its gradient.
    rate, decay = settings.embedding_rate, settings.embedding_decay
    location = store.locations["embed.weight"]
    sign = grads["embedding"][location.start : location.stop].sign().reshape(before["embed.weight"].shape)
    expected = before["embed.weight"] * (1 - rate * decay) - rate * sign
    torch.testing.assert_close(after["embed.weight"], expected, atol=1e-6, rtol=1e-4)
    # mHC has its own rate and no decay; Muon steps have an RMS near 0.2 times the rate.
    moved = (after["hc_head_fn"] - before["hc_head_fn"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, settings.mhc_rate), atol=1e-6, rtol=1e-3)
    kept = before["layers.0.ffn.experts.w1"] * (1 - settings.muon_rate * settings.weight_decay)
    step = (after["layers.0.ffn.experts.w1"] - kept) / settings.muon_rate
    assert 0.1 < float(step.square().mean().sqrt()) < 0.3


def test_clipping_scales_all_gradients_and_reports_the_norm():
    store = Store(tiny_config())
    optimiser = Optimiser(store, Settings())
    grads = {group: torch.ones_like(master) for group, master in store.masters.items()}
    elements = sum(master.numel() for master in store.masters.values())
    norm = optimiser.update(grads, *torch.ones(3).unbind())
    assert float(norm) == pytest.approx(elements**0.5, rel=1e-4)
    assert float(optimiser.first["small"].max()) == pytest.approx(0.1 / float(norm), rel=1e-3)


def test_a_quadratic_is_solved():
    """Both rules converge to the minimum of a simple loss over all parameters."""
    store = Store(tiny_config())
    randomise(store, 0)
    settings = Settings(
        weight_decay=0.0,
        embedding_decay=0.0,
        muon_rate=2e-2,
        small_rate=2e-2,
        mhc_rate=2e-2,
        embedding_rate=2e-2,
    )
    optimiser, start = (
        Optimiser(store, settings),
        sum(float(m.square().sum()) for m in store.masters.values()),
    )
    for step in range(150):
        now = moment(settings, 200 + step, step / 150)
        corrections = torch.tensor([now.adam_first_correction, now.adam_second_correction])
        optimiser.update(
            {g: m.clone() for g, m in store.masters.items()}, torch.tensor(now.rate), *corrections
        )
    assert sum(float(m.square().sum()) for m in store.masters.values()) < 0.05 * start


def test_the_store_places_every_tensor_once_and_gives_it_back():
    config = tiny_config()
    store = Store(config)
    tensors = randomise(store, 5)
    other = Store(config)
    other.load(tensors)
    again = other.export()
    assert set(again) == set(tensors) and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert {group_of(p) for p in parameters_of(config)} == {"matrix", "embedding", "mhc", "small"}
    with pytest.raises(TensorMissing, match="embed"):
        other.load({name: tensor for name, tensor in tensors.items() if name != "embed.weight"})
    with pytest.raises(TensorShape, match=r"norm\.weight"):
        other.load(tensors | {"norm.weight": torch.zeros(3)})


def test_leaves_are_copies_and_gradients_arrive_in_one_piece():
    store = Store(tiny_config())
    randomise(store, 5)
    leaves = store.leaves(torch.float32)
    named = store.named(leaves)
    assert all(leaf.data_ptr() != store.masters[group].data_ptr() for group, leaf in leaves.items())
    (2.0 * named["layers.1.attn.wq_a.weight"].sum() + named["norm.weight"].sum()).backward()
    location = store.locations["layers.1.attn.wq_a.weight"]
    grad = leaves[location.group].grad
    assert float(grad.sum()) == pytest.approx(2.0 * named["layers.1.attn.wq_a.weight"].numel())
    assert (grad[location.start : location.stop] == 2).all()


def test_nano_is_the_planned_size():
    """33 M parameters with MTP, 19.3 M of them in routed experts."""
    parameters = parameters_of(NANO)
    total = sum(torch.Size(p.shape).numel() for p in parameters)
    experts = sum(torch.Size(p.shape).numel() for p in parameters if p.storage == "expert")
    assert 32.5e6 < total < 34e6 and 19e6 < experts < 22e6
    stored = {"expert": 4.25 / 8, "dense": 1.0, "bf16": 2.0, "f32": 4.0}
    assert sum(torch.Size(p.shape).numel() * stored[p.storage] for p in parameters) < 30.5e6
    assert all(p.shape[-1] % 128 == 0 and p.shape[-2] % 128 == 0 for p in parameters if p.storage == "dense")


def test_hash_tables_are_balanced_and_distinct():
    config = tiny_config(vocab_size=160)
    table = hash_table(config, torch.Generator().manual_seed(0))
    assert table.shape == (160, config.num_experts_per_tok)
    assert all(len(set(row)) == len(row) for row in table.tolist())
    assert (torch.bincount(table.flatten(), minlength=8) == table.numel() // 8).all()


def test_streams_start_apart():
    """Staggered bases: sub-layers favour different streams, and mixing starts near the identity."""
    config = tiny_config()
    store = Store(config)
    initialise(store, 0)
    tensors = store.export()
    favoured = [
        int(tensors[f"layers.{i}.hc_{part}_base"][:4].argmax()) for i in range(5) for part in ("attn", "ffn")
    ]
    assert favoured == [i % 4 for i in range(10)]
    assert torch.equal(tensors["layers.0.hc_attn_base"][8:].reshape(4, 4), 3 * torch.eye(4))
    initialise(store, 0, stagger=False)
    assert not store.export()["layers.0.hc_attn_base"][:8].any()


def test_the_schedule_warms_up_cools_down_and_switches():
    settings = Settings(warmup_steps=10)
    assert moment(settings, 0, 0.0).rate == pytest.approx(0.1) and moment(settings, 9, 0.0).rate == 1
    assert moment(settings, 500, 0.5).rate == pytest.approx(0.5) and moment(settings, 999, 1.0).rate == 0
    assert moment(settings, 0, 0.05).dense == 1 and moment(settings, 0, 0.1).dense == 0
    assert moment(settings, 0, 0.5).mtp_weight == 0.3 and moment(settings, 0, 0.7).mtp_weight == 0.1
    assert moment(settings, 299, 0.5).bias_rate == 5e-3 and moment(settings, 300, 0.5).bias_rate == 1e-3
    assert moment(settings, 0, 0.4).dropout == 0.1 and moment(settings, 0, 0.6).dropout == 0.15


def test_settings_are_read_strictly():
    settings = Settings.parse("muon_rate=1e-2, stagger=false,batch=4")
    assert settings.muon_rate == 0.01 and settings.stagger is False and settings.batch == 4
    for text, words in (
        ("muon=1", "unknown"),
        ("batch=x", "int"),
        ("stagger=1", "bool"),
        ("dropout=1.0", "dropout"),
        ("round_share=2", "0 to 1"),
        ("batch=0", "at least 1"),
    ):
        with pytest.raises(OptionError, match=words):
            Settings.parse(text)
