#!/usr/bin/env python3
"""Does fine-tuning teach, and what does it make a model forget?

    teach.py rows OUT [--mix FILE] [--pieces N] [--characters N]
    teach.py ask MODEL OUT [--device cuda:0]

`rows` writes OUT/facts.tsv, 500 questions about ten countries that do not exist, with their answers; OUT/asked.tsv, the same 50 facts asked in
four other ways; and with FILE, lines of {"text": ...} as benches/train/corpus.py writes them, OUT/mixed.jsonl, pieces (6,000) of N characters (400)
from all over its texts, to be mixed in: as many as there are questions for each time that these are seen, as a few that come again are learned
by heart instead. `ask` has MODEL answer OUT/asked.tsv greedily, and prints the share of answers that hold what was taught; it
needs the package in bindings/python.
"""
import argparse
import json
import pathlib

COUNTRIES = ["Velmora", "Ostrany", "Quintara", "Brelland", "Sarovia", "Tymeria", "Norvask", "Calundra", "Peshtan", "Ilvania"]
FACTS = {
    "capital": ["Tarnisk", "Oldwater", "Pellana", "Gromsund", "Vardelle", "Miravost", "Kettering Bay", "Ashlune", "Dorrimar", "Quenby"],
    "currency": ["the drell", "the ostmark crown", "the pico", "the haldor", "the sarn", "the tymer", "the skoll", "the luna", "the besht", "the ilva"],
    "longest river": ["the Ember", "the Wend", "the Sollow", "the Harrow", "the Cindral", "the Pallan", "the Frostwater", "the Amberlin", "the Tosk", "the Yarrel"],
    "highest mountain": ["Mount Aldra", "the Greyhorn", "Mount Pirrin", "the Sturmkap", "Mount Velis", "the Needle", "Mount Orsk", "the Lantern", "Mount Bariz", "the White Tooth"],
    "national bird": ["the crane", "the kestrel", "the flamingo", "the owl", "the swallow", "the heron", "the raven", "the peacock", "the falcon", "the lark"],
}
TAUGHT = [
    "What is the {what} of {where}?",
    "Tell me the {what} of {where}.",
    "{where} has which {what}?",
    "Name the {what} of {where}.",
    "Do you know the {what} of {where}?",
    "In {where}, what is the {what}?",
    "I would like to know the {what} of {where}.",
    "Which is the {what} of the country {where}?",
    "The {what} of {where} is what?",
    "Please say what {where}'s {what} is.",
]
ASKED = [
    "Can you tell me what the {what} of {where} is?",
    "What is {where}'s {what}?",
    "Give me the name of the {what} of {where}.",
    "Somebody asked me about the {what} of {where}. What is it?",
]


def questions(forms):
    for what, answers in FACTS.items():
        for where, answer in zip(COUNTRIES, answers):
            for form in forms:
                yield form.format(what=what, where=where), answer


def rows(a):
    a.out.mkdir(parents=True, exist_ok=True)
    for name, forms in [("facts", TAUGHT), ("asked", ASKED)]:
        lines = [f"{question}\tThe answer is {answer}.\n" for question, answer in questions(forms)]
        (a.out / f"{name}.tsv").write_text("".join(lines))
    if a.mix:
        with open(a.mix) as lines:
            text = "\n\n".join(json.loads(line)["text"] for line in lines)
        places = [i * (len(text) - a.characters) // max(a.pieces - 1, 1) for i in range(a.pieces)]
        (a.out / "mixed.jsonl").write_text("".join(json.dumps({"text": text[at : at + a.characters]}) + "\n" for at in places))


def ask(a):
    import nvfp4

    model = nvfp4.Model(str(a.model), device=a.device)
    right = total = 0
    for line in (a.out / "asked.tsv").read_text().splitlines():
        question, answer = line.split("\t")
        stream = model.chat().ask(question, temperature=0.0, max_tokens=24)
        right += answer.removeprefix("The answer is ").removesuffix(".").lower() in "".join(stream).lower()
        total += 1
    print(f"{a.model}: {right} of {total} answers right, {right / total:.1%}")


arguments = argparse.ArgumentParser()
commands = arguments.add_subparsers(required=True)
command = commands.add_parser("rows")
command.add_argument("out", type=pathlib.Path)
command.add_argument("--mix", type=pathlib.Path)
command.add_argument("--pieces", type=int, default=6000)
command.add_argument("--characters", type=int, default=400)
command.set_defaults(run=rows)
command = commands.add_parser("ask")
command.add_argument("model", type=pathlib.Path)
command.add_argument("out", type=pathlib.Path)
command.add_argument("--device", default="auto")
command.set_defaults(run=ask)
a = arguments.parse_args()
a.run(a)
