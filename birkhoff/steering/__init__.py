"""Edits of a request, and the vectors they use.

Edits are plain data with a JSON form (`request_edit.py`): `vector_edits.py`, `mixer_edits.py`, `expert_edits.py`,
`attention_edits.py`, `call.py`, each with an optional condition (`gated_edits.py`). `resolver.py` resolves them
against a model. Forms of the same edits: request fields (`steering_fields.py`, `tiers.py`, `vector_encoding.py`) and
one line (`edit_syntax.py`). Vectors: `vector.py`, `vector_file.py`, `modules.py` (by name), `importers.py`,
`position_rows.py` (rows of another run). `extract.py` computes directions from two sets of rows."""
