"""Train `nano`, the embedded model: text in, a checkpoint in the released layout out.

`python -m training.train` is the entry point; README.md in this directory has command lines and measurements. Nothing
in `birkhoff/` imports this package. The training forward is a separate implementation: fast, batched and
differentiable, where `birkhoff.model` is exact and incremental. Tests compare the two.
"""
