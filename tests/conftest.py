"""One hypothesis profile for the whole suite: examples follow from the test's own name, so a failure repeats.

Without a CUDA device Triton kernels run in Triton's interpreter, which has to be asked for before anybody imports it.
"""

import os

import torch
from hypothesis import settings

from tests.sizes import scaled

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("birkhoff", deadline=None, derandomize=True, max_examples=scaled(200, 30))
settings.load_profile("birkhoff")
