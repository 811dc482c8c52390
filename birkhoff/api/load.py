"""Open a checkpoint and decide how it runs: device, dtype, kernels, memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from birkhoff.api.engine import Engine
from birkhoff.api.expert_placement import place, placed_text, refuse_unplaceable, wish_of
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.dtype_names import dtype_name
from birkhoff.embedded import EMBEDDED, shipped_vectors
from birkhoff.engine.cache_plan import check_prefix_cache, drafts_of, files_for, plan_memory
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.warmup import compile_kernels
from birkhoff.errors import CheckpointError, OptionError, quoted
from birkhoff.kernels import gpu, jit
from birkhoff.kernels.select import Choice, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.offload.placement import Placement
from birkhoff.text.literals import Literals, literals_from_json, load_literals
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.weights.checkpoint import Checkpoint, is_gguf, open_checkpoint
from birkhoff.weights.weight_loader import load_into

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    numerics: str = "plain",
    kernels: str = "auto",
    experts: str | int | float = "auto",
    gpu_memory: str | int | None = None,
    expert_counts: str | Path | None = None,
    max_requests: int = 8,
    max_batch_tokens: int = 2048,
    max_context: int | None = None,
    cache_bytes: int | None = None,
    batch_invariant: bool = False,
    prefix_cache: str | bool = "auto",
    speculative: str | bool | int = "auto",
    capture_root: str | Path | None = None,
    context_root: str | Path | None = None,
    context_bytes: int = 2**30,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Open a checkpoint and make it ready to answer. See the package's documentation for every option.

    `context_root` is a folder for pages of past prompts that memory has no room for, of at most `context_bytes`; they
    are found there again by a later process. `expert_counts` is a file of how often each expert was read: where there
    is one, it decides which experts begin on the device, and it is written anew when the engine is closed. `progress`
    is called with (bytes read, bytes in all) while weights are loaded."""
    wish = wish_of(experts, gpu_memory, expert_counts)
    check_prefix_cache(prefix_cache)
    drafts_of(
        speculative, has_mtp=True, batch_invariant=False
    )  # a wrong value is refused before anything is read
    _one_of("numerics", numerics, ("plain", "released"))
    _one_of("dtype", dtype, ("auto", *_DTYPES))
    numbers = {
        "max_requests": max_requests,
        "max_batch_tokens": max_batch_tokens,
        "context_bytes": context_bytes,
    }
    for name, value in numbers.items():
        _whole(name, value)
    for name, optional in (("max_context", max_context), ("cache_bytes", cache_bytes)):
        if optional is not None:
            _whole(name, optional)
    if not isinstance(batch_invariant, bool):
        raise OptionError(f"batch_invariant is {quoted(batch_invariant)}, expected True or False.")
    if max_batch_tokens <= max_requests:
        raise OptionError(
            f"max_batch_tokens is {max_batch_tokens}, expected more than max_requests ({max_requests}): "
            "every running request decodes one token a step."
        )
    path = _resolve(model)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if max_context is not None and max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise OptionError(
            f"max_context is {max_context}, the model's limit is {limit}. Ask for that or less."
        )
    where = _device(device)
    choice = _kernels(kernels, where)
    # Codes stay codes where kernels read them. Guesses are rows that those kernels do not know: only when asked for.
    packed = choice == "triton" and numerics == "plain" and _stored_packed(checkpoint)
    wanted = False if packed and speculative == "auto" else speculative
    drafts = drafts_of(wanted, checkpoint.has_mtp, batch_invariant)
    compute = torch.float32 if dtype == "auto" and where.type == "cpu" else _DTYPES.get(dtype, torch.bfloat16)
    how = Numerics(compute, numerics == "released", select(choice))
    with_mtp = checkpoint.has_mtp and not (packed and drafts.depth == 0)  # device memory is for what is used
    with torch.device("meta"):
        network = Transformer(config, how, packed, mtp=with_mtp)
    placed = None
    if packed:
        room = _free_bytes(where), _free_bytes(torch.device("cpu"))
        placed = place(network, wish, where, *room, cache_bytes, max_requests, max_context)
    else:
        refuse_unplaceable(wish)
    if placed is not None:
        network.hold_experts(placed.store)
    network = network.to_empty(device=where).eval()
    load_into(network.destinations(), checkpoint, skip=() if with_mtp else ("mtp.",), progress=progress)
    install_cpu_decode(network)
    if how.kernels.name == "cpu":
        seconds = compile_kernels()
        if seconds > 2:
            print(
                f"birkhoff: compiled CPU kernels in {seconds:.0f} s; they are kept for next time",
                file=sys.stderr,
            )
    if cache_bytes is None:
        cache_bytes = _free_bytes(where) // 4 if placed is None else placed.budget.cache_bytes
    memory = plan_memory(
        config, compute.itemsize, cache_bytes, max_requests, max_context, prefix_cache, drafts.depth
    )
    tokenizer = _tokenizer(checkpoint)
    core = EngineCore(
        network,
        max_requests=max_requests,
        max_context=memory.context,
        num_pages=memory.pages,
        max_batch_tokens=max_batch_tokens,
        batch_invariant=batch_invariant,
        prefix_bytes=memory.prefix_bytes,
        row_bytes=memory.row_bytes,
        draft_depth=drafts.depth,
        draft_always=drafts.always,
        files=files_for(network, context_root, context_bytes) if memory.prefix_bytes else None,
        device=where,
        placement=None
        if placed is None
        else Placement(placed.store, placed.heat, network.hash_routing_tables(), file=wish.counts),
    )
    for notice in checkpoint.notices:
        print(f"birkhoff: {notice}", file=sys.stderr)
    print(
        f"birkhoff: {model} on {where}, {dtype_name(compute)}, {numerics} numerics, {how.kernels.name} kernels; "
        f"{max_requests} requests of up to {memory.context} tokens, cache_bytes {cache_bytes}; prefix cache "
        + (f"of {memory.pages} pages" if memory.prefix_bytes else "off")
        + f", {drafts}"
        + (f"; {placed_text(placed.budget)}" if placed is not None else ""),
        file=sys.stderr,
    )
    engine = Engine(core, tokenizer, _literals(checkpoint), str(model), capture_root)
    for name, vector in shipped_vectors(model).items():
        engine.modules[name] = vector
    return engine


def _resolve(model: str | Path) -> Path:
    if not isinstance(model, (str, Path)):
        raise OptionError(f"model is {quoted(model)}, expected 'nano' or the path of a checkpoint directory.")
    if model == "nano":
        if not (EMBEDDED / "nano" / "config.json").is_file():
            raise CheckpointError(
                "the embedded model nano is not part of this installation. Install the package with "
                "its model files, or write a random one: birkhoff synth OUT --like nano"
            )
        return EMBEDDED / "nano"
    path = Path(model).expanduser()
    if not path.is_dir() and not is_gguf(path):
        what = "a file" if path.exists() else "missing"
        raise CheckpointError(
            f"{model} is {what}; expected 'nano', a directory with config.json and safetensors files, or a GGUF file. "
            "Check the path."
        )
    return path


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device if isinstance(device, (str, torch.device)) else "")
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise OptionError(f"device is {quoted(device)}, expected 'auto', 'cpu' or 'cuda'.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is 'cuda', but PyTorch sees no CUDA device here. Use device='cpu'.")
    return where


def _kernels(kernels: str, where: torch.device) -> Choice:
    _one_of("kernels", kernels, ("auto", "reference", "triton"))
    if kernels == "triton" and not gpu.available():
        raise OptionError(
            "kernels='triton' needs the package triton and a CUDA device, or its interpreter (TRITON_INTERPRET=1); "
            "there is none here. Use 'auto' or 'reference'."
        )
    if kernels == "triton" and where.type == "cpu" and not gpu.interpreted():
        raise OptionError(
            "kernels='triton' runs on a CUDA device, but device is 'cpu'. Use device='cuda' or 'auto'."
        )
    if kernels == "triton" or (kernels == "auto" and where.type == "cuda" and gpu.available()):
        return "triton"
    return "cpu" if kernels == "auto" and where.type == "cpu" and jit.AVAILABLE else "reference"


def _stored_packed(checkpoint: Checkpoint) -> bool:
    """Whether the files hold FP8 matrices, FP4 experts and 16 bits of the rest, as the release does."""
    kinds = {
        "layers.0.attn.wq_a.weight": ("F8_E4M3",),
        "layers.0.ffn.experts.0.w1.weight": ("I8", "U8"),
        "layers.0.ffn.gate.weight": ("BF16",),
        "head.weight": ("BF16",),
    }
    return all(name in checkpoint and checkpoint[name].dtype in kind for name, kind in kinds.items())


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    size = checkpoint.config.vocab_size
    if checkpoint.tokenizer_json is not None:
        return Tokenizer.from_json(checkpoint.tokenizer_json, name=checkpoint.path.name, vocab_size=size)
    file = checkpoint.path / "tokenizer.json"
    return Tokenizer.from_file(file, vocab_size=size) if file.is_file() else None


def _literals(checkpoint: Checkpoint) -> Literals:
    if checkpoint.chat_texts is not None:
        return literals_from_json(checkpoint.chat_texts, checkpoint.path.name)
    return load_literals(checkpoint.path)


def _free_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} is {quoted(value)}, expected one of {', '.join(map(repr, allowed))}.")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {quoted(value)}, expected a positive whole number.")
