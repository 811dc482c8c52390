"""The MTP block is compared site by site, and mistakes in it are located and named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from birkhoff.cli.verbs import app
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.errors import DataError, OptionError
from birkhoff.model.transformer import Transformer
from birkhoff.validate.faults import TEXTS
from birkhoff.validate.goldens import read_goldens, save_goldens
from birkhoff.validate.mtp_faults import mtp_faults
from birkhoff.validate.oracle import build_mtp_oracle, build_oracle, run_oracle, run_oracle_model
from birkhoff.validate.report import lines, to_html
from birkhoff.validate.runs import MTP, random_tokens
from birkhoff.validate.validate import validate
from birkhoff.weights.checkpoint import open_checkpoint
from tests.models import TINY
from tests.validate.broken import broken_mtp_run
from tests.weights.files import edit

LENGTH = 40
VARIANTS = [(fault.name, variant) for variant, fault in mtp_faults(Transformer(TINY))]


@pytest.fixture(scope="module")
def tiny_mtp(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / "tiny"
    synth(path, "tiny", seed=12)
    return path


@pytest.fixture(scope="module")
def oracle(tiny_mtp):
    """The oracle of the trunk, and its run."""
    model = build_oracle(open_checkpoint(tiny_mtp))
    return model, run_oracle_model(model, random_tokens(512, LENGTH))


def test_transformers_layers_compute_the_same_block(tiny_mtp):
    result = validate(tiny_mtp, oracle="transformers", length=60)
    assert result.ok and result.mtp is not None and result.mtp.rows == 59
    assert len(result.mtp.sites) > 10 and max(row.rel_rmse for row in result.mtp.sites) < 1e-5
    assert result.mtp.logits.argmax == 1.0 and result.mtp.logits.rel_rmse < 1e-5
    assert {row.site for row in result.mtp.sites} >= {"mhc_streams_pre_attn", "mlp_out", "final_hidden"}


def test_every_known_mistake_has_a_broken_port():
    assert {name for name, _ in VARIANTS} == {name for name in TEXTS if name.startswith("mtp-")}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_broken_port_is_located_and_named(name, variant, tiny_mtp, oracle, tmp_path):
    model, trunk = oracle
    mtp = broken_mtp_run(name, variant, build_mtp_oracle(open_checkpoint(tiny_mtp)), model, trunk)
    save_goldens(replace(trunk, mtp=mtp), tmp_path / "goldens")
    result = validate(tiny_mtp, goldens=tmp_path / "goldens")
    text = "\n".join(lines(result))
    assert not result.ok and result.trunk_ok, text
    assert [(found.name, found.variant) for found in result.explanations] == [(name, variant)], text
    assert result.explanations[0].left < 0.01 and TEXTS[name] in text
    only_logits = variant in ("norm",)
    assert (result.diverging is None) == only_logits
    if not only_logits:
        where = "final_hidden" if name == "mtp-head-shared" else "mhc_streams_pre_attn"
        assert (result.diverging.site, result.diverging.layer) == (where, MTP)
        assert result.divergence.last_agreeing is None or result.divergence.last_agreeing.startswith("mtp.")


def test_the_path_of_the_input_that_differs_is_said(tiny_mtp, oracle, tmp_path):
    model, trunk = oracle
    for name, variant, words in (
        ("mtp-shift", "the token itself", "the same in every stream: look at the next token's embedding"),
        ("mtp-norm-order", "no hnorm", "in every stream by itself: look at the trunk's streams"),
    ):
        mtp = broken_mtp_run(name, variant, build_mtp_oracle(open_checkpoint(tiny_mtp)), model, trunk)
        save_goldens(replace(trunk, mtp=mtp), tmp_path / name)
        result = validate(tiny_mtp, goldens=tmp_path / name, explanations=False)
        assert (
            words in result.divergence.about
            and "mtp.mhc_streams_pre_attn (MTP block, sliding" in lines(result)[1]
        )


def swapped(first: str, second: str):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"mtp.0.{first}.")]:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def nibbles(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.startswith("mtp.0.ffn.experts.") and name.endswith("weight"):
            codes = tensors[name].view(torch.uint8)
            tensors[name] = ((codes << 4) | (codes >> 4)).view(torch.int8)


def louder(tensors: dict[str, torch.Tensor]) -> None:
    scale = tensors["mtp.0.attn.wo_b.scale"]
    tensors["mtp.0.attn.wo_b.scale"] = (scale.view(torch.uint8) + 1).view(scale.dtype)


@pytest.mark.parametrize(
    ("change", "name", "site"),
    [
        (swapped("e_proj", "h_proj"), "mtp-projections-swapped", "mhc_streams_pre_attn"),
        (swapped("enorm", "hnorm"), "mtp-norm-order", "mhc_streams_pre_attn"),
        (nibbles, "nibble-order", "mlp_out"),
        (louder, None, "post_attn"),
    ],
)
def test_a_broken_file_is_located_and_named_on_the_command_line(change, name, site, tiny_mtp, tmp_path):
    broken = edit(Path(shutil.copytree(tiny_mtp, tmp_path / "broken")), change)
    command = ["validate", str(broken), str(tiny_mtp), "--length", str(LENGTH), "--json"]
    run = CliRunner().invoke(app, command)
    report = json.loads(run.stdout)
    assert run.exit_code == 1 and report["diverging"] == f"mtp.{site}" and not report["mtp"]["ok"]
    assert report["logits"]["ok"] and all(row["ok"] for row in report["sites"])
    assert [found["name"] for found in report["explanations"]] == ([name] if name else [])


def test_goldens_hold_the_block_and_are_read_in_every_naming(tiny_mtp, tmp_path):
    made = tmp_path / "made"
    validate(tiny_mtp, save=made, save_form="npy", length=LENGTH)
    assert np.load(made / "mtp.mlp_out.npy").shape == (LENGTH - 1, 64)
    assert np.load(made / "mtp.logits.npy").shape == (LENGTH - 1, 512)
    result = validate(tiny_mtp, goldens=made)
    assert result.ok and result.mtp.logits.rel_rmse == 0 and len(result.mtp.sites) == 18
    port = tmp_path / "port"
    port.mkdir()
    shutil.copy(made / "tokens.npy", port)
    for name, hook in (
        ("mtp_mlp_out", "mlp_out"),
        ("mtp.0.post_attn", "post_attn"),
        ("final_hidden.mtp", "final_hidden"),
        ("mtp_logits", "logits"),
    ):
        np.save(port / f"{name}.npy", np.load(made / f"mtp.{hook}.npy")[None])
    result = validate(tiny_mtp, goldens=port)  # the block alone
    assert result.ok and len(result.mtp.sites) == 3 and result.sites == [] and result.logits is None
    assert any("the MTP block alone" in note for note in result.notes)
    np.save(port / "mtp.mlp_out.npy", np.load(made / "mtp.mlp_out.npy"))
    with pytest.raises(DataError, match="mlp_out of the MTP block twice"):
        read_goldens(port)
    np.save(port / "mtp.mlp_out.npy", np.zeros((LENGTH, 64), np.float32))
    with pytest.raises(DataError, match="the MTP block has no row for the last"):
        read_goldens(port)


def test_a_side_without_the_block_is_said(tiny_mtp, tmp_path):
    convert(tiny_mtp, tmp_path / "trunk", mtp=False)
    for pair in ((tmp_path / "trunk", tiny_mtp), (tiny_mtp, tmp_path / "trunk")):
        result = validate(*pair, length=LENGTH)
        assert result.ok and result.mtp is None
        assert f"{tmp_path / 'trunk'} does not have the MTP block: it is not compared" in result.notes
    validate(tiny_mtp, save=tmp_path / "made", length=LENGTH)
    with pytest.raises(OptionError, match=r"holds arrays of the MTP block, and .*trunk has none"):
        validate(tmp_path / "trunk", goldens=tmp_path / "made")


def test_an_error_of_the_trunk_is_reported_before_the_block_that_reads_it(tiny_mtp, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.5.attn.attn_sink"] += 1.0

    broken = edit(Path(shutil.copytree(tiny_mtp, tmp_path / "broken")), change)
    result = validate(broken, tiny_mtp, length=LENGTH, explanations=False)
    text = "\n".join(lines(result))
    assert not result.trunk_ok and not result.mtp.ok and result.diverging.layer == 5
    assert "it reads the trunk's streams, which differ" in text and "<td>MTP<td>" in to_html(result)


def test_a_tie_in_the_trunk_leaves_later_rows_of_the_block_out(tiny_mtp):
    from birkhoff.validate.compare import compare
    from birkhoff.validate.gates import GATES

    checkpoint = open_checkpoint(tiny_mtp)
    run = run_oracle(checkpoint, random_tokens(512, LENGTH))
    chosen, logits = run.sites["moe_topk", 4].clone(), run.sites["moe_router_logits", 4].clone()
    taken = next(expert for expert in range(8) if expert not in chosen[20, :, 0].long().tolist())
    logits[20, taken] = logits[20, int(chosen[20, 0, 0])] + 1e-7
    near = replace(run, sites={**run.sites, ("moe_router_logits", 4): logits})
    chosen[20, 0, 0] = taken
    late = {key: torch.cat((x[:20], x[20:] + 1)) for key, x in run.mtp.sites.items() if key[0] == "mlp_out"}
    mtp = replace(run.mtp, sites={**run.mtp.sites, **late})
    result = compare(
        replace(near, sites={**near.sites, ("moe_topk", 4): chosen}, mtp=mtp), near, GATES["float32"]
    )
    assert result.ok and result.mtp.rows == 20
    early = {key: torch.cat((x[:19], x[19:] + 1)) for key, x in run.mtp.sites.items() if key[0] == "mlp_out"}
    mtp = replace(run.mtp, sites={**run.mtp.sites, **early})
    result = compare(replace(near, mtp=mtp), near, GATES["float32"])
    assert not result.ok and result.diverging.layer == MTP and result.divergence.first_row == 19
