"""Sparse autoencoders at a site: read features, clamp features, or replace a row by its reconstruction.

One dictionary: `dictionary.py` holds the weights and definitions, `activations.py` the five activation functions,
`views.py` how a d-wide dictionary applies to rows with several streams, `encode.py` encodes large ones in tiles.
On an engine: `registry.py` holds the attached dictionaries, `feature_edits.py` the edits of a request, `resolver.py`
resolves them, `splice.py` edits the rows of a running step. Files: `files.py` recognises the format; `sae_manifest.py`
and `saelens_files.py` read and write, `load_*.py` read those of other tools, `releases.py` knows published ones.
Training: `train.py` with the kinds of `architectures.py`, `evaluate.py`, `crosscoder.py`. Descriptions of features:
`features.py`, `feature_rules.py`, `feature_index.py`."""
