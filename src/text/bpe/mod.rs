//! Byte-level BPE, the tokenizer of nearly all models. Loads a file in a fraction of the time of the crate `tokenizers`, and encodes many
//! times as much text per second, with the same tokens.
//!
//! Only exactly known settings are supported: certain patterns that split text into words, NFC or no normalizer, merges
//! without dropout or fallback. Everything else is left to the crate.

mod added;
mod classes;
mod file;
mod merge;
mod nfc;
mod split;
mod vocabulary;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Mutex;

use serde_json::{Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Encoding, PaddingParams, PostProcessor, PostProcessorWrapper, TruncationParams};

use self::added::Finder;
use self::classes::Classes;
use self::merge::{Memory, Merges, Steps};
use self::split::{Kind, WordPattern};
use self::vocabulary::Vocabulary;
use super::pieces::byte_of;
use crate::base::Result;
use crate::base::error::bail;

pub(super) use self::added::AddedToken;
pub(super) use self::file::{File, Model, Pairs, Tokens};
pub(super) use self::split::patterns;

/// The scratch memory of a thread that encodes.
#[derive(Default)]
struct EncodeScratch {
    memory: Memory,
    steps: Steps,
}

/// Bytes of the longest text: positions in it, after NFC may have made it longer, fit in 32 bits.
const MAX_TEXT: usize = 1 << 30;
/// The number of scratch memories kept for reuse.
const ROOMS: usize = 8;

/// A byte-level BPE tokenizer.
pub(super) struct Bpe {
    vocabulary: Vocabulary,
    merges: Merges,
    /// GPT-2's character for each byte.
    alphabet: [char; 256],
    added: Vec<AddedToken>,
    /// Added tokens that are searched for in the text before normalization.
    exact: Finder,
    /// Added tokens that are searched for in the normalized text.
    normalized: Finder,
    nfc: bool,
    steps: Vec<WordPattern>,
    prefix_space: bool,
    /// The tokens that the model expects around every text.
    around: (Vec<u32>, Vec<u32>),
    /// The file without tokens and merges.
    settings: File<'static>,
    rooms: Mutex<Vec<EncodeScratch>>,
}

impl Bpe {
    /// The tokenizer of `file`, if it is of the supported kind and consistent.
    pub(super) fn new(file: &File<'_>) -> Option<Bpe> {
        let model = &file.model;
        let plain = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
        let known = file.version == "1.0"
            && model.kind == "BPE"
            && model.dropout.unwrap_or_default() == 0.0
            && plain(&model.continuing_subword_prefix)
            && plain(&model.end_of_word_suffix)
            && !model.byte_fallback
            && serde_json::from_value::<Option<TruncationParams>>(file.truncation.clone()).is_ok()
            && serde_json::from_value::<Option<PaddingParams>>(file.padding.clone()).is_ok();
        if !known {
            return None;
        }
        let nfc = normalizer(&file.normalizer)?;
        let (steps, prefix_space) = pre_tokenizer(&file.pre_tokenizer)?;
        let around = around(&file.post_processor)?;
        // Created now, while memory is set aside, rather than at the first word.
        Classes::get();

        let tokens = model.vocab.0.iter().map(|(text, id)| (&**text, *id));
        let vocabulary = Vocabulary::new(tokens)?;
        let mut alphabet = ['\0'; 256];
        for c in ('\0'..='\u{1ff}').filter(|&c| byte_of(c).is_some()) {
            alphabet[byte_of(c).unwrap_or_default() as usize] = c;
        }
        let bytes = alphabet.map(|c| vocabulary.id(c.encode_utf8(&mut [0; 4])));
        if model.unk_token.is_some() && bytes.contains(&None) {
            return None;
        }
        let mut merges = Merges::new(bytes, model.merges.0.len());
        let mut joined = String::new();
        for (left, right) in &model.merges.0 {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let id = |text| vocabulary.id(text);
            merges.push(id(left)?, id(right)?, id(&joined)?);
        }

        let added = added(&file.added_tokens, &vocabulary, nfc)?;
        let patterns = |normalized: bool| {
            let chosen = added.iter().enumerate();
            let chosen = chosen.filter(|(_, token)| token.normalized == normalized);
            let text = |token: &AddedToken| match normalized && nfc {
                true => nfc::nfc(&token.content).into_owned(),
                false => token.content.clone(),
            };
            let patterns: Vec<_> = chosen.map(|(i, token)| (i, text(token))).collect();
            Finder::new(&patterns)
        };
        Some(Bpe {
            exact: patterns(false)?,
            normalized: patterns(true)?,
            vocabulary,
            merges,
            alphabet,
            added,
            nfc,
            steps,
            prefix_space,
            around,
            settings: file.settings(),
            rooms: Mutex::default(),
        })
    }

    /// The `tokenizer.json` of this tokenizer.
    pub(super) fn file(&self) -> File<'_> {
        let mut file = self.settings.settings();
        let mut texts = Vec::new();
        for (text, id) in self.vocabulary.iter() {
            let id = id as usize;
            texts.resize(texts.len().max(id + 1), "");
            texts[id] = text;
        }
        let tokens = self.vocabulary.iter();
        let tokens = tokens.map(|(text, id)| (Cow::Borrowed(text), id));
        file.model.vocab = Tokens(tokens.collect());
        let text = |id: u32| Cow::Borrowed(texts[id as usize]);
        let pairs = self.merges.pairs().into_iter();
        file.model.merges = Pairs(pairs.map(|(l, r)| (text(l), text(r))).collect());
        file.added_tokens = self.added.clone();
        // Tokens outside the vocabulary get their ids in this order.
        file.added_tokens.sort_by_key(|token| token.id);
        file
    }

    /// The tokens of the model, by their text.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (&str, u32)> {
        self.vocabulary.iter()
    }

    /// The added tokens, some of which are in the model's vocabulary too.
    pub(super) fn added(&self) -> &[AddedToken] {
        &self.added
    }

    /// The id of the token written `token`.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        let added = self.added.iter().find(|added| added.content == token);
        added
            .map(|added| added.id)
            .or_else(|| self.vocabulary.id(token))
    }

    /// Splits `text` at its added tokens, and returns their ids. Tokens that are searched for in normalized text are found only without a
    /// normalizer; otherwise they stay within the text.
    pub(super) fn split(&self, text: &str) -> Vec<(Range<usize>, Option<u32>)> {
        let mut pieces = Vec::new();
        for (range, token) in self.exact.divide(&self.added, text, false) {
            if token.is_some() || self.nfc {
                pieces.push((range, token));
                continue;
            }
            let start = range.start;
            let within = self.normalized.divide(&self.added, &text[range], false);
            let moved = |range: Range<usize>| start + range.start..start + range.end;
            pieces.extend(
                within
                    .into_iter()
                    .map(|(range, token)| (moved(range), token)),
            );
        }
        let id = |token: Option<usize>| token.map(|token| self.added[token].id);
        pieces
            .into_iter()
            .map(|(range, token)| (range, id(token)))
            .collect()
    }

    /// The tokens of `text`. With `add_special`, also those that the model expects around it.
    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let mut tokens = Vec::with_capacity(text.len() / 4 + 4);
        if add_special {
            tokens.extend(&self.around.0);
        }
        self.append(text, false, &mut tokens)?;
        if add_special {
            tokens.extend(&self.around.1);
        }
        Ok(tokens)
    }

    /// The tokens of `text` as plain text, in which no special tokens are recognised.
    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::with_capacity(text.len() / 4);
        self.append(text, true, &mut tokens)?;
        Ok(tokens)
    }

    fn append(&self, text: &str, plain: bool, out: &mut Vec<u32>) -> Result<()> {
        if text.len() > MAX_TEXT {
            bail!(
                InvalidArgument,
                "the text has {} bytes; {MAX_TEXT} are the most that become tokens in one call",
                text.len()
            );
        }
        // No thread waits for scratch memory, so that the child of a fork never waits for a thread that it does not have.
        let room = self.rooms.try_lock().ok().and_then(|mut r| r.pop());
        let mut room = room.unwrap_or_default();
        for (range, token) in self.exact.divide(&self.added, text, plain) {
            match token {
                Some(token) => out.push(self.added[token].id),
                None => self.append_normalized(&text[range], plain, &mut room, out),
            }
        }
        room.steps.trim();
        if let Ok(mut rooms) = self.rooms.try_lock()
            && rooms.len() < ROOMS
        {
            rooms.push(room);
        }
        Ok(())
    }

    fn append_normalized(
        &self,
        text: &str,
        plain: bool,
        room: &mut EncodeScratch,
        out: &mut Vec<u32>,
    ) {
        let text = match self.nfc {
            true => nfc::nfc(text),
            false => Cow::Borrowed(text),
        };
        for (range, token) in self.normalized.divide(&self.added, &text, plain) {
            match token {
                Some(token) => out.push(self.added[token].id),
                None => self.append_words(&text[range], room, out),
            }
        }
    }

    fn append_words(&self, text: &str, room: &mut EncodeScratch, out: &mut Vec<u32>) {
        let text = match self.prefix_space && !text.starts_with(' ') {
            true => Cow::Owned(format!(" {text}")),
            false => Cow::Borrowed(text),
        };
        let EncodeScratch { memory, steps } = room;
        split::words(&text, &self.steps, &mut |word| {
            memory.tokens(word.as_bytes(), out, |out| self.merge(word, steps, out));
        });
    }

    fn merge(&self, word: &str, steps: &mut Steps, out: &mut Vec<u32>) {
        if self.settings.model.ignore_merges {
            let spelling: String = word.bytes().map(|b| self.alphabet[b as usize]).collect();
            if let Some(token) = self.vocabulary.id(&spelling) {
                out.push(token);
                return;
            }
        }
        self.merges.tokens(word.as_bytes(), steps, out);
    }
}

impl File<'_> {
    /// The file without its tokens and merges.
    fn settings(&self) -> File<'static> {
        File {
            version: self.version.clone(),
            truncation: Value::Null,
            padding: Value::Null,
            added_tokens: Vec::new(),
            normalizer: self.normalizer.clone(),
            pre_tokenizer: self.pre_tokenizer.clone(),
            post_processor: self.post_processor.clone(),
            decoder: self.decoder.clone(),
            model: Model {
                kind: self.model.kind.clone(),
                dropout: self.model.dropout,
                unk_token: self.model.unk_token.clone(),
                continuing_subword_prefix: self.model.continuing_subword_prefix.clone(),
                end_of_word_suffix: self.model.end_of_word_suffix.clone(),
                fuse_unk: self.model.fuse_unk,
                byte_fallback: self.model.byte_fallback,
                ignore_merges: self.model.ignore_merges,
                vocab: Tokens::default(),
                merges: Pairs::default(),
            },
        }
    }
}

/// Whether the normalizer is NFC rather than none; None for any other.
fn normalizer(value: &Value) -> Option<bool> {
    let sequence = |inner: Value| json!({"type": "Sequence", "normalizers": inner});
    if value.is_null() || *value == sequence(json!([])) {
        return Some(false);
    }
    let nfc = json!({"type": "NFC"});
    (*value == nfc || *value == sequence(json!([nfc]))).then_some(true)
}

/// The steps of a pre-tokenizer that ends with the byte level, and whether each text gets a leading space.
fn pre_tokenizer(value: &Value) -> Option<(Vec<WordPattern>, bool)> {
    let (splits, last) = match value["pretokenizers"].as_array() {
        Some(list) if value["type"] == "Sequence" && value.as_object()?.len() == 2 => {
            let (last, splits) = list.split_last()?;
            (splits, last)
        }
        _ => (&[][..], value),
    };
    let last: ByteLevel = serde_json::from_value(last.clone()).ok()?;
    let mut steps: Vec<WordPattern> = splits.iter().map(split).collect::<Option<_>>()?;
    // After other steps, each of their words would get the space.
    if last.add_prefix_space && !steps.is_empty() {
        return None;
    }
    if last.use_regex {
        steps.push(WordPattern::Gpt2);
    }
    Some((steps, last.add_prefix_space))
}

fn split(value: &Value) -> Option<WordPattern> {
    if *value == json!({"type": "Digits", "individual_digits": true}) {
        return Some(WordPattern::Runs(Kind::Numeric, 1, 1));
    }
    let pattern = value["pattern"]["Regex"].as_str()?;
    let step = WordPattern::of(pattern)?;
    let written = |behavior: &str, invert: bool| {
        let pattern = json!({"Regex": pattern});
        *value
            == json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
    };
    // Removing text that does not match has no effect if everything matches.
    let isolated = written("Isolated", false) || (step.matches_all() && written("Removed", true));
    isolated.then_some(step)
}

/// The tokens that a post-processor adds around a text, found by running it on one.
fn around(value: &Value) -> Option<(Vec<u32>, Vec<u32>)> {
    if value.is_null() {
        return Some(Default::default());
    }
    const TEXT: u32 = u32::MAX;
    let processor: PostProcessorWrapper = serde_json::from_value(value.clone()).ok()?;
    let processed = |add_special: bool| {
        let text = tokenizers::Token::new(TEXT, "a".to_owned(), (0, 1));
        let text = Encoding::from_tokens(vec![text], 0);
        let made = processor.process(text, None, add_special).ok()?;
        Some(made.get_ids().to_vec())
    };
    if processed(false)? != [TEXT] {
        return None;
    }
    let made = processed(true)?;
    let mut parts = made.split(|&id| id == TEXT);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(after), None) => Some((before.to_vec(), after.to_vec())),
        _ => None,
    }
}

/// The added tokens of a file, special ones first, with their ids: those of the vocabulary, or the next ones.
fn added(tokens: &[AddedToken], vocabulary: &Vocabulary, nfc: bool) -> Option<Vec<AddedToken>> {
    let mut next = vocabulary.len() as u32;
    let mut added = tokens.to_vec();
    for token in &mut added {
        if token.content.is_empty()
            || token.single_word
            || (token.special && token.normalized && nfc)
        {
            return None;
        }
        token.id = vocabulary.id(&token.content).unwrap_or_else(|| {
            next += 1;
            next - 1
        });
    }
    added.sort_by_key(|token| !token.special);
    let mut names: Vec<&str> = added.iter().map(|token| &*token.content).collect();
    names.sort_unstable();
    let distinct = names.windows(2).all(|pair| pair[0] != pair[1]);
    let new = vocabulary.len() as u32..next;
    let free = new.is_empty() || vocabulary.iter().all(|(_, id)| !new.contains(&id));
    (distinct && free).then_some(added)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden() -> Value {
        let json = include_str!("../../../tests/golden/text/tokenizer.json");
        serde_json::from_str(json).unwrap()
    }

    fn read(json: &Value) -> Option<Bpe> {
        let json = json.to_string();
        Bpe::new(&serde_json::from_str(&json).ok()?)
    }

    #[test]
    fn a_tokenizer_writes_the_file_that_it_was_read_from() {
        let golden = golden();
        let own = read(&golden).unwrap();
        assert_eq!(serde_json::to_value(own.file()).unwrap(), golden);
    }

    #[test]
    fn unknown_settings_are_left_to_the_crate() {
        let cut = golden()["pre_tokenizer"]["pretokenizers"][0].clone();
        let changes: [(&str, Value); 17] = [
            ("/version", json!("2.0")),
            ("/normalizer", json!({"type": "NFKC"})),
            ("/pre_tokenizer", Value::Null),
            ("/pre_tokenizer", json!({"type": "Whitespace"})),
            ("/pre_tokenizer/pretokenizers", json!([cut])),
            ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("a+")),
            ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")),
            (
                "/pre_tokenizer/pretokenizers/1/add_prefix_space",
                json!(true),
            ),
            ("/post_processor", json!({"type": "none"})),
            ("/model/type", json!("Unigram")),
            ("/model/dropout", json!(0.1)),
            ("/model/byte_fallback", json!(true)),
            ("/model/end_of_word_suffix", json!("</w>")),
            ("/model/vocab/a", json!(0)),
            ("/model/merges/0", json!(["a", "nothing"])),
            ("/added_tokens/0/single_word", json!(true)),
            ("/added_tokens/0/normalized", json!(true)),
        ];
        for (place, value) in changes {
            let mut file = golden();
            *file.pointer_mut(place).unwrap() = value;
            assert!(read(&file).is_none(), "{place}");
        }
    }

    #[test]
    fn the_next_ids_go_to_tokens_that_the_vocabulary_lacks() {
        let mut file = golden();
        let size = file["model"]["vocab"].as_object().unwrap().len() as u32;
        file["added_tokens"][2]["content"] = json!("Ġt");
        let own = read(&file).unwrap();
        let inner = tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap();
        for token in own.added() {
            assert_eq!(Some(token.id), inner.token_to_id(&token.content));
        }
        assert_eq!(own.id_of("</think>"), Some(size + 3));
    }
}
