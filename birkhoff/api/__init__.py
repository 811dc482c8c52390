"""`load` and the `Engine` it returns: the one place where the rooms meet.

`load.py` opens a checkpoint and decides how it runs; `engine.py` is what a user calls; `prompts.py` checks what comes
in. Everything here is thin: it introduces text to tokens, tokens to the engine and plans to sites, and hands back plain
results. Options that are not built yet are refused by name.
"""

from birkhoff.api.engine import Engine
from birkhoff.api.load import load

__all__ = ["Engine", "load"]
