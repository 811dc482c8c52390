"""Edits of attention in a running engine, compared with `transformers` with the same hook and with plain float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff import AttentionEdit, Capture, Patch
from birkhoff.capture.store.reader import iter_rows, read_request, read_sharded
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, CaptureValidationError, OptionError, SiteError, SteeringError
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.steering.resolver import SteeringResolver
from birkhoff.steering.steering_fields import intervention
from tests.models import weights_of
from tests.oracle import build_oracle
from tests.steering.float64_attention import Change, edited_model
from tests.steering.hooked import Hooked

PROMPT = [0, *range(40, 110)]
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 20}


LONG = [0, *(40 + index * 7 % 60 for index in range(149))]
WINDOW, TOPK = 8, 12  # of the tiny model
EDITS = {
    "mask by position": (
        AttentionEdit("all", mask=[0, 5, 60, 145]),
        dict.fromkeys(range(6), Change(mask={0, 5, 60, 145})),
    ),
    "mask in the window only, one head": (
        AttentionEdit(
            [1, 2], heads=[1], mask={"positions": {"prompt": {"window": [20, 80]}}, "entries": "none"}
        ),
        dict.fromkeys((1, 2), Change(heads=[1], mask=set(range(20, 80)), rule="none")),
    ),
    "mask whole entries": (
        AttentionEdit([2, 3], mask={"positions": {"prompt": {"window": [13, 41]}}, "entries": "all"}),
        dict.fromkeys((2, 3), Change(mask=set(range(13, 41)), rule="all")),
    ),
    "everything masked": (
        AttentionEdit([2], mask="all", where=[30, 31]),
        {2: Change(mask=set(range(200)), queries={30, 31})},
    ),
    "force and forbid": (
        AttentionEdit([2, 4], blocks={"force": [1, 2], "forbid": [0, 7, 20]}),
        dict.fromkeys((2, 4), Change(force={1, 2}, forbid={0, 7, 20})),
    ),
    "forbid blocks of tokens": (
        AttentionEdit([4], blocks={"forbid": {"tokens": [3, 4, 5, 6, 7, 8]}}),
        {4: Change(forbid={0, 1, 2})},
    ),
    "no sink": (AttentionEdit("all", sink=0.0), dict.fromkeys(range(6), Change(sink=0.0))),
    "a larger sink in two heads": (
        AttentionEdit([0, 3], heads=[0, 3], sink=5.0),
        dict.fromkeys((0, 3), Change(heads=[0, 3], sink=5.0)),
    ),
    "entries removed": (AttentionEdit([2, 3], entries=[0, 4]), dict.fromkeys((2, 3), Change(removed={0, 4}))),
    "entries of tokens set to zero": (
        AttentionEdit([3, 4], entries={"tokens": [1, 2], "to": "zero"}),
        dict.fromkeys((3, 4), Change(zeroed={0})),
    ),
    "for some tokens": (
        AttentionEdit([2, 3], mask=[1], where={"prompt": [140, 149], "generated": [1]}),
        dict.fromkeys((2, 3), Change(mask={1}, queries={140, 149, 151})),
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    return path


@pytest.fixture(scope="module")
def engine(checkpoint):
    with birkhoff.load(checkpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(checkpoint):
    with birkhoff.load(checkpoint, kernels="reference") as engine:
        yield build_oracle(engine.model)


def without_heads(oracle, layers, heads, rows=slice(None)):
    """The oracle with these heads silent at the input of the grouped projection, for some tokens."""
    hooked, config = Hooked(oracle), oracle.config

    def silence(x):
        by_head = x.flatten(2).unflatten(2, (config.num_attention_heads, config.head_dim)).clone()
        by_head[:, rows, heads] = 0.0
        return by_head.view(x.shape)

    for layer in layers:
        hooked.input(oracle.model.layers[layer].self_attn.o_a_proj, silence)
    return hooked


def assert_generated_like(out, theirs, start):
    """The logprobs of every generated token equal those of one pass over the whole text."""
    logprobs = theirs.log_softmax(-1)
    for step, entry in enumerate(out.logprobs):
        for token, value in dict(entry.top).items():
            assert abs(logprobs[start - 1 + step, token] - value) < 1e-4


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("layers", "heads"), [([2], [1]), ([0, 3, 4], [0, 2])])
def test_heads_taken_out_equal_transformers_with_the_same_hook(engine, oracle, layers, heads, phase):
    out = engine.generate(PROMPT, steer=[AttentionEdit(layers, heads=heads, phase=phase)], **GREEDY)
    ids = PROMPT + out.token_ids[:-1]
    rows = {"both": slice(None), "prefill": slice(0, len(PROMPT)), "decode": slice(len(PROMPT), None)}[phase]
    assert_generated_like(out, without_heads(oracle, layers, heads, rows).logits(ids), len(PROMPT))
    plain = engine.generate(PROMPT, **GREEDY)
    assert plain.logprobs[-1].top != out.logprobs[-1].top


def test_a_head_taken_out_is_zero_after_the_edit_and_unchanged_before_it(engine):
    steer = [AttentionEdit([2], heads=[1], where=[3, 4])]
    for point in ("before", "after"):
        capture = Capture({"attn_head_out": [2]}, positions="all", capture_point=point)
        rows = engine.generate(PROMPT, steer=steer, capture=capture, **GREEDY).acts["attn_head_out", 2]
        assert rows.tensor.shape[1:] == (engine.config.num_attention_heads, engine.config.head_dim)
        silent = (rows.tensor == 0).all(-1)
        expected = torch.zeros_like(silent)
        expected[3:5, 1] = point == "after"
        assert torch.equal(silent, expected)


def test_requests_in_one_batch_do_not_affect_each_other(engine):
    edit = [AttentionEdit([2, 3], heads=[0])]
    alone = [engine.generate(PROMPT, steer=steer, **GREEDY) for steer in (None, edit, None)]
    batch = engine.generate([PROMPT] * 3, steer=[None, edit, None], **GREEDY)
    assert [out.token_ids for out in batch] == [out.token_ids for out in alone]
    for together, single in zip(batch, alone):
        for a, b in zip(together.logprobs, single.logprobs):
            assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-5)


def test_an_edited_prompt_is_not_served_from_the_pages_of_a_plain_one(engine):
    prompt = [0, *(40 + index % 60 for index in range(300))]
    plain = engine.generate(prompt, **GREEDY)
    edited = engine.generate(prompt, steer=[AttentionEdit([0], heads=[0, 1])], **GREEDY)
    again = engine.generate(prompt, **GREEDY)
    assert edited.logprobs[0].top != plain.logprobs[0].top
    assert dict(again.logprobs[0].top) == pytest.approx(dict(plain.logprobs[0].top), abs=1e-5)


def test_a_whole_row_can_be_patched_at_the_heads(engine):
    heads, channels = engine.config.num_attention_heads, engine.config.head_dim
    patched = engine.logits(PROMPT, steer=[Patch(0, "attn_head_out", [2])])
    silent = engine.logits(PROMPT, steer=[AttentionEdit([2], heads=list(range(heads)))])
    assert torch.equal(patched, silent)
    with pytest.raises(SteeringError, match=f"rows of {heads * channels}"):
        engine.logits(PROMPT, steer=[Patch([1.0], "attn_head_out", [2])])


@pytest.mark.parametrize(
    "edit",
    [
        AttentionEdit([2], heads=[1]),
        AttentionEdit("all", heads=(3, 1, 1), where={"prompt": [0]}, phase="prefill"),
        *(edit for edit, _ in EDITS.values()),
        AttentionEdit([2], mask={"text": "a", "entries": "all"}, sink=2),
        AttentionEdit([2], blocks={"force": {"text": "a"}}, entries={"numbers": [1], "to": "zero"}),
    ],
)
def test_json_forms_give_the_same_edit(engine, edit):
    assert AttentionEdit.from_json(edit.to_json()) == edit and hash(edit) is not None
    assert engine.edits_from_json({"interventions": [intervention(edit)]}) == [edit]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layers": [2]}, "changes nothing"),
        ({"layers": [2], "heads": []}, "heads is"),
        ({"layers": [2], "heads": [-1]}, "heads is"),
        ({"layers": [2], "heads": [99]}, "heads 0..3"),
        ({"layers": [99], "heads": [0]}, "layer 99"),
        ({"layers": [2], "heads": [0], "phase": "later"}, "phase is"),
        ({"layers": [2], "sink": -1}, "sink is"),
        ({"layers": [2], "heads": [0], "blocks": {"force": [1]}}, "heads is given beside"),
        ({"layers": [2], "blocks": {"drop": [1]}}, "blocks.*drop"),
        ({"layers": [2], "blocks": {"force": []}}, "blocks.force is"),
        ({"layers": [3], "blocks": {"force": [1]}}, "Layers with index_blocks: 2, 4"),
        ({"layers": [0, 2], "entries": [1]}, "Layers with entry_tokens: 2, 3, 4, 5"),
        ({"layers": [2], "entries": {"numbers": [1], "to": "mean"}}, "entries.to"),
        ({"layers": [2], "mask": {"positions": [0], "entries": "some"}}, "mask.entries"),
        ({"layers": [2], "mask": [999]}, "mask.*999"),
        ({"layers": [2], "mask": {"generated": {"token_ids": [5]}}}, "mask.*by id"),
        ({"layers": [2], "mask": {"text": ""}}, "mask.text"),
        ({"layers": [2], "mask": {"text": "fox"}}, "tokenizer|does not occur"),
    ],
)
def test_what_a_model_does_not_have_is_refused_by_name(engine, fields, named):
    with pytest.raises(BirkhoffError, match=named):
        engine.generate(PROMPT, steer=[AttentionEdit(**fields)], **GREEDY)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"op": "attention", "heads": [0]}, r"interventions\[0\].*layers"),
        ({"op": "attention", "at": {"layers": [2]}, "heads": "all"}, r"interventions\[0\]"),
        ({"op": "attention", "at": {"layers": [2]}, "head": [1]}, r"interventions\[0\].*head"),
        ({"op": "attention", "at": {"layers": [77]}, "heads": [1]}, r"interventions\[0\].*77"),
    ],
)
def test_errors_of_request_fields_name_the_field(engine, body, path):
    with pytest.raises(SteeringError, match=path):
        engine.edits_from_json({"interventions": [body]})


def test_an_ordinary_model_refuses_attention_edits_by_name():
    resolver = SteeringResolver(build_hook_schema(64, "float32", None), 4)
    with pytest.raises(SteeringError, match="AttentionEdit needs a model of the V4 architecture"):
        resolver.edits([AttentionEdit([2], heads=[1])], PROMPT, 4)


def float64_logprobs(model, ids):
    logits = torch.tensor(np.stack([model.step(token) for token in ids]))
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def weights(checkpoint):
    with birkhoff.load(checkpoint, kernels="reference") as engine:
        return engine.config, {name: t.double().numpy() for name, t in weights_of(engine.model).items()}


@pytest.mark.parametrize("name", EDITS)
def test_edited_attention_equals_plain_float64(engine, weights, name):
    """A prompt in chunks, cached keys, compressed entries and decoding, against one pass token by token."""
    edit, changes = EDITS[name]
    out = engine.generate(LONG, steer=[edit], **GREEDY)
    ids = LONG + out.token_ids[:-1]
    assert_generated_like(out, float64_logprobs(edited_model(*weights, changes), ids), len(LONG))
    plain = engine.generate(LONG, **GREEDY)
    assert dict(plain.logprobs[-1].top) != pytest.approx(dict(out.logprobs[-1].top), abs=1e-4)
    assert out.interp["steered_positions"]


RAGGED = ("attn_weights", "index_scores", "index_blocks", "entry_tokens")


def by_token(rows):
    """Rows of a ragged site by the position of their token."""
    found = {}
    for position, row in zip(rows.positions, rows.tensor):
        found.setdefault(position, []).append(row)
    return {position: torch.stack(own).double().numpy() for position, own in found.items()}


@pytest.mark.parametrize("name", [None, "mask by position", "force and forbid", "a larger sink in two heads"])
def test_ragged_reads_equal_plain_float64(engine, weights, name):
    edit, changes = EDITS[name] if name else (None, {})
    capture = Capture(dict.fromkeys(RAGGED, "all"), positions="all", capture_point="after")
    out = engine.generate(LONG, steer=[edit] if edit else None, capture=capture, **GREEDY)
    model = edited_model(*weights, changes)
    ids = LONG + out.token_ids[:-1]
    float64_logprobs(model, ids)
    for layer in range(6):
        reference = model.layers[layer]
        rows = by_token(out.acts["attn_weights", layer])
        assert sorted(rows) == list(range(len(ids)))
        for position, own in rows.items():
            assert [tuple(span) for span in own[:-1, :2]] == reference.spans[position], (layer, position)
            assert tuple(own[-1, :2]) == (-1, -1)
            assert np.abs(own[:, 2:].T - reference.shares[position]).max() < 1e-4
            assert np.abs(own[:, 2:].sum(0) - 1).max() < 1e-5
        if layer in (2, 4):
            scores = by_token(out.acts["index_scores", layer])
            for position, own in by_token(out.acts["index_blocks", layer]).items():
                assert own[:, 0].tolist() == reference.chosen[position]
                assert (own[:, 1] == 4 * own[:, 0]).all() and (own[:, 2] == own[:, 1] + 4).all()
                assert scores[position][:, 0].tolist() == list(range((position + 1) // 4))
                assert np.abs(scores[position][:, 1] - reference.scores[position]).max() < 1e-4
        if layer >= 2:
            ratio = reference.ratio
            pooling = by_token(out.acts["entry_tokens", layer])
            assert sorted(pooling) == sorted(reference.pooling)
            for position, own in pooling.items():
                assert (own[:, 0] == position // ratio).all()
                assert own[:, 1].tolist() == list(range(position + 1 - len(own), position + 1))
                assert np.abs(own[:, 2:] - reference.pooling[position]).max() < 1e-4
    assert [layer for hook, layer in out.acts if hook == "index_blocks"] == [2, 4]
    assert {layer for hook, layer in out.acts if hook == "entry_tokens"} == {2, 3, 4, 5}


def test_looking_changes_no_bit_and_edits_without_effect_change_none(checkpoint):
    capture = Capture({**dict.fromkeys(RAGGED, "all"), "attn_head_out": "all"}, positions="all")
    with birkhoff.load(checkpoint, prefix_cache=False) as engine:
        plain = engine.generate(LONG, **GREEDY)
        looked = engine.generate(LONG, capture=capture, **GREEDY)
        idle = engine.generate(LONG, steer=[AttentionEdit("all", sink=1.0)], **GREEDY)
        assert (
            engine.generate([LONG, LONG], capture=[None, capture], **GREEDY)[0].token_ids == plain.token_ids
        )
    assert plain.logprobs == looked.logprobs == idle.logprobs


def test_before_and_after_the_edits_are_told_apart(engine):
    steer = [AttentionEdit([2], mask=[3], where=[5])]
    shares = {}
    for point in ("before", "after"):
        capture = Capture({"attn_weights": [2]}, positions=[5], capture_point=point)
        rows = engine.generate(LONG, steer=steer, capture=capture, **GREEDY).acts["attn_weights", 2].tensor
        shares[point] = rows[rows[:, 0] == 3][0, 2:]
    assert (shares["before"] > 0).all() and (shares["after"] == 0).all()


def test_rows_and_edits_do_not_depend_on_the_batch_or_on_chunks(checkpoint, engine):
    """Alone, beside other requests, and with a prompt in small chunks."""
    steer = [EDITS["force and forbid"][0], EDITS["mask by position"][0], EDITS["entries removed"][0]]
    capture = Capture(dict.fromkeys(RAGGED, "all"), positions="all", capture_point="after")
    alone = engine.generate(LONG, steer=steer, capture=capture, **GREEDY)
    batch = engine.generate(
        [LONG[:70], LONG, LONG[:33]], steer=[None, steer, None], capture=[None, capture, None], **GREEDY
    )
    with birkhoff.load(checkpoint, max_batch_tokens=37, prefix_cache=False) as other:
        chunked = other.generate(LONG, steer=steer, capture=capture, **GREEDY)
    for out in (batch[1], chunked):
        assert out.token_ids == alone.token_ids
        assert set(out.acts) == set(alone.acts)
        for key, rows in alone.acts.items():
            assert out.acts[key].positions == rows.positions, key
            assert (out.acts[key].tensor - rows.tensor).abs().max() < 1e-5, key
    plain = engine.generate([LONG[:70], LONG[:33]], **GREEDY)
    assert [out.token_ids for out in (batch[0], batch[2])] == [out.token_ids for out in plain]


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded"])
def test_ragged_rows_are_the_same_in_files(checkpoint, tmp_path, layout):
    spec = {"hooks": dict.fromkeys(RAGGED, "all"), "positions": "all"}
    with birkhoff.load(checkpoint, capture_root=tmp_path) as engine:
        expected = engine.generate(LONG, capture=Capture(**spec), **GREEDY).acts
        consumers = {"filesystem": {"request_id": "one", "tag": "ragged", "layout": layout, **spec}}
        out = engine.generate(LONG, capture=consumers, **GREEDY)
        assert out.capture_results["filesystem"].status == "ok"
    shards = read_sharded(tmp_path / "ragged") if layout == "sharded" else {}
    entries = shards["one"] if shards else read_request(tmp_path / "ragged" / "one")
    assert set(entries) == set(expected)
    for key, rows in expected.items():
        assert np.array_equal(entries[key].values(), rows.tensor.numpy())
        assert list(entries[key].positions) == list(rows.positions)
        batches = iter_rows(tmp_path / "ragged", *key, batch=64)
        assert np.array_equal(np.concatenate([batch.values() for batch in batches]), rows.tensor.numpy())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reduce": "mean"}, "memory.reduce.*attn_weights"),
        ({"dtype": "bf16"}, "memory.dtype.*positions"),
        ({"streams": [0]}, "memory.streams"),
        ({"project": "p"}, "memory.project"),
        ({"hooks": {"index_scores": [3]}}, r"index_scores\[3\].*2, 4"),
        ({"hooks": {"entry_tokens": [0, 2]}}, r"entry_tokens\[0\].*2, 3, 4, 5"),
    ],
)
def test_captures_that_ragged_rows_cannot_have_are_refused(engine, fields, named):
    spec = {"hooks": {"attn_weights": [2]}, **fields}
    with pytest.raises(CaptureValidationError, match=named):
        engine.generate(LONG, capture={"memory": spec}, **GREEDY)
    with pytest.raises(SiteError, match="Capture it"):
        engine.trace(LONG, ["attn_weights"])
    assert not {hook for hook, _ in engine.trace(LONG[:9])} & set(RAGGED)


def test_the_estimate_bounds_the_rows_of_every_ragged_hook(engine):
    for hook in RAGGED:
        capture = Capture({hook: "all"}, positions="all")
        estimate = engine.estimate(capture, LONG, max_tokens=5)["memory"]
        rows = sum(len(each) for each in engine.generate(LONG, capture=capture, **GREEDY).acts.values())
        assert 0 < rows <= estimate.rows and not estimate.exact


def test_a_text_in_the_prompt_selects_the_tokens_that_overlap_it():
    with birkhoff.load("nano") as engine:
        ids = engine.prompt_ids("The little fox saw the other fox.")
        ends = np.cumsum([len(engine.tokenizer.piece(token)) for token in ids]).tolist()
        text = b"".join(engine.tokenizer.piece(token) for token in ids)
        occurrences = [text.find(b" fox"), text.rfind(b" fox")]
        foxes = [
            index
            for index, (start, end) in enumerate(zip([0, *ends], ends))
            if any(start < at + 4 and at < end for at in occurrences)
        ]
        assert 2 <= len(foxes) < len(ids) - 2
        by_text = engine.logits(ids, steer=[AttentionEdit("all", mask={"text": " fox"})])
        by_position = engine.logits(ids, steer=[AttentionEdit("all", mask=foxes)])
        assert torch.equal(by_text, by_position)
        assert (by_text - engine.logits(ids)).abs().max() > 1e-3
        with pytest.raises(SteeringError, match=r"mask.*does not occur"):
            engine.logits(ids, steer=[AttentionEdit("all", mask={"text": "wolf"})])


def test_a_feed_has_the_rows_of_one_ragged_hook_at_one_layer(engine):
    texts = [LONG[:40], LONG[:9], LONG[:3]]
    capture = Capture({"index_blocks": [2]}, positions="all")
    batches = list(engine.stream_acts(texts, capture, batch_rows=50))
    expected = [
        engine.generate(text, max_tokens=1, capture=capture).acts["index_blocks", 2] for text in texts
    ]
    assert torch.equal(
        torch.cat([batch["index_blocks", 2] for batch in batches]),
        torch.cat([rows.tensor for rows in expected]),
    )
    assert torch.cat([batch.texts for batch in batches]).bincount().tolist() == [
        len(expected[0]),
        len(expected[1]),
    ]
    with pytest.raises(OptionError, match="index_blocks"):
        list(engine.stream_acts(texts, Capture({"index_blocks": "all"})))
