"""Streams of activation rows: shuffled by seed, resumed without a difference, equal to rows of single traces."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Capture
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError

SPEC = Capture({"mlp_out": [2], "mhc_streams_pre_attn": [1]})
TEXTS = [f"text number {n} " * (n % 4 + 1) for n in range(14)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Not batch-invariant: the bits of a row depend on what else is in its step, unless that is always the same."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, max_requests=3, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def traced(engine):
    """The rows of every text computed by itself, and their labels."""
    acts = [engine.generate(text, max_tokens=1, temperature=0, capture=SPEC).acts for text in TEXTS]
    labels = [(n, position) for n, each in enumerate(acts) for position in each["mlp_out", 2].positions]
    return {key: torch.cat([each[key].tensor for each in acts]) for key in acts[0]}, labels


def labels_of(batches) -> list[tuple[int, int]]:
    return [
        pair for batch in batches for pair in zip(batch.texts.tolist(), batch.positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("shuffle_rows", [0, 20, 70, 100_000])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_every_row_comes_once_with_its_label(engine, traced, shuffle_rows, device):
    rows, labels = traced
    batches = list(engine.stream_acts(TEXTS, SPEC, 20, shuffle_rows=shuffle_rows, device=device))
    assert all(len(batch) == 20 for batch in batches[:-1])
    seen = labels_of(batches)
    assert sorted(seen) == labels and (seen != labels) == bool(shuffle_rows)
    where = torch.tensor([labels.index(pair) for pair in seen])
    for key, tensor in rows.items():
        ours = torch.cat([batch[key] for batch in batches])
        assert torch.allclose(ours, tensor[where], atol=1e-5), key
    ids = [engine.prompt_ids(text) for text in TEXTS]
    tokens = torch.cat([batch.token_ids for batch in batches]).tolist()
    assert tokens == [ids[text][position] for text, position in seen]
    if 0 < shuffle_rows < len(labels):  # rows move within their buffer only
        size = -(-shuffle_rows // 20) * 20
        assert all(labels.index(pair) // size == at // size for at, pair in enumerate(seen))


def test_the_seed_determines_the_order(engine):
    orders = [
        labels_of(engine.stream_acts(TEXTS, SPEC, 20, shuffle_rows=60, seed=seed)) for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("shuffle_rows", [40, 100])
def test_a_resumed_stream_gives_the_same_bits(engine, shuffle_rows):
    stream = engine.stream_acts(iter(TEXTS), SPEC, 20, shuffle_rows=shuffle_rows, seed=5)
    states = [stream.state()]
    batches = []
    for batch in stream:
        batches.append(batch)
        states.append(stream.state())
    assert len(batches) > 5
    for count in (0, 1, 3, 4, len(batches) - 1, len(batches)):
        resumed = engine.stream_acts(
            iter(TEXTS), SPEC, 20, shuffle_rows=shuffle_rows, seed=5, resume=states[count]
        )
        rest = list(resumed)
        assert len(rest) == len(batches) - count
        for ours, theirs in zip(rest, batches[count:]):
            assert torch.equal(ours.texts, theirs.texts) and torch.equal(ours.positions, theirs.positions)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs.sites)


def test_a_resumed_stream_in_order_goes_on_with_the_next_row(engine, traced):
    _, labels = traced
    stream = engine.stream_acts(TEXTS, SPEC, 20)
    for _ in range(3):
        next(stream)
    state = stream.state()
    stream.close()
    resumed = labels_of(engine.stream_acts(TEXTS, SPEC, 20, resume=state))
    assert resumed == labels[60:]


def test_rows_in_a_coarse_dtype_keep_their_scales(engine):
    spec = Capture({"mlp_out": [2]}, dtype="fp8_e4m3")
    for batch in engine.stream_acts(TEXTS[:4], spec, 16, shuffle_rows=64):
        rows = batch.sites["mlp_out", 2]
        assert rows.tensor.dtype == torch.float8_e4m3fn and rows.scale.shape == (len(batch),)


def test_a_projection_is_applied_before_rows_are_collected(engine, traced):
    rows, labels = traced
    width = rows["mlp_out", 2].shape[1]
    engine.projections["probe"] = torch.randn(width, 3, generator=torch.Generator().manual_seed(0))
    spec = Capture({"mlp_out": [2]}, project="probe")
    (batch,) = engine.stream_acts(TEXTS, spec, 10_000)
    expected = rows["mlp_out", 2].float() @ engine.projections["probe"]
    assert batch["mlp_out", 2].shape == (len(labels), 3)
    assert torch.allclose(batch["mlp_out", 2].float(), expected, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "nowhere"}, "nowhere"),
        ({"shuffle_rows": -1}, "shuffle_rows is -1"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"resume": {"text": 1}}, "expected the state of a stream"),
        ({"resume": {"buffer": 0, "text": -1, "row": 0, "batches": 0}}, "resume.text is -1"),
    ],
)
def test_bad_options_are_refused(engine, options, words):
    with pytest.raises(OptionError, match=words):
        engine.stream_acts(TEXTS, SPEC, **options)
