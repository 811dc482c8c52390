"""CUDA kernels of a decode step on NVIDIA GPUs (compute capability 9.0), compiled at run time.

A decode step is bound by the bandwidth of reading weights. Sources: `gemv.cu` (projections, router and shared
expert), `experts.cu` (routed experts in FP4), `blocks.cu` (in Q2_K and IQ2_XXS), `mhc.cu` (hyper-connections),
`route.cu` (expert selection), `topk.cu` (indexer), `attend.cu` (attention). The Triton twins are those of
`kernels/triton_backend.py`; tolerance against them is 2e-3 of the scale of a result (their inputs are bfloat16; these
kernels round the experts' hidden activations to float16). `backend.unsupported_reason` reports the models they cannot
run.
"""
