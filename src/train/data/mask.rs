//! A view of a document with its weight per token, to inspect what is learned.

use std::sync::Arc;

use serde::Serialize;

use super::read::Data;
use crate::base::Result;
use crate::base::error::err;
use crate::text::{Detokenizer, Tokenizer};

/// The tokens of a document, with the text and the weight of each.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mask {
    /// Path of its file. Bytes that are not UTF-8 are U+FFFD.
    pub file: String,
    /// Its first line, from 1.
    pub line: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The text that each token completes. Concatenated they are the text of the document.
    pub pieces: Vec<String>,
    /// Whether each token is a special token.
    pub special: Vec<bool>,
    /// Whether each token is learned, that is, predicted from those before it. The first never is.
    pub learned: Vec<bool>,
    /// Weight of each token in the loss: 0 if it is not learned, else 1 unless the row says otherwise.
    pub weights: Vec<f32>,
}

/// A run of tokens with the same weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// Weight of its tokens; 0 if they are not learned.
    pub weight: f32,
    /// Texts, and names of special tokens, which the flag marks.
    pub parts: Vec<(String, bool)>,
}

impl Data {
    /// The document `index`, in the order of the files.
    pub fn mask(&self, index: usize, tokenizer: &Arc<Tokenizer>) -> Result<Mask> {
        let count = self.documents().len();
        let document = self.documents().get(index).ok_or_else(|| {
            err!(
                InvalidArgument,
                "document {index} of {count}; they are numbered from 0"
            )
        })?;
        let (file, line) = document.origin;
        let path = &self.report().files[file].path;
        let mut text = Detokenizer::new(tokenizer).with_special(true);
        let tokens = &document.tokens;
        let mut pieces = tokens
            .iter()
            .map(|&token| text.push(token))
            .collect::<Result<Vec<_>>>()?;
        if let Some(last) = pieces.last_mut() {
            last.push_str(&text.finish());
        }
        let weight = |i| if i == 0 { 0.0 } else { document.weight(i) };
        let weights: Vec<f32> = (0..tokens.len()).map(weight).collect();
        Ok(Mask {
            file: path.display().to_string(),
            line,
            special: tokens.iter().map(|&t| tokenizer.is_special(t)).collect(),
            learned: weights.iter().map(|&weight| weight > 0.0).collect(),
            tokens: tokens.clone(),
            pieces,
            weights,
        })
    }
}

impl Mask {
    /// Number of learned tokens, and the sum of their weights.
    pub fn targets(&self) -> (usize, f64) {
        let learned = self.learned.iter().filter(|learned| **learned);
        let weights = self.weights.iter().map(|&weight| f64::from(weight));
        (learned.count(), weights.sum())
    }

    /// The spans of the document, in order.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for (i, &weight) in self.weights.iter().enumerate() {
            match spans.last() {
                Some(span) if span.weight == weight => {}
                _ => spans.push(Span {
                    weight,
                    parts: Vec::new(),
                }),
            }
            let Some(span) = spans.last_mut() else {
                continue;
            };
            let (piece, special) = (&self.pieces[i], self.special[i]);
            match span.parts.last_mut() {
                Some((text, false)) if !special => text.push_str(piece),
                _ if piece.is_empty() => {}
                _ => span.parts.push((piece.clone(), special)),
            }
        }
        spans
    }
}
