"""The inspector: correct for valid checkpoints, complete for broken ones, small in memory for large ones."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from birkhoff.convert.presets import preset
from birkhoff.errors import CheckpointError
from birkhoff.weights import inspect_checkpoint
from birkhoff.weights.inspect import MAX_PROBLEMS, cache_bytes, device_memory
from birkhoff.weights.layout import stored_tensors
from birkhoff.weights.released import model_tensors, released_config
from birkhoff.weights.safetensors import SafetensorsWriter
from tests.sizes import FULL
from tests.weights.files import all_tensors, edit, edit_config
from tests.weights.test_checkpoint import save_transformers, shard


def test_a_good_checkpoint(tiny_path):
    report = inspect_checkpoint(tiny_path)
    tensors = all_tensors(tiny_path)
    assert (report.dialect, report.tensors, report.problems, report.notices) == (
        "released",
        len(tensors),
        [],
        [],
    )
    assert report.file_bytes == sum(t.nbytes for t in tensors.values()) == sum(report.bytes_by_class.values())
    assert report.layers == {"swa": [0, 1], "csa": [2, 4], "hca": [3, 5]} and report.mtp_blocks == 1
    experts = sum(
        t.nbytes for name, t in tensors.items() if name.startswith("layers.") and ".experts." in name
    )
    assert report.bytes_by_class["experts"] == experts
    assert report.bytes_by_class["mtp"] == sum(
        t.nbytes for name, t in tensors.items() if name.startswith("mtp.")
    )
    assert report.bytes_by_class["vocabulary"] == 2 * 512 * 64 * 2 and "other" not in report.bytes_by_class
    shapes = [tensor.shape for tensor in model_tensors(preset("tiny")) if tensor.storage != "ids"]
    assert report.parameters == sum(math.prod(shape) for shape in shapes)
    raw = json.loads(report.to_json())
    assert raw["config"]["hidden_size"] == 64 and raw["weight_bytes"]["float32"] == 4 * report.parameters


def test_cache_cost_of_the_releases():
    assert cache_bytes(preset("flash"))[0] == 6880 and cache_bytes(preset("pro"))[0] == 9848
    window, csa, hca = 43 * 128 * 1024, 21 * 80 * 1024, 20 * 512 * 1024
    assert cache_bytes(preset("flash"))[1] == window + csa + hca


def test_what_fits_where(tiny_path):
    report = inspect_checkpoint(tiny_path)
    assert report.fits({"host": 10**12, "small": report.file_bytes, "none": 1}) == {
        "host": ["stored", "bfloat16", "float32"],
        "small": ["stored"],
        "none": [],
    }
    assert device_memory()["host"] > 10**8


def test_every_problem_is_listed(broken):
    """A missing, a truncated and an extra shard and a broken tensor give four problems."""
    edit_config(broken, swiglu_limit=2.0, odd_key=1)
    shard(broken, 0).unlink()
    os.truncate(shard(broken, 1), 1000)
    shutil.copy(shard(broken, 2), broken / "stray.safetensors")
    report = inspect_checkpoint(broken)
    text = "\n".join(problem["message"] for problem in report.problems)
    for finding in ("are missing", "cut short", "extra shard", "tensors that the config implies"):
        assert finding in text
    assert {problem["code"] for problem in report.problems} == {"weights", "weights-missing"}
    assert report.tensors > 0 and report.notices == [
        "config.json has the unknown key 'odd_key'; it was not used."
    ]


def test_wrong_and_extra_tensors_are_both_listed(broken):
    edit(
        broken,
        lambda t: t.update(
            {
                "norm.weight": torch.zeros(63),
                "embed.weight": torch.zeros(512, 64).int(),
                "stray": torch.zeros(1),
                "hc_head_base": t.pop("hc_head_base").double().int(),
            }
        ),
    )
    codes = [problem["code"] for problem in inspect_checkpoint(broken).problems]
    assert sorted(codes) == ["weights-dtype", "weights-dtype", "weights-extra", "weights-shape"]


def test_a_config_of_the_wrong_size_is_not_listed_thousands_of_times(broken):
    edit_config(broken, hidden_size=128)
    problems = inspect_checkpoint(broken).problems
    assert len(problems) == MAX_PROBLEMS + 1 and problems[-1]["message"].startswith("and ")


@pytest.mark.parametrize("model_type", ["deepseek_v41", "llama"])
def test_other_models_are_still_described(broken, model_type):
    edit_config(broken, model_type=model_type)
    report = inspect_checkpoint(broken)
    assert (
        report.problems[0]["code"] == "model-unsupported" and report.tensors == 585 and report.dialect is None
    )
    json.loads(report.to_json())


def test_a_transformers_directory(tmp_path):
    save_transformers(tmp_path, preset("tiny"))
    report = inspect_checkpoint(tmp_path)
    assert report.dialect == "transformers" and not report.problems and "other" not in report.bytes_by_class


def test_no_checkpoint_at_all_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(tmp_path / "none")


def hollow(path, like: str) -> int:
    """Write full-size release headers over sparse data; return the number of bytes described."""
    path.mkdir()
    config, shards, total = preset(like), {}, 0
    for tensor in model_tensors(config):
        part = (
            tensor.name.split(".experts.")[0]
            if ".experts." in tensor.name
            else ".".join(tensor.name.split(".")[:2])
        )
        for name, stored in stored_tensors(tensor):
            shards.setdefault(part, {})[name] = (stored.dtype, stored.shape)
    weight_map = {}
    for number, declared in enumerate(shards.values(), 1):
        file = path / f"model-{number:05}-of-{len(shards):05}.safetensors"
        writer = SafetensorsWriter(file, declared)
        total += sum(entry.nbytes for entry in writer._entries.values())
        writer._left.clear()  # the data stays sparse
        writer.close()
        weight_map |= dict.fromkeys(declared, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(released_config(config)))
    return total


MEASURE = """
import json, sys
import birkhoff.weights
def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024
before = resident("VmRSS:")
report = birkhoff.weights.inspect_checkpoint(sys.argv[1])
print(json.dumps({"added": resident("VmHWM:") - before, "tensors": report.tensors, "bytes": report.file_bytes,
                  "problems": report.problems, "active": report.parameters_active}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc to measure resident memory")
@pytest.mark.parametrize(("like", "tensors", "active"), [("flash", 69187, 13)] + FULL * [("pro", 145116, 49)])
def test_a_full_release_is_inspected_in_60_mb(tmp_path, like, tensors, active):
    total = hollow(tmp_path / "c", like)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "c")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(run.stdout)
    print(
        f"{like}: {measured['tensors']} tensors, {total / 1e9:.1f} GB described, {measured['added']:.1f} MB added"
    )
    assert measured["problems"] == [] and (measured["tensors"], measured["bytes"]) == (tensors, total)
    assert round(measured["active"] / 1e9) == active
    assert measured["added"] <= 60
