"""Count what a forward pass would launch on a GPU, in Triton's interpreter on the CPU.

A launch is a call of a Triton kernel, or a PyTorch operation that computes or copies something: views, allocations and
operations of the kernels' own interpreter do not count. Products that the interpreter path makes of several PyTorch
operations where a GPU has one library call count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

interpreter = pytest.importorskip("triton.runtime.interpreter")

FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "unsafe_view", "_unsafe_view", "view", "_reshape_alias", "unfold",
}  # fmt: skip


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The launches of the block by name; Triton kernels begin with `_`."""
    counts: Counter[str] = Counter()
    inside = False
    execute = interpreter.GridExecutor.__call__

    def launch(self, *arguments, **options):
        nonlocal inside
        counts[self.fn.__name__] += 1
        inside = True
        try:
            return execute(self, *arguments, **options)
        finally:
            inside = False

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            name = function.overloadpacket.__name__
            if not inside and name not in FREE:
                counts[name] += 1
            return function(*arguments, **(options or {}))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    with Operations():
        yield counts
