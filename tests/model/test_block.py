"""Off means absent: with `NoTap` a layer traces to the very operators of a layer whose text has no taps.

The layer without taps is made from its own text: every `tap.see(...)` line is struck out, `tap(site, x)` becomes
`x` and `tap.part(site, x)` becomes `x, x`. It is run with None for a tap, so a line that was missed cannot hide.
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

LENGTH = 140  # one HCA entry, and more CSA entries than are chosen


def calls_tap(node: ast.AST, method: str | None) -> bool:
    """Is this `tap(...)`, or `tap.method(...)`?"""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if method is None:
        return isinstance(called, ast.Name) and called.id == "tap"
    return isinstance(called, ast.Attribute) and called.attr == method and ast.unparse(called.value) == "tap"


class StrikeOut(ast.NodeTransformer):
    def visit_Expr(self, node):
        return None if calls_tap(node.value, "see") else self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if calls_tap(node, None):
            return node.args[1]
        if calls_tap(node, "part"):
            return ast.Tuple([node.args[1], copy.deepcopy(node.args[1])], ast.Load())
        return node


def without_taps(module: nn.Module) -> tuple[nn.Module, int]:
    """A copy whose every `forward` that takes a tap has lost its lines about it, and how many forwards that were."""
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
    """Every operator of a trace with what it takes, in order; nothing is simplified away."""
    batch = Batch.whole(
        random_tokens(TINY, LENGTH, 6)
    )  # a new one each time: it keeps what layers have in common
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
def test_without_a_tap_a_layer_is_the_layer_without_taps(layer, tiny, streams):
    bare, changed = without_taps(tiny.layers[layer])
    assert changed >= 3  # the layer, its experts, their gate
    off = operators(tiny.layers[layer], NoTap(), tiny.rope, streams)
    assert len(off) > 200
    assert off == operators(bare, None, tiny.rope, streams)


def test_a_tap_that_edits_does_show_in_the_trace(tiny, streams):
    """So that the equality above is known to be able to fail."""
    tap = EagerTap(edit=lambda site, layer, x: x + 1.0)
    tapped = operators(tiny.layers[0], tap, tiny.rope, streams)
    assert len(tapped) == len(operators(tiny.layers[0], NoTap(), tiny.rope, streams)) + 6
