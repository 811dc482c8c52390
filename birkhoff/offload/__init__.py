"""Routed experts in host memory, for models that do not fit the device.

`expert_store.py` holds all experts and the table of their addresses, `expert_layout.py` is one of them as bytes.
`copy_stream.py` copies, `prefetch.py` copies ahead for prompts, `placement.py` moves hot experts to the device by
`expert_usage.py`. `host_experts.py` computes cold ones on the CPU. `read_gate.py` lets requests start while experts
are still read from files."""
