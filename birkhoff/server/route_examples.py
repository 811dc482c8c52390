"""A request body for every route that takes one, shown in `/openapi.json` and `/docs` and sent by the tests.

All of them work as they are on a server of nano.
"""

from __future__ import annotations

from typing import Any

_FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
_PATCH = {"op": "patch", "at": {"hook": "mlp_out", "layers": [3]}, "source": "zeros"}

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _FOX,
        "max_tokens": 40,
        "seed": 1,
        "interventions": [{"op": "add", "vector": "@spooky"}],
        "capture": {"memory": {"hooks": {"mhc_ffn_res_mix": [4]}, "positions": "last_prompt"}},
    },
    "/v1/chat/completions/input_tokens": {"messages": _FOX},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.7, "logprobs": 2},
    "/v1/responses": {"input": "Tell me a story about a fox.", "max_output_tokens": 40},
    "/v1/messages": {"model": "nano", "max_tokens": 40, "messages": _FOX},
    "/v1/messages/count_tokens": {"model": "nano", "messages": _FOX},
    "/v1/embeddings": {"input": ["The fox ran.", "The dog slept."], "pooling": "mean"},
    "/api/chat": {
        "model": "nano",
        "messages": _FOX,
        "stream": False,
        "options": {"num_predict": 20, "seed": 1},
    },
    "/api/generate": {
        "model": "nano",
        "prompt": "Why is the sky blue?",
        "stream": False,
        "options": {"num_predict": 20},
    },
    "/api/embed": {"model": "nano", "input": ["The fox ran.", "The dog slept."]},
    "/api/embeddings": {"model": "nano", "prompt": "The fox ran."},
    "/api/show": {"model": "nano"},
    "/completion": {"prompt": "Once upon a time", "n_predict": 20, "temperature": 0.7},
    "/tokenize": {"prompt": "Once upon a time", "return_token_strs": True},
    "/detokenize": {"tokens": [300, 301, 302]},
    "/apply-template": {"messages": _FOX},
    "/v1/interp/estimate": {
        "prompt": "Once upon a time",
        "capture": {"memory": {"hooks": {"mlp_out": "all"}, "positions": "all_prompt"}},
    },
    "/v1/interp/attention": {"prompt": "Once upon a time there was a fox", "position": -1},
    "/v1/lens": {"prompt": "Once upon a time there was a", "k": 3},
    "/v1/logit_attribution": {"prompt": "Tom had a red ball. Tom lost his", "token": [" ball", " hat"]},
    "/v1/interp/contrast": {
        "positive": [
            "The dark ghost came.",
            "It was a cold night.",
            "A wolf howled.",
            "The house was empty.",
        ],
        "negative": [
            "The happy dog ran.",
            "It was a sunny day.",
            "The bird sang.",
            "The house was full of friends.",
        ],
        "hook": "mhc_streams_pre_attn",
    },
    "/v1/interp/features": {"prompt": "The dog ran to the sea.", "sae": "nano", "k": 3},
    "/v1/steering/sae/set": {
        "decode_specs": [
            {
                "module_name": "nano",
                "clamps": {
                    "mhc_streams_pre_attn": {"5": [{"feature_idx": 34, "kind": "absolute", "value": 1.0}]}
                },
            }
        ]
    },
    "/v1/attribute": {
        "prompt": "One day, Lily had a ball. Tom asked",
        "metric": {"token": " Lily", "other": " Tom"},
        "baseline": {"prompt": "One day, Anna had a ball. Tom asked"},
        "top": 5,
    },
    "/v1/circuit": {
        "prompt": "One day, Lily had a ball. He asked",
        "metric": {"token": " Lily", "other": " Anna"},
        "baseline": {"prompt": "One day, Anna had a ball. He asked"},
    },
    "/v1/patch_sweep": {
        "source": {"prompt": "The cat ran"},
        "target": {"prompt": "The dog ran"},
        "hook": "mlp_out",
        "layers": [3],
        "positions": [1],
        "metric": {"token": " away", "other": " home"},
    },
    "/v1/steering/set": {"interventions": [_PATCH]},
    "/v1/steering/modules/register": {"name": "tilt", "vectors": {"mlp_out": {"3": [0.01] * 384}}},
    "/v1/steering/modules/unregister": {"name": "tilt"},
}
