"""Importing vectors of other tools: metadata of the file is kept, missing metadata must be given, never guessed."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from birkhoff.analysis.vector_import import import_vectors
from birkhoff.errors import BirkhoffError, VectorFileError
from birkhoff.steering.vector_file import SteeringVector

ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Trap:
    """Prints when it is unpickled, which must never happen."""

    def __reduce__(self):
        return (print, ("ran",))


def gguf(path, tensors, keys) -> None:
    """Write a minimal GGUF file with string and integer keys and float32 tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        head += text(key)
        head += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    data = b""
    for name, tensor in tensors.items():
        head += text(name) + struct.pack("<IQIQ", 1, tensor.numel(), 0, len(data))
        data += tensor.numpy().astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def packed(rows: torch.Tensor, layers: list[int], **more) -> dict:
    data = base64.b64encode(rows.numpy().astype("<f4").tobytes()).decode()
    return {"dtype": "float32", "shape": list(rows.shape), "layer_indices": layers, "data": data, **more}


def test_module_json_as_lists_and_packed_is_the_same_vector(tmp_path):
    lists = {"4": ROWS[0].tolist(), "6": {"vector": ROWS[1].tolist(), "scale": 2.0}}
    (tmp_path / "lists.json").write_text(json.dumps({"vectors": {"mlp_out": lists}}))
    blob = packed(ROWS[:2], [4, 6], scales=[1.0, 2.0])
    (tmp_path / "packed.json").write_text(
        json.dumps({"vectors": {"mlp_out": blob}, "decode_vectors": {"mlp_in": {"1": [1.0] * 8}}})
    )
    (first,) = import_vectors(tmp_path / "lists.json", op="add").values()
    both = import_vectors(tmp_path / "packed.json", op="add", model="flash")
    assert sorted(both) == ["both.mlp_out", "decode.mlp_in"] and both["both.mlp_out"] == first
    assert first.hook == "mlp_out" and torch.equal(first.at(6).tensor(), 2 * ROWS[1])
    assert both["both.mlp_out"].model == "flash"


def test_a_control_vector_is_added_to_the_output_of_a_layer(tmp_path):
    keys = {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "deepseek4",
        "controlvector.layer_count": 3,
    }
    gguf(tmp_path / "v.gguf", {f"direction.{n + 1}": ROWS[n] for n in range(3)}, keys)
    (vector,) = import_vectors(tmp_path / "v.gguf", op="add").values()
    assert vector.hook == "mhc_streams_post_mlp" and vector.streams == "all" and vector.layers == (1, 2, 3)
    assert (
        all(torch.equal(vector.at(n + 1).tensor(), ROWS[n]) for n in range(3)) and "deepseek4" in vector.note
    )
    gguf(tmp_path / "model.gguf", {"direction.1": ROWS[0]}, {"general.architecture": "llama"})
    with pytest.raises(VectorFileError, match="expected controlvector"):
        import_vectors(tmp_path / "model.gguf", op="add")
    gguf(tmp_path / "odd.gguf", {"weight": ROWS[0]}, {"general.architecture": "controlvector"})
    with pytest.raises(VectorFileError, match=r"expected direction\.N"):
        import_vectors(tmp_path / "odd.gguf", op="add")


def test_raw_rows_start_at_layer_zero_and_zero_rows_are_skipped(tmp_path):
    table = np.zeros((5, 8), "<f4")
    table[1], table[3] = ROWS[0], ROWS[1]
    (tmp_path / "v.f32").write_bytes(table.tobytes())
    (vector,) = import_vectors(tmp_path / "v.f32", op="project", hook="mlp_out", width=8).values()
    assert vector.layers == (1, 3) and vector.op == "project" and torch.equal(vector.at(3).tensor(), ROWS[1])
    (wide,) = import_vectors(tmp_path / "v.f32", op="add", hook="mhc_streams_pre_mlp", width=8).values()
    assert wide.streams == "all"
    for width, words in ((7, "multiple of 28"), (None, "State width")):
        with pytest.raises(VectorFileError, match=words):
            import_vectors(tmp_path / "v.f32", op="add", hook="mlp_out", width=width)


@pytest.mark.parametrize(
    "names", [["layers.2", "layers.5"], ["2", "5"], ["blocks.2.vector", "blocks.5.vector"], [2, 5]]
)
def test_tensor_names_give_the_layers(tmp_path, names):
    torch.save(dict(zip(names, ROWS)), tmp_path / "v.pt")
    (vector,) = import_vectors(tmp_path / "v.pt", op="add", hook="mlp_out").values()
    assert vector.layers == (2, 5) and torch.equal(vector.at(5).tensor(), ROWS[1])
    if isinstance(names[0], str):
        save_file(dict(zip(names, ROWS)), tmp_path / "v.safetensors")
        assert import_vectors(tmp_path / "v.safetensors", op="add", hook="mlp_out")["v"] == vector


def test_a_single_tensor(tmp_path):
    torch.save(ROWS[0], tmp_path / "one.pt")
    assert import_vectors(tmp_path / "one.pt", op="add", hook="mlp_out", layer=4)["one"].layers == (4,)
    with pytest.raises(VectorFileError, match="names no layer"):
        import_vectors(tmp_path / "one.pt", op="add", hook="mlp_out")
    save_file({"steering": ROWS}, tmp_path / "many.safetensors")
    assert import_vectors(tmp_path / "many.safetensors", op="add", hook="mlp_out")["many"].layers == (0, 1, 2)


def test_a_vector_file_needs_no_arguments(tmp_path):
    vector = SteeringVector({1: ROWS[0]}, "add", "mlp_out")
    vector.save(tmp_path / "own.safetensors")
    assert import_vectors(tmp_path / "own.safetensors")["own"] == vector


@pytest.mark.parametrize("kind", ["json", "gguf", "f32", "pt", "safetensors"])
def test_the_operation_is_never_guessed(tmp_path, kind):
    path = tmp_path / f"v.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"vectors": {"mlp_out": {"1": [1.0]}}}))
    elif kind == "gguf":
        gguf(path, {"direction.1": ROWS[0]}, {"general.architecture": "controlvector"})
    elif kind == "f32":
        path.write_bytes(ROWS.numpy().tobytes())
    elif kind == "pt":
        torch.save({1: ROWS[0]}, path)
    else:
        save_file({"1": ROWS[0]}, path)
    for op in (None, "steer"):
        with pytest.raises(VectorFileError, match="different experiments: state op"):
            import_vectors(path, op=op, hook="mlp_out", width=8)


def test_nothing_but_tensors_is_unpickled(tmp_path, capsys):
    torch.save({1: Trap()}, tmp_path / "trap.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({1: "text"}, tmp_path / "words.pt")
    torch.save([ROWS[0]], tmp_path / "list.pt")
    for name in ("trap", "text", "words", "list"):
        with pytest.raises(VectorFileError):
            import_vectors(tmp_path / f"{name}.pt", op="add", hook="mlp_out")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("v.txt", b"", "expected one of"),
        ("v.json", b"{", "not JSON"),
        ("v.json", b"{}", "expected an object with vectors"),
        ("v.json", b'{"vectors": {}}', "names no hook"),
        ("v.json", b'{"vectors": {"mlp_out": {"1": [0.0, 0.0]}}}', "is zero"),
        ("v.json", b'{"vectors": {"mlp_out": {"1": [1.0, null]}}}', r"vectors\.mlp_out\.1"),
        ("v.json", b'{"vectors": {"nowhere": {"1": [1.0]}}}', "hook is 'nowhere'"),
        ("v.gguf", b"GGUF", "v.gguf"),
        ("v.safetensors", b"no", "cannot be read as safetensors"),
    ],
)
def test_files_without_a_vector_are_refused(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BirkhoffError, match=words):
        import_vectors(tmp_path / name, op="add", hook="mlp_out")
    with pytest.raises(VectorFileError, match="missing"):
        import_vectors(tmp_path / "none.json", op="add")
