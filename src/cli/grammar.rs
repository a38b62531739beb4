//! Arguments of `run` and `chat` that hold answers to a grammar, and tool calls to their schemas.

use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::engine::Served;
use NVFP4::session::{GenerateOptions, ToolCalls};
use NVFP4::text::{Grammar, GrammarSource};
use clap::ValueEnum;

use super::model;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Calls {
    Free,
    Held,
    Required,
}

#[derive(clap::Args)]
pub(super) struct GrammarArgs {
    /// A file with a JSON schema that the answer fits
    #[arg(long, value_name = "FILE", group = "grammar")]
    json_schema: Option<PathBuf>,
    /// A regular expression that the whole answer fits
    #[arg(long, group = "grammar")]
    regex: Option<String>,
    /// A file with a Lark grammar of the answer
    #[arg(long, value_name = "FILE", group = "grammar")]
    lark: Option<PathBuf>,
    /// A file with a GBNF grammar of the answer, as llama.cpp reads it
    #[arg(long, value_name = "FILE", group = "grammar")]
    gbnf: Option<PathBuf>,
    /// An answer to choose from; given once for each
    #[arg(long, value_name = "TEXT", group = "grammar")]
    choice: Vec<String>,
    /// Whether tool calls are held to the schemas of --tools, and whether the answer must begin with one
    #[arg(long, value_enum, requires = "tools", conflicts_with = "grammar")]
    tool_calls: Option<Calls>,
}

impl GrammarArgs {
    /// Adds these arguments to `options`.
    pub(super) fn add_to(&self, options: &mut GenerateOptions, model: &Served) -> Result<()> {
        options.tool_calls = match self.tool_calls {
            None | Some(Calls::Free) => ToolCalls::Free,
            Some(Calls::Held) => ToolCalls::Held,
            Some(Calls::Required) => ToolCalls::Required,
        };
        options.grammar = self.compile(model)?.map(Arc::new);
        Ok(())
    }

    fn compile(&self, model: &Served) -> Result<Option<Grammar>> {
        let compile = |source| model.grammar(source).map(Some);
        let file = self.json_schema.as_ref();
        if let Some(file) = file.or(self.lark.as_ref()).or(self.gbnf.as_ref()) {
            let text = model::read_text(file)?;
            let source = if self.json_schema.is_some() {
                GrammarSource::JsonSchema(&text)
            } else if self.lark.is_some() {
                GrammarSource::Lark(&text)
            } else {
                GrammarSource::Gbnf(&text)
            };
            return compile(source).map_err(|e| e.within(file.display()));
        }
        match (&self.regex, &*self.choice) {
            (Some(regex), _) => compile(GrammarSource::Regex(regex)),
            (None, []) => Ok(None),
            (None, choices) => compile(GrammarSource::Choices(choices)),
        }
    }
}
