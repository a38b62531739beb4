//! `nvfp4 chat`: a conversation at a terminal, or one turn per line from a pipe.
//!
//! `input` reads messages, from a keyboard through `editor`; `command` parses lines that begin with a slash; `conversation`
//! executes both.

mod command;
mod conversation;
mod editor;
mod input;

use std::io::IsTerminal;
use std::ops::ControlFlow;

use NVFP4::base::Result;
use NVFP4::session::{ChatOptions, Session, SessionOptions};
use NVFP4::text::messages_to_json;

use super::context::ContextArgs;
use super::{model, output, prompting, sampling};

use self::command::Command;
use self::conversation::Conversation;
use self::editor::Typed;
use self::input::{Entry, Input};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    sampling: sampling::SamplingArgs,
    #[command(flatten)]
    prompting: prompting::PromptingArgs,
    /// Keep the reasoning of earlier answers, even if the template would remove it: turns start sooner, the context fills
    /// sooner
    #[arg(long)]
    keep_reasoning: bool,
    #[command(flatten)]
    adapter: model::AdapterArgs,
    #[command(flatten)]
    context: ContextArgs,
}

/// Arguments of a call up to this length are shown in the prompt for its result.
const SHORT: usize = 40;

pub(super) fn run(args: &Args) -> Result<()> {
    let (model, draft) = (args.model).load_beside(args.sampling.draft_model.as_deref())?;
    args.prompting.warn_of_template(&model);
    args.prompting.warn_of_stand_in(&model);
    let chat = ChatOptions {
        keep_reasoning: args.keep_reasoning,
        ..args.prompting.options(&model)?
    };
    let options = SessionOptions {
        context: args.context.context,
        kv: args.model.kv.into(),
        system: args.prompting.system.clone(),
        eviction: args.context.eviction()?,
        adapter: args.adapter.load(&model)?,
        ..SessionOptions::default()
    };
    let input = Input::new()?;
    let conversation = Conversation {
        session: Session::new(model.clone(), &options)?,
        chat,
        generation: args.sampling.options(&model, draft)?,
        system: None,
        last: None,
        stops_alone: input.is_keyboard(),
        model,
    };
    if std::io::stderr().is_terminal() {
        args.greet(&conversation);
    }
    Chat {
        conversation,
        input,
        unread: None,
    }
    .run()
}

impl Args {
    fn greet(&self, conversation: &Conversation) {
        let Conversation {
            model, generation, ..
        } = conversation;
        let info = model.info();
        eprintln!("model: {}, on {}", self.model.model.display(), info.device);
        let sampling = sampling::described(generation, model);
        eprintln!("sampling: {sampling}");
        if conversation.stops_alone {
            eprintln!("/help lists the commands, Ctrl-D ends the program");
        }
    }
}

struct Chat {
    conversation: Conversation,
    input: Input,
    /// A command that was typed at the prompt for a result.
    unread: Option<String>,
}

impl Chat {
    fn run(&mut self) -> Result<()> {
        loop {
            let entry = match self.unread.take() {
                Some(line) => Entry::Line(line),
                None => self.input.entry()?,
            };
            match self.turn(&entry) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => return Ok(()),
                // A typing error must not end the conversation.
                Err(e) if self.input.is_keyboard() => eprintln!("nvfp4: {e}"),
                Err(e) => return Err(e),
            }
        }
    }

    fn turn(&mut self, entry: &Entry) -> Result<ControlFlow<()>> {
        let conversation = &mut self.conversation;
        let line = match entry {
            Entry::Line(line) => line.trim(),
            Entry::Message(text) => {
                conversation.say(text)?;
                return self.results();
            }
            Entry::End => return Ok(ControlFlow::Break(())),
        };
        match Command::parse(line)? {
            None if line.is_empty() => {}
            None => {
                conversation.say(line)?;
                return self.results();
            }
            Some(Command::Edit(text)) => {
                conversation.edit(text)?;
                return self.results();
            }
            Some(Command::Retry) => {
                conversation.retry()?;
                return self.results();
            }
            Some(Command::Exit) => return Ok(ControlFlow::Break(())),
            Some(Command::Help) => output::line(command::help())?,
            Some(Command::Load(file)) => conversation.load(&file)?,
            Some(Command::Messages) => output::json(&messages_to_json(&conversation.messages()?))?,
            Some(Command::Reset) => conversation.reset()?,
            Some(Command::Save(file)) => conversation.session.save(&file)?,
            Some(Command::Stats) => conversation.stats()?,
            Some(Command::System(text)) => conversation.system = Some(text.to_owned()),
            Some(Command::Think(on)) => conversation.think(on)?,
            Some(Command::Tools(file)) => {
                conversation.chat.tools = match file {
                    Some(file) => prompting::read_tools(&file)?,
                    None => Vec::new(),
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Asks for the results of the calls in the answer and continues with them, until an answer makes no call. An empty
    /// line or Ctrl-C gives no result; a command works as elsewhere.
    fn results(&mut self) -> Result<ControlFlow<()>> {
        loop {
            let mut results = Vec::new();
            for call in self.conversation.calls() {
                let arguments = serde_json::Value::Object(call.arguments.clone()).to_string();
                let arguments = match arguments.len() {
                    ..=SHORT => &arguments,
                    _ => "...",
                };
                let asked = format!("result of {}({arguments})> ", call.name);
                let line = match self.input.line(&asked)? {
                    Typed::Line(line) => line,
                    Typed::Interrupt { .. } => return Ok(ControlFlow::Continue(())),
                    Typed::End => return Ok(ControlFlow::Break(())),
                };
                if line.trim().is_empty() {
                    return Ok(ControlFlow::Continue(()));
                }
                if let Ok(Some(_)) = Command::parse(line.trim()) {
                    self.unread = Some(line);
                    return Ok(ControlFlow::Continue(()));
                }
                results.push((call, line));
            }
            if results.is_empty() {
                return Ok(ControlFlow::Continue(()));
            }
            self.conversation.go_on(results)?;
        }
    }
}
