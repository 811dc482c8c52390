"""The operation that compiled and recorded graphs hold at every armed site, without an engine."""

from __future__ import annotations

import pytest
import torch

from birkhoff import Add
from birkhoff.vllm.armed_layers import arm_ordinary
from birkhoff.vllm.rank_requests import StepRows
from tests.vllm.conftest import HAS_VLLM
from tests.vllm.test_recorded import ALL, KEYS, ROWS, VECTORS, GraphRank
from tests.vllm.toy import Toy, embed

pytestmark = pytest.mark.vllm
if HAS_VLLM:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    from birkhoff.vllm.site_op import CONTEXT, in_graph, site_call


def context(rank, mode):
    layers = {CONTEXT: rank.requests}
    return override_forward_context(
        ForwardContext(
            no_compile_layers=layers,
            attn_metadata={},
            slot_mapping={},
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(ROWS),
        )
    )


def test_the_operation_declares_what_it_changes():
    import birkhoff.vllm.site_op  # noqa: F401  defines it

    torch.library.opcheck(torch.ops.birkhoff.site_.default, (torch.randn(3, 8), 1, 0))
    (x, *_) = torch.ops.birkhoff.site_.default._schema.arguments
    assert x.alias_info.is_write


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_a_compiled_model_calls_every_site(mode):
    """In one graph, without breaks: by what requests ask, and by the fixed operations that a CUDA graph records."""
    rank = GraphRank()
    rank.requests._in_graph = in_graph
    model = Toy()
    arm_ordinary(model.model, "LlamaForCausalLM", ALL, site_call(rank.requests))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = embed(range(ROWS))
    wanted = GraphRank(graphs=False)
    with context(rank, CUDAGraphMode[mode]):
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
        assert torch.allclose(compiled(x.clone()), Toy()(x.clone()), atol=1e-5)
    (graph,) = graphs
    operation = torch.ops.birkhoff.site_
    called = [node for node in graph.graph.nodes if node.target in (operation, operation.default)]
    assert len(called) == len(KEYS)
    for each in (rank, wanted):
        each.add("a", 2, [Add(VECTORS[0], "post_mlp", [1], scale=3.0)])
    drafted = wanted.requests.begin([step("a")], ROWS)
    expected = wanted.model(x.clone())
    wanted.requests.end_step(drafted)
    with context(rank, CUDAGraphMode[mode]):
        drafted = rank.requests.begin([step("a")], ROWS)
        output = compiled(x.clone())
        rank.requests.end_step(drafted)
    assert len(graphs) == 1, "nothing was compiled again"
    assert torch.allclose(output, expected, atol=1e-5)
    (_, rows), (_, also) = rank.finish("a", 3), wanted.finish("a", 3)
    assert set(rows) == set(also) == set(KEYS)
    for key, part in also.items():
        assert torch.allclose(rows[key].tensor, part.tensor, atol=1e-5), key
    assert not torch.allclose(output[0], Toy()(x.clone())[0], atol=1e-3)


def step(key):
    return StepRows(key, 0, 0, [0, 1], 2)
