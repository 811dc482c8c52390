"""Every analysis of the API with GPU kernels equals the one with plain kernels: passes without a cache, over one text
and over several. In Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff.analysis.sae_quality import loss_recovered, row_quality
from birkhoff.convert.synth import synth
from tests.interpreter import DEVICE
from tests.sizes import FULL

TEXT = [5, 80, 200, 17, 80, 31, 9, 120, 44, 3]  # longer than the window
OTHER = [5, 81, 200, 17, 80, 30, 9, 121, 44, 3]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The same checkpoint with plain kernels and with those of a GPU."""
    path = tmp_path_factory.mktemp("analyses") / "tiny"
    synth(path, "tiny", layers=3, tokenizer=False)
    options = {"device": DEVICE.type, "dtype": "float32", "max_requests": 2, "max_context": 256}
    with birkhoff.load(path, kernels="reference", **options) as plain:
        with birkhoff.load(path, kernels="triton", **options) as gpu:
            yield plain, gpu


def numbers(value) -> list[torch.Tensor]:
    """All numbers of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().double().cpu().flatten()]
    if isinstance(value, (int, float)):
        return [torch.tensor([value], dtype=torch.float64)]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in numbers(part)]
    if hasattr(value, "__dataclass_fields__"):
        return [each for name in value.__dataclass_fields__ for each in numbers(getattr(value, name))]
    return []


def all_depths(lens):
    return [lens.logits(depth, of) for depth in range(lens.depths) for of in lens.views]


def gradient(engine):
    with engine.grad(["mlp_out"]) as recorded:
        recorded.backward(engine.logits(TEXT)[-1, 20])
        return recorded["mlp_out", 1]


def quality(engine):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.nn.functional.normalize(
        torch.randn(24, engine.config.hidden_size, generator=generator), dim=1
    )
    sae = birkhoff.Sae(matrix, None, matrix, hook="mlp_out", layer=1)
    return row_quality(engine, sae, [TEXT])[0], loss_recovered(engine, sae, [TEXT])


ANALYSES = {
    "logits of one text": lambda engine: engine.logits(TEXT),
    "logits of several": lambda engine: engine.logits([TEXT, OTHER, TEXT[:1]]),
    "trace": lambda engine: [
        tensor for _, tensor in sorted(engine.trace(TEXT).items()) if tensor.is_floating_point()
    ],
    "lens": lambda engine: all_depths(engine.lens(TEXT[:4])),
    "attention": lambda engine: engine.attention(TEXT),
    "patch": lambda engine: engine.patch(TEXT, OTHER, "mlp_out", [1]).logits,
    "gradient": gradient,
    "attribution": lambda engine: engine.attribute(TEXT, 20),
    "logit attribution": lambda engine: engine.logit_attribution(TEXT),
    "dictionary": quality,
}


if FULL:
    ANALYSES["patch sweep"] = lambda engine: engine.patch_sweep(
        TEXT, OTHER, 20, "mlp_out", layers=[1], positions=[1, 5]
    )


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_with_gpu_kernels_equals_the_plain_one(engines, name):
    expected, actual = (torch.cat(numbers(ANALYSES[name](engine))) for engine in engines)
    assert len(actual) == len(expected) > 0
    torch.testing.assert_close(
        actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()), equal_nan=True
    )
