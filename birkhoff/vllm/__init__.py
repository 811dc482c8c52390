"""Captures and edits on vLLM, unmodified, as the distributed engine.

The front (`core.py` in Python, `http_fields.py` in `vllm serve`) checks requests and prepares them on every rank by
remote calls; the worker class (`worker.py`) arms the layers of its rank, and its runner (`runner.py`) announces each
step to the hooks; the scheduler class (`scheduler.py`) keeps edited text out of the cache of other text.
"""
