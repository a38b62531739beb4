"""Makes the goldens of embeddings: a small seeded Qwen3 model in the layout of Qwen/Qwen3-Embedding-0.6B, and what sentence-transformers
makes of texts with it, in f32. Run with torch and sentence-transformers (6.2) installed:

    python tests/golden/embedding/make.py

`qwen3` is the model. `expected.json` has the texts and their tokens, `expected.safetensors` the embeddings.
"""

import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
MODEL = HERE / "qwen3"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
TEXTS = [
    "What is the capital of China?",
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other.",
    "",
    "  white space at both ends\n",
    "Größe, 大きさ, 🙂",
    "An embedding of a text that ends a pass and goes on in the next one. " * 2 + "It is the longest of all.",
]
POOLING = dict.fromkeys(
    ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"], False)


def write(name, content):
    path = MODEL / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def pooling(mode, include_prompt=True):
    modes = {f"pooling_mode_{name}": name == mode for name in POOLING}
    write("1_Pooling/config.json", {"word_embedding_dimension": 48, **modes, "include_prompt": include_prompt})


def modules(*names):
    paths = ["", "1_Pooling", "2_Normalize"]
    write("modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths))])


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.train_from_iterator([QUERY, *TEXTS], trainer)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False, use_regex=False),
        processors.TemplateProcessing(
            single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[("<|endoftext|>", end)])])
    tokenizer.save(str(MODEL / "tokenizer.json"))
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "padding_side": "left", "model_max_length": 131072, "clean_up_tokenization_spaces": False})
    return tokenizer


def make_model(vocabulary):
    torch.manual_seed(41)
    config = transformers.Qwen3Config(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=vocabulary, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, bos_token_id=0, eos_token_id=0)
    model = transformers.Qwen3Model(config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            is_norm = values.dim() == 1
            values.copy_(1 + torch.randn_like(values) / 4 if is_norm else torch.randn_like(values) * values.shape[-1] ** -0.5)
    state = {name: values.to(torch.bfloat16).contiguous() for name, values in model.state_dict().items()}
    save_file(state, MODEL / "model.safetensors", metadata={"format": "pt"})
    known = json.loads(config.to_json_string(use_diff=True))
    write("config.json", {"architectures": ["Qwen3ForCausalLM"], **{
        key: known[key] for key in known if key not in ("architectures", "transformers_version", "dtype", "layer_types")}})


def load(**options):
    return SentenceTransformer(str(MODEL), device="cpu", model_kwargs={"dtype": torch.float32}, **options)


def embed(**options):
    return load().encode(TEXTS, convert_to_tensor=True, **options)


if __name__ == "__main__":
    shutil.rmtree(MODEL, ignore_errors=True)
    MODEL.mkdir()
    tokenizer = make_tokenizer()
    make_model(tokenizer.get_vocab_size())
    write("config_sentence_transformers.json", {
        "prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"})

    found = {}
    modules("Transformer", "Pooling")
    for mode, name in [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")]:
        pooling(mode)
        found[name] = embed()
    pooling("mean_tokens", include_prompt=False)
    found["mean_without_prompt"] = embed(prompt_name="query")
    modules("Transformer", "Pooling", "Normalize")
    pooling("lasttoken")
    found["normalized"] = embed()
    found["queries"] = embed(prompt_name="query")
    model = load(truncate_dim=20)
    found["dimensions"] = model.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    model = load()
    for index, text in enumerate(TEXTS):
        # Alone, because padding on the left stays in the rows.
        found[f"tokens_{index}"] = model.encode([text], output_value="token_embeddings")[0]
    write("sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    found["truncated"] = embed()
    (MODEL / "sentence_bert_config.json").unlink()

    found = {name: values.float().contiguous() for name, values in found.items()}
    save_file(found, HERE / "expected.safetensors")
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    expected = {"texts": TEXTS, "tokens": tokens}
    (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")
