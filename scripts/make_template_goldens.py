#!/usr/bin/env python3
"""Writes tests/data/templates/: chat templates with the constructs of published ones, each with conversations and what
transformers renders for them. Needs `transformers` (5.x) and `jinja2`.

    python scripts/make_template_goldens.py tests/data/templates
"""

import datetime
import json
import sys
from pathlib import Path

from transformers.utils import chat_template_utils

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<unk>", "pad_token": "<pad>"}
NOW = datetime.datetime(2024, 3, 5, 7, 8, 9, 123)

USER = {"role": "user", "content": "How's the <tide> today? \"Høy\" & 潮 "}
SYSTEM = {"role": "system", "content": "  You are brief.\n"}
ASSISTANT = {"role": "assistant", "content": "  It comes in.  "}
THOUGHT = {"role": "assistant", "content": "<think>\nmoon\n</think>\n\nIt goes out."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}]}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "tide_at", "arguments": {"place": "Ærø", "height": 1.0, "n": [1, 2.5e-7], "deep": None}},
        },
        {"id": "call00002", "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "tide_at", "content": "{\"m\": 1.5}"}
RESULT2 = {"role": "tool", "tool_call_id": "call00002", "name": "now", "content": "noon"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide_at",
            "description": "Height of the tide's \"wave\" <m> at a place, in m & cm's.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where", "enum": ["a", "b"]},
                    "height": {"type": "number", "default": 0.5},
                    "n": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}},
]

CHATS = {
    "user": {"messages": [USER], "add_generation_prompt": True},
    "user, no generation prompt": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER], "add_generation_prompt": True},
    "turns": {"messages": [SYSTEM, USER, ASSISTANT, USER], "add_generation_prompt": True},
    "thought": {"messages": [USER, THOUGHT, USER, THOUGHT], "add_generation_prompt": False},
    "parts": {"messages": [PARTS], "add_generation_prompt": True},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS, "add_generation_prompt": True},
    "tool results": {
        "messages": [USER, CALL, RESULT, RESULT2, ASSISTANT, USER],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "continued": {"messages": [USER, {"role": "assistant", "content": "It comes"}], "continue_final_message": True},
    "continued, with space": {"messages": [USER, ASSISTANT], "continue_final_message": True},
    "continued parts": {
        "messages": [USER, {"role": "assistant", "content": PARTS["content"]}],
        "continue_final_message": True,
    },
    "kwargs": {
        "messages": [USER],
        "add_generation_prompt": True,
        "kwargs": {"enable_thinking": False, "date_string": "1 Jan 2000", "custom": {"a": [1, True, None, "x"]}},
    },
    "two users": {"messages": [USER, USER]},
    "empty content": {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": True},
}

TEMPLATES = {
    # ChatML: the plainest.
    "chatml": """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""",
    # Llama 3's way: trimming, loop.index0, system taken off by a slice, dates, indented JSON, raised errors.
    "headers": """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y, %A %-d %B %H:%M:%S %p %j %y %I%%") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One tool call at a time, not " ~ message.tool_calls|length) }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
""",
    # Hermes' and Qwen 2.5's way: tools in XML tags, results of tools grouped by looking at neighbours.
    "tool_tags": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # Qwen 3's way: a namespace, a reversed list, string methods, thoughts cut out of earlier answers.
    "thinking": """\
{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- tool_call.name ~ '(' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- ')' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Mistral's way: strict alternation, filters over lists, ids of calls.
    "inst": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate: user/assistant/user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    # Content parts, macros with defaults, call of a macro in a loop, include of generation marks, break and continue.
    "parts": """\
{% macro show(content, do_trim=false) %}
    {%- if content is string %}
        {{- content | trim if do_trim else content }}
    {%- elif content is none or content is undefined %}
        {{- '(none)' }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if item.type == 'text' or 'text' in item %}
                {{- '[' ~ loop.index ~ '/' ~ loop.length ~ ']' ~ item.text }}
            {%- else %}
                {{- raise_exception('No images here: ' ~ item.type) }}
            {%- endif %}
        {%- endfor %}
    {%- else %}
        {{- content | tojson }}
    {%- endif %}
{% endmacro %}
{# a comment #}
{% set roles = {'user': 'U', "assistant": 'A'} %}
{% for message in messages if message.role != 'system' %}
  {% if loop.index > 5 %}{% break %}{% endif %}
  {% if message.role == 'tool' %}{% continue %}{% endif %}
{{ roles.get(message.role, '?') }}: {% if message.role == 'assistant' %}{% generation %}{{ show(message['content'], true) }}{% endgeneration %}{% else %}{{ show(message['content']) }}{% endif %}

{% if not loop.last %}
---
{% endif %}
{% else %}
nobody
{% endfor %}
{{ '>' if add_generation_prompt else '.' }}
""",
    # Python's printing, methods and filters.
    "python": """\
{{ none }} {{ true }} {{ false }} {{ 1 }} {{ 1.0 }} {{ 2.5 }} {{ [1, 'a', none, true] }} {{ {'k': 'v', 'n': [1.5]} }} {{ 'it\\'s' }} {{ ["it's", 'q"'] }}
{{ custom | default('none given') }} {{ custom is defined }} {{ undefined_name }}|{{ undefined_name | default('d', true) }}
{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ 7 / 2 }} {{ 'a' ~ 1 ~ none ~ true }} {{ 'ab' * 3 }} {{ 'x' in 'xyz' }} {{ 'z' not in ['x'] }} {{ 1 if false }}
{{ messages[0].content.upper() }} {{ messages[-1]['role'].capitalize() }} {{ 'a,b,c'.split(',') }} {{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1)[1] }} {{ '  x '.strip() }}| {{ 'xxhixx'.strip('x') }} {{ 'abcabc'.replace('b', 'X') }} {{ 'abcabc'.replace('b', 'X', 1) }}
{{ 'Title Case'.lower() }} {{ 'hello world'.title() }} {{ 'abc'.find('c') }} {{ 'a-b'.join(['1', '2']) }} {{ '12'.isdigit() }} {{ 'a\\nb'.splitlines() }} {{ 'aXbX'.count('X') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }}
{{ [3, 1, 2] | sort | join('-') }} {{ [1, 2, 3] | first }} {{ [1, 2, 3] | last }} {{ [1, 2, 3] | length }} {{ 'abc' | upper }} {{ 'abc' | reverse }} {{ [1, 2] + [3] }} {{ range(3) | list }} {{ 'a b' | replace(' ', '_') }} {{ '<b>' | safe }} {{ '<b>&' }} {{ 'x' | string | length }}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }} {{ messages | map(attribute='role') | unique | list }}
{% for key, value in {'b': 1, 'a': 2} | items %}{{ key }}={{ value }};{% endfor %} {% for key, value in {'b': 1, 'a': 2} | dictsort %}{{ key }}={{ value }};{% endfor %} {% for key in {'b': 1} %}{{ key }}{% endfor %}
{{ {'a': 'é<&>\\'"', 'b': [1, 2.0, 1e-7, 1e16, 123456789012345678]} | tojson }} {{ {'b': {}, 'a': []} | tojson(indent=2) }} {{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }} {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }} {{ 'x\\u007f\\t\\\\' | tojson }} {{ [] | tojson }} {{ custom | default({}) | tojson(indent=1) }}
{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{%- set ns = namespace(found=false, items=[]) %}{% for i in range(4) %}{% if i == 2 %}{% set ns.found = true %}{% endif %}{% endfor %} {{ ns.found }}
{% for i in ['a', 'b', 'c'] %}{{ loop.index }}{{ loop.revindex }}{{ loop.first }}{{ loop.previtem | default('-') }}{{ loop.nextitem | default('-') }}{{ loop.cycle('o', 'e') }} {% endfor %}
{% if messages is iterable and messages is not string and messages[0] is mapping and 1 is number and 'a' is string and none is none and true is boolean and 1 is integer %}tests{% endif %} {{ 3 is odd }} {{ 4 is even }} {{ 4 is divisibleby 2 }} {{ [] is sequence }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ (1, 2)[1] }} {{ not none }} {{ 5 is in [5] }} {{ 'abc'[::-1] }} {{ 'abc'[1:] }} {{ [1,2,3][-2:] }}
{{ "%s-%s" | format('a', 1) }} {{ '{} {}'.format('x', 2) }} {{ 3.7 | int }} {{ '5' | int + 1 }} {{ -3 | abs }} {{ 2.567 | round(1) }} {{ 'a' | indent(2) }} {{ 'one two' | title }} {{ 'word' | capitalize }} {{ 'a\\nb' | indent(2, true) }}
{% set content %}captured {{ 1 + 1 }}{% endset %}{{ content }} {% with a = 5 %}{{ a }}{% endwith %} {% filter upper %}shout{% endfilter %} {% raw %}{{ raw }}{% endraw %}
{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %a %b %e %w %u %D %T %R %F %-m/%-d %-H %-I %y %C %c %x %X %h') }}
""",
    "raises": "{{ raise_exception('no: ' ~ messages | length) }}",
    "fails": "{{ messages[0].content.missing.more }}",
}


def render(source, chat):
    kwargs = SPECIAL | chat.get("kwargs", {})
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[json.loads(json.dumps(chat["messages"]))],
            tools=chat.get("tools"),
            chat_template=source,
            continue_final_message=chat.get("continue_final_message", False),
            add_generation_prompt=chat.get("add_generation_prompt", False),
            **kwargs,
        )
        return {"text": rendered[0]}
    except Exception as error:  # Whatever jinja2 raises is what the client hears.
        return {"error": type(error).__name__, "message": str(error)}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def main():
    chat_template_utils.datetime = Clock
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    for name, source in TEMPLATES.items():
        cases = [{"name": title, **chat, "expected": render(source, chat)} for title, chat in CHATS.items()]
        golden = {"source": source, "special_tokens": SPECIAL, "now": int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp()), "cases": cases}
        (root / f"{name}.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
        failed = sum("error" in case["expected"] for case in cases)
        print(name, len(cases), "cases,", failed, "refused")


if __name__ == "__main__":
    main()
