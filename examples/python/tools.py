"""A model that calls functions of this program, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    python3 examples/python/tools.py MODEL "Do I need an umbrella in Paris?"
"""

import sys

import nvfp4

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather in a city, now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def weather(city: object) -> str:
    return f"Rain in {city}, 12 degrees."


def main() -> int:
    if len(sys.argv) != 3:
        print(f"usage: {sys.argv[0]} MODEL PROMPT", file=sys.stderr)
        return 2
    chat = nvfp4.Model(sys.argv[1]).chat(tools=TOOLS)
    result = chat.say(sys.argv[2])
    # As long as the answer has calls, their results are passed back. The limit is for models that never stop calling.
    for _ in range(5):
        if not result.tool_calls:
            break
        messages = chat.messages
        for call in result.tool_calls:
            print(f"[{call.name} {call.arguments}]", file=sys.stderr)
            content = weather(call.arguments.get("city")) if call.name == "weather" else f"There is no tool {call.name}."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        result = chat.complete(messages)
    print(result.text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
