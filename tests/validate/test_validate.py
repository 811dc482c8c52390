"""The validator accepts correct checkpoints and identifies broken ports and broken files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from birkhoff.cli.verbs import app
from birkhoff.convert.convert import convert
from birkhoff.convert.presets import PRESETS
from birkhoff.convert.synth import synth
from birkhoff.embedded import EMBEDDED
from birkhoff.errors import CheckpointError, DataError, OptionError, TokenError
from birkhoff.validate.compare import compare, layer_stages
from birkhoff.validate.divergence import untested_parts
from birkhoff.validate.faults import TEXTS
from birkhoff.validate.gates import GATES, default_gate, find_gate
from birkhoff.validate.goldens import read_goldens, save_goldens
from birkhoff.validate.report import headline, lines, to_html
from birkhoff.validate.runs import ForwardRun, build, random_tokens, run_model
from birkhoff.validate.validate import default_length, validate
from birkhoff.weights.checkpoint import open_checkpoint
from tests.validate.broken import broken_run
from tests.weights.files import edit, edit_config

LENGTH = 150


def test_a_right_checkpoint_passes_the_oracle(tiny):
    result = validate(tiny, oracle="transformers", length=LENGTH)
    print("\n".join(lines(result)))
    assert result.ok and result.explanations == [] and result.diverging is None
    assert max(row.rel_rmse for row in result.sites) <= 1e-5 and result.logits.rel_rmse <= 1e-4
    assert result.logits.argmax == 1.0 and len(result.sites) > 60


@pytest.mark.parametrize("name", [name for name in TEXTS if not name.startswith("mtp-")])
def test_a_broken_port_is_named(name, tiny, tmp_path):
    # Sinkhorn converges on random weights: one iteration fewer does not show there.
    path, length = (EMBEDDED / "nano", 60) if name == "sinkhorn-iterations" else (tiny, LENGTH)
    tokens = random_tokens(512, length)
    save_goldens(broken_run(name, path, tokens), tmp_path / "goldens")
    result = validate(path, goldens=tmp_path / "goldens")
    assert not result.ok and result.diverging is not None
    assert [found.name for found in result.explanations] == [name]
    assert result.explanations[0].left < 0.01 and TEXTS[name] in "\n".join(lines(result))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mixer-transposed", 1),
        ("window-size", 2),
        ("sink-zero", 0),
        ("nibble-order", 5),
        ("compress-theta", 3),
    ],
)
def test_a_mistake_in_a_port_of_one_layer_is_named(name, layer, tiny, tmp_path):
    """The layer is run by a broken port on correct input; only what it computes is compared."""
    tokens = random_tokens(512, LENGTH)
    streams = run_model(build(open_checkpoint(tiny)), tokens, "tiny").sites["mhc_streams_pre_attn", layer]
    broken = broken_run(name, tiny, tokens, {layer: streams})
    after = ("mhc_streams_final", 5) if layer == 5 else ("mhc_streams_pre_attn", layer + 1)
    kept = {key: x for key, x in broken.sites.items() if key[1] == layer or key == after}
    save_goldens(ForwardRun("port", tuple(tokens), kept, None), tmp_path / "goldens")
    result = validate(tiny, goldens=tmp_path / "goldens")
    assert not result.ok and result.diverging.layer in (layer, after[1])
    assert [found.name for found in result.explanations] == [name], lines(result)
    # Layer 0 has the same input in the whole model.
    assert result.explanations[0].variant.endswith(f", in layer {layer} alone") == (layer > 0)


def broken_copy(tiny: Path, tmp_path: Path, name: str) -> Path:
    path = Path(shutil.copytree(tiny, tmp_path / "broken"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            leaf = key.rsplit(".", 1)[-1]
            if (
                name == "nibble-order"
                and ".experts." in key
                and key.endswith("weight")
                and "shared" not in key
            ):
                codes = tensors[key].view(torch.uint8)
                tensors[key] = ((codes << 4) | (codes >> 4)).view(torch.int8)
            if name == "mixer-order" and leaf.startswith(("hc_attn_", "hc_ffn_")):
                whole = tensors[key]
                tensors[key] = (
                    whole[[0, 2, 1]] if len(whole) == 3 else torch.cat((whole[:4], whole[8:], whole[4:8]))
                )
            if (
                name == "mixer-transposed"
                and leaf.startswith(("hc_attn_", "hc_ffn_"))
                and len(tensors[key]) == 24
            ):
                comb = tensors[key][8:].unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
                tensors[key] = torch.cat((tensors[key][:8], comb))

    if name == "yarn-missing":
        return edit_config(path, rope_scaling=None)
    return edit(path, change)


@pytest.mark.parametrize("name", ["nibble-order", "mixer-order", "mixer-transposed", "yarn-missing"])
def test_a_broken_file_is_named(name, tiny, tmp_path):
    result = validate(broken_copy(tiny, tmp_path, name), tiny, length=LENGTH)
    assert not result.ok and [found.name for found in result.explanations] == [name]


def test_a_difference_nobody_knows_is_not_explained_away(tiny, tmp_path):
    path = Path(shutil.copytree(tiny, tmp_path / "broken"))

    def change(tensors):
        scale = tensors["layers.3.attn.wo_b.scale"]
        tensors["layers.3.attn.wo_b.scale"] = (scale.view(torch.uint8) + 1).view(scale.dtype)

    result = validate(edit(path, change), tiny, length=LENGTH)
    assert not result.ok and result.explanations == []
    assert (result.diverging.site, result.diverging.layer) == ("post_attn", 3)
    assert "none of the known mistakes explains it" in lines(result)
    assert [stage["ok"] for stage in result.stages] == [False, False, False]


def test_a_checkpoint_agrees_with_its_gguf(tiny, tmp_path):
    convert(tiny, tmp_path / "exact.gguf", dense="bf16")
    result = validate(tmp_path / "exact.gguf", tiny, length=64)
    assert result.ok and result.logits.rel_rmse == 0 and result.logits.top20 == 1
    convert(tiny, tmp_path / "rounded.gguf")
    strict = validate(tmp_path / "rounded.gguf", tiny, length=64, gate="float32", explanations=False)
    assert not strict.ok and strict.logits.rel_rmse > 1e-4


def test_rounded_weights_are_held_to_the_gate_of_their_format(tmp_path):
    convert("nano", tmp_path / "rounded.gguf")
    for pair in ((tmp_path / "rounded.gguf", "nano"), ("nano", tmp_path / "rounded.gguf")):
        result = validate(*pair, length=64, seed=1)
        assert result.ok and result.mtp.ok and result.gate.name == "q8_0", lines(result)
    assert validate("nano", "nano", length=8).gate.name == "float32"
    story = tmp_path / "story.txt"
    story.write_text("Once upon a time there was a little fox. He lived in the forest with his mother. " * 4)
    command = [
        "validate",
        str(tmp_path / "rounded.gguf"),
        "nano",
        "--text",
        str(story),
        "--length",
        "64",
        "--json",
    ]
    run = CliRunner().invoke(app, command)
    report = json.loads(run.stdout)
    assert run.exit_code == 0 and report["gate"]["name"] == "trained" and report["rows"] == 64
    assert report["logits"]["mean_kl"] < 1e-3 and report["mtp"]["gate"]["mean_kl"] == 8e-3


def test_a_bug_is_outside_the_gate_of_rounded_weights(tmp_path):
    """One matrix of eight layers, twice as large: far smaller than what a wrong layout does."""
    convert("nano", tmp_path / "rounded.gguf")
    tensor = open_checkpoint(tmp_path / "rounded.gguf")["layers.4.attn.wo_b.weight"]
    file, offset = tensor.location
    with open(file, "r+b") as out:
        out.seek(offset)
        blocks = np.frombuffer(out.read(tensor.nbytes), np.uint8).reshape(-1, 34).copy()
        steps = blocks[:, :2].copy().view(np.float16) * np.float16(2)
        blocks[:, :2] = steps.view(np.uint8)
        out.seek(offset)
        out.write(blocks.tobytes())
    result = validate(tmp_path / "rounded.gguf", "nano", length=64, explanations=False)
    assert not result.ok and result.gate.name == "q8_0" and result.logits.median_row > 1.5e-2


@pytest.mark.parametrize(
    ("dtype", "rounded", "text", "name"),
    [
        ("float32", None, False, "float32"),
        ("float32", "F16", False, "f16"),
        ("float32", "Q8_0", False, "q8_0"),
        ("float32", "Q8_0", True, "trained"),
        ("float32", "Q6_K", True, "q5_0"),
        ("float32", "IQ4_XS", False, "q4_0"),
        ("float32", "TQ2_0", False, "q4_0"),
        ("bfloat16", "Q8_0", False, "bfloat16"),
        ("bfloat16", "Q4_K", False, "q4_0"),
    ],
)
def test_the_coarsest_type_selects_the_gate(dtype, rounded, text, name):
    assert default_gate(dtype, "float32", rounded, text=text).name == name


def test_a_text_needs_a_tokenizer_and_tokens_of_its_own(tiny, tmp_path):
    with pytest.raises(OptionError, match="expected one of them"):
        validate(tiny, tiny, tokens=[1], text="a")
    with pytest.raises(OptionError, match="the text is empty"):
        validate(tiny, tiny, text="")
    synth(tmp_path / "mute", "tiny", layers=2, mtp=False, tokenizer=False)
    with pytest.raises(OptionError, match="no tokenizer to encode the text with"):
        validate(tmp_path / "mute", tmp_path / "mute", text="a")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xe4")
    run = CliRunner().invoke(app, ["validate", str(tiny), str(tiny), "--text", str(tmp_path / "latin")])
    assert isinstance(run.exception, DataError) and "UTF-8" in str(run.exception)


def test_a_port_that_rounds_activations_is_held_to_the_gate_of_the_release(tiny, tmp_path):
    validate(tiny, save=tmp_path / "made", numerics="released", length=40)
    assert validate(tiny, goldens=tmp_path / "made", numerics="released").gate.name == "released"
    assert validate(tiny, tiny, numerics="released", length=40).gate.name == "float32"


def test_bfloat16_is_held_to_its_own_gate(tiny):
    result = validate(tiny, tiny, dtype="bfloat16", against_dtype="float32", length=LENGTH)
    print(lines(result)[-1], result.logits)
    assert result.gate.name == "bfloat16" and result.logits.rel_rmse > 1e-4


def test_goldens_come_back_and_can_be_made_with_numpy_alone(tiny, tmp_path):
    assert validate(tiny, save=tmp_path / "made", length=40) is None
    assert validate(tiny, goldens=tmp_path / "made").ok
    run = read_goldens(tmp_path / "made")
    (tmp_path / "plain").mkdir()
    np.save(tmp_path / "plain/tokens.npy", np.array(run.tokens))
    np.save(tmp_path / "plain/logits.npy", run.logits.numpy())
    np.save(tmp_path / "plain/mlp_out.2.npy", run.sites["mlp_out", 2].numpy())
    result = validate(tiny, goldens=tmp_path / "plain")
    assert result.ok and len(result.sites) == 1 and result.logits.argmax == 1
    with pytest.raises(OptionError, match="is not empty"):
        save_goldens(run, tmp_path / "made")
    with pytest.raises(OptionError, match="bring their own tokens"):
        validate(tiny, goldens=tmp_path / "plain", tokens=[1])


def test_goldens_as_npy_files_are_written_and_read_in_both_namings(tiny, tmp_path):
    made = tmp_path / "npy"
    arguments = [
        "validate",
        str(tiny),
        "--save-goldens",
        str(made),
        "--goldens-form",
        "npy",
        "--length",
        "40",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    names = {file.name for file in made.glob("*.npy")}
    assert {"tokens.npy", "logits.npy", "mlp_out.3.npy", "mhc_streams_pre_attn.0.npy"} <= names
    assert not list(made.glob("*.safetensors")) and np.load(made / "logits.npy").shape == (40, 512)
    result = validate(tiny, goldens=made)
    assert result.ok and result.logits.rel_rmse == 0 and len(result.sites) > 60
    port = tmp_path / "port"  # another harness: layer first, a batch of one, half precision, no JSON
    port.mkdir()
    np.save(port / "input_ids.npy", np.load(made / "tokens.npy")[None])
    for name in ("3_mlp_out", "layer_2_mlp_out", "layers.1.post_attn", "blk.4.mhc_streams_pre_attn"):
        layer, hook = re.fullmatch(r"\D*(\d+)[_.](\w+)", name).groups()
        np.save(port / f"{name}.npy", np.load(made / f"{hook}.{layer}.npy")[None])
    np.save(port / "logits.npy", np.load(made / "logits.npy")[None].astype(np.float32))
    result = validate(tiny, goldens=port)
    assert result.ok and len(result.sites) == 4
    np.save(port / "mlp_out.3.npy", np.load(made / "mlp_out.3.npy"))
    with pytest.raises(DataError, match="mlp_out of layer 3 twice"):
        read_goldens(port)
    with pytest.raises(OptionError, match="goldens form"):
        save_goldens(read_goldens(made), tmp_path / "x", "pickle")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("goldens.json", b"{", "does not say which tokens"),
        ("goldens.json", b'{"tokens": ["a"]}', "list of token ids"),
        ("goldens.json", b"[]", "does not say which tokens"),
        ("tokens.npy", b"junk", "not a plain .npy"),
        ("logits.npy", b"\x93NUMPY\x01\x00", "neither goldens.json"),
    ],
)
def test_goldens_that_are_none_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_goldens(tmp_path)


def test_arrays_of_goldens_are_checked(tmp_path):
    (tmp_path / "goldens.json").write_text('{"tokens": [1, 2]}')
    with pytest.raises(DataError, match="holds no arrays"):
        read_goldens(tmp_path)
    np.save(tmp_path / "nonsense.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(DataError, match=r"'nonsense', expected logits or HOOK\.LAYER"):
        read_goldens(tmp_path)
    (tmp_path / "nonsense.npy").unlink()
    np.save(tmp_path / "logits.npy", np.zeros((5, 3), np.float32))
    with pytest.raises(DataError, match="one row for each of 2 tokens"):
        read_goldens(tmp_path)
    np.save(tmp_path / "logits.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"not a plain \.npy"):
        read_goldens(tmp_path)
    with pytest.raises(DataError, match="not a directory with goldens"):
        read_goldens(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def plain_run(tiny) -> ForwardRun:
    return run_model(build(open_checkpoint(tiny)), random_tokens(512, 120), "tiny")


def with_sites(run: ForwardRun, **changed: torch.Tensor) -> ForwardRun:
    """The run with other values, named HOOK_LAYER."""
    keys = {(name.rpartition("_")[0], int(name.rpartition("_")[2])): x for name, x in changed.items()}
    return ForwardRun("changed", run.tokens, {**run.sites, **keys}, run.logits)


def other_expert(run: ForwardRun, layer: int, row: int) -> tuple[torch.Tensor, int, int]:
    """`moe_topk` with an expert of the row replaced, the expert taken, and the one it replaces."""
    chosen = run.sites["moe_topk", layer].clone()
    taken = next(e for e in range(8) if e not in chosen[row, :, 0].long().tolist())
    replaced = int(chosen[row, 0, 0])
    chosen[row, 0, 0] = taken
    return chosen, taken, replaced


def test_a_tie_between_experts_is_not_a_failure(plain_run):
    chosen, taken, replaced = other_expert(plain_run, 4, 30)
    logits = plain_run.sites["moe_router_logits", 4].clone()
    logits[30, taken] = logits[30, replaced] + 1e-7
    after = plain_run.sites["mlp_out", 4].clone()
    after[30:] += 1.0
    near = with_sites(plain_run, moe_router_logits_4=logits)
    flipped = with_sites(near, moe_topk_4=chosen, mlp_out_4=after)
    result = compare(flipped, near, GATES["float32"])
    assert result.ok and result.compared_rows == 30 and result.choices[0].gap < 1e-6
    far = compare(with_sites(plain_run, moe_topk_4=chosen), plain_run, GATES["float32"])
    assert not far.ok and far.choices[0].first == 30 and far.choices[0].verdict == "differs"
    assert (far.divergence.site, far.divergence.layer, far.divergence.first_row) == ("moe_topk", 4, 30)
    bias = torch.zeros(8)
    scores = torch.nn.functional.softplus(plain_run.sites["moe_router_logits", 4][30].double()).sqrt()
    bias[taken] = float(scores[replaced] - scores[taken])  # with this bias the two experts tie
    tied = compare(with_sites(plain_run, moe_topk_4=chosen), plain_run, GATES["float32"], biases={4: bias})
    assert tied.ok and tied.choices[0].gap < 1e-6


def test_a_tie_excuses_nothing_that_was_computed_before_it(plain_run):
    chosen, taken, replaced = other_expert(plain_run, 4, 30)
    logits = plain_run.sites["moe_router_logits", 4].clone()
    logits[30, taken] = logits[30, replaced] + 1e-7
    near = with_sites(plain_run, moe_router_logits_4=logits)
    before = plain_run.sites["attn_head_out", 3].clone()
    before[30:] *= 1.01
    result = compare(with_sites(near, moe_topk_4=chosen, attn_head_out_3=before), near, GATES["float32"])
    assert not result.ok and result.choices[0].verdict == "tie"
    assert (result.divergence.site, result.divergence.first_row) == ("attn_head_out", 30)


def test_choices_after_a_tie_follow_from_it(plain_run):
    chosen, taken, replaced = other_expert(plain_run, 4, 30)
    logits = plain_run.sites["moe_router_logits", 4].clone()
    logits[30, taken] = logits[30, replaced] + 1e-7
    near = with_sites(plain_run, moe_router_logits_4=logits)
    later, _, _ = other_expert(plain_run, 5, 40)
    result = compare(with_sites(near, moe_topk_4=chosen, moe_topk_5=later), near, GATES["float32"])
    assert result.ok and [choice.verdict for choice in result.choices] == ["tie", "follows"]


def test_a_tie_in_the_first_row_leaves_nothing_to_agree(plain_run):
    chosen, taken, replaced = other_expert(plain_run, 4, 0)
    logits = plain_run.sites["moe_router_logits", 4].clone()
    logits[0, taken] = logits[0, replaced]
    near = with_sites(plain_run, moe_router_logits_4=logits)
    result = compare(with_sites(near, moe_topk_4=chosen), near, GATES["float32"])
    assert not result.ok and result.logits is None and any("--seed" in note for note in result.notes)


def test_blocks_of_the_indexer_are_compared(tiny, plain_run):
    config = open_checkpoint(tiny).config
    scores = plain_run.sites["index_scores", 2].clone()
    order = scores[100, :25].argsort(descending=True)
    pair = order[[config.index_topk - 1, config.index_topk]]
    ours, theirs = scores.clone(), scores.clone()
    theirs[100, pair] = scores[100, pair[0]] + scores[100].abs().max() * torch.tensor([1e-7, -1e-7])
    ours[100, pair] = theirs[100, pair.flip(0)]
    after = plain_run.sites["attn_head_out", 2].clone()
    after[100] += 1.0
    near = with_sites(plain_run, index_scores_2=theirs)
    tied = with_sites(plain_run, index_scores_2=ours, attn_head_out_2=after)
    result = compare(tied, near, GATES["float32"], config)
    differing = [(choice.selected, choice.first, choice.verdict) for choice in result.choices]
    assert result.ok and differing == [("blocks", 100, "tie")], (differing, result.divergence)
    wrong = scores.clone()
    wrong[100, pair[1]] = wrong[100].max() + 1
    result = compare(with_sites(plain_run, index_scores_2=wrong), near, GATES["float32"], config)
    assert not result.ok and (result.divergence.site, result.divergence.first_row) == ("index_scores", 100)


def test_weights_of_experts_are_compared(plain_run):
    weights = plain_run.sites["moe_topk", 3].clone()
    weights[..., 1] /= 1.5
    result = compare(with_sites(plain_run, moe_topk_3=weights), plain_run, GATES["float32"])
    assert not result.ok and (result.divergence.site, result.divergence.layer) == ("moe_topk", 3)
    assert result.divergence.last_agreeing == "moe_router_logits[3]"


def test_the_row_where_runs_part_is_explained(tiny, plain_run):
    config = open_checkpoint(tiny).config
    for layer, row, words in (
        (0, 8, "sliding window of 8 tokens leaves one out"),
        (2, 3, "finishes the first compressed entry"),
        (2, 51, "the indexer leaves a block out (index_topk 12)"),
        (0, 20, "the first is row 20"),
    ):
        changed = plain_run.sites["attn_head_out", layer].clone()
        changed[row:] *= 1.01
        key = f"attn_head_out_{layer}"
        result = compare(with_sites(plain_run, **{key: changed}), plain_run, GATES["float32"], config)
        text = "\n".join(lines(result))
        assert f"{120 - row} of 120 rows are outside" in text and words in text, text


def test_what_the_tokens_do_not_reach_is_said(tiny):
    notes = validate(tiny, tiny, length=8).notes
    assert [part in notes[i] for i, part in enumerate(("sliding window", "HCA", "indexer"))] == [True] * 3
    assert validate(tiny, tiny, length=130).notes == []


def test_the_default_length_makes_the_indexer_of_nano_choose():
    nano, flash = open_checkpoint(EMBEDDED / "nano").config, PRESETS["flash"]
    assert default_length(nano) // 4 > nano.index_topk and untested_parts(nano, default_length(nano)) == []
    assert default_length(flash) == 194
    assert ["2052 tokens" in note for note in untested_parts(flash, 194)] == [True]


def test_configs_are_compared(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):  # before A runs and is saved
        validate(tiny, tmp_path / "nothing", save=tmp_path / "made")
    with pytest.raises(OptionError, match="gate is 'loose'"):
        validate(tiny, tiny, save=tmp_path / "made", gate="loose")
    assert not (tmp_path / "made").exists()
    with pytest.raises(OptionError, match="differ in size: vocab_size is 4096 and 512"):
        validate("nano", tiny)
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    result = validate(edit_config(copy, sliding_window=9), tiny, length=LENGTH)
    assert not result.ok and "the configs differ: sliding_window is 9 and 8" in lines(result)


def test_a_port_that_computes_nan_is_reported(tiny, tmp_path):
    made = tmp_path / "made"
    validate(tiny, save=made, save_form="npy", length=60)
    for name in ("mlp_out.3", "logits"):
        array = np.load(made / f"{name}.npy")
        array[7:] = np.nan
        np.save(made / f"{name}.npy", array)
    result = validate(tiny, goldens=made)
    text = lines(result)
    assert (
        not result.ok
        and "53 of 60 rows are outside, the first is row 7: it holds values that are not finite" in text
    )
    assert any(line.startswith("mlp_out ") and "█" in line for line in text) and "<svg" in to_html(result)
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert report["diverging"] == "mlp_out[3]" and report["logits"]["rel_rmse"] is None


def test_goldens_with_sites_that_are_not_there_are_refused(tiny, tmp_path):
    validate(tiny, save=tmp_path / "made", save_form="npy", length=20)
    (tmp_path / "made/mlp_out.5.npy").rename(tmp_path / "made/mlp_out.6.npy")
    with pytest.raises(OptionError, match=r"holds mlp_out of layer 6.*has it at layers 0, 1, 2, 3, 4, 5"):
        validate(tiny, goldens=tmp_path / "made")


def test_goldens_of_another_shape_are_refused(tiny, tmp_path):
    made = tmp_path / "made"
    validate(tiny, save=made, save_form="npy", length=20)
    streams = np.load(made / "mhc_streams_pre_attn.2.npy")
    np.save(made / "mhc_streams_pre_attn.2.npy", streams.reshape(20, -1))
    with pytest.raises(OptionError, match=r"of layer 2 of shape \(20, 256\), expected \(20, 4, 64\)"):
        validate(tiny, goldens=made)
    np.save(made / "mhc_streams_pre_attn.2.npy", streams)
    np.save(made / "logits.npy", np.load(made / "logits.npy")[:, :500])
    with pytest.raises(OptionError, match=r"logits of shape \(20, 500\), expected \(20, 512\)"):
        validate(tiny, goldens=made)


def test_scores_of_the_indexer_may_be_goldens(tiny, tmp_path):
    made = tmp_path / "made"
    validate(tiny, save=made, save_form="npy", length=60)
    scores = np.load(made / "index_scores.2.npy")
    assert scores.shape == (60, 15)
    unfinished = np.arange(15) >= (np.arange(60)[:, None] + 1) // 4
    np.save(made / "index_scores.2.npy", np.where(unfinished, -np.inf, scores))
    assert validate(tiny, goldens=made).ok
    np.save(made / "index_scores.2.npy", scores[:, :12])
    with pytest.raises(DataError, match=r"index_scores\.2 is \(60, 12\), expected \(60, 15\)"):
        validate(tiny, goldens=made)


def test_stages_reach_every_kind_by_few_layers():
    stages = dict(layer_stages(PRESETS["flash"]))
    assert stages["first and last"] == [0, 42] and stages["edges of each kind"] == [0, 1, 2, 3, 41, 42]
    assert stages["all"] == list(range(43))


def test_reports_say_the_same_in_both_forms(tiny, tmp_path):
    result = validate(broken_copy(tiny, tmp_path, "yarn-missing"), tiny, length=LENGTH)
    page = to_html(result)
    assert (
        headline(result) in page
        and "yarn-missing" in page
        and "<svg" in page
        and page.count("<polyline") == 4
    )
    assert "<script" not in page and "http" not in page
    assert any(line.startswith("mlp_out") and "▁" in line for line in lines(result))
    assert (
        json.loads(json.dumps(result.to_dict()))["diverging"]
        == f"{result.diverging.site}[{result.diverging.layer}]"
    )


def test_the_command_prints_and_sets_its_status(tiny, tmp_path):
    runner = CliRunner()
    good = runner.invoke(
        app, ["validate", str(tiny), str(tiny), "--length", "30", "--html", str(tmp_path / "r.html")]
    )
    assert (
        good.exit_code == 0
        and "agrees with" in good.stdout
        and (tmp_path / "r.html").read_text().startswith("<!doctype")
    )
    broken = broken_copy(tiny, tmp_path, "nibble-order")
    bad = runner.invoke(app, ["validate", str(broken), str(tiny), "--length", "60", "--json"])
    assert bad.exit_code == 1 and json.loads(bad.stdout)["explanations"][0]["name"] == "nibble-order"
    made = runner.invoke(
        app, ["validate", str(tiny), "--save-goldens", str(tmp_path / "g"), "--length", "20"]
    )
    assert made.exit_code == 0 and (tmp_path / "g/goldens.safetensors").exists()


def test_misuse_is_refused(tiny, tmp_path):
    with pytest.raises(OptionError, match="compare with one thing"):
        validate(tiny)
    with pytest.raises(OptionError, match="compare with one thing"):
        validate(tiny, tiny, oracle="transformers")
    with pytest.raises(OptionError, match="oracle is 'other'"):
        validate(tiny, oracle="other")
    with pytest.raises(OptionError, match="gate is 'loose'"):
        find_gate("loose")
    with pytest.raises(OptionError, match="dtype is 'int4'"):
        validate(tiny, tiny, dtype="int4", length=5)
    with pytest.raises(TokenError, match="outside the vocabulary of 512"):
        validate(tiny, tiny, tokens=[1, 600])
    with pytest.raises(OptionError, match="length is 0"):
        validate(tiny, tiny, length=0)
