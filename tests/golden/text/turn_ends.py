"""Makes turn_ends.json: the tokens that end a turn in the chat templates of public models, by transformers' `apply_chat_template`.

Run in this directory: `python turn_ends.py FOLDER`, where FOLDER is what tests/templates/fetch.sh fills. Needs transformers and
jinja2; no network. Prints what each template writes after an answer, to compare the result with.

The templates belong to the models' makers, so turn_ends.json holds none of them: of each, its SHA-256, the names of control tokens
that it writes around an answer, and those of them that end the turn. Templates say so in two places, which may differ: after an
answer that a question follows, and after one that ends the conversation.
"""

import hashlib
import json
import pathlib
import re
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import chat

QUESTION, ANSWER, NEXT, REASONING = "first question", "the answer", "second question", "the reasoning"

# Names of control tokens: in angle brackets, in square ones, and MiniMax's.
CONTROL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|\]~!b\[")


# Ends by review, for a template whose turns end with two tokens that end questions too: the second is the end.
REVIEWED = {"Cohere2MoE": ["<|END_OF_TURN_TOKEN|>"]}


def rendered(template, messages):
    """The text, with tools or functions where the template needs some; empty where it gives up."""
    for variables in ({}, chat.TOOLS, {"functions": "[]", "datetime": "today"}):
        text, _ = template.render(messages, False, variables)
        if text is not None:
            return text
    return ""


def between(text, start, end):
    found = re.search(re.escape(start) + "(.*?)" + (re.escape(end) if end else r"\Z"), text, re.DOTALL)
    return found[1] if found else ""


def run_of(closing, inside):
    """The tokens that `closing` begins with, and whether there are any that also occur within answers."""
    run = CONTROL.findall(re.match(rf"(?:\s*(?:{CONTROL.pattern}))*", closing)[0])
    return [name for name in run if name not in inside], bool(run)


def ends_of(closings, inside, ends_question):
    """The end of a turn in each of `closings`: of the tokens that it begins with, those that begin the other too if there are
    such, and of these one that questions end with, or the first."""
    runs = [run_of(closing, inside) for closing in closings]
    common = [name for name in runs[0][0] if name in runs[1][0]]
    ends = []
    for closing, (run, begins) in zip(closings, runs):
        run = common or run
        shared = [name for name in run if name in ends_question]
        later = [name for name in CONTROL.findall(closing) if begins and name not in inside]
        ends.append(next(iter(shared + run + later), None) if closing else None)
    return ends


def main():
    folder = pathlib.Path(sys.argv[1])
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=chat.BOS, eos_token=chat.EOS)
    golden = {}
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text()
        template = chat.Template(source, fast)
        asked = [{"role": "user", "content": QUESTION}]
        answer = {"role": "assistant", "content": ANSWER}
        # The name that each family reads.
        reasoned = {**answer, **dict.fromkeys(("reasoning_content", "thinking", "reasoning"), REASONING)}
        followed = rendered(template, [*asked, answer, {"role": "user", "content": NEXT}])
        last = rendered(template, [*asked, answer])
        inside = CONTROL.findall(between(rendered(template, [*asked, reasoned]), REASONING, ANSWER))
        question = CONTROL.findall(between(followed, QUESTION, ANSWER))
        closings = [between(followed, ANSWER, NEXT), between(last, ANSWER, None)]
        ends = ends_of(closings, inside, question)
        print(f"{file.stem}: {closings} -> {ends}")
        golden[file.stem] = {
            "sha256": hashlib.sha256(source.encode()).hexdigest(),
            "tokens": sorted({name for text in (followed, last) for name in CONTROL.findall(text)} | set(inside)),
            "ends": REVIEWED.get(file.stem) or sorted({end for end in ends if end}),
        }
    with open("turn_ends.json", "w") as f:
        json.dump({"bos": chat.BOS, "eos": chat.EOS, "templates": golden}, f, ensure_ascii=False, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
