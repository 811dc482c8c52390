"""The fixed prompt texts of the chat format: the instructions for tools, effort and response format.

A released checkpoint has its texts in its encoder file (`encoding/encoding_dsv4.py`). `load_prompt_texts` reads that
file as data (see `encoder_file.py`) and identifies a text by its sha256 or, in an unknown revision, by its form;
`verified` tells which. A model without such a file gets Birkhoff's own texts.

A text that the file lacks is None, and a request that needs it is rejected: prompting a model with words it was not
trained on must be an explicit choice (`own_prompt_texts()`). Effort levels follow the file: V4 has a text for `max`
only; the 0731 revision moved that text to `high` and added a new one for `max`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from birkhoff.errors import ChatError, quoted
from birkhoff.text.encoder_file import Template, encoder_files, read_templates
from birkhoff.text.markers import DSML, END_THINK, THINK

EFFORT_LEVELS = ("low", "high", "max")

# sha256 -> name of the published text (spec 13.2)
_KNOWN_TEXTS = {
    "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c": "tools_head",
    "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7": "tools_tail",
    "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7": "effort_strong",  # `max` of V4, `high` of 0731
    "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c": "effort_strongest",  # `max` of 0731
    "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112": "response_format_head",
}
_KNOWN_LENGTHS = frozenset((890, 99, 476, 528, 80))  # in bytes; texts of other lengths are not hashed


@dataclass(frozen=True)
class PromptTexts:
    """One checkpoint's prompt texts. `effort` maps a level to its text; a level without text adds nothing."""

    tools_head: str | None
    tools_tail: str | None
    response_format_head: str | None
    effort: Mapping[str, str] = field(default_factory=dict)
    source: str = "birkhoff"  # file name, or "birkhoff"
    verified: bool = False  # every text matched a published sha256

    def effort_text(self, level: str | None) -> str:
        """Return the text that `level` adds before the conversation."""
        if level is None:
            return ""
        if level not in EFFORT_LEVELS:
            raise ChatError(f"effort is {quoted(level)}, expected None, {', '.join(EFFORT_LEVELS)}.")
        if level == "max" and "max" not in self.effort:
            raise ChatError(self._lacks("effort 'max'"))
        return self.effort.get(level, "")

    def require(self, name: str) -> str:
        """Return the text `name`, or raise ChatError naming the file that lacks it."""
        text: str | None = getattr(self, name)
        if text is None:
            raise ChatError(self._lacks(name.replace("_", " ")))
        return text

    def _lacks(self, what: str) -> str:
        return (
            f"{self.source} has no recognisable {what} text, so this request cannot be put in the model's own words. "
            "Restore the checkpoint's encoder file, or pass texts=own_prompt_texts() to use Birkhoff's wording."
        )


def load_prompt_texts(checkpoint_dir: str | Path, stored: str | None = None) -> PromptTexts:
    """Return a checkpoint's texts: from `stored` (JSON), else from its encoder file, else Birkhoff's own."""
    if stored is not None:
        return prompt_texts_from_json(stored, Path(checkpoint_dir).name)
    unverified: PromptTexts | None = None
    for file in encoder_files(Path(checkpoint_dir)):
        texts = _identify(read_templates(file), file.name)
        if texts.verified:
            return texts
        if unverified is None and (texts.tools_head or texts.effort):
            unverified = texts
    return unverified or own_prompt_texts()


def prompt_texts_to_json(texts: PromptTexts) -> str:
    """Serialise as one JSON object, for formats without an encoder file."""
    names = ("tools_head", "tools_tail", "response_format_head")
    return json.dumps(
        {**{n: getattr(texts, n) for n in names}, "effort": dict(texts.effort)}, ensure_ascii=False
    )


def prompt_texts_from_json(text: str, source: str) -> PromptTexts:
    """Parse `prompt_texts_to_json` output; malformed input gives Birkhoff's own texts."""
    try:
        raw = json.loads(text)
        named = {name: raw[name] for name in ("tools_head", "tools_tail", "response_format_head")}
        effort = dict(raw["effort"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return own_prompt_texts()
    texts = [*effort.values(), *(value for value in named.values() if value is not None)]
    if not all(isinstance(value, str) for value in texts) or not set(effort) <= set(EFFORT_LEVELS):
        return own_prompt_texts()
    verified = (
        None not in named.values() and bool(effort) and all(_sha256(value) in _KNOWN_TEXTS for value in texts)
    )
    return PromptTexts(**named, effort=effort, source=source, verified=verified)


def own_prompt_texts() -> PromptTexts:
    """Return Birkhoff's own texts, for models that were not trained on the released ones."""
    return PromptTexts(
        tools_head=_OWN_TOOLS_HEAD,
        tools_tail=_OWN_TOOLS_TAIL,
        response_format_head=_OWN_RESPONSE_FORMAT,
        effort={"max": _OWN_EFFORT},
    )


def _identify(templates: list[Template], source: str) -> PromptTexts:
    texts: dict[str, str] = {}
    efforts: dict[str, str] = {}
    for template in templates:
        for text in _candidates(template):
            name = (
                _KNOWN_TEXTS.get(_sha256(text))
                if len(text.encode("utf-8", "replace")) in _KNOWN_LENGTHS
                else None
            )
            if name in ("effort_strong", "effort_strongest"):
                level = _level(template.label) or ("max" if name == "effort_strongest" else "")
                efforts.setdefault(level, text)
            elif name is not None:
                texts.setdefault(name, text)
    verified = len(texts) == 3 and bool(efforts)
    # The older text without a level in its name: `high` if the newer one exists, else `max`.
    if "" in efforts:
        text = efforts.pop("")
        efforts.setdefault("high" if "max" in efforts else "max", text)
    for template in templates:
        _identify_by_shape(template, texts, efforts)
    return PromptTexts(
        tools_head=texts.get("tools_head"),
        tools_tail=texts.get("tools_tail"),
        response_format_head=texts.get("response_format_head"),
        effort=efforts,
        source=source,
        verified=verified and all(_sha256(text) in _KNOWN_TEXTS for text in efforts.values()),
    )


def _identify_by_shape(template: Template, texts: dict[str, str], efforts: dict[str, str]) -> None:
    """Identify texts without a known hash by their beginning. Unnamed strings (comments) are ignored."""
    if not template.label:
        return
    if template.text is not None and "{" in template.text:
        return  # an unfilled template; its filled form is also in the list
    head, tail = template.split_at_placeholder() or (template.text or "", "")
    if head.startswith("#") and DSML in head and tail and not {"tools_head", "tools_tail"} & texts.keys():
        texts.update(tools_head=head, tools_tail=tail)
    elif head.startswith("## Response Format") and not tail:
        texts.setdefault("response_format_head", head)
    elif head.startswith("Reasoning Effort") and not tail and (level := _level(template.label)):
        efforts.setdefault(level, head)


def _candidates(template: Template) -> tuple[str, ...]:
    if template.text is not None:
        return (template.text,)
    return template.split_at_placeholder() or ()


def _level(label: str) -> str:
    return next((level for level in ("max", "high") if level in label.lower()), "")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


_OWN_TOOLS_HEAD = f"""## Tools

The tools listed below can be called. A call is written at the end of an answer, in this form:

<{DSML}tool_calls>
<{DSML}invoke name="TOOL">
<{DSML}parameter name="PARAMETER" string="true|false">VALUE</{DSML}parameter>
</{DSML}invoke>
</{DSML}tool_calls>

Text values are written as they are, with `string="true"`; every other value is JSON, with `string="false"`. One block \
may hold several calls. Where an answer begins with {THINK}, thoughts end with {END_THINK} before any call is made.

One line of JSON describes each tool:

"""
_OWN_TOOLS_TAIL = "\n\nCall only these tools, with the parameters they describe.\n"
_OWN_RESPONSE_FORMAT = "## Response format\n\nAnswer with nothing but JSON that fits this description:\n"
_OWN_EFFORT = (
    "Think for as long as the question needs. Look at it from more than one side, try to prove each step wrong, "
    "and answer only when nothing is left in doubt.\n\n"
)
