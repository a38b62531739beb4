//! Options of a session's context, for `run` and `chat`.

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::session::{Eviction, SINKS};
use clap::ValueEnum;

#[derive(clap::Args)]
pub(super) struct ContextArgs {
    /// The context length in tokens, for prompts and answers; 0 takes the model's own
    #[arg(long, default_value_t = 0)]
    pub(super) context: usize,
    /// The way to go on when the context is full
    #[arg(long, value_enum, default_value_t = EvictionName::Error)]
    eviction: EvictionName,
    /// Tokens at the beginning that are never dropped [default: 4 for a sliding window, else 0]
    #[arg(long, value_name = "TOKENS")]
    keep: Option<usize>,
    /// Tokens that a sliding window drops at a time; 0 takes half of those that are not kept
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    drop: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum EvictionName {
    /// The text ends, or the prompt is refused
    Error,
    /// The older half is dropped and the rest runs again; a chat drops its oldest turns
    DropOldest,
    /// The first tokens and a window of the latest are kept, and the text goes on without an end; not for chats
    SlidingWindow,
}

impl ContextArgs {
    pub(super) fn eviction(&self) -> Result<Eviction> {
        let (keep, drop) = (self.keep, self.drop);
        Ok(match self.eviction {
            EvictionName::Error if keep.is_some() => bail!(
                InvalidArgument,
                "--keep is for --eviction drop-oldest and sliding-window; without one of them nothing is dropped"
            ),
            EvictionName::Error | EvictionName::DropOldest if drop > 0 => bail!(
                InvalidArgument,
                "--drop {drop} is for --eviction sliding-window; leave it out for another one"
            ),
            EvictionName::Error => Eviction::Error,
            EvictionName::DropOldest => Eviction::DropOldest {
                keep: keep.unwrap_or(0),
            },
            EvictionName::SlidingWindow => Eviction::SlidingWindow {
                sinks: keep.unwrap_or(SINKS),
                drop,
            },
        })
    }
}
