//! How a generation is asked for, and what may end it.

use serde::Serialize;

use crate::engine::Served;
use crate::model::SamplingOptions;

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most. With the default, [`usize::MAX`], the text ends when the room is used up that the context has for
    /// it at the beginning; an answer in a chat may make more by forgetting old turns.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Tokens that end the text, besides the model's own. The one that did is not part of the sequence.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the text, and are not part of it. Their tokens stay in the sequence. A special token that is
    /// generated, though it gives no text, counts for a stop string with its name in it.
    pub stop_strings: Vec<String>,
    /// Takes the model's own stop tokens like any other.
    pub ignore_model_stops: bool,
    /// Computes every token from the whole sequence, without cached keys and values; slow, for comparison.
    pub replay: bool,
    /// Tells each token's probability, for which the logits of each come to the host.
    pub log_probabilities: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: usize::MAX,
            sampling: SamplingOptions::default(),
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            ignore_model_stops: false,
            replay: false,
            log_probabilities: false,
        }
    }
}

impl GenerateOptions {
    /// The defaults, with the sampling that the model's maker asks for.
    pub fn of(model: &Served) -> Self {
        GenerateOptions {
            sampling: model.sampling().clone(),
            ..Self::default()
        }
    }
}

/// What ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// A stop string.
    StopString,
    /// The most tokens that were allowed.
    Length,
    /// The context is full, and nothing may be or is left to be evicted.
    Context,
    /// The callback, or the end of the [call](crate::base::call) in which the text was made.
    Cancelled,
}
