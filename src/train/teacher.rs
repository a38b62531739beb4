//! Distillation from a teacher: checks of its identity and vocabulary, and the place of its weights.

use std::hash::Hasher;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::memory::TeacherPlacement;
use super::trainer::Trainer;
use crate::base::error::bail;
use crate::base::{ErrorKind, Result};
use crate::model::training::{Source, SourceText, Teacher};

/// Identity of a model, by which a checkpoint recognizes its teacher: XXH3 of its parameters' names and shapes, of all norms and biases,
/// and of the first and the last row of each matrix, as float32.
pub fn fingerprint(source: &Source) -> Result<String> {
    let mut sum = XxHash3_64::new();
    let write = |sum: &mut XxHash3_64, values: &[f32]| {
        values.iter().for_each(|v| sum.write(&v.to_le_bytes()));
    };
    for (id, m) in source.layout().matrices.iter().enumerate() {
        sum.write(m.name.as_bytes());
        sum.write_u64(m.rows as u64);
        sum.write_u64(m.cols as u64);
        let mut row = vec![0.0; m.cols];
        for at in [0, m.rows - 1] {
            source.matrix(id, at..at + 1, &mut row)?;
            write(&mut sum, &row);
        }
    }
    for (id, v) in source.layout().vectors.iter().enumerate() {
        sum.write(v.name.as_bytes());
        write(&mut sum, &source.vector(id)?);
    }
    Ok(format!("{:016x}", sum.finish()))
}

/// Refuses a teacher with another vocabulary than the student's.
pub fn check_vocabulary(student: &Source, teacher: &Source) -> Result<()> {
    let (own, other) = (student.spec().vocab_size, teacher.spec().vocab_size);
    if own != other {
        bail!(
            InvalidArgument,
            "the teacher predicts {other} tokens and the model {own}; a teacher must have the model's vocabulary, with as many rows"
        );
    }
    let (Some(own), Some(other)) = (text_of(student)?, text_of(teacher)?) else {
        return Ok(());
    };
    let (own, other) = (own.tokenizer, other.tokenizer);
    // A token that only one of the models names is padding in the other.
    let differs = |&id: &u32| match (own.bytes_of(id), other.bytes_of(id)) {
        (Ok(a), Ok(b)) => a != b,
        _ => false,
    };
    let tokens = own.vocab_size().max(other.vocab_size()) as u32;
    if let Some(id) = (0..tokens).find(differs) {
        let name = |tokenizer: &crate::text::Tokenizer| {
            String::from_utf8_lossy(tokenizer.bytes_of(id).unwrap_or_default()).into_owned()
        };
        bail!(
            InvalidArgument,
            "token {id} is {:?} in the teacher's tokenizer and {:?} in the model's; a teacher must have the model's vocabulary",
            name(&other),
            name(&own)
        );
    }
    Ok(())
}

/// The tokenizer of a model, if it has one.
fn text_of(source: &Source) -> Result<Option<SourceText>> {
    match source.text() {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

impl Trainer {
    /// Sets the teacher of a trainer whose settings have a [`Distillation`](super::Distillation). `student` is the model that training
    /// began with. Refuses a teacher other than the one in the settings; if they name none yet, they name this one from now on.
    /// [`TeacherPlacement::Auto`] assumes micro-batches of `tokens` tokens.
    pub fn set_teacher(
        &mut self,
        student: &Source,
        teacher: Arc<Source>,
        placement: TeacherPlacement,
        tokens: usize,
    ) -> Result<()> {
        let Some(settings) = self.config().distillation.clone() else {
            bail!(
                InvalidArgument,
                "a teacher was given, and the trainer's settings have no distillation"
            );
        };
        check_vocabulary(student, &teacher)?;
        let found = fingerprint(&teacher)?;
        if let Some(known) = settings.teacher
            && known != found
        {
            bail!(
                InvalidArgument,
                "the teacher is another model than the one that training began with: its fingerprint is {found} instead of {known}"
            );
        }
        let placement =
            placement.resolve(student, self.config(), self.device(), (&teacher, tokens));
        let chunk = self.config().head_chunk;
        let teacher = Teacher::new(self.device(), teacher, placement, chunk)
            .map_err(|e| e.within("the teacher"))?;
        self.put_teacher(teacher, found);
        Ok(())
    }
}
