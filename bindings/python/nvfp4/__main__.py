"""python -m nvfp4: a conversation in the terminal, and what the library finds on this machine. By the package's public interface alone."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Optional, TextIO

import nvfp4

if TYPE_CHECKING:
    from nvfp4.types import GenerationOptions, QuantizeOptions

INTERRUPTED = 130  # What a shell says of a program that Ctrl-C has ended.
HELP = """\
/exit     ends the program, as Ctrl-D does
/help     this list
/reset    begins a new conversation
Ctrl-C stops an answer."""


class View:
    """
    Prints one answer while it is generated: content and calls on standard output; reasoning dimmed on a terminal, else on standard
    error, so that a pipe gets only the answer. As the command `nvfp4 chat` shows it.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._dims = (self._terminal or sys.stderr.isatty()) and not os.environ.get("NO_COLOR")
        self._last: Optional[str] = None
        self._line_ended = True

    def show(self, piece: nvfp4.Piece) -> None:
        if not piece:
            return
        if self._last != piece.part:
            self._turn_to(piece.part)
        if piece.part == "reasoning":
            self._reason(piece)
        elif piece.part == "tool_call":
            call = nvfp4.ToolCall.from_json(piece)
            self._print(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})\n")
        else:
            self._print(piece)
        self._last, self._line_ended = piece.part, piece.part == "tool_call" or piece.endswith("\n")

    def end(self) -> None:
        """Ends the answer's last line."""
        if self._last == "reasoning":
            self._end_reasoning()
        elif self._last != "tool_call":
            self._print("\n")

    def _turn_to(self, part: str) -> None:
        if self._last == "reasoning":
            self._end_reasoning()
            if self._terminal:
                self._print("\n")
        elif self._last == "content" and not self._line_ended:
            self._print("\n")
        if part == "reasoning" and self._terminal and not self._dims:
            self._print("<thinking>\n")

    def _end_reasoning(self) -> None:
        if not self._line_ended:
            self._reason("\n")
        if self._terminal and not self._dims:
            self._print("</thinking>\n")

    def _reason(self, text: str) -> None:
        """Dimming ends with each piece, as the program may end after any of them."""
        text = _visible(text) if self._terminal else text
        out = sys.stdout if self._terminal else sys.stderr
        print(f"\x1b[2m{text}\x1b[22m" if self._dims else text, end="", file=out, flush=True)

    def _print(self, text: str) -> None:
        print(_visible(text) if self._terminal else text, end="", flush=True)


def _visible(text: str) -> str:
    """`text` made safe for a terminal, which would execute a model's control characters."""
    return "".join("\ufffd" if ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 else c for c in text)


class Conversation:
    """Questions from the keyboard or, one per line, from a pipe, and their answers."""

    def __init__(self, chat: nvfp4.ChatSession, generation: GenerationOptions) -> None:
        self._chat, self._generation = chat, generation
        self._keyboard = sys.stdin.isatty()

    def run(self) -> int:
        interrupted = False
        while True:
            try:
                line = self._line()
                interrupted = False
                if line is None or not self._turn(line.strip()):
                    return 0
            except KeyboardInterrupt:
                if not self._keyboard or interrupted:
                    raise
                interrupted = True
                print("\nCtrl-C again or Ctrl-D ends the program", file=sys.stderr)
            # A mistake must not end the conversation.
            except (nvfp4.Error, UnicodeError) as error:
                if not self._keyboard:
                    raise
                print(f"nvfp4: {error}", file=sys.stderr)

    def _line(self) -> Optional[str]:
        """The next line, or None at the end of the input."""
        if self._keyboard and sys.stdout.isatty():
            try:
                return input("> ")
            except EOFError:
                print()
                return None
        if self._keyboard:
            print("> ", end="", file=sys.stderr, flush=True)
        # Of one line at a time, so that what is wrong with a later one does not keep this one from its answer.
        return sys.stdin.buffer.readline().decode() or None

    def _turn(self, line: str) -> bool:
        """Whether the conversation goes on."""
        if line == "/exit":
            return False
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            self._chat.reset()
        elif re.fullmatch(r"/[\w-]*(\s.*)?", line):  # Paths and comments begin so too.
            raise nvfp4.InvalidArgument(f"there is no command {line.split()[0]}; /help lists them")
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        view, stream = View(), self._chat.ask(question, parts=True, **self._generation)
        try:
            for piece in stream:
                view.show(piece)
        except KeyboardInterrupt:
            stream.stop()
            if not self._keyboard:
                raise
            view.end()
            if stream.result is None or not stream.result.generated_tokens:
                print("nvfp4: stopped before the answer began; the question is not part of the conversation", file=sys.stderr)
            return
        finally:
            stream.stop()
        view.end()


def _progress(out: TextIO) -> Any:
    """Shows how much of a model is loaded, where somebody sees it."""
    def show(done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != shown[0]:
            shown[0] = percent
            print(f"\rloading: {percent} %" if percent < 100 else "\r\x1b[K", end="", file=out, flush=True)

    shown = [-1]
    return show if out.isatty() else None


def _chat(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None}

    def take(*names: str) -> Any:
        return {name: given[name] for name in names if name in given}

    quantize: Optional[QuantizeOptions] = {"recipe": given["quantize"]} if "quantize" in given else None
    model = nvfp4.Model(arguments.model, quantize=quantize, progress=_progress(sys.stderr), **take("device", "threads", "activations"))
    turns = take("reasoning_budget", "keep_reasoning")
    if "think" in given:
        turns["think"] = given["think"] == "on"
    chat = model.chat(**take("system", "context", "kv_type"), **turns)
    generation = take("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "repetition_penalty",
                      "no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_window", "seed", "min_tokens", "max_tokens",
                      "stop", "ignore_model_stops")
    if "dry_sequence_breakers" in given:
        generation["dry_sequence_breakers"] = [text for text in given["dry_sequence_breakers"] if text != "none"]
    if sys.stderr.isatty():
        print(f"model: {arguments.model}, on {model.info['device']}", file=sys.stderr)
    if sys.stdin.isatty():
        print("/help lists the commands, Ctrl-D ends the program", file=sys.stderr)
        try:
            import readline  # noqa: F401 # With it, input() edits lines and has a history.
        except ImportError:
            pass
    return Conversation(chat, generation).run()


def _diagnose(_arguments: argparse.Namespace) -> int:
    print(json.dumps(nvfp4.diagnose(), indent=2, ensure_ascii=False))
    return 0


def _count(text: str) -> int:
    """A number of something, for argparse."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it takes a number from 0 on")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nvfp4", description="Language models whose weights stay in 4 bits.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"nvfp4 {nvfp4.version} ({nvfp4.native.lib.path})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    diagnose = commands.add_parser("diagnose", help="what this machine and library support, and why something is missing, as JSON")
    diagnose.set_defaults(run=_diagnose)

    chat = commands.add_parser("chat", help="hold a conversation", allow_abbrev=False, argument_default=argparse.SUPPRESS,
                               description="Holds a conversation: at a terminal, or one question per line from a pipe.")
    chat.set_defaults(run=_chat)
    add = chat.add_argument
    add("model", metavar="MODEL", help="a directory or a file")
    add("--device", help="cpu, cuda:N, or auto (the default) for the GPU with room for the model, else the CPU")
    add("--threads", type=_count, help="CPU threads; one for each core unless given")
    add("--activations", choices=("exact", "int8"), help="the type of activations in products with NVFP4 weights")
    add("--quantize", choices=("amax", "four_over_six", "sweep"), help="makes dense weights NVFP4 while loading")
    add("--kv", dest="kv_type", choices=("float16", "float32", "float8"), help="the type of the KV cache")
    add("--context", type=_count, help="the context length in tokens; the model's own unless given")
    add("--system", help="the system prompt")
    add("--think", choices=("on", "off"), help="whether the model reasons before it answers, if its template allows the choice")
    add("--think-budget", dest="reasoning_budget", type=_count, metavar="N", help="the most tokens of reasoning; then the answer follows")
    add("--keep-reasoning", action="store_true", help="keep the reasoning of earlier answers: turns start sooner, the context fills sooner")
    add("--min-tokens", type=_count, metavar="N", help="do not end the answer before this many tokens")
    add("--max-tokens", type=_count, metavar="N", help="stop after this many tokens; without it an answer may fill the context")
    add("--temperature", "--temp", type=float, help="randomness; 0 is greedy. Without this and the four below, as the model recommends")
    add("--top-k", type=_count, metavar="N", help="sample from this many of the most probable tokens; 0 means all")
    add("--top-p", type=float, metavar="P", help="sample from the fewest tokens that together have this probability; 0 is greedy")
    add("--min-p", type=float, metavar="P", help="leave out tokens less probable than this fraction of the most probable one")
    add("--top-n-sigma", type=float, metavar="X",
        help="leave out tokens whose logit is more than this many standard deviations below the largest; 0 means off")
    add("--typical-p", type=float, metavar="P", help="sample from the most typical tokens that together have this probability; 1 means all")
    add("--xtc-probability", type=float, metavar="P",
        help="probability with which a token is chosen without the most probable ones (XTC); 0 means off")
    add("--xtc-threshold", type=float, metavar="P",
        help="XTC leaves out the tokens with at least this probability, but for the least probable of them")
    add("--repetition-penalty", type=float, metavar="X", help="above 1, tokens that have occurred already become less probable")
    add("--no-repeat-ngram-size", type=_count, metavar="N", help="never repeat this many tokens in a row, those of the prompt included; 0 means off")
    add("--dry-multiplier", type=float, metavar="X",
        help="strength of the DRY penalty on tokens that would extend a repetition, such as 0.8; 0 means off")
    add("--dry-base", type=float, metavar="X", help="growth of the DRY penalty with each token of the repetition")
    add("--dry-allowed-length", type=_count, metavar="N", help="length in tokens of the shortest repetition with a DRY penalty")
    add("--dry-window", type=_count, metavar="N", help="tokens at the end in which DRY finds repetitions; 0 means all")
    add("--dry-sequence-breaker", dest="dry_sequence_breakers", action="append", metavar="TEXT",
        help="a text that no repetition contains for DRY; may be given several times, and 'none' means none")
    add("--seed", type=_count, help="the same seed gives the same answer; without it each answer has a new one")
    add("--stop", action="append", metavar="TEXT", help="stop before this text, which may name special tokens; may be given several times")
    add("--ignore-stops", dest="ignore_model_stops", action="store_true", help="go on past the model's stop tokens")
    return parser


def main() -> int:
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr] # Whatever the locale says, as the library's texts are.
    arguments = _parser().parse_args()
    run = arguments.run
    del arguments.run
    try:
        return int(run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads the answer, and the interpreter must not say so when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (nvfp4.Error, OSError, UnicodeError) as error:
        print(f"nvfp4: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
