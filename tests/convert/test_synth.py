"""Synthetic checkpoints: released layout, reproducible bytes, active mechanisms, small memory."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from birkhoff.convert.presets import preset
from birkhoff.convert.synth import RandomRows, synth
from birkhoff.errors import OptionError
from birkhoff.kernels import quant
from birkhoff.model.transformer import Transformer
from birkhoff.weights import expected_tensors, load_into, open_checkpoint
from birkhoff.weights.released import Packed
from tests.sizes import FULL


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "tiny"
    synth(path, "tiny", seed=1)
    checkpoint = open_checkpoint(path)
    model = Transformer(checkpoint.config)
    load_into(model.destinations(), checkpoint)
    return path, checkpoint, model


def test_the_layout_is_the_released_one(loaded):
    _, checkpoint, _ = loaded
    table = expected_tensors(preset("tiny"))
    assert {n: (r.shape, r.dtype) for n, r in checkpoint.items()} == {
        n: (s.shape, s.dtype) for n, s in table.items()
    }
    assert checkpoint.dialect == "released" and checkpoint.notices == []


def test_logits_have_a_healthy_spread_and_depend_on_the_context(loaded):
    _, _, model = loaded
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (3, 300), generator=generator)
    tokens[1, 1:], tokens[2, -1] = tokens[0, 1:], tokens[0, -1]
    with torch.no_grad():
        logits = model(tokens)
    spread = logits.std().item()
    print(f"logit spread of tiny: {spread:.2f}")
    assert 1.0 < spread < 2.0
    assert (logits[0, -1] - logits[2, -1]).std() > 0.3, "the same last token after another text"
    assert (logits[0, 5] - logits[1, 5]).abs().max() > 1e-3


def test_stream_mixers_are_neither_identity_nor_uniform(loaded):
    _, _, model = loaded
    from birkhoff.hooks import sites
    from birkhoff.hooks.tap import EagerTap

    seen: dict[int, torch.Tensor] = {}
    tap = EagerTap(
        lambda site, layer, x: seen.setdefault(layer, x) if site is sites.MHC_ATTN_RES_MIX else None
    )
    with torch.no_grad():
        model(torch.arange(64), tap)
    assert len(seen) == 6
    for mix in seen.values():
        diagonal = mix.diagonal(dim1=-2, dim2=-1).mean().item()
        assert 0.3 < diagonal < 0.8, "1 would be the identity, 0.25 uniform"
        assert mix.std(dim=0).mean() > 0.005, "tokens must be mixed differently"


def test_hash_tables_use_every_expert(loaded):
    _, checkpoint, _ = loaded
    table = checkpoint["layers.0.ffn.gate.tid2eid"].read()
    counts = table.flatten().bincount(minlength=8)
    assert counts.min() > 80 and (table[:, 0] != table[:, 1]).all()  # 1024 entries over 8 experts
    assert not torch.equal(table, checkpoint["layers.1.ffn.gate.tid2eid"].read())


@pytest.mark.parametrize(
    ("name", "unpack"),
    [
        ("layers.0.attn.wq_b.weight", quant.dequant_fp8),
        ("layers.0.ffn.experts.3.w1.weight", quant.dequant_fp4),
    ],
)
def test_drawn_codes_are_normal_with_the_right_spread(name, unpack):
    config = preset("flash", layers=1)
    rows = RandomRows(config, seed=0)
    packed = rows(name, 0, 1024)
    assert isinstance(packed, Packed)
    values = unpack(packed.codes, packed.scale)
    wanted = rows.tensors[name].shape[1] ** -0.5
    ratio, kurtosis = (values.std() / wanted).item(), (values**4).mean().item() / values.var().item() ** 2
    print(f"{name}: spread {ratio:.3f} of what was asked, kurtosis {kurtosis:.2f}")
    assert abs(ratio - 1) < 0.05 and abs(values.mean() / wanted) < 0.02
    assert 3.0 < kurtosis < 4.8, "a normal variate times one of two scales has 4.08, and FP4 clips its tail"
    assert len(packed.scale.unique()) == 2, "scales differ from block to block, so that a misplaced one shows"
    assert values.unique().numel() >= 19, "every code occurs (FP4 at two scales has 19 values)"


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        synth(tmp_path / name, "tiny", layers=3, seed=seed, shard_bytes=200_000)
    files = sorted(os.listdir(tmp_path / "a"))
    assert files == sorted(os.listdir(tmp_path / "b")) and "tokenizer.json" in files
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert any((tmp_path / "a" / f).read_bytes() != (tmp_path / "c" / f).read_bytes() for f in files)


def test_every_size_and_option_opens(tmp_path):
    synth(tmp_path / "nano", "nano", layers=3, mtp=False)
    checkpoint = open_checkpoint(tmp_path / "nano")
    assert not checkpoint.has_mtp and checkpoint.config.compress_ratios == (0, 0, 4)
    synth(tmp_path / "base", "tiny", dense="bf16", experts="fp8", tokenizer=False)
    assert open_checkpoint(tmp_path / "base").has_mtp and not (tmp_path / "base" / "tokenizer.json").exists()


def test_the_tokenizer_fits_the_vocabulary(loaded):
    from tokenizers import Tokenizer

    path, checkpoint, _ = loaded
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.config.vocab_size
    ids = tokenizer.encode("héllo, 世界").ids
    assert max(ids) < 512 and tokenizer.decode(ids) == "héllo, 世界"


def test_fewer_experts(tmp_path):
    config = synth(tmp_path / "few", "tiny", layers=2, mtp=False, routed_experts=3)
    checkpoint = open_checkpoint(tmp_path / "few")
    assert checkpoint.config.n_routed_experts == config.n_routed_experts == 3
    experts = {name.split(".")[4] for name in checkpoint if ".ffn.experts." in name}
    assert experts == {"0", "1", "2"}
    assert int(checkpoint["layers.0.ffn.gate.tid2eid"].read().max()) == 2


def test_options_are_checked_before_anything_is_written(tmp_path):
    refused = {
        "seed": (-1, "seed is -1"),
        "like": ("x", "like is 'x'"),
        "dense": ("q8", "dense is 'q8'"),
        "layers": (99, "expected 1 to 6"),
        "routed_experts": (1, "routed_experts is 1, expected 2, which a token uses, to 8"),
        "experts": ("int8", "experts is 'int8'"),
    }
    for option, (value, reason) in refused.items():
        with pytest.raises(OptionError, match=reason):
            synth(tmp_path / "c", **{option: value})
        assert not (tmp_path / "c").exists()


MEASURE = """
import json, sys, time
from birkhoff.convert.synth import synth
def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
synth(sys.argv[1] + "/warm", "tiny")
before, began = resident("VmRSS:"), time.perf_counter()
synth(sys.argv[1] + "/c", sys.argv[2], layers=int(sys.argv[3]), mtp=False)
print(json.dumps({"peak": resident("VmHWM:") - before, "seconds": time.perf_counter() - began}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc to measure resident memory")
def test_writing_takes_far_less_memory_than_the_checkpoint(tmp_path):
    """Full size: 9.3 GB written with under 400 MB; else nano's 27 MB with under 100 MB."""
    like, layers, limit = ("flash", 2, 400e6) if FULL else ("nano", 8, 100e6)
    if FULL and shutil.disk_usage(tmp_path).free < 15e9:
        pytest.skip("needs 15 GB of free disk")
    command = [sys.executable, "-c", MEASURE, str(tmp_path), like, str(layers)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    print(
        f"{like} {layers} layers: {size / 1e9:.2f} GB in {measured['seconds']:.1f} s, "
        f"{measured['peak'] / 1e6:.0f} MB added"
    )
    shutil.rmtree(tmp_path / "c")
    assert measured["peak"] < limit
