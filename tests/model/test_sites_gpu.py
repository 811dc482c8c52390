"""Every site of the GPU path against the plain path, on a GPU: a tiny model, and two layers at full width.

Prompts through the prefill kernels, then decode steps in recorded graphs with every site captured; buffers are NaN
before each step. `birkhoff bench sites` prints the same comparison.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from birkhoff.convert.presets import preset
from tests.models import variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)


def full_width():
    return replace(
        preset("flash", 4, False), num_hidden_layers=2, compress_ratios=(4, 128), num_hash_layers=1
    )


@pytest.mark.parametrize(
    "config, dtype, tolerance, lengths",
    [
        pytest.param(lambda: TINY, torch.float32, 1e-3, [300, 51, 127], id="tiny in float32"),
        pytest.param(
            full_width,
            torch.bfloat16,
            0.05,
            [2303, 127, 700, 5, 128, 129, 1000, 64],
            id="two layers at full width",
        ),
    ],
)
def test_every_site_equals_the_plain_path(config, dtype, tolerance, lengths):
    from birkhoff.bench.sites import compare_sites
    from birkhoff.bench.synthetic import random_on_device

    device = torch.device("cuda")
    model = random_on_device(config(), device, dtype=dtype, kernels="triton")
    rows = list(compare_sites(model, device, lengths, 3, tolerance, fast=None))
    failed = [row for row in rows if not row["passed"]]
    assert not failed, "\n".join(map(str, failed))


@torch.inference_mode()
def test_a_replayed_step_with_edits_equals_the_launched_one():
    """The third step of a pattern is replayed; its rows equal those of the first, launched without a graph."""
    from birkhoff.bench.synthetic import filled_state, random_on_device
    from birkhoff.decode.gpu import Decoder
    from birkhoff.engine.cuda_graphs import CudaGraphs
    from birkhoff.hooks.batch_tap import StepStaging, arm
    from birkhoff.hooks.edit import SiteEdit
    from birkhoff.hooks.plan import Plan, Span
    from tests.hooks.test_graph_tap import CaptureJob
    from tests.hooks.test_vector_table import Everywhere

    device, config = torch.device("cuda"), full_width()
    model = random_on_device(config, device, kernels="triton")
    graphs = CudaGraphs(Decoder(model, filled_state(config, 4, 512, device)), scratch_slot=3, max_context=768)
    width = config.hidden_size
    edits = (
        Everywhere({("mhc_streams_pre_mlp", 0): SiteEdit("patch", torch.randn(4 * width), 0.5)}),
        Everywhere(
            {
                ("mlp_in", 1): SiteEdit(
                    "clamp", torch.nn.functional.normalize(torch.randn(width), dim=0), low=0.1
                )
            }
        ),
    )
    result, staging = [], StepStaging(device)
    for _ in range(4):
        job = CaptureJob([("mlp_out", 1), ("mhc_streams_final", 1)])
        tap = arm(staging, [Span(Plan(jobs=(job,), edits=edits), 0, 512, [7], 4)], 1)
        logits, _ = graphs.step([7], [512], [0], tap, graphs.plan(tap))
        tap.deliver()
        result.append([logits, *(job.got[key][0] for key in job.keys)])
    assert [tapped.graph is not None for tapped in graphs._tapped.values()] == [True]
    for later in result[1:]:
        for first, other in zip(result[0], later):
            assert (first.float() - other.float()).abs().max() <= 0.02 * first.float().abs().max()
