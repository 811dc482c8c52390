"""One folder per operation: `__init__.py` states the contract, `reference.py` is the plain twin, other files are fast.

`cpu.py` is Numba, `prefill.py` and `decode.py` are Triton for prompts and for decode steps; `cuda/` has the CUDA
sources of decode steps and prompts, `packed/` the C++ of CPUs. `select.py` chooses the kernels of a model,
`triton_backend.py` and `cuda/backend.py` are the two sets of decode launches."""
