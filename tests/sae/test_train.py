"""Training: gradients against a dense twin, exact resumption, and recovery of planted features."""

from __future__ import annotations

import pytest
import torch

from birkhoff.errors import OptionError, SaeError
from birkhoff.sae.evaluate import Measure, quality
from birkhoff.sae.train import Trainer, TrainOptions
from tests.sizes import scaled

WIDTH = 32


def planted(
    rows: int, directions: torch.Tensor, seed: int, active: int = 2, noise: float = 0.02
) -> torch.Tensor:
    """Rows that are sums of `active` directions with strengths 1 to 2, plus noise and an offset of 3."""
    generator = torch.Generator().manual_seed(seed)
    count = len(directions)
    on = torch.rand(rows, count, generator=generator).argsort(1) < active
    strength = 1 + torch.rand(rows, count, generator=generator)
    return (
        3.0
        + (on * strength) @ directions
        + noise * torch.randn(rows, directions.shape[1], generator=generator)
    )


@pytest.fixture(scope="module")
def directions() -> torch.Tensor:
    drawn = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))
    return drawn / drawn.norm(dim=1, keepdim=True)


def reference_gradients(trainer: Trainer, rows: torch.Tensor, auxiliary: bool) -> dict[str, torch.Tensor]:
    """Gradients of the same losses, computed densely by autograd."""
    w = {name: tensor.clone().requires_grad_() for name, tensor in trainer.weights.items()}
    x = (rows - trainer.centre) * trainer.factor
    z = x @ w["encoder"].T + w["encoder_bias"]
    k, dead = trainer.options.k, trainer.dead
    threshold = (
        z.topk(k, 1).values[:, -1:]
        if trainer.options.kind == "topk"
        else z.flatten().topk(k * len(z)).values[-1]
    )
    residual = x - torch.where((z >= threshold) & (z > 0), z, 0.0) @ w["decoder"] - w["decoder_bias"]
    loss = residual.pow(2).mean()
    if auxiliary:
        ranked = z.masked_fill(~dead, float("-inf"))
        auxiliary_threshold = ranked.topk(min(int(dead.sum()), x.shape[1] // 2), 1).values[:, -1:]
        auxiliary_features = torch.where((ranked >= auxiliary_threshold) & dead & (z > 0), z, 0.0)
        target = residual.detach()
        loss = (
            loss
            + trainer.options.aux_weight
            * (target - auxiliary_features @ w["decoder"]).pow(2).sum()
            / target.pow(2).sum()
        )
    return dict(zip(w, torch.autograd.grad(loss, list(w.values()))))


@pytest.mark.parametrize("kind", ["batchtopk", "topk"])
@pytest.mark.parametrize("dead", [0, 9, 40])
def test_gradients_equal_those_of_the_dense_twin(directions, kind, dead):
    rows = planted(50, directions, 2)
    trainer = Trainer(TrainOptions(64, k=4, kind=kind), rows)
    trainer.silent_rows[:dead] = trainer.options.dead_after
    x = (rows - trainer.centre) * trainer.factor
    z = trainer._pre_activations(x)
    ours, residual = trainer._reconstruction(x, z, trainer._kept(z))
    if dead:
        trainer._add_auxiliary(x, z, residual, ours)
    theirs = reference_gradients(trainer, rows, bool(dead))
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize("kind", ["batchtopk", "topk"])
def test_planted_directions_are_recovered(directions, kind):
    steps = scaled(3000, 1000)
    trainer = Trainer(TrainOptions(32, k=2, kind=kind, steps=steps, rate=5e-3), planted(4096, directions, 0))
    for step in range(steps):
        trainer.step(planted(256, directions, 10 + step))
    held_out = [planted(1024, directions, 5)]
    sae = trainer.finish(held_out, hook="mlp_out", layer=1)
    result = quality(sae, held_out)
    best = (directions @ (sae.decoder / sae.decoder.norm(dim=1, keepdim=True)).T).amax(1)
    assert result.explained_variance > 0.9 and (best > 0.9).float().mean() >= 0.9
    assert torch.allclose(sae.decoder.norm(dim=1), torch.ones(32), atol=1e-5)
    assert sae.activation.name == ("jumprelu" if kind == "batchtopk" else "topk")
    assert abs(result.l0 - 2) < 0.3
    assert (sae.x_max >= sae.encode(held_out[0]).amax(0) - 1e-4).all()


def test_resumed_training_equals_uninterrupted_training(directions):
    options = TrainOptions(40, k=3, steps=30, dead_after=500)
    batches = [planted(64, directions, seed) for seed in range(30)]
    whole = Trainer(options, batches[0])
    stopped = Trainer(options, batches[0])
    for batch in batches:
        whole.step(batch)
    for batch in batches[:13]:
        stopped.step(batch)
    state = {name: tensor.clone() for name, tensor in stopped.state().items()}
    again = Trainer.restored(options, state)
    for batch in batches[13:]:
        last = again.step(batch)
    assert last.step == 30 and again.rows_seen == whole.rows_seen
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, again.state()[name]), name
    with pytest.raises(SaeError, match="of 40 features"):
        Trainer.restored(TrainOptions(41), state)


def test_the_auxiliary_loss_revives_dead_features(directions):
    """The auxiliary loss on the residual revives dead features; without it they stay dead."""
    dead_counts = []
    for weight in (0.0, 1.0):
        options = TrainOptions(32, k=2, steps=200, rate=5e-3, dead_after=2000, aux_weight=weight)
        trainer = Trainer(options, planted(2048, directions, 0))
        trainer.weights["encoder"][8:] *= 0.02  # most of them are never among the k largest
        for step in range(200):
            last = trainer.step(planted(128, directions, 100 + step))
        dead_counts.append(last.dead)
    assert dead_counts[1] < dead_counts[0] / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": 0}, "features is 0"),
        ({"k": 9}, "only 8 features"),
        ({"kind": "relu"}, "batchtopk, topk"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"steps": True}, "steps is True"),
    ],
)
def test_invalid_options_are_refused(change, words):
    with pytest.raises(OptionError, match=words):
        TrainOptions(**{"features": 8, "k": 2, **change})


def test_invalid_rows_are_refused(directions):
    good = planted(16, directions, 0)
    trainer = Trainer(TrainOptions(8, k=2), good)
    bad = good.clone()
    bad[3, 1] = float("inf")
    for rows, words in (
        (bad, "not finite"),
        (good[:, :5], "have 5 numbers, the dictionary 32"),
        (good[0], "rows are"),
    ):
        with pytest.raises(SaeError, match=words):
            trainer.step(rows)
    with pytest.raises(SaeError, match="the same"):
        Trainer(TrainOptions(8, k=2), torch.ones(4, 3))
    with pytest.raises(SaeError, match="no rows"):
        trainer.finish([])


def test_quality_equals_its_definition(directions):
    rows = planted(300, directions, 4)
    trainer = Trainer(TrainOptions(40, k=3, steps=20, rate=1e-2), rows)
    for _ in range(20):
        trainer.step(rows)
    sae = trainer.finish([rows])
    measure = Measure(sae)
    features = torch.cat([measure.add(part) for part in rows.split(64)])
    result, exact = measure.quality(), rows.double()
    residual = (exact - sae.reconstruct(rows).double()).pow(2).sum()
    assert result.explained_variance == pytest.approx(
        1 - (residual / (exact - exact.mean(0)).pow(2).sum()).item(), abs=1e-6
    )
    assert result.l0 == pytest.approx((features != 0).float().sum(1).mean().item())
    assert result.dead_share == pytest.approx((features == 0).all(0).float().mean().item())
    assert torch.allclose(measure.density, (features != 0).float().mean(0)) and result.rows == 300
