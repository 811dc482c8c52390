"""Loading: exact values, raw codes, validated tables; the model is untouched if the plan fails."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from birkhoff.convert.presets import preset
from birkhoff.errors import TensorDtype, TensorMissing, TensorShape, TensorUnexpected, TensorValue
from birkhoff.model.linear import Destination, Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights import load_into, open_checkpoint
from birkhoff.weights.checkpoint import SafetensorsRefs
from birkhoff.weights.safetensors import read_header
from birkhoff.weights.tensor_ref import STRIP_BYTES, strips, value_strips
from tests.weights.files import all_tensors, edit
from tests.weights.test_checkpoint import save_transformers

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def exact(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Dequantise a stored tensor in double precision, from the definition."""
    stored = tensors[name]
    scale = tensors.get(name.removesuffix("weight") + "scale")
    if stored.dtype == torch.float8_e4m3fn:
        factor = torch.exp2(scale.view(torch.uint8).double() - 127)
        factor = factor.repeat_interleave(128, 0)[: stored.shape[0]].repeat_interleave(128, 1)[
            :, : stored.shape[1]
        ]
        return stored.double() * factor
    if stored.dtype == torch.int8:
        codes = stored.view(torch.uint8).long()
        values = torch.stack((E2M1[codes & 15], E2M1[codes >> 4]), -1).flatten(1)
        return values * torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, 1)
    return stored.double()


def model_with_marks(packed: bool = False, **kwargs) -> Transformer:
    """A model with every byte 0x55, to detect what loading writes."""
    model = Transformer(preset("tiny"), packed=packed, **kwargs)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().view(torch.uint8).fill_(0x55)
    return model


def marks(model: Transformer) -> bool:
    return all(
        bool((d.tensor.detach().contiguous().view(torch.uint8) == 0x55).all()) for d in model.destinations()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_exact_and_rounded_once(tiny_path, dtype):
    theirs = all_tensors(tiny_path)
    model = Transformer(preset("tiny"), Numerics(dtype))
    report = load_into(model.destinations(), open_checkpoint(tiny_path))
    seen = 0
    for d in model.destinations():
        assert torch.equal(d.tensor.detach(), exact(theirs, d.name).to(d.tensor.dtype)), d.name
        seen += d.tensor.nbytes
    assert report.file_bytes == sum(t.nbytes for t in theirs.values())
    assert (report.tensors, report.resident_bytes) == (len(list(model.destinations())), seen)
    assert (report.skipped, report.notices) == (0, ()) and report.seconds > 0


def test_packed_tensors_are_the_stored_bytes(tiny_path):
    theirs = all_tensors(tiny_path)
    model = model_with_marks(packed=True)
    load_into(model.destinations(), open_checkpoint(tiny_path))
    kinds = set()
    for d in model.destinations():
        kinds.add(d.kind)
        if d.kind in ("codes", "scale"):
            assert torch.equal(d.tensor.view(torch.uint8), theirs[d.name].view(torch.uint8)), d.name
    assert kinds == {"value", "codes", "scale", "ids"}


def test_packed_and_plain_models_say_the_same(tiny_path):
    checkpoint, logits = open_checkpoint(tiny_path), []
    tokens = torch.arange(40) % 512
    for packed in (False, True):
        model = Transformer(checkpoint.config, packed=packed)
        load_into(model.destinations(), checkpoint)
        with torch.no_grad():
            logits.append(model(tokens))
    error = ((logits[0] - logits[1]).norm() / logits[0].norm()).item()
    print(f"relative error of packed against plain logits: {error:.1e}")
    assert error < 1e-5  # the same values; layers may sum in another order


def test_a_transformers_checkpoint_gives_the_logits_of_transformers(tmp_path):
    config = preset("tiny", layers=4, mtp=False)
    theirs = save_transformers(tmp_path, config)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():  # normalise, so that logits are comparable
            tensor.mul_(1.0 if "norm" in name or tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
        theirs.save_pretrained(tmp_path)
        tokens = torch.arange(60) * 7 % 512
        model = Transformer(config)
        load_into(model.destinations(), open_checkpoint(tmp_path))
        expected = theirs(tokens[None]).logits[0]
        ours = model(tokens)
    assert (ours.argmax(-1) == expected.argmax(-1)).all()
    error = ((ours - expected).norm() / expected.norm()).item()
    print(f"relative error of logits against transformers: {error:.1e}")
    assert error < 1e-4


@given(rows=st.integers(1, 700), columns=st.sampled_from([32, 4096, 65536]))
def test_strips_tile_the_rows_at_block_borders(rows, columns):
    cuts = list(strips((rows, columns)))
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])] and cuts[-1][1] == rows
    assert all(start % 128 == 0 for start, _ in cuts)
    assert all((stop - start) * columns * 4 <= max(STRIP_BYTES, 128 * columns * 4) for start, stop in cuts)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bf16", "f32", "f16"])
def test_many_strips_join_to_the_exact_tensor(kind, tmp_path):
    rows, columns = 300, 8192
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    if kind == "fp8":
        draw[(draw & 0x7F) == 0x7F] = 0
        tensors = {
            "w.weight": draw.view(torch.float8_e4m3fn),
            "w.scale": torch.randint(100, 140, (3, 64), dtype=torch.uint8, generator=generator),
        }
    elif kind == "fp4":
        tensors = {
            "w.weight": draw[:, : columns // 2].contiguous().view(torch.int8),
            "w.scale": torch.randint(100, 140, (rows, 256), dtype=torch.uint8, generator=generator),
        }
    else:
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}[kind]
        tensors = {"w.weight": torch.randn(rows, columns, generator=generator).to(dtype)}
    save_file(tensors, tmp_path / "a.safetensors")
    refs = SafetensorsRefs(read_header(tmp_path / "a.safetensors").tensors)
    pieces = list(value_strips(refs, "w.weight"))
    assert len(pieces) == 3 and [start for start, _ in pieces] == [0, 128, 256]
    assert torch.equal(torch.cat([values for _, values in pieces]), exact(tensors, "w.weight").float())


def test_missing_and_left_over_names_are_listed_before_anything_is_read(tiny_path):
    checkpoint = open_checkpoint(tiny_path)
    model = model_with_marks()
    extra = Destination("layers.0.attn.wq_z.weight", torch.zeros(2))
    with pytest.raises(
        TensorMissing, match=r"1 tensors the model needs are not in checkpoint: layers\.0\.attn\.wq_z"
    ):
        load_into([*model.destinations(), extra], checkpoint)
    fewer = [d for d in model.destinations() if not d.name.startswith("layers.1.hc_attn")]
    with pytest.raises(
        TensorUnexpected, match=r"3 tensors .* layers\.1\.hc_attn_base, layers\.1\.hc_attn_fn"
    ):
        load_into(fewer, checkpoint)
    some = [d for d in model.destinations() if not d.name.startswith("layers.1.ffn.experts")]
    with pytest.raises(TensorUnexpected, match=r"48 tensors .* and 42 more"):
        load_into(some, checkpoint)
    assert marks(model)


def test_a_part_can_be_left_out_on_purpose(tiny_path):
    checkpoint = open_checkpoint(tiny_path)
    model = Transformer(preset("tiny"), mtp=False)
    with pytest.raises(TensorUnexpected, match=r"mtp\.0"):
        load_into(model.destinations(), checkpoint)
    report = load_into(model.destinations(), checkpoint, skip=("mtp.",))
    assert report.skipped == sum(name.startswith("mtp.") for name in checkpoint)


def test_wrong_destinations_are_refused_before_anything_is_read(tiny_path):
    checkpoint = open_checkpoint(tiny_path)
    model = model_with_marks()

    def swapped(name: str, tensor: torch.Tensor, kind: str = "value"):
        return [Destination(name, tensor, kind) if d.name == name else d for d in model.destinations()]

    with pytest.raises(TensorShape, match=r"norm\.weight is \(64,\), expected \(65,\)"):
        load_into(swapped("norm.weight", torch.zeros(65)), checkpoint)
    with pytest.raises(
        TensorDtype, match=r"embed\.weight is stored as BF16, expected F8_E4M3 .*load them as numbers"
    ):
        load_into(swapped("embed.weight", torch.zeros(512, 64).to(torch.float8_e4m3fn), "codes"), checkpoint)
    narrow = torch.zeros(32, 32).to(torch.float8_e4m3fn)
    with pytest.raises(TensorShape, match=r"is \(32, 64\), expected \(32, 32\) as packed codes"):
        load_into(swapped("layers.0.attn.wq_a.weight", narrow, "codes"), checkpoint)
    with pytest.raises(TensorDtype, match="expected I64 or I32"):
        load_into(swapped("embed.weight", torch.zeros(512, 64, dtype=torch.int32), "ids"), checkpoint)
    assert marks(model)


def put(name: str, index: tuple[int, ...], byte: int | None = None, value: float | None = None):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if byte is not None:
            tensors[name].view(torch.uint8)[index] = byte
        else:
            tensors[name][index] = value

    return change


DAMAGE = {
    "NaN fp8 scale": (
        put("layers.0.attn.wo_b.scale", (0, 0), byte=255),
        r"layers\.0\.attn\.wo_b\.scale\[0, 0\] is ",
    ),
    "NaN fp4 scale": (
        put("layers.3.ffn.experts.7.w2.scale", (5, 1), byte=255),
        r"\[5, 1\] is NaN \(byte 0xFF\)",
    ),
    "NaN code": (
        put("layers.1.attn.wkv.weight", (31, 2), byte=0x7F),
        r"layers\.1\.attn\.wkv\.weight\[31, 2\] is ",
    ),
    "negative NaN code": (put("layers.1.attn.wkv.weight", (0, 63), byte=0xFF), r"wkv\.weight\[0, 63\] is "),
    "bf16 NaN": (put("head.weight", (500, 3), value=math.nan), r"head\.weight\[500, 3\] is not finite"),
    "f32 infinity": (put("hc_head_base", (2,), value=math.inf), r"hc_head_base\[2\] is not finite"),
    "expert too large": (
        put("layers.1.ffn.gate.tid2eid", (511, 1), value=8),
        r"layers\.1\.ffn\.gate\.tid2eid\[511, 1\] is 8, expected an expert from 0 to 7",
    ),
    "expert negative": (put("layers.1.ffn.gate.tid2eid", (0, 0), value=-1), r"\[0, 0\] is -1, expected"),
    "expert twice": (
        lambda t: t["layers.0.ffn.gate.tid2eid"][9].fill_(4),
        r"\[9\] is \[4, 4\], expected different",
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_numbers_are_refused_with_their_place_and_do_no_harm(broken, tiny_path, case, packed):
    change, reason = DAMAGE[case]
    model = Transformer(preset("tiny"), packed=packed)
    with pytest.raises(TensorValue, match=reason) as caught:
        load_into(model.destinations(), open_checkpoint(edit(broken, change)))
    assert "expected" in str(caught.value)
    load_into(model.destinations(), open_checkpoint(tiny_path))  # the same model can still be loaded
    assert all(bool(d.tensor.float().isfinite().all()) for d in model.destinations() if d.kind == "value")


def test_numbers_too_large_for_the_destination_are_refused(broken):
    checkpoint = open_checkpoint(edit(broken, put("head.weight", (1, 1), value=1e5)))
    model = Transformer(preset("tiny"))
    half = [
        Destination(d.name, torch.empty_like(d.tensor, dtype=torch.float16)) if d.name == "head.weight" else d
        for d in model.destinations()
    ]
    with pytest.raises(TensorValue, match=r"head\.weight\[1, 1\] is not finite"):
        load_into(half, checkpoint)


def test_progress_counts_every_byte_once(tiny_path):
    seen: list[tuple[int, int]] = []
    report = load_into(
        Transformer(preset("tiny")).destinations(),
        open_checkpoint(tiny_path),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (report.file_bytes, report.file_bytes) and len(seen) == report.tensors + 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_views_receive_only_their_own_rows(tiny_path):
    """Loading one expert of a stack leaves the other experts unchanged."""
    checkpoint = open_checkpoint(tiny_path)
    stack = torch.full((4, 64, 64), 7.0)
    model = model_with_marks()
    name = "layers.0.ffn.experts.1.w1.weight"
    load_into(
        [Destination(name, stack[2].T) if d.name == name else d for d in model.destinations()], checkpoint
    )
    assert torch.equal(stack[2].T, exact(all_tensors(tiny_path), name).float())
    assert (stack[[0, 1, 3]] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_receives_the_same_bytes(tiny_path, packed):
    checkpoint = open_checkpoint(tiny_path)
    here, there = (Transformer(preset("tiny"), packed=packed).to(device) for device in ("cpu", "cuda"))
    for model in (here, there):
        load_into(model.destinations(), checkpoint)
    for ours, theirs in zip(here.destinations(), there.destinations(), strict=True):
        # Contiguous copies: some tensors are transposed views, which cannot be viewed as bytes.
        host, device = (end.tensor.detach().cpu().contiguous().view(torch.uint8) for end in (ours, theirs))
        assert torch.equal(host, device), ours.name
