"""The HTTP server: OpenAI- and Anthropic-compatible APIs with capture, steering and analysis routes.

`process.py` runs the server, `app.py` lists the routes, `middleware.py` wraps them. A generating route reads its body
(`body.py`, `fields.py`), builds a `GenerationCall` (`generation.py`, `chat_prompt.py`) and renders the result with a
formatter (`choices.py`, `content_blocks.py`). `async_engine.py` connects the event loop to the engine's thread.
"""
