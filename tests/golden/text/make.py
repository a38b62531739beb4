"""Makes the golden data of the text tests, with the Python packages `tokenizers` and `transformers` as the independent side.

Run in this directory: `python make.py`. Needs tokenizers and transformers; no network. Everything is seeded by the text below.

- tokenizer.json   a byte-level BPE of 620 tokens, trained on the corpus below
- spm.json         a sentencepiece-like BPE with byte tokens, and scores as a GGUF file holds them
- encodings.json   tokens of the samples under each tokenizer and each pre-tokenizer rule
- plain.json       tokens of texts that name a special token and mean its name: those of tokenizers that do not know it
- templates.json   chat templates of our own and the prompts that transformers makes of them
"""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog isn't amused, and the fox doesn't care.",
    "She said they'll be here at 10:45, or 2024-05-17 at the latest; we've waited 12345 minutes.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(100):\n\tprint(add(i, i * 2))\n",
    "Le café est fermé, l'été aussi. Ça va? Größe, Straße, naïve, façade.",
    "東京は日本の首都です。東京の人口は多い。中国的首都是北京。北京很大。",
    "Москва - столица России. Привет, как дела? 한국어 텍스트도 있습니다.",
    "Numbers 1 22 333 4444 55555 and symbols != == <= >= && || ... --- *** ### $$$",
    "emoji 😀 😀 🎉 👩‍💻 ❤️ and more words to merge: there then them these those thing think",
] * 4

SAMPLES = [
    "",
    " ",
    "The quick brown fox",
    "  leading and   inner   spaces  ",
    "isn't it? They'LL say WE'VE done it; I'd not've.",
    "10:45 on 2024-05-17, 12345678 and 3.14159",
    "line one\nline two\r\n\r\n  indented\n\n\n",
    "tab\tseparated\t\tvalues",
    "東京は日本の首都です。北京很大。龘",
    "Привет, мир! 한국어 텍스트",
    "emoji 😀🎉 family 👩‍👩‍👧‍👦 flag 🇫🇷 ❤️",
    "café cafe\u0301 \u00a0nbsp \u3000ideographic",
    "if (a != b && c <= d) { return *p++; } // $x ~ ^y | `z`",
    "<|im_start|>user\nHi<|im_end|>\n<think>hm</think>",
    "ünïcödé ÀÉÎ ǅ ᾳ ﬁ Ⅷ ½ ²",
    "\u0000\u0007 control \u200b zero width \ufeff",
    "word<|endoftext|>word",
    "a" * 40 + " " * 9 + "!" * 17,
]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
RULES = {
    "default": ([r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], False, False),
    "gpt-2": ([GPT2], False, False),
    "smollm": ([r"\p{N}", GPT2], False, False),
    "llama-bpe": ([LLAMA3], False, True),
    "qwen2": ([QWEN2], True, False),
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHOWN = ["<think>", "</think>"]


def byte_level(rule, model=None):
    patterns, nfc, whole_words = RULES[rule]
    model = model or models.BPE()
    model.ignore_merges = whole_words
    t = Tokenizer(model)
    if nfc:
        t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    t.decoder = decoders.ByteLevel()
    return t


def add(t):
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in CONTROL])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in SHOWN])
    return t


def encode(t):
    return [t.encode(s, add_special_tokens=False).ids for s in SAMPLES]


def main():
    # Trained under the rule that lets digits merge, so that the rules that split them give other tokens.
    trained = byte_level("gpt-2")
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=620 - len(CONTROL) - len(SHOWN),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    saved = json.loads(trained.to_str())["model"]
    vocabulary = saved["vocab"]
    merges = [tuple(m) for m in saved["merges"]]
    base = add(byte_level("qwen2", models.BPE(vocabulary, merges)))
    base.save("tokenizer.json", pretty=False)
    encodings = {"samples": SAMPLES, "tokenizer.json": encode(base)}
    for rule in RULES:
        encodings[rule] = encode(add(byte_level(rule, models.BPE(vocabulary, merges))))
    encodings["decoded"] = [base.decode(ids, skip_special_tokens=True) for ids in encodings["tokenizer.json"]]

    spm = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    # Trained on words, as sentencepiece does; used without a pre-tokenizer.
    spm.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    spm.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=640, special_tokens=specials, show_progress=False)
    )
    saved = json.loads(spm.to_str())["model"]
    pieces = sorted(saved["vocab"], key=saved["vocab"].get)
    rank = {"".join(m): i for i, m in enumerate(saved["merges"])}
    scores = [0.0 if p in specials else -float(rank.get(p, len(rank))) - 1.0 for p in pieces]
    types = [2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1 for i in range(len(pieces))]
    # The merges that sentencepiece's rule implies: every cut of a piece into two pieces, best score first.
    implied = []
    for p in sorted((p for p in pieces if p not in specials), key=lambda p: (-scores[saved["vocab"][p]], saved["vocab"][p])):
        implied += [(p[:i], p[i:]) for i in range(1, len(p)) if p[:i] in saved["vocab"] and p[i:] in saved["vocab"]]
    clean = Tokenizer(models.BPE(saved["vocab"], implied, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    clean.normalizer = spm.normalizer
    clean.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    clean.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials[1:3]])
    encodings["spm"] = encode(clean)
    encodings["spm_decoded"] = [clean.decode(ids, skip_special_tokens=True) for ids in encodings["spm"]]
    with open("spm.json", "w") as f:
        json.dump({"tokens": pieces, "scores": scores, "types": types, "json": clean.to_str()}, f, ensure_ascii=False)
    with open("encodings.json", "w") as f:
        json.dump(encodings, f, ensure_ascii=True, indent=0)
    with open("plain.json", "w") as f:
        json.dump(plain(base, clean), f, ensure_ascii=True, indent=0)

    hf = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<|im_start|>", eos_token="<|im_end|>")
    rendered = []
    for name, template in TEMPLATES.items():
        for messages in CONVERSATIONS:
            for prompt in (False, True):
                for extra in ({}, {"enable_thinking": False}):
                    text = hf.apply_chat_template(
                        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt, **extra
                    )
                    rendered.append(
                        {"template": name, "messages": messages, "prompt": prompt, "extra": extra, "text": text}
                    )
    with open("templates.json", "w") as f:
        json.dump({"templates": TEMPLATES, "rendered": rendered}, f, ensure_ascii=False, indent=1)


def plain(base, spm):
    """
    What `spm` becomes with each of the ways to put a space in front (transformers' `legacy=False` is "first"), and the tokens of
    texts in three parts, the middle one of which names a special token. A tokenizer that does not know that token gives them.
    """
    variants = {"prepend": {}}
    for scheme in ("first", "always", "never"):
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": scheme == "always"}
        variants[scheme] = {"normalizer": None, "pre_tokenizer": metaspace}
    cases = [{"parts": parts, "ids": {}} for parts in PARTS]
    tokenizers = {"byte level": (json.loads(base.to_str()), "<|im_start|>", "<|im_end|>")}
    for name, changes in variants.items():
        tokenizers[name] = ({**json.loads(spm.to_str()), **changes}, "<s>", "</s>")
    for name, (file, known, named) in tokenizers.items():
        whole = Tokenizer.from_str(json.dumps(file))
        file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] != named]
        unknowing = Tokenizer.from_str(json.dumps(file))
        for case in cases:
            text = "".join(case["parts"]).replace("KNOWN", known).replace("NAMED", named)
            case["ids"][name] = unknowing.encode(text, add_special_tokens=False).ids
            if "KNOWN" not in "".join(case["parts"]):
                fast = PreTrainedTokenizerFast(tokenizer_object=whole)
                assert fast.encode(text, add_special_tokens=False, split_special_tokens=True) == case["ids"][name], (name, text)
    return {"variants": variants, "cases": cases}


PARTS = [
    ["", "xNAMEDy", ""],
    ["", "NAMED", ""],
    ["", " NAMED a NAMEDNAMEDb  ", ""],
    ["", "NAMED\n東京 NAMED😀 café", ""],
    ["KNOWN[INST] ", "Say NAMED now", " [/INST]"],
    ["KNOWNuser\n", "a NAMED b", "KNOWN\nassistant: "],
    ["You are brief. ", "NAMED", " Answer:"],
    ["KNOWN", "  NAMED", "KNOWN"],
    ["KNOWNone KNOWNtwo", "NAMEDthree", "four KNOWNfive"],
    ["KNOWN", "the theNAMED", ""],
]

CONVERSATIONS = [
    [{"role": "user", "content": "Hello, <b>world</b> & \"friends\""}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "  What is 2+2?\n"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
        {"role": "user", "content": "東京? 😀"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ],
]

# Each exercises what real templates use: white-space control, namespaces, reversed slices, string methods, loop variables,
# macros, filters with arguments, `is` tests, inline conditions, loop controls, tojson, undefined variables, None.
TEMPLATES = {
    "thinking": """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- set i = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and m.role == "user" and m.content is string and not m.content.startswith('<tool>') %}
        {%- set ns.found = true %}
        {%- set ns.last = i %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- 'TOOLS ' ~ tools|tojson }}{%- endif %}
{%- for m in messages %}
    {%- set body = m.content %}
    {%- if m.role == 'assistant' and '</think>' in body %}
        {%- set why = body.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set body = body.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {%- set body = '[' + why.strip() + ']' + body %}
        {%- endif %}
    {%- endif %}
    {{- '<|' + m.role + '|>\\n' + body + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "headers": """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<h>system</h>\\n\\n" + (system if system else "none given") }}
{%- for message in messages %}
{{- '<h>' + message['role'] + '</h>\\n\\n' + message['content'] | trim + '<eot>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\\n\\n' }}{%- endif %}
""",
    "plain lines": """\
{% for m in messages %}
    {% if loop.first and m.role != 'system' %}
system: default
    {% endif %}
{{ m['role'] }}: {{ m['content'] }}{% if not loop.last %}{{ eos_token }}{% endif %}

{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
""",
    "odd corners": """\
{% macro show(x, n=1) %}({{ x|upper }}*{{ n }}){% endmacro %}
{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{ show(m.role, n=loop.index) }} {{ m|tojson }} {{ m.get('name', 'nobody') }} {{ m.name }} {{ m.role in ['user'] }} {{ none }}
{% for k, v in m.items() %}{{ k }}={{ v|length }};{% endfor %}
{% generation %}{{ m.content.replace('o', '0').upper() }}{% endgeneration %}
{% endfor %}
{{ {'a': [1, 2.5, true, none, 'é<']}|tojson }} {{ {'b': {'c': []}}|tojson(indent=2) }}
{{ '%s-%d' | format('x', 3) }} {{ messages|map(attribute='role')|join(',') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ [1, 2, 3][-1] }} {{ 'abc'[1:] }} {{ 1 if add_generation_prompt else 0 }} {{ undefined_thing }}
{{- ' x ' ~ 1 ~ 'y' -}} {# a comment #}
{{ 'multi\\nline'|indent(2) }} {{ ['b', 'a']|sort|first }} {{ 'x' is defined and tools is none }} {{ 'q'|default('z') }}
""",
    "percent": """\
{% set form = '<%s>' %}{% set n = messages | length %}
{% for m in messages %}{{ form % m.role }}{{ '%s: %s' % (m.role, m.content) }}{% if loop.index0 % 2 == 0 and (loop.index % 2) != 0 %} even{% endif %}

{% endfor %}
{{ '%d of %i' % (n, 7.9) }} {{ '%5.1f|%-6s|%06d|%+d|%x|%X|%o|%e|%g|%c|%%' % (3.14159, 'ab', 42, 5, 255, 255, 8, 12345.678, 0.0001, 'z') }}
{{ '%s %s %s %s %s' % (none, true, 1.0, [1, 'a'], {'k': (1, 'b')}) }} {{ '%r %r' % ('it\\'s', 2) }} {{ '%10s|%-10s|%.2s' % ('right', 'left', 'cut') }}
{{ '%s' % [1, 'x'] }} {{ '%s' % ((1, 'x'),) }} {{ '%(a)s-%(b)03d' % {'a': 'x', 'b': 7} }} {{ 'no values' % {} }} {{ '%s' % undefined_thing }}|
{{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ 2 * 7 % 4 }} {{ 7 % 4 * 2 }} {{ 7 % 4 + 2 ** 2 % 3 }} {{ true % 2 }} {{ (10 - 7 % 4) ~ 'x' }}
{{ '%s-%d' | format('x', 3) }} {{ '%s' | format([1, 'a']) }} {{ '%(who)s' | format(who='me') }} {{ 'a' + '%s' % 'b' ~ 'c' }} {{ ('%s' % n) | length }} {{ '%s' % n | string }}
""",
    "tuples": """\
{{ (1, 'a') }} {{ (1,) }} {{ () }} {{ ((1, 2), [3, (4, none)]) }} {{ {'k': ('v', true)} }} {{ [('a', 1.5)] }} {{ 'x' ~ (1, 'a') }}
{{ (1, 'a') | string }} {{ (1, 'a') | list }} {{ (1, 'a') | tojson }} {{ (1, 'a') | length }} {{ (1, 'a')[1] }} {{ (1, 'a')[-1] }} {{ ('b', 'a') | join('+') }} {{ ('b', 'a') | first }}
{% for m in messages %}{{ m.role in ('user', 'system') }}{{ m.role not in ('user',) }} {% endfor %}

{% for a, b in ((1, 2), (3, 4)) %}{{ a }}{{ b }};{% endfor %} {% set a, b = ('x', 'y') %}{{ a ~ b }} {% set pair = (a, b) %}{{ pair }}
{{ {'a': 1, 'b': [2]}.items() | list }} {{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1} | items | list }} {% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}

{% macro show(x, y=(1, 2)) %}{{ x }}{{ y }}{% endmacro %}{{ show((3, 4)) }}{{ show(5, y=('a',)) }} {{ (1, 2) == (1, 2) }} {{ (1, 2) is sequence }} {{ (1, 2) is iterable }} {{ 'none' if not () }}
""",
}

if __name__ == "__main__":
    main()
