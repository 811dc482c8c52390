"""Hypothesis profile of the suite: examples are derived from the test name, so failures are reproducible.

Without a CUDA device Triton kernels run in Triton's interpreter, which must be enabled before Triton is imported.
"""

import os

import torch
from hypothesis import settings

from tests.sizes import scaled

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("birkhoff", deadline=None, derandomize=True, max_examples=scaled(200, 30))
settings.load_profile("birkhoff")
