"""Chunks: the same bytes from torch and from NumPy, and errors that name the problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.errors import CaptureWriteError
from tests.capture.sample_chunks import SHAPES, bits, chunk, same_bits

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("hook", SHAPES)
def test_torch_rows_and_numpy_rows_are_the_same_bytes(hook):
    plain = chunk("a", hook, 0, 3, 5)
    raw = torch.from_numpy(plain.rows.view(np.uint8).copy())
    tensor = raw.view(TORCH[plain.dtype]).reshape(5, -1)
    other = Chunk(**{**vars(plain), "rows": tensor})
    other.check()
    assert bytes(other.data()) == bytes(plain.data()) == bits("a", hook, 0, 3, 5).tobytes()
    assert other.nbytes == plain.nbytes == len(plain.data()) and other.num_rows == 5
    assert other.array().ctypes.data == tensor.data_ptr(), "contiguous rows are not copied"
    strided = Chunk(
        **{
            **vars(plain),
            "rows": torch.stack([tensor.view(torch.uint8), tensor.view(torch.uint8)], 1)[:, 0].view(
                TORCH[plain.dtype]
            ),
        }
    )
    assert bytes(strided.data()) == bytes(plain.data())


def test_scales_may_be_tensors_and_phases_bytes():
    plain = chunk("a", "mlp_in", 0, 0, 3)
    other = Chunk(**{**vars(plain), "scale": torch.from_numpy(plain.scale).reshape(3, 1), "phases": b"ppd"})
    other.check()
    assert same_bits(other.scales(), plain.scales()) and other.letters() == "ppd"


def test_a_chunk_may_have_no_rows():
    empty = chunk("a", "post_attn", 0, 0, 0)
    empty.check()
    assert bytes(empty.data()) == b"" and empty.nbytes == 0


WRONG = {
    "dtype": ({"dtype": "float64"}, "dtype is 'float64', expected one of bfloat16"),
    "flat rows": ({"rows": np.zeros((3, 2, 4), np.uint16)}, "Flatten each row"),
    "one row": ({"rows": np.zeros(8, np.uint16)}, "Flatten each row"),
    "row shape": ({"row_shape": (3, 3)}, "row_shape"),
    "held as": ({"rows": np.zeros((3, 8), np.float32)}, "rows are float32, expected bfloat16 or uint16"),
    "tensor held as": ({"rows": torch.zeros(3, 8)}, "rows are float32"),
    "positions": ({"positions": [1]}, "1 positions for 3 rows"),
    "token ids": ({"token_ids": range(4)}, "4 token_ids for 3 rows"),
    "phases": ({"phases": "pd"}, "2 phases for 3 rows"),
    "letters": ({"phases": "ppx"}, "expected letters"),
    "scale": ({"dtype": "fp8_e4m3", "rows": np.zeros((3, 8), np.uint8)}, "0 scale for 3 rows"),
    "infinite scale": (
        {"dtype": "fp8_e4m3", "rows": np.zeros((3, 8), np.uint8), "scale": np.array([1, np.inf, 1])},
        "not finite",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unreadable_chunks_are_refused(name):
    change, words = WRONG[name]
    with pytest.raises(CaptureWriteError, match=words) as caught:
        Chunk(**{**vars(chunk("a", "post_attn", 7, 0, 3)), **change}).check()
    assert "'post_attn'[7] of request 'a'" in str(caught.value)
