"""Hypothesis profile of the suite: examples are derived from the test name, so failures are reproducible. And the
command, run in the process of the tests.

Without a CUDA device Triton kernels run in Triton's interpreter, which must be enabled before Triton is imported.
"""

import gc
import os
import subprocess
import warnings

import pytest
import torch
from hypothesis import settings

from tests.sizes import scaled

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("birkhoff", deadline=None, derandomize=True, max_examples=scaled(200, 30))
settings.load_profile("birkhoff")

gc.disable()  # a million objects are made while tests are collected, and nearly all of them stay


def pytest_collection_finish():
    gc.freeze()  # later collections do not walk them
    gc.enable()


@pytest.fixture
def birkhoff_here(capfdbinary, monkeypatch):
    """Runs the `birkhoff` command in this process, which saves its imports: for tests of what a command computes.

    The arguments, the status and the output are those of `tests.cli.conftest.birkhoff`, which starts a process and
    tests what one has: signals, pipes, its environment and its end."""
    from birkhoff.cli.main import run

    for name in [name for name in os.environ if name.startswith("BIRKHOFF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> subprocess.CompletedProcess[bytes]:
        words = [str(word) for word in arguments]
        capfdbinary.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the libraries, as in the command
            status = run(words)
        return subprocess.CompletedProcess(words, status, *capfdbinary.readouterr())

    return call
