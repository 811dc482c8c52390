"""Peak memory of a conversion does not grow with the checkpoint. Measured in a separate process."""

import json
import os
import subprocess
import sys

import pytest

from birkhoff.convert.synth import RandomRows, synth
from birkhoff.weights import write_released
from tests.sizes import scaled
from tests.weights.test_memory_size import config_of

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to measure memory"
)

MEASURE = """
import json, sys
from birkhoff.convert.convert import convert

def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

warm, path, out = sys.argv[1:4]
convert(warm, out + "/warm.gguf", workers=2)  # libraries and thread pools are part of the baseline
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = resident("VmRSS:")
done = convert(path, out + "/m.gguf", workers=2)
print(json.dumps({"peak": resident("VmHWM:") - before, "all": resident("VmHWM:"), "bytes": done.bytes}))
"""


def test_the_peak_is_a_few_strips(tmp_path):
    synth(tmp_path / "warm", "tiny")
    config = config_of(scaled(1000, 150), 17 / 32)
    write_released(tmp_path / "c", config, RandomRows(config, 0))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), str(tmp_path / "c"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    print(
        f"{measured['bytes'] / 1e6:.0f} MB written, peak {measured['peak'] / 1e6:.0f} MB above the baseline, "
        f"{measured['all'] / 1e6:.0f} MB in all"
    )
    assert measured["bytes"] > 100e6 and measured["peak"] < 100e6 and measured["all"] < 1e9
