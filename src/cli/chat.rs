//! `nvfp4 chat`: a conversation at a terminal, or one turn per line from a pipe.

use std::io::{BufRead, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use NVFP4::base::memory;
use NVFP4::base::{Error, Result};
use NVFP4::model::Model;
use NVFP4::session::{Generation, Piece, Session, SessionOptions};

use super::{model, output, sampling};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    sampling: sampling::SamplingArgs,
    /// What the model is told about its role
    #[arg(long)]
    system: Option<String>,
    /// Tokens of room for the conversation; 0 takes 4096, or what the model was made for if that is less
    #[arg(long, default_value_t = 0)]
    context: usize,
}

const HELP: &str = "/save FILE keeps the conversation, /load FILE takes it up again, /reset forgets it, /stats shows numbers, /exit ends";

pub(super) fn run(args: &Args) -> Result<()> {
    let model = args.model.load()?;
    let options = SessionOptions {
        context: args.context,
        kv: args.model.kv.into(),
        system: args.system.clone(),
        ..SessionOptions::default()
    };
    let mut chat = Chat {
        session: Session::new(model.clone(), &options)?,
        model,
        last: None,
    };
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        output::line(HELP)?;
    }
    let mut input = std::io::stdin().lock();
    let mut bytes = Vec::new();
    loop {
        if terminal {
            output::print("> ")?;
        }
        bytes.clear();
        let read = input
            .read_until(b'\n', &mut bytes)
            .map_err(|e| Error::io("reading standard input", e))?;
        if read == 0 {
            return Ok(());
        }
        // A slip at the keyboard must not end the conversation.
        let turn =
            NVFP4::text::utf8("the line", &bytes).and_then(|text| chat.turn(text.trim(), args));
        match turn {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return Ok(()),
            Err(e) if terminal => eprintln!("nvfp4: {e}"),
            Err(e) => return Err(e),
        }
    }
}

struct Chat {
    session: Session,
    model: Arc<Model>,
    last: Option<Generation>,
}

impl Chat {
    fn turn(&mut self, line: &str, args: &Args) -> Result<ControlFlow<()>> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("", _) => {}
            ("/exit" | "/quit", _) => return Ok(ControlFlow::Break(())),
            ("/help", _) => output::line(HELP)?,
            ("/reset", _) => {
                self.session.reset()?;
                self.last = None;
            }
            ("/save", file) if !file.is_empty() => self.session.save(Path::new(file))?,
            ("/load", file) if !file.is_empty() => {
                self.session = Session::restore(self.model.clone(), Path::new(file))?;
                self.last = None;
            }
            ("/stats", _) => self.stats()?,
            (command, _) if command.starts_with('/') => output::line(HELP)?,
            _ => {
                let mut failed = None;
                let answer =
                    self.session
                        .chat(line, &args.sampling.options(), &mut |piece: Piece<'_>| {
                            match output::print(piece.text) {
                                Ok(()) => ControlFlow::Continue(()),
                                Err(e) => {
                                    failed = Some(e);
                                    ControlFlow::Break(())
                                }
                            }
                        });
                if let Some(e) = failed {
                    return Err(e);
                }
                self.last = Some(answer?);
                output::line("")?;
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn stats(&self) -> Result<()> {
        output::line(format_args!(
            "{} tokens in the cache, {} of keys and values, {} in all (peak {})",
            self.session.len(),
            output::size(self.session.kv_bytes() as u64),
            output::size(memory::total().current),
            output::size(memory::total().peak)
        ))?;
        if let Some(last) = &self.last {
            let t = &last.timings;
            let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
            output::line(format_args!(
                "last turn: {} tokens in at {:.1}/s, {} tokens out at {:.1}/s",
                last.prompt_tokens,
                rate(last.prompt_tokens, t.prefill_seconds),
                last.tokens.len(),
                // The first token belongs to the prompt's time.
                rate(last.tokens.len().saturating_sub(1), t.decode_seconds)
            ))?;
        }
        Ok(())
    }
}
