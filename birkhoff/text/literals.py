"""The fixed prompt texts of the chat format: how tools, effort and response format are announced to the model.

A released checkpoint carries its texts in its own encoder file (`encoding/encoding_dsv4.py`). `load_literals` reads
that file as data (see `encoder_file.py`: parsed, never executed) and trusts a text by its sha256, or, for a revision
we do not know, by its shape; `verified` tells which. A model without such a file gets texts in our own words.

A text the file lacks is None and refused by name when a request needs it: prompting a model with words it was not
trained on is the caller's decision (`own_literals()`), not ours. The effort levels follow the file: V4 has text for
`max` only; the 0731 revision moved that text to `high` and brought a new one for `max`.
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

# sha256 -> which published text it is (spec 13.2)
_NAME_OF = {
    "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c": "tools_head",
    "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7": "tools_tail",
    "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7": "effort_strong",  # `max` of V4, `high` of 0731
    "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c": "effort_strongest",  # `max` of 0731
    "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112": "response_format_head",
}
_BYTES = frozenset((890, 99, 476, 528, 80))  # their lengths; nothing else is worth hashing


@dataclass(frozen=True)
class Literals:
    """One checkpoint's prompt texts. `effort` maps a level to its text; a level without text adds nothing."""

    tools_head: str | None
    tools_tail: str | None
    response_format_head: str | None
    effort: Mapping[str, str] = field(default_factory=dict)
    source: str = "birkhoff"  # the file's name, or ours
    verified: bool = False  # every text matched a published sha256

    def effort_text(self, level: str | None) -> str:
        """What `level` puts before the conversation."""
        if level is None:
            return ""
        if level not in EFFORT_LEVELS:
            raise ChatError(f"effort is {quoted(level)}, expected None, {', '.join(EFFORT_LEVELS)}.")
        if level == "max" and "max" not in self.effort:
            raise ChatError(self._lacks("effort 'max'"))
        return self.effort.get(level, "")

    def require(self, name: str) -> str:
        """The text called `name`, or a refusal that says which file lacks it."""
        text: str | None = getattr(self, name)
        if text is None:
            raise ChatError(self._lacks(name.replace("_", " ")))
        return text

    def _lacks(self, what: str) -> str:
        return (
            f"{self.source} has no recognisable {what} text, so this request cannot be put in the model's own words. "
            "Restore the checkpoint's encoder file, or pass literals=own_literals() to use Birkhoff's wording."
        )


def load_literals(checkpoint_dir: str | Path) -> Literals:
    """The texts of a checkpoint's encoder file, or our own when the checkpoint has none."""
    best: Literals | None = None
    for file in encoder_files(Path(checkpoint_dir)):
        found = _recognise(read_templates(file), file.name)
        if found.verified:
            return found
        if best is None and (found.tools_head or found.effort):
            best = found
    return best or own_literals()


def literals_to_json(literals: Literals) -> str:
    """Texts as one JSON object, for files that have no room for an encoder file."""
    names = ("tools_head", "tools_tail", "response_format_head")
    return json.dumps(
        {**{n: getattr(literals, n) for n in names}, "effort": dict(literals.effort)}, ensure_ascii=False
    )


def literals_from_json(text: str, source: str) -> Literals:
    """The way back; `verified` is decided here and not by the file. What makes no sense gives our own texts."""
    try:
        raw = json.loads(text)
        named = {name: raw[name] for name in ("tools_head", "tools_tail", "response_format_head")}
        effort = dict(raw["effort"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return own_literals()
    texts = [*effort.values(), *(value for value in named.values() if value is not None)]
    if not all(isinstance(value, str) for value in texts) or not set(effort) <= set(EFFORT_LEVELS):
        return own_literals()
    verified = (
        None not in named.values() and bool(effort) and all(_sha256(value) in _NAME_OF for value in texts)
    )
    return Literals(**named, effort=effort, source=source, verified=verified)


def own_literals() -> Literals:
    """Texts in our own words, for models that were not trained on the released ones."""
    return Literals(
        tools_head=_OWN_TOOLS_HEAD,
        tools_tail=_OWN_TOOLS_TAIL,
        response_format_head=_OWN_RESPONSE_FORMAT,
        effort={"max": _OWN_EFFORT},
    )


def _recognise(templates: list[Template], source: str) -> Literals:
    texts: dict[str, str] = {}
    efforts: dict[str, str] = {}
    for template in templates:
        for text in _candidates(template):
            name = _NAME_OF.get(_sha256(text)) if len(text.encode("utf-8", "replace")) in _BYTES else None
            if name in ("effort_strong", "effort_strongest"):
                level = _level(template.label) or ("max" if name == "effort_strongest" else "")
                efforts.setdefault(level, text)
            elif name is not None:
                texts.setdefault(name, text)
    verified = len(texts) == 3 and bool(efforts)
    if "" in efforts:  # the old text without a telling name: `high` where the new text is there, else `max`
        text = efforts.pop("")
        efforts.setdefault("high" if "max" in efforts else "max", text)
    for template in templates:
        _recognise_shape(template, texts, efforts)
    return Literals(
        tools_head=texts.get("tools_head"),
        tools_tail=texts.get("tools_tail"),
        response_format_head=texts.get("response_format_head"),
        effort=efforts,
        source=source,
        verified=verified and all(_sha256(text) in _NAME_OF for text in efforts.values()),
    )


def _recognise_shape(template: Template, texts: dict[str, str], efforts: dict[str, str]) -> None:
    """Texts of a revision we have no hash for, told by how they begin. Only named strings: no comment may count."""
    if not template.label:
        return
    if template.whole is not None and "{" in template.whole:
        return  # the unfilled form of a template that is also here filled in
    head, tail = template.around_only_hole() or (template.whole or "", "")
    if head.startswith("#") and DSML in head and tail and not {"tools_head", "tools_tail"} & texts.keys():
        texts.update(tools_head=head, tools_tail=tail)
    elif head.startswith("## Response Format") and not tail:
        texts.setdefault("response_format_head", head)
    elif head.startswith("Reasoning Effort") and not tail and (level := _level(template.label)):
        efforts.setdefault(level, head)


def _candidates(template: Template) -> tuple[str, ...]:
    if template.whole is not None:
        return (template.whole,)
    return template.around_only_hole() or ()


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
