"""Comparison of a checkpoint, build, port or engine with a reference, site by site.

`validate.py` compares two checkpoints, or one with `transformers` (`oracle.py`) or goldens (`goldens.py`): both sides
are forward passes of `runs.py`, which `compare.py` compares within the tolerances of `gates.py`. `selection.py` finds
ties between experts or blocks, `divergence.py` says where two runs part, `faults.py` and `mtp_faults.py` explain it
by known mistakes, `report.py` formats the result. `engine_check.py` compares the engine of a machine with the
reference kernels, `greedy.py` greedy answers of two builds, `official.py` an engine with vectors of the official
API."""
