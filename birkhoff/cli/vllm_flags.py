"""Flags of `vllm serve` and its steering and capture fork, translated to those of `birkhoff serve`.

A flag that means the same here is renamed; one whose place was taken by something else is removed, with one line that
says by what. Flags that take several values become repeated flags, and a model given by position becomes `--model`.
Flags of the same name and meaning (`--host`, `--api-key`, `--dtype`, `--capture-consumers`, ...) need no entry.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, MutableMapping, Sequence

from birkhoff.errors import OptionError

RENAMED = {
    "--max-model-len": "--max-context",
    "--max-num-seqs": "--max-requests",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--served-model-name": "--served-name",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
}
SEVERAL = ("--steering-modules", "--steering-api-key", "--capture-consumers", "--api-key")
_POOLED = "rows of all edits share one pool, and what does not fit waits; there is no number to set."
_ATTACH = "an SAE can be attached at any time (POST /v1/steering/modules/register), so no slots are reserved."
REPLACED_SWITCHES = {
    "--enable-steering": "every request may steer; one that does not costs nothing.",
    "--no-enable-steering": "every request may steer. Keep the steering key to yourself: --steering-api-key.",
    "--enforce-eager": "captures and edits run inside recorded graphs.",
    "--trust-remote-code": "no code of a checkpoint is run.",
    "--enable-chunked-prefill": "prompts are always processed in chunks of --max-batch-tokens.",
    "--steering-config.enable_cross_layer_monitor": "there are no probe gates here.",
    "--steering-config.enable_row_monitor": "there are no probe gates here.",
}
REPLACED_VALUES = {
    "--max-steering-configs": _POOLED,
    "--steering-config.max_steering_configs": _POOLED,
    "--max-dynamic-steering-configs": _POOLED,
    "--steering-config.max_dynamic_steering_configs": _POOLED,
    "--steering-config.max_clamp_directions": "at most 4 directions are clamped at one site; more are refused.",
    "--max-clamp-directions": "at most 4 directions are clamped at one site; more are refused.",
    "--steering-hooks": "every steerable hook is ready (GET /v1/steering/layers).",
    "--interp-graphs": "steps without captures and edits replay plain graphs.",
    "--capture-activation-cache-gb": "captured rows of shared prompts are kept with the prefix cache; "
    "--cache-bytes sets its size.",
    "--capture-graphsafe-key": "every capture runs inside recorded graphs.",
    "--sae-spare-slot-sites": _ATTACH,
    "--sae-spare-slots-per-site": _ATTACH,
    "--sae-spare-slot-features": _ATTACH,
    "--gpu-memory-utilization": "say how much memory to use with --gpu-memory, such as 60GB.",
}
ONE_ONLY = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
SEVERAL_RANKS = {  # what the backend vllm has
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--pipeline-parallel-size": "--pipeline-parallel-size",
    "-pp": "--pipeline-parallel-size",
}
ENVIRONMENT = {"VLLM_STEERING_API_KEY": "BIRKHOFF_STEERING_API_KEY", "VLLM_API_KEY": "BIRKHOFF_API_KEY"}


def translate(arguments: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Arguments of the command with those after the verb `serve` translated; other verbs are left as they are."""
    given = list(arguments)
    at = next((i for i, word in enumerate(given) if not word.startswith("-")), len(given))
    if given[at : at + 1] != ["serve"]:
        return given
    return [*given[: at + 1], *_translated(given[at + 1 :], say)]


def adopt_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Use the variables of vLLM where ours are not set."""
    for theirs, ours in ENVIRONMENT.items():
        if environment.get(theirs) and not environment.get(ours):
            environment[ours] = environment[theirs]


def _translated(words: list[str], say: Callable[[str], None]) -> list[str]:
    out: list[str] = []
    words = list(words)
    by_vllm = "--backend=vllm" in words or ("--backend", "vllm") in itertools.pairwise(words)
    if words and not words[0].startswith("-"):
        out += ["--model", words.pop(0)]
    while words:
        flag, equals, value = words.pop(0).partition("=")
        name = _spelled(flag)
        if name in REPLACED_SWITCHES:
            say(f"{flag}: {REPLACED_SWITCHES[name]}")
        elif name in REPLACED_VALUES:
            while not equals and words and not words[0].startswith("-"):
                words.pop(0)
            say(f"{flag}: {REPLACED_VALUES[name]}")
        elif name in ONE_ONLY:
            count = value if equals else words.pop(0) if words else ""
            if by_vllm and name in SEVERAL_RANKS:
                out += [SEVERAL_RANKS[name], count]
            elif count != "1":
                raise OptionError(
                    f"{flag} is {count}, expected 1: this engine runs on one device. Use --backend vllm for several."
                )
        elif name in SEVERAL and not equals:
            while words and not words[0].startswith("-"):
                out += [name, words.pop(0)]
        else:
            out.append(RENAMED.get(name, name) + equals + value)
    return out


def _spelled(flag: str) -> str:
    """The flag as the tables spell it: vLLM accepts underscores for hyphens."""
    if not flag.startswith("--"):
        return flag
    head, dot, rest = flag.partition(".")
    return head.replace("_", "-") + dot + (rest.replace("-", "_") if dot else "")
