"""Kernels in CUDA for what decides a decoding step on NVIDIA GPUs: reading weights.

The portable twins are those of `kernels/triton_backend.py`; tolerance against them 2e-3 of a result's scale (their inputs are
bfloat16, these round the experts' inner activations to float16). `launch.unfit` says when they cannot serve.
"""
