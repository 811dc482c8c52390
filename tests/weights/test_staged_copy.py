"""Staged copies: the bytes of the files arrive in the targets, whatever the blocks; bad values are found."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from birkhoff.errors import CheckpointError
from birkhoff.weights.checkpoint import SafetensorsRefs
from birkhoff.weights.safetensors import read_header
from birkhoff.weights.staged_copy import StagedCopy, blocks, stored_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors of all kinds in two files: (references, tensors)."""
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("staged")
    tensors = {
        "a.weight": torch.randint(-128, 128, (37, 24), generator=generator, dtype=torch.int8),
        "a.scale": torch.randint(0, 255, (37, 3), generator=generator, dtype=torch.uint8),
        "b.weight": torch.randn(19, 8, generator=generator).to(torch.float8_e4m3fn),
        "c.weight": torch.randn(40, 7, generator=generator),
        "d.bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "e": torch.tensor(2.5),
        "skipped": torch.randn(3, 3, generator=generator),
        "f.weight": torch.randint(-128, 128, (64, 16), generator=generator, dtype=torch.int8),
    }
    save_file({name: tensors[name] for name in list(tensors)[:5]}, folder / "1.safetensors")
    save_file({name: tensors[name] for name in list(tensors)[5:]}, folder / "2.safetensors")
    entries = {
        **read_header(folder / "1.safetensors").tensors,
        **read_header(folder / "2.safetensors").tensors,
    }
    return SafetensorsRefs(entries), tensors


def kind_of(name: str, tensor: torch.Tensor) -> str:
    if name.endswith("scale"):
        return "scale"
    return "value" if tensor.dtype in (torch.float32, torch.bfloat16) else "codes"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(max_bytes=st.integers(1, 4000), readers=st.integers(1, 4), transposed=st.booleans())
def test_every_target_receives_its_bytes(stored, max_bytes, readers, transposed):
    refs, tensors = stored
    targets = {}
    for name, tensor in tensors.items():
        if name != "skipped":
            dtype = torch.bfloat16 if name == "c.weight" else tensor.dtype
            flipped = transposed and tensor.ndim == 2
            targets[name] = torch.zeros(
                tensor.shape[::-1] if flipped else tensor.shape, dtype=torch.float32
            ).to(dtype)
            targets[name] = targets[name].T if flipped else targets[name]
    rows = [
        piece
        for name, target in targets.items()
        for piece in stored_rows(refs[name], target, kind_of(name, tensors[name]), max_bytes)
    ]
    work = list(blocks(rows, max_bytes))
    row_bytes = max(refs[name].nbytes // refs[name].num_rows for name in targets)
    assert all(block.nbytes <= max(max_bytes, row_bytes) for block in work)
    copies = StagedCopy(CPU, readers)
    assert sum(copies.run(work)) == sum(refs[name].nbytes for name in targets)
    for name, target in targets.items():
        expected = tensors[name].to(target.dtype)
        assert torch.equal(target.flatten().view(torch.uint8), expected.flatten().view(torch.uint8)), name
    assert not copies.suspects()


def test_blocks_join_what_is_adjacent_and_nothing_else(stored):
    refs, _ = stored
    names = [name for name in refs if name != "skipped"]
    targets = {name: torch.empty(refs[name].shape) for name in names}
    work = list(
        blocks(piece for name in names for piece in stored_rows(refs[name], targets[name], "codes", 10**6))
    )
    assert 2 <= len(work) <= 4, "two files, one with a gap"
    for block in work:
        assert all(piece.path == block.path for piece in block.rows)
        ends = [piece.offset + piece.nbytes for piece in block.rows]
        assert [piece.offset for piece in block.rows[1:]] == ends[:-1] and ends[
            -1
        ] == block.offset + block.nbytes


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("scale", torch.tensor([[1, 2], [255, 4]], dtype=torch.uint8)),
        ("codes", torch.tensor([[1.0, 2.0], [float("nan"), 4.0]]).to(torch.float8_e4m3fn)),
        ("value", torch.tensor([[1.0, 2.0], [float("inf"), 4.0]])),
    ],
)
def test_bad_values_are_reported_by_name(tmp_path, kind, values):
    good = torch.ones(2, 2, dtype=torch.uint8).view(torch.uint8).to(torch.float32).to(values.dtype)
    save_file({"bad": values, "good": good}, tmp_path / "x.safetensors")
    refs = SafetensorsRefs(read_header(tmp_path / "x.safetensors").tensors)
    copies = StagedCopy(CPU, 2)
    rows = [
        piece
        for name in refs
        for piece in stored_rows(refs[name], torch.empty(2, 2, dtype=values.dtype), kind, 2)
    ]
    assert sum(copies.run(list(blocks(rows, 2)))) == values.nbytes + good.nbytes
    assert copies.suspects() == {"bad"}


def test_a_file_that_shrank_is_an_error_and_ends_all_readers(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(64, 1024)}, path)
    refs = SafetensorsRefs(read_header(path).tensors)
    work = list(blocks(stored_rows(refs["w"], torch.empty(64, 1024), "value", 8192), 8192))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        list(StagedCopy(CPU, 3).run(work))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("birkhoff-load")]
