"""Benchmarks behind `birkhoff bench`: one module per command, each prints JSON lines.

Baselines run in turns with ours: `baselines.py`, `hf_baseline.py`, `llama_baseline.py`. `synthetic.py` makes random
weights, `load_generator.py` sends requests."""
