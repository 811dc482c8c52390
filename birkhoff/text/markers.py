"""The strings of V4's marker tokens.

A *marker* is an added token of the tokenizer: one id, never produced by encoding plain text. Chat encoding places
markers and the parser recognises them by id. Ids differ between tokenizers (the release has 129280, the embedded model
4096), so none is hard-coded: use `Tokenizer.token_id(marker)`.

The bars are U+FF5C (fullwidth) and the joiners U+2581, except in `<|EOT|>`, which is plain ASCII in the release too.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"

# `task` of a user message -> its marker (spec 13.2, step 5)
TASKS: dict[str, str] = {
    name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")
}

# Markers placed by chat encoding; all except DSML tags are errors inside a parsed answer.
CHAT_MARKERS: tuple[str, ...] = (
    BOS,
    EOS,
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    DSML,
    LATEST_REMINDER,
    *TASKS.values(),
)

SPECIAL_MARKERS: tuple[str, ...] = (BOS, EOS, PAD)  # flagged "special" in the release, at ids 0, 1 and 2

# The named added tokens of the release that are *not* flagged special, in the order of its ids.
PLAIN_MARKERS: tuple[str, ...] = (
    "<｜System｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    USER,
    ASSISTANT,
    "<|EOT|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
    "<｜begin▁of▁repo▁name｜>",
    "<｜end▁of▁repo▁name｜>",
    "<｜begin▁of▁file▁name｜>",
    "<｜end▁of▁file▁name｜>",
    "<｜begin▁of▁file｜>",
    "<｜end▁of▁file｜>",
    THINK,
    END_THINK,
    DSML,
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    LATEST_REMINDER,
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜task｜>",
    "<｜political｜>",
    "<｜entity｜>",
    "<｜title｜>",
    "<｜safety｜>",
    "<｜answer｜>",
    "<｜search｜>",
    "<dsml:",
    "</dsml:",
    "<｜search▁begin｜>",
    "<｜search▁end｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)


def placeholder(index: int) -> str:
    """Return the release's name of a reserved, unused id, which is flagged special."""
    return f"<｜place▁holder▁no▁{index}｜>"
