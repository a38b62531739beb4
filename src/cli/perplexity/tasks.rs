//! Sets of multiple-choice questions, answered by a model and its reference.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::engine::Served;
use NVFP4::model::KvType;
use NVFP4::text::Tokenizer;
use NVFP4::train::data::{MultipleChoice, multiple_choice};
use serde::Serialize;

use super::reader::Reader;
use super::scoring::{Continuation, Share, WAYS, agreement, chosen};
use crate::cli::output;

/// Questions of a file.
pub(super) struct Set {
    path: PathBuf,
    questions: Vec<MultipleChoice>,
}

impl Set {
    pub(super) fn read(path: &Path) -> Result<Set> {
        Ok(Set {
            path: path.to_owned(),
            questions: multiple_choice(path)?,
        })
    }

    /// Tokenizes the questions for a model.
    fn prepared(&self, model: &Served) -> Result<Vec<Vec<Continuation>>> {
        let tokenizer = model.tokenizer()?;
        let each = self.questions.iter().map(|question| {
            let line = question.line;
            prepared(model, tokenizer, question)
                .map_err(|e| e.within(format_args!("{} line {line}", self.path.display())))
        });
        each.collect()
    }
}

/// Tokenizes a question with each of its choices for a model.
fn prepared(
    model: &Served,
    tokenizer: &Tokenizer,
    question: &MultipleChoice,
) -> Result<Vec<Continuation>> {
    let own = tokenizer.encode(&question.question, true)?;
    let context = model.spec().max_positions;
    let choices = question.choices.iter().enumerate().map(|(i, choice)| {
        let tokens = tokenizer.encode(&question.with(i), true)?;
        model.check_ids(&tokens)?;
        if tokens.len() > context {
            bail!(
                InvalidArgument,
                "the question with choice {i} has {} tokens, and the model was made for {context}",
                tokens.len()
            );
        }
        let continuation = Continuation::new(&own, tokens, choice.len());
        if continuation.first == 0 {
            bail!(
                InvalidArgument,
                "the tokenizer makes one token of the question and the beginning of choice {i}; a question needs a token of its own"
            );
        }
        Ok(continuation)
    });
    choices.collect()
}

/// A model's choices for each question of a set.
fn choices(
    model: &Arc<Served>,
    questions: &[Vec<Continuation>],
    kv: KvType,
    told: &mut dyn FnMut(),
) -> Result<Vec<[usize; WAYS]>> {
    let lengths = questions.iter().flatten().map(|c| c.tokens.len());
    let mut reader = Reader::new(model, lengths.max().unwrap_or(1), kv)?;
    let each = questions.iter().map(|choices| {
        let sums = log_probabilities(&mut reader, choices)?;
        let bytes: Vec<usize> = choices.iter().map(|choice| choice.bytes).collect();
        told();
        Ok(chosen(&sums, &bytes))
    });
    each.collect()
}

/// Log-probabilities of a question's choices. Their common prefix is read once.
fn log_probabilities(reader: &mut Reader, choices: &[Continuation]) -> Result<Vec<f64>> {
    // The last common token predicts the first token of a choice.
    let common = choices.iter().map(|choice| choice.first).min();
    let common = common.unwrap_or(1) - 1;
    reader.truncate(0)?;
    if let Some(first) = choices.first() {
        reader.skip(&first.tokens[..common])?;
    }
    let each = choices.iter().map(|choice| {
        let kept = reader.truncate(common)?;
        reader.skip(&choice.tokens[kept..choice.first - 1])?;
        let (inputs, targets) = (
            &choice.tokens[choice.first - 1..choice.tokens.len() - 1],
            &choice.tokens[choice.first..],
        );
        let run = reader.scored_run();
        let mut sum = 0.0;
        for (inputs, targets) in inputs.chunks(run).zip(targets.chunks(run)) {
            let found = reader.score(inputs, targets)?;
            sum += found
                .iter()
                .map(|f| f64::from(f.log_probability))
                .sum::<f64>();
        }
        Ok(sum)
    });
    each.collect()
}

/// A model's results on a set.
#[derive(Serialize)]
struct Answers {
    /// Accuracy by the log-probability of the choices.
    accuracy: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy_stderr: Option<f64>,
    /// Accuracy by the log-probability per byte of the choices.
    accuracy_norm: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy_norm_stderr: Option<f64>,
}

impl Answers {
    fn new(choices: &[[usize; WAYS]], questions: &[MultipleChoice]) -> Answers {
        let of = |way| agreement(choices, way, questions.iter().map(|q| q.answer));
        let [whole, by_length]: [Share; WAYS] = [of(0), of(1)];
        Answers {
            accuracy: whole.share,
            accuracy_stderr: whole.stderr,
            accuracy_norm: by_length.share,
            accuracy_norm_stderr: by_length.stderr,
        }
    }
}

/// Results on a set.
#[derive(Serialize)]
pub(super) struct Results {
    file: String,
    questions: usize,
    #[serde(flatten)]
    answers: Answers,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<ReferenceResults>,
}

#[derive(Serialize)]
struct ReferenceResults {
    #[serde(flatten)]
    answers: Answers,
    /// Share of questions on which both models made the same choice.
    same_choice: f64,
    same_choice_norm: f64,
}

/// Lets a model, and the reference if given, answer the questions of a set.
pub(super) fn measure(
    set: &Set,
    model: &Arc<Served>,
    reference: Option<&Arc<Served>>,
    kv: KvType,
) -> Result<Results> {
    let questions = &set.questions;
    let own = set.prepared(model)?;
    let of_reference = reference
        .map(|reference| set.prepared(reference))
        .transpose()?;
    let models = 1 + u64::from(reference.is_some());
    let bar = output::count_bar("answering", models * questions.len() as u64);
    let mut told = || bar.inc(1);
    let own = choices(model, &own, kv, &mut told)?;
    let reference = match (reference, &of_reference) {
        (Some(reference), Some(prepared)) => {
            let others = choices(reference, prepared, kv, &mut told)?;
            let same = |way: usize| agreement(&own, way, others.iter().map(|o| o[way])).share;
            Some(ReferenceResults {
                answers: Answers::new(&others, questions),
                same_choice: same(0),
                same_choice_norm: same(1),
            })
        }
        _ => None,
    };
    bar.finish_and_clear();
    Ok(Results {
        file: set.path.display().to_string(),
        questions: questions.len(),
        answers: Answers::new(&own, questions),
        reference,
    })
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64, stderr: Option<f64>| match stderr {
            Some(stderr) => format!("{:.2} % ± {:.2}", 100.0 * share, 100.0 * stderr),
            None => format!("{:.2} %", 100.0 * share),
        };
        write!(
            f,
            "accuracy {}, by length {}",
            percent(self.accuracy, self.accuracy_stderr),
            percent(self.accuracy_norm, self.accuracy_norm_stderr)
        )
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} questions; {}",
            self.file, self.questions, self.answers
        )?;
        if let Some(reference) = &self.reference {
            write!(
                f,
                "\nreference: {}; same choice {:.2} %, by length {:.2} %",
                reference.answers,
                100.0 * reference.same_choice,
                100.0 * reference.same_choice_norm
            )?;
        }
        Ok(())
    }
}
