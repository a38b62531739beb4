//! Plan of a conversion: the tensors to write, and how each derives from an entry.

use std::collections::HashSet;

use super::options::{Container, ConvertOptions, Tables};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{Checkpoint, Encoding, Entry, Planned, is_of_text_model};
use crate::format::nvfp4::BLOCK;
use crate::model::families;
use crate::model::load::{has_own_head, is_of_shared_keys};
use crate::model::spec::ExpertNames;
use crate::model::spec_of;
use crate::model::tensors::{
    EMBEDDINGS, HEAD, PER_LAYER_TABLE, StoredRows, expert_projection, gate_up_rows,
};
use crate::tensor::DType;

/// How a tensor derives from its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Copy,
    /// Copies the codes and scales of some rows.
    CopyRows,
    Quantize,
    /// Rounds rows to int8.
    Int8,
}

/// A tensor to write.
pub(super) struct PlannedTensor {
    /// Differs from the entry's name for an expert of a stack.
    pub(super) name: String,
    pub(super) entry: Entry,
    /// Rows of the entry, seen as a matrix, that form the tensor: all of them, except for an expert of a stack.
    pub(super) rows: StoredRows,
    pub(super) shape: Vec<usize>,
    pub(super) action: Action,
    pub(super) encoding: Encoding,
}

impl From<&PlannedTensor> for Planned {
    fn from(step: &PlannedTensor) -> Planned {
        Planned {
            name: step.name.clone(),
            shape: step.shape.clone(),
            encoding: step.encoding,
        }
    }
}

impl PlannedTensor {
    fn whole(entry: &Entry, action: Action, encoding: Encoding) -> PlannedTensor {
        PlannedTensor {
            name: entry.name.clone(),
            rows: (0..entry.rows()).into(),
            shape: entry.shape.clone(),
            entry: entry.clone(),
            action,
            encoding,
        }
    }

    /// Number of its rows.
    pub(super) fn height(&self) -> usize {
        self.rows.count()
    }

    /// Bytes of the source.
    pub(super) fn bytes(&self) -> u64 {
        self.entry.bytes * self.height() as u64 / self.entry.rows() as u64
    }

    /// Bytes that are written.
    pub(super) fn bytes_out(&self) -> u64 {
        let (rows, cols) = (self.height() as u64, self.entry.cols() as u64);
        self.encoding.matrix_bytes(rows, cols).unwrap_or(0)
    }
}

/// Weights that serving engines fuse into one matrix with one global scale.
pub(super) const FUSED: [&[&str]; 3] = [
    &["q_proj.weight", "k_proj.weight", "v_proj.weight"],
    &["gate_proj.weight", "up_proj.weight"],
    &["w1.weight", "w3.weight"],
];

/// The other linear weights; some of them are stored fused.
const ALONE: [&str; 5] = [
    "o_proj.weight",
    "down_proj.weight",
    "w2.weight",
    "qkv_proj.weight",
    "gate_up_proj.weight",
];

/// Whether `entry` is a weight of a linear layer of the text model or of the drafter that it uses, by name and shape.
fn is_linear(entry: &Entry, used: &HashSet<String>) -> bool {
    let last_two = |suffix: &&str| {
        entry
            .name
            .strip_suffix(*suffix)
            .is_some_and(|rest| rest.ends_with('.'))
    };
    entry.shape.len() == 2
        && (is_of_text_model(&entry.name) || used.contains(&entry.name))
        && (entry.name == HEAD || FUSED.concat().iter().chain(&ALONE).any(last_two))
}

/// Projections of recurrent layers, whose errors add up in a state. A file that holds them in 4 bits keeps them so.
const RECURRENT: [&str; 6] = [
    ".linear_attn.in_proj_qkv.weight",
    ".linear_attn.in_proj_z.weight",
    ".linear_attn.in_proj_qkvz.weight",
    ".linear_attn.out_proj.weight",
    ".mixer.in_proj.weight",
    ".mixer.out_proj.weight",
];

/// Whether `entry` becomes int8 because it belongs to a recurrent layer.
fn is_recurrent(entry: &Entry, container: Container) -> bool {
    let is_wide = !entry.encoding.is_integer() && entry.encoding != Encoding::Nvfp4;
    container == Container::ModelOpt
        && entry.shape.len() == 2
        && is_wide
        && RECURRENT.iter().any(|suffix| entry.name.ends_with(suffix))
}

/// The steps of a conversion. Entries that are not `used` by the model keep their encoding if NVFP4 cannot hold them; keys and values of
/// blocks that take those of others are left out.
pub(super) fn plan(
    source: &dyn Checkpoint,
    options: &ConvertOptions,
    used: &HashSet<String>,
) -> Result<Vec<PlannedTensor>> {
    let mut steps = Vec::with_capacity(source.entries().len());
    let spec = spec_of(source)?;
    let mut mixtures = spec.blocks.iter().filter_map(|block| block.mlp.mixture());
    let names = mixtures.next().map_or(ExpertNames::Qwen, |m| m.names);
    let is_tied = source.find(HEAD).is_none() || repeats_the_embedding(source)?;
    for entry in source.entries() {
        if is_tied && entry.name == HEAD || is_of_shared_keys(&spec, &entry.name) {
            continue;
        }
        if let Some(experts) = experts(source, entry, names, options.container)? {
            steps.extend(experts);
            continue;
        }
        let fits = !entry.encoding.is_integer() && entry.cols().is_multiple_of(BLOCK);
        let is_quantized = is_linear(entry, used) && (fits || used.contains(&entry.name));
        let is_kept = options.keeps(&entry.name);
        let encoding = match is_table(entry) {
            _ if is_kept => kept(entry, options.container),
            true => table_encoding(entry, options, is_tied)?,
            false if options.int8_rows.contains(&entry.name) => Encoding::Int8,
            false if is_recurrent(entry, options.container) => Encoding::Int8,
            false if entry.encoding == Encoding::Nvfp4 || is_quantized => Encoding::Nvfp4,
            false => kept(entry, options.container),
        };
        let is_as_stored = match encoding {
            Encoding::Nvfp4 => {
                entry.encoding == encoding
                    && (options.container == Container::ModelOpt
                        || source.global_scale(entry)? == 1.0)
            }
            Encoding::Int8 => entry.encoding == encoding,
            _ => true,
        };
        let action = match encoding {
            _ if is_as_stored => Action::Copy,
            Encoding::Int8 => Action::Int8,
            _ => Action::Quantize,
        };
        if (action != Action::Copy || is_table(entry)) && entry.encoding.is_integer() {
            bail!(
                Unsupported,
                "'{}' is stored as {}, and nothing says how weights come of that",
                entry.name,
                entry.encoding
            );
        }
        if encoding == Encoding::Nvfp4 && !entry.cols().is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "'{}' has K = {}, which is not a multiple of {BLOCK}; NVFP4 cannot hold it",
                entry.name,
                entry.cols()
            );
        }
        steps.push(PlannedTensor::whole(entry, action, encoding));
    }
    if options.keep.is_empty() && steps.iter().all(|s| s.encoding != Encoding::Nvfp4) {
        bail!(
            InvalidArgument,
            "none of the {} tensors is a linear weight (…q_proj.weight, …down_proj.weight, {HEAD}, …); the first is '{}'",
            steps.len(),
            steps.first().map_or("", |s| &s.name)
        );
    }
    Ok(steps)
}

/// Whether `entry` is the embedding, the head, or the table of per-layer embeddings.
fn is_table(entry: &Entry) -> bool {
    let name = entry.name.as_str();
    entry.shape.len() == 2
        && (EMBEDDINGS.contains(&name) || [HEAD, PER_LAYER_TABLE].contains(&name))
}

/// Encoding of a written table.
fn table_encoding(entry: &Entry, options: &ConvertOptions, is_tied: bool) -> Result<Encoding> {
    let bf16 = Encoding::Dense(DType::BF16);
    let holds_int8 = options.container == Container::ModelOpt;
    let is_head = entry.name == HEAD || is_tied && entry.name != PER_LAYER_TABLE;
    if options.keep_head && is_head {
        return Ok(kept(entry, options.container));
    }
    Ok(match (options.tables, entry.encoding) {
        (Tables::Bf16, _) => bf16,
        (Tables::Int8, _) if !holds_int8 => bail!(
            Unsupported,
            ".dat holds no int8 tables; ask for bf16 or nvfp4, or write a directory"
        ),
        (Tables::Int8, _) => Encoding::Int8,
        (Tables::Nvfp4, _) | (Tables::Auto, Encoding::Nvfp4) => Encoding::Nvfp4,
        // Integers without scales are refused where they are quantized.
        (Tables::Auto, encoding)
            if holds_int8 && (options.narrow_tables || bytes_of_value(encoding) == Some(1)) =>
        {
            Encoding::Int8
        }
        (Tables::Auto, same @ Encoding::Dense(DType::F16)) => same,
        (Tables::Auto, _) => bf16,
    })
}

/// Maximum bytes of a value, without scales.
fn bytes_of_value(encoding: Encoding) -> Option<usize> {
    match encoding {
        Encoding::Dense(_) => encoding.element_bytes(),
        Encoding::Nvfp4
        | Encoding::Mxfp4
        | Encoding::Int8
        | Encoding::Int4
        | Encoding::Nf4
        | Encoding::Ggml(_) => Some(1),
    }
}

/// Encoding of a tensor that is not quantized: its own, or a dense one if its own cannot be written.
fn kept(entry: &Entry, container: Container) -> Encoding {
    match entry.encoding {
        Encoding::Int8 if container == Container::ModelOpt => Encoding::Int8,
        Encoding::Mxfp4
        | Encoding::Int8
        | Encoding::Int4
        | Encoding::Nf4
        | Encoding::Dense(DType::F8E4M3)
        | Encoding::Ggml(_)
            if entry.shape.len() > 1 =>
        {
            Encoding::Dense(DType::BF16)
        }
        Encoding::Mxfp4
        | Encoding::Int4
        | Encoding::Nf4
        | Encoding::Dense(DType::F8E4M3)
        | Encoding::Ggml(_)
        | Encoding::Dense(DType::F64) => Encoding::Dense(DType::F32),
        same => same,
    }
}

/// Whether a model whose config ties the head to the embedding stores both, with the same values.
fn repeats_the_embedding(source: &dyn Checkpoint) -> Result<bool> {
    let is_said_to_be_tied = (source.metadata().config.as_ref()).is_some_and(families::is_tied);
    let has_embedding = EMBEDDINGS.iter().any(|name| source.find(name).is_some());
    Ok(is_said_to_be_tied && has_embedding && !has_own_head(source)?)
}

/// Divides a stack of experts into one tensor per expert, or two if the stack holds gate and up projections, named as in the family's files
/// of single experts: `mlp.experts.E.gate_proj.weight`, with `w1` for `gate_proj` in Mixtral's. What stands for `mlp` is kept. MXFP4 becomes
/// NVFP4 without loss. `None` for an entry that is not a stack.
fn experts(
    source: &dyn Checkpoint,
    entry: &Entry,
    names: ExpertNames,
    container: Container,
) -> Result<Option<Vec<PlannedTensor>>> {
    let stack = [".mlp.experts.", ".mixer.experts.", ".experts."]
        .into_iter()
        .find_map(|stacked| Some((entry.name.split_once(stacked)?, stacked)));
    let (Some(((block, projection), stacked)), &[count, rows, cols]) = (stack, &entry.shape[..])
    else {
        return Ok(None);
    };
    if entry.encoding.is_integer() || !cols.is_multiple_of(BLOCK) {
        bail!(
            Unsupported,
            "'{}' is a stack of experts of shape {:?} stored as {}; NVFP4 holds rows of a multiple of {BLOCK} numbers",
            entry.name,
            entry.shape,
            entry.encoding
        );
    }
    let is_kept = entry.encoding.reads_as_nvfp4()
        && (container == Container::ModelOpt
            || source
                .global_scales(entry)?
                .iter()
                .all(|&scale| scale == 1.0));
    let each: &[(&str, Option<usize>)] = match projection.trim_end_matches(".weight") {
        "gate_up_proj" => &[("gate_proj", Some(0)), ("up_proj", Some(1))],
        projection => &[(projection, None)],
    };
    let step = |(expert, &(projection, half)): (usize, &(&str, Option<usize>))| {
        let height = rows / each.len();
        let projection = expert_projection(names, projection);
        PlannedTensor {
            name: format!("{block}{stacked}{expert}.{projection}.weight"),
            entry: entry.clone(),
            shape: vec![height, cols],
            rows: match half {
                Some(half) => gate_up_rows(names, expert, half, height),
                None => (expert * rows..(expert + 1) * rows).into(),
            },
            action: match is_kept {
                true => Action::CopyRows,
                false => Action::Quantize,
            },
            encoding: Encoding::Nvfp4,
        }
    };
    let experts = (0..count).flat_map(|expert| each.iter().map(move |e| (expert, e)));
    Ok(Some(experts.map(step).collect()))
}
