"""Copies of experts between host and device memory, and the host memory they are kept in.

A `HostCopy` copies synchronously. A `CopyStream` copies on its own CUDA stream while the current stream computes. An
event stands for all copies begun before it was recorded: the host may query or synchronize on it, or make the current
stream wait for it. `wait_current_stream` orders the other direction: later copies wait for the work already given to
the current stream, so a slot that a kernel may still read is not overwritten. Host memory that kernels read is
page-locked and mapped by the driver.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from birkhoff.errors import CapacityError

_PAGE_BYTES = 4096
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostCopy:
    """Synchronous copies, for a CPU: host and device memory are the same, and events are None."""

    def host_slots(self, count: int, nbytes: int) -> torch.Tensor:
        """Host memory that the device can read: [count, nbytes] uint8."""
        return torch.empty(count, nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy."""
        target.copy_(source)

    def record_event(self) -> Any:
        """An event for every copy begun so far."""
        return None

    def is_complete(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        """Block the host until the copies before `event` are complete."""

    def wait_event(self, event: Any) -> None:
        """Make later work of the current stream wait for the copies before `event`."""

    def wait_current_stream(self) -> None:
        """Make later copies wait for the work already given to the current stream."""

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A host copy of `tensor` in the order of the current stream, and the event after which it is valid."""
        return tensor.clone(), None


class CopyStream(HostCopy):
    """Asynchronous copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def host_slots(self, count: int, nbytes: int) -> torch.Tensor:
        """Page-locked memory, registered with the driver instead of allocated by PyTorch, which rounds pinned
        allocations up to a power of two: too much for a hundred gigabytes."""
        num_bytes = -(-count * nbytes // _PAGE_BYTES) * _PAGE_BYTES
        memory = torch.empty(num_bytes + _PAGE_BYTES, dtype=torch.uint8)
        first = -memory.data_ptr() % _PAGE_BYTES  # whole pages of our own: a page cannot be locked twice
        slots = memory[first : first + count * nbytes].view(count, nbytes)
        if slots.numel():
            library = torch.cuda.cudart()
            pointer = slots.data_ptr()
            status = int(library.cudaHostRegister(pointer, num_bytes, _PORTABLE_AND_MAPPED))
            if status:
                raise CapacityError(
                    f"the driver refused to lock {num_bytes / 2**30:.2f} GiB of host memory for {count} experts "
                    f"(CUDA error {status}). Free host memory, raise the limit of locked memory (ulimit -l), or give "
                    "the device a larger share of the experts."
                )
            weakref.finalize(slots, library.cudaHostUnregister, pointer)
        return slots

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def is_complete(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def wait_event(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def wait_current_stream(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return host, event


def copy_stream_for(device: torch.device) -> HostCopy:
    return CopyStream(device) if device.type == "cuda" else HostCopy()
