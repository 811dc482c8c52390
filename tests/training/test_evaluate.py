"""Evaluation without padding gives the same values, and the card states the record's values."""

from __future__ import annotations

import json

import pytest
import torch

from tests.training.tiny import SETTINGS, VOCAB, bench, randomise, tiny_config
from training import card
from training.evaluate import _measure_trimmed, written
from training.forward import Forward
from training.loop import Run, Stop
from training.measure import held_out, measure
from training.parameters import Store
from training.sampling import Ask
from training.train import finish


@pytest.mark.parametrize("length", [64, 256])
def test_padding_is_left_out_and_not_missed(data, length):
    _, corpus, tokenizer = data
    config = tiny_config(vocab_size=VOCAB)
    store = Store(config)
    randomise(store, 0)
    weights = store.named(store.leaves(torch.float32))
    forward = Forward(config, length, "cpu")
    for name, records in corpus.held_out.items():
        rows = held_out(name, records, tokenizer, length).rows
        with torch.no_grad():
            whole = measure(forward, weights, rows, 2, 4, torch.float32)
            trimmed = _measure_trimmed(forward, weights, rows, 2, 4)
        for wanted, result in zip(whole, trimmed, strict=True):
            assert (result.tokens, result.mtp_tokens) == (wanted.tokens, wanted.mtp_tokens) and wanted.tokens
            assert result.nats == pytest.approx(wanted.nats, abs=1e-3) and result.accepted == wanted.accepted


def test_the_card_says_what_was_measured(data, tmp_path):
    folder, _, _ = data
    tools = bench(data, tmp_path)
    outcome = Run(tools, SETTINGS, Stop(steps=2)).train(marks=1)
    out = tmp_path / "out"
    record = finish(tools, outcome, out, folder / "tokenizer")
    asks = [Ask("Hello!"), Ask("Tell me a story.", 0.8, 3)]
    result = {
        "cut": record["stored"],
        "alive": record["alive"],
        "exact": {"records": 7, "worst_difference": 2e-6},
        "samples": written(out, asks, 9),
    }
    (tmp_path / "found.json").write_text(json.dumps(result))
    extra = ["--record", str(out / "training.json"), "--evaluation", str(tmp_path / "found.json")]
    assert card.main([str(out), *extra]) == 0
    text = (out / "MODEL_CARD.md").read_text(encoding="utf-8")
    for name in ("stories", "tinystories"):
        after, before = (record[key]["files"][name] for key in ("stored", "unrounded"))
        assert f"| {name} | {after['nats_per_token']:.3f} | {after['bits_per_byte']:.3f} |" in text
        assert f"| {before['nats_per_token']:.3f} | {before['bits_per_byte']:.3f} |" in text
    assert "On 7 records" in text and "2e-06" in text and "Built with Llama." in text and "{" not in text
    assert "**Tell me a story.** (temperature 0.8, seed 3)" in text
    assert written(out, asks, 9) == result["samples"] and result["samples"][1]["tokens"] <= 9


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, capsys):
    assert card.main([str(tmp_path), "--record", "nothing.json"]) == 1
    assert capsys.readouterr().err.strip()
