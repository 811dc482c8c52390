"""Sampling: rows of logits to tokens.

The plain twin is `birkhoff.engine.sampler.sample`; `device.py` does the same for all rows of a batch in one CUDA launch
(`kernels/cuda/sample.cu`). Both draw with the same hashed noise, so a seed gives the same token on both except where
two candidates are closer than float32 resolves: the plain twin computes weights in float64, the kernel in float32.
"""
