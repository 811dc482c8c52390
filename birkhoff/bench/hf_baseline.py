"""Hugging Face `transformers` on a GPU as a baseline: the same architecture in bfloat16, with a few layers.

It cannot run the released FP4 and FP8 weights on this device, so its experts are bfloat16 and only a few layers fit;
the comparison uses as many layers of ours, at the same widths and context. Weights are random on both sides: this
compares speed; tests compare the outputs with equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from birkhoff.bench.report import Row, summary, version
from birkhoff.bench.timing import Call, cuda_seconds, median
from birkhoff.config import V4Config

EXPERT_VARIANTS = ("batched_mm", "grouped_mm")


def build(config: V4Config, device: torch.device) -> Any:
    """`DeepseekV4ForCausalLM` with random weights in bfloat16."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    raw = config.to_dict()
    scaling = raw.pop("rope_scaling", None)
    for key in ("model_type", "architectures", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    raw["compress_ratios"] = list(config.compress_ratios)
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
        raw["rope_parameters"] = scaling
    raw["attn_implementation"] = "eager"  # the only one available for V4
    hf_config = DeepseekV4Config(**raw)
    build_model: Any = DeepseekV4ForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = build_model(hf_config).eval()
    finally:
        torch.set_default_dtype(before)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(config.n_routed_experts, buffer.shape, device=device))
    return model


def decode_ms(model: Any, batch: int, context: int, steps: int) -> Row:
    """Milliseconds per decode step after a prompt of `context` tokens, with the fastest implementation of experts."""
    prompt = torch.randint(model.config.vocab_size, (batch, context), device=model.device)

    def prefill() -> Call:
        out = model(prompt, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

        def step() -> None:
            nonlocal token
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)

        return step

    return _fastest(model, prefill, steps, warm=3)


def prefill_ms(model: Any, tokens: int, rounds: int) -> Row:
    """Milliseconds of a prefill, with the fastest implementation of experts."""
    prompt = torch.randint(model.config.vocab_size, (1, tokens), device=model.device)
    return _fastest(model, lambda: lambda: model(prompt, use_cache=True, logits_to_keep=1), rounds, warm=2)


@torch.inference_mode()
def _fastest(model: Any, prepare: Callable[[], Call], count: int, warm: int) -> Row:
    """Time the call that `prepare` returns with every implementation of experts; the one with the smallest median, and
    the errors of those that did not run."""
    spans: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for variant in EXPERT_VARIANTS:
        try:
            model.set_experts_implementation(variant)
            spans[variant] = [1e3 * span for span in cuda_seconds(prepare(), count, warm)]
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            failed[variant] = str(error)[:200]  # made for other devices, or out of memory
        torch.cuda.empty_cache()
    best = min(spans, key=lambda variant: median(spans[variant]))
    row = {
        "experts_implementation": best,
        "ms": summary(spans[best]),
        "transformers": version("transformers"),
    }
    return row | ({"ways_that_failed": failed} if failed else {})
