"""V4's chat encoding as a Jinja template, for GGUF readers that support no other form.

It renders the same prompt as `text.chat.render` for every conversation that the encoder accepts. Variables: `messages`,
`tools`, `thinking` or `enable_thinking`, `reasoning_effort`, `response_format`, `add_generation_prompt`. Arguments of a
call may be an object or JSON text. The template uses what Jinja has by itself and the `tojson` of Transformers, which
keeps non-ASCII characters; it checks nothing, and a conversation that the encoder refuses renders somehow.
"""

from __future__ import annotations

import json

from birkhoff.text.markers import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, TASKS, THINK, USER
from birkhoff.text.prompt_texts import PromptTexts

_TEMPLATE = """\
{%- set think = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else false) -%}
{%- set answer = add_generation_prompt if add_generation_prompt is defined else true -%}
{%- set listed = tools if tools is defined and tools else [] -%}
{%- set wanted = response_format if response_format is defined and response_format else none -%}
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{{- ('\\n\\n' if not loop.first else '') + (part.text if part.type == 'text' else '[Unsupported ' + part.type + ']') -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro call_id(call) -%}
{{- call.id if call.id is defined and call.id else (call.function.id if call.function.id is defined else '') -}}
{%- endmacro -%}
@json_parser@
{#- One turn for each message; tool results and adjacent user messages are parts of one user turn. -#}
{%- set ns = namespace(turns=[], keep=false, calls=[], has_id=false, rank=0, results=[], parts=[], last=-1) -%}
{%- if (listed or wanted) and messages[0].role not in ('system', 'developer') -%}
{%- set ns.turns = [{'role': 'system', 'content': '', 'tools': listed, 'format': wanted, 'task': none}] -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message.role -%}
{%- set task = message.task if message.task is defined and message.task else none -%}
{%- set before = ns.turns[-1] if ns.turns else none -%}
{%- if role in ('user', 'tool') -%}
{%- set part = {'result': role == 'tool', 'text': text_of(message.content),
'id': message.tool_call_id if message.tool_call_id is defined else none} -%}
{%- if before is not none and before.role == 'user' and (role == 'tool' or before.task is none) -%}
{%- set ns.turns = ns.turns[:-1] + [{'role': 'user', 'parts': before.parts + [part], 'task': before.task}] -%}
{%- else -%}
{%- set ns.turns = ns.turns + [{'role': 'user', 'parts': [part], 'task': task}] -%}
{%- endif -%}
{%- elif role in ('system', 'developer') -%}
{%- set own = message.tools if message.tools is defined and message.tools else (listed if loop.first else []) -%}
{%- set form = message.response_format if message.response_format is defined and message.response_format
else (wanted if loop.first else none) -%}
{%- set ns.turns = ns.turns + [{'role': role, 'content': text_of(message.content), 'tools': own, 'format': form,
'task': task}] -%}
{%- elif role == 'assistant' -%}
{%- set thought = message.reasoning_content if message.reasoning_content is defined and message.reasoning_content
else (message.reasoning if message.reasoning is defined and message.reasoning else '') -%}
{%- set ns.turns = ns.turns + [{'role': role, 'content': text_of(message.content) if message.content else '',
'reasoning': thought, 'calls': message.tool_calls if message.tool_calls is defined and message.tool_calls else [],
'open': message.wo_eos is defined and message.wo_eos, 'task': task}] -%}
{%- else -%}
{%- set ns.turns = ns.turns + [{'role': role, 'content': text_of(message.content), 'task': task}] -%}
{%- endif -%}
{%- endfor -%}
{#- Results in the order of the most recent calls. -#}
{%- set sorted = namespace(turns=[]) -%}
{%- for turn in ns.turns -%}
{%- if turn.role in ('system', 'developer') and turn.tools -%}{%- set ns.keep = true -%}{%- endif -%}
{%- if turn.role == 'assistant' and turn.calls -%}
{%- set ns.calls = turn.calls -%}
{%- set ns.has_id = false -%}
{%- for call in turn.calls -%}
{%- if call_id(call) -%}{%- set ns.has_id = true -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if turn.role == 'user' and ns.has_id -%}
{%- set ns.results = [] -%}
{%- for index in range(ns.calls | length) -%}
{%- for part in turn.parts -%}
{%- set ns.rank = 0 -%}
{%- for call in ns.calls -%}
{%- if part.id and call_id(call) == part.id -%}{%- set ns.rank = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if part.result and ns.rank == index -%}{%- set ns.results = ns.results + [part] -%}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- set ns.parts = [] -%}
{%- set ns.rank = 0 -%}
{%- for part in turn.parts -%}
{%- set ns.parts = ns.parts + [ns.results[ns.rank] if part.result else part] -%}
{%- if part.result -%}{%- set ns.rank = ns.rank + 1 -%}{%- endif -%}
{%- endfor -%}
{%- set sorted.turns = sorted.turns + [{'role': 'user', 'parts': ns.parts, 'task': turn.task}] -%}
{%- else -%}
{%- set sorted.turns = sorted.turns + [turn] -%}
{%- endif -%}
{%- endfor -%}
{#- Before the last question earlier reasoning and developer turns are dropped, unless there are tools. -#}
{%- for turn in sorted.turns -%}
{%- if turn.role in ('user', 'developer') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set kept = namespace(turns=[]) -%}
{%- for turn in sorted.turns -%}
{%- if not (think and not ns.keep and loop.index0 < ns.last and turn.role == 'developer') -%}
{%- set kept.turns = kept.turns + [turn] -%}
{%- endif -%}
{%- endfor -%}
{%- set turns = kept.turns -%}
{%- set ns.last = -1 -%}
{%- for turn in turns -%}
{%- if turn.role in ('user', 'developer') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- @bos@ -}}
{%- if think and reasoning_effort is defined -%}
{%- for level, words in @efforts@ -%}
{%- if level == reasoning_effort -%}{{- words -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for turn in turns -%}
{%- set i = loop.index0 -%}
{%- if turn.role == 'user' -%}
{{- @user@ -}}
{%- for part in turn.parts -%}
{{- ('\\n\\n' if not loop.first else '') -}}
{{- ('<tool_result>' + part.text + '</tool_result>') if part.result else part.text -}}
{%- endfor -%}
{%- elif turn.role in ('system', 'developer') -%}
{{- (@user@ if turn.role == 'developer' else '') + turn.content -}}
{%- if turn.tools -%}
{{- '\\n\\n' + @tools_head@ -}}
{%- for tool in turn.tools -%}
{{- ('\\n' if not loop.first else '') + ((tool.function if tool.function is defined else tool) | tojson) -}}
{%- endfor -%}
{{- @tools_tail@ -}}
{%- endif -%}
{%- if turn.format -%}{{- '\\n\\n' + @response_format_head@ + (turn.format | tojson) -}}{%- endif -%}
{%- elif turn.role == 'latest_reminder' -%}
{{- @reminder@ + turn.content -}}
{%- else -%}
{%- if think and not (i and turns[i - 1].task is not none) and (ns.keep or i > ns.last) -%}
{{- turn.reasoning + @end_think@ -}}
{%- endif -%}
{{- turn.content -}}
{%- if turn.calls -%}
{{- '\\n\\n<' + @dsml@ + 'tool_calls>' -}}
{%- for call in turn.calls -%}
{{- '\\n<' + @dsml@ + 'invoke name="' + call.function.name + '">\\n' -}}
{%- set given = call.function.arguments -%}
{%- if given is string -%}
{{- parse_json(given) -}}
{%- set given = js.value if js.mode == 'end' else {'arguments': given} -%}
{%- endif -%}
{%- for name, value in given | items -%}
{{- ('\\n' if not loop.first else '') + '<' + @dsml@ + 'parameter name="' + name + '" string="' -}}
{%- if value is string -%}{{- 'true">' + value -}}{%- else -%}{{- 'false">' + (value | tojson) -}}{%- endif -%}
{{- '</' + @dsml@ + 'parameter>' -}}
{%- endfor -%}
{{- '\\n</' + @dsml@ + 'invoke>' -}}
{%- endfor -%}
{{- '\\n</' + @dsml@ + 'tool_calls>' -}}
{%- endif -%}
{{- '' if turn.open else @eos@ -}}
{%- endif -%}
{%- set after = turns[i + 1].role if i + 1 < turns | length else '' -%}
{%- if after in ('assistant', 'latest_reminder') or (after == '' and answer) -%}
{%- if turn.task is not none -%}
{{- (@assistant@ + (@think@ if think else @end_think@)) if turn.task == 'action' else '' -}}
{%- for name, marker in @tasks@ -%}{{- marker if name == turn.task else '' -}}{%- endfor -%}
{%- elif turn.role in ('user', 'developer') -%}
{{- @assistant@ + (@think@ if think and (ns.keep or i >= ns.last) else @end_think@) -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""

# Arguments of a call may be JSON text, as OpenAI's clients send them, and Jinja has no filter that parses it. This
# macro reads the text character by character into `js.value`; `js.mode` is 'end' if it was a JSON object. `js.stack`
# holds the open objects and arrays as [is object, members, key]; a member is added by building a new list.
_JSON_PARSER = """\
{%- set js = namespace(mode='bad', stack=[], value=none, text='', word='', hex='', high=0, is_key=false, number='') -%}
{%- macro check_number(word) -%}
{%- set js.number = 'start' -%}
{%- for c in word -%}
{%- set digit = c in '0123456789' -%}
{%- if js.number == 'start' and c == '-' -%}{%- set js.number = 'sign' -%}
{%- elif js.number in ('start', 'sign') and c == '0' -%}{%- set js.number = 'zero' -%}
{%- elif js.number in ('start', 'sign', 'int') and digit -%}{%- set js.number = 'int' -%}
{%- elif js.number in ('zero', 'int') and c == '.' -%}{%- set js.number = 'point' -%}
{%- elif js.number in ('point', 'fraction') and digit -%}{%- set js.number = 'fraction' -%}
{%- elif js.number in ('zero', 'int', 'fraction') and c in 'eE' -%}{%- set js.number = 'e' -%}
{%- elif js.number == 'e' and c in '+-' -%}{%- set js.number = 'e sign' -%}
{%- elif js.number in ('e', 'e sign', 'exponent') and digit -%}{%- set js.number = 'exponent' -%}
{%- else -%}{%- set js.number = 'bad' -%}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- macro add_value(value) -%}
{%- if js.stack -%}
{%- set top = js.stack[-1] -%}
{%- set member = [[top[2], value]] if top[0] else [value] -%}
{%- set js.stack = js.stack[:-1] + [[top[0], top[1] + member, none]] -%}
{%- set js.mode = 'next' -%}
{%- else -%}
{%- set js.value = value -%}
{%- set js.mode = 'end' -%}
{%- endif -%}
{%- endmacro -%}
{%- macro end_word() -%}
{%- set word = js.word -%}
{%- set js.word = '' -%}
{%- if word == 'true' -%}{{- add_value(true) -}}
{%- elif word == 'false' -%}{{- add_value(false) -}}
{%- elif word == 'null' -%}{{- add_value(none) -}}
{%- elif word in ('NaN', 'Infinity', '-Infinity') -%}{{- add_value(word | float) -}}
{%- else -%}
{{- check_number(word) -}}
{%- if js.number in ('zero', 'int') -%}{{- add_value(word | int) -}}
{%- elif js.number in ('fraction', 'exponent') -%}{{- add_value(word | float) -}}
{%- else -%}{%- set js.mode = 'bad' -%}
{%- endif -%}
{%- endif -%}
{%- endmacro -%}
{%- macro close(is_object) -%}
{%- set top = js.stack[-1] if js.stack else [none] -%}
{%- if top[0] != is_object -%}{%- set js.mode = 'bad' -%}
{%- else -%}
{%- set js.stack = js.stack[:-1] -%}
{{- add_value(dict(top[1]) if is_object else top[1]) -}}
{%- endif -%}
{%- endmacro -%}
{%- macro parse_json(source) -%}
{%- set js.mode = 'start' -%}
{%- set js.stack = [] -%}
{%- set js.word = '' -%}
{%- set js.high = 0 -%}
{%- for c in source -%}
{%- set space = c in ' \\t\\n\\r' -%}
{%- if js.mode == 'word' and (space or c in ',]}') -%}{{- end_word() -}}{%- endif -%}
{%- if js.mode == 'string' -%}
{%- if js.high and c != '\\\\' -%}
{%- set js.text = js.text ~ ('%c' | format(js.high)) -%}{%- set js.high = 0 -%}
{%- endif -%}
{%- if c == '\\\\' -%}{%- set js.mode = 'escape' -%}
{%- elif c == '"' -%}
{%- if js.is_key -%}
{%- set js.stack = js.stack[:-1] + [[true, js.stack[-1][1], js.text]] -%}{%- set js.mode = 'colon' -%}
{%- else -%}{{- add_value(js.text) -}}
{%- endif -%}
{%- elif c < ' ' -%}{%- set js.mode = 'bad' -%}
{%- else -%}{%- set js.text = js.text ~ c -%}
{%- endif -%}
{%- elif js.mode == 'escape' -%}
{%- set js.mode = 'string' -%}
{%- if js.high and c != 'u' -%}
{%- set js.text = js.text ~ ('%c' | format(js.high)) -%}{%- set js.high = 0 -%}
{%- endif -%}
{%- if c == 'u' -%}{%- set js.mode = 'hex' -%}{%- set js.hex = '' -%}
{%- elif c == 'n' -%}{%- set js.text = js.text ~ '\\n' -%}
{%- elif c == 't' -%}{%- set js.text = js.text ~ '\\t' -%}
{%- elif c == 'r' -%}{%- set js.text = js.text ~ '\\r' -%}
{%- elif c == 'b' -%}{%- set js.text = js.text ~ '\\x08' -%}
{%- elif c == 'f' -%}{%- set js.text = js.text ~ '\\x0c' -%}
{%- elif c in '"/\\\\' -%}{%- set js.text = js.text ~ c -%}
{%- else -%}{%- set js.mode = 'bad' -%}
{%- endif -%}
{%- elif js.mode == 'hex' -%}
{%- if c not in '0123456789abcdefABCDEF' -%}{%- set js.mode = 'bad' -%}{%- endif -%}
{%- set js.hex = js.hex ~ c -%}
{%- if js.mode == 'hex' and js.hex | length == 4 -%}
{%- set js.mode = 'string' -%}
{%- set code = js.hex | int(0, 16) -%}
{%- if js.high and code >= 56320 and code < 57344 -%}
{%- set js.text = js.text ~ ('%c' | format((js.high - 55296) * 1024 + code - 56320 + 65536)) -%}
{%- set js.high = 0 -%}
{%- else -%}
{%- if js.high -%}{%- set js.text = js.text ~ ('%c' | format(js.high)) -%}{%- endif -%}
{%- set js.high = code if code >= 55296 and code < 56320 else 0 -%}
{%- if not js.high -%}{%- set js.text = js.text ~ ('%c' | format(code)) -%}{%- endif -%}
{%- endif -%}
{%- endif -%}
{%- elif js.mode == 'word' -%}{%- set js.word = js.word ~ c -%}
{%- elif space or js.mode == 'bad' -%}
{%- elif js.mode == 'start' -%}
{%- if c == '{' -%}{%- set js.stack = [[true, [], none]] -%}{%- set js.mode = 'first key' -%}
{%- else -%}{%- set js.mode = 'bad' -%}
{%- endif -%}
{%- elif js.mode in ('key', 'first key') and c == '"' -%}
{%- set js.mode = 'string' -%}{%- set js.is_key = true -%}{%- set js.text = '' -%}
{%- elif js.mode == 'first key' and c == '}' -%}{{- close(true) -}}
{%- elif js.mode == 'colon' and c == ':' -%}{%- set js.mode = 'value' -%}
{%- elif js.mode == 'first' and c == ']' -%}{{- close(false) -}}
{%- elif js.mode in ('value', 'first') -%}
{%- if c == '"' -%}{%- set js.mode = 'string' -%}{%- set js.is_key = false -%}{%- set js.text = '' -%}
{%- elif c == '{' -%}{%- set js.stack = js.stack + [[true, [], none]] -%}{%- set js.mode = 'first key' -%}
{%- elif c == '[' -%}{%- set js.stack = js.stack + [[false, [], none]] -%}{%- set js.mode = 'first' -%}
{%- elif c in ',:]}' -%}{%- set js.mode = 'bad' -%}
{%- else -%}{%- set js.mode = 'word' -%}{%- set js.word = c -%}
{%- endif -%}
{%- elif js.mode == 'next' and c == ',' -%}{%- set js.mode = 'key' if js.stack[-1][0] else 'value' -%}
{%- elif js.mode == 'next' and c == '}' -%}{{- close(true) -}}
{%- elif js.mode == 'next' and c == ']' -%}{{- close(false) -}}
{%- else -%}{%- set js.mode = 'bad' -%}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
"""


def chat_template(texts: PromptTexts) -> str:
    """Return the template with a checkpoint's texts inserted; a text it does not have is empty."""
    values = {
        "bos": BOS,
        "eos": EOS,
        "user": USER,
        "assistant": ASSISTANT,
        "think": THINK,
        "end_think": END_THINK,
        "dsml": DSML,
        "reminder": LATEST_REMINDER,
        "tools_head": texts.tools_head or "",
        "tools_tail": texts.tools_tail or "",
        "response_format_head": texts.response_format_head or "",
    }
    text = _TEMPLATE.replace("@json_parser@\n", _JSON_PARSER)
    for name, value in values.items():
        text = text.replace(f"@{name}@", _quoted(value))
    efforts = ", ".join(f"[{_quoted(level)}, {_quoted(words)}]" for level, words in texts.effort.items())
    tasks = ", ".join(f"[{_quoted(name)}, {_quoted(marker)}]" for name, marker in TASKS.items())
    return text.replace("@efforts@", f"[{efforts}]").replace("@tasks@", f"[{tasks}]")


def _quoted(text: str) -> str:
    """Format a Jinja string constant. JSON string escapes are a subset of Jinja's."""
    return json.dumps(text, ensure_ascii=False)
