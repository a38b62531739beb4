//! A tokenizer from the vocabulary of a GGUF file. Such a file has tokens, merges or scores, and the name of the pre-tokenizer, which
//! splits text into words before merging. The rules of known names are listed here, as published with the models' own tokenizers. An
//! unknown name is an error: a wrong rule gives nearly right tokens, which is worse than none.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::{NormalizerWrapper, Sequence as Normalizers};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};

use super::bpe::{self, Bpe, patterns};
use super::end_names::ends_turn;
use super::engine::Engine;
use super::pieces::Spelling;
use crate::base::Result;
use crate::base::error::{bail, err};

/// The vocabulary of a GGUF file, as plain data.
#[derive(Clone, Debug, Default)]
pub struct VocabularySpec {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE), `llama` (sentencepiece BPE with byte tokens) or `gemma4` (the same with merges).
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer; empty means `default`. Used by `gpt2` only.
    pub pre: String,
    /// The tokens, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type` of each token; empty means that all are normal.
    pub token_types: Vec<i32>,
    /// Merges in order of priority, each two tokens with a space between. Unused by `llama`.
    pub merges: Vec<String>,
    /// The score of each token. Used by `llama` only.
    pub scores: Vec<f32>,
    /// Beginning-of-text token.
    pub bos: Option<u32>,
    /// End-of-text token.
    pub eos: Option<u32>,
    /// Token for text that the vocabulary cannot spell. Unused by `gpt2`.
    pub unknown: Option<u32>,
    /// Whether each text starts with `bos`; `None` for the default of the model and pre-tokenizer.
    pub add_bos: Option<bool>,
    /// Whether each text ends with `eos`; `None` for no.
    pub add_eos: Option<bool>,
    /// Whether a space is prepended to each text; `None` for the default, which is yes for `llama` alone. Unused by `gpt2`.
    pub add_space_prefix: Option<bool>,
}

/// The role of a token, by GGUF's token types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for text that the vocabulary cannot spell.
    Unknown,
    /// Structure: end of text, turns. Found in text before anything else; hidden from output.
    Control,
    /// Found in text before anything else, and shown.
    UserDefined,
    /// Padding of the vocabulary.
    Unused,
    /// One byte.
    Byte,
}

impl TokenKind {
    pub(super) fn is_added(self) -> bool {
        self.is_special() || self == TokenKind::UserDefined
    }

    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

impl VocabularySpec {
    /// The kind of a token. A token whose name is known to end turns is a control token, even if the file types it as text, as several
    /// converters do.
    pub(super) fn kind(&self, id: usize) -> TokenKind {
        let ends_turn = || self.tokens.get(id).is_some_and(|name| ends_turn(name));
        match self.token_types.get(id) {
            Some(2) => TokenKind::Unknown,
            Some(3) => TokenKind::Control,
            Some(5) => TokenKind::Unused,
            Some(6) => TokenKind::Byte,
            _ if ends_turn() => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            _ => TokenKind::Normal,
        }
    }
}

/// A tokenizer with the data needed to read its vocabulary.
pub(super) struct Built {
    pub(super) engine: Engine,
    pub(super) spelling: Spelling,
    pub(super) leading_spaces: usize,
}

/// The rules by which a family of models splits text into words.
struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre` that mean this rule.
    names: &'static [&'static str],
    /// Applied in order, each to the pieces of the previous one. Matches and the text between them become pieces.
    patterns: &'static [&'static str],
    /// Whether the text is normalized to NFC first.
    nfc: bool,
    /// Whether a word that is a token as a whole skips the merges.
    whole_words: bool,
    /// Whether texts start with the beginning-of-text token unless the file says otherwise.
    usual_bos: bool,
}

const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    patterns: &[],
    nfc: false,
    whole_words: false,
    usual_bos: false,
};

const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["default"],
        patterns: &[
            patterns::PUNCTUATION,
            patterns::GPT2,
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "olmo", "exaone4"],
        patterns: &[patterns::GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "exaone"],
        patterns: &[r"\p{N}", patterns::GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        patterns: &[patterns::LLAMA3],
        whole_words: true,
        usual_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        patterns: &[patterns::LLAMA3],
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        patterns: &[patterns::QWEN2],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen35"],
        patterns: &[patterns::QWEN35],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        patterns: &[patterns::TEKKEN],
        whole_words: true,
        usual_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4"],
        patterns: &[patterns::GPT4O],
        ..PLAIN
    },
];

fn pre_tokenizer(name: &str) -> Result<&'static PreTokenizer> {
    let name = if name.is_empty() { "default" } else { name };
    PRE_TOKENIZERS
        .iter()
        .find(|p| p.names.contains(&name))
        .ok_or_else(|| {
            let known: Vec<&str> = PRE_TOKENIZERS
                .iter()
                .flat_map(|p| p.names)
                .copied()
                .collect();
            err!(
                Unsupported,
                "the vocabulary names pre-tokenizer '{name}', which is not known here; known are {}",
                known.join(", ")
            )
        })
}

/// Builds the tokenizer of `spec`.
pub(super) fn build(spec: &VocabularySpec) -> Result<Built> {
    if spec.tokens.is_empty() {
        bail!(CorruptFile, "the vocabulary has no tokens");
    }
    for (what, len) in [
        ("token types", spec.token_types.len()),
        ("scores", spec.scores.len()),
    ] {
        if len != 0 && len != spec.tokens.len() {
            bail!(
                CorruptFile,
                "the vocabulary has {} tokens but {len} {what}",
                spec.tokens.len()
            );
        }
    }
    match spec.model.as_str() {
        "gpt2" => byte_level(spec),
        "llama" | "gemma4" => sentencepiece(spec),
        other => bail!(
            Unsupported,
            "the vocabulary is of model '{other}'; gpt2 (byte-level BPE), llama and gemma4 (sentencepiece BPE) work"
        ),
    }
}

/// The tokens that are found in text before anything else, special ones first.
fn added(spec: &VocabularySpec) -> Vec<bpe::AddedToken> {
    let added = |special: bool| {
        let tokens = spec.tokens.iter().enumerate();
        let chosen = tokens.filter(move |(i, text)| {
            let kind = spec.kind(*i);
            kind.is_added() && kind.is_special() == special && !text.is_empty()
        });
        chosen.map(move |(i, text)| bpe::AddedToken {
            id: i as u32,
            content: text.clone(),
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special,
        })
    };
    added(true).chain(added(false)).collect()
}

/// Token string to id. If two tokens have the same string, text becomes the first.
fn ids(spec: &VocabularySpec) -> HashMap<String, u32> {
    let mut ids = HashMap::with_capacity(spec.tokens.len());
    for (id, token) in spec.tokens.iter().enumerate() {
        ids.entry(token.clone()).or_insert(id as u32);
    }
    ids
}

fn byte_level(spec: &VocabularySpec) -> Result<Built> {
    let rule = pre_tokenizer(&spec.pre)?;
    let mut file = byte_level_file(spec, rule)?;
    let engine = match Bpe::new(&file) {
        Some(own) => Engine::Own(Box::new(own)),
        None => {
            let ids = ids(spec);
            for (i, (left, right)) in file.model.merges.0.iter().enumerate() {
                for token in [left, right, &Cow::Owned(format!("{left}{right}"))] {
                    if !ids.contains_key(&**token) {
                        bail!(
                            CorruptFile,
                            "merge {i} ('{}') needs token '{token}', which the vocabulary does not have",
                            spec.merges[i]
                        );
                    }
                }
            }
            let first = |text: &str, id: u32| ids.get(text) == Some(&id);
            file.model.vocab.0.retain(|(text, id)| first(text, *id));
            let failed = |e: &dyn std::fmt::Display| {
                err!(CorruptFile, "the vocabulary does not make a tokenizer: {e}")
            };
            let json = serde_json::to_vec(&file).map_err(|e| failed(&e))?;
            let inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| failed(&e))?;
            Engine::Crate(Box::new(inner))
        }
    };
    Ok(Built {
        engine,
        spelling: Spelling::ByteLevel,
        leading_spaces: 0,
    })
}

/// The tokens that merges join, best first.
fn merges(spec: &VocabularySpec) -> Result<Vec<(&str, &str)>> {
    if spec.merges.is_empty() {
        bail!(
            CorruptFile,
            "a {} vocabulary needs merges, and this one has none",
            spec.model
        );
    }
    let mut pairs = Vec::with_capacity(spec.merges.len());
    for (i, merge) in spec.merges.iter().enumerate() {
        let Some(pair) = merge.split_once(' ') else {
            bail!(
                CorruptFile,
                "merge {i} is '{merge}'; a merge is two tokens with a space between"
            );
        };
        pairs.push(pair);
    }
    Ok(pairs)
}

/// The `tokenizer.json` of a byte-level vocabulary.
fn byte_level_file<'a>(spec: &'a VocabularySpec, rule: &PreTokenizer) -> Result<bpe::File<'a>> {
    let borrowed = |(left, right)| (Cow::Borrowed(left), Cow::Borrowed(right));
    let merges = merges(spec)?.into_iter().map(borrowed).collect();
    let tokens = spec.tokens.iter().enumerate();
    let tokens = tokens.map(|(id, text)| (Cow::Borrowed(&**text), id as u32));
    let split = |pattern: &&str| {
        let pattern = json!({"Regex": pattern});
        json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
    };
    let level = |own_words: bool| {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": own_words,
            "trim_offsets": true,
            "use_regex": own_words,
        })
    };
    let mut steps: Vec<Value> = rule.patterns.iter().map(split).collect();
    steps.push(level(false));
    let ends = match ends(spec, rule.usual_bos)? {
        Some(ends) => serde_json::to_value(PostProcessorWrapper::from(ends))
            .map_err(|e| err!(Internal, "the tokens around a text: {e}"))?,
        None => Value::Null,
    };
    Ok(bpe::File {
        version: "1.0".to_owned(),
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: added(spec),
        normalizer: match rule.nfc {
            true => json!({"type": "NFC"}),
            false => Value::Null,
        },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        post_processor: ends,
        decoder: level(true),
        model: bpe::Model {
            kind: "BPE".to_owned(),
            ignore_merges: rule.whole_words,
            vocab: bpe::Tokens(tokens.collect()),
            merges: bpe::Pairs(merges),
            ..bpe::Model::default()
        },
    })
}

/// The post-processor that adds the vocabulary's tokens around each text, if there are any.
fn ends(spec: &VocabularySpec, usual_bos: bool) -> Result<Option<TemplateProcessing>> {
    let wanted = |add: Option<bool>, usual: bool, id: Option<u32>, name: &str| match id {
        _ if add == Some(false) || (add.is_none() && !usual) => Ok(None),
        Some(id) => match spec.tokens.get(id as usize) {
            Some(text) => Ok(Some((id, text.clone()))),
            None => Err(err!(
                CorruptFile,
                "the {name} token is {id}, but the vocabulary has {} tokens",
                spec.tokens.len()
            )),
        },
        None if add.is_none() => Ok(None),
        None => Err(err!(
            CorruptFile,
            "the vocabulary asks for a {name} token around each text but names none"
        )),
    };
    let mut template = vec!["$A"];
    let mut tokens = Vec::new();
    if let Some(token) = wanted(spec.add_bos, usual_bos, spec.bos, "bos")? {
        template.insert(0, "bos");
        tokens.push(("bos", token));
    }
    if let Some(token) = wanted(spec.add_eos, false, spec.eos, "eos")? {
        template.push("eos");
        tokens.push(("eos", token));
    }
    if tokens.is_empty() {
        return Ok(None);
    }
    let failed = |e: &dyn std::fmt::Display| err!(Internal, "the tokens around a text: {e}");
    let tokens = tokens
        .into_iter()
        .map(|(name, (id, text))| SpecialToken::new(name.to_owned(), vec![id], vec![text]))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|e| failed(&e))?;
    let around = TemplateProcessing::builder()
        .try_single(template.join(" "))
        .map_err(|e| failed(&e))?
        .special_tokens(tokens)
        .build()
        .map_err(|e| failed(&e))?;
    Ok(Some(around))
}

/// The character that sentencepiece uses for a space.
const SPACE: char = '\u{2581}';

fn sentencepiece(spec: &VocabularySpec) -> Result<Built> {
    let ids = ids(spec);
    let byte_tokens = (0..=255u8)
        .filter(|b| ids.contains_key(&format!("<0x{b:02X}>")))
        .count();
    if byte_tokens != 256 {
        bail!(
            Unsupported,
            "a {} vocabulary needs a token for each of the 256 bytes; this one has {byte_tokens}",
            spec.model
        );
    }
    let is_scored = spec.model == "llama";
    let merges = match is_scored {
        true => merges_by_score(spec, &ids)?,
        false => {
            let owned = |(left, right): (&str, &str)| (left.to_owned(), right.to_owned());
            merges(spec)?.into_iter().map(owned).collect()
        }
    };
    let mut model = BPE::builder()
        .vocab_and_merges::<Vocab>(ids.into_iter().collect(), merges)
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = spec.unknown {
        let Some(token) = spec.tokens.get(unknown as usize) else {
            bail!(
                CorruptFile,
                "the unknown token is {unknown}, but the vocabulary has {} tokens",
                spec.tokens.len()
            );
        };
        model = model.unk_token(token.clone());
    }
    let model = model
        .build()
        .map_err(|e| err!(CorruptFile, "the vocabulary does not make a tokenizer: {e}"))?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let space = Replace::new(" ", SPACE.to_string())
        .map_err(|e| err!(Internal, "replacing spaces: {e}"))?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    let prefix = spec.add_space_prefix.unwrap_or(is_scored);
    if prefix {
        steps.push(Prepend::new(SPACE.to_string()).into());
    }
    steps.push(space.into());
    inner.with_normalizer(Some(Normalizers::new(steps)));
    inner.with_decoder(Some(Decoders::new(vec![
        Replace::new(SPACE.to_string(), " ")
            .map_err(|e| err!(Internal, "replacing spaces: {e}"))?
            .into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
        Strip::new(' ', usize::from(prefix), 0).into(),
    ])));
    inner.with_post_processor(ends(spec, true)?);
    let added = added(spec)
        .into_iter()
        .map(|token| tokenizers::AddedToken::from(token.content, token.special).normalized(false));
    inner.add_tokens(&added.collect::<Vec<_>>());
    Ok(Built {
        engine: Engine::Crate(Box::new(inner)),
        spelling: Spelling::Plain {
            space: Some(SPACE),
            bytes: true,
        },
        leading_spaces: usize::from(prefix),
    })
}

/// Sentencepiece joins the two neighbours whose joined token has the best score. As merges, these are all ways to split a token into two
/// tokens, best score first; for equal scores, the lower id first.
fn merges_by_score(
    spec: &VocabularySpec,
    ids: &HashMap<String, u32>,
) -> Result<Vec<(String, String)>> {
    if spec.scores.is_empty() {
        bail!(
            CorruptFile,
            "a llama vocabulary needs scores, and this one has none"
        );
    }
    if let Some(i) = spec.scores.iter().position(|s| s.is_nan()) {
        bail!(CorruptFile, "the score of token {i} is NaN");
    }
    let mut order: Vec<usize> = (0..spec.tokens.len())
        .filter(|&i| matches!(spec.kind(i), TokenKind::Normal))
        .collect();
    order.sort_by(|&a, &b| spec.scores[b].total_cmp(&spec.scores[a]).then(a.cmp(&b)));
    let mut seen = HashSet::new();
    let mut merges = Vec::new();
    for token in order.into_iter().map(|i| spec.tokens[i].as_str()) {
        if !seen.insert(token) {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                merges.push((left.to_owned(), right.to_owned()));
            }
        }
    }
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_builds_and_keeps_the_text() {
        let alphabet = (0..0x200)
            .filter_map(char::from_u32)
            .filter(|&c| super::super::pieces::byte_of(c).is_some())
            .map(String::from);
        let mut spec = VocabularySpec {
            model: "gpt2".into(),
            tokens: alphabet.chain(["th".to_owned()]).collect(),
            merges: vec!["t h".to_owned()],
            ..VocabularySpec::default()
        };
        let text = "The year 2024: it's\tÀ l'été 東京😀 \r\n  path/to/THing!?  ";
        for name in PRE_TOKENIZERS.iter().flat_map(|p| p.names) {
            spec.pre = (*name).to_owned();
            let engine = build(&spec).unwrap().engine;
            assert!(matches!(engine, Engine::Own(_)), "{name}");
            let tokenizer = super::super::Tokenizer::from_vocabulary(&spec).unwrap();
            let tokens = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&tokens, false).unwrap(), text, "{name}");
        }
    }
}
