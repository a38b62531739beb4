"""An answer that fits a JSON schema, a word of a list, and a text of a form, whatever the model, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    python3 examples/python/structured.py MODEL "My order 4711 came broken, and nobody answers!"
"""

import json
import sys

import nvfp4

TICKET = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["delivery", "payment", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "summary": {"type": "string", "maxLength": 60},
    },
    "required": ["topic", "urgency", "summary"],
    "additionalProperties": False,
}


def main() -> int:
    if len(sys.argv) != 3:
        print(f"usage: {sys.argv[0]} MODEL PROMPT", file=sys.stderr)
        return 2
    model = nvfp4.Model(sys.argv[1])
    # Compiled once, and used for any number of answers.
    ticket = nvfp4.Grammar.json_schema(model, TICKET)
    mood = nvfp4.Grammar.choices(model, ["angry", "calm", "happy"])
    code = nvfp4.Grammar.regex(model, "[A-Z]{2}-[0-9]{4}")

    chat = model.chat(system="Make a support ticket of what the customer writes.")
    fields = json.loads(chat.say(sys.argv[2], grammar=ticket).text)
    print(fields["topic"], fields["urgency"], fields["summary"])
    for question, grammar in ("How does the customer sound?", mood), ("Give the ticket a code.", code):
        for piece in chat.ask(question, grammar=grammar):
            print(piece, end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
