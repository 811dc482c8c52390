"""`transformers` on a GPU: the same architecture in bfloat16, as its users would run it, cut to a few layers.

It cannot run the released FP4 and FP8 weights on this device, so its experts are bfloat16 and only a few layers fit;
the comparison is therefore made with as many layers of ours, at the same widths and context. Weights are random on both
sides: speed is compared here, and agreement with `transformers` on equal weights in the tests.
"""

from __future__ import annotations

from typing import Any

import torch

from birkhoff.bench.report import summary, version
from birkhoff.config import V4Config

WAYS = ("batched_mm", "grouped_mm")


def build(config: V4Config, device: torch.device) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    raw = config.to_dict()
    scaling = raw.pop("rope_scaling", None)
    for key in ("model_type", "architectures", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    raw["compress_ratios"] = list(config.compress_ratios)
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
        raw["rope_parameters"] = scaling
    raw["attn_implementation"] = "eager"  # the only one it has for V4
    theirs = DeepseekV4Config(**raw)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = DeepseekV4ForCausalLM(theirs).eval()
    finally:
        torch.set_default_dtype(before)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(config.n_routed_experts, buffer.shape, device=device))
    return model


@torch.inference_mode()
def decode_ms(model: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step after a prompt of `context` tokens, with the faster of its ways to compute experts."""
    device = next(model.parameters()).device
    prompt = torch.randint(model.config.vocab_size, (batch, context), device=device)
    tried: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for way in WAYS:
        try:
            model.set_experts_implementation(way)
            out = model(prompt, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            spans = []
            for step in range(steps + 3):
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                end.record()
                end.synchronize()
                if step >= 3:
                    spans.append(begin.elapsed_time(end))
            tried[way] = spans
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            failed[way] = str(error)[:200]  # a way made for other devices
            continue
        del out, cache
        torch.cuda.empty_cache()
    return _faster(tried, failed)


@torch.inference_mode()
def prefill_ms(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of reading a prompt, with the faster of its ways to compute experts."""
    device = next(model.parameters()).device
    prompt = torch.randint(model.config.vocab_size, (1, tokens), device=device)
    tried: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for way in WAYS:
        try:
            model.set_experts_implementation(way)
            spans = []
            for turn in range(rounds + 2):
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                model(prompt, use_cache=True, logits_to_keep=1)
                end.record()
                end.synchronize()
                if turn >= 2:
                    spans.append(begin.elapsed_time(end))
            tried[way] = spans
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            failed[way] = str(error)[
                :200
            ]  # a way made for other devices, or one that needs more memory than there is
            continue
        torch.cuda.empty_cache()
    return _faster(tried, failed)


def _faster(tried: dict[str, list[float]], failed: dict[str, str]) -> dict[str, Any]:
    """The way with the smaller median, and what the ways that did not run said."""
    best = min(tried, key=lambda way: sorted(tried[way])[len(tried[way]) // 2])
    row = {
        "experts_implementation": best,
        "ms": summary(tried[best]),
        "transformers": version("transformers"),
    }
    return row | ({"ways_that_failed": failed} if failed else {})
