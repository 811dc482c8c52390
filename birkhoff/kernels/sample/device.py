"""Launches the CUDA sampling kernel: one host-to-device copy, one launch and one device-to-host copy per batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from birkhoff.kernels.cuda.compile import Module, find_nvrtc

SOURCE = Path(__file__).parent.parent / "cuda" / "sample.cu"
CLUSTER = 8
THREADS = 512
MAX_VOCAB = CLUSTER * THREADS * 32  # each thread keeps 32 logits in registers
MAX_LOGPROBS = 20
BUFFERS = 2  # samples whose results have not been read
TOKEN, PEAK, LOGPROB, TOP_IDS, TOP_LOGPROBS = 0, 1, 2, 4, 4 + MAX_LOGPROBS
COLUMNS = 4 + 2 * MAX_LOGPROBS

ROW_PARAMS = np.dtype(
    [
        ("inv_temperature", "f8"),
        ("top_p", "f8"),
        ("min_log_weight", "f8"),
        ("repetition", "f8"),
        ("presence", "f8"),
        ("frequency", "f8"),
        ("key_low", "u4"),
        ("key_high", "u4"),
        ("top_k", "i4"),
        ("greedy", "i4"),
        ("logprobs", "i4"),
        ("num_bias", "i4"),
        ("num_banned", "i4"),
        ("pad", "i4"),
        ("seen", "u8"),
        ("counts", "u8"),
        ("allowed", "u8"),
        ("bias_ids", "u8"),
        ("biases", "u8"),
        ("banned_ids", "u8"),
    ]
)
"""One row's parameters as `struct RowParams` of sample.cu lays them out; addresses are 0 where a tensor is absent."""


class DeviceSampler:
    """Samples rows of logits on one CUDA device of compute capability 9.0 or newer."""

    def __init__(self, device: torch.device):
        nvrtc = find_nvrtc()
        assert nvrtc is not None, "checked by `supported`"
        self._module = Module(nvrtc, SOURCE, device)
        self._device = device
        self._buffers = [_Buffers(8, device) for _ in range(BUFFERS)]

    @staticmethod
    def supported(device: torch.device, vocab_size: int) -> bool:
        """Whether the kernel runs on `device` for this vocabulary: clusters need Hopper, registers bound the size."""
        return (
            device.type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability(device) >= (9, 0)
            and vocab_size <= MAX_VOCAB
            and find_nvrtc() is not None
        )

    def launch(self, logits: torch.Tensor, params: np.ndarray) -> DeviceSample:
        """Start sampling `logits` [n, vocab] float32, rows contiguous, with `params` [n] of ROW_PARAMS.

        At most `BUFFERS` samples may be unread at a time."""
        count, vocab_size = logits.shape
        assert logits.dtype is torch.float32 and logits.stride(1) == 1 and len(params) == count
        buffers = self._buffers = self._buffers[1:] + self._buffers[:1]
        if buffers[0].capacity < count:
            buffers[0] = _Buffers(1 << (count - 1).bit_length(), self._device)
        used = buffers[0]
        used.host_params[:count] = torch.from_numpy(params.view(np.uint8).reshape(count, -1))
        used.params[:count].copy_(used.host_params[:count], non_blocking=True)
        self._module.launch(
            "sample_rows",
            (CLUSTER * count, 1),
            THREADS,
            logits,
            logits.stride(0),
            used.params,
            used.out,
            vocab_size,
            pdl=False,
        )
        used.host_out[:count].copy_(used.out[:count], non_blocking=True)
        used.done.record(torch.cuda.current_stream(self._device))
        return DeviceSample(used, count)

    def upload(self, params: np.ndarray) -> torch.Tensor:
        """`params` [n] of ROW_PARAMS on the device, [n, bytes], without waiting."""
        host = torch.empty(len(params), ROW_PARAMS.itemsize, dtype=torch.uint8, pin_memory=True)
        host.copy_(torch.from_numpy(params.view(np.uint8).reshape(len(params), -1)))
        return host.to(self._device, non_blocking=True)

    def launch_uploaded(self, logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """As `launch` with uploaded `params`, in memory of its own: [n, COLUMNS] float64 on the device."""
        count, vocab_size = logits.shape
        assert logits.dtype is torch.float32 and logits.stride(1) == 1 and len(params) == count
        out = torch.empty(count, COLUMNS, dtype=torch.float64, device=self._device)
        self._module.launch(
            "sample_rows",
            (CLUSTER * count, 1),
            THREADS,
            logits,
            logits.stride(0),
            params,
            out,
            vocab_size,
            pdl=False,
        )
        return out


class _Buffers:
    """Parameters and results of one launch, on the device and pinned on the host."""

    def __init__(self, capacity: int, device: torch.device):
        size = capacity, ROW_PARAMS.itemsize
        self.capacity = capacity
        self.host_params = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.params = torch.empty(size, dtype=torch.uint8, device=device)
        self.out = torch.empty(capacity, COLUMNS, dtype=torch.float64, device=device)
        self.host_out = torch.empty(capacity, COLUMNS, dtype=torch.float64, pin_memory=True)
        self.done = torch.cuda.Event()


class DeviceSample:
    """A launched sample; `tokens` [n] float64 are the sampled ids on the device."""

    def __init__(self, buffers: _Buffers, count: int):
        self._buffers = buffers
        self._count = count
        self.tokens = buffers.out[:count, TOKEN]

    def read(self) -> np.ndarray:
        """Wait for the device. [n, COLUMNS] float64: the token, the largest adjusted logit (NaN or infinite marks an
        unusable row), the token's log-probability, then ids and log-probabilities of the best raw logits."""
        self._buffers.done.synchronize()
        return self._buffers.host_out[: self._count].numpy()
