"""How `nano`, the embedded model, is made: text in, a checkpoint in the released layout out.

`python -m training.train` is the one command; README.md beside this file has the command lines and the measured
numbers. Nothing in `birkhoff/` imports this folder. The training forward is written a second time on purpose: it is
fast, batched and differentiable where `birkhoff.model` is exact and incremental, and the tests hold the two together.
"""
