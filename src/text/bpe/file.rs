//! A `tokenizer.json` of the common kind, parsed without copying each of its hundred thousands of strings. A file that the crate
//! `tokenizers` might read differently fails here, and is left to the crate.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use super::added::AddedToken;

/// The whole file.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(in crate::text) struct File<'a> {
    pub(in crate::text) version: String,
    pub(in crate::text) truncation: Value,
    pub(in crate::text) padding: Value,
    pub(in crate::text) added_tokens: Vec<AddedToken>,
    pub(in crate::text) normalizer: Value,
    pub(in crate::text) pre_tokenizer: Value,
    pub(in crate::text) post_processor: Value,
    pub(in crate::text) decoder: Value,
    #[serde(borrow)]
    pub(in crate::text) model: Model<'a>,
}

/// Its model.
#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(in crate::text) struct Model<'a> {
    #[serde(rename = "type")]
    pub(in crate::text) kind: String,
    #[serde(default)]
    pub(in crate::text) dropout: Option<f32>,
    #[serde(default)]
    pub(in crate::text) unk_token: Option<String>,
    #[serde(default)]
    pub(in crate::text) continuing_subword_prefix: Option<String>,
    #[serde(default)]
    pub(in crate::text) end_of_word_suffix: Option<String>,
    #[serde(default)]
    pub(in crate::text) fuse_unk: bool,
    #[serde(default)]
    pub(in crate::text) byte_fallback: bool,
    #[serde(default)]
    pub(in crate::text) ignore_merges: bool,
    #[serde(borrow)]
    pub(in crate::text) vocab: Tokens<'a>,
    #[serde(borrow)]
    pub(in crate::text) merges: Pairs<'a>,
}

/// Spellings and ids, as an object of JSON.
#[derive(Default)]
pub(in crate::text) struct Tokens<'a>(pub(in crate::text) Vec<(Cow<'a, str>, u32)>);

/// Merges, as a list of JSON: of pairs, or of texts with a space between two spellings.
#[derive(Default)]
pub(in crate::text) struct Pairs<'a>(pub(in crate::text) Vec<(Cow<'a, str>, Cow<'a, str>)>);

/// A string borrowed from the file, unless it has escapes there.
struct FileString<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for FileString<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match deserializer.deserialize_str(MergeVisitor)? {
            Merge::Text(text) => Ok(FileString(text)),
            Merge::Pair(..) => Err(de::Error::custom("a pair is no string")),
        }
    }
}

enum Merge<'a> {
    Text(Cow<'a, str>),
    Pair(Cow<'a, str>, Cow<'a, str>),
}

impl<'de> Deserialize<'de> for Merge<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or two")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Merge::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Merge::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut next = || list.next_element::<FileString<'de>>();
        match (next()?, next()?, next()?) {
            (Some(left), Some(right), None) => Ok(Merge::Pair(left.0, right.0)),
            _ => Err(de::Error::custom("a merge is of two tokens")),
        }
    }
}

/// The two tokens of a merge in one text.
fn halves<'a>(text: Cow<'a, str>) -> Option<(Cow<'a, str>, Cow<'a, str>)> {
    // The crate takes such a line for the header of a merges.txt.
    if text.starts_with("#version") {
        return None;
    }
    let at = text.find(' ').filter(|&at| !text[at + 1..].contains(' '))?;
    Some(match text {
        Cow::Borrowed(text) => (Cow::Borrowed(&text[..at]), Cow::Borrowed(&text[at + 1..])),
        Cow::Owned(text) => (
            Cow::Owned(text[..at].to_owned()),
            Cow::Owned(text[at + 1..].to_owned()),
        ),
    })
}

impl<'de: 'a, 'a> Deserialize<'de> for Tokens<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokensVisitor;
        impl<'de> Visitor<'de> for TokensVisitor {
            type Value = Tokens<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tokens = Vec::new();
                while let Some((text, id)) = map.next_entry::<FileString<'de>, u32>()? {
                    tokens.push((text.0, id));
                }
                Ok(Tokens(tokens))
            }
        }
        deserializer.deserialize_map(TokensVisitor)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                let mut texts = 0;
                while let Some(merge) = list.next_element()? {
                    pairs.push(match merge {
                        Merge::Pair(left, right) => (left, right),
                        Merge::Text(text) => {
                            texts += 1;
                            halves(text).ok_or_else(|| de::Error::custom("not two tokens"))?
                        }
                    });
                }
                if texts != 0 && texts != pairs.len() {
                    return Err(de::Error::custom("merges of two kinds"));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_seq(PairsVisitor)
    }
}

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, id)| (text, id)))
    }
}

impl Serialize for Pairs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}
