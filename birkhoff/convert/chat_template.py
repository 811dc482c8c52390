"""V4's chat encoding as a Jinja template, for GGUF readers that support no other form.

It renders the same prompt as `text.chat.render` for system, user, assistant, tool, developer and reminder messages,
tools and tool calls, in chat and thinking mode. Not supported: tasks, response formats, tool results in another order
than their calls, and arguments given as JSON text (templates receive objects). Variables: `messages`, `tools`,
`thinking` or `enable_thinking`, `reasoning_effort`, `add_generation_prompt`.
"""

from __future__ import annotations

import json

from birkhoff.text.markers import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, THINK, USER
from birkhoff.text.prompt_texts import PromptTexts

_TEMPLATE = """\
{%- set think = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else false) -%}
{%- set answer = add_generation_prompt if add_generation_prompt is defined else true -%}
{%- set ns = namespace(last=-1, keep=false) -%}
{%- if tools is defined and tools -%}{%- set ns.keep = true -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('user', 'tool', 'developer') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if message.tools is defined and message.tools -%}{%- set ns.keep = true -%}{%- endif -%}
{%- endfor -%}
{%- macro tool_text(listed) -%}
{{- '\\n\\n' + @tools_head@ -}}
{%- for tool in listed -%}
{{- ('\\n' if not loop.first else '') + ((tool.function if tool.function is defined else tool) | tojson) -}}
{%- endfor -%}
{{- @tools_tail@ -}}
{%- endmacro -%}
{%- macro turn_text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{{- ('\\n\\n' if not loop.first else '') + (part.text if part.type == 'text' else '[Unsupported ' + part.type + ']') -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- @bos@ -}}
{%- if think and reasoning_effort is defined -%}
{%- for level, words in @efforts@ -%}
{%- if level == reasoning_effort -%}{{- words -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if tools is defined and tools and messages[0].role not in ('system', 'developer') -%}
{{- tool_text(tools) -}}
{%- endif -%}
{%- for message in messages -%}
{%- set i = loop.index0 -%}
{%- set old = think and not ns.keep and i < ns.last -%}
{%- set before = messages[i - 1].role if i else '' -%}
{%- set after = messages[i + 1].role if i + 1 < messages | length else '' -%}
{%- if message.role in ('system', 'developer') and not (old and message.role == 'developer') -%}
{{- (@user@ if message.role == 'developer' else '') + turn_text(message.content) -}}
{%- if message.tools is defined and message.tools -%}{{- tool_text(message.tools) -}}
{%- elif i == 0 and tools is defined and tools -%}{{- tool_text(tools) -}}{%- endif -%}
{%- elif message.role == 'user' -%}
{{- ('\\n\\n' if before in ('user', 'tool') else @user@) + turn_text(message.content) -}}
{%- elif message.role == 'tool' -%}
{{- ('\\n\\n' if before in ('user', 'tool') else @user@) -}}
{{- '<tool_result>' + turn_text(message.content) + '</tool_result>' -}}
{%- elif message.role == 'latest_reminder' -%}
{{- @reminder@ + turn_text(message.content) -}}
{%- elif message.role == 'assistant' -%}
{%- if think and (ns.keep or i > ns.last) -%}
{{- (message.reasoning_content or '') if message.reasoning_content is defined else '' -}}
{{- @end_think@ -}}
{%- endif -%}
{{- turn_text(message.content) if message.content else '' -}}
{%- if message.tool_calls is defined and message.tool_calls -%}
{{- '\\n\\n<' + @dsml@ + 'tool_calls>' -}}
{%- for call in message.tool_calls -%}
{{- '\\n<' + @dsml@ + 'invoke name="' + call.function.name + '">\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- ('\\n' if not loop.first else '') + '<' + @dsml@ + 'parameter name="' + name + '" string="' -}}
{%- if value is string -%}{{- 'true">' + value -}}{%- else -%}{{- 'false">' + (value | tojson) -}}{%- endif -%}
{{- '</' + @dsml@ + 'parameter>' -}}
{%- endfor -%}
{{- '\\n</' + @dsml@ + 'invoke>' -}}
{%- endfor -%}
{{- '\\n</' + @dsml@ + 'tool_calls>' -}}
{%- endif -%}
{{- @eos@ -}}
{%- endif -%}
{%- if message.role in ('user', 'tool', 'developer') and not (old and message.role == 'developer') -%}
{%- if after in ('assistant', 'latest_reminder') or (after == '' and answer) -%}
{{- @assistant@ + (@think@ if think and (ns.keep or i >= ns.last) else @end_think@) -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
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
    }
    text = _TEMPLATE
    for name, value in values.items():
        text = text.replace(f"@{name}@", _quoted(value))
    efforts = ", ".join(f"[{_quoted(level)}, {_quoted(words)}]" for level, words in texts.effort.items())
    return text.replace("@efforts@", f"[{efforts}]")


def _quoted(text: str) -> str:
    """Format a Jinja string constant. JSON string escapes are a subset of Jinja's."""
    return json.dumps(text, ensure_ascii=False)
