"""Text to token ids and back.

Tokenizers: `tokenizer.py` (V4), `general_tokenizer.py` (other models), `byte_tokenizer.py` (builds one). V4's chat:
`messages.py` checks a conversation, `chat.py` encodes it with `markers.py`, `segments.py` and the texts of
`prompt_texts.py`; `parse.py` and `tool_block.py` parse the answer into `events.py`. Answers of other models:
`template_answer.py`. While tokens arrive: `output_stream.py`, `detokenizer.py`, `stop.py`."""
