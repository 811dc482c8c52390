"""A job stores the rows of every hook as its resolved capture states."""

from __future__ import annotations

import pytest
import torch

from birkhoff.capture.sinks.job import CaptureJob, MemorySink
from birkhoff.capture.spec.request import Capture
from birkhoff.hooks.plan import SiteRows
from tests.capture.requests import V4, L, M

PROMPT = [5, 6, 7]


def rows_of(hook, seed=0):
    shape, dtype = V4[hook].logical_shape, getattr(torch, V4[hook].dtype)
    return torch.randn((len(PROMPT), *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(capture, hook, matrix=None):
    """The stored rows of one chunk, and their declared form."""
    projections = {} if matrix is None else {"p": tuple(matrix.shape)}
    resolved = capture.resolve(V4, L, PROMPT, 4, projections=projections)
    job = CaptureJob(resolved, MemorySink(resolved), matrix)
    offsets = job.offsets(0, PROMPT, len(PROMPT))
    job.deliver(SiteRows(hook, 1, rows_of(hook)[offsets], (0, 1, 2), tuple(PROMPT)))
    job.close("length", len(PROMPT))
    assert job.error is None and job.missing == []
    return job.rows()[hook, 1].tensor, resolved.rows[hook]


@pytest.mark.parametrize("hook", [hook for hook in V4 if not V4[hook].once and V4[hook].ragged is None])
def test_rows_of_every_hook_have_the_stored_shape_and_dtype(hook):
    for fields in ({}, {"dtype": "fp16"}, {"reduce": "mean"}, {"reduce": "last"}):
        tensor, stored = run(Capture({hook: [1]}, **fields), hook)
        assert tuple(tensor.shape[1:]) == stored.shape and str(tensor.dtype) == f"torch.{stored.dtype}"


@pytest.mark.parametrize("hook", ["mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_ffn_pre_mix"])
def test_streams_are_cut_also_where_a_row_is_one_number_per_stream(hook):
    tensor, stored = run(Capture({hook: [1]}, streams=[1, 3]), hook)
    assert torch.equal(tensor, rows_of(hook)[:, [1, 3]]) and tensor.shape[1:] == stored.shape


def test_hooks_without_a_stream_axis_are_left_whole():
    both = Capture({"mhc_attn_res_mix": [1], "mhc_streams_pre_attn": [1]}, streams=[0])
    assert torch.equal(run(both, "mhc_attn_res_mix")[0], rows_of("mhc_attn_res_mix"))


def test_a_projection_to_as_many_columns_as_there_are_streams():
    matrix = torch.randn(2 * V4["pre_attn"].width, M, generator=torch.Generator().manual_seed(1))
    tensor, _ = run(
        Capture({"mhc_streams_pre_attn": [1]}, streams=[1, 3], project="p"), "mhc_streams_pre_attn", matrix
    )
    assert torch.equal(tensor, rows_of("mhc_streams_pre_attn")[:, [1, 3]].float().flatten(1) @ matrix)
