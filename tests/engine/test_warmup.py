"""After the warm-up nothing is compiled: a real model uses only argument types that were compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from birkhoff.kernels import jit

pytestmark = pytest.mark.skipif(not jit.AVAILABLE, reason="no compiler for the CPU twins")

# Runs in a separate process: other tests of this process call the kernels with argument types that no model uses.
SCRIPT = """
import json, pkgutil, importlib, sys
import birkhoff.kernels as kernels
from birkhoff.engine.warmup import compile_kernels

def known():
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "py_func"):
                found[f"{value.py_func.__module__}.{value.py_func.__name__}"] = sorted(map(str, value.signatures))
    return found

compile_kernels()
before = known()
import birkhoff
from birkhoff.convert.synth import synth
synth(sys.argv[1], "tiny", seed=3)
with birkhoff.load(sys.argv[1], max_requests=20, max_context=700, cache_bytes=2**26) as engine:
    engine.generate([[5] * 300, [6] * 3, [7] * 130], max_tokens=12, ignore_eos=True)
    engine.generate([[5 + i] * (1 + 7 * i) for i in range(20)], max_tokens=6, ignore_eos=True)
    engine.generate([5] * 126, max_tokens=6, ignore_eos=True, logprobs=2)
print(json.dumps([before, known()]))
"""


def test_a_model_compiles_nothing_after_the_warm_up(tmp_path):
    root = Path(__file__).parents[2]
    settings = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        env=settings,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(before) >= 10 and any(before.values())
    late = {name: [s for s in after[name] if s not in before[name]] for name in after}
    assert not {name: types for name, types in late.items() if types}
