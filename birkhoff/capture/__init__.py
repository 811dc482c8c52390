"""Captures of activations.

`spec/` is what a request asks to keep, `planner.py` makes it part of a plan, `sinks/` is where rows go, `store/` their
files."""
