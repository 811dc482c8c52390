"""The V4 architecture, differentiable, one module per part of the specification.

Read `block.py` first: one layer. Its parts are `attention.py` (with `compressor.py`, `indexer.py`, `rope.py`),
`moe.py` and `mhc.py`; `transformer.py` is the whole model and `mtp.py` the block that drafts. `linear.py` has the
linear layers, packed or not. `batch.py` is one step of many sequences, `state.py` their cache and `cache_size.py` its
bytes. `attention_rows.py` computes the attention of single tokens again where it is read or changed. `compiled.py`
names what faster implementations replace (`birkhoff/decode`)."""
