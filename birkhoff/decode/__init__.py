"""Fused decode steps: the functions of `birkhoff/model` for a few tokens at a time.

`gpu.py` launches a step on a GPU, with the static buffers of `buffers.py`, the weights of `layer_weights.py` and
`mtp.py`, and the taps of `taps.py`. `cpu.py` and `native.py` replace sublayers on a CPU: loops compiled by Numba, and
C++. `step_time.py` measures a step."""
