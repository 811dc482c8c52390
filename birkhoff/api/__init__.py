"""The Python interface: `load` opens a checkpoint and returns an `Engine`.

`options.py` holds the options of `load`, `load.py` opens a checkpoint and builds the engine, `engine.py` is the class
that users call, `driver.py` steps an engine in a thread for the server. Nothing is imported here, so that the options
can be listed without PyTorch.
"""
