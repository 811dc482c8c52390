"""How experts travel between host and device memory, and which memory they lie in.

A `HostCopy` copies at once. A `CopyStream` copies on a stream of its own while the current stream computes: a ticket
stands for all copies begun before it; the host may ask whether it has arrived, or let the current stream wait for it.
`fence` is the other direction: copies begun later wait for what the current stream was given until now, so a run that a
kernel may still be reading is not written over. Host memory that kernels read is page-locked and mapped by the driver.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from birkhoff.errors import CapacityError

_PAGE = 4096
_FOR_EVERY_DEVICE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostCopy:
    """Copies that are done when `copy` returns: for a CPU, where both kinds of memory are the same."""

    def host_runs(self, count: int, nbytes: int) -> torch.Tensor:
        """`count` runs of bytes in host memory that the device can read."""
        return torch.empty(count, nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def ticket(self) -> Any:
        """Stands for every copy begun so far."""
        return None

    def arrived(self, ticket: Any) -> bool:
        return True

    def wait(self, ticket: Any) -> None:
        """Return when the copies have arrived."""

    def join(self, ticket: Any) -> None:
        """Whatever the current stream is given from now on happens after the copies."""

    def fence(self) -> None:
        """Copies from now on happen after whatever the current stream was given."""

    def fetch(self, numbers: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the host of what the current stream makes of `numbers`, and the ticket by which it is there."""
        return numbers.clone(), None


class CopyStream(HostCopy):
    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def host_runs(self, count: int, nbytes: int) -> torch.Tensor:
        """Registered with the driver rather than allocated by it: PyTorch's own page-locked memory comes in powers of
        two, which for a hundred gigabytes is one too many."""
        room = -(-count * nbytes // _PAGE) * _PAGE
        memory = torch.empty(room + _PAGE, dtype=torch.uint8)
        first = -memory.data_ptr() % _PAGE  # whole pages of our own: a page cannot be locked twice
        runs = memory[first : first + count * nbytes].view(count, nbytes)
        if runs.numel():
            library = torch.cuda.cudart()
            pointer = runs.data_ptr()
            size = room
            status = int(library.cudaHostRegister(pointer, size, _FOR_EVERY_DEVICE_AND_MAPPED))
            if status:
                raise CapacityError(
                    f"the driver refused to lock {size / 2**30:.2f} GiB of host memory for {count} experts (CUDA error "
                    f"{status}). Free host memory, raise the limit of locked memory (ulimit -l), or give the device a "
                    "larger share of the experts."
                )
            weakref.finalize(runs, library.cudaHostUnregister, pointer)
        return runs

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def ticket(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def arrived(self, ticket: torch.cuda.Event) -> bool:
        return ticket.query()

    def wait(self, ticket: torch.cuda.Event) -> None:
        ticket.synchronize()

    def join(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def fence(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def fetch(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return host, event


def copy_stream_for(device: torch.device) -> HostCopy:
    return CopyStream(device) if device.type == "cuda" else HostCopy()
