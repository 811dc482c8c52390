"""Training: gradients against a dense twin, exact resumption, and recovery of planted features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from birkhoff.errors import OptionError, SaeError
from birkhoff.sae.evaluate import Measure, quality
from birkhoff.sae.train import KINDS, Trainer, TrainOptions, default_rate
from tests.sizes import scaled

WIDTH = 32
ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]


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


def reference_losses(trainer: Trainer, rows: torch.Tensor) -> torch.Tensor:
    """The loss of a batch as its definition says, dense and differentiable. `trainer.weights` need gradients."""
    w, options, dead = trainer.weights, trainer.options, trainer.dead
    x = (rows - trainer.input.centre) * trainer.input.scale
    z = x @ w["encoder"].T + w["encoder_bias"]
    k, d, count = options.k, x.shape[1], len(x)
    loss, read = torch.zeros(()), z
    if options.kind == "topk":
        f = torch.where((z >= z.topk(k, 1).values[:, -1:]) & (z > 0), z, 0.0)
    elif options.kind in ("batchtopk", "matryoshka"):
        f = torch.where((z >= z.flatten().topk(k * count).values[-1]) & (z > 0), z, 0.0)
    elif options.kind == "jumprelu":
        threshold = w["log_threshold"].exp()
        on = Step.apply(z.detach() - threshold, trainer.architecture.bandwidth)
        f = torch.where(z > threshold, z, 0.0) + (on - on.detach()) * threshold.detach()
        loss = loss + options.sparsity_weight * d * (on.sum() / count / k - 1) ** 2
    else:
        inner = read = x @ w["encoder"].T  # a dead feature has a shut gate, and is read without it
        f = torch.where(z > 0, (inner * w["log_scale"].exp() + w["magnitude_bias"]).clamp(min=0), 0.0)
        gate = z.clamp(min=0)
        loss = loss + 2 * options.sparsity_weight * trainer.scalars["penalty"] * gate.sum() / count
        alone = gate @ w["decoder"].detach() + w["decoder_bias"].detach()
        loss = loss + (x - alone).pow(2).sum() / count
    prefixes = trainer.architecture.prefixes
    for prefix in prefixes:
        residual = x - f[:, :prefix] @ w["decoder"][:prefix] - w["decoder_bias"]
        loss = loss + residual.pow(2).sum() / count / len(prefixes)
    if dead.any():
        ranked = read.masked_fill(~dead, float("-inf"))
        least = ranked.topk(min(int(dead.sum()), d // 2), 1).values[:, -1:]
        strongest = torch.where((ranked >= least) & dead & (read > 0), read, 0.0)
        target = residual.detach()
        error = (target - strongest @ w["decoder"]).pow(2).sum() / target.pow(2).sum()
        loss = loss + options.aux_weight * d * error
    return loss


class Step(torch.autograd.Function):
    """1 above zero; its gradient is that of a ramp of the given width around zero."""

    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return (x > 0).float()

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return slope * (x.abs() < ctx.width / 2) / ctx.width, None


def reference_step(trainer: Trainer, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights after one step: gradients by autograd, PyTorch's Adam, unit decoder rows."""
    w = {name: tensor.clone().requires_grad_() for name, tensor in trainer.weights.items()}
    weights, trainer.weights = trainer.weights, w
    try:
        gradients = torch.autograd.grad(reference_losses(trainer, rows), list(w.values()))
    finally:
        trainer.weights = weights
    for tensor, gradient in zip(w.values(), gradients):
        tensor.grad = gradient
    with torch.no_grad():
        decoder = w["decoder"]
        decoder.grad -= (decoder.grad * decoder).sum(1, keepdim=True) * decoder
    torch.optim.Adam(w.values(), lr=trainer.options.rate_at(0, rows.shape[1])).step()
    with torch.no_grad():
        decoder /= decoder.norm(dim=1, keepdim=True)
    return {name: tensor.detach() for name, tensor in w.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", [0, 9, 40])
def test_a_step_equals_that_of_the_dense_twin(directions, kind, dead, device):
    """Adam's first step is the sign of the gradient almost everywhere, so the moments are compared too."""
    rows = planted(50, directions, 2).to(device)
    trainer = Trainer(TrainOptions(64, k=4, kind=kind, steps=10, warmup=0.1), rows, device=device)
    trainer.silent_rows[:dead] = trainer.options.dead_after
    perturb(trainer)
    theirs = reference_step(trainer, rows)
    trainer.step(rows)
    for name, tensor in theirs.items():
        assert torch.allclose(trainer.weights[name], tensor, atol=2e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_dense_twin(directions, kind):
    rows = planted(50, directions, 2)
    trainer = Trainer(TrainOptions(64, k=4, kind=kind), rows)
    trainer.silent_rows[:9] = trainer.options.dead_after
    perturb(trainer)
    w = {name: tensor.clone().requires_grad_() for name, tensor in trainer.weights.items()}
    weights, trainer.weights = trainer.weights, w
    gradients = dict(zip(w, torch.autograd.grad(reference_losses(trainer, rows), list(w.values()))))
    trainer.weights = weights
    decoder = weights["decoder"]
    gradients["decoder"] -= (gradients["decoder"] * decoder).sum(1, keepdim=True) * decoder
    trainer.step(rows)
    for name, gradient in gradients.items():
        ours = trainer._first[name] * 10  # the first moment after one step is a tenth of the gradient
        assert torch.allclose(ours, gradient, atol=1e-4 * gradient.abs().max().item()), name


def perturb(trainer: Trainer) -> None:
    """Make parameters that start out equal different, so that exchanged ones are noticed."""
    generator, device = torch.Generator().manual_seed(9), trainer.device
    for tensor in trainer.weights.values():
        if tensor.ndim == 1:
            tensor += 0.1 * torch.randn(len(tensor), generator=generator).to(device)
    encoder = trainer.weights["encoder"]
    encoder += 0.05 * torch.randn(encoder.shape, generator=generator).to(device)


EXPORTED = {
    "batchtopk": "jumprelu",
    "matryoshka": "jumprelu",
    "jumprelu": "jumprelu",
    "topk": "topk",
    "gated": "gated",
}


@pytest.mark.parametrize("kind", KINDS)
def test_planted_directions_are_recovered(directions, kind):
    steps = scaled(3000, 600)
    options = TrainOptions(32, k=2, kind=kind, steps=steps, rate=5e-3)
    trainer = Trainer(options, planted(4096, directions, 0))
    for step in range(steps):
        trainer.step(planted(256, directions, 10 + step))
    held_out = [planted(1024, directions, 5)]
    sae = trainer.finish(held_out, hook="mlp_out", layer=1)
    result = quality(sae, held_out)
    best = (directions @ (sae.decoder / sae.decoder.norm(dim=1, keepdim=True)).T).amax(1)
    assert result.explained_variance > 0.9 and (best > 0.9).float().mean() >= (
        0.8 if kind == "matryoshka" else 0.9
    )
    assert torch.allclose(sae.decoder.norm(dim=1), torch.ones(32), atol=1e-5)
    assert sae.activation.name == EXPORTED[kind]
    assert abs(result.l0 - 2) < 0.3
    assert (sae.x_max >= sae.encode(held_out[0]).amax(0) - 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_direction_is_learnt_again(directions, kind):
    """Dead features are trained although no row chooses them; in a gated dictionary, although no gate opens."""
    options = TrainOptions(32, k=2, kind=kind, steps=1200, rate=5e-3, dead_after=5_000)
    trainer = Trainer(options, planted(4096, directions, 0))
    for step in range(1200):
        trainer.step(planted(256, directions, 10 + step))
        if step == 400:
            lose(trainer, directions[5])
            assert (directions[5] @ trainer.weights["decoder"].T).max() < 0.9
    assert (directions @ trainer.weights["decoder"].T).amax(1)[5] > 0.9


def lose(trainer: Trainer, direction: torch.Tensor) -> None:
    """Turn all features near a direction away from it, so that no row chooses them."""
    weights = trainer.weights
    near = (weights["decoder"] @ direction > 0.5).nonzero().squeeze(1)
    assert len(near)
    for name in ("encoder", "decoder"):
        weights[name][near] *= -1
    weights["encoder_bias"][near] -= 1.0
    trainer._round()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_resumed_training_equals_uninterrupted_training(directions, kind, products, device):
    options = TrainOptions(
        40, k=3, kind=kind, steps=16, dead_after=60, rate=0.02, products=products, accumulate=3
    )
    batches = [planted(64, directions, seed) for seed in range(16)]
    whole = Trainer(options, batches[0], device=device)
    stopped = Trainer(options, batches[0], device=device)
    for batch in batches:
        whole.step(batch)
    for batch in batches[:9]:
        stopped.step(batch)
    state = load(save(stopped.state()))
    again = Trainer.restored(options, state, device)
    assert again.weights["encoder"].device.type == device
    for batch in batches[9:]:
        last = again.step(batch)
    assert last.step == 16 and again.rows_seen == whole.rows_seen
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, again.state()[name]), name
    with pytest.raises(SaeError, match="of 40 features"):
        Trainer.restored(replace(options, features=41), state)
    other = "gated" if kind != "gated" else "jumprelu"
    with pytest.raises(SaeError, match="another kind"):
        Trainer.restored(replace(options, kind=other), state)


@pytest.mark.parametrize("kind", ["topk", "gated"])
def test_a_batch_in_parts_gives_the_step_of_the_whole_batch(directions, kind):
    """The features of a row do not depend on other rows in these kinds, so only the order of sums differs."""
    rows = planted(66, directions, 3)
    steps = []
    for accumulate in (1, 4):
        trainer = Trainer(TrainOptions(48, k=3, kind=kind, accumulate=accumulate, aux_weight=0.0), rows)
        report = trainer.step(rows)
        steps.append((trainer, report))
    (whole, first), (parts, second) = steps
    assert first.explained == pytest.approx(second.explained, abs=1e-5) and first.l0 == second.l0
    for name, tensor in whole._first.items():
        assert torch.allclose(tensor, parts._first[name], atol=1e-6 * tensor.abs().max().item()), name


def test_bfloat16_products_train_as_well(directions):
    explained = []
    for products in ("float32", "bfloat16"):
        options = TrainOptions(32, k=2, steps=200, rate=5e-3, products=products)
        trainer = Trainer(options, planted(2048, directions, 0))
        for step in range(200):
            last = trainer.step(planted(128, directions, 50 + step))
        explained.append(last.explained)
        assert trainer.weights["encoder"].dtype == torch.float32
    assert explained[1] > explained[0] - 0.02


@pytest.mark.parametrize("kind", ["batchtopk", "gated"])
def test_a_transcoder_learns_rows_from_other_rows(directions, kind):
    """Targets are another rotation of the same planted features, of another width and scale; parts are scaled by
    themselves."""
    others = torch.randn(24, 20, generator=torch.Generator().manual_seed(8))
    others *= 7 / others.norm(dim=1, keepdim=True)
    options = TrainOptions(32, k=2, kind=kind, steps=400, rate=5e-3)

    def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = planted(count, torch.cat([directions, others], 1), seed)
        return both[:, :WIDTH], both[:, WIDTH:]

    trainer = Trainer(options, *draw(2048, 0), parts=[20, 12], target_parts=[15, 5])
    for step in range(400):
        trainer.step(*draw(256, 10 + step))
    x, y = draw(1024, 5)
    code = trainer.architecture.choose(
        trainer._pre_activations(trainer.input(x)), trainer.weights, dict(trainer.scalars)
    )
    residuals, _ = trainer._residuals(trainer.output(y), code, code.values)
    target = trainer.output(y)
    assert 1 - residuals.pow(2).sum() / (target - target.mean(0)).pow(2).sum() > 0.85
    with pytest.raises(SaeError, match="rows and targets come together"):
        trainer.step(x)
    with pytest.raises(SaeError, match="3 targets for 1024 rows"):
        trainer.step(x, y[:3])
    with pytest.raises(SaeError, match="together 30 numbers"):
        Trainer(options, x, y, parts=[20, 10])


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
        ({"kind": "relu"}, "batchtopk, topk, jumprelu, gated, matryoshka"),
        ({"products": "float16"}, "float32 or bfloat16"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"sparsity": 1.0}, "sparsity is for kinds with a penalty"),
        ({"kind": "gated", "sparsity": -1.0}, "sparsity is -1"),
        ({"prefixes": (2, 8)}, "prefixes are for kind matryoshka"),
        ({"kind": "matryoshka", "prefixes": (4, 2, 8)}, "ascending"),
        ({"kind": "matryoshka", "prefixes": (2, 4)}, "end with 8"),
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


def test_the_default_rate_falls_with_width_and_features():
    assert default_rate(256, 512) == default_rate(4096, 1024) == 2e-3
    assert default_rate(65_536, 16_384) == pytest.approx(1.25e-4)


def test_wide_rows_do_not_diverge_at_the_default_rate():
    """With 2e-3, which suits narrow rows, a step explains less and less of them."""
    generator = torch.Generator().manual_seed(0)
    atoms = torch.nn.functional.normalize(torch.randn(256, 16_384, generator=generator), dim=1)

    def explained(rate: float | None) -> float:
        draw = torch.Generator().manual_seed(1)
        batches = [torch.randn(64, 256, generator=draw).relu() ** 3 @ atoms for _ in range(12)]
        trainer = Trainer(TrainOptions(512, k=8, kind="topk", steps=12, rate=rate), batches[0])
        return [trainer.step(rows).explained for rows in batches][-1]

    assert explained(2e-3) < 0.7 < explained(None)
