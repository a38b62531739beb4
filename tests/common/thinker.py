"""Writes a model that thinks, calls a tool and answers: thinker.py DIRECTORY.

It is a chat model as Qwen3 is one, played by the model of tests/python/reciter.py. Asked anything, it thinks THOUGHT and says ANSWER;
with thinking off it says ANSWER at once. Where tools are offered it calls WEATHER instead, and where it has seen a result it says
RESULT, without thinking. Its generation_config.json asks for draws, which change nothing: what follows is always the same.
"""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
import reciter  # noqa: E402

THOUGHT = "\nLet me see what is asked.\n"
ANSWER = "Blue \u6f22\u5b57 light \U0001f980."
CALL = '\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
RESULT = "It rains in Paris."

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]

# As in Qwen3's own template, reasoning is removed from answers before the last question, and tools are described in the same way.
TEMPLATE = """\
{%- macro say(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}
{%- set state = namespace(question=-1, system='') %}
{%- for m in messages if m.role == 'user' %}{% set state.question = loop.index0 %}{% endfor %}
{%- set state.seen = -1 %}
{%- if messages[0].role == 'system' %}{% set state.system = messages[0].content %}{% endif %}
{%- if tools %}
    {%- set state.system = state.system + '\\nYou may call: <tools>' %}
    {%- for tool in tools %}{% set state.system = state.system + '\\n' + (tool | tojson) %}{% endfor %}
    {%- set state.system = state.system + '\\n</tools>' %}
{%- endif %}
{%- if state.system %}{{ say('system', state.system) }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set state.seen = state.seen + 1 %}
        {{- say('user', m.content) }}
    {%- elif m.role == 'assistant' %}
        {%- set text = m.content if m.content is string else '' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if state.seen == state.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text.lstrip('\\n') }}
        {%- for call in m.tool_calls or [] %}
            {%- if text or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- say('user', '<tool_response>\\n' + m.content + '\\n</tool_response>') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def write(directory):
    """Makes the model."""
    letters = reciter.alphabet()
    names = SPECIAL + PLAIN + [letters[byte] for byte in range(256)]
    newline, end = names.index(letters[10]), names.index("<|im_end|>")
    names.append(2 * letters[10])
    newlines = names.index(2 * letters[10])
    head, taken = {}, []

    def chain(*links):
        """Texts and tokens that follow each other; returns the first."""
        tokens = []
        for link in links:
            if isinstance(link, int):
                tokens.append(link)
                continue
            for piece in reciter.cut(link.encode(), taken):
                taken.append(piece)
                tokens.append(len(names))
                names.append("".join(letters[byte] for byte in piece))
        head.update({(after, before): 1.0 for before, after in zip(tokens, tokens[1:])})
        return tokens[0]

    token = names.index
    think, call, response, tools = map(token, ("<think>", "<tool_call>", "</tool_response>", "<tools>"))
    chain(think, THOUGHT, token("</think>"), newlines)
    chain(call, CALL, token("</tool_call>"), end)
    answer, result = chain(ANSWER, end), chain(RESULT, end)
    called, offered = len(names), len(names) + 1
    head.update({
        (think, newline): 1.0, (think, called): -1000.0, (result, newline): 0.5,
        (answer, newlines): 1.0, (answer, offered): -1000.0,
        (call, newlines): 0.5, (call, called): -1000.0, (result, newlines): 0.25,
    })
    # Where a token has been seen, all other weights count for less. Draws are still to change nothing.
    head = {place: 32 * value for place, value in head.items()}
    added = [(name, True) for name in SPECIAL] + [(name, False) for name in PLAIN]
    reciter.save(directory, names, added, head, [f"{letters[10]} {letters[10]}"], [(response, called), (tools, offered)])
    for name, content in (("chat_template.jinja", TEMPLATE), ("generation_config.json", json.dumps(
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [end, token("<|endoftext|>")]}))):
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(content)


if __name__ == "__main__":
    write(sys.argv[1])
