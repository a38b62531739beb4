//! Arguments of `run` and `chat` for sampling, for the form of an answer and for its end.

use std::ffi::OsString;
use std::fmt::Display;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::engine::Served;
use NVFP4::model::SamplingOptions;
use NVFP4::session::{Dry, GenerateOptions, LogitAdjustments};

use super::grammar::GrammarArgs;

#[derive(clap::Args)]
pub(super) struct SamplingArgs {
    /// Stop after this many tokens; without it an answer may fill the context
    #[arg(long)]
    max_tokens: Option<usize>,
    /// Randomness; 0 is greedy. Without this and the four below, the model's recommended settings
    #[arg(long, visible_alias = "temperature")]
    temp: Option<f32>,
    /// Sample from this many of the most probable tokens; 0 means all
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the fewest of the most probable tokens that together have this probability; 0 is greedy
    #[arg(long)]
    top_p: Option<f32>,
    /// Leave out tokens less probable than this fraction of the most probable one
    #[arg(long)]
    min_p: Option<f32>,
    /// Above 1, tokens that have occurred already become less probable
    #[arg(long)]
    repetition_penalty: Option<f32>,
    #[command(flatten)]
    adjustments: AdjustmentArgs,
    /// The same seed gives the same answer; without it each answer has a new one
    #[arg(long)]
    seed: Option<u64>,
    /// Stop before this text, which may name special tokens; may be given several times
    #[arg(long)]
    stop: Vec<String>,
    /// Go on past the model's stop tokens
    #[arg(long)]
    ignore_stops: bool,
    /// Draft at most this many tokens a step, which one pass of the model verifies; 0 drafts none. By default a model with a drafter
    /// drafts while that is faster. The answer is the same, on a GPU but for rounding
    #[arg(long)]
    drafts: Option<usize>,
    /// Draft at most this many tokens a step, up to 16, where the last tokens have occurred before: those that followed there. It pays where
    /// the answer quotes the prompt. The answer is the same, on a GPU but for rounding
    #[arg(long, default_value_t = 0)]
    prompt_lookup: usize,
    /// A smaller model with the same tokenizer, loaded on the same device, that guesses tokens for the model to verify, while that is faster;
    /// with --drafts N a step guesses N tokens. The answer is the same, on a GPU but for rounding
    #[arg(long, value_name = "MODEL", conflicts_with = "prompt_lookup")]
    pub(super) draft_model: Option<OsString>,
    /// Compute every token from the whole sequence, without the KV cache, for comparison
    #[arg(long)]
    replay: bool,
    #[command(flatten)]
    grammar: GrammarArgs,
}

#[derive(clap::Args)]
struct AdjustmentArgs {
    /// Tokens at the end that the repetition penalty counts, the prompt's among them; 0 means all
    #[arg(long, default_value_t = 0)]
    repetition_window: usize,
    /// Do not end the answer before this many tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    min_tokens: usize,
    /// Never repeat this many tokens in a row, those of the prompt included; 0 means off
    #[arg(long, value_name = "N", default_value_t = 0)]
    no_repeat_ngram_size: usize,
    /// Strength of the DRY penalty on tokens that would extend a repetition, such as 0.8; 0 means off
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    dry_multiplier: f32,
    /// Growth of the DRY penalty with each token of the repetition [default: 1.75]
    #[arg(long, value_name = "X")]
    dry_base: Option<f32>,
    /// Length in tokens of the shortest repetition with a DRY penalty [default: 2]
    #[arg(long, value_name = "N")]
    dry_allowed_length: Option<usize>,
    /// Tokens at the end in which DRY finds repetitions; 0 means all
    #[arg(long, value_name = "N", default_value_t = 0)]
    dry_window: usize,
    /// A text that no repetition contains for DRY; may be given several times, and 'none' means none. By default newline, colon, quotation
    /// mark and asterisk
    #[arg(long, value_name = "TEXT")]
    dry_sequence_breaker: Vec<String>,
    /// Leave out tokens whose logit is more than this many standard deviations below the largest; 0 means off
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    top_n_sigma: f32,
    /// Sample from the most typical tokens that together have this probability; 1 means all
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    typical_p: f32,
    /// Probability with which a token is chosen without the most probable ones (XTC); 0 means off
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    xtc_probability: f32,
    /// XTC leaves out the tokens with at least this probability, but for the least probable of them [default: 0.1]
    #[arg(long, value_name = "P")]
    xtc_threshold: Option<f32>,
}

impl AdjustmentArgs {
    fn adjustments(&self) -> LogitAdjustments {
        let own = LogitAdjustments::default();
        LogitAdjustments {
            repetition_window: self.repetition_window,
            min_tokens: self.min_tokens,
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            dry: Dry {
                multiplier: self.dry_multiplier,
                base: self.dry_base.unwrap_or(own.dry.base),
                allowed_length: self.dry_allowed_length.unwrap_or(own.dry.allowed_length),
                window: self.dry_window,
                sequence_breakers: match &self.dry_sequence_breaker[..] {
                    [] => None,
                    [none] if none == "none" => Some(Vec::new()),
                    breakers => Some(breakers.to_vec()),
                },
            },
            top_n_sigma: self.top_n_sigma,
            typical_p: self.typical_p,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold.unwrap_or(own.xtc_threshold),
            ..own
        }
    }
}

impl SamplingArgs {
    /// The given options, completed by the model's recommended settings, with `draft` as the draft model.
    pub(super) fn options(
        &self,
        model: &Served,
        draft: Option<Arc<Served>>,
    ) -> Result<GenerateOptions> {
        let own = model.sampling();
        let mut options = GenerateOptions {
            max_tokens: self.max_tokens.unwrap_or(usize::MAX),
            sampling: SamplingOptions {
                temperature: self.temp.unwrap_or(own.temperature),
                top_k: self.top_k.unwrap_or(own.top_k),
                top_p: self.top_p.unwrap_or(own.top_p),
                min_p: self.min_p.unwrap_or(own.min_p),
                repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
                seed: self.seed,
            },
            adjustments: self.adjustments.adjustments(),
            stop_strings: self.stop.clone(),
            ignore_model_stops: self.ignore_stops,
            replay: self.replay,
            drafts: self.drafts,
            prompt_lookup: self.prompt_lookup,
            draft_model: draft,
            ..GenerateOptions::default()
        };
        self.grammar.add_to(&mut options, model)?;
        Ok(options)
    }
}

/// Describes how tokens are chosen, and says whether the model recommends that.
pub(super) fn described(options: &GenerateOptions, model: &Served) -> String {
    let (own, adjustments) = (model.sampling(), &options.adjustments);
    let seedless = SamplingOptions {
        seed: None,
        ..options.sampling.clone()
    };
    let as_asked = seedless == *own && *own != SamplingOptions::default();
    let recommended = match as_asked && adjustments.is_none(own) {
        true => ", as the model recommends",
        false => "",
    };
    let words = in_words(&options.sampling).chain(adjustments_in_words(adjustments));
    words.collect::<Vec<String>>().join(", ") + recommended
}

/// The sampling settings that are not those of an argmax.
fn in_words(sampling: &SamplingOptions) -> impl Iterator<Item = String> {
    let off = SamplingOptions::default();
    let is_greedy = sampling.is_greedy();
    let first = match is_greedy {
        true => "greedy".to_owned(),
        false => format!("temperature {}", sampling.temperature),
    };
    let others = [
        named("top-k", &sampling.top_k, &off.top_k),
        named("top-p", &sampling.top_p, &off.top_p),
        named("min-p", &sampling.min_p, &off.min_p),
        named(
            "repetition penalty",
            &sampling.repetition_penalty,
            &off.repetition_penalty,
        ),
    ];
    let others = others.into_iter().flatten().filter(move |_| !is_greedy);
    std::iter::once(first).chain(others)
}

/// The adjustments that are on.
fn adjustments_in_words(adjustments: &LogitAdjustments) -> impl Iterator<Item = String> {
    let off = LogitAdjustments::default();
    let all = [
        named("min tokens", &adjustments.min_tokens, &off.min_tokens),
        named(
            "no repeated n-grams of",
            &adjustments.no_repeat_ngram_size,
            &off.no_repeat_ngram_size,
        ),
        named(
            "DRY multiplier",
            &adjustments.dry.multiplier,
            &off.dry.multiplier,
        ),
        named("top-n-sigma", &adjustments.top_n_sigma, &off.top_n_sigma),
        named("typical-p", &adjustments.typical_p, &off.typical_p),
        named(
            "XTC probability",
            &adjustments.xtc_probability,
            &off.xtc_probability,
        ),
    ];
    all.into_iter().flatten()
}

/// A setting by its name, unless it is off.
fn named<T: PartialEq + Display>(name: &str, value: &T, off: &T) -> Option<String> {
    (value != off).then(|| format!("{name} {value}"))
}
