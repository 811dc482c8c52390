"""A complete run on a CPU: the loss falls, runs repeat and resume, the shipped weights are those measured."""

from __future__ import annotations

import json
import math

import pytest
import torch

from birkhoff.errors import OptionError
from birkhoff.weights import inspect_checkpoint
from tests.sizes import scaled
from tests.training.tiny import SETTINGS, VOCAB, bench, small_config
from training import evaluate, train, watch
from training.export import export, load_named
from training.loop import Run, Stop, probe
from training.measure import measure, report
from training.parameters import Store
from training.settings import Settings, moment
from training.step import prepare


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    run = Run(bench(data, work), SETTINGS, Stop(steps=scaled(300, 60)))
    before = run.measure(False)["both"]["nats_per_token"]
    return work, before, run.train(marks=2, log_every=10)


def test_the_loss_falls_and_the_gates_live(finished):
    _, before, outcome = finished
    assert before == pytest.approx(math.log(VOCAB), abs=0.3)  # untrained: uniform predictions
    assert outcome.measured["both"]["nats_per_token"] < before - 1.5
    assert outcome.measured["both"]["mtp_nats_per_token"] < before - 1
    for layer in outcome.alive:
        assert 0.05 < layer["attn_write"] < 2 and 0.05 < layer["ffn_write"] < 2
        assert layer["stream_mean_share"] < 0.999
        assert layer["attn_from_identity"] > 0.02 and layer["attn_from_uniform"] > 0.02


def test_the_log_tells_the_story(finished):
    work, _, outcome = finished
    lines = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert {"train", "held-out", "rounding", "alive", "finished"} <= set(kinds)
    trained = [line for line in lines if line["kind"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"] and all(line["tokens_per_second"] > 0 for line in trained)
    assert [line["part"] for line in trained][-1] == "core" and trained[0]["part"] == "mixed"
    assert all(isinstance(watch.brief(line), str) for line in lines)
    assert outcome.measured["rounded"] is True


def test_what_ships_is_what_was_measured(finished, data, tmp_path):
    _, _, outcome = finished
    folder, _, _ = data
    out = tmp_path / "nano"
    files = export(out, small_config(), outcome.tensors, folder / "tokenizer", shard_bytes=200_000)
    assert len([file for file in files if file.suffix == ".safetensors"]) >= 3
    assert not inspect_checkpoint(out).problems
    config, tensors = load_named(out)
    store = Store(config)
    store.load(outcome.tensors)
    rounded = store.named(store.leaves(torch.float32, rounded=True))
    assert all(torch.equal(tensors[name], weight.detach()) for name, weight in rounded.items())
    store.load(tensors)
    again = bench(data, tmp_path)
    weights = store.named(store.leaves(torch.float32))
    scores = [measure(again.forward, weights, part.rows, 2, 4, torch.float32) for part in again.held_out]
    result = report(again.held_out, scores)["both"]["nats_per_token"]
    assert result == pytest.approx(outcome.measured["both"]["nats_per_token"], abs=1e-5)


def test_a_run_repeats_and_resumes_exactly(data, tmp_path):
    settings = Settings.parse("dropout=0,dropout_late=0", SETTINGS)  # dropout draws from the global generator
    whole = Run(bench(data, tmp_path / "a"), settings, Stop(steps=12))
    whole.train(marks=1)
    first = Run(bench(data, tmp_path / "b"), settings, Stop(steps=12))
    for _ in range(5):
        part = first.bench.feed.batch("mixed", settings.batch)
        first.step.load(*part, moment(settings, first.done, first.done / 12))
        first.step.run()
        first.done += 1
    first.save()
    second = Run(bench(data, tmp_path / "b"), settings, Stop(steps=12))
    second.resume(tmp_path / "b" / "state.pt")
    assert second.done == 5
    second.train(marks=1)
    ours, theirs = whole.store.export(), second.store.export()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(OptionError, match="other settings"):
        Run(bench(data, tmp_path / "b"), SETTINGS, Stop(steps=12)).resume(tmp_path / "b" / "state.pt")


def test_one_batch_can_be_learned_by_heart(data, tmp_path):
    settings = Settings.parse("dropout=0,dropout_late=0,batch=2,weight_decay=0", SETTINGS)
    run = Run(bench(data, tmp_path, settings), settings, Stop(steps=1))
    ids, roles = run.bench.feed.batch("core", 2)
    for step in range(scaled(150, 80)):
        run.step.load(ids, roles, moment(settings, step, 0.3))
        run.step.run()
        if step % 10 == 9:
            metrics = run.step.read()
    assert metrics["loss"] < 0.3 and metrics["mtp_loss"] < 0.5 and metrics["index_loss"] < 0.5


def test_balancing_moves_biases_towards_even_loads(data, tmp_path):
    run = Run(bench(data, tmp_path), SETTINGS, Stop(steps=1))
    ids, roles = run.bench.feed.batch("core", SETTINGS.batch)
    run.step.load(ids, roles, moment(SETTINGS, 0, 0.0))
    run.step.run()
    shares = run.step.shares[run.store.config.num_hash_layers :]
    for bias, share in zip(run.store.biases.values(), shares):
        assert torch.equal(bias.sign(), (0.25 - share).sign()) and float(bias.abs().max()) == pytest.approx(
            5e-3
        )
    tables = run.store.tables["layers.0.ffn.gate.tid2eid"]
    assert tables.max() < 4 and len(set(tables[7].tolist())) == 2


def test_probes_share_their_rows_and_are_ordered(data, tmp_path, capsys):
    shared = bench(data, tmp_path)
    still = Settings.parse("muon_rate=0,embedding_rate=0,small_rate=0,mhc_rate=0", SETTINGS)
    choices = {"still": still, "base": SETTINGS}
    outcomes = probe(shared, choices, steps=6)
    assert [outcome.settings for outcome in outcomes] == [choices["base"], choices["still"]]
    assert "base" in capsys.readouterr().err


def test_targets_are_shifted_and_weighted():
    ids, roles = torch.tensor([[0, 5, 6, 1, 2]]), torch.tensor([[0, 1, 2, 2, 0]], dtype=torch.uint8)
    batch = prepare(ids, roles, pad=2, request_weight=0.1)
    assert batch.next_ids.tolist() == [[5, 6, 1, 2, 2]] and batch.after_ids.tolist() == [[6, 1, 2, 2, 2]]
    torch.testing.assert_close(batch.weight, torch.tensor([[0.1, 1, 1, 0, 0]]))
    torch.testing.assert_close(batch.after_weight, torch.tensor([[1.0, 1, 0, 0, 0]]))
    assert batch.valid.tolist() == [[True, True, True, True, False]]


def test_the_commands_run_end_to_end(data, tmp_path, monkeypatch, capsys):
    """Run train, watch and evaluate from the command line on a small config."""
    folder, *_ = data
    monkeypatch.setitem(train.CONFIGS, "smoke", small_config())
    out, work = tmp_path / "out", tmp_path / "work"
    common = [
        "--data",
        str(folder),
        "--tokenizer",
        str(folder / "tokenizer"),
        "--work",
        str(work),
        "--out",
        str(out),
    ]
    short = [
        "--config",
        "smoke",
        "--workers",
        "0",
        "--device",
        "cpu",
        "--set",
        "batch=4,length=64,warmup_steps=2",
    ]
    probes = ["--probe", "a: ; b: mhc_scale=0.1", "--probe-steps", "4"]
    assert train.main([*common, *short, "--steps", "4", "--marks", "1", *probes]) == 0
    record = json.loads((out / "training.json").read_text())
    card = (out / "MODEL_CARD.md").read_text()
    assert (
        "Built with Llama." in card and f"| both | {record['stored']['both']['nats_per_token']:.3f} |" in card
    )
    assert len(record["samples"]) == 18 and record["stored"]["both"]["tokens"] > 0
    assert json.loads((work / "probes.json").read_text())[0]["held_out"]["tokens"] > 0
    assert train.main([*common, *short, "--steps", "4"]) == 1  # the directory already holds a checkpoint
    collecting = ["--collect", str(tmp_path / "back"), "--seconds", "1"]
    assert watch.main(["--work", str(work), "--out", str(out), *collecting]) == 0
    back = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert back == ["model-00001-of-00001.safetensors", "small.tar"]
    monkeypatch.setattr(evaluate, "CUT", 64)
    monkeypatch.setattr(evaluate, "WHOLE", 128)
    assert (
        evaluate.main(
            [str(out), "--data", str(folder), "--exact", "2", "--json", str(tmp_path / "found.json")]
        )
        == 0
    )
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["exact"]["worst_difference"] < 1e-4
    assert result["cut"]["both"]["nats_per_token"] == pytest.approx(
        record["stored"]["both"]["nats_per_token"], abs=1e-4
    )
    assert "nats/token" in capsys.readouterr().out


def test_a_dead_run_is_reported(tmp_path, capsys):
    work = tmp_path / "work"
    work.mkdir()
    (work / "pid").write_text("999999999")
    (tmp_path / "output.txt").write_text("it broke here\n")
    assert watch.main(["--work", str(work), "--seconds", "1"]) == 1
    assert "it broke here" in capsys.readouterr().out


def test_bad_commands_are_refused(data, tmp_path, capsys):
    folder, *_ = data
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path / "o")])
    common = ["--data", str(folder), "--tokenizer", str(folder / "tokenizer")]
    common += ["--work", str(tmp_path), "--out", str(tmp_path / "o")]
    assert train.main([*common, "--steps", "1", "--set", "colour=blue"]) == 1
    assert "colour" in capsys.readouterr().err
    assert (
        train.main([*common, "--steps", "1", "--config", "smoke", "--workers", "0", "--set", "length=100"])
        == 1
    )
    assert "multiple of the window" in capsys.readouterr().err
    assert train.main([*common, "--probe", "no name", "--steps", "1"]) == 1


def test_a_step_that_is_not_finite_stops_the_run(data, tmp_path):
    run = Run(bench(data, tmp_path), SETTINGS, Stop(steps=4))
    run.store.masters["embedding"].fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        run.train(marks=1, log_every=1)
