"""Writing of checkpoints: conversions between the released layout and GGUF, and random checkpoints.

`convert.py` plans a conversion (`to_gguf.py`, `to_safetensors.py`) as a `conversion_plan.py`, which `write.py`
carries out with the bytes of `produce.py`; an interrupted one continues. `check.py` compares the result with its
source. `formats.py` names the number formats, `gguf_bytes.py` encodes GGUF headers, `chat_template.py` is the chat
encoding for GGUF readers. `synth.py` writes random checkpoints of the sizes in `presets.py`."""
