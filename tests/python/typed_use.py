"""What mypy must accept and what it must refuse: nothing here runs. See run.sh.

Each wrong use says with which error mypy refuses it; as ignores that are not needed are errors, it must.
"""

from __future__ import annotations

import array
import pathlib
from typing import Dict, List, Optional, Tuple, Type

import nvfp4
from nvfp4.types import Finish, GenerationOptions, Part
from typing_extensions import assert_type

numbers = array.array("f", [1.0] * 32)


def models_on_disk() -> None:
    nvfp4.convert("in", pathlib.Path("out"), tables="int8", keep_head=True, packed=True)

    nvfp4.convert("in", "out", tables="int4")  # type: ignore[arg-type]
    nvfp4.convert("in", "out", table="int8")  # type: ignore[call-arg]


def tensors() -> None:
    tensor = nvfp4.Tensor(memoryview(numbers).cast("B").cast("f", (2, 16)))
    assert_type(tensor.shape, Tuple[int, ...])
    quantized = nvfp4.quantize(tensor, recipe="sweep", rounding="stochastic", seed=1, progress=lambda done, total: done < total)
    assert_type(quantized.codes, nvfp4.Tensor)
    assert_type(nvfp4.dequantize(quantized, dtype="bfloat16"), nvfp4.Tensor)
    assert_type(nvfp4.dequantize(nvfp4.quantize_nf4(tensor)), nvfp4.Tensor)
    elsewhere = nvfp4.Quantized(b"\x00" * 8, b"\x38", 1.0, "swizzled")
    assert_type(elsewhere.codes, bytes)
    nvfp4.scaled_mm(quantized, elsewhere)
    weight = nvfp4.Weight(quantized, compute_path="kernel_only", device="cpu")
    assert_type(nvfp4.linear(numbers, weight, activations="int8"), nvfp4.Tensor)

    nvfp4.quantize(tensor, recipe="best")  # type: ignore[arg-type]
    nvfp4.quantize(tensor, colour="red")  # type: ignore[call-arg]
    nvfp4.quantize([1.0, 2.0])  # type: ignore[arg-type]
    nvfp4.quantize("text")  # type: ignore[arg-type]
    nvfp4.Tensor(numbers, dtype="float8")  # type: ignore[call-overload]
    nvfp4.Tensor.zeros((2, 2), dtype=float)  # type: ignore[arg-type]
    nvfp4.dequantize(tensor)  # type: ignore[arg-type]
    nvfp4.scaled_mm(quantized, tensor)  # type: ignore[arg-type]
    nvfp4.Weight(tensor, device="cpu")  # type: ignore[call-overload]
    tensor.shape = (1,)  # type: ignore[misc]


def once(logits: "memoryview[float]", tokens: "memoryview[int]", index: int) -> None:
    for token in tokens:
        logits[token] = -1.5 - index


def models_from_memory() -> None:
    with open("model.safetensors", "rb") as file:
        model = nvfp4.Model.from_files({"config.json": b"{}", "model.safetensors": file, "a": (3, lambda offset, size: b"abc")}, device="cpu")
    assert_type(model, nvfp4.Model)

    nvfp4.Model.from_files({"config.json": "{}"})  # type: ignore[dict-item]
    nvfp4.Model.from_files({"config.json": b"{}"}, devices="cpu")  # type: ignore[call-arg]


def sessions() -> None:
    model = nvfp4.Model(pathlib.Path("model"), quantize={"recipe": "amax"}, device="cuda:1", activations="int8")
    adapter = nvfp4.Adapter(model, pathlib.Path("adapter"), cancel=nvfp4.Cancel())
    assert_type(adapter.wait(), None)
    model.chat(adapter=adapter)
    session = model.session(adapter=adapter, context=100, kv_type="float32", eviction="drop_oldest", system="Be brief.")
    session.prefill(model.tokenizer.encode("text", special=False))
    assert_type(model.tokenizer.token_bytes(1), bytes)
    assert_type(model.tokenizer.is_special(1), bool)
    for special in model.tokenizer.special_tokens:
        assert_type(special, nvfp4.SpecialToken)
        print("mask" in special.roles, special.token, special.name)
    how: GenerationOptions = {"temperature": 0.5, "stop": ["\n", 7], "max_tokens": 3}
    result = session.generate(lambda piece: print(piece.token, piece.part), **how)
    assert_type(result.finish, Finish)
    assert_type(session.logits(), "array.array[float]")
    assert_type(session.fork(), nvfp4.Session)
    for piece in session.stream(parts=True, **how):
        assert_type(piece, nvfp4.Piece)
        assert_type(piece.part, Part)
    statuses: List[Optional[Type[nvfp4.Error]]] = []
    assert_type(nvfp4.step_sample([session], [1], temperature=0.0), List[int])
    assert_type(nvfp4.step_sample([session], [1], [how], statuses=statuses), List[Optional[int]])
    assert_type(nvfp4.Detokenizer.push_each([nvfp4.Detokenizer(model)], (1,)), List[Tuple[str, Optional[Finish]]])
    text, finish = nvfp4.Detokenizer(model, stop="x").push(1)
    assert_type(finish, Optional[Finish])

    grammar = nvfp4.Grammar.json_schema(model, {"type": "null"})
    assert_type(grammar, nvfp4.Grammar)
    session.generate(grammar=nvfp4.Grammar.choices(model, ["a"]), tool_calls="held")
    session.generate(draft_model=model, drafts=4)

    model.chat(chat_template="{{ messages }}").say("a", chat_template=b"{{ tools }}")
    nvfp4.Model("model", device=0)  # type: ignore[arg-type]
    session.generate(dry_multiplier=0.8, dry_allowed_length=3, dry_sequence_breakers=["a", b"b"], min_tokens=3, typical_p=0.9)
    session.generate(logit_bias={3: -1.5}, bad_words=[[1, 2], (3,)], presence_penalty=0.5, frequency_penalty=0.5)
    assert_type(session.score([[1, 2], (3,)])[0].total, float)
    assert_type(model.log_probabilities("a", after=[1]), List[float])
    assert_type(session.top_log_probabilities, List[Tuple[int, float]])
    assert_type(model.embed(["a", "b"], pooling="mean", dimensions=4, prompt_name="query"), nvfp4.Tensor)
    assert_type(model.hidden_states([[1, 2], (3,)], normalize="yes"), List[nvfp4.Tensor])
    model.embed(["a"], pooling="max")  # type: ignore[arg-type]
    model.hidden_states(["a"], pooling="mean")  # type: ignore[call-arg]
    session.generate(logits_processor=once)
    session.generate(logits_processor=3)  # type: ignore[arg-type]
    session.generate(dry_sequence_breakers=[1])  # type: ignore[list-item]
    session.generate(bad_words=["a"])  # type: ignore[list-item]
    session.generate(grammar="a")  # type: ignore[arg-type]
    session.generate(draft_model="a")  # type: ignore[arg-type]
    nvfp4.Grammar(model, "a", "glob")  # type: ignore[arg-type]
    nvfp4.Model("model", quantize={"recipe": "best"})  # type: ignore[arg-type]
    model.session(kv_type="int8")  # type: ignore[arg-type]
    model.session(adapter="place")  # type: ignore[arg-type]
    nvfp4.Adapter("model", "place")  # type: ignore[arg-type]
    model.session(think=True)  # type: ignore[call-arg]
    session.prefill("text")  # type: ignore[arg-type]
    model.tokenizer.encode("text", plain=True)  # type: ignore[call-arg]
    session.generate(temperature="hot")  # type: ignore[arg-type]
    session.generate(think=True)  # type: ignore[call-arg]
    nvfp4.step_sample([session], [1], [how], temperature=0.0)  # type: ignore[call-overload]
    if result.finish == "done":  # type: ignore[comparison-overlap]
        pass


async def event_loops() -> None:
    chat = nvfp4.Model("model").chat()
    assert_type(await chat.ask("Why?", priority=1, deadline=0.5, temperature=0.3), nvfp4.Generation)
    async for piece in chat.stream([{"role": "user", "content": "Why?"}], parts=True):
        assert_type(piece, nvfp4.Piece)
    await nvfp4.Model("model").session().stream(max_tokens=3).aclose()

    await chat.say("Why?")  # type: ignore[misc]
    chat.say("Why?", priority=1)  # type: ignore[call-arg]
    await chat.ask("Why?", deadline="soon")  # type: ignore[arg-type]


def chats() -> None:
    chat = nvfp4.Model("model").chat("Be brief.", think=False, context=100)
    stream = chat.ask("Why?", parts=True, reasoning_budget=10, temperature=0.3)
    assert_type(stream.result, Optional[nvfp4.Generation])
    assert_type(chat.say("Why?", think=True).tool_calls, List[nvfp4.ToolCall])
    chat.complete([*chat.messages, {"role": "user", "content": "Why?"}])
    assert_type(nvfp4.ChatSession.restore(nvfp4.Model("model"), "file", think=True), nvfp4.ChatSession)

    stream.result.text  # type: ignore[union-attr]
    chat.ask("Why?", thinking=True)  # type: ignore[call-arg]
    chat.complete("Why?")  # type: ignore[arg-type]
    chat.ask(7)  # type: ignore[arg-type]


def training() -> None:
    with nvfp4.Trainer("model", steps=10, schedule="cosine", weights="residual8", first_moments="int8") as trainer:
        assert_type(trainer, nvfp4.Trainer)
        step = trainer.step([nvfp4.Batch.of([1, 2, 3]), nvfp4.Batch([1], [2])])
        assert_type(step.loss, float)
        assert_type(trainer.evaluate(nvfp4.Batch.of(range(3))), float)
        assert_type(trainer.compare(nvfp4.Batch.of(range(3))).divergence, float)
        trainer.export("out", tables="nvfp4")
        nvfp4.Trainer("model", teacher="other", teacher_memory="streamed", label_share=0.5)
        nvfp4.Trainer("model", teacher="other", teacher_memory="nowhere")  # type: ignore[arg-type]

        nvfp4.Trainer("model", schedule="sine")  # type: ignore[arg-type]
        trainer.step([1, 2, 3])  # type: ignore[list-item]
        trainer.export("out", tables="float32")  # type: ignore[arg-type]
        if step.outcome == "failed":  # type: ignore[comparison-overlap]
            pass
    optimizer = nvfp4.Optimizer(nvfp4.Tensor(numbers), second_moments="uint4")
    assert_type(optimizer.step(nvfp4.Tensor(numbers), rate=0.1), Tuple[int, int])
    assert_type(optimizer.save(), bytes)

    nvfp4.Optimizer(numbers)  # type: ignore[arg-type]


def library() -> None:
    assert_type(nvfp4.memory(), Dict[str, Tuple[int, int]])
    nvfp4.set_log(lambda level, line: print(level, line), level="debug")
    try:
        nvfp4.synchronize("cuda")
    except nvfp4.NotFound as error:
        assert_type(error.status, int)
        error.filename

    nvfp4.set_log(print, level="loud")  # type: ignore[arg-type]
    nvfp4.diagnose().nothing  # type: ignore[attr-defined]
