"""Answers that must have a form: JSON, JSON by a schema, or a tool call.

llguidance turns a grammar into the set of tokens that may come next; the sampler leaves only those. Markers of the chat
format are tokens of their own in a grammar, so no text can imitate them. Reasoning, where the model thinks, is free
until its end marker. A grammar is compiled once and kept; what a schema may cost is bounded, and a schema that is too
large, wrong or endless is refused before the request runs. Without llguidance installed such requests are refused by
name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from birkhoff.engine.request import TokenMask
from birkhoff.errors import quoted
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.fields import ResponseFormat
from birkhoff.text.markers import DSML, END_THINK

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.tokenizer import Tokenizer

MOST_SCHEMA_BYTES = 64 * 1024
MOST_KEPT = 32
# One space behind separators, as json.dumps writes; free spacing would let an answer be nothing but spaces.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MakeMask = Callable[[], TokenMask]


class Grammars:
    def __init__(self, engine: Callable[[], Engine]):
        self._engine = engine
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def of_format(self, wanted: ResponseFormat | None, thinking: bool) -> MakeMask | None:
        """What `response_format` asks for; None when the answer is free."""
        if wanted is None or wanted.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise bad("response_format.json_schema.schema is missing.", "response_format.json_schema")
            schema = wanted.json_schema.schema_
        return self.of_lark(
            f"start: %json {_json_rule(schema, 'response_format')}\n", thinking, "response_format"
        )

    def of_lark(self, grammar: str, thinking: bool, param: str) -> MakeMask:
        """A mask for every answer that follows `grammar`, behind its reasoning if there is any."""
        llguidance = _library()
        if thinking:
            end = self.marker(END_THINK)
            grammar = (
                grammar.replace("start:", "answer:", 1)
                + f"start: reasoning {end} answer\nreasoning: /(.|\\n)*/\n"
            )
        if self._tokenizer is None:
            engine = self._engine()
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Vocabulary(engine.tokenizer, engine.config)),
                n_vocab=engine.config.vocab_size,
                eos_token=list(engine.config.eos_token_ids),
            )
        ends = tuple(self._engine().config.eos_token_ids)
        first = self._compiled.get(grammar)
        if first is None:
            limits = llguidance.LLParserLimits(initial_lexer_fuel=400_000, max_grammar_size=100_000)
            first = llguidance.LLMatcher(
                self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
            )
            if first.is_error():
                reason = first.get_error().split("\n")[0]
                raise bad(
                    f"{param}: no grammar can be made of this: {quoted(reason, 200)}. Simplify it.",
                    param,
                    "schema-invalid",
                )
            if _tokens(first.deep_copy()) <= set(ends):  # no JSON and no call is empty
                raise bad(
                    f"{param}: nothing can be said that fits this. Does it refer to itself?",
                    param,
                    "schema-empty",
                )
            self._compiled[grammar] = first
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return lambda: GrammarMask(first.deep_copy(), ends)

    def marker(self, name: str) -> str:
        """A chat marker as a grammar names it."""
        token = self._engine().tokenizer.markers.get(name)
        if token is None:
            raise bad(
                f"this model's tokenizer has no {name} marker, so the form of its answers cannot be forced."
            )
        return f"<[{token}]>"


class GrammarMask:
    """One answer's way through a grammar. Tokens are read as they are kept; when some are taken back, so are they."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self._matcher = matcher
        self._ends = list(ends)
        self._read = 0

    @property
    def problem(self) -> str:
        """Why the grammar could not be followed to its end; empty when it could."""
        if not self._matcher.is_error():
            return ""
        return "the form grew too complex to be followed, so the answer ends early and may not fit it."

    def allowed(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        if len(output_ids) < self._read:
            self._matcher.rollback(self._read - len(output_ids))
        else:
            self._matcher.consume_tokens(list(output_ids[self._read :]))
        self._read = len(output_ids)
        found = torch.zeros(vocab_size, dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            found = torch.from_numpy(bits[:vocab_size].astype(bool))
        if not found.any():  # the grammar is at its end
            found[self._ends] = True
        return found


def _tokens(matcher: Any) -> set[int]:
    """The tokens that may come next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


class _Vocabulary:
    """Our tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer, config: Any):
        self.eos_token_id = config.eos_token_ids[0]
        self.bos_token_id = config.bos_token_id
        names = {token: name for name, token in tokenizer.markers.items()}
        self.tokens = [
            names[i].encode() if i in names else tokenizer.piece(i) or b"<unused-%d>" % i
            for i in range(config.vocab_size)
        ]
        unused = [i for i in range(config.vocab_size) if i not in names and not tokenizer.piece(i)]
        self.special_token_ids = sorted({*names, *unused})
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def forced_call(grammars: Grammars, tools: Sequence[dict[str, Any]], one: bool) -> str:
    """The grammar of an answer that is nothing but calls of these functions, in the model's own format."""
    dsml = grammars.marker(DSML)
    rules = [f'start: "\\n\\n<" {dsml} "tool_calls>\\n" calls "\\n</" {dsml} "tool_calls>"']
    rules.append("calls: call" if one else 'calls: call ("\\n" call)*')
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        rules.append(
            f'call_{place}: "<" {dsml} {_text("invoke name=" + json.dumps(function["name"]) + ">")} '
            f'arguments_{place} "\\n</" {dsml} "invoke>"'
        )
        known = schema.get("properties") or {}
        required = schema.get("required") or []
        parts = []
        for number, (key, kind) in enumerate(known.items()):
            rules.append(_parameter(f"p_{place}_{number}", key, kind, dsml, f"tools[{place}]"))
            parts.append(f'("\\n" p_{place}_{number})' + ("" if key in required else "?"))
        rules.append(f"arguments_{place}: " + (" ".join(parts) if parts else '"\\n"'))
    return "\n".join(rules) + "\n"


def _parameter(rule: str, key: str, schema: Any, dsml: str, where: str) -> str:
    if not isinstance(schema, dict):
        raise bad(f"{where}: the schema of a parameter must be an object.", where, "schema-invalid")
    texts = [value for value in schema.get("enum", []) if isinstance(value, str)]
    is_text = schema.get("type") == "string" or (texts and len(texts) == len(schema["enum"]))
    if is_text:
        value = " | ".join(_text(each) for each in texts) if texts else _characters(schema)
    else:
        value = f"%json {_json_rule(schema, where)}"
    head = _text(
        f'parameter name={json.dumps(key, ensure_ascii=False)} string="{"true" if is_text else "false"}">'
    )
    return f'{rule}: "<" {dsml} {head} {rule}_v "</" {dsml} "parameter>"\n{rule}_v: {value}'


def _characters(schema: dict[str, Any]) -> str:
    """Text of a string parameter; what looks like the beginning of a tag is left out."""
    least = schema.get("minLength", 0)
    most = schema.get("maxLength", "")
    plain = all(isinstance(each, int) and 0 <= each <= 4096 for each in (least, most) if each != "")
    return f"/[^<]{{{least},{most}}}/" if plain else "/[^<]*/"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_rule(schema: dict[str, Any], param: str) -> str:
    text = json.dumps({**schema, "x-guidance": JSON_STYLE})
    if len(text) > MOST_SCHEMA_BYTES:
        raise bad(
            f"{param}: the schema has {len(text)} bytes, expected at most {MOST_SCHEMA_BYTES}.",
            param,
            "schema-too-large",
        )
    return text


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ApiError(
            501,
            "answers of a given form need the package llguidance, which is not installed here: birkhoff[grammar].",
            code="grammar-missing",
        ) from None
    return llguidance
