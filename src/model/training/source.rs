//! The source of a training run: the parameters of a checkpoint.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::fresh::Fresh;
use super::{Layout, MatrixId, VectorId};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{Checkpoint, Encoding, Entry, no_tokenizer};
use crate::model::load::{
    UnreadableTensors, entries_used, has_own_head, locate, rows_f32, rows_int8, rows_nvfp4,
};
use crate::model::spec::{BlockSpec, ExpertNames, KeyValues, MixerSpec, MlpSpec, QkNorm, Scoring};
use crate::model::tensors::{self, StoredRows, TensorRole, TensorSpec};
use crate::model::{Spec, families, generation, open, spec_with_frequencies, text};
use crate::ops::Device;
use crate::text::{ChatTemplate, TextFiles, Tokenizer};

/// Tokenizer, template and special tokens of a model.
#[derive(Debug)]
pub struct SourceText {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's own chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// The token that ends a text, if the model has one.
    pub eos: Option<u32>,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
}

/// The parameters contained in an entry of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Matrices with their rows in the entry.
    pub matrices: Vec<(MatrixId, Range<usize>)>,
    /// Vectors with their elements in the entry.
    pub vectors: Vec<(VectorId, Range<usize>)>,
}

/// An opened checkpoint of a model to be trained.
pub struct Source {
    checkpoint: Arc<dyn Checkpoint>,
    spec: Spec,
    layout: Layout,
    /// The tensors of the matrices, and of the vectors.
    matrices: Vec<TensorSpec>,
    vectors: Vec<TensorSpec>,
    /// By the name of an entry.
    parts: HashMap<String, Parts>,
    text: OnceLock<TextFiles>,
    is_fresh: bool,
}

impl Source {
    /// Opens the model at `path`, in any loadable format. Reads no weights.
    pub fn open(path: &Path) -> Result<Source> {
        Self::new(Arc::from(open(path)?)).map_err(|e| e.within(path.display()))
    }

    /// A model with random weights from `seed`, of the shape in `config.json` of `directory`: see [`Fresh`].
    pub fn fresh(directory: &Path, seed: u64) -> Result<Source> {
        let fresh = Fresh::new(directory, seed).map_err(|e| e.within(directory.display()))?;
        let source = Self::new(Arc::new(fresh)).map_err(|e| e.within(directory.display()))?;
        Ok(Source {
            is_fresh: true,
            ..source
        })
    }

    /// Whether its weights are random.
    pub fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// The model in an opened checkpoint.
    pub fn new(checkpoint: Arc<dyn Checkpoint>) -> Result<Source> {
        let mut spec = spec_with_frequencies(&*checkpoint)?.without_growth();
        entries_used(&*checkpoint, &spec)?;
        // Exports keep the drafter's tensors as they are.
        spec.drafter = None;
        let is_said_to_be_tied = checkpoint
            .metadata()
            .config
            .as_ref()
            .is_some_and(families::is_tied);
        // A table that is stored twice is trained as one.
        spec.tied |= is_said_to_be_tied && !has_own_head(&*checkpoint)?;
        if let Some(refusal) = untrainable(&spec) {
            bail!(Unsupported, "{refusal}");
        }
        let mut all: HashMap<String, TensorSpec> = tensors::whole(&spec)
            .into_iter()
            .map(|tensor| (tensor.name.clone(), tensor))
            .collect();
        let layout = Layout::new(&spec, &|name| {
            let tensor = all.get(name);
            tensor.is_some_and(|t| locate(&*checkpoint, t).is_some())
        })?;
        let mut take = |name: &str| match all.remove(name) {
            Some(tensor) => Ok(tensor),
            None => bail!(Internal, "{name} is no tensor of the model"),
        };
        let matrices = layout
            .matrices
            .iter()
            .map(|m| take(&m.name))
            .collect::<Result<_>>()?;
        let vectors = layout
            .vectors
            .iter()
            .map(|v| take(&v.name))
            .collect::<Result<_>>()?;
        let source = Source {
            checkpoint,
            spec,
            layout,
            matrices,
            vectors,
            parts: HashMap::new(),
            text: OnceLock::new(),
            is_fresh: false,
        };
        let mut parts: HashMap<String, Parts> = HashMap::new();
        let mut place = |tensors: &[TensorSpec], of: fn(&mut Parts) -> &mut Vec<_>| {
            for (id, tensor) in tensors.iter().enumerate() {
                let (entry, within) = source.found(tensor)?;
                let each = match tensor.role {
                    TensorRole::Vector => row_elements(entry),
                    _ => 1,
                };
                // Tensors by the names of files are consecutive rows.
                let rows = within.first() * each..(within.first() + within.count()) * each;
                of(parts.entry(entry.name.clone()).or_default()).push((id, rows));
            }
            let all = parts.values_mut();
            all.for_each(|parts| of(parts).sort_by_key(|(_, within)| within.start));
            Ok(())
        };
        place(&source.matrices, |parts| &mut parts.matrices)?;
        place(&source.vectors, |parts| &mut parts.vectors)?;
        Ok(Source { parts, ..source })
    }

    /// The model's architecture.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Its parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<dyn Checkpoint> {
        &self.checkpoint
    }

    /// The tokenizer and the chat template of the checkpoint, read by the first call.
    pub(crate) fn text_files(&self) -> Result<TextFiles> {
        if let Some(text) = self.text.get() {
            return Ok(text.clone());
        }
        let text = text::read(&self.checkpoint.metadata().tokenizer)?;
        Ok(self.text.get_or_init(|| text).clone())
    }

    /// Reads the tokenizer, template and special tokens.
    pub fn text(&self) -> Result<SourceText> {
        let from = &self.checkpoint.metadata().tokenizer;
        let files = self.text_files()?;
        let Some(tokenizer) = files.tokenizer.clone() else {
            return Err(no_tokenizer(from.unread()));
        };
        let stop_tokens = generation::read(&self.spec, from, &files)?.stop_tokens;
        let named = files.eos.as_deref().and_then(|eos| tokenizer.id_of(eos));
        Ok(SourceText {
            eos: named
                .or(self.spec.eos.first().copied())
                .or(stop_tokens.first().copied()),
            tokenizer,
            template: files.template,
            stop_tokens,
        })
    }

    fn found(&self, tensor: &TensorSpec) -> Result<(&Entry, StoredRows)> {
        match locate(&*self.checkpoint, tensor) {
            None => match UnreadableTensors::of(&*self.checkpoint).find(tensor) {
                Some(unreadable) => bail!(Unsupported, "{unreadable}"),
                None => bail!(NotFound, "the model has no {}", tensor.name),
            },
            Some((entry, rows, shape)) if entry.shape == shape => Ok((entry, rows)),
            Some((entry, _, shape)) => bail!(
                CorruptFile,
                "{} has shape {:?}, expected {shape:?}",
                entry.name,
                entry.shape
            ),
        }
    }

    /// Reads rows of a matrix.
    pub fn matrix(&self, id: MatrixId, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let (entry, within) = self.found(&self.matrices[id])?;
        rows_f32(&*self.checkpoint, entry, &within, rows, out)
    }

    /// The encoding of a matrix in the checkpoint.
    pub fn encoding(&self, id: MatrixId) -> Result<Encoding> {
        Ok(self.entry(id)?.encoding)
    }

    /// The entry of the checkpoint that contains a matrix.
    pub fn entry(&self, id: MatrixId) -> Result<&Entry> {
        Ok(self.found(&self.matrices[id])?.0)
    }

    /// Whether the checkpoint holds matrices in NVFP4.
    pub fn is_nvfp4(&self) -> bool {
        let entries = self.checkpoint.entries().iter();
        entries.map(|e| e.encoding).any(|e| e == Encoding::Nvfp4)
    }

    /// Copies the codes and scales of rows of a matrix stored in int8.
    pub fn int8(
        &self,
        id: MatrixId,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        let (entry, within) = self.found(&self.matrices[id])?;
        rows_int8(&*self.checkpoint, entry, &within, rows, codes, scales)
    }

    /// The matrices in an entry of the checkpoint, each with its rows there, or the vectors with their elements, in order. Empty if the
    /// entry is not a parameter.
    pub fn parameters_of(&self, name: &str) -> Parts {
        self.parts.get(name).cloned().unwrap_or_default()
    }

    /// Copies the codes and block scales of a matrix stored in NVFP4, `cols / 2` and `cols / 16` bytes per row; returns the global scale.
    pub fn nvfp4(&self, id: MatrixId, codes: &mut [u8], scales: &mut [u8]) -> Result<f32> {
        let (entry, within) = self.found(&self.matrices[id])?;
        let rows = 0..within.count();
        rows_nvfp4(&*self.checkpoint, entry, &within, rows, codes, scales)?;
        self.checkpoint.global_scale(entry)
    }

    /// Reads a vector. For norms stored as offsets from one, adds the one.
    pub fn vector(&self, id: VectorId) -> Result<Vec<f32>> {
        let (entry, within) = self.found(&self.vectors[id])?;
        let mut all = vec![0.0; entry.rows() * entry.cols()];
        self.checkpoint.rows_f32(entry, 0..entry.rows(), &mut all)?;
        let each = row_elements(entry);
        let parts = within.parts(0..within.count());
        let parts = parts.map(|(_, part)| &all[part.start * each..part.end * each]);
        let mut values = parts.collect::<Vec<_>>().concat();
        if self.adds_one(id) {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        Ok(values)
    }

    /// Whether a vector is stored as what is to be added to one.
    pub fn adds_one(&self, id: VectorId) -> bool {
        tensors::is_offset_from_one(&self.spec, &self.layout.vectors[id].name)
    }

    /// Whether a matrix is some rows of an entry of the checkpoint.
    pub fn is_held_with_others(&self, id: MatrixId) -> bool {
        let tensor = &self.matrices[id];
        let found = self.found(tensor);
        found.is_ok_and(|(entry, _)| entry.shape != tensor.shape)
    }
}

/// Elements of an entry for each index of its first dimension: 1 for a vector.
fn row_elements(entry: &Entry) -> usize {
    entry.shape.iter().skip(1).product()
}

/// Why a model is neither trained nor calibrated: the first block whose backward pass is not built, if any.
pub fn untrainable(spec: &Spec) -> Option<String> {
    if spec.residual_scale != 1.0 || spec.logit_scale != 1.0 {
        return Some(format!(
            "this {} model has a residual multiplier and a scale of its logits, which have no backward pass yet: it can be run and quantized, but not trained or calibrated",
            spec.family
        ));
    }
    let (index, what) = first_block(spec, |block| match (&block.mixer, &block.mlp) {
        (MixerSpec::Attention(attention), _) if attention.rope.is_none() => {
            Some("has attention without rotation")
        }
        (MixerSpec::Attention(attention), _) if attention.qk_norm == QkNorm::Projections => {
            Some("has attention with norms over all heads")
        }
        (MixerSpec::Attention(attention), _) if attention.qk_norm == QkNorm::RotatedHeads => {
            Some("has attention with norms after rotation")
        }
        (MixerSpec::Attention(attention), _) if attention.interleaved => {
            Some("has interleaved RoPE")
        }
        (MixerSpec::Attention(attention), _) if attention.sinks => Some("has attention with sinks"),
        (MixerSpec::Attention(attention), _) if attention.key_values != KeyValues::Projected => {
            Some("has attention without projections of keys and values")
        }
        (MixerSpec::Attention(attention), _) if attention.value_norm => {
            Some("has attention with a norm of values")
        }
        (_, MlpSpec::DenseAndExperts(..)) => Some("has experts beside an MLP"),
        _ if block.per_layer.is_some() => Some("has an input of its own"),
        _ if block.scaled => Some("scales its residual stream"),
        (MixerSpec::Mamba2(_), _) => Some("is Mamba-2"),
        (MixerSpec::None, _) => Some("is an MLP alone"),
        (_, MlpSpec::None) => Some("is a mixer alone"),
        (_, MlpSpec::Experts(experts)) if experts.names == ExpertNames::Mixtral => {
            Some("has experts whose projections are numbered")
        }
        (_, MlpSpec::Experts(experts)) if experts.scoring != Scoring::Softmax => {
            Some("has experts scored by sigmoids")
        }
        (_, mlp) if mlp.is_clamped() => Some("has a clamped SwiGLU"),
        (_, MlpSpec::Experts(experts)) if experts.expert.bias || experts.router_bias => {
            Some("has a mixture with biases")
        }
        (_, mlp) if mlp.specs().any(|mlp| !mlp.gated) => Some("has an MLP without a gate"),
        _ => None,
    })?;
    Some(format!(
        "block {index} {what}, which has no backward pass yet: {} models can be run and quantized, but not trained or calibrated",
        spec.family
    ))
}

/// Why a model is neither trained nor calibrated on a GPU: the first block whose passes are built for the CPU alone, if any.
pub fn untrainable_on_gpu(spec: &Spec) -> Option<String> {
    let (index, what) = first_block(spec, |block| match &block.mixer {
        MixerSpec::GatedDelta(_) => Some("is a gated delta net"),
        MixerSpec::Attention(attention) if attention.gated => Some("has gated attention"),
        _ => None,
    })?;
    Some(format!(
        "block {index} {what}, which is trained and calibrated on the CPU alone: choose the CPU (--device cpu)"
    ))
}

/// The first block of which `what` says something.
fn first_block(
    spec: &Spec,
    what: impl Fn(&BlockSpec) -> Option<&'static str>,
) -> Option<(usize, &'static str)> {
    let mut blocks = spec.blocks.iter().enumerate();
    blocks.find_map(|(index, block)| Some((index, what(block)?)))
}

/// Refuses a device on which a model is not trained.
pub(crate) fn check_device(device: &Device, spec: &Spec) -> Result<()> {
    match untrainable_on_gpu(spec).filter(|_| device.is_cuda()) {
        Some(refusal) => bail!(Unsupported, "{}: {refusal}", device.name()),
        None => Ok(()),
    }
}
