"""Record the operations that PyTorch dispatches, to count launches and copies without a GPU."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    "alias",
    "as_strided",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "_unsafe_view",
    "_reshape_alias",
}


class Issued(TorchDispatchMode):
    """Names of all operations but views, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return op(*args, **(kwargs or {}))
