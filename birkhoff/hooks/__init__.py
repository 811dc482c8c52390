"""Sites of the forward pass, and the runtime that captures and edits them.

What can be tapped: `sites.py` (the table), `site_names.py` (aliases, names of other tools), `schema.py` (shapes and
dtypes for one model). What a request selects: `layers.py`, `positions.py` and `selector.py`, `phases.py`. What it
carries: `plan.py`, `resolved_edit.py`, `results.py`, `signals.py`. Arithmetic, one implementation each: `edit.py`
(rows), `routing.py` (experts), `attention_change.py` and `key_rules.py` (attention), `gating.py` (conditions),
`call_use.py` (functions). In a step: `tap.py` is the interface, `step_hooks.py` joins the plans of a step,
`batch_tap.py` runs eager steps, `graph_tap.py` recorded ones. `digest.py` identifies edits for caches."""
