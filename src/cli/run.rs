//! `nvfp4 run`: answers one prompt or conversation, streamed.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Instant;

use NVFP4::base::Result;
use NVFP4::base::memory;
use NVFP4::session::{GenerateOptions, Generation, Piece, Session, SessionOptions};
use NVFP4::text::{Message, ToolCall, messages_from_json};
use serde_json::{Value, json};

use super::context::ContextArgs;
use super::view::View;
use super::{model, output, prompting, sampling};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    sampling: sampling::SamplingArgs,
    #[command(flatten)]
    prompting: prompting::PromptingArgs,
    /// The prompt
    #[arg(long, required_unless_present_any = ["prompt_file", "messages"])]
    prompt: Option<OsString>,
    /// A file with the prompt; - is standard input
    #[arg(long, conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// A file with a conversation to answer, as a JSON array of messages in the format of chat servers; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file", "system"])]
    messages: Option<PathBuf>,
    /// Continue the prompt as it stands, without the model's chat template; names of special tokens in it become those tokens
    #[arg(long, conflicts_with_all = ["messages", "system", "chat_template", "think", "think_budget", "tools", "set"])]
    raw: bool,
    /// Prefill the prompt token by token, for comparison
    #[arg(long, requires = "raw")]
    token_by_token: bool,
    #[command(flatten)]
    adapter: model::AdapterArgs,
    #[command(flatten)]
    context: ContextArgs,
    /// Print the answer and its timings as JSON
    #[arg(long)]
    json: bool,
}

/// The prompt or conversation to answer.
enum Question {
    Prompt(String),
    Conversation(Vec<Message>),
}

pub(super) fn run(args: &Args) -> Result<()> {
    let question = args.question()?;
    let (model, draft) = (args.model).load_beside(args.sampling.draft_model.as_deref())?;
    let mut session = Session::new(
        model.clone(),
        &SessionOptions {
            context: args.context.context,
            kv: args.model.kv.into(),
            system: args.prompting.system.clone(),
            eviction: args.context.eviction()?,
            adapter: args.adapter.load(&model)?,
            ..SessionOptions::default()
        },
    )?;
    let options = args.sampling.options(&model, draft)?;
    if std::io::stderr().is_terminal() {
        let sampling = sampling::described(&options, &model);
        eprintln!("sampling: {sampling}");
        if !args.raw {
            args.prompting.warn_of_stand_in(&model);
        }
    }
    if args.raw {
        model::warn_of_template(&model);
    }
    let mut view = View::new();
    let answer = args.answer(
        &mut session,
        &question,
        &options,
        &mut |piece| match args.json {
            true => ControlFlow::Continue(()),
            false => view.show(piece),
        },
    )?;
    if !args.json {
        view.end()?;
        if answer.evicted > 0 {
            eprintln!(
                "the context was full: {} tokens were dropped",
                answer.evicted
            );
        }
        return Ok(());
    }
    let calls: Vec<Value> = answer.tool_calls.iter().map(ToolCall::to_json).collect();
    output::json(&json!({
        "text": answer.text,
        "content": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": calls,
        "tokens": answer.tokens,
        "finish": answer.finish,
        "seed": answer.seed,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "evicted_tokens": answer.evicted,
        "timings": answer.timings,
        "drafts": answer.drafts,
        "memory": {"peak_bytes": memory::total().peak, "kv_bytes": session.kv_bytes()},
        "model": model.describe(),
    }))
}

impl Args {
    fn question(&self) -> Result<Question> {
        if let Some(file) = &self.messages {
            let messages = messages_from_json(&model::read_text(file)?);
            let messages = messages.map_err(|e| e.within(file.display()))?;
            return Ok(Question::Conversation(messages));
        }
        Ok(Question::Prompt(match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => NVFP4::text::utf8("the prompt", prompt.as_bytes())?.to_owned(),
            (None, Some(file)) => model::read_text(file)?,
            (None, None) => unreachable!("clap requires one of them"),
        }))
    }

    fn answer(
        &self,
        session: &mut Session,
        question: &Question,
        options: &GenerateOptions,
        show: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let model = session.model().clone();
        let prompt = match question {
            Question::Prompt(prompt) if self.raw => prompt,
            Question::Prompt(prompt) => {
                let chat = self.prompting.options(&model)?;
                return session.chat(prompt, Some(&chat), options, show);
            }
            Question::Conversation(messages) => {
                let chat = self.prompting.options(&model)?;
                return session.chat_messages(messages, Some(&chat), options, show);
            }
        };
        let tokens = model.tokenizer()?.encode(prompt, true)?;
        if !self.token_by_token {
            return session.generate_after(&tokens, options, show);
        }
        let start = Instant::now();
        if options.drafts == Some(0) {
            session.set_drafts(false)?;
        }
        session.prefill_token_by_token(&tokens)?;
        let prefill = start.elapsed().as_secs_f64();
        let mut answer = session.generate(options, show)?;
        answer.timings.prefill_seconds += prefill;
        answer.timings.first_token_seconds += prefill;
        answer.cached_tokens = 0;
        Ok(answer)
    }
}
