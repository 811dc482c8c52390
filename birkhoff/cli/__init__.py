"""The command `birkhoff`: `main.py` is the entry point, `verbs.py` the list of commands, one module per command.

`options.py` has options that commands share, `parsers.py` their values, `engine_io.py` opens engines, `terminal.py`
prints status and progress, `config_file.py` reads defaults from TOML."""
