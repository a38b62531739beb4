//! `nvfp4 run`: one prompt, one answer, streamed.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Instant;

use NVFP4::base::Result;
use NVFP4::base::memory;
use NVFP4::session::{Session, SessionOptions};
use serde_json::json;

use super::{model, output, sampling};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    sampling: sampling::SamplingArgs,
    /// What to say
    #[arg(long, required_unless_present = "prompt_file")]
    prompt: Option<OsString>,
    /// A file with what to say; - is standard input
    #[arg(long, conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// What the model is told about its role
    #[arg(long)]
    system: Option<String>,
    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Run the prompt one token after the other, for comparison
    #[arg(long, requires = "raw")]
    token_by_token: bool,
    /// Tokens of room for prompt and answer; 0 takes 4096, or what the model was made for if that is less
    #[arg(long, default_value_t = 0)]
    context: usize,
    /// Print the answer and its timings as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => NVFP4::text::utf8("the prompt", prompt.as_bytes())?.to_owned(),
        (None, Some(file)) => model::read_text(file)?,
        (None, None) => unreachable!("clap requires one of them"),
    };
    let model = args.model.load()?;
    let mut session = Session::new(
        model.clone(),
        &SessionOptions {
            context: args.context,
            kv: args.model.kv.into(),
            system: args.system.clone(),
            ..SessionOptions::default()
        },
    )?;
    let options = args.sampling.options();
    let mut failed = None;
    let mut show = |piece: NVFP4::session::Piece<'_>| {
        if args.json {
            return ControlFlow::Continue(());
        }
        match output::print(piece.text) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        }
    };
    let answer = if args.raw {
        let start = Instant::now();
        let tokens = model.tokenizer()?.encode(&prompt, true)?;
        if args.token_by_token {
            session.prefill_token_by_token(&tokens)?;
        } else {
            session.prefill(&tokens)?;
        }
        let prefill = start.elapsed().as_secs_f64();
        session.generate(&options, &mut show).map(|mut answer| {
            answer.timings.prefill_seconds += prefill;
            answer.timings.first_token_seconds += prefill;
            answer
        })
    } else {
        session.chat(&prompt, &options, &mut show)
    };
    if let Some(e) = failed {
        return Err(e);
    }
    let answer = answer?;
    if args.json {
        return output::json(&json!({
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish,
            "prompt_tokens": answer.prompt_tokens,
            "timings": answer.timings,
            "memory": {"peak_bytes": memory::total().peak, "kv_bytes": session.kv_bytes()},
            "model": model.info(),
        }));
    }
    output::line("")
}
