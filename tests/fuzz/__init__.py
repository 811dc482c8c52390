"""Seeded fuzzing of everything that reads what others wrote: request bodies, connections and files.

`python -m tests.fuzz --seconds 60 --seed 1` attacks for a given time (`make fuzz SECONDS=60`); the tests in this folder
run a small part of the same generators. A finding is shrunk and written to `cases/` under a name, and
`test_cases.py` replays every named case.
"""
