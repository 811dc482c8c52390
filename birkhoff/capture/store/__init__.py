"""Capture files: written so that a crash loses nothing acknowledged, and read without an engine.

Writing: `writer.py`, `open_file.py`, `journal.py`, `commit.py`, `sealing.py`, all through `disk.py`. After a crash:
`findings.py`, `repair.py`. Reading: `reader.py`, `row_reader.py`, `request_reader.py`, from `sidecar.py` and
`entry.py`. Whole stores: `finished.py`, `join.py`, `export.py`. Names and options: `naming.py`, `file_options.py`."""
