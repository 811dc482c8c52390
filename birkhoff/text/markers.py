"""The strings of V4's marker tokens, and nothing about their ids.

A *marker* is an added token of the tokenizer: one id, never made from plain text. Chat encoding places markers, the
parser tells them from text by id, and everything else in a prompt is plain text. Ids differ between tokenizers (the
release has 129280 of them, the embedded model 4096), so no id appears in this file or in any other: ask
`Tokenizer.token_id(marker)`.

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

# `task` of a user message -> the marker that asks for it (spec 13.2, step 5)
TASKS: dict[str, str] = {
    name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")
}

# Markers the chat encoding itself may place; every one of them is an error inside a parsed answer, DSML tags apart.
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


def placeholder(number: int) -> str:
    """The release's own name for a reserved, unused id; flagged special there."""
    return f"<｜place▁holder▁no▁{number}｜>"
