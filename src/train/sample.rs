//! Samples: a model under training continues prompts, so that its user can see its progress.

use super::trainer::Trainer;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::training::SourceText;
use crate::text::{Message, Prompt};

/// Prompts that are sampled from time to time, each from its beginning.
pub struct Samples {
    prompts: Vec<(String, Vec<u32>)>,
    tokens: usize,
}

impl Samples {
    /// Samples of these prompts, each with up to `tokens` new tokens. If the model has a chat template, a prompt is a question in a
    /// conversation; otherwise it is a text to continue.
    pub fn new(prompts: &[String], tokens: usize, text: &SourceText) -> Result<Samples> {
        let encoded = prompts.iter().map(|prompt| {
            let tokens = match &text.template {
                Some(template) => {
                    let asked = [Message::new("user", prompt)];
                    Prompt::new(
                        template,
                        &text.tokenizer,
                        &asked,
                        true,
                        &serde_json::Map::new(),
                    )?
                    .tokens(&text.tokenizer, false)?
                }
                None => text.tokenizer.encode(prompt, true)?,
            };
            if tokens.is_empty() {
                bail!(InvalidArgument, "a prompt to continue has no token");
            }
            Ok((prompt.clone(), tokens))
        });
        Ok(Samples {
            prompts: encoded.collect::<Result<_>>()?,
            tokens,
        })
    }

    /// Whether there are no prompts.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    /// Refuses prompts longer than a context of `positions`.
    pub(super) fn check(&self, positions: usize) -> Result<()> {
        let mut prompts = self.prompts.iter();
        match prompts.find(|(_, tokens)| tokens.len() > positions) {
            None => Ok(()),
            Some((prompt, tokens)) => bail!(
                InvalidArgument,
                "the prompt {prompt:?} has {} tokens, and the model's context has {positions} positions; give a shorter one",
                tokens.len()
            ),
        }
    }

    /// Greedy answers to all prompts, within the context, by the delivered weights. Each token takes a pass over all tokens before it.
    pub fn answers(&self, trainer: &mut Trainer, text: &SourceText) -> Result<Vec<(&str, String)>> {
        let mut answers = Vec::new();
        for (prompt, tokens) in &self.prompts {
            let mut tokens = tokens.clone();
            let asked = tokens.len();
            let positions = trainer.spec().max_positions;
            while tokens.len() < asked + self.tokens && tokens.len() <= positions {
                let next = trainer.next_token(&tokens, true)?;
                if text.stop_tokens.contains(&next) {
                    break;
                }
                tokens.push(next);
            }
            // A model has rows for tokens that its tokenizer does not know, and may choose them before it has learned anything.
            let known: Vec<u32> = tokens[asked..]
                .iter()
                .copied()
                .filter(|&t| text.tokenizer.bytes_of(t).is_ok())
                .collect();
            answers.push((prompt.as_str(), text.tokenizer.decode(&known, true)?));
        }
        Ok(answers)
    }
}
