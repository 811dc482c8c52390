"""CUDA kernels compared with the Triton kernels at supported widths. Needs a GPU of compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models import TINY

pytest.importorskip("triton", reason="triton is not installed")
import triton  # isort: skip
import triton.language as tl  # isort: skip

from birkhoff.kernels.experts.prefill import _decoded  # isort: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="CUDA kernels need an NVIDIA GPU of compute capability 9.0 or more",
    ),
]
WIDE = replace(
    TINY,
    vocab_size=1024,
    hidden_size=1024,
    num_attention_heads=16,
    head_dim=128,
    q_lora_rank=256,
    o_groups=2,
    o_lora_rank=128,
    sliding_window=64,
    compress_ratios=(0, 4, 128, 4),
    num_hidden_layers=4,
    num_hash_layers=1,
    index_n_heads=16,
    index_head_dim=32,
    n_routed_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=1024,
    num_nextn_predict_layers=0,
    swiglu_limit=10.0,
)


@pytest.mark.parametrize("rows", [1, 3, 8, 17, 33, 64])
@torch.inference_mode()
def test_a_step_matches_the_triton_kernels(rows):
    from birkhoff.bench.decode import set_inputs
    from birkhoff.bench.synthetic import filled_state, random_on_device
    from birkhoff.decode.gpu import Decoder

    device = torch.device("cuda")
    model = random_on_device(WIDE, device, seed=rows)
    logits: list[list[torch.Tensor]] = [[], []]
    for steps, fast in zip(logits, (False, True)):
        torch.manual_seed(rows)
        decoder = Decoder(model, filled_state(WIDE, rows, 384, device), fast=fast)
        buffers = decoder.buffers(rows, 640)
        for step in range(max(1, 16 // rows)):
            buffers.poison()
            set_inputs(
                buffers,
                [50 * step + row for row in range(rows)],
                [380 + 3 * row + step for row in range(rows)],
            )
            steps.append(decoder.step(buffers).clone())
    expected, actual = (torch.cat(steps) for steps in logits)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The median, because a near tie between two experts may be resolved differently in a few rows.
    assert error.median() < 0.02


@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("pdl", [False, True])
@torch.inference_mode()
def test_graph_replays_are_deterministic(pdl, rows):
    """Kernels that start early (PDL) wait for their inputs: fifty replays give the same bits."""
    from birkhoff.bench.decode import set_inputs
    from birkhoff.bench.synthetic import filled_state, random_on_device
    from birkhoff.decode.gpu import Decoder

    device = torch.device("cuda")
    decoder = Decoder(
        random_on_device(WIDE, device), filled_state(WIDE, rows, 384, device), fast=True, pdl=pdl
    )
    buffers = decoder.buffers(rows, 640)
    set_inputs(buffers, list(range(1, rows + 1)), [(381, 200, 127, 5)[row % 4] for row in range(rows)])
    first = decoder.step(buffers).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(buffers)
    for _ in range(50):
        buffers.logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(buffers.logits, first)


@pytest.mark.parametrize("rows", [1, 5, 20])
@torch.inference_mode()
def test_experts_in_host_memory_give_the_same_bits(rows):
    """Some or all experts are in host memory, which the kernels read with other instructions."""
    from birkhoff.bench.decode import set_inputs
    from birkhoff.bench.placement import random_resident
    from birkhoff.bench.synthetic import filled_state, random_placed
    from birkhoff.decode.gpu import Decoder

    device, results = torch.device("cuda"), []
    for share in (1.0, 0.5, 0.0):
        hot = random_resident(WIDE.num_hidden_layers, WIDE.n_routed_experts, share)
        model, _ = random_placed(WIDE, device, hot, spare=4, seed=rows)
        torch.manual_seed(rows)
        decoder = Decoder(model, filled_state(WIDE, rows, 384, device), fast=True)
        assert [w.host_range is None for w in decoder.layers] == [share == 1.0] * WIDE.num_hidden_layers
        buffers = decoder.buffers(rows, 640)
        buffers.poison()
        set_inputs(buffers, list(range(rows)), [380 + 3 * row for row in range(rows)])
        results.append(decoder.step(buffers).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("parts", [0, 1, 7])
@torch.inference_mode()
def test_write_and_mix_matches_the_triton_kernel(rows, parts):
    """Adds the sum of `parts` to the streams; without parts, the streams start from an embedding."""
    from birkhoff.kernels.cuda.backend import CudaBackend
    from birkhoff.kernels.mhc import decode as mhc

    device, width = torch.device("cuda"), 1024
    torch.manual_seed(rows)
    streams = torch.randn(rows, 4, width, device=device).bfloat16()
    y = torch.randn(rows, parts, width, device=device) if parts else None
    post, mix = torch.rand(rows, 4, device=device), torch.rand(rows, 4, 4, device=device)
    fn, embed = torch.randn(24, 4 * width, device=device), torch.randn(50, width, device=device).bfloat16()
    tokens = torch.arange(rows, device=device) * 5
    results = []
    for write in (mhc.write_and_mix, CudaBackend(device).write_and_mix):
        out_streams, sums = streams.clone(), torch.full((rows, width // 64, 32), torch.nan, device=device)
        write(out_streams, y, post, mix, fn, sums, mhc.KEEP if parts else mhc.EMBED, embed, tokens)
        results.append((out_streams.float(), sums[:, :, :25]))
    (expected, expected_sums), (actual, actual_sums) = results
    assert ((actual - expected).abs() <= expected.abs() / 128).all()
    assert (actual_sums - expected_sums).norm() < 1e-3 * expected_sums.norm() and (
        actual != expected
    ).float().mean() < 0.01


@pytest.mark.parametrize("capacity", [600, 8192, 8193, 32768, 65536, 131072, 262144])
@torch.inference_mode()
def test_topk_matches_a_stable_sort(capacity):
    """Many ties; sequences that fill the capacity, a third of it, or have fewer entries than `topk`."""
    from birkhoff.kernels.cuda.backend import CudaBackend

    device, topk = torch.device("cuda"), 512
    torch.manual_seed(capacity)
    counts = [capacity, capacity // 3 + 400, topk - 1]
    scores = torch.randn(3, capacity, device=device)
    scores[1] = (scores[1] * 4).round()
    chosen = torch.full((3, topk), -1, dtype=torch.int32, device=device)
    positions = torch.tensor([4 * count + 2 for count in counts], device=device)
    CudaBackend(device).topk(scores, positions, chosen)
    for row, count in enumerate(counts):
        best = scores[row, :count].sort(descending=True, stable=True).indices[:topk].sort().values
        assert torch.equal(chosen[row, : len(best)].long(), best)


@pytest.mark.parametrize("width, heads, rope_dim", [(128, 16, 32), (512, 64, 64)])
@pytest.mark.parametrize("ratio, indexed", [(0, False), (4, False), (4, True), (128, False)])
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.inference_mode()
def test_attention_matches_the_triton_kernels(rows, ratio, indexed, width, heads, rope_dim):
    """From one token to several hundred, in rings longer than the window. Unwritten rows are NaN."""
    from birkhoff.kernels.attend import decode as portable
    from birkhoff.kernels.cuda.backend import CudaBackend

    device, window, ring, topk, context = torch.device("cuda"), 64, 70, 96, 1024
    torch.manual_seed(rows + ratio)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    slots, per_page = torch.randperm(rows + 2, device=device)[:rows], 128 // (ratio or 128)
    table = torch.randperm((rows + 2) * context // 128, device=device).view(rows + 2, -1)
    queries = torch.randn(rows, heads * width + 64, device=device).bfloat16() * 3
    angles, sink = torch.randn(rows, 4, rope_dim // 2, device=device), torch.randn(heads, device=device)
    first = 1 if ratio else 0  # compressed layers do not use the first set of phases
    cos, sin = (
        torch.cat((part, part[:1])).view(-1, rope_dim // 2)[first:] for part in (angles.cos(), angles.sin())
    )
    cos, sin = (part[: 4 * rows].view(rows, 4, -1) for part in (cos, sin))
    reach = ring + (min(topk, context // 4) if indexed else context // ratio if ratio else 0)
    shares, share = portable.split_keys(rows, heads, reach)
    size = (rows, shares, heads)
    kernels = CudaBackend(device)
    for base in (0, 2, 60, 127, 300, 700):
        at = [(base + 37 * row) % 1000 for row in range(rows)]
        keys = torch.randn(rows + 2, ring, width, device=device).bfloat16()
        pages = torch.randn(table.numel(), per_page, width, device=device).bfloat16() if ratio else None
        chosen = torch.full((rows, topk), -(2**30), dtype=torch.int32, device=device) if indexed else None
        for row, position in enumerate(at):
            keys[slots[row], position + 1 :] = torch.nan
            count = (position + 1) // ratio if ratio else 0
            if pages is not None:
                e = torch.arange(count, context // ratio, device=device)
                pages[table[slots[row], e // per_page], e % per_page] = torch.nan
            if chosen is not None:
                selected = torch.randperm(count, device=device)[:topk].sort().values
                chosen[row, : len(selected)] = selected
        results = []
        for attend in (portable.attend, kernels.attend):
            buffers = [empty(*size, width), empty(*size), empty(*size)]
            out, half = (empty(rows, heads * width, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
            attend(
                queries,
                keys,
                window,
                pages,
                ratio,
                table,
                chosen,
                slots,
                torch.tensor(at, device=device),
                cos,
                sin,
                *buffers,
                sink,
                share,
                width**-0.5,
                1e-6,
                out,
                half,
            )
            results.append([*buffers, out, half])
        for actual, expected in zip(results[1], results[0]):
            assert actual.isfinite().all()
            # The maximum over no keys is -1e30.
            actual, expected = (part.double() * (part > -1e29) for part in (actual, expected))
            # Both round the same products; the order of summation changes a probability or an output by one rounding.
            assert (actual - expected).norm() <= 2.0**-7 * expected.norm()


@triton.jit
def unpack(codes, scales, even, odd, half, BF16X2: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    r = tl.arange(0, ROWS)
    for start in range(0, half, BYTES):
        e, o = _decoded(codes, scales, r, r < ROWS, start, half, tl.bfloat16, BF16X2, ROWS, BYTES)
        at = r[:, None] * half + start + tl.arange(0, BYTES)[None, :]
        tl.store(even + at, e)
        tl.store(odd + at, o)


@torch.inference_mode()
def test_fp4_codes_are_decoded_exactly():
    """Every byte with scales from the smallest to the largest, compared with the arithmetic for other GPUs."""
    device = torch.device("cuda")
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device=device).clamp(1, 250).view(256, 1).repeat(1, 16)
    results = []
    for paired in (False, True):
        parts = [torch.full((256, 256), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for first in (0, 128):
            rows = slice(first, first + 128)
            unpack[(1,)](
                codes[rows],
                scales[rows],
                *(part[rows] for part in parts),
                256,
                BF16X2=paired,
                ROWS=128,
                BYTES=64,
            )
        results.append(torch.cat(parts))
    assert torch.equal(*(part.view(torch.int16) for part in results)) and results[0].isfinite().all()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the matrix instructions of these kernels exist on compute capability 9.0 only",
)
@pytest.mark.parametrize("distance", [2, 30], ids=["one pass", "three passes"])
@pytest.mark.parametrize("tokens", [1, 40, 300])
@torch.inference_mode()
def test_prompt_experts_match_the_triton_kernels(tokens, distance):
    """Every number of tokens of a block, rows whose scales are far apart, and outputs that were NaN before."""
    from birkhoff.kernels.cuda import prompt_experts
    from birkhoff.kernels.experts import fp8, prefill, reference
    from birkhoff.kernels.quant.device import fp8_round, quantise_fp8

    device, count, topk, width, inner, limit = torch.device("cuda"), 4, 2, 512, 256, 10.0
    torch.manual_seed(tokens)
    codes = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        for shape in ((count, 2 * inner, width // 2), (count, width, inner // 2))
    ]
    scales = [
        torch.randint(121 - distance, 122, (*part.shape[:2], part.shape[2] // 16), device=device).to(
            torch.uint8
        )
        for part in codes
    ]
    parts = (codes[0], scales[0], codes[1], scales[1])
    table = torch.tensor([[part[e].data_ptr() for part in parts] for e in range(count)], device=device)
    x = torch.randn(tokens, width, device=device).bfloat16()
    ids, weights = reference.route(
        torch.randn(tokens, count, device=device), torch.zeros(count, device=device), None, topk, 1.5
    )
    order, blocks = prefill.plan(ids, count, prompt_experts.MAX_TOKENS)
    z = torch.full((tokens * topk, inner), torch.nan, device=device).bfloat16()
    y, expected = (torch.full((tokens * topk, width), torch.nan, device=device).bfloat16() for _ in range(2))
    fp8.gate_up(*quantise_fp8(x, "halves"), table, blocks, order, weights, z, limit, 128)
    fp8.down(*quantise_fp8(z, "halves"), table, blocks, order, expected, 128)
    middle = prompt_experts.gate_up(
        *quantise_fp8(x, "fragments"), table, blocks, order, weights, inner, limit
    )
    prompt_experts.down(*middle, table, blocks, order, y)
    c = torch.arange(128, device=device)
    place = c // 8 % 4 * 32 + c // 4 % 2 * 16 + c // 32 * 4 + c % 4
    natural = middle[0].float().view(-1, inner // 128, 128)[:, :, place].flatten(1)
    values = natural * middle[1].T.repeat_interleave(128, 1)
    rounded = fp8_round(z, 128).float()
    assert (values != rounded).float().mean() < 0.03, "a value next to a tie may be rounded the other way"
    assert (y - expected).float().norm() < 0.01 * expected.float().norm() and y.isfinite().all()
