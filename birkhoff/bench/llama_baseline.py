"""llama.cpp on a CPU as a baseline, through the optional package `llama-cpp-python`.

It reads the same GGUF file. Its kernels round activations to eight bits in front of quantised weights, ours do not; so
speeds are compared here, and outputs by tests with float32 files.

It runs in a process of its own, with OpenMP's default settings: the command line makes waiting threads sleep
(`OMP_WAIT_POLICY`), which suits our kernels and makes llama.cpp decode five times slower.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from birkhoff.bench.baselines import Tokens
from birkhoff.bench.timing import generation_seconds
from birkhoff.errors import OptionError

_CHILD = "from birkhoff.bench.llama_baseline import answer_lines; answer_lines()"
_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # variables that the child does not inherit


class LlamaProcess:
    """llama.cpp in a process of its own, which times itself."""

    name = "llama.cpp"

    def __init__(self, path: Path, batch: int, prompt_tokens: int, steps: int, threads: int):
        environment = {key: value for key, value in os.environ.items() if key not in _OPENMP}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.version: str
        self.instructions: str
        self.version, self.instructions = self._ask([str(path), batch, prompt_tokens, steps, threads])

    def seconds(self, prompts: list[Tokens], steps: int) -> tuple[float, float]:
        """Seconds of prefill of `prompts` and of `steps` decode steps."""
        prefill, decode = self._ask([prompts, steps])
        return prefill, decode

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, question: list[Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process of llama.cpp ended."}
        if isinstance(answer, dict):
            self.close()
            raise OptionError(answer["error"])
        return answer


def answer_lines() -> None:
    """The child: reads the arguments of `LlamaCpp`, then prompts and step counts; answers with seconds."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints goes to stderr

    def reply(answer: Any) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    path, batch, prompt_tokens, steps, threads = json.loads(sys.stdin.readline())
    try:
        llama = LlamaCpp(Path(path), batch, prompt_tokens, steps, threads)
    except OptionError as error:
        reply({"error": str(error)})
        return
    reply([version(), instructions()])
    for line in sys.stdin:
        reply(generation_seconds(llama, *json.loads(line)))
    llama.close()


class LlamaCpp:
    """Sequences of one batch through `llama_decode`, with its default float16 cache and flash attention off."""

    name = "llama.cpp"

    def __init__(self, path: Path, batch: int, prompt_tokens: int, steps: int, threads: int):
        self.api = api = _import()
        tokens = batch * (prompt_tokens + steps + 2)
        _quiet(api)
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = api.llama_load_model_from_file(str(path).encode(), options)
        if not self.model:
            raise OptionError(
                f"llama.cpp {version()} cannot load {path.name}. Look at it with: birkhoff inspect"
            )
        context = api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = tokens, batch * prompt_tokens, 512
        context.n_seq_max = batch
        context.n_threads = context.n_threads_batch = threads
        self.context = api.llama_new_context_with_model(self.model, context)
        if not self.context:
            raise OptionError(
                f"llama.cpp {version()} cannot make a context of {tokens} tokens for {path.name}."
            )
        self.vocabulary = api.llama_n_vocab(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(batch * prompt_tokens, 0, 1)
        self.length = 0

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_free_model(self.model)

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.length = 0
        return self._run(prompts)

    def step(self, tokens: Tokens) -> Tokens:
        return self._run([[token] for token in tokens])

    def _run(self, chunks: list[Tokens]) -> Tokens:
        batch, at, last = self.batch, 0, []
        for sequence, ids in enumerate(chunks):
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, self.length + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(ids) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        status = self.api.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        self.length += len(chunks[0])
        return [int(self._logits(row).argmax()) for row in last]

    def _logits(self, row: int) -> np.ndarray[Any, Any]:
        pointer = self.api.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))


def version() -> str:
    """The version of llama-cpp-python."""
    text: str = _import().__version__
    return text


def instructions() -> str:
    """What llama.cpp was built with, such as "AVX2 F16C FMA"; a processor with more does not change it."""
    text: str = _import().llama_print_system_info().decode()
    flags = (flag.split("=") for flag in text.replace("CPU :", "").split("|") if "=" in flag)
    return " ".join(name.strip() for name, value in flags if value.strip() == "1")


def _import() -> Any:
    try:
        import llama_cpp
    except ImportError:
        raise OptionError(
            "llama.cpp is measured through the package llama-cpp-python, which is not installed here. Install it, or "
            "leave --llama away."
        ) from None
    return llama_cpp


_IGNORE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *message: None)


def _quiet(api: Any) -> None:
    """Drop the messages of the library."""
    api.llama_log_set(_IGNORE, ctypes.c_void_p(0))
