"""Sparse autoencoders at a site: read features, clamp features, or replace a row by its reconstruction.

`dictionary.py` holds the weights and definitions of one dictionary, `activations.py` its five activation functions,
and `views.py` how a d-wide dictionary applies to rows with several streams. `encode.py` encodes large dictionaries
in tiles, `splice.py` edits the rows of a running step, `registry.py` holds the dictionaries attached to an engine,
and `feature_edits.py` the edits of a request. `load_*.py` read the files of other tools."""
