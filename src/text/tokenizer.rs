//! Encodes text by our own byte-level BPE, or by the crate `tokenizers` for every other kind of tokenizer. Decodes by our own table of
//! bytes, which the incremental detokenizer shares, so that the two agree.

use std::ops::Range;
use std::path::Path;

use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizedString, OffsetReferential, OffsetType,
    PreTokenizer,
};

use super::bpe::{Bpe, File};
use super::engine::Engine;
use super::pieces::{Pieces, Spelling, Token};
use super::vocabulary::{self, VocabularySpec};
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{bail, err};
use crate::base::{Error, Result, file, panics};

/// A part of a text that is encoded by itself.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The range of its bytes.
    pub(super) range: Range<usize>,
    /// The added token that it is; none for text.
    pub(super) token: Option<u32>,
}

/// A tokenizer: immutable, and usable from several threads at once.
pub struct Tokenizer {
    engine: Engine,
    pieces: Pieces,
    leading_spaces: usize,
}

impl Tokenizer {
    /// The tokenizer in a `tokenizer.json` file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let json = file::read(path)
            .map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?;
        Self::from_json(&json).map_err(|e| e.within(path.display()))
    }

    /// The tokenizer in the text of a `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        with_tokenizers("reading it", Budget::vocabulary(json.len(), 0), || {
            Self::read(json)
        })
    }

    fn read(json: &[u8]) -> Result<Self> {
        if let Some(tokenizer) = Self::read_own(json)? {
            return Ok(tokenizer);
        }
        let inner = read_foreign(json)?;
        let (spelling, leading_spaces) = spelling(inner.get_decoder())?;
        let vocabulary = inner.get_vocab(true);
        let added = inner.get_added_tokens_decoder();
        let tokens: Vec<Token<'_>> = vocabulary
            .iter()
            .map(|(text, &id)| Token {
                id,
                text,
                literal: added.contains_key(&id),
                special: added.get(&id).is_some_and(|a| a.special),
            })
            .collect();
        Ok(Tokenizer {
            pieces: Pieces::new(&spelling, &tokens)?,
            engine: Engine::Crate(Box::new(inner)),
            leading_spaces,
        })
    }

    /// The tokenizer of a file that our own byte-level BPE supports; None for every other file, a broken one included.
    fn read_own(json: &[u8]) -> Result<Option<Self>> {
        let file = std::str::from_utf8(json).ok();
        let file = file.and_then(|json| serde_json::from_str::<File<'_>>(json).ok());
        let Some(file) = file else {
            return Ok(None);
        };
        let decoder = serde_json::from_value::<DecoderWrapper>(file.decoder.clone()).ok();
        match decoder.map(|decoder| spelling(Some(&decoder))) {
            Some(Ok((Spelling::ByteLevel, 0))) => {}
            _ => return Ok(None),
        }
        let Some(own) = Bpe::new(&file) else {
            return Ok(None);
        };
        let mut tokens: Vec<Token<'_>> = own
            .tokens()
            .map(|(text, id)| Token {
                id,
                text,
                literal: false,
                special: false,
            })
            .collect();
        // These come after the tokens of the vocabulary, which may include them.
        tokens.extend(own.added().iter().map(|added| Token {
            id: added.id,
            text: &added.content,
            literal: true,
            special: added.special,
        }));
        let pieces = Pieces::new(&Spelling::ByteLevel, &tokens)?;
        Ok(Some(Tokenizer {
            pieces,
            engine: Engine::Own(Box::new(own)),
            leading_spaces: 0,
        }))
    }

    /// The tokenizer of a GGUF vocabulary.
    pub fn from_vocabulary(spec: &VocabularySpec) -> Result<Self> {
        let entries = || spec.tokens.iter().chain(&spec.merges);
        let bytes = entries().map(String::len).sum();
        let _vocabulary = Budget::vocabulary(bytes, entries().count()).set_aside()?;
        let vocabulary::Built {
            engine,
            spelling,
            leading_spaces,
        } = vocabulary::build(spec)?;
        let tokens: Vec<Token<'_>> = spec
            .tokens
            .iter()
            .enumerate()
            .map(|(i, text)| {
                let kind = spec.kind(i);
                Token {
                    id: i as u32,
                    text,
                    literal: kind.is_added(),
                    special: kind.is_special(),
                }
            })
            .collect();
        Ok(Tokenizer {
            pieces: Pieces::new(&spelling, &tokens)?,
            engine,
            leading_spaces,
        })
    }

    /// A `tokenizer.json` for this tokenizer, whatever its source.
    pub fn to_json(&self) -> Result<String> {
        let failed = |e: &dyn std::fmt::Display| err!(Internal, "writing tokenizer.json: {e}");
        match &self.engine {
            Engine::Own(own) => {
                let json = serde_json::to_string(&own.file()).map_err(|e| failed(&e))?;
                with_tokenizers("writing it", Budget::vocabulary(json.len(), 0), || {
                    let inner = read_foreign(json.as_bytes())?;
                    inner.to_string(false).map_err(|e| failed(&e))
                })
            }
            Engine::Crate(inner) => inner.to_string(false).map_err(|e| failed(&e)),
        }
    }

    /// The tokens of `text`. Special tokens spelled out in the text become those tokens. With `add_special`, the tokens that
    /// the model expects around every text (often a beginning-of-sequence token) are added.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encode = || {
            let inner = match &self.engine {
                Engine::Own(own) => return own.encode(text, add_special),
                Engine::Crate(inner) => inner,
            };
            let encoding = inner.encode_fast(text, add_special);
            Ok(encoding
                .map_err(|e| unencoded(text, &e))?
                .get_ids()
                .to_vec())
        };
        with_tokenizers("encoding with it", Budget::encoded(text.len()), encode)
    }

    /// The tokens of `text` as plain text: the name of a special token in it becomes ordinary tokens.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_around("", text, "")
    }

    /// Whether `token` is a mark, which grammars know by its name and not as text: a special token, or an added one with a name in angle
    /// brackets.
    #[cfg(feature = "grammar")]
    pub(super) fn is_mark(&self, token: u32) -> bool {
        self.is_special(token) || self.pieces.is_literal(token) && self.is_control(token)
    }

    /// Whether [`Tokenizer::encode_own`] gives tokens.
    #[cfg(feature = "grammar")]
    pub(super) fn has_own_encoder(&self) -> bool {
        matches!(self.engine, Engine::Own(_))
    }

    /// The tokens of `text` as plain text, by our own encoder; `None` for a tokenizer that it does not support.
    #[cfg(feature = "grammar")]
    pub(super) fn encode_own(&self, text: &str) -> Option<Vec<u32>> {
        match &self.engine {
            Engine::Own(own) => own.encode_plain(text).ok(),
            Engine::Crate(_) => None,
        }
    }

    /// The tokens of `text` as plain text. With `add_special`, as in [`Tokenizer::encode`], the tokens that the model expects around
    /// every text are added.
    pub fn encode_plain_with(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let mut tokens = self.encode_plain(text)?;
        if add_special {
            let (before, after) = self.around()?;
            tokens.splice(0..0, before);
            tokens.extend(after);
        }
        Ok(tokens)
    }

    /// The tokens that the model expects before and after every text.
    pub fn around(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        let (bare, mut whole) = (self.encode("a", false)?, self.encode("a", true)?);
        let at = whole.windows(bare.len().max(1)).position(|w| w == bare);
        let at = at.unwrap_or(whole.len() - bare.len());
        let after = whole.split_off(at + bare.len());
        whole.truncate(at);
        Ok((whole, after))
    }

    /// The tokens of one text in three parts, the middle one plain text: the result of [`Tokenizer::encode`] if the special
    /// tokens that `plain` names did not exist.
    pub fn encode_around(&self, before: &str, plain: &str, after: &str) -> Result<Vec<u32>> {
        with_tokenizers("encoding with it", Budget::SMALL, || {
            // Special tokens split a text, and the parts between them are encoded separately.
            let from = self.special_in(before).last().map_or(0, |s| s.end);
            let to = self
                .special_in(after)
                .first()
                .map_or(after.len(), |s| s.start);
            let len = before.len() - from + plain.len() + to;
            foreign(Budget::encoded(len), || {
                let middle = [&before[from..], plain, &after[..to]].concat();
                let mut tokens = self.encode(&before[..from], false)?;
                tokens.extend(self.encode_between(&middle, from > 0)?);
                tokens.extend(self.encode(&after[to..], false)?);
                Ok(tokens)
            })
        })
    }

    /// `text` split at the added tokens that occur in it, special ones and others, as far as they are found without
    /// normalizing it. The parts between them are encoded separately.
    pub(super) fn split(&self, text: &str) -> Vec<Piece> {
        let inner = match &self.engine {
            Engine::Own(own) => {
                let pieces = own.split(text).into_iter();
                return pieces
                    .map(|(range, token)| Piece { range, token })
                    .collect();
            }
            Engine::Crate(inner) => inner,
        };
        let added = inner.get_added_vocabulary();
        let pieces = added.extract_and_normalize(inner.get_normalizer(), text);
        let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let pieces = pieces.into_iter().map(|(_, (start, end), tokens)| Piece {
            range: start..end,
            token: tokens.as_ref().and_then(|t| t.first()).map(|t| t.id),
        });
        pieces.filter(|piece| !piece.range.is_empty()).collect()
    }

    /// The positions where names of special tokens begin in `text`.
    pub(super) fn special_names_in(&self, text: &str) -> Vec<usize> {
        let name = |range: &Range<usize>| {
            let name = &text[range.clone()];
            range.start + (name.len() - name.trim_start().len())
        };
        self.special_in(text).iter().map(name).collect()
    }

    /// The ranges of special tokens in `text`.
    fn special_in(&self, text: &str) -> Vec<Range<usize>> {
        let pieces = self.split(text).into_iter();
        let special = |piece: &Piece| piece.token.is_some_and(|token| self.is_special(token));
        pieces.filter(special).map(|piece| piece.range).collect()
    }

    /// The tokens of a text between special tokens, after one if `follows`: the steps of the crate `tokenizers`, without
    /// the search for special tokens.
    pub(super) fn encode_between(&self, text: &str, follows: bool) -> Result<Vec<u32>> {
        let inner = match &self.engine {
            Engine::Own(own) => {
                let tokens = own.encode_plain(text)?;
                match tokens.iter().find(|&&id| self.is_special(id)) {
                    Some(&id) => {
                        let spelled = String::from_utf8_lossy(self.pieces.get(id)?);
                        return Err(forged(id, &spelled));
                    }
                    None => return Ok(tokens),
                }
            }
            Engine::Crate(inner) => inner,
        };
        let (normalizer, model) = (inner.get_normalizer(), inner.get_model());
        let mut added = inner.get_added_vocabulary().clone();
        added.set_encode_special_tokens(true);
        let mut text = text.to_owned();
        if follows {
            // Whether a text gets a leading space may depend on the token before it: this token takes its place.
            let mut marks = (0..).map(|i| format!("<before {i}>"));
            let mark = marks
                .find(|mark| !text.contains(&**mark))
                .unwrap_or_default();
            let token = AddedToken::from(&*mark, false).normalized(false);
            added.add_tokens(&[token], model, normalizer);
            text.insert_str(0, &mark);
        }
        let failed = |e| unencoded(&text, &e);
        let mut pieces = added.extract_and_normalize(normalizer, &text);
        if let Some(steps) = inner.get_pre_tokenizer() {
            steps.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let tokenize = |piece: &NormalizedString| model.tokenize(piece.get());
        pieces.tokenize(tokenize).map_err(failed)?;
        let encoding = pieces
            .into_encoding(None, 0, OffsetType::Byte)
            .map_err(failed)?;
        let spelled = encoding
            .get_offsets()
            .iter()
            .map(|&(start, end)| text.get(start..end));
        for (&id, spelled) in encoding.get_ids().iter().zip(spelled) {
            // An unknown character's token is special too.
            if self.is_special(id) && spelled.map(str::as_bytes) == self.pieces.get(id).ok() {
                return Err(forged(id, spelled.unwrap_or_default()));
            }
        }
        Ok(encoding.get_ids()[usize::from(follows)..].to_vec())
    }

    /// Whether the name of a special token occurs in `text`.
    pub fn names_special(&self, text: &str) -> bool {
        let mut names = self
            .pieces
            .special()
            .filter_map(|name| std::str::from_utf8(name).ok());
        names.any(|name| !name.is_empty() && text.contains(name))
    }

    /// The text of `tokens`. Bytes that are not UTF-8 become U+FFFD; special tokens are left out if `skip_special`.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        let mut len = 0usize;
        for &id in tokens {
            len = len.saturating_add(self.pieces.get(id)?.len());
        }
        let _text = Budget::rewritten(len).set_aside()?;
        let mut bytes = Vec::with_capacity(len);
        for &id in tokens {
            let piece = self.pieces.get(id)?;
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(piece);
            }
        }
        let spaces = bytes
            .iter()
            .take(self.leading_spaces)
            .take_while(|&&b| b == b' ')
            .count();
        Ok(String::from_utf8_lossy(&bytes[spaces..]).into_owned())
    }

    /// The bytes of `token`, which need not be whole characters.
    pub fn bytes_of(&self, token: u32) -> Result<&[u8]> {
        self.pieces.get(token)
    }

    /// The text of `token` for messages, if the vocabulary has it.
    pub fn text_of(&self, token: u32) -> Option<String> {
        let bytes = self.bytes_of(token).ok()?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    /// The largest token id + 1. A model's embedding may have more rows; ids past its last row cannot be run.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The id of the token written `token` in the vocabulary (`<|im_end|>`, `Ġthe`).
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match &self.engine {
            Engine::Own(own) => own.id_of(token),
            Engine::Crate(inner) => inner.token_to_id(token),
        }
    }

    /// Whether `token` is a special token, which marks structure (end of text, turns) rather than text.
    pub fn is_special(&self, token: u32) -> bool {
        self.pieces.is_special(token)
    }

    /// The special tokens, in order of their ids.
    pub(super) fn special(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.vocab_size() as u32).filter(|&token| self.is_special(token))
    }

    /// Whether `token` marks structure: a special token, or one with a name in angle brackets, such as `<|end|>` in a vocabulary that types
    /// it as text.
    pub fn is_control(&self, token: u32) -> bool {
        let is_bracketed = |name: &[u8]| {
            let name = name.trim_ascii();
            name.len() > 2
                && name.starts_with(b"<")
                && name.ends_with(b">")
                && !name.iter().any(u8::is_ascii_whitespace)
        };
        self.is_special(token) || self.pieces.get(token).is_ok_and(is_bracketed)
    }

    pub(super) fn leading_spaces(&self) -> usize {
        self.leading_spaces
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids)", self.vocab_size())
    }
}

fn unencoded(text: &str, error: &tokenizers::Error) -> Error {
    err!(
        InvalidArgument,
        "encoding {} bytes of text: {error}",
        text.len()
    )
}

fn forged(id: u32, spelled: &str) -> Error {
    err!(
        Unsupported,
        "the tokenizer has no way to write '{spelled}' but special token {id}, which a user's words must not become"
    )
}

/// The tokenizer of the crate `tokenizers` for a `tokenizer.json`.
fn read_foreign(json: &[u8]) -> Result<tokenizers::Tokenizer> {
    let mut inner = tokenizers::Tokenizer::from_bytes(json)
        .map_err(|e| err!(CorruptFile, "not a tokenizer.json: {e}"))?;
    // Prompts are never truncated or padded, even if the file still has such settings from training.
    inner.with_padding(None);
    inner
        .with_truncation(None)
        .map_err(|e| err!(CorruptFile, "tokenizer.json: {e}"))?;
    Ok(inner)
}

/// Runs code of the crate `tokenizers`, which panics on inconsistent files, within a budget of memory.
pub(super) fn with_tokenizers<T>(
    action: &str,
    budget: Budget,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let caught = foreign(budget, || Ok(panics::caught(body)))?;
    caught.unwrap_or_else(|panic| {
        Err(err!(
            CorruptFile,
            "not a tokenizer.json that works: {action} ends with \"{panic}\""
        ))
    })
}

/// How the vocabulary's strings encode bytes, and how many leading spaces a text loses, according to the decoder of a tokenizer.json.
fn spelling(decoder: Option<&DecoderWrapper>) -> Result<(Spelling, usize)> {
    let steps = match decoder {
        None => bail!(
            Unsupported,
            "tokenizer.json has no decoder, so token strings cannot be told from text; ByteLevel or sentencepiece-like decoders work"
        ),
        Some(DecoderWrapper::Sequence(steps)) => steps.get_decoders(),
        Some(one) => std::slice::from_ref(one),
    };
    let mut byte_level = false;
    let (mut space, mut bytes, mut leading) = (None, false, 0);
    for step in steps {
        match step {
            DecoderWrapper::ByteLevel(_) => byte_level = true,
            DecoderWrapper::Fuse(_) => {}
            DecoderWrapper::ByteFallback(_) => bytes = true,
            DecoderWrapper::Strip(strip) if strip.content == ' ' && strip.stop == 0 => {
                leading = strip.start;
            }
            DecoderWrapper::Metaspace(meta) => {
                space = Some(meta.get_replacement());
                leading = usize::from(meta.get_prepend_scheme() != PrependScheme::Never);
            }
            DecoderWrapper::Replace(_) => space = Some(replaced_by_space(step)?),
            other => bail!(
                Unsupported,
                "tokenizer.json has decoder {}; ByteLevel and sequences of Replace, ByteFallback, Fuse, Strip and Metaspace work",
                name_of(other)
            ),
        }
    }
    if byte_level && (space.is_some() || bytes) {
        bail!(
            Unsupported,
            "tokenizer.json mixes a ByteLevel decoder with sentencepiece-like steps"
        );
    }
    let spelling = if byte_level {
        Spelling::ByteLevel
    } else {
        Spelling::Plain { space, bytes }
    };
    Ok((spelling, leading))
}

/// The character that a Replace decoder turns into a space.
fn replaced_by_space(step: &DecoderWrapper) -> Result<char> {
    let json =
        serde_json::to_value(step).map_err(|e| err!(CorruptFile, "tokenizer.json decoder: {e}"))?;
    let pattern = json["pattern"]["String"].as_str().unwrap_or_default();
    let mut chars = pattern.chars();
    match (chars.next(), chars.next(), json["content"].as_str()) {
        (Some(c), None, Some(" ")) => Ok(c),
        _ => bail!(
            Unsupported,
            "tokenizer.json has decoder {json}; only replacing one character by a space works"
        ),
    }
}

fn name_of(decoder: &DecoderWrapper) -> String {
    serde_json::to_value(decoder)
        .ok()
        .and_then(|v| v["type"].as_str().map(str::to_owned))
        .unwrap_or_else(|| "of unknown type".to_owned())
}
