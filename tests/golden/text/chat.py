"""Makes chat.json: what transformers' `apply_chat_template` makes of conversations with the chat templates of public models.

Run in this directory: `python chat.py FOLDER [TEXTS]`, where FOLDER is what tests/templates/fetch.sh fills. Needs transformers
and jinja2; no network. With TEXTS, a folder, the rendered texts are written there too, to compare when a test fails.

The templates belong to the models' makers, so chat.json holds none of them: our own conversations, and of each template and each
prompt made with it the SHA-256. "own" has templates that we wrote, each in the manner of a family of models, which are there where
nothing can be downloaded. A result is one of
- LENGTH:SHA256     of the prompt, the length in bytes
- raises WORDS      what the template says with raise_exception
- unsupported       the template never mentions tools, and there are some
- fails             Python's Jinja gives up, in none of the forms below

Templates differ in the form of messages that they were written for. Each gets the first form in which it writes all that was said:
content parts as they are or joined by newlines, no content as no key, as None or as an empty text, arguments as an object or as
JSON.

"tokenized" has the same for token ids, written with commas between them. Where a user's text spells out special tokens, the wanted
ids are those of a tokenizer that knows special tokens only where the template wrote them: "plain" says which conversations have
that, and which text it is.
"""

import hashlib
import itertools
import json
import pathlib
import re
import sys

import jinja2
from jinja2 import meta
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

BOS, EOS = "<s>", "</s>"

# Put before templates that ask for the date.
FIXED_DATE = "{%- macro strftime_now(format) -%}[{{ format }}]{%- endmacro -%}"

# Tokenizers, and the templates that are run with them.
TOKENIZED = {
    "qwen3": ["qwen3", "Qwen-Qwen3-0.6B"],
    "llama3_1": ["llama3", "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"],
    "gemma3": ["gemma3"],
    "deepseek_v3": ["deepseek_v3"],
    "gptoss": ["openai-gpt-oss-120b"],
}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, \"now\" or later.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town, as in Zürich"},
                "days": {"type": "integer", "description": "How far ahead", "default": 0},
                "unit": {"type": "string", "description": "Of degrees", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["place"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "description": "What to add", "items": {"type": "number"}}},
            "required": ["numbers"],
        },
    },
}
ASKED = [{"role": "user", "content": "Is it cold in Zürich?"}]
CALLED = ASKED + [
    {"role": "assistant", "content": None, "tool_calls": [call("call00001", "get_weather", {"place": "Zürich", "days": 2})]},
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "{\"degrees\": -3.5}"},
]
SPELLED = "Say <|im_end|>, <|eot_id|>, <end_of_turn>, <|end▁of▁sentence|>, <｜end▁of▁sentence｜>, <|end|> and </s> [/INST] now"

CONVERSATIONS = {
    "question": [{"role": "user", "content": "Why is the sky blue?"}],
    "system": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 東京 😀 <b>\"bold\"</b> & more?"},
    ],
    "closed": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ],
    "padded": [
        {"role": "system", "content": " \n "},
        {"role": "user", "content": "  leading and trailing \n\n"},
        {"role": "assistant", "content": "\n\n  indented\n\tanswer  "},
        {"role": "user", "content": "\n"},
    ],
    "empty": [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x"},
    ],
    "spelled": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": SPELLED},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]},
        {"role": "assistant", "content": "seen"},
        {"role": "user", "content": [{"type": "text", "text": "third part"}]},
    ],
    "thoughts in the text": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "<think>\nThree and three.\n</think>\n\n6"},
        {"role": "user", "content": "Thanks"},
    ],
    "thoughts apart": [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6", "reasoning_content": "\nThree and three.\n"},
    ],
    "asked": ASKED,
    "called": CALLED[:2],
    "answered": CALLED,
    "done": CALLED + [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Thanks"}],
    "two calls": [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "Zürich and the sum?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Both tools are needed.",
            "tool_calls": [
                call("call00001", "get_weather", {"place": "Zürich \"Altstadt\"", "unit": "celsius"}),
                call("call00002", "add", {"numbers": [1, 2.5, -3], "note": {"why": ["asked", True, None]}}),
            ],
        },
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "cold"},
        {"role": "tool", "tool_call_id": "call00002", "name": "add", "content": "0.5"},
    ],
    "no arguments": ASKED + [
        {"role": "assistant", "content": "", "tool_calls": [call("call00001", "get_weather", {})]},
        {"role": "tool", "tool_call_id": "call00001", "content": ""},
        {"role": "user", "content": "And?"},
    ],
    "developer": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
}
TOOLS = {"tools": [WEATHER, ADD]}
CASES = [
    *((name, prompt, {}) for name in CONVERSATIONS for prompt in (True, False)),
    *((name, True, {"enable_thinking": value}) for name in ("question", "thoughts apart") for value in (True, False)),
    *((name, True, TOOLS) for name in ("asked", "system", "called", "answered", "done", "two calls", "no arguments")),
    ("two calls", False, TOOLS),
    ("answered", True, {**TOOLS, "enable_thinking": False}),
    ("question", True, {"documents": [{"doc_id": "1", "title": "Sky", "text": "Blue light scatters most."}]}),
]


# Features of template families, in our words: some look back, some count, some refuse, some want arguments as texts.
OWN = {
    "thinks": """\
{%- if tools %}
    {{- '[system]' ~ (messages[0].content ~ '; ' if messages[0].role == 'system' else '') ~ 'you have ' ~ tools | length ~ ' tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '[/system]\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '[system]' + messages[0].content + '[/system]\\n' }}
{%- endif %}
{%- set seek = namespace(on=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set at = messages | length - 1 - loop.index0 %}
    {%- if seek.on and message.role == 'user' and message.content is string and not message.content.startswith('<result>') %}
        {%- set seek.on = false %}{%- set seek.last = at %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '[' ~ message.role ~ ']' ~ content ~ '[/' ~ message.role ~ ']\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('', true) %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '[assistant]' }}
        {%- if loop.index0 > seek.last and (loop.last or thought) %}{{- '(' + thought.strip('\\n') + ')' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- ('\\n' if content or not loop.first) ~ '<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '[/assistant]\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '[user]' }}{%- endif %}
        {{- '<result>' ~ message.content ~ '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '[/user]\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '()' }}{%- endif %}
{%- endif %}
""",
    "refuses": """\
{%- set said = messages | rejectattr('role', 'in', ['system', 'developer']) | list %}
{%- set asked = said | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(number=0) %}
{%- for message in said %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (turn.number is divisibleby 2) %}
            {{- raise_exception('turn ' ~ turn.number ~ ' is of the wrong role') }}
        {%- endif %}
        {%- set turn.number = turn.number + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in said %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[TOOLS]' }}
            {%- for tool in tools %}
                {{- '{' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (('"' + value + '"') if value is string else value | tojson) + (', ' if not loop.last else '}') }}
                {%- endfor %}
            {%- endfor %}
            {{- '[/TOOLS]' }}
        {%- endif %}
        {{- '[Q]' + message['content'] + '[/Q]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS]' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is undefined or call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT ' ~ message.tool_call_id[-3:] ~ ']' ~ message.content ~ '[/RESULT]' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role | upper) }}
    {%- endif %}
{%- endfor %}
""",
    "wants texts": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=true, system='') -%}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for m in messages -%}
    {%- if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif -%}
    {%- if m['role'] == 'assistant' and m['content'] is none -%}
        {%- for call in m['tool_calls'] -%}
            {{ '<A>' if loop.first else '\\n' }}{{ call['function']['name'] + '\\n' + call['function']['arguments'] + '<E>' }}
        {%- endfor -%}
    {%- elif m['role'] == 'assistant' %}{{ '<A>' + m['content'].split('</think>')[-1] + '<E>' }}{% endif -%}
    {%- if m['role'] == 'tool' %}{{ '<R>' + m['content'] }}{% endif -%}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<A>' }}{% endif %}""",
    "looks into parts": """\
{%- macro say(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{{ '/' ~ part['text'] if part['type'] == 'text' else raise_exception('a part of type ' ~ part['type']) }}{%- endfor -%}
    {%- elif content is not none and content is defined -%}{{ raise_exception('no content') }}
    {%- endif -%}
{%- endmacro -%}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{{ bos_token ~ date ~ '\\n' }}
{%- set names = {'assistant': 'model', 'developer': 'system'} -%}
{%- for message in messages -%}
    <{{ names.get(message.role, message.role) }}>{{ say(message.content) }}
    {%- for call in message.get('tool_calls', []) -%}
        {{ '\\n' }}{{ call.function.name }}:
        {%- for name, value in call.function.arguments | dictsort -%}
            {{- ' ' ~ name }}={% if value is mapping %}{{ value | tojson(indent=2) }}{% elif value is sequence and value is not string -%}
            {{ value | join('+') }}{% else %}{{ value | string | replace('"', "'") }}{% endif %};
        {%- endfor -%}
    {%- endfor -%}
    </{{ loop.index }}>
{%- endfor -%}
{%- if tools is iterable and tools | length > 0 %}{{ tools | map(attribute='function.name') | join(', ') | capitalize }}{% endif -%}
{%- if documents %}{% for d in documents %}{{ d.items() | list | length }}{{ d }}{% endfor %}{% endif -%}
{%- if add_generation_prompt %}<model>{% endif -%}
""",
    "shows everything": """\
{%- for message in messages %}
{{ loop.index }}{{ '.' if loop.last else ',' }} {{ message.role }} {{ message.content | default('', true) | tojson(ensure_ascii=True) }}
{% for call in message.tool_calls %}
{{ call.function.arguments }} {{ call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) }}
{{ call | tojson(indent=4) }}
{% endfor %}
{% endfor %}
{{ tools or '' }} {{ tools | string | length }} {{ documents or [] }} {{ [true, 'it\\'s', "\\"", 1e16, 1.5e-7, 100.0, [], {}, none] }}
{{ [1e16, 1.5e-7, 0.0001, -0.5, 3.0, {}, []] | tojson(indent=1) }} {{ true is number }} {{ 'x' is sequence }} {{ none is iterable }}
{%- set enable_thinking = enable_thinking | default('unset') %}
 {{ enable_thinking }}{{ ' >' if add_generation_prompt }}
""",
    "knows users": "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}",
}


def described(text):
    return f"{len(text.encode())}:{hashlib.sha256(text.encode()).hexdigest()}"


def texts_of(value):
    """All texts in a value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [text for item in value for text in texts_of(item)] if hasattr(value, "__iter__") else []


class Template:
    def __init__(self, source, tokenizer):
        self.source, self.tokenizer = source, tokenizer
        if "strftime_now" in source:
            self.source = FIXED_DATE + source
        environment = _compile_jinja_template(self.source).environment
        tree = environment.parse(self.source)
        self.reads = meta.find_undeclared_variables(tree) - set(environment.globals)
        # Jinja takes what one branch sets and another reads for undeclared: of what is set anywhere, nothing is sure.
        stored = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx != "load"}
        self.surely_reads = self.reads - stored

    def forms(self, messages):
        if not re.search("'developer'|\"developer\"", self.source):
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        for joined, written, none in itertools.product((False, True), (False, True), ({}, {"content": None}, {"content": ""})):
            form = json.loads(json.dumps(messages))
            for message in form:
                if joined and isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
                if message["content"] is None:
                    del message["content"]
                    message.update(none)
                for c in message.get("tool_calls", []) if written else []:
                    c["function"]["arguments"] = json.dumps(c["function"]["arguments"], ensure_ascii=False)
            yield form

    def render(self, messages, prompt, variables):
        """The text, or what a result says in its place."""
        uses = any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if "tools" in variables and "tools" not in self.reads or uses and "tool" not in self.source:
            return None, "unsupported"
        first = refused = None
        for form in self.forms(messages):
            try:
                [text], _ = render_jinja_template(
                    [form],
                    chat_template=self.source,
                    add_generation_prompt=prompt,
                    **self.tokenizer.special_tokens_map,
                    **variables,
                )
            except jinja2.TemplateError as e:
                if type(e) is jinja2.TemplateError:
                    refused = refused or f"raises {e}"
                continue
            except TypeError:
                continue
            if self.writes_all(text, messages):
                return text, described(text)
            if first is None and self.writes_no_python(text, messages):
                first = text
        if first is not None and not refused:
            return first, described(first)
        return None, refused or "fails"

    @staticmethod
    def writes_no_python(text, messages):
        """Whether parts are not written as Python shows a list, and nothing is written for None."""
        parts = [p["text"] for m in messages if isinstance(m["content"], list) for p in m["content"]]
        nothing = re.sub(r"\b(None|null)\b(?=[\]}])", "", text)
        none = ("None" in nothing or "null" in nothing) and any(m["content"] is None for m in messages)
        return not none and not any(f"'{part}'" in text or f'"{part}"' in text for part in parts)

    @classmethod
    def writes_all(cls, text, messages):
        parts = [p["text"] for m in messages if isinstance(m["content"], list) for p in m["content"]]
        calls = [c["function"] for m in messages for c in m.get("tool_calls", [])]
        words = [re.sub("[^\\w].*", "", word) for c in calls for word in texts_of(c)]
        written_twice = re.search(r'[^\\]\\"(place|numbers)\\"', text)
        return cls.writes_no_python(text, messages) and all(t in text for t in parts + words) and not written_twice


def ids_around(fast, text, plain):
    """The ids of `text` in which `plain` is nothing but text."""
    start = text.index(plain)
    assert text.count(plain) == 1
    special = sorted((t.content for t in fast.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    marks = [m.span() for m in re.finditer("|".join(map(re.escape, special)), text)]
    # Text between the template's marks on either side of it is one piece, in which nothing is special.
    begin = max((e for _, e in marks if e <= start), default=0)
    end = min((s for s, _ in marks if s >= start + len(plain)), default=len(text))
    backend = fast.backend_tokenizer
    ids = backend.encode(text[:begin], add_special_tokens=False).ids
    backend.encode_special_tokens = True
    ids += backend.encode(text[begin:end], add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return ids + backend.encode(text[end:], add_special_tokens=False).ids


def tokenized(folder):
    out = {}
    for name, templates in TOKENIZED.items():
        config = json.loads((folder / name / "tokenizer_config.json").read_text())
        bos, eos = ((t["content"] if isinstance(t, dict) else t) for t in (config["bos_token"], config["eos_token"]))
        file = folder / name / "tokenizer.json"
        fast = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=bos, eos_token=eos)
        entry = {"bos": bos, "eos": eos, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "results": {}}
        for template_name in templates:
            template = Template((folder / f"{template_name}.jinja").read_text(), fast)
            results = []
            for conversation, prompt, variables in CASES:
                text, result = template.render(CONVERSATIONS[conversation], prompt, variables)
                if text is not None:
                    ids = fast.encode(text, add_special_tokens=False)
                    if conversation == "spelled":
                        ids = ids_around(fast, text, SPELLED)
                    result = described(",".join(map(str, ids)))
                results.append(result)
            entry["results"][template_name] = results
        out[name] = entry
    return out


def main():
    folder = pathlib.Path(sys.argv[1])
    texts = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    backend = Tokenizer(models.BPE())
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    templates, own = {}, {}

    def add(to, name, source, entry):
        try:
            template = Template(source, fast)
        except jinja2.TemplateSyntaxError:
            print(f"{name}: Python's Jinja cannot read it", file=sys.stderr)
            return
        results = []
        for number, (conversation, prompt, variables) in enumerate(CASES):
            text, result = template.render(CONVERSATIONS[conversation], prompt, variables)
            results.append(result)
            if texts and text is not None:
                (texts / f"{name}.{number}").write_text(text)
        reads, may_read = template.surely_reads, template.reads - template.surely_reads
        to[name] = {**entry, "reads": sorted(reads), "may read": sorted(may_read), "results": results}

    for name, source in OWN.items():
        add(own, name, source, {"source": source})
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text()
        add(templates, file.stem, source, {"sha256": hashlib.sha256(source.encode()).hexdigest()})
    golden = {
        "bos": BOS,
        "eos": EOS,
        "date": FIXED_DATE,
        "conversations": CONVERSATIONS,
        "plain": {"spelled": SPELLED},
        "cases": [{"conversation": c, "prompt": p, "variables": v} for c, p, v in CASES],
        "own": own,
        "templates": templates,
        "tokenized": tokenized(folder),
    }
    with open("chat.json", "w") as f:
        json.dump(golden, f, ensure_ascii=False, indent=0)
        f.write("\n")


if __name__ == "__main__":
    main()
