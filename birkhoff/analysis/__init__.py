"""Analyses on an engine: what its activations are, what they cause, and dictionaries trained on them.

- Passes: `forward.py` runs whole texts outside of batches, `gradients.py` with gradients at every site.
- Reading: `lens.py`, `attention.py`, `logit_attribution.py`, `block_signals.py`.
- Causes: `patching.py` patches one text into another; `attribute.py` scores `nodes.py` by a `metric.py` and returns an
  `attribution.py`; `circuit.py` finds the nodes that suffice, `circuit_svg.py` draws them.
- Steering: `contrast.py`, `expert_contrast.py`, `vector_search.py`, `steering_effect.py`, `vector_import.py`.
- Rows of many texts: `activations_store.py` iterates over them, `harvest.py` and `harvest_parts.py` store them,
  `run_manifest.py` describes a store.
- Dictionaries: `sae_rows.py` and `sae_train.py` train, `sae_quality.py` evaluates, `sae_read.py` and `sae_features.py`
  describe features, `crosscoder_train.py` and `crosscoder_splice.py` do so over several sites."""
