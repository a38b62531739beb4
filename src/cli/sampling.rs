//! The arguments of `run` and `chat` that say how an answer is chosen and when it ends.

use NVFP4::session::{GenerateOptions, SamplingOptions};

#[derive(clap::Args)]
pub(super) struct SamplingArgs {
    /// Stop after this many tokens
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// Randomness; 0 takes the likeliest token each time
    #[arg(long, default_value_t = 0.0)]
    temp: f32,
    /// Choose among this many likeliest tokens; 0 means all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Choose among the likeliest tokens that together have this probability; 0 takes the likeliest
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Leave out tokens less likely than this part of the likeliest one
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Above 1, tokens that occurred already become less likely
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// The same seed gives the same answer
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Stop before this text, which may name special tokens; may be given several times
    #[arg(long)]
    stop: Vec<String>,
    /// Go on past the tokens that end a text
    #[arg(long)]
    ignore_stops: bool,
    /// Compute every token from the whole sequence, without the cache, for comparison
    #[arg(long)]
    replay: bool,
}

impl SamplingArgs {
    pub(super) fn options(&self) -> GenerateOptions {
        GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: SamplingOptions {
                temperature: self.temp,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                seed: self.seed,
            },
            stop_strings: self.stop.clone(),
            stop_tokens: Vec::new(),
            ignore_model_stops: self.ignore_stops,
            replay: self.replay,
            log_probabilities: false,
        }
    }
}
