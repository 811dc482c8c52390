"""Compile kernels for an H200 and print one JSON line per kernel with properties of the result: the prefill kernels
(all, or those named), with `types "TYPE KERNEL" ...` kernels for packed types, or with `targets "TARGET KERNEL" ...`
prefill kernels for other GPUs, with the tiles they are launched with there.

This runs as a separate process: Triton decides at import between interpreting and compiling, and the tests interpret.
Compiling needs no GPU.
"""

from __future__ import annotations

import itertools
import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from birkhoff.kernels.attend import decode as attend_decode
from birkhoff.kernels.attend import hopper
from birkhoff.kernels.attend import prefill as attend
from birkhoff.kernels.compress import decode as compress_decode
from birkhoff.kernels.compress import prefill as compress
from birkhoff.kernels.experts import block_types
from birkhoff.kernels.experts import decode as experts_decode
from birkhoff.kernels.experts import fp8 as fp8_experts
from birkhoff.kernels.experts import prefill as experts
from birkhoff.kernels.index import decode as index_decode
from birkhoff.kernels.index import prefill as index
from birkhoff.kernels.linear import decode as linear_decode
from birkhoff.kernels.linear import fp8 as fp8_linear
from birkhoff.kernels.linear import prefill as linear
from birkhoff.kernels.mhc import decode as mhc_decode
from birkhoff.kernels.mhc import prefill as mhc
from birkhoff.kernels.norm import decode as norm_decode
from birkhoff.kernels.norm import prefill as norm
from birkhoff.kernels.quant import device as quant

HOPPER = GPUTarget("cuda", 90, 32)
BF16, F16, F32, U8, I32, I64 = "*bf16", "*fp16", "*fp32", "*u8", "*i32", "*i64"
EXPERTS = {
    "x": BF16,
    "z": BF16,
    "y": BF16,
    "addresses": I64,
    "blocks": I32,
    "order": I32,
    "weights": F32,
    "limit": "fp32",
}
CACHES = {"raw": F32, "values": F32, "ape": F32, "norm": F32, "ring": F32, "pages": BF16}
STEP = {
    "table": I64,
    "slots": I64,
    "positions": I64,
    "starts": I64,
    "stops": I64,
    "cos": F32,
    "sin": F32,
    "eps": "fp32",
}
ATTENTION = {
    "queries": BF16,
    "keys": BF16,
    "offsets": I64,
    "positions": I64,
    "counts": I32,
    "sink": F32,
    "out": BF16,
    "scale": "fp32",
    "cos": F32,
    "sin": F32,
}
PACKED = {"FP32": False, "BF16X2": True, "TOKENS": 128}
COUNTS = {
    "n",
    "rows",
    "topk",
    "length",
    "span",
    "max_entries",
    "slot",
    "per_page",
    "row_tiles",
    "token_tiles",
}
# V4-Flash: hidden 4096, experts of 2048, 64 heads of 512, an indexer of 64 heads of 128, and chunks of 4,096 tokens.
KERNELS: dict[str, tuple] = {
    "experts gate_up": (experts._gate_up, EXPERTS, PACKED | experts.tile_config(False, True)),
    "experts down": (experts._down, EXPERTS, PACKED | experts.tile_config(False, False)),
    "linear fp8": (
        linear._packed_linear,
        {"x": F16, "weight": U8, "scale": U8, "grid": U8, "out": BF16},
        {
            "TYPE": "rows of FP8",
            "FP32": False,
            "TILE_GROUP": linear.TILE_GROUP,
            **linear.tile_config(4096, 4096, False),
        },
    ),
    "mhc mix": (
        mhc._mix,
        {"streams": BF16, "high": BF16, "low": BF16, "parts": F32},
        {
            "COUNT": mhc.COUNT,
            "PADDED": mhc.PADDED,
            "SPLITS": mhc.SPLITS,
            "FP32": False,
            **mhc.tile_config(False),
        },
    ),
    "attention": (
        attend._attend,
        ATTENTION,
        {
            "PAIRS": 32,
            "ENTRIES": True,
            "WIDTH": 512,
            "PADDED": 512,
            "FP32": False,
            **attend.tile_config(64, False),
        },
    ),
    "attention on Hopper": (
        hopper._attend_hopper,
        ATTENTION,
        {
            "PAIRS": 32,
            "ENTRIES": True,
            "HEADS": 64,
            "WIDTH": 512,
            "KEYS": 64,
            "num_warps": 8,
            "num_stages": 1,
        },
    ),
    "index score": (
        index._score,
        {
            "queries": BF16,
            "weights": F32,
            "counts": I32,
            "pages": BF16,
            "table": I64,
            "scores": F32,
            "scale": "fp32",
        },
        {"PER_PAGE": 32, "HEADS": 64, "WIDTH": 128, "FP32": False, **index.tile_config(False)},
    ),
}

# The Triton kernels of a decode step, which take the place of the CUDA ones on Ada and AMD, for a few tokens.
SMALL = {"num_warps": 4, "num_stages": 3}
PLACES = {"table": I64, "slots": I64, "positions": I64, "cos": F32, "sin": F32}
PARTIAL = {"partial_out": F32, "partial_max": F32, "partial_sum": F32, "sink": F32, "rule_sink": F32}
FP4_EXPERTS = {"addresses": I64, "slots": I32, "order": I32, "weights": F32, "limit": "fp32"}
BOUNDARY = dict.fromkeys(("post", "mix", "pre", "parts", "fn", "base", "scale", "norm"), F32) | {
    "streams": BF16
}
EPS = dict.fromkeys(("eps", "rms_eps", "norm_eps"), "fp32")
DECODE_KERNELS: dict[str, tuple] = {
    "decode attention": (
        attend_decode._attend,
        PLACES
        | PARTIAL
        | EPS
        | {"queries": BF16, "keys": BF16, "pages": BF16, "topk_indices": I32, "scale": "fp32"}
        | {"rule_counts": I64, "rules": I64},
        {"RATIO": 4, "INDEXED": True, "HEADS": 16, "WIDTH": 512, "ROPE_DIM": 64, "KEYS": 32, "FP32": False}
        | {"RULES": 0, "RULE_WIDTH": 0, "num_warps": 4, "num_stages": 2},
    ),
    "decode combine": (
        attend_decode._combine,
        PARTIAL | {"cos": F32, "sin": F32, "out": BF16, "out_fp16": BF16},
        SMALL | {"SPLITS": 32, "WIDTH": 512, "ROPE_DIM": 64, "FP16": False, "PDL": False, "RULES": 0},
    ),
    "decode write": (
        mhc_decode._write_and_mix,
        BOUNDARY | {"y": F32, "embed": BF16, "tokens": I64},
        SMALL | {"MODE": 0, "COUNT": 24, "PADDED": 32, "ROWS": 1, "BLOCK": 64, "PDL": False},
    ),
    "decode read": (
        mhc_decode._read_streams,
        BOUNDARY | EPS | {"out": BF16, "out_fp16": BF16, "out_fp4_order": BF16},
        {"HEAD": False, "NORM": True, "FP16": False, "FP4_ORDER": False, "COUNT": 24, "PADDED": 32}
        | {"SPLITS": 64, "BLOCK": 4096, "num_warps": 8, "num_stages": 3},
    ),
    "decode route": (
        experts_decode._route,
        {"logits": F32, "bias": F32, "hash_table": I32, "tokens": I64, "ids": I32, "weights": F32}
        | {"order": I32, "slots": I32, "factor": "fp32"},
        SMALL | {"HASHED": False, "TOKENS": 8, "EXPERTS": 256},
    ),
    "decode gate_up": (
        experts_decode._gate_up,
        FP4_EXPERTS | {"x": BF16, "z": BF16},
        SMALL | {"FP32": False, "TOKENS": 16, "ROWS": 32, "INNER": 64},
    ),
    "decode down": (
        experts_decode._down,
        FP4_EXPERTS | {"z": BF16, "y": F32},
        SMALL | {"FP32": False, "TOKENS": 16, "ROWS": 64, "INNER": 64},
    ),
    "decode swiglu": (
        experts_decode._swiglu,
        {"gate_up_rows": F32, "z": BF16, "limit": "fp32"},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3},
    ),
    "decode product": (
        linear_decode._gemv,
        {"x": BF16, "weight": U8, "scale": U8, "grid": U8, "out": BF16},
        SMALL | {"TYPE": "rows of FP8", "FP32": False, "TOKENS": 16, "ROWS": 64, "INNER": 128},
    ),
    "decode score": (
        index_decode._score,
        PLACES | {"queries": BF16, "weights": F32, "pages": BF16, "scores": F32, "scale": "fp32"},
        SMALL
        | {"HEADS": 64, "WIDTH": 128, "ROPE_DIM": 64, "ENTRIES": 64, "FP32": False}
        | {"RELEASED": False, "PDL": False},
    ),
    "decode top-k": (
        index_decode._topk_entries,
        {"scores": F32, "positions": I64, "topk_indices": I32},
        {"BLOCK": 4096, "TOPK": 512, "TILE": 8192, "COUNTED": False, "num_warps": 8, "num_stages": 3},
    ),
    "decode caches": (
        compress_decode._norm_rope_store,
        PLACES
        | {name + number: kind for name, kind in CACHES.items() for number in ("", "2")}
        | {"qkv": F32, "q_norm": F32, "kv_norm": F32, "latent": BF16, "latent_half": BF16, "keys": BF16}
        | {"eps": "fp32"},
        SMALL
        | {"RANK": 1024, "WIDTH": 512, "ROPE_DIM": 64, "RATIO": 4, "INDEX": 128, "FP16": False, "ITEMS": 8}
        | {"DRAFTS": 0, "RELEASED": False, "PDL": False},
    ),
    "decode norm": (
        norm_decode._norm_into,
        {"u": BF16, "weight": F32, "x": BF16, "x_fp16": BF16, "x_fp4_order": BF16, "eps": "fp32"},
        {"FP16": False, "FP4_ORDER": False, "BLOCK": 4096, "num_warps": 8, "num_stages": 3},
    ),
}


# Other GPUs: the target, bytes of shared memory of a thread block, and whether FP8 products run there. On AMD's gfx942
# the matrix instructions have another FP8 format, so that released numerics use 16-bit products.
TARGETS = {
    "sm_89": (GPUTarget("cuda", 89, 32), 101_376, True),
    "sm_90": (HOPPER, 232_448, True),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448, True),
    "sm_120": (GPUTarget("cuda", 120, 32), 101_376, True),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536, False),
}


def target_kernels(name: str) -> dict[str, tuple]:
    """The prefill kernels of one of `TARGETS`, with the tiles they are launched with there, and the decode kernels."""
    target, shared, has_fp8 = TARGETS[name]
    packed = PACKED | {"BF16X2": target.backend == "cuda" and target.arch >= 90}
    kernel, types, settings = KERNELS["attention"]
    linear_kernel, linear_types, linear_settings = KERNELS["linear fp8"]
    mix, mix_types, mix_settings = KERNELS["mhc mix"]
    score, score_types, score_settings = KERNELS["index score"]
    e4m3 = "*fp8e4nv"
    codes = EXPERTS | {"x_scale": F32, "z_scale": F32}
    spread = {"PRMT": True, "TOKENS": 128, **fp8_experts.tile_config(128)}
    rounding = {"num_warps": 4, "num_stages": 3}
    found = (
        KERNELS
        | DECODE_KERNELS
        | {
            "experts gate_up": (experts._gate_up, EXPERTS, packed | experts.tile_config(False, True, shared)),
            "experts down": (experts._down, EXPERTS, packed | experts.tile_config(False, False, shared)),
            "linear fp8": (
                linear_kernel,
                linear_types,
                linear_settings | linear.tile_config(4096, 4096, False, shared),
            ),
            "mhc mix": (mix, mix_types, mix_settings | mhc.tile_config(False, shared)),
            "index score": (score, score_types, score_settings | index.tile_config(False, shared)),
            "attention": (kernel, types, settings | attend.tile_config(64, False, name == "sm_90")),
            "norm rotate": (
                norm._norm_rotate,
                {"x": BF16, "weight": F32, "cos": F32, "sin": F32, "out": BF16, "eps": "fp32"},
                rounding
                | {
                    "WEIGHT": True,
                    "WIDTH": 512,
                    "PADDED": 512,
                    "PAIRS": 32,
                    "KEEP": 64,
                    "GROUP": 64,
                    "ROWS": 4,
                },
            ),
            "compress": (
                compress._compress,
                {name + number: kind for name, kind in CACHES.items() for number in ("", "2")} | STEP,
                rounding
                | {"RATIO": 4, "WIDTH": 512, "WIDTH2": 128, "ROPE_DIM": 64, "ITEMS": 8}
                | {"ROUNDING": "key", "ROUNDING2": "index"},
            ),
            "store": (
                compress._store,
                {name + number: kind for name, kind in CACHES.items() for number in ("", "2", "3")} | STEP,
                rounding
                | {"WIDTH": 512, "PADDED": 512, "RATIO": 0, "WIDTH2": 2048, "PADDED2": 2048, "RATIO2": 4}
                | {"WIDTH3": 512, "PADDED3": 512, "RATIO3": 4},
            ),
            "round": (
                quant._fp8_round,
                {"x": BF16, "out": BF16},
                rounding | {"dtype": tl.bfloat16, "GROUP": 128, "ITEMS": 16},
            ),
            "hadamard": (
                quant._hadamard_fp4,
                {"x": BF16, "out": BF16},
                rounding | {"WIDTH": 128, "FP32": False, "ROWS": 64},
            ),
        }
    )
    if has_fp8:
        found |= {
            "quantise": (
                quant._quantise,
                {"x": BF16, "codes": e4m3, "scales": F32},
                rounding | {"ORDER": 1, "ROWS": 16},
            ),
            "fp8 product": (
                fp8_linear._fp8_product,
                {"x": e4m3, "x_scale": F32, "weight": e4m3, "w_scale": F32, "out": BF16},
                {"TILE_GROUP": fp8_linear.TILE_GROUP, **fp8_linear.tile_config(4096)},
            ),
            "norm codes": (
                norm._rms_norm,
                {
                    "x": BF16,
                    "weight": F32,
                    "out": BF16,
                    "codes": e4m3,
                    "ordered": e4m3,
                    "scales": F32,
                    "eps": "fp32",
                },
                rounding | {"WEIGHT": True, "CODES": True, "ORDER": 2, "ROWS": 4, "BLOCK": 1024},
            ),
            "gate codes": (
                experts._swiglu_codes,
                {"gate_up_rows": BF16, "z": BF16, "codes": e4m3, "scales": F32, "limit": "fp32"},
                {"num_warps": 8, "num_stages": 3, "ROWS": 2, "BLOCK": 2048},
            ),
            "read codes": (
                mhc._coefficients_and_collapse,
                dict.fromkeys(("parts", "base", "scale", "pre", "post", "mix", "norm", "scales"), F32)
                | {"streams": BF16, "out": BF16, "codes": e4m3, "ordered": e4m3}
                | dict.fromkeys(("eps", "rms_eps", "norm_eps"), "fp32"),
                {"NORM": True, "CODES": True, "ORDER": 2, "COUNT": mhc.COUNT, "PADDED": mhc.PADDED}
                | {"SPLITS": mhc.LONG_SPLITS, "TOKENS": 32, "BLOCK": 4096, "num_warps": 4, "num_stages": 3},
            ),
            "fp8 gate_up": (fp8_experts._gate_up_fp8, codes | {"x": e4m3}, spread | {"GROUPS": 128}),
            "fp8 down": (fp8_experts._down_fp8, codes | {"z": e4m3}, spread | {"GROUPS": 64}),
        }
    return found


def compiled(kernel, types: dict[str, str], settings: dict, target: GPUTarget = HOPPER):
    """Compile a kernel for compute capability 9.0; `settings` are its constexprs, `num_warps` and `num_stages`."""
    options = {name: settings[name] for name in ("num_warps", "num_stages")}
    constants_by_name = {name: value for name, value in settings.items() if name not in options}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants_by_name else types.get(name, "i32") for name in names}
    # Triton specialises on argument values: addresses and widths are multiples of 16 at V4's sizes, counts are not.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in COUNTS)
    }
    constants = {(names.index(name),): value for name, value in constants_by_name.items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    return triton.compile(source, target=target, options=options)


def _waits_for_products(text: str) -> bool:
    """Return whether the loop waits for its last product before it starts copies of the next tiles."""
    loop = text[text.find("scf.for") : text.find("scf.yield")]
    events = re.findall(r"warp_group_dot_wait.*pendings = 0|warp_group_dot |async_copy_global_to_local", loop)
    kinds = [event.split()[0] for event in events]
    return ("warp_group_dot", "async_copy_global_to_local") not in itertools.pairwise(kinds)


def type_kernels(kind: str) -> dict[str, tuple]:
    """The kernels of a packed type, with the tiles they are launched with."""
    table = {"grid": U8, "plan": I32}
    product = {"x": BF16, "weight": U8, "scale": U8, "out": F32} | table
    expert = EXPERTS | {"y": F32} | table
    numbers = {"TYPE": kind, "FP32": False}
    decoding = numbers | block_types.tile_config(16, False, decoding=True)
    prompt = numbers | block_types.tile_config(64, False, decoding=False)
    tile = {"TOKENS": 16, "ROWS": 64, "INNER": 128, "num_warps": 4, "num_stages": 3}
    rows = linear.tile_config(64, 4096, False) | {"TILE_GROUP": linear.TILE_GROUP}
    return {
        "decode product": (linear_decode._gemv, product, numbers | tile),
        "decode gate_up": (block_types._gate_up, expert, decoding),
        "decode down": (block_types._down, expert, decoding),
        "prompt product": (linear._packed_linear, product, numbers | rows),
        "prompt gate_up": (block_types._gate_up, expert, prompt),
        "prompt down": (block_types._down, expert, prompt),
    }


def main() -> None:
    if sys.argv[1:2] == ["targets"]:
        for words in sys.argv[2:]:
            target, name = words.split(" ", 1)
            kernel_binary = compiled(*target_kernels(target)[name], TARGETS[target][0])
            row = {"target": target, "kernel": name, "shared": kernel_binary.metadata.shared}
            print(json.dumps(row | {"limit": TARGETS[target][1]}), flush=True)
        return
    if sys.argv[1:2] == ["types"]:
        for words in sys.argv[2:]:
            kind, name = words.split(" ", 1)
            kernel_binary = compiled(*type_kernels(kind)[name])
            code = kernel_binary.asm["ptx"]
            products = "mma.sync" in code or "wgmma.mma_async" in code
            row = {"type": kind, "kernel": name, "shared": kernel_binary.metadata.shared}
            print(json.dumps(row | {"products": products}), flush=True)
        return
    for name in sys.argv[1:] or KERNELS:
        kernel_binary = compiled(*KERNELS[name])
        code = kernel_binary.asm["ptx"]
        report = {
            "kernel": name,
            "shared": kernel_binary.metadata.shared,
            "tensor_cores": "wgmma.mma_async" in code,
            "async_copies": "cp.async" in code,
            "waits_for_products": _waits_for_products(kernel_binary.asm["ttgir"]),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
