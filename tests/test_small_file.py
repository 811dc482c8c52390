"""Files that are no files, have no end, or grow in memory are refused with a typed error, quickly and cheaply.

Every loader opens each of them in a forked child, which reports the error and how far its memory rose.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff.analysis.vector_import import import_vectors
from birkhoff.capture.store.reader import read_request
from birkhoff.config import V4Config
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError
from birkhoff.json_limits import check_json, parse_json
from birkhoff.offload.expert_usage import MAX_BYTES as COUNTS_BYTES
from birkhoff.offload.expert_usage import ExpertCounts
from birkhoff.sae.dictionary import Sae
from birkhoff.small_file import (
    CONFIG_BYTES,
    HEADER_BYTES,
    INDEX_BYTES,
    SIDECAR_BYTES,
    TOKENIZER_BYTES,
    VECTOR_BYTES,
    open_regular,
    read_bytes,
)
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.weights.checkpoint import open_checkpoint
from tests.sae.reference import random_sae
from tests.sizes import FULL

SECONDS = 20
INDEX = "model.safetensors.index.json"


def in_child(work: Callable[[], object]) -> tuple[str, int]:
    """The name of the error that `work` raises (empty if none), and how many bytes of memory it allocated at its peak.

    Pages of mapped files are left out: a forked child faults the code of its libraries in again, and a garbage
    collection over the objects of the tests that ran before touches megabytes of it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)  # a loader that blocks is killed
        gc.freeze()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
        before = _status("RssAnon")
        try:
            work()
            result = ""
        except BirkhoffError as error:
            result = f"typed {type(error).__name__}: {error}"
        except BaseException as error:
            result = f"untyped {error!r}"
        peak = _status("VmHWM") - _status("RssFile")
        os.write(writer, json.dumps([result[:2000], peak - before]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return f"killed by signal {os.WTERMSIG(status)}", 0
    result, grown = json.loads(answer)
    return result, grown


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


# What stands in the place of the file. Each takes the path and the byte limit of its kind.


def fifo(path: Path, limit: int) -> None:
    os.mkfifo(path)


def endless(path: Path, limit: int) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path, limit: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)  # the path of a socket is limited to about 100 bytes
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def directory(path: Path, limit: int) -> None:
    path.mkdir()


def sparse(path: Path, limit: int) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def empty(path: Path, limit: int) -> None:
    path.write_bytes(b"")


def deep(path: Path, limit: int) -> None:
    path.write_bytes(b"[" * 100_000)


def values(path: Path, limit: int) -> None:
    """Empty lists, three bytes each and more than sixty in memory: as many as the limit lets through."""
    path.write_bytes(b"[" + b"[]," * min(6 * limit // 130 - 3, limit // 3 - 2) + b"[]]")


def more_values(path: Path, limit: int) -> None:
    path.write_bytes(b"[" + b"[]," * (limit // 3 - 2) + b"[]]")


def objects(path: Path, limit: int) -> None:
    path.write_bytes(b"[" + b'{"":0},' * (6 * limit // 460 - 3) + b"{}]")


def wide(path: Path, limit: int) -> None:
    """Text that takes four bytes per character in memory."""
    path.write_bytes(b'["' + b"a" * (limit // 4 - 64) + "\U0001f600".encode() + b'"]')


HOSTILE = [fifo, endless, unix_socket, directory, sparse, empty, deep, values, more_values, objects, wide]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[Path, str, int, Callable[[Path], object]]]:
    """By kind: a valid folder, the file in it to replace, the limit of its kind, and the loader."""
    root = tmp_path_factory.mktemp("files")
    synth(root / "model", "tiny", shard_bytes=1 << 20)
    shard = min(path.name for path in (root / "model").glob("*.safetensors"))
    assert (root / "model" / INDEX).is_file()
    shutil.copy(Path(birkhoff.__file__).parent / "models/nano/tokenizer.json", root / "model/tokenizer.json")
    random_sae("relu", 24, 16, hook="mlp_out", layer=1).save(root / "sae")
    sae_config = next(path.name for path in (root / "sae").glob("*.json") if "label" not in path.name)
    weights = next(path.name for path in (root / "sae").glob("*.safetensors"))
    (root / "vector").mkdir()
    vector = SteeringVector(
        {1: [1.0, 2.0]},
        op="add",
        hook="mlp_out",
        streams="flat",
        normalised=False,
        scale_unit="absolute",
        model="m",
        model_revision="r",
        quant="none",
        method="given",
        n_pairs=0,
        created_at="2026-01-01T00:00:00Z",
    )
    vector.save(root / "vector/v.safetensors")
    (root / "vector/v.json").write_text("{}")
    (root / "counts").mkdir()
    return {
        "config.json": (
            root / "model",
            "config.json",
            CONFIG_BYTES,
            lambda p: V4Config.from_file(p / "config.json"),
        ),
        "config.json of a model": (root / "model", "config.json", CONFIG_BYTES, open_checkpoint),
        "index": (root / "model", INDEX, INDEX_BYTES, open_checkpoint),
        "shard": (root / "model", shard, HEADER_BYTES, open_checkpoint),
        "tokenizer.json": (root / "model", "tokenizer.json", TOKENIZER_BYTES, Tokenizer.from_file),
        "SAE config": (root / "sae", sae_config, CONFIG_BYTES, Sae.load),
        "SAE weights": (root / "sae", weights, HEADER_BYTES, Sae.load),
        "vector file": (
            root / "vector",
            "v.safetensors",
            VECTOR_BYTES,
            lambda p: SteeringVector.load(p / "v.safetensors"),
        ),
        "vector module": (
            root / "vector",
            "v.json",
            VECTOR_BYTES,
            lambda p: import_vectors(p / "v.json", op="add"),
        ),
        "expert counts": (
            root / "counts",
            "counts.json",
            COUNTS_BYTES,
            lambda p: ExpertCounts.load(p / "counts.json", 2, 8),
        ),
    }


KINDS = (
    "config.json",
    "config.json of a model",
    "index",
    "shard",
    "tokenizer.json",
    "SAE config",
    "SAE weights",
    "vector file",
    "vector module",
    "expert counts",
)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_file_is_refused_cheaply(files, tmp_path, kind, make):
    folder, name, limit, load = files[kind]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / name).unlink(missing_ok=True)
    make(copy / name, limit if FULL else CONFIG_BYTES)
    result, grown = in_child(lambda: load(copy))
    assert result.startswith("typed"), result
    assert grown <= 10 * limit, f"{grown} bytes for a limit of {limit}"


@pytest.mark.parametrize("make", [deep, values, more_values, objects, wide], ids=lambda make: make.__name__)
def test_a_hostile_header_is_refused_cheaply(files, tmp_path, make):
    folder, name, limit, load = files["shard"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / name).unlink()
    make(copy / name, limit if FULL else CONFIG_BYTES)
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(struct.pack("<Q", len(raw)) + raw)
    result, grown = in_child(lambda: load(copy))
    assert result.startswith("typed"), result
    assert grown <= 10 * limit, f"{grown} bytes for a limit of {limit}"


def test_capture_sidecars(tmp_path):
    for index, make in enumerate(HOSTILE):
        root = tmp_path / str(index)
        (root / "tag" / "r").mkdir(parents=True)
        make(root / "tag" / "r" / "mlp_out_1.json", CONFIG_BYTES)
        result, grown = in_child(lambda root=root: read_request(root / "tag" / "r"))
        assert result.startswith("typed"), (make.__name__, result)
        assert grown <= 10 * SIDECAR_BYTES, (make.__name__, grown)


def test_what_is_opened(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_bytes(file, 3) == b"abc"
    with pytest.raises(OSError, match="it has 3 bytes, at most 2"):
        read_bytes(file, 2)
    link = tmp_path / "link"
    link.symlink_to(file)
    os.close(open_regular(link))
    for make, word in ((fifo, "a FIFO"), (directory, "a directory"), (endless, "a device")):
        make(tmp_path / make.__name__, 0)
        with pytest.raises(OSError, match=word):
            open_regular(tmp_path / make.__name__)


def test_a_file_that_grows_while_it_is_read_is_refused():
    with pytest.raises(OSError, match="at most 4"):
        read_bytes("/proc/self/status", 4)  # a regular file of size 0 that has content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_limits_do_not_change_what_is_parsed(value):
    raw = json.dumps(value).encode()
    assert parse_json(raw, 1 << 20) == value


@given(st.integers(1, 80), st.booleans(), st.text('[]{}"\\', max_size=5))
def test_depth_is_exact(depth, as_list, text):
    value: object = text
    for _ in range(depth):
        value = [value] if as_list else {text: value}
    raw = json.dumps(value).encode()
    if depth > 64:
        with pytest.raises(ValueError, match="deep"):
            check_json(raw, 1 << 20)
    else:
        check_json(raw, 1 << 20)


def test_constants_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        parse_json(b"[NaN]", 100)
