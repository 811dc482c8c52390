"""The embedded model: it is there, it is the model its card describes, and every way of running it agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

import birkhoff
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.weights.released import write_released
from tests.sizes import scaled

FOLDER = Path(birkhoff.__file__).parent / "models" / "nano"
LENGTHS = [3, 4, 5, 63, 64, 65, 127, 128, 129, 257, 600, 1000]


@pytest.fixture(scope="module")
def nano():
    with birkhoff.load("nano") as engine:
        yield engine


@pytest.fixture(scope="module")
def story(nano):
    """A thousand tokens the model itself wrote: text it knows, so that routing and choices are those of real use."""
    ids = nano.encode_chat([{"role": "user", "content": "Tell me a long story about a fox and a lantern."}])
    out = nano.generate(ids, max_tokens=1000 - len(ids), temperature=0.8, top_k=40, seed=1, ignore_eos=True)
    return ids + out.token_ids


def test_it_fits_its_budget():
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir() if file.is_file()}
    assert sum(sizes.values()) <= 32_000_000 and max(sizes.values()) < 16 * 2**20
    assert {"config.json", "tokenizer.json", "MODEL_CARD.md"} <= set(sizes)
    assert "Built with Llama" in (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_it_has_every_mechanism(nano):
    c = nano.config
    assert {c.layer_kind(layer) for layer in range(c.num_hidden_layers)} == {"swa", "csa", "hca"}
    assert 0 < c.num_hash_layers < c.num_hidden_layers and c.hc_mult == 4 and c.index_n_heads >= 16
    assert nano.model.mtp is not None and c.vocab_size == nano.tokenizer.vocab_size


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_decoding_token_by_token(nano, story, length):
    """At the borders of windows, blocks and pages; the last steps are decoded, the rest is read in one piece."""
    ids = story[:length]
    steps = min(length - 1, scaled(40, 6))
    state = State.contiguous(nano.config, 1, length)
    with torch.inference_mode():
        whole = nano.model(torch.tensor(ids))
        rows = []
        for start, stop in [(0, length - steps), *((at, at + 1) for at in range(length - steps, length))]:
            hidden, _ = nano.model.run(Batch.of([SequenceChunk(0, start, ids[start:stop])]), state, NoTap())
            rows.append(nano.model.logits(hidden))
    error = (torch.cat(rows) - whole).abs().max().item()
    print(f"length {length}: {error:.1e} of {whole.std():.1f}")
    assert error < 1e-4


def test_transformers_writes_the_same_text(nano, tmp_path):
    """A dequantised export, loaded by other people's code, continues three prompts token for token."""
    tensors = ((d.name, d.tensor) for d in nano.model.destinations() if not d.name.startswith("mtp."))
    config = replace(nano.config, num_nextn_predict_layers=0, quantization_config=None, expert_dtype=None)
    write_released(tmp_path / "plain", config, tensors, dense="f32", experts="f32")
    theirs = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    for request in ("Hello!", "Tell me a story about a brave mouse.", "What sound does a cow make?"):
        ids = nano.encode_chat([{"role": "user", "content": request}])
        ours = nano.generate(ids, max_tokens=scaled(100, 24), temperature=0).token_ids
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([ids]),
                max_new_tokens=len(ours),
                do_sample=False,
                pad_token_id=2,
                eos_token_id=list(nano.config.eos_token_ids),
            )
        assert out[0, len(ids) :].tolist() == ours


def test_it_greets_and_ends(nano):
    answer = nano.chat([{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=60)
    assert answer.finish_reason == "stop" and "hello" in answer.text.lower()


def test_its_card_and_its_record_say_the_same():
    card = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    for word in ("nats", "bits", "stories", "tinystories", "MTP", "licen"):
        assert word.lower() in card.lower(), word


def test_it_works_from_another_directory_without_a_network(tmp_path):
    code = (
        "import birkhoff, json; e = birkhoff.load('nano'); "
        "print(json.dumps(e.chat([{'role': 'user', 'content': 'Hello!'}], temperature=0, max_tokens=40).text))"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(out.stdout.strip().splitlines()[-1])
