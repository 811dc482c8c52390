"""Requests to tokens.

`engine.py` is the core: schedule, run, commit. `request.py` is one request, `request_loop.py` how callers step the
engine, `scheduler.py` what a step computes, `runner.py` how it is computed, `sampler.py` what is sampled. On a GPU:
`cuda_graphs.py`, `run_ahead.py`, `host_copier.py`, `gpu_warmup.py`. Reuse: `prefix.py` with `snapshot_pool.py`,
`row_cache.py`, `page_files.py` and `named_contexts.py`. Speculation: `speculation.py`, `draft_chain.py` and its
controller. Sizes: `cache_plan.py`, `memory_plan.py`, `speed_bounds.py`."""
