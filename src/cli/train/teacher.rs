//! The teacher of a run: its options, and the model they name.

use std::ffi::OsString;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::model::training::{Placement, Source};
use NVFP4::train::{self, Config, Distillation, TeacherPlacement, Trainer};
use clap::ValueEnum;

use crate::cli::model::{resolve, shown};
use crate::cli::output;

#[derive(clap::Args)]
pub(super) struct TeacherArgs {
    /// Learn what this model predicts, and not the labels: a file, a directory, or ORG/NAME on the hub, of the same vocabulary. Without a
    /// name it is --model itself, as it is before it is quantized. Passes then multiply with what is delivered from the first step on
    #[arg(
        long,
        value_name = "MODEL",
        num_args = 0..=1,
        help_heading = "Teacher"
    )]
    pub(super) teacher: Option<Option<OsString>>,
    /// Divides the logits of both models by T, and multiplies the divergence by its square; default: 1
    #[arg(long, value_name = "T", requires = "teacher", help_heading = "Teacher")]
    teacher_temperature: Option<f64>,
    /// The share of the labels' cross-entropy in the loss; default: 0
    #[arg(
        long,
        value_name = "SHARE",
        requires = "teacher",
        help_heading = "Teacher"
    )]
    label_share: Option<f64>,
    /// Where the teacher's weights are: on the device (resident), read from its files in each pass (streamed), or on the device if both
    /// models fit (auto)
    #[arg(
        long,
        value_enum,
        default_value_t = MemoryName::Auto,
        value_name = "WHERE",
        requires = "teacher",
        help_heading = "Teacher"
    )]
    teacher_memory: MemoryName,
    /// Have the teacher write N texts before training, and learn from those: answers to the questions in --data, from the first on and
    /// around again, or without --data texts of its own. They are in OUT/teacher.jsonl
    #[arg(long, value_name = "N", requires = "teacher", help_heading = "Teacher")]
    pub(super) teacher_writes: Option<usize>,
}

/// The name of the loss by which evaluations are compared.
pub(super) fn measure(config: &Config) -> &'static str {
    match &config.distillation {
        None => "evaluation loss",
        Some(learned) if learned.label_share == 0.0 => "divergence from the teacher",
        Some(_) => "evaluation loss against the teacher and the labels",
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum MemoryName {
    Auto,
    Resident,
    Streamed,
}

impl TeacherArgs {
    /// Requested location of the teacher's weights.
    pub(super) fn placement(&self) -> TeacherPlacement {
        match self.teacher_memory {
            MemoryName::Auto => TeacherPlacement::Auto,
            MemoryName::Resident => TeacherPlacement::Resident,
            MemoryName::Streamed => TeacherPlacement::Streamed,
        }
    }

    /// The distillation settings for `teacher`: options override those of a file.
    pub(super) fn distillation(
        &self,
        teacher: &Source,
        earlier: Option<&Distillation>,
    ) -> Result<Distillation> {
        let earlier = earlier.cloned().unwrap_or_default();
        Ok(Distillation {
            teacher: Some(train::fingerprint(teacher)?),
            temperature: self.teacher_temperature.unwrap_or(earlier.temperature),
            label_share: self.label_share.unwrap_or(earlier.label_share),
        })
    }

    /// The name of the teacher's model; `model` is the name of the student's.
    pub(super) fn name<'a>(&'a self, model: Option<&'a OsString>) -> Option<&'a OsString> {
        let named = self.teacher.as_ref()?;
        named.as_ref().or(model)
    }

    /// The teacher of a model, checked.
    pub(super) fn open(
        &self,
        model: Option<&OsString>,
        source: &Source,
    ) -> Result<Option<Arc<Source>>> {
        let Some(named) = &self.teacher else {
            return Ok(None);
        };
        let Some(name) = self.name(model) else {
            bail!(
                InvalidArgument,
                "--init begins with random weights, which have nothing to teach; name the teacher: --teacher MODEL"
            );
        };
        if named.is_none() && source.is_nvfp4() {
            bail!(
                InvalidArgument,
                "{} holds NVFP4, and as its own teacher has nothing to teach; name the model that it was quantized from: --teacher MODEL",
                shown(name)
            );
        }
        let teacher = Source::open(&resolve(name)?).map_err(|e| e.within("the teacher"))?;
        train::check_vocabulary(source, &teacher)?;
        Ok(Some(Arc::new(teacher)))
    }

    /// Describes the location of the teacher's weights for a person.
    pub(super) fn describe(&self, model: Option<&OsString>, trainer: &Trainer) -> Option<String> {
        let teacher = trainer.teacher()?;
        let name = self.name(model).map(|name| shown(name));
        let name = name.unwrap_or_default();
        Some(match (teacher.placement(), self.teacher_memory) {
            (Placement::Resident, _) => format!(
                "teacher: {name}, {} on {}",
                output::size(teacher.bytes() as u64),
                trainer.device().name()
            ),
            (Placement::Streamed, MemoryName::Auto) => format!(
                "teacher: {name}, whose weights are read from its files in each pass, as both models do not fit in memory"
            ),
            (Placement::Streamed, _) => {
                format!("teacher: {name}, whose weights are read from its files in each pass")
            }
        })
    }
}
