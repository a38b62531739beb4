//! Detects how a model writes reasoning and tool calls, from its chat template and its tokens.

use super::section::ToolCallForm;
use super::{deepseek, gemma, glm, harmony, json, llama, mistral, python, xml};
use crate::text::TokenRole;

/// The marks around reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// The mark before it.
    pub begin: &'static str,
    /// The mark after it.
    pub end: &'static str,
    /// The text that closes reasoning when its budget is used up: everything written in the model's place, up to the answer.
    pub early_end: &'static str,
}

static REASONING: [Reasoning; 5] = [
    // Qwen3, QwQ, DeepSeek-R1 and many others. The sentence is the one with which Qwen3 was made to stop, as its technical
    // report gives it.
    Reasoning {
        begin: "<think>",
        end: "</think>",
        early_end: "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n\
            </think>\n\n",
    },
    // Magistral.
    Reasoning {
        begin: "[THINK]",
        end: "[/THINK]",
        early_end: "\n[/THINK]\n\n",
    },
    // Seed-OSS.
    Reasoning {
        begin: "<seed:think>",
        end: "</seed:think>",
        early_end: "\n</seed:think>\n\n",
    },
    // Command.
    Reasoning {
        begin: "<|START_THINKING|>",
        end: "<|END_THINKING|>",
        early_end: "\n<|END_THINKING|>\n\n",
    },
    // Gemma 4.
    Reasoning {
        begin: "<|channel>thought",
        end: "<channel|>",
        early_end: "\n<channel|>",
    },
];

/// Reasoning in Harmony: the messages of the channel `analysis`.
static HARMONY: Reasoning = Reasoning {
    begin: "<|channel|>analysis<|message|>",
    end: "<|end|>",
    early_end: "<|end|><|start|>assistant<|channel|>final<|message|>",
};

/// The forms, each with texts that its templates contain. The first form whose texts all occur is chosen, so a form precedes those that
/// share some of its texts.
static FORMS: [(&dyn ToolCallForm, &[&str]); 19] = [
    (&mistral::WITH_ID, &["[TOOL_CALLS]", "[CALL_ID]"]),
    (&mistral::WITH_NAME, &["[TOOL_CALLS]", "[ARGS]"]),
    (&mistral::LIST, &["[TOOL_CALLS]"]),
    (
        &deepseek::WITH_BLOCKS,
        &["<｜tool▁call▁begin｜>", "```json"],
    ),
    (&deepseek::PLAIN, &["<｜tool▁call▁begin｜>"]),
    (&xml::SEED, &["<seed:tool_call>"]),
    (&xml::MINIMAX, &["<minimax:tool_call>"]),
    (&gemma::FUNCTION_GEMMA, &["<start_function_call>"]),
    (&gemma::GEMMA4, &["<|tool_call>"]),
    (&json::COMMAND, &["<|START_ACTION|>"]),
    (&python::LFM2, &["<|tool_call_start|>"]),
    (&json::NEMOTRON, &["<TOOLCALL>"]),
    (&xml::QWEN_CODER, &["<tool_call>", "<function="]),
    (&glm::Glm, &["<tool_call>", "<arg_key>"]),
    (&json::HERMES, &["<tool_call>"]),
    (&json::PHI, &["<|tool_call|>", "<|/tool_call|>"]),
    (&json::GRANITE, &["<|tool_call|>"]),
    (&python::TOOL_CODE, &["```tool_code"]),
    (&llama::Llama, &["<|python_tag|>"]),
];

/// Text of the form in templates of Llama 3 without built-in tools.
const LLAMA: &str = "\"parameters\": dictionary of argument name";

/// How a model writes reasoning and tool calls.
#[derive(Clone, Debug)]
pub struct AnswerForm {
    pub(super) reasoning: Option<&'static Reasoning>,
    pub(super) calls: Option<&'static dyn ToolCallForm>,
    /// Whether the answer is a series of messages, each with a header: Harmony.
    pub(super) has_headers: bool,
    shown: Vec<&'static str>,
}

impl AnswerForm {
    /// Detects the form from the chat template's source, whether that reads the variable `tools`, and the tokenizer's tokens (`is_token`
    /// says whether a string is a single token of the vocabulary, special or added).
    pub fn of(template: &str, reads_tools: bool, is_token: impl Fn(&str) -> bool) -> AnswerForm {
        if harmony::EVIDENCE.iter().all(|mark| template.contains(mark)) {
            let marks = harmony::Harmony.marks().iter().copied();
            return AnswerForm {
                reasoning: Some(&HARMONY),
                calls: reads_tools.then_some(&harmony::Harmony),
                has_headers: true,
                shown: marks.filter(|mark| is_token(mark)).collect(),
            };
        }
        let reasoning = REASONING
            .iter()
            .find(|r| template.contains(r.end))
            .or_else(|| {
                REASONING
                    .iter()
                    .find(|r| is_token(r.begin) && is_token(r.end))
            });
        let with = |is_there: &dyn Fn(&str) -> bool| {
            let (form, _) = FORMS
                .iter()
                .find(|(_, evidence)| evidence.iter().all(|mark| is_there(mark)))?;
            Some(*form)
        };
        let calls = with(&|mark| template.contains(mark))
            .or_else(|| template.contains(LLAMA).then_some(&llama::Llama as _))
            // A template may offer tools without describing the form of calls, which the model has learned.
            .or_else(|| with(&|mark| reads_tools && is_token(mark)));
        let marks = reasoning.map_or(Vec::new(), |r| vec![r.begin, r.end]);
        let marks = marks
            .into_iter()
            .chain(calls.map_or(&[][..], |form| form.marks()).iter().copied());
        AnswerForm {
            reasoning,
            calls,
            has_headers: false,
            shown: marks.filter(|mark| is_token(mark)).collect(),
        }
    }

    /// The marks around reasoning, if the model reasons.
    pub fn reasoning(&self) -> Option<&Reasoning> {
        self.reasoning
    }

    /// The text that closes reasoning when its budget is used up, up to the content; or up to the header of the next message, where a tool
    /// call must come and has a header of its own.
    pub fn early_end(&self, call_must_come: bool) -> Option<&'static str> {
        let reasoning = self.reasoning?;
        Some(match call_must_come && self.has_headers {
            true => reasoning.end,
            false => reasoning.early_end,
        })
    }

    /// Marks with a role in answers, which are tokens of some tokenizers.
    pub(in crate::text) fn roles_of_marks(&self) -> Vec<(TokenRole, &'static str)> {
        let mut found = Vec::new();
        if let Some(reasoning) = self.reasoning {
            found.push((TokenRole::BeginsReasoning, reasoning.begin));
            found.push((TokenRole::EndsReasoning, reasoning.end));
        }
        // Every message of an answer with headers begins with the same mark.
        match (self.has_headers, self.calls) {
            (true, _) => found.push((TokenRole::BeginsTurn, harmony::START)),
            (false, Some(calls)) => {
                let begins = calls.begins().iter();
                found.extend(begins.map(|&mark| (TokenRole::BeginsToolCall, mark)));
            }
            (false, None) => {}
        }
        let ends = self.calls.map_or(&[][..], |calls| calls.ends()).iter();
        found.extend(ends.map(|&mark| (TokenRole::EndsToolCall, mark)));
        found
    }

    /// Names of tokens that must be shown to the parser as text although they are special and normally give no text.
    pub fn shown_tokens(&self) -> &[&'static str] {
        &self.shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(template: &str, tokens: &[&str]) -> AnswerForm {
        AnswerForm::of(template, template.contains("tools"), |t| {
            tokens.contains(&t)
        })
    }

    fn begin_of(form: &AnswerForm) -> Option<&'static str> {
        form.calls.map(|calls| calls.begins()[0])
    }

    #[test]
    fn from_the_template() {
        for (template, begin) in [
            ("{{ '[TOOL_CALLS]' + name }}", Some("[TOOL_CALLS]")),
            (
                "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}",
                Some("<｜tool▁calls▁begin｜>"),
            ),
            ("<tool_call>\n{\"name\": ", Some("<tool_call>")),
            (
                "<|tool_call|> followed by a JSON list",
                Some("<|tool_call|>"),
            ),
            (
                "respond with \"parameters\": dictionary of argument name",
                Some("<|python_tag|>"),
            ),
            ("<start_function_call>call:", Some("<start_function_call>")),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ] {
            assert_eq!(begin_of(&found(template, &[])), begin, "{template}");
        }
        let closed = found(
            "<|tool_call|>{}<|/tool_call|>",
            &["<|tool_call|>", "<|/tool_call|>"],
        );
        assert_eq!(closed.shown_tokens(), ["<|tool_call|>", "<|/tool_call|>"]);
        let glm = found("<tool_call>f\n<arg_key>k</arg_key>", &["<arg_key>"]);
        assert_eq!(glm.calls.unwrap().marks()[1], "<arg_key>");
        assert_eq!(glm.shown_tokens(), ["<arg_key>"]);
        let coder = found("<tool_call>\n<function=f>", &[]).calls.unwrap();
        assert_eq!(coder.begins()[1], "<function=");
    }

    #[test]
    fn from_the_tokens() {
        let form = found("{{ tools | tojson }}", &["<|python_tag|>"]);
        assert_eq!(begin_of(&form), Some("<|python_tag|>"));
        assert_eq!(form.shown_tokens(), ["<|python_tag|>"]);
        let form = found("{{ messages }}", &["<|python_tag|>"]);
        assert_eq!(begin_of(&form), None);
    }

    #[test]
    fn reasoning() {
        let end = |template, tokens: &[&str]| found(template, tokens).reasoning().map(|r| r.end);
        assert_eq!(end("content.split('</think>')", &[]), Some("</think>"));
        assert_eq!(end("", &["[THINK]", "[/THINK]"]), Some("[/THINK]"));
        assert_eq!(end("[/THINK]", &["<think>", "</think>"]), Some("[/THINK]"));
        assert_eq!(end("", &["<think>"]), None);
        for reasoning in &REASONING {
            let after = reasoning.early_end.split_once(reasoning.end).unwrap().1;
            // Gemma's template writes nothing between reasoning and answer.
            let expected = if reasoning.end == "<channel|>" {
                ""
            } else {
                "\n\n"
            };
            assert_eq!(after, expected);
        }
    }
}
