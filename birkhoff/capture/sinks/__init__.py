"""Where captured rows go.

`job.py` is a capture as a job of a plan: it transforms rows (`reduce.py`) and appends them to a sink, which keeps them
in memory (`captured_rows.py`) or sends chunks (`chunk.py`, `dispatch_sink.py`) through the queues of `dispatcher.py`
to a consumer. `consumer.py` is the interface; `filesystem.py`, `log_consumer.py`, `sae_stats.py`, `shm_consumer.py`
and `stream_consumer.py` implement it; `consumer_registry.py` makes one from text."""
