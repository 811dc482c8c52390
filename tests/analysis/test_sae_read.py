"""Features read from stored rows: the numbers of a plain computation, and the descriptions of running the texts."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Capture
from birkhoff.analysis.harvest import harvest
from birkhoff.analysis.sae_features import explain
from birkhoff.analysis.sae_read import read_features
from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_sharded
from birkhoff.capture.store.request_reader import RequestReader
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureFileError, SaeError, SaeFileError
from birkhoff.sae.cofiring import CoFiring
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_index import FeatureIndex
from birkhoff.sae.features import FeatureBook, FeatureEntry
from tests.cli.conftest import birkhoff as command
from tests.server.conftest import serving

WORDS = "fox sea boat sun stone river moon hill"
TEXTS = [
    f"Once upon a time there was a {WORDS.split()[n % 8]} that saw a {WORDS.split()[n * 3 % 8]}. "
    * (1 + n % 3)
    for n in range(16)
]
HOOK, LAYER = "mhc_streams_pre_attn", 5


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano", batch_invariant=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def run(engine, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    harvest(engine, TEXTS, Capture({HOOK: [LAYER]}), out)
    return out


@pytest.fixture(scope="module")
def sae():
    return Sae.load("nano")


@pytest.fixture(scope="module")
def found(engine, sae, run):
    return read_features(sae, run, engine.tokenizer.decode)


@pytest.fixture(scope="module")
def activations(sae, run):
    """Plain computation: features of every token but the first of each text, by text."""
    return {
        name: sae.encode(torch.from_numpy(entries[HOOK, LAYER].values()[1:]).flatten(1))
        for name, entries in read_sharded(run / "harvest").items()
    }


def test_numbers_are_those_of_a_plain_computation(found, activations):
    every = torch.cat(list(activations.values()))
    fired = (every > 0).float().mean(0)
    assert found.rows == len(every) and found.texts == len(TEXTS) and found.exact_cofiring
    assert set(found.features) == set(every.amax(0).gt(0).nonzero().squeeze(1).tolist())
    active = (every > 0).double().numpy()
    for feature, entry in found.features.items():
        assert entry.density == pytest.approx(float(fired[feature]), abs=1e-7)
        assert entry.largest == pytest.approx(float(every[:, feature].max()), rel=1e-5)
        best = sorted((float(rows[:, feature].max()) for rows in activations.values()), reverse=True)
        assert [one["value"] for one in entry.contexts] == pytest.approx(
            [value for value in best[:8] if value > 0], abs=2e-3
        )
        for one in entry.contexts + entry.examples:
            value = activations[one["request"]][one["position"] - 1, feature]
            assert one["value"] == pytest.approx(float(value), abs=2e-3)
    for feature in list(found.features)[::40]:
        for partner in found.features[feature].cofires:
            both = active[:, feature] * active[:, partner["feature"]]
            assert partner["tokens"] == both.sum() and partner["feature"] != feature
            expected = np.corrcoef(active[:, feature], active[:, partner["feature"]])[0, 1]
            assert partner["correlation"] == pytest.approx(expected, abs=1e-3)
        correlations = [partner["correlation"] for partner in found.features[feature].cofires]
        assert correlations == sorted(correlations, reverse=True)


def test_descriptions_are_those_of_running_the_texts(engine, sae, found, run):
    """The same code describes features of texts that are run; only the order of the texts differs."""
    with RequestReader(run / "harvest", HOOK, LAYER) as reader:
        order = [int(name) for name, _ in reader.labels()]
    some = list(found.features)[::12]
    described = explain(engine, sae, [engine.prompt_ids(TEXTS[number]) for number in order], some)
    assert set(described) == set(some)
    for feature, entry in described.items():
        ours = found.features[feature]
        assert (ours.label, ours.made, ours.rule) == (entry.label, entry.made, entry.rule)
        assert ours.density == pytest.approx(entry.density, abs=1e-6)
        assert [one["text"] for one in ours.contexts[:1]] == [one["text"] for one in entry.contexts[:1]]


def test_results_are_parquet_that_pyarrow_and_the_index_read(found, tmp_path):
    (tmp_path / "features.json").write_text("{}")
    path = found.save(tmp_path)
    assert path.name == "features.parquet" and not (tmp_path / "features.json").exists()
    table = pyarrow.parquet.read_table(path)
    assert table["feature"].to_pylist() == list(found.features)
    assert table["density"].to_pylist() == pytest.approx(
        [entry.density for entry in found.features.values()], abs=1e-6
    )
    again = FeatureIndex.read(tmp_path)
    assert {number: entry.to_json() for number, entry in again.items()} == {
        number: entry.to_json() for number, entry in found.features.items()
    }
    assert again.search("sea")[0].entry.feature == found.features.search("sea")[0].entry.feature
    assert json.loads((tmp_path / "read.json").read_text())["rows"] == found.rows
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SaeFileError, match="cannot be read as descriptions"):
        FeatureIndex.read(tmp_path)


entries = st.builds(
    FeatureEntry,
    feature=st.integers(0, 10**6),
    label=st.text(max_size=8),
    density=st.floats(0, 1),
    largest=st.floats(0, 100),
    contexts=st.lists(
        st.fixed_dictionaries({"text": st.text(max_size=8), "value": st.floats(-9, 9)}), max_size=3
    ),
    promotes=st.lists(st.text(max_size=4), max_size=3),
    suppresses=st.lists(st.text(max_size=4), max_size=3),
    made=st.sampled_from(["rule", "peaks", "given"]),
    rule=st.none() | st.dictionaries(st.just("at"), st.lists(st.text(max_size=3), max_size=2), min_size=1),
    score=st.none() | st.floats(-1, 1),
    scored_rows=st.integers(0, 10**9),
    cofires=st.lists(
        st.fixed_dictionaries(
            {"feature": st.integers(0, 9), "tokens": st.integers(0, 9), "correlation": st.floats(0, 1)}
        ),
        max_size=2,
    ),
)


@settings(max_examples=30, deadline=None)
@given(listed=st.lists(entries, max_size=5))
def test_any_descriptions_survive_the_table(tmp_path_factory, listed):
    folder = tmp_path_factory.mktemp("table")
    index = FeatureIndex({entry.feature: entry for entry in listed})
    index.save_table(folder)
    assert {n: entry.to_json() for n, entry in FeatureIndex.read(folder).items()} == {
        n: entry.to_json() for n, entry in index.items()
    }


def test_estimated_pairs_are_near_the_counted_ones():
    generator = torch.Generator().manual_seed(1)
    base = torch.rand(4000, 40, generator=generator) < 0.1
    follower = base[:, :20] & (torch.rand(4000, 20, generator=generator) < 0.7)
    active = torch.cat([base, follower], 1).float()
    exact, estimated = CoFiring(60), CoFiring(60, max_bytes=100)
    for part in active.split(300):
        exact.add(part)
        estimated.add(part)
    assert exact.exact and not estimated.exact
    counted, guessed = exact.partners(3), estimated.partners(3)
    for feature in range(20):
        (partner, tokens, correlation), *_ = counted[feature]
        assert partner == feature + 40 and tokens == int((active[:, feature] * active[:, partner]).sum())
        assert guessed[feature][0][0] == partner
        assert guessed[feature][0][2] == pytest.approx(correlation, abs=0.15)
    assert all(not guessed[feature] for feature in range(20, 40))  # only noise is left, and left out


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 2]), st.integers(0, 99))
def test_a_long_text_in_parts_is_described_as_at_once(tokens, streams, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(12, 6, generator=generator)
    sae = Sae(matrix, None, matrix, hook=HOOK, layer=LAYER)
    whole, parts = FeatureBook(sae, 2, 2), FeatureBook(sae, 2, 2, part=60)
    for _ in range(3):
        rows = torch.randn(tokens * streams, 6, generator=generator)
        seen: list[tuple[int, torch.Tensor]] = []
        whole.add(rows, 1, streams)
        parts.add(rows, 1, streams, lambda *part, seen=seen: seen.append(part))
        assert [first for first, _ in seen] == list(range(1, tokens + 1, 60 // (12 * streams)))
        expected = sae.encode(rows).view(tokens, streams, 12).amax(1)
        assert torch.allclose(torch.cat([part for _, part in seen]), expected, atol=1e-5)
    assert torch.equal(whole.density, parts.density) and whole.rows == parts.rows
    for feature in range(12):
        for one, other in ((whole.peaks, parts.peaks), (whole.drawn, parts.drawn)):
            assert [(p.text, p.position) for p in one(feature)] == [
                (p.text, p.position) for p in other(feature)
            ]


def test_requests_in_several_records_are_joined_in_order(tmp_path):
    """Three requests write in turns into two files at a time; small files make every request span several."""
    options = FileOptions(tmp_path, default_layout="sharded", num_shards=1, shard_max_bytes=64, fsync=False)
    with CaptureWriter(options) as files:
        for key in "abc":
            files.begin(CaptureRequest(key, key, "tag"))
        for first in range(0, 12, 2):
            for number, key in enumerate("abc"):
                rows = np.full((2, 3), 100 * number + first, np.float32)
                rows[1] += 1
                labels = [first, first + 1]
                files.append(
                    Chunk(key, "tag", HOOK, 0, rows, "float32", (3,), labels, labels, "pp", row_offset=first)
                )
        for key in "abc":
            files.finish(CaptureFinish(key))
    with RequestReader(tmp_path / "tag", HOOK, 0, open_files=1) as reader:
        assert len(reader) == 3 and reader.numbers() == {"a": 0, "b": 1, "c": 2}
        for number, (name, entry) in enumerate(reader.labels()):
            assert (name, entry.positions) == ("abc"[number], list(range(12)))
            read = reader.read(number)
            assert read.token_ids == entry.token_ids == list(range(12))
            assert read.array[:, 0].tolist() == [100 * number + row for row in range(12)]
    assert len(list((tmp_path / "tag").glob("*.bin"))) > 3


def test_what_does_not_fit_is_refused(sae, run, engine, tmp_path):
    decode = engine.tokenizer.decode
    with pytest.raises(CaptureFileError, match=r"no finished capture of 'mhc_streams_pre_attn'\[3\]"):
        read_features(sae.at(HOOK, 3), run, decode)
    with pytest.raises(SaeError, match="1536 wide in the view 'flat'"):
        narrow = Sae(torch.zeros(8, 384), None, torch.zeros(8, 384), hook=HOOK, layer=LAYER, view="flat")
        read_features(narrow, run, decode)
    with pytest.raises(SaeError, match="where its rows come from"):
        read_features(Sae(torch.zeros(8, 384), None, torch.zeros(8, 384)), run, decode)


def test_the_command_writes_where_search_and_the_server_read(birkhoff_here, sae, run, tmp_path):
    own = tmp_path / "own"
    sae.save(own)
    done = command("sae", "read", own, "--store", run, "--limit", "10", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["texts"] == 10 and report["path"] == str(own / "features.parquet")
    shown = birkhoff_here("sae", "search", own, "sea", "--json")
    assert shown.returncode == 0 and json.loads(shown.stdout), shown.stderr
    described = FeatureIndex.read(own)
    number = next(feature for feature, entry in described.items() if entry.cofires)
    with serving(tmp_path / "served", "--sae", f"own={own}") as server:
        dashboard = server.get(
            f"/v1/interp/features/own/{number}"
        ).json()  # what the page's feature view shows
        found = server.get("/v1/interp/features/own?q=sea").json()
    assert dashboard["label"] == described[number].label
    assert dashboard["contexts"] == described[number].contexts and dashboard["contexts"][0]["request"]
    first = dashboard["cofires"][0]
    assert first["label"] == described[first["feature"]].label and found["described"] == len(described)
    refused = birkhoff_here("sae", "read", "nano", "--store", run)
    assert refused.returncode == 2 and b"--out DIR" in refused.stderr
