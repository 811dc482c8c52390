"""`birkhoff.load`: open a checkpoint, decide device, dtype, kernels and memory, and build an `Engine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from birkhoff import notebook
from birkhoff.analysis.run_manifest import model_digest
from birkhoff.api.engine import Engine
from birkhoff.api.options import NOT_VLLM, OWN_ONLY, VLLM_ONLY, EngineKwargs, EngineOptions, signature_of
from birkhoff.api.place_experts import PlacedExperts, choose_side, place_experts
from birkhoff.api.run_plan import (
    DTYPES,
    RunPlan,
    check_context,
    free_bytes_of,
    meta_model,
    plan_cpu,
    plan_run,
    select_device,
)
from birkhoff.byte_size import format_bytes
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.config import ModelConfig, V4Config
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.dtype_names import dtype_name
from birkhoff.embedded import shipped_vectors
from birkhoff.engine.cache_plan import CachePlan, plan_cache
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.memory_plan import HostBudget, MemoryBudget
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.warmup import compile_kernels
from birkhoff.errors import CheckpointError, OptionError, quoted
from birkhoff.free_memory import free_host_bytes
from birkhoff.hf.checkpoint import read_config, runs_here
from birkhoff.hf.open_model import context_for, make_core, open_model, open_text, read_hf_config
from birkhoff.kernels import jit
from birkhoff.kernels.packed.compile import find_compiler
from birkhoff.model.cache_size import page_bytes, snapshot_bytes
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import ExpertId
from birkhoff.offload.placement import Placement
from birkhoff.offload.read_gate import BackgroundReader, ReadGate
from birkhoff.processors import limit_threads, usable_processors
from birkhoff.text.chat_format import ChatFormat, V4Chat
from birkhoff.text.prompt_texts import load_prompt_texts
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.vllm.core import VllmCore, VllmModel
from birkhoff.vllm.front_planner import VllmPlanner
from birkhoff.vllm.open_engine import VllmSettings, schema_for, start
from birkhoff.weights.checkpoint import Checkpoint, is_gguf, open_checkpoint
from birkhoff.weights.locate import locate
from birkhoff.weights.mapped_experts import MappedFiles, map_experts
from birkhoff.weights.weight_loader import MAX_READERS, DeferredLoad, load_into


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
    while weights are loaded; the default is a progress bar, in a notebook or on a terminal. What was decided is printed
    to stderr."""
    chosen = EngineOptions.from_kwargs(options, **keywords)
    path = _locate(model, chosen)
    if chosen.backend == "vllm":
        return _load_with_vllm(model, path, chosen)
    _refuse(chosen, VLLM_ONLY, "the backend vllm")
    if (limited := limit_threads(usable_processors())) is not None:
        print(f"birkhoff: {limited}", file=sys.stderr)
    if chosen.capture_root is not None:  # one that cannot be written is refused before weights are read
        CaptureWriter(FileOptions(chosen.capture_root)).close()
    if _runs_through_transformers(path, chosen):
        return _load_with_transformers(model, path, chosen, progress)
    checkpoint = open_checkpoint(path)
    check_context(chosen, checkpoint)
    run = plan_run(chosen, checkpoint)
    _check_page_files(chosen, checkpoint.config, run)
    network, memory = _build_model(chosen, checkpoint, run)
    placed = memory if isinstance(memory, PlacedExperts) else None
    later = network.cold_expert_names() if chosen.background_experts else {}
    progress = progress or notebook.progress(f"loading {model}") or _terminal_progress()
    deferred = _load_weights(network, checkpoint, run, progress, later)
    reader = None if deferred is None else _read_later(deferred, later)
    if placed is not None:
        choose_side(network, placed, chosen.experts_on)
    if memory is None:
        cache_bytes = free_bytes_of(run.device) // 4 if chosen.cache_bytes is None else chosen.cache_bytes
    else:
        cache_bytes = memory.budget.cache_bytes if isinstance(memory, PlacedExperts) else memory.cache_bytes
    cache = plan_cache(
        checkpoint.config,
        run.numerics.dtype.itemsize,
        cache_bytes,
        chosen.max_requests,
        chosen.max_context,
        chosen.prefix_cache,
        run.speculation.depth,
    )
    tokenizer = load_tokenizer(checkpoint)
    core = _build_core(chosen, run, network, placed, cache)
    _warm_up(core)
    if reader is not None:
        core.read_experts_in_background(reader)
    for fallback in core.kernel_fallbacks():
        print(f"birkhoff: {fallback}", file=sys.stderr)
    _report(str(model), chosen, checkpoint, run, memory, cache, cache_bytes)
    texts = load_prompt_texts(checkpoint.path, checkpoint.chat_texts)
    chat = None if tokenizer is None else V4Chat(tokenizer, texts, checkpoint.config.max_position_embeddings)
    engine = _make_engine(core, tokenizer, chat, model, chosen)
    for name, vector in shipped_vectors(model).items():
        engine.modules[name] = vector
    return engine


def _show_bytes(verb: str, done: int, total: int) -> None:
    """Draw a bar of bytes in place on stderr."""
    width = 24
    full = width * done // max(total, 1)
    bar = "#" * full + "-" * (width - full)
    end = "\n" if done == total else ""
    print(
        f"\rbirkhoff: {verb} [{bar}] {format_bytes(done)} of {format_bytes(total)} ",
        end=end,
        file=sys.stderr,
        flush=True,
    )


def _terminal_progress() -> Callable[[int, int], None] | None:
    """A bar of bytes read if stderr is a terminal; redrawn when a hundredth more is done."""
    if not sys.stderr.isatty():
        return None
    drawn = -1

    def show(done: int, total: int) -> None:
        nonlocal drawn
        if (share := 100 * done // max(total, 1)) != drawn:
            drawn = share
            _show_bytes("loading", done, total)

    return show


def _locate(model: str | Path, options: EngineOptions) -> Path:
    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            _show_bytes("downloading", done, total)

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
    settings = VllmSettings.of(path, model, options)
    config: ModelConfig
    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    if runs_here(settings.config):
        text = open_text(path, int(settings.config["vocab_size"]))
        config, tokenizer, chat = read_hf_config(path, text.first_id), text.tokenizer, text.chat
    else:
        checkpoint = open_checkpoint(path)
        config, tokenizer = checkpoint.config, load_tokenizer(checkpoint)
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
        **settings.capture_queues,
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


def _load_with_transformers(
    model: str | Path, path: Path, options: EngineOptions, progress: Callable[[int, int], None] | None
) -> Engine:
    _refuse(options, OWN_ONLY, "the backend birkhoff")
    device = select_device(options.device)
    # V4 through Transformers is the reference that our own model is compared with
    plain = device.type == "cpu" or not runs_here(read_config(path))
    auto = torch.float32 if plain else torch.bfloat16
    progress = progress or notebook.progress(f"loading {model}")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if progress is not None:
        progress(0, size)
    show_bar = progress is None and sys.stderr.isatty()
    opened = open_model(path, device, DTYPES.get(options.dtype, auto), show_bar)
    if progress is not None:
        progress(size, size)
    network = opened.model
    cache_bytes = free_bytes_of(device) // 4 if options.cache_bytes is None else options.cache_bytes
    context = context_for(network, options.max_context, options.max_requests, cache_bytes)
    core = make_core(
        network, context, options.max_requests, options.max_batch_tokens, options.batch_invariant
    )
    print(
        f"birkhoff: {model} ({network.family.title}) on {device} through transformers, {dtype_name(network.dtype)}, "
        f"{network.settings['attention']} attention; {_requests(options)} of up to {context} tokens, "
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


def _build_model(
    options: EngineOptions, checkpoint: Checkpoint, run: RunPlan
) -> tuple[Transformer, PlacedExperts | MemoryBudget | HostBudget | None]:
    """The model with uninitialised weights on its device, and its memory: its expert store when experts are divided, or
    its plan; None for a model that is not packed on a GPU. Mapped experts need no further loading."""
    on_gpu = run.on_gpu
    network = meta_model(checkpoint, run)
    placed: PlacedExperts | MemoryBudget | None = None
    if run.packed and on_gpu:
        placed = place_experts(
            network,
            options.placement,
            run.device,
            free_bytes_of(run.device),
            free_host_bytes(),
            options.cache_bytes,
            options.max_requests,
            options.max_context,
        )
    elif (
        not replace(options.placement, mapped=False).is_default
        or (on_gpu and options.placement.mapped)
        or options.experts_on != "gpu"
        or options.background_experts
    ):
        raise OptionError(
            "experts, gpu_memory, expert_counts, experts_on and background_experts place packed experts between a CUDA "
            "device and host memory: they need Triton kernels, weights that are not 'dense', and gate and up of one "
            "type. Leave them out here."
        )
    if isinstance(placed, PlacedExperts):
        network.use_expert_store(placed.store)
    if on_gpu or run.device.type != "cpu":
        return network.allocate(run.device).eval(), placed
    budget = plan_cpu(options, network, free_host_bytes())
    if budget.mapped:
        files = MappedFiles()
        for prefix, stack in network.named_expert_stacks():
            stack.map_files(map_experts(checkpoint, prefix, stack.count, files))
    return network.allocate(run.device).eval(), budget


def _load_weights(
    network: Transformer,
    checkpoint: Checkpoint,
    run: RunPlan,
    progress: Callable[[int, int], None] | None,
    later: Mapping[str, ExpertId],
) -> DeferredLoad | None:
    """Fill the model, except for the experts `later`, which are returned."""
    skip: tuple[str, ...] = () if run.with_mtp else ("mtp.",)
    skip += tuple(f"{name}." for name, stack in network.named_expert_stacks() if stack.mapped is not None)
    report = load_into(network.destinations(), checkpoint, skip=skip, later=later, progress=progress)
    install_cpu_decode(network)
    if run.numerics.kernels.name == "cpu":
        compile_kernels(_announce_compilation)
    return report.deferred


def _read_later(deferred: DeferredLoad, names: Mapping[str, ExpertId]) -> BackgroundReader:
    """Start to read the experts that were left out."""
    name_of = {expert: name for name, expert in names.items()}
    print(f"birkhoff: {len(deferred)} experts in host memory are read in the background", file=sys.stderr)
    threads = min(MAX_READERS, os.cpu_count() or 1)
    gate = ReadGate(name_of, ahead=max(1, threads // 8))
    return BackgroundReader(gate, lambda expert: deferred.fill(name_of[expert]), threads)


def _announce_compilation() -> None:
    folder = jit.compiled_code_folder()
    kept = (
        "and every time, because no cache folder can be written: set BIRKHOFF_CACHE"
        if folder is None
        else f"once for this machine and version; kept in {folder}"
    )
    print(f"birkhoff: compiling CPU kernels, {kept}", file=sys.stderr, flush=True)


def _check_page_files(options: EngineOptions, config: V4Config, run: RunPlan) -> None:
    """Refuse a `context_root` in which no page would ever be stored: without a prefix cache, or with a limit below one
    page and the state after it. Before weights are read."""
    if options.context_root is None:
        return
    if options.prefix_cache is False:
        raise OptionError(
            "context_root stores pages of the prefix cache, and prefix_cache is False. Leave one of them out."
        )
    item_bytes = run.numerics.dtype.itemsize
    one = page_bytes(config, item_bytes) + snapshot_bytes(config, item_bytes, run.speculation.depth > 0)
    if options.context_bytes < one:
        raise OptionError(
            f"context_bytes is {options.context_bytes}, and one page of this model takes {one} bytes in context_root: "
            "none could be stored. Raise context_bytes or leave context_root out."
        )


def _build_core(
    options: EngineOptions, run: RunPlan, network: Transformer, placed: PlacedExperts | None, cache: CachePlan
) -> EngineCore:
    files = None
    if options.context_root is not None and cache.prefix_bytes:
        root = Path(options.context_root).expanduser()
        files = PageFiles(root, model_identity(network), options.context_bytes, _print_notice)
    elif options.context_root is not None:
        _print_notice("no pages are stored in context_root: cache_bytes leaves no room for a prefix cache.")
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
    memory: PlacedExperts | MemoryBudget | HostBudget | None,
    cache: CachePlan,
    cache_bytes: int,
) -> None:
    """Print the checkpoint's notices and what was decided to stderr."""
    for notice in checkpoint.notices:
        _print_notice(notice)
    prefix = f"of {cache.pages} pages" if cache.prefix_bytes else "off"
    experts = f"; {memory.budget}" if isinstance(memory, PlacedExperts) else ""
    if isinstance(memory, HostBudget) and memory.mapped:
        experts = f"; {memory}"
    weights = ", weights as stored" if run.packed else ""
    if run.device.type == "cpu" and options.kernels == "auto" and not jit.AVAILABLE:
        print(
            "birkhoff: numba is missing, so the CPU kernels run uncompiled and decoding is many times slower. "
            "Install it: pip install numba",
            file=sys.stderr,
        )
    elif run.device.type == "cpu" and options.kernels == "auto" and find_compiler() is None:
        print(
            "birkhoff: there is no C++ compiler, so packed weights are expanded to float32 and decoding is slower. "
            "Install g++ or clang++; it is used once.",
            file=sys.stderr,
        )
    print(
        f"birkhoff: {model} on {run.device}, {dtype_name(run.numerics.dtype)}, {options.numerics} numerics, "
        f"{run.numerics.kernels.name} kernels{weights}; {_requests(options)} of up to {cache.context} tokens, "
        f"cache_bytes {cache_bytes}; prefix cache {prefix}, {run.speculation}{experts}",
        file=sys.stderr,
    )


def _print_notice(text: str) -> None:
    print(f"birkhoff: {text}", file=sys.stderr, flush=True)


def _requests(options: EngineOptions) -> str:
    return "1 request" if options.max_requests == 1 else f"{options.max_requests} requests"


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    size = checkpoint.config.vocab_size
    if checkpoint.tokenizer_json is not None:
        return Tokenizer.from_json(checkpoint.tokenizer_json, name=checkpoint.path.name, vocab_size=size)
    file = checkpoint.path / "tokenizer.json"
    return Tokenizer.from_file(file, vocab_size=size) if file.is_file() else None
