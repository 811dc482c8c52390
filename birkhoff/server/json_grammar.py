"""Structured output: JSON, JSON that matches a schema, or a tool call.

llguidance computes the set of tokens a grammar allows next, and the sampler masks all others. Chat markers are
separate tokens in a grammar, so text cannot imitate them. Reasoning is unconstrained up to its end marker. Grammars are
compiled once and cached. A new one is compiled in a child process first (`json_schema.py`), which limits its cost;
schemas that are too large, invalid or match nothing are refused before the request runs. If llguidance is not
installed, such requests are refused with a message naming it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from birkhoff.engine.request import TokenMask
from birkhoff.errors import quoted
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.fields import ResponseFormat
from birkhoff.server.json_schema import MAX_SCHEMA_BYTES, SchemaCompiler, check_schema
from birkhoff.text.markers import DSML, END_THINK
from birkhoff.text.template_answer import ARGS, CallSyntax

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 512 * 1024
MAX_KEPT = 32
# One space after separators, as json.dumps writes. Flexible whitespace would allow an output of spaces only.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MaskFactory = Callable[[], TokenMask]
_MARKER = re.compile("\0([0-9]+)\0")


class GrammarCompiler:
    """Compiles grammars for the engine's tokenizer and caches the last `MAX_KEPT` of them."""

    def __init__(self, engine: Callable[[], Engine]):
        self._engine = engine
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._checker = SchemaCompiler()

    def from_response_format(
        self, response_format: ResponseFormat | None, reasoning: str | None = None
    ) -> MaskFactory | None:
        """The mask for `response_format`, or None if the output is unconstrained."""
        if response_format is None or response_format.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if response_format.type == "json_schema":
            if response_format.json_schema is None or response_format.json_schema.schema_ is None:
                raise bad_request(
                    "response_format.json_schema.schema is missing.", "response_format.json_schema"
                )
            schema = response_format.json_schema.schema_
            check_schema(schema, "response_format.json_schema.schema")
        return self.from_lark(
            f"start: %json {_json_rule(schema, 'response_format')}\n", reasoning, "response_format"
        )

    def from_lark(self, grammar: str, reasoning: str | None, param: str) -> MaskFactory:
        """A factory of masks for a Lark grammar, applied after the reasoning: `ChatFormat.reasoning_start` says how
        that begins, None if there is none."""
        llguidance = _import_llguidance()
        if reasoning is not None:
            start = self.tag(reasoning) if reasoning else ""
            rules = f"start: {start} reasoning {self.tag(END_THINK)} answer\nreasoning: /(.|\\n)*/\n"
            if END_THINK not in self._engine().tokenizer.markers:
                end = _literal(END_THINK)
                rules = f"start: {start} reasoning /\\n*/ answer\nreasoning[suffix={end}]: /(.|\\n)*/\n"
            grammar = grammar.replace("start:", "answer:", 1) + rules
        if self._tokenizer is None:
            engine = self._engine()
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_GuidanceTokenizer(engine.tokenizer, engine.config)),
                n_vocab=engine.config.vocab_size,
                eos_token=list(engine.config.eos_token_ids),
            )
        ends = tuple(self._engine().config.eos_token_ids)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            if len(grammar) > MAX_GRAMMAR_CHARS:
                raise bad_request(
                    f"{param}: the schemas have {len(grammar)} characters together, expected at most "
                    f"{MAX_GRAMMAR_CHARS}. Send fewer or smaller ones.",
                    param,
                    "schema-too-large",
                )
            self._checker.check(_MARKER.sub('"\\\\u0001"', grammar), param)
            limits = llguidance.LLParserLimits(initial_lexer_fuel=400_000, max_grammar_size=100_000)
            matcher = llguidance.LLMatcher(
                self._tokenizer,
                llguidance.LLMatcher.grammar_from_lark(_MARKER.sub(r"<[\1]>", grammar)),
                log_level=0,
                limits=limits,
            )
            if matcher.is_error():
                reason = matcher.get_error().split("\n")[0]
                raise bad_request(
                    f"{param}: no grammar can be made of this: {quoted(reason, 200)}. Simplify it.",
                    param,
                    "schema-invalid",
                )
            if _allowed_tokens(matcher.deep_copy()) <= set(ends):  # neither JSON nor a call is ever empty
                raise bad_request(
                    f"{param}: the schema matches no output; check it for recursion.", param, "schema-empty"
                )
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return lambda: GrammarMask(matcher.deep_copy(), ends)

    def tag(self, name: str) -> str:
        """A chat marker, or the text that spells it if it is no special token."""
        return self.marker(name) if name in self._engine().tokenizer.markers else _literal(name)

    def marker(self, name: str) -> str:
        """A chat marker in a grammar: its token id between NUL characters, which no text of a caller contains once it
        is written as a JSON string."""
        token = self._engine().tokenizer.markers.get(name)
        if token is None:
            raise bad_request(
                f"this model's tokenizer has no {name} marker, so the form of its answers cannot be forced."
            )
        return f"\0{token}\0"


class GrammarMask:
    """Token mask of one request. Follows the accepted output tokens, and rolls back when some are withdrawn."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self._matcher = matcher
        self._ends = list(ends)
        self._consumed = 0

    @property
    def problem(self) -> str:
        """Why the grammar could not be followed to its end, or an empty string."""
        if not self._matcher.is_error():
            return ""
        return "the form grew too complex to be followed, so the answer ends early and may not fit it."

    def allowed(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """Boolean mask over the vocabulary after `output_ids`; only end tokens once the grammar is complete."""
        if len(output_ids) < self._consumed:
            self._matcher.rollback(self._consumed - len(output_ids))
        else:
            self._matcher.consume_tokens(list(output_ids[self._consumed :]))
        self._consumed = len(output_ids)
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        if not self._matcher.is_stopped():
            allowed = torch.from_numpy(_unpack_mask(self._matcher)[:vocab_size].astype(bool))
        if not allowed.any():
            allowed[self._ends] = True
        return allowed


def _unpack_mask(matcher: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


def _allowed_tokens(matcher: Any) -> set[int]:
    return set(np.flatnonzero(_unpack_mask(matcher)).tolist())


class _GuidanceTokenizer:
    """The tokenizer interface llguidance expects."""

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


def tool_call_grammar(
    grammars: GrammarCompiler, tools: Sequence[dict[str, Any]], single_call: bool, syntax: CallSyntax | None
) -> str:
    """Lark grammar of an output that consists of calls of `tools` only, in the model's own format."""
    if syntax is not None:
        return _json_call_grammar(grammars, tools, single_call, syntax)
    dsml = grammars.marker(DSML)
    rules = [f'start: "\\n\\n<" {dsml} "tool_calls>\\n" calls "\\n</" {dsml} "tool_calls>"']
    rules.append("calls: call" if single_call else 'calls: call ("\\n" call)*')
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        rules.append(
            f'call_{index}: "<" {dsml} {_literal("invoke name=" + json.dumps(function["name"]) + ">")} '
            f'arguments_{index} "\\n</" {dsml} "invoke>"'
        )
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        shared = {name: schema[name] for name in ("$defs", "definitions") if schema.get(name)}
        parts = []
        for i, (key, parameter) in enumerate(properties.items()):
            rules.append(_parameter_rule(f"p_{index}_{i}", key, parameter, shared, dsml, f"tools[{index}]"))
            parts.append(f'("\\n" p_{index}_{i})' + ("" if key in required else "?"))
        rules.append(f"arguments_{index}: " + (" ".join(parts) if parts else '"\\n"'))
    return "\n".join(rules) + "\n"


def _json_call_grammar(
    grammars: GrammarCompiler, tools: Sequence[dict[str, Any]], single_call: bool, syntax: CallSyntax
) -> str:
    """Calls as JSON objects with the name and the arguments, between the tags of `syntax`."""
    opening = "" if syntax.bare else grammars.tag(syntax.opening)
    closing = grammars.tag(syntax.closing) if syntax.closing else ""
    if syntax.array:
        one, several = f'{opening} "[" call "]" {closing}', f'{opening} "[" call (", " call)* "]" {closing}'
    else:
        each = f'{opening} "\\n" call "\\n" {closing}' if closing else f"{opening} call"
        separator = '"; "' if syntax.bare else '"\\n"' if closing else ""
        one, several = each, f"{each} ({separator} {each})*"
    rules = [f"start: {one if single_call else several}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {})}
        if syntax.named:
            arguments = _json_rule(schema, f"tools[{index}]")
            rules.append(f"call_{index}: {_literal(function['name'])} {grammars.tag(ARGS)} arguments_{index}")
            rules.append(f"arguments_{index}: %json {arguments}")
            continue
        shared = {name: schema.pop(name) for name in ("$defs", "definitions") if schema.get(name)}
        call = {
            **shared,
            "type": "object",
            "properties": {"name": {"const": function["name"]}, syntax.arguments: schema},
            "required": ["name", syntax.arguments],
            "additionalProperties": False,
        }
        rules.append(f"call_{index}: %json {_json_rule(call, f'tools[{index}]')}")
    return "\n".join(rules) + "\n"


def _parameter_rule(
    rule: str, key: str, schema: dict[str, Any] | bool, shared: dict[str, Any], dsml: str, where: str
) -> str:
    """Rules of one parameter. `shared` are the definitions of the tool's schema that `$ref`s may name."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    values = schema.get("enum") or []
    texts = [value for value in values if isinstance(value, str)]
    is_text = schema.get("type") == "string" or (texts and len(texts) == len(values))
    if is_text:
        value = " | ".join(map(_literal, texts)) if texts else _string_rule(schema)
    else:
        value = f"%json {_json_rule({**shared, **schema}, where)}"
    head = _literal(
        f'parameter name={json.dumps(key, ensure_ascii=False)} string="{"true" if is_text else "false"}">'
    )
    return f'{rule}: "<" {dsml} {head} {rule}_v "</" {dsml} "parameter>"\n{rule}_v: {value}'


def _string_rule(schema: dict[str, Any]) -> str:
    """Rule of a string parameter. Excludes `<`, which could start a tag."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    if least > 4096 or (most is not None and not least <= most <= 4096):
        return "/[^<]*/"
    return f"/[^<]{{{least},{'' if most is None else most}}}/"


def _literal(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_rule(schema: dict[str, Any], param: str) -> str:
    text = json.dumps({**schema, "x-guidance": JSON_STYLE})
    if len(text) > MAX_SCHEMA_BYTES:
        raise bad_request(
            f"{param}: the schema has {len(text)} bytes, expected at most {MAX_SCHEMA_BYTES}.",
            param,
            "schema-too-large",
        )
    return text


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ApiError(
            501,
            "answers of a given form need the package llguidance, which is not installed here: birkhoff-v4[grammar].",
            code="grammar-missing",
        ) from None
    return llguidance
