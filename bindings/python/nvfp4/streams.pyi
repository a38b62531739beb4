from typing import Any, Generator, Iterator, NamedTuple, Optional, Sequence, Tuple

from typing_extensions import Self

from .models import Session
from .native import Single
from .types import Finish, Part

class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]
    @classmethod
    def from_json(cls, text: str) -> ToolCall: ...

class Generation(NamedTuple):
    text: str
    finish: Finish
    reasoning: str
    tool_calls: list[ToolCall]
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    seed: int
    evicted_tokens: int
    queue_seconds: float
    longest_gap_seconds: float
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int

class Score(NamedTuple):
    log_probabilities: list[float]
    is_argmax: list[bool]

    @property
    def total(self) -> float: ...
    @property
    def is_greedy(self) -> bool: ...

class Piece(str):
    part: Part
    token: Optional[int]
    log_probability: Optional[float]
    top_log_probabilities: Sequence[Tuple[int, float]]

class Stream(Single):
    def __init__(self, session: Session, call: str, prompt: Tuple[Any, ...], options: dict[str, Any],
                 on_text: Any = True) -> None: ...
    def __iter__(self) -> Iterator[Piece]: ...
    def __next__(self) -> Piece: ...
    def stop(self) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Piece: ...
    def __await__(self) -> Generator[Any, None, Generation]: ...
    async def aclose(self) -> None: ...
    @property
    def result(self) -> Optional[Generation]: ...
    def __del__(self) -> None: ...
