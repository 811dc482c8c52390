"""Tests of the backend vllm. Modules named `test_with_*` start vLLM, which `make test-vllm` installs; elsewhere they
are skipped, and say so. With BIRKHOFF_VLLM=1 a missing vLLM is an error."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
REQUIRED = os.environ.get("BIRKHOFF_VLLM") == "1"
# Started first, so that no process of two waits at the end for the other.
LONGEST = ("with_ranks", "with_serve", "with_compile", "with_scheduling", "with_families", "with_v4")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
if HAS_VLLM:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items):
    if REQUIRED:
        order = {f"test_{name}.py": index for index, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if item.get_closest_marker("vllm") is None or HAS_VLLM:
            continue
        assert not REQUIRED, "BIRKHOFF_VLLM=1 and the package vllm is not installed"
        item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
