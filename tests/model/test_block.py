"""With `NoTap`, a layer traces to the same operators as a layer whose source has no taps.

The layer without taps is made from the source: every `tap.see(...)` line is removed, `tap(site, x)` becomes `x` and
`tap.part(site, x)` becomes `x, x`, `tap.route(site, ids, weights, ...)` becomes `ids, weights` and `tap.ragged` False.
It is run with None as the tap, so a line that was missed raises.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
import types

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from tests.models import TINY, random_model, random_tokens

LENGTH = 140  # one HCA entry, and more CSA entries than are selected


def calls_tap(node: ast.AST, method: str | None) -> bool:
    """Whether a node is `tap(...)` or `tap.method(...)`."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if method is None:
        return isinstance(called, ast.Name) and called.id == "tap"
    return isinstance(called, ast.Attribute) and called.attr == method and ast.unparse(called.value) == "tap"


NO_TAP = ("tap.ragged", "tap.streams_only")  # what a layer without taps does not ask


class StrikeOut(ast.NodeTransformer):
    def visit_Expr(self, node):
        return None if calls_tap(node.value, "see") else self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if calls_tap(node, None):
            return node.args[1]
        if calls_tap(node, "part"):
            return ast.Tuple([node.args[1], copy.deepcopy(node.args[1])], ast.Load())
        if calls_tap(node, "route"):
            return ast.Tuple(node.args[1:3], ast.Load())
        return node

    def visit_Attribute(self, node):
        return ast.Constant(False) if ast.unparse(node) in NO_TAP else self.generic_visit(node)


def without_taps(module: nn.Module) -> tuple[nn.Module, int]:
    """A copy of a module without tap calls in any `forward`, and the number of forwards that changed."""
    bare, changed = copy.deepcopy(module), 0
    for part in bare.modules():
        original = type(part).forward
        if "tap" not in inspect.signature(original).parameters:
            continue
        tree = StrikeOut().visit(ast.parse(textwrap.dedent(inspect.getsource(original))))
        namespace = dict(vars(sys.modules[original.__module__]))
        exec(compile(ast.fix_missing_locations(tree), original.__module__, "exec"), namespace)
        part.forward = types.MethodType(namespace["forward"], part)
        changed += 1
    return bare, changed


def operators(block, tap, rope, streams):
    """Every operator of a trace with its arguments, in order, unsimplified."""
    batch = Batch.whole(
        random_tokens(TINY, LENGTH, 6)
    )  # a new one each time: it caches values that layers share
    phases = rope.step(batch.positions)
    with torch.no_grad():
        graph = make_fx(lambda x: block(x, batch, phases, Fresh(), tap))(streams).graph
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


@pytest.fixture(scope="module")
def tiny():
    return random_model(seed=6)


@pytest.fixture(scope="module")
def streams():
    return torch.randn(LENGTH, TINY.hc_mult, TINY.hidden_size, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("layer", [0, 2, 3])  # sliding and hash-routed, CSA and HCA and score-routed
def test_with_no_tap_a_layer_traces_to_the_layer_without_taps(layer, tiny, streams):
    bare, changed = without_taps(tiny.layers[layer])
    assert changed >= 3  # the layer, its experts, their router
    off = operators(tiny.layers[layer], NoTap(), tiny.rope, streams)
    assert len(off) > 200
    assert off == operators(bare, None, tiny.rope, streams)


def test_a_tap_that_edits_changes_the_trace(tiny, streams):
    """Shows that the equality above can fail."""
    edited = ("mhc_streams_pre_attn", "pre_attn", "post_attn", "mhc_streams_pre_mlp", "mlp_in", "mlp_out")
    tap = EagerTap(edit=lambda site, layer, x: x + 1.0 if site.name in edited else x)
    added = [
        sum(target == "aten.add.Tensor" and args.endswith(", 1.0)") for _, target, args, _ in found)
        for found in (operators(tiny.layers[0], each, tiny.rope, streams) for each in (tap, NoTap()))
    ]
    assert added[0] == added[1] + len(edited)
