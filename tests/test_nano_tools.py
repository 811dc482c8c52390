"""The vectors and the SAE shipped with nano: packaged, small, and with the documented effects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import birkhoff
from birkhoff import Add, SaeSet
from birkhoff.analysis.sae_quality import loss_recovered, row_quality
from birkhoff.analysis.steering_effect import compare_answers, score_answers
from birkhoff.embedded import shipped_dictionary, shipped_vectors
from birkhoff.sae.dictionary import Sae
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.steering.word_probe import WordProbe
from tests.oracle import build_oracle
from tests.sizes import scaled
from training.streams import wake

FOLDER = Path(birkhoff.__file__).parent / "models" / "nano"
LOSS_BOUND = 1.0  # nats per token
MARKS = (0, 1, 4055, 4056, 4074)  # special tokens, which the SAE was not trained on
ASK = "Write a story about a lost key."


@pytest.fixture(scope="module")
def nano():
    with birkhoff.load("nano", max_requests=16) as engine:
        yield engine


def prompt(engine, text: str = ASK) -> list[int]:
    return engine.encode_chat([{"role": "user", "content": text}])


def test_vectors_are_registered_with_documented_effects(nano):
    files = shipped_vectors("nano")
    assert len(files) >= 6 and set(files) == set(nano.modules)
    for name, path in files.items():
        vector = SteeringVector.load(path)
        assert vector.model == "nano" and vector.note and nano.modules[name] == vector, name
        effect = vector.effect
        assert effect["requests"] * effect["seeds"] >= 100
        assert effect["steered"]["moved"] >= 0.8, name
        assert effect["steered"]["loss"] - effect["baseline"]["loss"] < LOSS_BOUND, name
        assert effect["random"]["moved"] < effect["steered"]["moved"] - 0.2, name
        assert effect["opposite"]["score"] < effect["steered"]["score"], name
    assert sum(path.stat().st_size for path in files.values()) < 1e6


def test_a_vector_has_its_documented_effect(nano):
    """Fewer requests than in the documented measurement, scored by quotation marks only."""
    requests, quotes = (
        [ASK, "Tell me a story about a train.", "Write a story about the rain."],
        WordProbe.of_words(['"']),
    )
    seeds = scaled(5, 2)
    plain = score_answers(nano, requests, seeds, quotes.score, max_tokens=40)
    steered = score_answers(nano, requests, seeds, quotes.score, [Add("dialogue")], max_tokens=40)
    result, base = compare_answers("steered", steered, plain), compare_answers("baseline", plain, plain)
    assert result.score > base.score and result.moved > 0.5 and result.loss < base.loss + 1.5


def test_transformers_with_a_plain_hook_writes_the_same_steered_text(nano):
    """Token for token against another implementation with the same vector added to the input of the same layer."""
    name = "spooky"
    vector = nano.modules[name]
    (layer,) = vector.layers
    ids, count = prompt(nano), scaled(60, 24)
    ours = nano.generate(ids, max_tokens=count, temperature=0, ignore_eos=True, steer=[Add(name)]).token_ids
    plain = nano.generate(ids, max_tokens=count, temperature=0, ignore_eos=True).token_ids
    assert ours != plain
    with birkhoff.load("nano", weights="dense", max_requests=1) as dense:
        theirs = build_oracle(dense.model)
    push = vector.at(layer).tensor().view(nano.config.hc_mult, -1)
    block = theirs.model.layers[layer]
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + push, *args[1:]), kwargs), with_kwargs=True
    )
    written = list(ids)
    try:
        with torch.no_grad():
            for _ in range(count):
                written.append(int(theirs(torch.tensor([written])).logits[0, -1].argmax()))
    finally:
        handle.remove()
    assert written[len(ids) :] == ours


def test_an_edit_propagates_after_its_layer_and_little_from_stream_0(nano):
    ids = prompt(nano) + nano.generate(prompt(nano), max_tokens=24, temperature=0).token_ids
    vector = nano.modules["spooky"]
    (layer,) = vector.layers
    result = wake(nano, [ids], vector)
    assert set(result) == {"all streams", "stream 0", "stream 1", "stream 2", "stream 3"}
    for name, moved in result.items():
        assert moved.shape == (nano.config.num_hidden_layers + 1, 4), name
        assert not moved[: layer + 1].any() and (moved[layer + 1 :] > 0).all(), name
    assert result["stream 0"][-1].mean() < 0.5 * result["stream 1"][-1].mean()


def test_the_sae_is_small_and_labelled():
    folder = shipped_dictionary("nano")
    assert folder is not None
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert sum(sizes) <= 10_000_000 and max(sizes) < 16 * 2**20
    sae = Sae.load(folder)
    assert set(sae.labels) == set(sae.descriptions) == set(range(sae.d_sae))
    for index, entry in sae.descriptions.items():
        assert entry.label == sae.labels[index] and entry.contexts and len(entry.promotes) >= 5
        assert 0 < entry.density <= 1 and entry.largest > 0


def test_the_sae_recovers_the_loss(nano):
    """On text generated in the test: less than in the documented measurement, hence wider bounds."""
    sae = Sae.load(shipped_dictionary("nano"))
    ids = prompt(nano)
    texts = [
        ids + nano.generate(ids, max_tokens=80, temperature=0.8, top_k=40, seed=s).token_ids for s in (1, 2)
    ]
    result = loss_recovered(nano, sae, texts, MARKS)
    assert result.recovered > 0.93 and result.added < 0.5
    quality, _ = row_quality(nano, sae, texts, skip=len(ids))
    assert quality.explained_variance > 0.8


def test_the_documented_sae_quality_meets_its_thresholds():
    """Documented values, measured on held-out records that are not shipped."""
    card = Sae.load(shipped_dictionary("nano")).metadata
    quality, loss = card["measured"]["quality"], card["measured"]["loss"]
    assert quality["rows"] > 5_000 and loss["tokens"] > 5_000
    assert (
        quality["explained_variance"] >= 0.86 and quality["dead_share"] <= 0.05 and loss["recovered"] >= 0.95
    )
    proved = [clamp for clamp in card["clamps"] if clamp["moved"] >= 8]
    assert len(proved) >= 5 and all(clamp["seeds"] == 10 for clamp in proved)
    for clamp in proved:
        assert clamp["random_moved"] / clamp["random_seeds"] <= clamp["moved"] / clamp["seeds"] - 0.4, clamp[
            "theme"
        ]


def test_a_raised_feature_steers_to_its_theme(nano):
    """The most effective documented clamp on fewer seeds, with the documented random feature as control."""
    sae = Sae.load(shipped_dictionary("nano"))
    clamp, seeds = sae.metadata["clamps"][0], scaled(10, 4)
    feature, probe = clamp["feature"], WordProbe.of_words(clamp["words"].split())
    assert sae.labels[feature] == clamp["theme"]
    amount, ids = clamp["strength"] * float(sae.x_max[feature]), prompt(nano, "Tell me a story.")
    counts = []
    with nano.attach("features", "nano"):
        for raised in (feature, clamp["random"][0]):
            steer = [SaeSet("features", {raised: amount}, kind="additive")]
            outputs = nano.generate(
                ids, n=seeds, seed=11, max_tokens=50, temperature=0.8, top_k=40, steer=steer
            )
            counts.append(sum(probe.score(output.text) > 0 for output in outputs))
    assert counts[0] > counts[1] and counts[0] >= seeds / 2


def test_a_feature_is_clamped_by_its_label(nano):
    sae = Sae.load(shipped_dictionary("nano"))
    counted: dict[str, int] = {}
    for label in sae.labels.values():
        counted[label] = counted.get(label, 0) + 1
    label = next(label for label, count in counted.items() if count == 1)
    with nano.attach("features", "nano"):
        ids = prompt(nano)
        clamp = [SaeSet("features", {label: {"x_max": 1.0}})]
        steered = nano.generate(ids, max_tokens=4, temperature=0, steer=clamp)
        assert steered.interp["rows_steered"] > len(ids) - 1
        top = nano.features(ids, "features", k=4)
        assert len(top) == len(ids) and all(len(row) <= 4 for row in top)
