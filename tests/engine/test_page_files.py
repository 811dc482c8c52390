"""Pages on disk: reused by a later process, within the byte limit, and never served when damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.named_contexts import MAX_NAMES, NamedContexts
from birkhoff.engine.page_files import MAGIC, PageFiles, _digest, decode, encode
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError
from tests.models import fused_model, random_model, random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)
TEXTS = [random_tokens(SMALL, 700, seed).tolist() for seed in range(3)]
TENSORS = {
    "page 1.entry": torch.randn(32, 8),
    "rows 0.keys": torch.randn(8, 8).bfloat16(),
    "rows 2.entry": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def model():
    return fused_model(SMALL, kernels="cpu")


def ask(tokens, count=3, context=None) -> Request:
    options = SamplingParams(temperature=0, max_tokens=count, logprobs=0, ignore_eos=True)
    return Request(tuple(tokens), options, count, seed=3, context=context)


def engine(model, root=None, limit=2**24, identity=None, **options) -> EngineCore:
    files = None if root is None else PageFiles(root, identity or model_identity(model), limit)
    given = {
        "max_requests": 2,
        "max_context": 1024,
        "num_pages": 8,
        "prefix_bytes": 2**20,
        "batch_invariant": True,
    }
    return EngineCore(model, **{**given, "files": files, **options})


def run(core: EngineCore, *requests: Request) -> list[Request]:
    for request in requests:
        core.submit(request)
    while core.step():
        pass
    return list(requests)


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.page"))


def test_a_later_process_reuses_the_pages_of_an_earlier_one(model, tmp_path):
    first = engine(model, tmp_path)
    run(first, ask(TEXTS[0][:400]))
    first.close()
    assert len(files_of(tmp_path)) == 3 and not list(tmp_path.glob("*/*.partial"))
    later, cold = engine(model, tmp_path), engine(model, prefix_bytes=0)
    (warm,), (plain,) = run(later, ask(TEXTS[0][:400])), run(cold, ask(TEXTS[0][:400]))
    assert warm.cached_tokens == 384 and warm.logprobs == plain.logprobs, "bit-identical"


def test_pages_evicted_from_memory_are_read_from_disk(model, tmp_path):
    core, cold = engine(model, tmp_path, num_pages=5), engine(model, prefix_bytes=0)
    for text in (0, 1, 2, 0, 1):
        (warm,), (plain,) = run(core, ask(TEXTS[text][:400])), run(cold, ask(TEXTS[text][:400]))
        assert warm.logprobs == plain.logprobs
    assert warm.cached_tokens == 384 and core.scheduler.prefix.evictions > 0
    assert core.reuse()["prefix"]["disk"]["written"] >= 6


@pytest.mark.parametrize("snapshots", [2**20, 40_000])
def test_every_written_page_includes_its_state_rows(model, tmp_path, snapshots):
    core = engine(model, tmp_path, num_pages=5, prefix_bytes=snapshots)
    run(core, ask(TEXTS[0][:500]), ask(TEXTS[1][:500]))
    core.close()
    written = files_of(tmp_path)
    assert len(written) >= 6
    for path in written:
        result = decode(path.read_bytes(), path.parent.name, bytes.fromhex(path.stem))
        assert any(name.startswith("rows ") for name in result), path


def test_other_weights_numerics_or_batch_modes_do_not_share_pages(model, tmp_path):
    other = fused_model(SMALL, kernels="cpu", seed=1)
    identities = {
        model_identity(m)
        for m in (model, other, random_model(SMALL), random_model(SMALL, dtype=torch.bfloat16))
    }
    assert len(identities) == 4 and model_identity(fused_model(SMALL, kernels="cpu")) in identities
    before = model_identity(other)
    with torch.no_grad():
        other.layers[1].attn.attn_sink[0] += 1e-7 * other.layers[1].attn.attn_sink[0].abs() + 1e-12
    assert model_identity(other) != before, "one changed weight"
    core = engine(model, tmp_path)
    run(core, ask(TEXTS[0][:300]))
    core.close()
    for another in (engine(other, tmp_path), engine(model, tmp_path, batch_invariant=False)):
        assert run(another, ask(TEXTS[0][:300]))[0].cached_tokens == 0


def test_a_page_file_with_the_wrong_model_or_key_is_refused(model, tmp_path):
    """A page of another model with a valid digest, and a page of this model stored under another page's key."""
    core = engine(model, tmp_path)
    run(core, ask(TEXTS[0][:300]))
    core.close()
    first, second = files_of(tmp_path)
    data = {path: path.read_bytes() for path in (first, second)}
    tensors = decode(data[first], first.parent.name, bytes.fromhex(first.stem))
    first.write_bytes(encode("00" * 16, bytes.fromhex(first.stem), tensors))
    second.write_bytes(data[first])
    later = engine(model, tmp_path)
    (again,), (cold,) = (
        run(later, ask(TEXTS[0][:300])),
        run(engine(model, prefix_bytes=0), ask(TEXTS[0][:300])),
    )
    assert again.cached_tokens == 0 and again.logprobs == cold.logprobs
    assert later.scheduler.prefix.files.refused >= 1


def test_a_page_of_another_shape_is_refused(tmp_path):
    files = PageFiles(tmp_path, b"m" * 16, 2**20)
    files.write(b"k" * 16, TENSORS)
    assert files.read(b"k" * 16, {"page 1.entry": torch.empty(16, 8)}) is None and files.refused == 1
    assert b"k" * 16 not in files and not files_of(tmp_path)


@settings(max_examples=scaled(400, 60))
@given(
    where=st.integers(0, 10**6), kind=st.sampled_from(["flip", "cut", "grow", "zero"]), bit=st.integers(0, 7)
)
def test_any_damage_is_detected(where, kind, bit):
    data = bytearray(encode("ab" * 16, b"k" * 16, TENSORS))
    where %= len(data)
    if kind == "flip":
        data[where] ^= 1 << bit
    elif kind == "cut":
        del data[where:]
    elif kind == "grow":
        data[where:where] = b"\0" * (bit + 1)
    else:
        data[where : where + 64] = bytes(len(data[where : where + 64]))
    damaged = bytes(data) != encode("ab" * 16, b"k" * 16, TENSORS)
    assert (decode(bytes(data), "ab" * 16, b"k" * 16) is None) is damaged


def test_round_trip_is_bit_identical_and_invalid_contents_with_a_valid_digest_decode_to_none():
    result = decode(encode("ab" * 16, b"k" * 16, TENSORS), "ab" * 16, b"k" * 16)
    assert result.keys() == TENSORS.keys()
    assert all(
        torch.equal(result[name], tensor) and result[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )
    for body in (b"", b"\x05" + b"\0" * 7 + b"[1,2]", (9).to_bytes(8, "little") + b'{"model":'):
        data = MAGIC + body
        assert decode(data + _digest(data), "ab" * 16, b"k" * 16) is None


def test_the_disk_limit_holds_and_named_pages_are_evicted_last(tmp_path):
    size = len(encode("00" * 16, b"k" * 16, TENSORS))
    foreign = PageFiles(tmp_path, b"f" * 16, 10 * size)
    foreign.write(b"z" * 16, TENSORS)
    files = PageFiles(tmp_path, b"m" * 16, 4 * size)
    files.protected = {b"\0" * 16}
    for index in range(scaled(300, 30)):
        files.write(bytes([index % 256]) * 16, TENSORS)
        assert files.held_bytes == sum(path.stat().st_size for path in files_of(tmp_path)) <= 4 * size
    assert b"\0" * 16 in files and b"z" * 16 not in PageFiles(tmp_path, b"f" * 16, 4 * size)
    PageFiles(tmp_path, b"m" * 16, 2 * size)
    assert len(files_of(tmp_path)) <= 2
    files.write(b"large" + b"_" * 11, {"page": torch.zeros(4 * size)})
    assert b"large" + b"_" * 11 not in files


def test_a_failing_disk_only_disables_the_disk_cache(model, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    core = engine(model, tmp_path / "file")
    (request,) = run(core, ask(TEXTS[0][:300], context="kept"))
    core.close()
    assert request.finish_reason == "length" and core.scheduler.prefix.files.failures > 0


VICTIM = """
import signal, sys, torch
from birkhoff.engine.page_files import PageFiles
files, big = PageFiles(sys.argv[1], b"m" * 16, 2**30), torch.arange(2**17).float()
print("ready", flush=True)
for number in range(200):
    files.write(number.to_bytes(16, "big"), {"page x": big + number, "rows y": big[:5] + number})
    print(number, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("after", [0.03, 0.11, 0.2][: scaled(3, 1)])
def test_a_process_killed_while_writing_leaves_no_invalid_page(tmp_path, after):
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE)
    for line in (b"ready\n", b"0\n"):
        assert victim.stdout.readline() == line
    time.sleep(after)  # somewhere in a later page
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    files, big = PageFiles(tmp_path, b"m" * 16, 2**30), torch.arange(2**17).float()
    assert not list(tmp_path.glob("*/*.partial"))
    whole = len(files_of(tmp_path))
    assert whole >= 1
    for index in range(whole):
        result = files.read(index.to_bytes(16, "big"), {"page x": big})
        assert torch.equal(result["page x"], big + index)
    assert files.refused == 0


# Named contexts


def test_pages_of_a_named_prompt_are_kept_in_memory_and_on_disk(model, tmp_path):
    core = engine(model, tmp_path, limit=2**22, num_pages=7)
    run(core, ask(TEXTS[0][:400], context="book"))
    assert len(files_of(tmp_path)) == 3, "written immediately"
    for shift in range(6):
        run(core, ask(TEXTS[1][shift : shift + 400]))
    prefix = core.scheduler.prefix
    assert prefix.evictions > 0 and prefix.contexts.names == ["book"]
    assert all(key in prefix._by_key for key in prefix.contexts.page_keys)
    assert run(core, ask(TEXTS[0][:450]))[0].cached_tokens == 384
    later = engine(model, tmp_path)
    assert later.scheduler.prefix.contexts.names == ["book"]
    assert run(later, ask(TEXTS[0][:400], context="book"))[0].cached_tokens == 384


def test_a_name_refers_to_the_last_prompt_that_used_it(model):
    core = engine(model)
    run(core, ask(TEXTS[0][:300], context="a"), ask(TEXTS[1][:300], context="b"))
    before = core.scheduler.prefix.contexts.page_keys
    run(core, ask(TEXTS[2][:300], context="a"))
    contexts = core.scheduler.prefix.contexts
    assert (
        contexts.names == ["b", "a"]
        and len(before) == len(contexts.page_keys) == 4
        and before != contexts.page_keys
    )


def test_the_number_of_names_is_limited_and_an_invalid_file_is_ignored(tmp_path):
    contexts = NamedContexts(tmp_path / "contexts.json")
    for index in range(MAX_NAMES + 3):
        contexts.bind(f"name {index}", [bytes([index])])
    assert len(contexts.names) == MAX_NAMES and contexts.names[0] == "name 3"
    assert NamedContexts(tmp_path / "contexts.json").names == contexts.names
    assert "name 2" not in json.loads((tmp_path / "contexts.json").read_text())
    for broken in ("", "[1]", '{"a": 3}', '{"a": ["zz"]}', "\0"):
        (tmp_path / "contexts.json").write_text(broken)
        assert NamedContexts(tmp_path / "contexts.json").names == []


@pytest.mark.parametrize("name", ["", "a\nb", 5, "x" * 201, b"a", ["a"]], ids=repr)
def test_a_context_name_must_be_printable(name):
    with pytest.raises(OptionError, match=r"context is .* expected a name"):
        SamplingParams(context=name)
    assert SamplingParams(context="my book, part 2").context == "my book, part 2"


def test_a_page_larger_than_all_files_may_be_is_counted_and_told_once(model, tmp_path):
    told: list[str] = []
    files = PageFiles(tmp_path, model_identity(model), 1000, told.append)
    core = engine(model, files=files)
    run(core, ask(TEXTS[0][:400], context="book"))
    core.close()
    disk = core.reuse()["prefix"]["disk"]
    assert disk["too_large"] >= 3 and disk["written"] == disk["failures"] == 0 and not files_of(tmp_path)
    (message,) = told
    assert "context_bytes allows 1000" in message and "Raise context_bytes" in message
