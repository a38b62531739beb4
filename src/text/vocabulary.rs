//! A tokenizer from the vocabulary of a GGUF file. Such a file holds tokens, merges or scores, and the name of the rule that
//! cuts text into words before merging; the rules of the known names stand here, as published with the models' own
//! tokenizers. An unknown name is an error: a wrong rule gives nearly right tokens, which is worse than none.

use std::collections::{HashMap, HashSet};

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::normalizers::{NormalizerWrapper, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::pieces::Spelling;
use crate::base::Result;
use crate::base::error::{bail, err};

/// The vocabulary of a GGUF file, as plain data.
#[derive(Clone, Debug, Default)]
pub struct VocabularySpec {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (sentencepiece BPE with byte tokens).
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer; empty means `default`. Unused by `llama`.
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
    /// Token for text that the vocabulary cannot spell. Used by `llama` only.
    pub unknown: Option<u32>,
    /// Whether each text starts with `bos`; `None` takes what is usual for the model and pre-tokenizer.
    pub add_bos: Option<bool>,
    /// Whether each text ends with `eos`; `None` means no.
    pub add_eos: Option<bool>,
    /// Whether each text gets a space in front; `None` means yes. Used by `llama` only.
    pub add_space_prefix: Option<bool>,
}

/// What a token is for: GGUF's token types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for text that the vocabulary cannot spell.
    Unknown,
    /// Structure: end of text, turn borders. Found in text before anything else; hidden from output.
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
    pub(super) fn kind(&self, id: usize) -> TokenKind {
        match self.token_types.get(id) {
            Some(2) => TokenKind::Unknown,
            Some(3) => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            Some(5) => TokenKind::Unused,
            Some(6) => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }
}

/// A tokenizer with what is needed to read its vocabulary.
pub(super) struct Built {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) spelling: Spelling,
    pub(super) leading_spaces: usize,
}

/// How one family of models cuts text into words.
struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre` that mean this rule.
    names: &'static [&'static str],
    /// Applied in order, each to the pieces that the one before left. Matches and what lies between them become pieces.
    patterns: &'static [&'static str],
    /// Whether the text is brought to Unicode's composed form first.
    nfc: bool,
    /// Whether a word that is a token as a whole skips the merges.
    whole_words: bool,
    /// Whether texts start with the beginning-of-text token unless the file says otherwise.
    usual_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

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
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "olmo", "exaone4"],
        patterns: &[GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "exaone"],
        patterns: &[r"\p{N}", GPT2],
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
        patterns: &[LLAMA3],
        whole_words: true,
        usual_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        patterns: &[LLAMA3],
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen35"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        whole_words: true,
        usual_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
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
    let mut built = match spec.model.as_str() {
        "gpt2" => byte_level(spec)?,
        "llama" => sentencepiece(spec)?,
        other => bail!(
            Unsupported,
            "the vocabulary is of model '{other}'; gpt2 (byte-level BPE) and llama (sentencepiece BPE) work"
        ),
    };
    for special in [true, false] {
        let tokens: Vec<AddedToken> = spec
            .tokens
            .iter()
            .enumerate()
            .filter(|(i, text)| {
                let kind = spec.kind(*i);
                kind.is_added() && kind.is_special() == special && !text.is_empty()
            })
            .map(|(_, text)| AddedToken::from(text.as_str(), special).normalized(false))
            .collect();
        if special {
            built.inner.add_special_tokens(&tokens);
        } else {
            built.inner.add_tokens(&tokens);
        }
    }
    Ok(built)
}

/// Token string to id. Where two tokens are spelled alike, text becomes the first.
fn ids(spec: &VocabularySpec) -> HashMap<String, u32> {
    let mut ids = HashMap::with_capacity(spec.tokens.len());
    for (id, token) in spec.tokens.iter().enumerate() {
        ids.entry(token.clone()).or_insert(id as u32);
    }
    ids
}

fn byte_level(spec: &VocabularySpec) -> Result<Built> {
    let rule = pre_tokenizer(&spec.pre)?;
    if spec.merges.is_empty() {
        bail!(
            CorruptFile,
            "a gpt2 vocabulary needs merges, and this one has none"
        );
    }
    let ids = ids(spec);
    let mut merges = Vec::with_capacity(spec.merges.len());
    for (i, merge) in spec.merges.iter().enumerate() {
        let Some((left, right)) = merge.split_once(' ') else {
            bail!(
                CorruptFile,
                "merge {i} is '{merge}'; a merge is two tokens with a space between"
            );
        };
        for token in [left, right, &format!("{left}{right}")] {
            if !ids.contains_key(token) {
                bail!(
                    CorruptFile,
                    "merge {i} ('{merge}') needs token '{token}', which the vocabulary does not have"
                );
            }
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = BPE::builder()
        .vocab_and_merges::<Vocab>(ids.into_iter().collect(), merges)
        .ignore_merges(rule.whole_words)
        .build()
        .map_err(|e| err!(CorruptFile, "the vocabulary does not make a tokenizer: {e}"))?;
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in rule.patterns {
        let split = Split::new(
            SplitPattern::Regex((*pattern).to_owned()),
            SplitDelimiterBehavior::Isolated,
            false,
        )
        .map_err(|e| err!(Internal, "pre-tokenizer pattern {pattern}: {e}"))?;
        steps.push(split.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(PreTokenizers::new(steps)));
    inner.with_decoder(Some(ByteLevel::default()));
    add_ends(&mut inner, spec, rule.usual_bos)?;
    if rule.nfc {
        inner.with_normalizer(Some(NFC));
    }
    Ok(Built {
        inner,
        spelling: Spelling::ByteLevel,
        leading_spaces: 0,
    })
}

/// Makes `inner` put the tokens around each text that the vocabulary asks for.
fn add_ends(
    inner: &mut tokenizers::Tokenizer,
    spec: &VocabularySpec,
    usual_bos: bool,
) -> Result<()> {
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
        return Ok(());
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
    inner.with_post_processor(Some(around));
    Ok(())
}

/// The character that sentencepiece writes for a space.
const SPACE: char = '\u{2581}';

fn sentencepiece(spec: &VocabularySpec) -> Result<Built> {
    if spec.scores.is_empty() {
        bail!(
            CorruptFile,
            "a llama vocabulary needs scores, and this one has none"
        );
    }
    if let Some(i) = spec.scores.iter().position(|s| s.is_nan()) {
        bail!(CorruptFile, "the score of token {i} is NaN");
    }
    let ids = ids(spec);
    let byte_tokens = (0..=255u8)
        .filter(|b| ids.contains_key(&format!("<0x{b:02X}>")))
        .count();
    if byte_tokens != 256 {
        bail!(
            Unsupported,
            "a llama vocabulary needs a token for each of the 256 bytes; this one has {byte_tokens}"
        );
    }
    let merges = merges_by_score(spec, &ids);
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
    let prefix = spec.add_space_prefix.unwrap_or(true);
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
    add_ends(&mut inner, spec, true)?;
    Ok(Built {
        inner,
        spelling: Spelling::Plain {
            space: Some(SPACE),
            bytes: true,
        },
        leading_spaces: usize::from(prefix),
    })
}

/// Sentencepiece joins the two neighbours whose joined token has the best score. As merges: every way to cut a token into
/// two tokens, best score first; of equal scores, the lower id first.
fn merges_by_score(spec: &VocabularySpec, ids: &HashMap<String, u32>) -> Vec<(String, String)> {
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
    merges
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
            let tokenizer = super::super::Tokenizer::from_vocabulary(&spec).unwrap();
            let tokens = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&tokens, false).unwrap(), text, "{name}");
        }
    }
}
