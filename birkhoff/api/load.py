"""`birkhoff.load`: open a checkpoint, decide device, dtype, kernels and memory, and build an `Engine`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from birkhoff import notebook
from birkhoff.analysis.run_manifest import model_digest
from birkhoff.api.engine import Engine
from birkhoff.api.options import (
    NOT_VLLM,
    OWN_ONLY,
    VLLM_ONLY,
    EngineKwargs,
    EngineOptions,
    PlacementOptions,
    SpeculationOptions,
    parse_speculation,
    signature_of,
)
from birkhoff.byte_size import format_bytes
from birkhoff.config import ModelConfig
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.dtype_names import dtype_name
from birkhoff.embedded import shipped_vectors
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.memory_plan import (
    CachePlan,
    HostBudget,
    MemoryBudget,
    cache_within,
    default_cache_bytes,
    held_bytes,
    plan_budget,
    plan_cache,
    plan_host,
)
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.warmup import compile_kernels
from birkhoff.errors import CapacityError, CheckpointError, OptionError, quoted
from birkhoff.free_memory import free_host_bytes
from birkhoff.hf.checkpoint import read_config, runs_here
from birkhoff.hf.open_model import context_for, make_core, open_model, open_text, read_hf_config
from birkhoff.kernels import gpu, jit
from birkhoff.kernels.packed import PackedType, native
from birkhoff.kernels.select import Choice, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertCounts, ExpertUsage
from birkhoff.offload.placement import Placement
from birkhoff.text.chat_format import ChatFormat, V4Chat
from birkhoff.text.prompt_texts import load_prompt_texts
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.vllm.core import VllmCore, VllmModel
from birkhoff.vllm.front_planner import VllmPlanner
from birkhoff.vllm.open_engine import VllmSettings, schema_for, start
from birkhoff.weights.checkpoint import Checkpoint, is_gguf, open_checkpoint
from birkhoff.weights.locate import locate
from birkhoff.weights.mapped_experts import MappedFiles, map_experts
from birkhoff.weights.weight_loader import load_into

WEIGHTS_SHARE = 0.85  # of free device memory, from which the MTP block is left out
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RunPlan:
    """How a checkpoint runs here. `packed`: weights stay in the types in which they are stored, which kernels read
    directly; on a GPU, FP8 and FP4 codes in the layout of the release."""

    device: torch.device
    numerics: Numerics
    packed: bool
    speculation: SpeculationOptions
    with_mtp: bool


@dataclass(frozen=True)
class PlacedExperts:
    """Memory for experts that are divided between the device and the host."""

    budget: MemoryBudget
    store: ExpertStore
    usage: ExpertUsage


@signature_of(EngineOptions)
def load(
    model: str | Path,
    *,
    options: EngineOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[EngineKwargs],
) -> Engine:
    """Open a checkpoint and return an engine that is ready to generate.

    `model` is "nano", a checkpoint directory, a GGUF file, or `org/name` in the hub cache; with `download=True` a
    model that is not in the cache is downloaded first, and nothing else uses the network. Keywords are the fields of
    `EngineOptions` (docs/options.md) and override `options`. `progress` is called with (bytes read, bytes in total)
    while weights are loaded; in a notebook the default is a progress bar. What was decided is printed to stderr."""
    chosen = EngineOptions.from_kwargs(options, **keywords)
    path = _locate(model, chosen)
    if chosen.backend == "vllm":
        return _load_with_vllm(model, path, chosen)
    _refuse(chosen, VLLM_ONLY, "the backend vllm")
    if _runs_through_transformers(path, chosen):
        return _load_with_transformers(model, path, chosen)
    checkpoint = open_checkpoint(path)
    _check_context(chosen, checkpoint)
    run = _plan_run(chosen, checkpoint)
    network, memory = _build_model(chosen, checkpoint, run)
    placed = memory if isinstance(memory, PlacedExperts) else None
    _load_weights(network, checkpoint, run, progress or notebook.progress(f"loading {model}"))
    if isinstance(memory, HostBudget):
        cache_bytes = memory.cache_bytes
    else:
        cache_bytes = _cache_bytes(chosen, run, placed, sum(held_bytes(network)[:2]))
    cache = plan_cache(
        checkpoint.config,
        run.numerics.dtype.itemsize,
        cache_bytes,
        chosen.max_requests,
        chosen.max_context,
        chosen.prefix_cache,
        run.speculation.depth,
    )
    tokenizer = _load_tokenizer(checkpoint)
    core = _build_core(chosen, run, network, placed, cache)
    _warm_up(core)
    _report(str(model), chosen, checkpoint, run, memory, cache, cache_bytes)
    texts = load_prompt_texts(checkpoint.path, checkpoint.chat_texts)
    chat = None if tokenizer is None else V4Chat(tokenizer, texts, checkpoint.config.max_position_embeddings)
    engine = _make_engine(core, tokenizer, chat, model, chosen)
    for name, vector in shipped_vectors(model).items():
        engine.modules[name] = vector
    return engine


def _locate(model: str | Path, options: EngineOptions) -> Path:
    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\rbirkhoff: downloading {format_bytes(done)} of {format_bytes(total)} ",
                end="\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )

    path = locate(model, options.revision, options.download, show)
    if not path.is_dir() and not is_gguf(path):
        what = "a file" if path.exists() else "missing"
        raise CheckpointError(
            f"{model} is {what}; expected 'nano', a directory with config.json and safetensors files, a GGUF file, "
            "or org/name of the hub. Check the path."
        )
    return path


def _runs_through_transformers(path: Path, options: EngineOptions) -> bool:
    """Whether the checkpoint is for the backend transformers, by request or by its config."""
    if options.backend == "transformers":
        if not path.is_dir():
            raise OptionError(
                "backend is 'transformers', which reads checkpoint directories, and this is a file. Use 'auto'."
            )
        return True
    if options.backend == "birkhoff" or not (path / "config.json").is_file():
        return False
    return runs_here(read_config(path))


def _refuse(options: EngineOptions, names: Sequence[str], owner: str) -> None:
    """Refuse options that belong to another backend than the one that runs the model."""
    for each in fields(EngineOptions):
        if each.name in names and getattr(options, each.name) not in (each.default, False):
            raise OptionError(
                f"{each.name} is {quoted(getattr(options, each.name))}, an option of {owner}; this model runs "
                "otherwise. Leave it out."
            )


def _load_with_vllm(model: str | Path, path: Path, options: EngineOptions) -> Engine:
    _refuse(options, NOT_VLLM, "other backends than vllm")
    if not path.is_dir():
        raise OptionError("backend is 'vllm', which reads checkpoint directories, and this is a file.")
    queues = _capture_queues(options)
    settings = VllmSettings(
        path,
        str(model),
        options.hooks,
        options.dtype,
        options.max_requests,
        options.max_batch_tokens,
        options.max_context,
        options.cache_bytes,
        None if options.prefix_cache == "auto" else bool(options.prefix_cache),
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        options.capture_root,
        queues,
        options.vllm or {},
    )
    config: ModelConfig
    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    if runs_here(settings.config):
        text = open_text(path, int(settings.config["vocab_size"]))
        config, tokenizer, chat = read_hf_config(path, text.first_id), text.tokenizer, text.chat
    else:
        checkpoint = open_checkpoint(path)
        config, tokenizer = checkpoint.config, _load_tokenizer(checkpoint)
        texts = load_prompt_texts(checkpoint.path, checkpoint.chat_texts)
        chat = None if tokenizer is None else V4Chat(tokenizer, texts, config.max_position_embeddings)
    started = start(settings)
    schema = schema_for(settings, started.dtype)
    network = VllmModel(path, config, started.dtype, schema, started.settings)
    core = VllmCore(
        started.engine,
        started.sampling,
        network,
        started.max_context,
        options.max_requests,
        options.max_batch_tokens,
    )
    planner = VllmPlanner(
        schema,
        config.num_hidden_layers,
        str(model),
        settings.armed,
        core.ranks.call,
        identity=lambda: (str(model), model_digest(network)),
        capture_root=options.capture_root,
        **queues,
    )
    print(
        f"birkhoff: {model} on vLLM {started.settings['vllm']}, {dtype_name(started.dtype)}, "
        f"{options.tensor_parallel_size} x {options.pipeline_parallel_size} ranks; {options.max_requests} requests of "
        f"up to {started.max_context} tokens; armed: {', '.join(settings.armed) or 'nothing'}",
        file=sys.stderr,
    )
    return Engine(core, tokenizer, chat, str(model), planner=planner)


def _capture_queues(options: EngineOptions) -> dict[str, Any]:
    """Options of the capture `Dispatcher`."""
    return {
        "overload_policy": options.capture_overload_policy,
        "queue_size": options.capture_dispatch_queue_size,
        "spill_dir": None if options.capture_spill_dir is None else str(options.capture_spill_dir),
        "spill_max_bytes": options.capture_spill_max_bytes,
    }


def _load_with_transformers(model: str | Path, path: Path, options: EngineOptions) -> Engine:
    _refuse(options, OWN_ONLY, "the backend birkhoff")
    device = _select_device(options.device)
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    opened = open_model(path, device, _DTYPES.get(options.dtype, auto))
    network = opened.model
    cache_bytes = _free_bytes(device) // 4 if options.cache_bytes is None else options.cache_bytes
    context = context_for(network, options.max_context, options.max_requests, cache_bytes)
    core = make_core(
        network, context, options.max_requests, options.max_batch_tokens, options.batch_invariant
    )
    print(
        f"birkhoff: {model} ({network.family.title}) on {device} through transformers, {dtype_name(network.dtype)}, "
        f"{network.settings['attention']} attention; {options.max_requests} requests of up to {context} tokens, "
        f"cache_bytes {cache_bytes}",
        file=sys.stderr,
    )
    return _make_engine(core, opened.tokenizer, opened.chat, model, options)


def _make_engine(
    core: EngineCore,
    tokenizer: Tokenizer | None,
    chat: ChatFormat | None,
    model: str | Path,
    options: EngineOptions,
) -> Engine:
    return Engine(core, tokenizer, chat, str(model), options.capture_root, **_capture_queues(options))


def _check_context(options: EngineOptions, checkpoint: Checkpoint) -> None:
    limit = checkpoint.config.max_position_embeddings
    if options.max_context is not None and options.max_context > limit:
        raise OptionError(
            f"max_context is {options.max_context}, the model's limit is {limit}. Ask for that or less."
        )


def _plan_run(options: EngineOptions, checkpoint: Checkpoint) -> RunPlan:
    device = _select_device(options.device)
    kernels = _select_kernels(options.kernels, device)
    on_gpu = kernels == "triton"
    packed = _runs_packed(options, kernels, checkpoint)
    # The MTP block is as large as a layer: where experts may have to leave the GPU, it is not worth its memory.
    tight = packed and on_gpu and not _fits_device(options, checkpoint, device)
    speculative = False if tight and options.speculative == "auto" else options.speculative
    speculation = parse_speculation(
        speculative, checkpoint.has_mtp, options.batch_invariant, checkpoint.drafter
    )
    on_cpu = options.dtype == "auto" and device.type == "cpu"
    dtype = torch.float32 if on_cpu else _DTYPES.get(options.dtype, torch.bfloat16)
    numerics = Numerics(dtype, options.numerics == "released", select(kernels))
    # Saves device memory.
    with_mtp = checkpoint.has_mtp and not (packed and on_gpu and speculation.depth == 0)
    return RunPlan(device, numerics, packed, speculation, with_mtp)


def _fits_device(options: EngineOptions, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether all weights clearly fit the memory that is free on the device, and nothing else was asked for."""
    stored = sum(checkpoint[name].nbytes for name in checkpoint)
    return options.placement.is_default and stored <= WEIGHTS_SHARE * _free_bytes(device)


def _runs_packed(options: EngineOptions, kernels: Choice, checkpoint: Checkpoint) -> bool:
    """Whether weights stay as stored: if the kernels can read them, unless they are to be dense."""
    if options.weights == "dense":
        return False
    if kernels == "triton":
        packed = options.numerics == "plain" and _stored_packed(checkpoint)
    else:
        packed = (
            kernels == "cpu"
            and options.numerics == "plain"
            and options.dtype in ("auto", "float32")
            and native.available()
        )
    if options.weights == "packed" and not packed:
        raise OptionError(
            "weights is 'packed', which needs plain numerics and on a CPU float32, Numba and a C++ compiler, on a GPU "
            "Triton and a checkpoint in the released formats. Use weights='auto'."
        )
    return packed


def _stored_types(checkpoint: Checkpoint) -> dict[str, PackedType]:
    """The type of every matrix that kernels can read as stored, by name."""
    types = {name: checkpoint[name].packed_type for name in checkpoint if name.endswith(".weight")}
    return {name: kind for name, kind in types.items() if kind is not None}


def _select_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    selected = torch.device(device)
    if selected.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is 'cuda', but PyTorch sees no CUDA device here. Use device='cpu'.")
    return selected


def _select_kernels(kernels: str, device: torch.device) -> Choice:
    if kernels == "triton" and not gpu.available():
        raise OptionError(
            "kernels='triton' needs the package triton and a CUDA device, or its interpreter (TRITON_INTERPRET=1); "
            "there is none here. Use 'auto' or 'reference'."
        )
    if kernels == "triton" and device.type == "cpu" and not gpu.interpreted():
        raise OptionError(
            "kernels='triton' runs on a CUDA device, but device is 'cpu'. Use device='cuda' or 'auto'."
        )
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda" and gpu.available()):
        return "triton"
    return "cpu" if kernels == "auto" and device.type == "cpu" and jit.AVAILABLE else "reference"


def _stored_packed(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint stores FP8 matrices, FP4 experts and bfloat16 for the rest, as the release does."""
    dtypes = {
        "layers.0.attn.wq_a.weight": ("F8_E4M3",),
        "layers.0.ffn.experts.0.w1.weight": ("I8", "U8"),
        "layers.0.ffn.gate.weight": ("BF16",),
        "head.weight": ("BF16",),
    }
    return all(name in checkpoint and checkpoint[name].dtype in allowed for name, allowed in dtypes.items())


def _build_model(
    options: EngineOptions, checkpoint: Checkpoint, run: RunPlan
) -> tuple[Transformer, PlacedExperts | HostBudget | None]:
    """The model with uninitialised weights on its device, and its memory: its expert store when experts are divided, or
    the plan of a model on the CPU. Mapped experts need no further loading."""
    on_gpu = run.numerics.kernels.on_gpu
    network = _meta_model(checkpoint, run)
    placed = None
    if run.packed and on_gpu:
        placed = place_experts(
            network,
            options.placement,
            run.device,
            _free_bytes(run.device),
            free_host_bytes(),
            options.cache_bytes,
            options.max_requests,
            options.max_context,
        )
    elif not replace(options.placement, mapped=False).is_default or (on_gpu and options.placement.mapped):
        raise OptionError(
            "experts, gpu_memory and expert_counts place FP4 experts between a CUDA device and host memory: they need "
            "a checkpoint in the released formats, Triton kernels and plain numerics. Leave them out here."
        )
    if placed is not None:
        network.use_expert_store(placed.store)
    if on_gpu or run.device.type != "cpu":
        return network.allocate(run.device).eval(), placed
    budget = plan_cpu(options, network, free_host_bytes())
    if budget.mapped:
        files = MappedFiles()
        for prefix, stack in network.named_expert_stacks():
            stack.map_files(map_experts(checkpoint, prefix, stack.count, files))
    return network.allocate(run.device).eval(), budget


def _meta_model(checkpoint: Checkpoint, run: RunPlan) -> Transformer:
    """The model without memory, in the form in which it will hold its weights."""
    on_gpu = run.numerics.kernels.on_gpu
    with torch.device("meta"):
        network = Transformer(checkpoint.config, run.numerics, run.packed and on_gpu, mtp=run.with_mtp)
        if run.packed and not on_gpu:
            network.store_as(_stored_types(checkpoint))
    return network


def host_budget(checkpoint: Checkpoint, options: EngineOptions, host_bytes: int) -> HostBudget:
    """The plan that `load` carries out for a checkpoint on a CPU with `host_bytes` of free memory."""
    _check_context(options, checkpoint)
    return plan_cpu(options, _meta_model(checkpoint, _plan_run(options, checkpoint)), host_bytes)


def plan_cpu(options: EngineOptions, network: Transformer, host_bytes: int) -> HostBudget:
    """The memory plan of a model on the CPU, which need not have memory yet."""
    placement = options.placement
    if placement.mapped and not all(stack.packed for stack in network.expert_stacks()):
        raise OptionError(
            "experts is 'mapped', which needs experts that kernels read as stored: a C++ compiler, Numba, plain "
            "numerics, and gate and up of one type. Use 'auto'."
        )
    mapped = True if placement.mapped else False if placement.all_on_device else None
    return plan_host(
        network, host_bytes, options.cache_bytes, options.max_requests, options.max_context, mapped
    )


def place_experts(
    network: Transformer,
    options: PlacementOptions,
    device: torch.device,
    free_bytes: int,
    host_bytes: int,
    cache_bytes: int | None,
    requests: int,
    context: int | None,
) -> PlacedExperts | None:
    """Allocate memory for the experts of a packed model; None when all of them go to the device with the model.

    `free_bytes` and `host_bytes` are the free memory of the device and the host. Raises `CapacityError` when the
    requested experts do not fit."""
    config, dtype = network.config, network.numerics.dtype
    total = min(options.gpu_memory or free_bytes, free_bytes)
    if cache_bytes is None:
        cache_bytes = default_cache_bytes(config, total, requests, context, dtype.itemsize)
    budget = plan_budget(
        config,
        total,
        cache_bytes,
        dtype=dtype,
        mtp=network.mtp is not None,
        share=options.share,
        expert_bytes=options.expert_bytes,
    )
    if budget.hot == budget.experts and options.share is None and options.counts_file is None:
        return None
    if options.all_on_device and budget.hot < budget.experts:
        raise CapacityError(
            f"experts is 'device', but {budget.hot} of {budget.experts} fit {format_bytes(total)} beside weights "
            f"{format_bytes(budget.dense_bytes)}, cache {format_bytes(cache_bytes)} and working space "
            f"{format_bytes(budget.working_bytes)}. Use 'auto', or a larger device."
        )
    if budget.host_bytes > host_bytes:
        raise CapacityError(
            f"{budget.experts - budget.hot} experts would lie in {format_bytes(budget.host_bytes)} of host memory, and "
            f"{format_bytes(host_bytes)} are free. Free host memory, or give the device more."
        )
    layers = budget.experts // config.n_routed_experts
    counts = None
    if options.counts_file is not None and options.counts_file.exists():
        counts = ExpertCounts.load(options.counts_file, layers, config.n_routed_experts)
    usage = ExpertUsage(layers, config.n_routed_experts, counts)
    store = ExpertStore(PackedExpertLayout.of(config), usage.hottest(budget.hot), device, budget.spare)
    return PlacedExperts(budget, store, usage)


def _load_weights(
    network: Transformer, checkpoint: Checkpoint, run: RunPlan, progress: Callable[[int, int], None] | None
) -> None:
    skip: tuple[str, ...] = () if run.with_mtp else ("mtp.",)
    skip += tuple(f"{name}." for name, stack in network.named_expert_stacks() if stack.mapped is not None)
    load_into(network.destinations(), checkpoint, skip=skip, progress=progress)
    install_cpu_decode(network)
    if run.numerics.kernels.name == "cpu":
        compile_kernels(_announce_compilation)


def _announce_compilation() -> None:
    folder = jit.compiled_code_folder()
    kept = (
        "and every time, because no cache folder can be written: set BIRKHOFF_CACHE"
        if folder is None
        else f"once for this machine and version; kept in {folder}"
    )
    print(f"birkhoff: compiling CPU kernels, {kept}", file=sys.stderr, flush=True)


def _cache_bytes(options: EngineOptions, run: RunPlan, placed: PlacedExperts | None, held: int) -> int:
    """Bytes of the cache beside weights of `held` bytes on a GPU, within `gpu_memory`."""
    if options.cache_bytes is not None:
        return options.cache_bytes
    if placed is not None:
        return placed.budget.cache_bytes
    quarter = _free_bytes(run.device) // 4
    limit = options.placement.gpu_memory
    return quarter if limit is None else min(quarter, cache_within(limit, held))


def _free_bytes(device: torch.device) -> int:
    """Free memory of the GPU or the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def _build_core(
    options: EngineOptions, run: RunPlan, network: Transformer, placed: PlacedExperts | None, cache: CachePlan
) -> EngineCore:
    files = None
    if options.context_root is not None and cache.prefix_bytes:
        root = Path(options.context_root).expanduser()
        files = PageFiles(root, model_identity(network), options.context_bytes)
    placement = None
    if placed is not None:
        tables = network.hash_routing_tables()
        placement = Placement(placed.store, placed.usage, tables, file=options.placement.counts_file)
    return EngineCore(
        network,
        max_requests=options.max_requests,
        max_context=cache.context,
        num_pages=cache.pages,
        max_batch_tokens=options.max_batch_tokens,
        batch_invariant=options.batch_invariant,
        prefix_bytes=cache.prefix_bytes,
        row_bytes=cache.row_bytes,
        draft_depth=run.speculation.depth,
        draft_always=run.speculation.always,
        files=files,
        device=run.device,
        placement=placement,
    )


def _warm_up(core: EngineCore) -> None:
    """Compile kernels and record graphs on a GPU, with a progress line on a terminal."""

    def show(done: int, total: int) -> None:
        print(
            f"\rbirkhoff: preparing GPU kernels and graphs {done}/{total}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    seconds = core.warm_up(show if sys.stderr.isatty() else None)
    if seconds:
        end = "\n" if sys.stderr.isatty() else ""
        print(f"{end}birkhoff: GPU kernels and graphs ready after {seconds:.1f} s", file=sys.stderr)


def _report(
    model: str,
    options: EngineOptions,
    checkpoint: Checkpoint,
    run: RunPlan,
    memory: PlacedExperts | HostBudget | None,
    cache: CachePlan,
    cache_bytes: int,
) -> None:
    """Print the checkpoint's notices and what was decided to stderr."""
    for notice in checkpoint.notices:
        print(f"birkhoff: {notice}", file=sys.stderr)
    prefix = f"of {cache.pages} pages" if cache.prefix_bytes else "off"
    experts = f"; {memory.budget}" if isinstance(memory, PlacedExperts) else ""
    if isinstance(memory, HostBudget) and memory.mapped:
        experts = f"; {memory}"
    weights = ", weights as stored" if run.packed else ""
    requests = "1 request" if options.max_requests == 1 else f"{options.max_requests} requests"
    if run.device.type == "cpu" and options.kernels == "auto" and not jit.AVAILABLE:
        print(
            "birkhoff: numba is missing, so the CPU kernels run uncompiled and decoding is many times slower. "
            "Install it: pip install numba",
            file=sys.stderr,
        )
    print(
        f"birkhoff: {model} on {run.device}, {dtype_name(run.numerics.dtype)}, {options.numerics} numerics, "
        f"{run.numerics.kernels.name} kernels{weights}; {requests} of up to {cache.context} tokens, "
        f"cache_bytes {cache_bytes}; prefix cache {prefix}, {run.speculation}{experts}",
        file=sys.stderr,
    )


def _load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    size = checkpoint.config.vocab_size
    if checkpoint.tokenizer_json is not None:
        return Tokenizer.from_json(checkpoint.tokenizer_json, name=checkpoint.path.name, vocab_size=size)
    file = checkpoint.path / "tokenizer.json"
    return Tokenizer.from_file(file, vocab_size=size) if file.is_file() else None
