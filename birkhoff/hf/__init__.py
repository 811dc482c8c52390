"""Models of Transformers in our engine.

`families.py` is the table of families and sites, `checkpoint.py` decides from `config.json` whether a model runs,
`open_model.py` opens it, `model.py` taps its sites, `runner.py` and `slot_cache.py` run it for our scheduler,
`chat_template.py` is its chat format."""
