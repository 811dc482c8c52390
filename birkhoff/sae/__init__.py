"""Sparse dictionaries of features at a site: read them, set them, or put their reconstruction in place of the row.

`dictionary.py` is the mathematics of one dictionary; `activations.py` its five families; `views.py` how a d-wide
dictionary meets rows with several streams. `encode.py` reads large dictionaries tile by tile, `splice.py` changes the
rows of a running step, `registry.py` keeps what is attached to an engine, `edits.py` is what a request says about it.
Files of other tools are read by the `load_*.py` next door; nothing is ever unpickled.
"""
