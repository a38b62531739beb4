//! Loads weights from a checkpoint. Finds every tensor and checks its shape before reading any; then several threads pack tensors, a run of
//! rows at a time, while the calling thread reports progress and checks for cancellation. Checksums are computed on the way, so that the
//! model's fingerprint needs no second read. Where packed weights are mapped from a file, packing is left out, or done to compare with them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hasher;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use twox_hash::XxHash3_64;

use super::LoadOptions;
use super::mapped::MappedWeights;
use super::spec::{
    AttentionSpec, BlockSpec, DenseMlpSpec, ExpertsSpec, KeyValues, MixerSpec, MlpSpec, Spec,
};
use super::tensors::{
    self, BLOCK_SCALE, DELTA_A, DELTA_A_LOG, DELTA_B, DELTA_CONVOLUTION, DELTA_DT_BIAS, DELTA_NORM,
    DELTA_OUT, DELTA_QKV, DELTA_Z, DENSE_POST, DRAFTER, DRAFTER_EMBEDDING_NORM, DRAFTER_FC,
    DRAFTER_HIDDEN_NORM, DRAFTER_NORM, EMBEDDING, EMBEDDINGS, EXPERT_SCALES, EXPERTS_POST,
    EXPERTS_PRE, HEAD, MAMBA_A_LOG, MAMBA_CONVOLUTION, MAMBA_CONVOLUTION_BIAS, MAMBA_D, MAMBA_DT,
    MAMBA_DT_BIAS, MAMBA_NORM, MAMBA_OUT, MAMBA_XBC, MAMBA_Z, NORM, PER_LAYER_GATE,
    PER_LAYER_MODEL, PER_LAYER_NORM, PER_LAYER_OUT, PER_LAYER_POST, QUERY, QUERY_GATE,
    ROUTER_CORRECTION, ROUTER_SCALE, SINKS, StoredRows, TensorRole, TensorSpec, block_prefix,
    router,
};
use super::weights::{
    Attention, Block, DenseAndExperts, DenseMlp, Drafter, Embedding, Experts, FileTable,
    GatedDelta, Mamba2, Mixer, Mlp, Norms, PerLayer, PerLayerTable, Projection, Weights,
};
use crate::base::call::{self, Progress};
use crate::base::checksum::RowsChecksum;
use crate::base::error::{Error, bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::{ErrorKind, Result, memory, threads};
use crate::checkpoint::{self, Checkpoint, Encoding, Entry, PackedShape, Unreadable};
use crate::format::nvfp4::{self, BLOCK, NonFinite, QuantizeOptions};
use crate::ops::delta::DeltaWeights;
use crate::ops::linear::{Linear, Packed, ReadNvfp4};
use crate::ops::mamba::MambaWeights;
use crate::ops::{Array, Device};
use crate::tensor::{DType, WeightType};

/// Values read at a time when this file reads them itself: few enough to remain in a core's own cache until they are used.
const VALUES: usize = 1 << 16;
/// Bytes of an embedding that one job checks.
const CHECKED: u64 = 16 << 20;
/// Interval at which the calling thread reports progress.
const REPORT: Duration = Duration::from_millis(20);
/// Rows of a matrix that are compared with packed ones at a time.
pub(super) const COMPARED_ROWS: usize = 16 * Packed::ROW_MULTIPLE;
/// Limit on the missing names that a message lists.
const NAMED: usize = 64;

/// Tensors of attention that a block with the keys and values of another does not use.
const UNSHARED: [&str; 4] = [
    "self_attn.k_proj.",
    "self_attn.v_proj.",
    "self_attn.k_norm.",
    "self_attn.v_norm.",
];

/// A tensor of the model with its entry in the checkpoint.
#[derive(Clone)]
struct Found<'a> {
    spec: TensorSpec,
    entry: &'a Entry,
    /// Its rows in the entry seen as a matrix; its elements if both are vectors.
    rows: StoredRows,
}

impl Found<'_> {
    fn is_vector(&self) -> bool {
        self.spec.role == TensorRole::Vector
    }

    /// Output features of a matrix.
    fn height(&self) -> usize {
        self.spec.shape[0]
    }

    fn cols(&self) -> usize {
        self.entry.cols()
    }

    /// Number of values.
    fn elements(&self) -> usize {
        match self.spec.shape.len() {
            1 => self.rows.count(),
            _ => self.rows.count() * self.cols(),
        }
    }

    /// Bytes that it occupies in the checkpoint.
    fn bytes(&self) -> u64 {
        match self.spec.shape.len() {
            1 => {
                let all = self.entry.rows() * self.cols();
                self.entry.bytes * self.rows.count() as u64 / all as u64
            }
            _ => bytes_of(self.entry, self.rows.count()),
        }
    }
}

/// Whether a matrix is quantized while loading, if `quantize` asks for that.
fn is_quantized(found: &Found<'_>, quantize: bool) -> bool {
    held(found, quantize) != held(found, false)
}

/// The type in which a matrix is held; `quantize` says whether dense matrices are quantized while loading.
fn held(found: &Found<'_>, quantize: bool) -> WeightType {
    match found.entry.encoding {
        encoding if encoding.reads_as_nvfp4() => WeightType::Nvfp4,
        // Tables are stored in 8 bits because 4 were too few.
        Encoding::Int8 if [EMBEDDING, HEAD].contains(&&*found.spec.name) => WeightType::Int8,
        _ if quantize && found.spec.role == TensorRole::Linear => WeightType::Nvfp4,
        _ if found.spec.role == TensorRole::Router => WeightType::F32,
        Encoding::Int8 => WeightType::Int8,
        Encoding::Dense(DType::BF16) => WeightType::BF16,
        Encoding::Dense(DType::F16) => WeightType::F16,
        _ => WeightType::F32,
    }
}

/// The tensors of a model, sorted by how they are loaded.
struct Sorted<'a> {
    /// Matrices and vectors, in the order of the model. A head that is tied to the embedding is the first.
    held: Vec<Found<'a>>,
    embedding: Found<'a>,
    /// The table of per-layer embeddings, which stays in its file.
    per_layer_table: Option<Found<'a>>,
    /// Whether the embedding is the head too.
    tied: bool,
}

impl<'a> Sorted<'a> {
    /// Sorts the result of [`find`].
    fn of(mut found: Vec<Found<'a>>) -> Sorted<'a> {
        let tied = !found.iter().any(|f| f.spec.name == HEAD);
        let embedding = found.remove(0);
        let is_table = |f: &Found<'_>| f.spec.role == TensorRole::Table;
        let table = found.iter().position(is_table);
        let per_layer_table = table.map(|index| found.remove(index));
        if tied {
            let head = TensorSpec {
                name: HEAD.to_owned(),
                role: TensorRole::Linear,
                ..embedding.spec.clone()
            };
            let head = Found {
                spec: head,
                ..embedding.clone()
            };
            found.insert(0, head);
        }
        Sorted {
            held: found,
            embedding,
            per_layer_table,
            tied,
        }
    }

    /// Whether the head serves as the embedding. It holds the embedding's exact values unless it is quantized while loading.
    fn head_embeds(&self, quantize: bool) -> bool {
        let encoding = self.embedding.entry.encoding;
        let is_coded = matches!(encoding, Encoding::Nvfp4 | Encoding::Int8);
        self.tied && (is_coded || !quantize)
    }
}

/// A matrix or a vector as a loaded model holds it.
pub(super) struct HeldTensor {
    /// Its name in the model.
    pub(super) name: String,
    pub(super) role: TensorRole,
    pub(super) form: HeldForm,
    /// Whether it is mapped from a file of packed weights.
    pub(super) is_mapped: bool,
    /// Bytes of host memory for values that are converted while it is loaded.
    pub(super) converted_bytes: usize,
}

pub(super) enum HeldForm {
    Matrix {
        kind: WeightType,
        rows: usize,
        cols: usize,
    },
    /// f32.
    Vector { len: usize },
}

/// The tensors and tables of a loaded model.
pub(super) struct HeldTensors<'a> {
    pub(super) tensors: Vec<HeldTensor>,
    /// Tables of which a token reads one row, which stay in the file or, on a GPU, in host memory.
    pub(super) tables: Vec<&'a Entry>,
    /// Bytes of host memory for values of a table that a thread checks, at most.
    pub(super) checked_bytes: usize,
}

/// The tensors and tables that loading makes of a checkpoint. Reads no values. `packed` says whether it has packed weights to map.
pub(super) fn held_tensors<'a>(
    checkpoint: &'a dyn Checkpoint,
    spec: &Spec,
    quantize: bool,
    sampling_only: bool,
    packed: bool,
) -> Result<HeldTensors<'a>> {
    let sorted = Sorted::of(find(checkpoint, spec, sampling_only)?);
    let embedding = (!sorted.head_embeds(quantize)).then_some(sorted.embedding.entry);
    let per_layer = sorted.per_layer_table.as_ref().map(|table| table.entry);
    let tensor = |found: &Found<'_>| HeldTensor {
        name: found.spec.name.clone(),
        role: found.spec.role,
        form: match found.is_vector() {
            true => HeldForm::Vector {
                len: found.elements(),
            },
            false => HeldForm::Matrix {
                kind: held(found, quantize),
                rows: found.height(),
                cols: found.cols(),
            },
        },
        is_mapped: packed && !found.is_vector() && !is_quantized(found, quantize),
        converted_bytes: size_of::<f32>()
            * match found.is_vector() {
                true => found.entry.rows() * found.cols() + found.elements(),
                false => run_of(found.entry) * found.cols(),
            },
    };
    let checked = [Some(sorted.embedding.entry), per_layer];
    let checked = checked.into_iter().flatten();
    let checked = checked.map(|entry| size_of::<f32>() * run_of(entry) * entry.cols());
    Ok(HeldTensors {
        tensors: sorted.held.iter().map(tensor).collect(),
        tables: embedding.into_iter().chain(per_layer).collect(),
        checked_bytes: checked.max().unwrap_or(0),
    })
}

/// The work of a job on its tensor.
enum Action {
    Matrix,
    Vector,
    /// Only checks that all values of these rows are finite.
    Check(Range<usize>),
}

/// A unit of work for one thread.
struct Job<'a> {
    /// Name of the tensor in the model.
    name: String,
    found: Found<'a>,
    action: Action,
}

impl<'a> Job<'a> {
    /// Loads a matrix or a vector.
    fn of(found: Found<'a>) -> Job<'a> {
        Job {
            name: found.spec.name.clone(),
            action: match found.is_vector() {
                true => Action::Vector,
                false => Action::Matrix,
            },
            found,
        }
    }
}

/// Number of rows of an entry read at a time.
fn run_of(entry: &Entry) -> usize {
    (VALUES / entry.cols()).clamp(1, entry.rows())
}

/// Bytes of `rows` rows of an entry.
fn bytes_of(entry: &Entry, rows: usize) -> u64 {
    entry.bytes * rows as u64 / entry.rows() as u64
}

enum Loaded {
    Matrix(Linear),
    Vector(Array),
}

/// Finds every tensor that the model needs, the embedding first. All missing names are reported together, and then all wrong shapes.
fn find<'a>(
    checkpoint: &'a dyn Checkpoint,
    spec: &Spec,
    sampling_only: bool,
) -> Result<Vec<Found<'a>>> {
    // GGUF has one flag for attention biases, and omits the output's bias if there is none.
    let lenient = checkpoint.format() == "gguf";
    let wanted = match sampling_only {
        true => tensors::outside(spec),
        false => tensors::all(spec),
    };
    let (mut found, mut missing, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    let (asides, mut unreadable) = (UnreadableTensors::of(checkpoint), Vec::new());
    for tensor in wanted {
        let required = tensor.required && !(lenient && tensor.name.ends_with("o_proj.bias"));
        let Some((entry, rows, shape)) = locate(checkpoint, &tensor) else {
            if let Some(tensor) = asides.find(&tensor) {
                unreadable.push(tensor.to_string());
            } else if required {
                missing.push(tensor.stored_name().to_owned());
            }
            continue;
        };
        if entry.shape != shape {
            wrong.push(format!(
                "{} has shape {:?}, expected {shape:?}",
                entry.name, entry.shape
            ));
        } else if entry.encoding.is_integer() {
            wrong.push(format!(
                "{} is stored as {}, and nothing says how weights come of that",
                entry.name, entry.encoding
            ));
        } else {
            found.push(Found {
                spec: tensor,
                entry,
                rows,
            });
        }
    }
    // Several tensors may be parts of one.
    missing.dedup();
    let is_complete = missing.is_empty() && wrong.is_empty() && unreadable.is_empty();
    checkpoint::check_method(checkpoint, is_complete)?;
    if let [first, more @ ..] = &unreadable[..] {
        let more = match more.len() {
            0 => String::new(),
            n => format!("; {n} more tensors of the model cannot be read either"),
        };
        bail!(Unsupported, "{first}{more}");
    }
    if !missing.is_empty() {
        bail!(
            NotFound,
            "{} tensors of this {} model are missing: {}",
            missing.len(),
            spec.family,
            listed(&missing)
        );
    }
    if !wrong.is_empty() {
        wrong.dedup();
        bail!(CorruptFile, "{}", listed(&wrong));
    }
    if !sampling_only {
        check_nothing_left_out(checkpoint, spec, &found)?;
    }
    Ok(found)
}

/// The names of the entries that a model is loaded from. Fails on anything that loading would refuse before it reads values.
pub(super) fn entries_used(checkpoint: &dyn Checkpoint, spec: &Spec) -> Result<HashSet<String>> {
    let found = find(checkpoint, spec, false)?;
    Ok(found.into_iter().map(|f| f.entry.name.clone()).collect())
}

/// The entry that contains a tensor, the tensor's rows in it, and the required shape of the entry.
pub(super) fn locate<'a>(
    checkpoint: &'a dyn Checkpoint,
    tensor: &TensorSpec,
) -> Option<(&'a Entry, StoredRows, Vec<usize>)> {
    let find = |name: &str| {
        let bare = || checkpoint.find(without_head(name)?);
        checkpoint.find(name).or_else(bare)
    };
    if let Some(entry) = find(&tensor.name).filter(|_| tensor.alone) {
        return Some((entry, (0..tensor.shape[0]).into(), tensor.shape.clone()));
    }
    tensor.within.iter().find_map(|within| {
        let entry = find(&within.name)?;
        Some((entry, within.rows.clone(), within.shape.clone()))
    })
}

/// Reads rows of a tensor that is `within` an entry, as f32.
pub(super) fn rows_f32(
    checkpoint: &dyn Checkpoint,
    entry: &Entry,
    within: &StoredRows,
    rows: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    let cols = entry.cols();
    if let Some(span) = within.alternating(&rows) {
        let mut all = memory::zeros(span.len() * cols)?;
        checkpoint.rows_f32(entry, span, &mut all)?;
        every_other(&all, cols, out);
        return Ok(());
    }
    within.parts(rows).try_for_each(|(at, stored)| {
        let out = &mut out[at * cols..(at + stored.len()) * cols];
        checkpoint.rows_f32(entry, stored, out)
    })
}

/// Copies the codes and row scales of such a tensor stored in int8.
pub(super) fn rows_int8(
    checkpoint: &dyn Checkpoint,
    entry: &Entry,
    within: &StoredRows,
    rows: Range<usize>,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<()> {
    let cols = entry.cols();
    within.parts(rows).try_for_each(|(at, stored)| {
        let end = at + stored.len();
        let codes = &mut codes[at * cols..end * cols];
        checkpoint.rows_int8(entry, stored, codes, &mut scales[at..end])
    })
}

/// Copies the codes and block scales of such a tensor that a checkpoint gives in NVFP4, `cols / 2` and `cols / 16` bytes a row.
pub(super) fn rows_nvfp4(
    checkpoint: &dyn Checkpoint,
    entry: &Entry,
    within: &StoredRows,
    rows: Range<usize>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    let (coded, scaled) = (entry.cols() / 2, entry.cols() / BLOCK);
    if let Some(span) = within.alternating(&rows) {
        let mut all_codes = memory::zeros(span.len() * coded)?;
        let mut all_scales = memory::zeros(span.len() * scaled)?;
        checkpoint.rows_nvfp4(entry, span, &mut all_codes, &mut all_scales)?;
        every_other(&all_codes, coded, codes);
        every_other(&all_scales, scaled, scales);
        return Ok(());
    }
    within.parts(rows).try_for_each(|(at, stored)| {
        let end = at + stored.len();
        let codes = &mut codes[at * coded..end * coded];
        let scales = &mut scales[at * scaled..end * scaled];
        checkpoint.rows_nvfp4(entry, stored, codes, scales)
    })
}

/// Copies every other row of `all`, the first included.
fn every_other<T: Copy>(all: &[T], width: usize, out: &mut [T]) {
    let rows = all.chunks_exact(width).step_by(2);
    for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(row);
    }
}

/// The name of a tensor in files of a model that was saved without its head: `layers.0...`, `embed_tokens.weight`.
fn without_head(name: &str) -> Option<&str> {
    name.strip_prefix("model.")
}

/// Tensors of the file that cannot be read, by name.
pub(super) struct UnreadableTensors<'a>(HashMap<&'a str, &'a Unreadable>);

impl<'a> UnreadableTensors<'a> {
    pub(super) fn of(checkpoint: &'a dyn Checkpoint) -> Self {
        let all = checkpoint.unreadable().iter();
        UnreadableTensors(all.map(|u| (u.name.as_str(), u)).collect())
    }

    /// The unreadable tensor that would be this tensor of the model.
    pub(super) fn find(&self, tensor: &TensorSpec) -> Option<&'a Unreadable> {
        if self.0.is_empty() {
            return None;
        }
        let within = tensor.within.iter().map(|within| &within.name);
        std::iter::once(&tensor.name)
            .chain(within)
            .flat_map(|name| [Some(name.as_str()), without_head(name)])
            .flatten()
            .find_map(|name| self.0.get(name).copied())
    }
}

/// Warns of unreadable tensors that the model does not use.
fn warn_of_unreadable(checkpoint: &dyn Checkpoint) {
    if let [first, more @ ..] = checkpoint.unreadable() {
        tracing::warn!(
            "{} tensors that the model does not use cannot be read: {first}{}",
            more.len() + 1,
            if more.is_empty() { "" } else { ", ..." }
        );
    }
}

/// Whether the head is a separate table although the config ties it to the embedding: both are in the checkpoint, with different values.
/// transformers does not tie them then either.
pub(super) fn has_own_head(checkpoint: &dyn Checkpoint) -> Result<bool> {
    let find = |name: &str| {
        let bare = || checkpoint.find(without_head(name)?);
        checkpoint.find(name).or_else(bare)
    };
    let embedding = EMBEDDINGS.iter().find_map(|name| find(name));
    let (Some(embedding), Some(head)) = (embedding, find(HEAD)) else {
        return Ok(false);
    };
    if embedding.shape != head.shape {
        return Ok(true);
    }
    let (run, cols) = (run_of(embedding), embedding.cols());
    let mut a = Buffer::<f32>::zeroed(Tag::Scratch, run * cols)?;
    let mut b = Buffer::<f32>::zeroed(Tag::Scratch, run * cols)?;
    for first in (0..embedding.rows()).step_by(run) {
        call::check()?;
        let rows = first..embedding.rows().min(first + run);
        let len = rows.len() * cols;
        checkpoint.rows_f32(embedding, rows.clone(), &mut a[..len])?;
        checkpoint.rows_f32(head, rows, &mut b[..len])?;
        if a[..len] != b[..len] {
            return Ok(true);
        }
    }
    Ok(false)
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED);
    let named = names[..names.len() - more].join(", ");
    match more {
        0 => named,
        _ => format!("{named} and {more} more"),
    }
}

/// Fails if a layer has a weight or bias that the forward pass would not use: the model is then not what its config describes.
fn check_nothing_left_out(
    checkpoint: &dyn Checkpoint,
    spec: &Spec,
    found: &[Found<'_>],
) -> Result<()> {
    let used: HashSet<&str> = found.iter().map(|f| f.entry.name.as_str()).collect();
    let extra: Vec<String> = checkpoint
        .entries()
        .iter()
        .map(|e| e.name.as_str())
        .filter(|n| n.starts_with("model.layers.") || n.starts_with("layers."))
        .filter(|n| !used.contains(n))
        .filter(|n| n.ends_with(".weight") || n.ends_with(".bias"))
        .filter(|n| !is_of_shared_keys(spec, n) && !is_of_unread_layer(spec, n))
        .map(str::to_owned)
        .collect();
    if !extra.is_empty() {
        bail!(
            Unsupported,
            "{} tensors have no place in a {} model of {} layers: {}",
            extra.len(),
            spec.family,
            spec.blocks.len(),
            listed(&extra)
        );
    }
    Ok(())
}

/// The number of the block that a tensor belongs to, and its name there.
fn within_block(name: &str) -> Option<(usize, &str)> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let (index, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((index.parse().ok()?, rest))
}

/// Whether a tensor belongs to a block after the model's own that is not read.
fn is_of_unread_layer(spec: &Spec, name: &str) -> bool {
    let own = spec.blocks.len();
    within_block(name).is_some_and(|(index, _)| (own..own + spec.unread_layers).contains(&index))
}

/// Whether a tensor would give keys or values of a block that takes those of another. Files hold such tensors, unused.
pub(super) fn is_of_shared_keys(spec: &Spec, name: &str) -> bool {
    let Some((index, rest)) = within_block(name) else {
        return false;
    };
    let attention = spec.blocks.get(index).and_then(BlockSpec::attention);
    attention.is_some_and(|a| !a.has_own_keys())
        && UNSHARED.iter().any(|part| rest.starts_with(part))
}

/// State shared by the packing threads.
struct PackingState<'a> {
    checkpoint: &'a dyn Checkpoint,
    device: &'a Device,
    quantize: Option<&'a QuantizeOptions>,
    /// Whether the embedding is checked only by quantizing the head that is tied to it.
    checked_by_head: bool,
    spec: &'a Spec,
    packed: Option<&'a MappedWeights>,
    /// Checksums of the model's tensors, by name.
    sums: Mutex<BTreeMap<String, RowsChecksum>>,
    /// The next job.
    next: AtomicUsize,
    /// Bytes read so far.
    done: AtomicU64,
    /// The first failed job. Jobs before it continue, so that a broken file gives the same message every time.
    failed: AtomicUsize,
    cancelled: AtomicBool,
}

impl<'a> PackingState<'a> {
    /// Before the first job, for weights as they are stored.
    fn new(checkpoint: &'a dyn Checkpoint, device: &'a Device, spec: &'a Spec) -> Self {
        PackingState {
            checkpoint,
            device,
            quantize: None,
            checked_by_head: false,
            spec,
            packed: None,
            sums: Mutex::default(),
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            failed: AtomicUsize::new(usize::MAX),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Whether the result of a job is no longer needed.
    fn is_moot(&self, job: usize) -> bool {
        self.cancelled.load(Ordering::Relaxed) || job > self.failed.load(Ordering::Relaxed)
    }
}

/// A job running on a thread.
struct Work<'a> {
    shared: &'a PackingState<'a>,
    number: usize,
    /// Name of the tensor in the model.
    name: &'a str,
}

impl Work<'_> {
    /// Reports that `bytes` more of the checkpoint have been read; fails once the job must stop.
    fn advance(&self, bytes: u64) -> Result<()> {
        self.shared.done.fetch_add(bytes, Ordering::Relaxed);
        if self.shared.is_moot(self.number) {
            bail!(Cancelled, "loading was cancelled");
        }
        Ok(())
    }

    fn vector(&self, found: &Found<'_>) -> Result<Array> {
        let mut values;
        if found.spec.shape.len() == 1 {
            values = self.elements(found)?;
        } else {
            values = Buffer::zeroed(Tag::Weights, found.elements())?;
            self.rows_f32(found, 0..found.rows.count(), &mut values)?;
        }
        check_finite(&values, 0, values.len())?;
        let mut sum = RowsChecksum::new();
        sum.add_f32(0, values.len(), &values);
        self.record(self.name, sum);
        if self.name.ends_with(ROUTER_SCALE) {
            // The norm of the router's input includes the factor that makes the length of its rows 1.
            let factor = (self.shared.spec.hidden_size as f64).powf(-0.5) as f32;
            values.iter_mut().for_each(|v| *v *= factor);
        }
        if tensors::is_offset_from_one(self.shared.spec, self.name) {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        self.advance(found.bytes())?;
        Array::weight(self.shared.device, values)
    }

    /// The elements of a tensor with one dimension, which may be some of a matrix.
    fn elements(&self, found: &Found<'_>) -> Result<Buffer<f32>> {
        let (entry, cols, count) = (found.entry, found.cols(), found.rows.count());
        let mut values = Buffer::zeroed(Tag::Weights, count)?;
        let checkpoint = self.shared.checkpoint;
        if count == entry.rows() * cols && found.rows == StoredRows::from(0..count) {
            checkpoint.rows_f32(entry, 0..entry.rows(), &mut values)?;
            return Ok(values);
        }
        let parts = || found.rows.parts(0..count).map(|(_, part)| part);
        let first = parts().map(|part| part.start).min().unwrap_or(0) / cols;
        let end = parts().map(|part| part.end).max().unwrap_or(0);
        let rows = first..end.div_ceil(cols);
        let mut all = Buffer::<f32>::zeroed(Tag::Scratch, rows.len() * cols)?;
        checkpoint.rows_f32(entry, rows, &mut all)?;
        for (at, part) in found.rows.parts(0..count) {
            let from = part.start - first * cols;
            values[at..at + part.len()].copy_from_slice(&all[from..from + part.len()]);
        }
        Ok(values)
    }

    /// Merges a checksum into that of the tensor `name`.
    fn record(&self, name: &str, sum: RowsChecksum) {
        let mut sums = self
            .shared
            .sums
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        sums.entry(name.to_owned()).or_default().merge(sum);
    }

    fn check(&self, found: &Found<'_>, rows: Range<usize>) -> Result<()> {
        let (mut sum, cols) = (RowsChecksum::new(), found.cols());
        self.each_run(found, rows, |first, values| {
            check_finite(values, first, cols)?;
            sum.add_f32(first, cols, values);
            self.advance(bytes_of(found.entry, values.len() / cols))
        })?;
        self.record(self.name, sum);
        Ok(())
    }

    /// Reads rows of a tensor as f32.
    fn rows_f32(&self, found: &Found<'_>, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        rows_f32(self.shared.checkpoint, found.entry, &found.rows, rows, out)
    }

    fn each_run(
        &self,
        found: &Found<'_>,
        rows: Range<usize>,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (run, cols) = (run_of(found.entry), found.cols());
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, run.min(rows.len()) * cols)?;
        for first in rows.clone().step_by(run) {
            let n = run.min(rows.end - first);
            let values = &mut values[..n * cols];
            self.rows_f32(found, first..first + n, values)?;
            each(first, values)?;
        }
        Ok(())
    }

    fn matrix(&self, found: &Found<'_>) -> Result<Linear> {
        let is_quantized = is_quantized(found, self.shared.quantize.is_some());
        match self.shared.packed {
            Some(packed) if !is_quantized => self.mapped(found, packed),
            _ => self.packed(found),
        }
    }

    /// A matrix packed into memory.
    fn packed(&self, found: &Found<'_>) -> Result<Linear> {
        let mut sums = MatrixSums::default();
        let linear = match self.shared.quantize {
            Some(options) if is_quantized(found, true) => {
                self.quantized(found, options, &mut sums)?
            }
            _ => self.rows(found, 0..found.height(), &mut sums)?,
        };
        self.record(self.name, sums.finish());
        Ok(linear)
    }

    /// A matrix in the mapped file of packed weights. Unless that is current, it is compared with the weights.
    fn mapped(&self, found: &Found<'_>, packed: &MappedWeights) -> Result<Linear> {
        let (rows, cols) = (found.height(), found.cols());
        let (linear, sum) = packed.matrix(self.name, held(found, false), (rows, cols))?;
        if packed.is_current() {
            self.record(self.name, RowsChecksum::from_sum(sum));
            self.advance(found.bytes())?;
            return Ok(linear);
        }
        let mut sums = MatrixSums::default();
        let mut rest = linear.host_bytes();
        for first in (0..rows).step_by(COMPARED_ROWS) {
            let some = self.rows(found, first..rows.min(first + COMPARED_ROWS), &mut sums)?;
            match rest.strip_prefix(some.host_bytes()) {
                Some(left) if some.global().to_bits() == linear.global().to_bits() => rest = left,
                _ => return Err(packed.differs()),
            }
        }
        self.record(self.name, sums.finish());
        Ok(linear)
    }

    /// Some rows of a matrix, in the form in which it is stored, and their checksums.
    fn rows(&self, found: &Found<'_>, rows: Range<usize>, sums: &mut MatrixSums) -> Result<Linear> {
        let (entry, cols, device) = (found.entry, found.cols(), self.shared.device);
        let (checkpoint, first, count) = (self.shared.checkpoint, rows.start, rows.len());
        let within = |range: Range<usize>| first + range.start..first + range.end;
        match held(found, false) {
            WeightType::Nvfp4 => {
                let global = global_of(checkpoint, found)?;
                self.nvfp4(found, rows, global, sums, &mut |range, codes, scales| {
                    rows_nvfp4(checkpoint, entry, &found.rows, range, codes, scales)
                })
            }
            WeightType::Int8 => {
                let [coded, scaled] = sums.parts(None);
                Linear::int8(device, count, cols, &mut |range, codes, scales| {
                    let range = within(range);
                    rows_int8(checkpoint, entry, &found.rows, range.clone(), codes, scales)?;
                    coded.add(range.start, cols, codes);
                    scaled.add_f32(range.start, 1, scales);
                    self.advance(bytes_of(entry, range.len()))
                })
            }
            dense => {
                let Some(dtype) = dense.dtype() else {
                    bail!(Internal, "{} holds a dense matrix", dense.name());
                };
                let sum = &mut sums.values;
                Linear::dense(device, count, cols, dtype, &mut |range, values| {
                    let range = within(range);
                    self.rows_f32(found, range.clone(), values)?;
                    sum.add_f32(range.start, cols, values);
                    self.advance(bytes_of(entry, range.len()))
                })
            }
        }
    }

    /// A dense matrix, quantized to NVFP4.
    fn quantized(
        &self,
        found: &Found<'_>,
        options: &QuantizeOptions,
        sums: &mut MatrixSums,
    ) -> Result<Linear> {
        let (entry, cols) = (found.entry, found.cols());
        let is_table = self.shared.checked_by_head && found.spec.name == HEAD;
        let (mut amax, mut sum) = (0f32, RowsChecksum::new());
        self.each_run(found, 0..found.height(), |first, values| {
            amax = amax.max(nvfp4::amax(values, first * cols, options.nonfinite)?);
            if is_table {
                sum.add_f32(first, cols, values);
            }
            self.advance(0)
        })?;
        if is_table {
            self.record(EMBEDDING, sum);
        }
        let global = nvfp4::global_scale(amax, options);
        let run = run_of(entry);
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, run * cols)?;
        let all = 0..found.height();
        self.nvfp4(found, all, global, sums, &mut |range, codes, scales| {
            // The packer may take more rows at a time than this buffer holds.
            for first in range.clone().step_by(run) {
                let (at, n) = (first - range.start, run.min(range.end - first));
                let values = &mut values[..n * cols];
                self.rows_f32(found, first..first + n, values)?;
                nvfp4::quantize_rows(
                    values,
                    cols,
                    first,
                    global,
                    options,
                    &mut codes[at * cols / 2..(at + n) * cols / 2],
                    &mut scales[at * cols / BLOCK..(at + n) * cols / BLOCK],
                )?;
            }
            Ok(())
        })
    }

    /// Some rows of a weight with codes and block scales from `read`, which takes numbers of rows in the matrix.
    fn nvfp4(
        &self,
        found: &Found<'_>,
        rows: Range<usize>,
        global: f32,
        sums: &mut MatrixSums,
        read: &mut ReadNvfp4,
    ) -> Result<Linear> {
        let cols = found.cols();
        let [coded, scaled] = sums.parts(Some(global));
        Linear::nvfp4(
            self.shared.device,
            rows.len(),
            cols,
            global,
            &mut |range, codes, scales| {
                let range = rows.start + range.start..rows.start + range.end;
                read(range.clone(), codes, scales)?;
                coded.add(range.start, cols / 2, codes);
                scaled.add(range.start, cols / BLOCK, scales);
                self.advance(bytes_of(found.entry, range.len()))
            },
        )
    }
}

/// The global scale of a matrix that a checkpoint gives in NVFP4.
fn global_of(checkpoint: &dyn Checkpoint, found: &Found<'_>) -> Result<f32> {
    let globals = checkpoint.global_scales(found.entry)?;
    // Each expert of a stack may have its own.
    Ok(globals[found.rows.first() / (found.entry.rows() / globals.len())])
}

/// Checksums of a matrix.
#[derive(Default)]
struct MatrixSums {
    /// Checksum of values or codes.
    values: RowsChecksum,
    /// Checksum of scales, and the global scale, if there are scales.
    scales: Option<(RowsChecksum, Option<f32>)>,
}

impl MatrixSums {
    /// The checksums of codes and of scales.
    fn parts(&mut self, global: Option<f32>) -> [&mut RowsChecksum; 2] {
        let (scales, _) = self.scales.get_or_insert((RowsChecksum::new(), global));
        [&mut self.values, scales]
    }

    /// The checksum of the whole matrix.
    fn finish(self) -> RowsChecksum {
        let Some((scales, global)) = self.scales else {
            return self.values;
        };
        let parts = [Some(self.values.finish()), Some(scales.finish())];
        let global = global.map(|global| global.to_bits().into());
        let parts = parts.into_iter().chain([global]).flatten();
        let mut whole = RowsChecksum::new();
        for (i, part) in parts.enumerate() {
            whole.add(i, 8, &u64::to_le_bytes(part));
        }
        whole
    }
}

/// Values that packing refuses come from the file, so the error is not the caller's fault.
fn of_the_file(error: Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidArgument => Error::new(ErrorKind::CorruptFile, error.message()),
        _ => error,
    }
}

fn check_finite(values: &[f32], first_row: usize, cols: usize) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => bail!(
            CorruptFile,
            "element [{}, {}] is {}; weights must be finite",
            first_row + i / cols,
            i % cols,
            values[i]
        ),
    }
}

/// Loads all weights of `spec` from `checkpoint`. Also returns a checksum of them without the drafter, which changes no result, and the
/// result of `meanwhile`, which runs on the embedding, and on the table of per-layer embeddings if there is one, in its own thread while
/// the weights are read. One of the threads that read them calls `first` before it begins.
pub(super) fn load<T: Send>(
    checkpoint: Arc<dyn Checkpoint>,
    spec: &Spec,
    options: &LoadOptions,
    first: &(dyn Fn() + Sync),
    meanwhile: impl FnOnce(&Embedding, Option<&FileTable>) -> Result<T> + Send,
) -> Result<(Weights, u64, T)> {
    let sorted = Sorted::of(find(&*checkpoint, spec, options.sampling_only)?);
    warn_of_unreadable(&*checkpoint);
    let packed = MappedWeights::of(&*checkpoint, options)?;
    let checked_by_head = sorted.tied
        && options
            .quantize
            .as_ref()
            .is_none_or(|q| q.nonfinite == NonFinite::Error);

    let in_file = |found: &Found<'_>| FileTable {
        checkpoint: checkpoint.clone(),
        entry: found.entry.clone(),
    };
    let embedding = match sorted.head_embeds(options.quantize.is_some()) {
        true => Embedding::Head,
        false => Embedding::File(in_file(&sorted.embedding)),
    };
    let per_layer_table = sorted.per_layer_table.as_ref().map(in_file);
    let checked = Some(&sorted.embedding).filter(|_| !checked_by_head);
    let checked = checked.into_iter().chain(&sorted.per_layer_table);
    let mut sums = BTreeMap::new();
    let mut jobs = Vec::new();
    for table in checked {
        let name = &table.spec.name;
        match packed.as_ref().and_then(|packed| packed.table(name)) {
            Some(sum) => drop(sums.insert(name.clone(), RowsChecksum::from_sum(sum))),
            None => jobs.extend(checks(table)),
        }
    }
    jobs.extend(sorted.held.into_iter().map(Job::of));
    let made = Mutex::new(None);
    let (mut loaded, sums) = threads::scope(|scope| {
        let make = || {
            let result = meanwhile(&embedding, per_layer_table.as_ref());
            *made.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        };
        scope
            .start("nvfp4-embedding", make)
            .map_err(|e| err!(OutOfMemory, "starting a thread to load with: {e}"))?;
        let state = PackingState {
            quantize: options.quantize.as_ref(),
            checked_by_head,
            packed: packed.as_ref(),
            sums: Mutex::new(sums),
            ..PackingState::new(&*checkpoint, &options.device, spec)
        };
        run(state, &jobs, first)
    })?;
    let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    let made = made.ok_or_else(|| err!(Internal, "nothing was made of the embedding"))??;
    let blocks = match options.sampling_only {
        true => 0,
        false => spec.blocks.len(),
    };
    let per_layer = match per_layer_table {
        Some(table) => Some(PerLayerTable {
            table,
            projection: loaded.projection(PER_LAYER_MODEL)?,
            norm: loaded.vector(PER_LAYER_NORM)?,
        }),
        None => None,
    };
    let mut weights = Weights {
        locked: None,
        embedding,
        per_layer,
        blocks: (0..blocks)
            .map(|i| loaded.block(&options.device, spec, i))
            .collect::<Result<_>>()?,
        drafter: match options.sampling_only {
            true => None,
            false => loaded.drafter(&options.device, spec)?,
        },
        norm: loaded.vector(NORM)?,
        head: loaded.projection("lm_head")?,
    };
    if options.mlock {
        weights.lock()?;
    }
    Ok((weights, sum_of_model(&sums), made))
}

/// Jobs that check the values of a table that stays in its file.
fn checks<'a>(found: &Found<'a>) -> Vec<Job<'a>> {
    let (entry, rows) = (found.entry, found.entry.rows());
    let row_bytes = entry.bytes.div_ceil(rows as u64);
    let step = (CHECKED / row_bytes.max(1)).max(1) as usize;
    let of_rows = |first: usize| Job {
        name: found.spec.name.clone(),
        found: Found {
            spec: found.spec.clone(),
            entry,
            rows: found.rows.clone(),
        },
        action: Action::Check(first..(first + step).min(rows)),
    };
    (0..rows).step_by(step).map(of_rows).collect()
}

/// The matrices of a model on the CPU, and the tables that stay in their file, for packing them without loading the model.
pub(super) struct PackPlan<'a> {
    checkpoint: &'a dyn Checkpoint,
    spec: &'a Spec,
    matrices: Vec<Job<'a>>,
    tables: Vec<Found<'a>>,
}

impl<'a> PackPlan<'a> {
    pub(super) fn of(checkpoint: &'a dyn Checkpoint, spec: &'a Spec) -> Result<PackPlan<'a>> {
        let sorted = Sorted::of(find(checkpoint, spec, false)?);
        let embedding = Some(sorted.embedding).filter(|_| !sorted.tied);
        let matrices = sorted.held.into_iter().filter(|found| !found.is_vector());
        Ok(PackPlan {
            checkpoint,
            spec,
            matrices: matrices.map(Job::of).collect(),
            tables: embedding
                .into_iter()
                .chain(sorted.per_layer_table)
                .collect(),
        })
    }

    /// The matrices in their order, in the forms in which they are stored.
    pub(super) fn shapes(&self) -> Result<Vec<PackedShape>> {
        let shape = |job: &Job<'a>| {
            let (found, kind) = (&job.found, held(&job.found, false));
            let (rows, cols) = (found.height(), found.cols());
            let global = match kind {
                WeightType::Nvfp4 => global_of(self.checkpoint, found)?,
                _ => 1.0,
            };
            Ok(PackedShape {
                name: job.name.clone(),
                kind: kind.name().to_owned(),
                rows,
                cols,
                global: global.to_bits(),
                bytes: Packed::bytes_of(rows, cols, kind)? as u64,
            })
        };
        self.matrices.iter().map(shape).collect()
    }

    /// Names of the tables.
    pub(super) fn tables(&self) -> Vec<String> {
        self.tables
            .iter()
            .map(|found| found.spec.name.clone())
            .collect()
    }

    /// Packs some of the matrices. Returns them with the checksums of their source weights, in order.
    pub(super) fn pack(&self, device: &Device, some: Range<usize>) -> Result<Vec<(Linear, u64)>> {
        let jobs = &self.matrices[some];
        let state = PackingState::new(self.checkpoint, device, self.spec);
        let (mut parts, sums) = run(state, jobs, &|| {})?;
        let of = |job: &Job<'_>| Ok((parts.linear(&job.name)?, sum_of(&sums, &job.name)?));
        jobs.iter().map(of).collect()
    }

    /// The checksums of the tables, whose values are checked on the way.
    pub(super) fn sum_tables(&self, device: &Device) -> Result<Vec<u64>> {
        let jobs: Vec<Job<'_>> = self.tables.iter().flat_map(checks).collect();
        let state = PackingState::new(self.checkpoint, device, self.spec);
        let (_, sums) = run(state, &jobs, &|| {})?;
        let of = |found: &Found<'_>| sum_of(&sums, &found.spec.name);
        self.tables.iter().map(of).collect()
    }
}

fn sum_of(sums: &BTreeMap<String, RowsChecksum>, name: &str) -> Result<u64> {
    let sum = sums.get(name).map(|sum| sum.finish());
    sum.ok_or_else(|| err!(Internal, "{name} has no checksum"))
}

/// Signals that a thread has ended, even by a panic.
struct Done<'a>(&'a Mutex<usize>, &'a Condvar);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.1.notify_one();
    }
}

/// Runs the jobs on the device's threads and reports progress on this one. Returns the loaded tensors and the checksums of all of them, by name.
fn run(
    shared: PackingState<'_>,
    jobs: &[Job<'_>],
    first: &(dyn Fn() + Sync),
) -> Result<(Parts, BTreeMap<String, RowsChecksum>)> {
    let total = jobs
        .iter()
        .map(|job| match &job.action {
            Action::Check(rows) => bytes_of(job.found.entry, rows.len()),
            Action::Matrix | Action::Vector => job.found.bytes(),
        })
        .sum();
    let parts = Mutex::new(HashMap::new());
    let failure: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    // Number of running threads. A channel would register the end of this thread's storage, for which the C library allocates memory.
    let (working, finished) = (Mutex::new(0usize), Condvar::new());
    let work = || {
        loop {
            let number = shared.next.fetch_add(1, Ordering::Relaxed);
            let Some(Job {
                name,
                found,
                action,
            }) = jobs.get(number)
            else {
                break;
            };
            if shared.is_moot(number) {
                break;
            }
            let work = Work {
                shared: &shared,
                number,
                name,
            };
            let made = match action {
                Action::Matrix => work.matrix(found).map(|m| Some(Loaded::Matrix(m))),
                Action::Vector => work.vector(found).map(|v| Some(Loaded::Vector(v))),
                Action::Check(rows) => work.check(found, rows.clone()).map(|()| None),
            };
            match made {
                Ok(None) => {}
                Ok(Some(loaded)) => {
                    let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
                    parts.insert(name.clone(), loaded);
                }
                // The job was stopped; it did not fail itself.
                Err(_) if shared.is_moot(number) => {}
                Err(e) => {
                    shared.failed.fetch_min(number, Ordering::Relaxed);
                    let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                    if failure.as_ref().is_none_or(|(at, _)| number < *at) {
                        *failure = Some((number, of_the_file(e).within(&found.entry.name)));
                    }
                }
            }
        }
    };
    let report = || {
        let done = shared.done.load(Ordering::Relaxed).min(total);
        call::tell(Progress { done, total });
        if call::is_over() {
            shared.cancelled.store(true, Ordering::Relaxed);
        }
    };
    threads::scope(|scope| -> Result<()> {
        let lock = || working.lock().unwrap_or_else(PoisonError::into_inner);
        let (work, working, finished) = (&work, &working, &finished);
        for i in 0..shared.device.threads().min(jobs.len()).max(1) {
            let work = move || {
                let _done = Done(working, finished);
                if i == 0 {
                    first();
                }
                work();
            };
            *lock() += 1;
            if let Err(e) = scope.start(&format!("nvfp4-load-{i}"), work) {
                *lock() -= 1;
                // With fewer threads, loading only takes longer.
                match i {
                    0 => bail!(OutOfMemory, "starting a thread to load with: {e}"),
                    _ => break,
                }
            }
        }
        let mut left = lock();
        while *left > 0 {
            let waited = finished.wait_timeout(left, REPORT);
            let (still, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            left = still;
            if timeout.timed_out() {
                drop(left);
                report();
                left = lock();
            }
        }
        Ok(())
    })?;
    if let Some((_, e)) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(e);
    }
    if !shared.cancelled.load(Ordering::Relaxed) {
        shared.done.store(total, Ordering::Relaxed);
        report();
    }
    if shared.cancelled.load(Ordering::Relaxed) {
        bail!(Cancelled, "loading was cancelled");
    }
    let sums = shared.sums.into_inner();
    let parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    let sums = sums.unwrap_or_else(PoisonError::into_inner);
    Ok((Parts(parts), sums))
}

/// The checksum of a model, from those of its tensors. The drafter changes no result, and does not count.
fn sum_of_model(sums: &BTreeMap<String, RowsChecksum>) -> u64 {
    let mut sum = XxHash3_64::new();
    for (name, rows) in sums.iter().filter(|(name, _)| !name.starts_with(DRAFTER)) {
        sum.write(name.as_bytes());
        sum.write(&rows.finish().to_le_bytes());
    }
    sum.finish()
}

/// Elements of the norm of a layer's values, which files store no weight for; 0 without one.
pub(super) fn value_norm(attention: &AttentionSpec) -> usize {
    match attention.value_norm && attention.has_own_keys() {
        true => attention.head_dim,
        false => 0,
    }
}

/// The weight of a norm that files store none for.
fn ones(device: &Device, len: usize) -> Result<Array> {
    let mut values = Buffer::zeroed(Tag::Weights, len)?;
    values.fill(1.0);
    Array::weight(device, values)
}

/// Loaded tensors, removed by name as the model is assembled.
struct Parts(HashMap<String, Loaded>);

impl Parts {
    fn vector(&mut self, name: &str) -> Result<Array> {
        self.optional(name)
            .ok_or_else(|| err!(Internal, "{name} was not loaded"))
    }

    fn optional(&mut self, name: &str) -> Option<Array> {
        match self.0.remove(name) {
            Some(Loaded::Vector(v)) => Some(v),
            _ => None,
        }
    }

    fn linear(&mut self, name: &str) -> Result<Linear> {
        match self.0.remove(name) {
            Some(Loaded::Matrix(linear)) => Ok(linear),
            _ => bail!(Internal, "{name} was not loaded"),
        }
    }

    fn projection(&mut self, name: &str) -> Result<Projection> {
        Ok(Projection {
            name: name.to_owned(),
            linear: self.linear(&format!("{name}.weight"))?,
            bias: self.optional(&format!("{name}.bias")),
        })
    }

    fn block(&mut self, device: &Device, spec: &Spec, index: usize) -> Result<Block> {
        let BlockSpec {
            norms,
            mixer,
            mlp,
            per_layer,
            scaled,
        } = spec.block(index)?;
        let prefix = &block_prefix(spec, index);
        let name = |n: &str| format!("{prefix}{n}");
        let mut norm = |n: &str, has: bool| match has {
            true => self.vector(&name(&format!("{n}.weight"))).map(Some),
            false => Ok(None),
        };
        let names = spec.norm_names;
        let (mixes, has_mlp) = (*mixer != MixerSpec::None, *mlp != MlpSpec::None);
        let mixer_norms = Norms {
            pre: norm(names.mixer, norms.pre && mixes)?,
            post: norm(names.mixer_post, norms.post && mixes)?,
        };
        let mlp_norms = Norms {
            pre: norm(names.mlp, norms.pre && has_mlp)?,
            post: norm(names.mlp_post, norms.post && has_mlp)?,
        };
        Ok(Block {
            mixer_norms,
            mixer: match mixer {
                MixerSpec::Attention(attention) => {
                    Mixer::Attention(Box::new(self.attention(device, attention, prefix)?))
                }
                MixerSpec::GatedDelta(_) => Mixer::GatedDelta(Box::new(self.gated_delta(prefix)?)),
                MixerSpec::Mamba2(_) => Mixer::Mamba2(Box::new(self.mamba2(prefix)?)),
                MixerSpec::None => Mixer::None,
            },
            mlp_norms,
            mlp: match mlp {
                MlpSpec::Dense(mlp) => Mlp::Dense(Box::new(self.mlp(mlp, &name("mlp"))?)),
                MlpSpec::Experts(experts) => Mlp::Experts(Box::new(self.experts(experts, prefix)?)),
                MlpSpec::DenseAndExperts(dense, experts) => {
                    Mlp::DenseAndExperts(Box::new(DenseAndExperts {
                        dense: self.mlp(dense, &name("mlp"))?,
                        dense_norm: self.vector(&name(DENSE_POST))?,
                        experts: self.experts(experts, prefix)?,
                        experts_input_norm: self.vector(&name(EXPERTS_PRE))?,
                        experts_norm: self.vector(&name(EXPERTS_POST))?,
                    }))
                }
                MlpSpec::None => Mlp::None,
            },
            per_layer: match per_layer {
                Some(_) => Some(PerLayer {
                    gate: self.projection(&name(PER_LAYER_GATE))?,
                    projection: self.projection(&name(PER_LAYER_OUT))?,
                    norm: self.vector(&name(PER_LAYER_POST))?,
                }),
                None => None,
            },
            scale: match scaled {
                true => Some(self.vector(&name(BLOCK_SCALE))?),
                false => None,
            },
        })
    }

    /// The drafter, if the model has one.
    fn drafter(&mut self, device: &Device, spec: &Spec) -> Result<Option<Drafter>> {
        if spec.drafter.is_none() {
            return Ok(None);
        }
        Ok(Some(Drafter {
            embedding_norm: self.vector(DRAFTER_EMBEDDING_NORM)?,
            hidden_norm: self.vector(DRAFTER_HIDDEN_NORM)?,
            fc: self.linear(DRAFTER_FC)?,
            block: self.block(device, spec, spec.blocks.len())?,
            norm: self.vector(DRAFTER_NORM)?,
        }))
    }

    fn attention(
        &mut self,
        device: &Device,
        spec: &AttentionSpec,
        prefix: &str,
    ) -> Result<Attention> {
        let name = |n: &str| format!("{prefix}{n}");
        let (query, gate) = match spec.gated {
            false => ("self_attn.q_proj", None),
            true => (QUERY, Some(QUERY_GATE)),
        };
        Ok(Attention {
            q: self.projection(&name(query))?,
            gate: gate.map(|gate| self.projection(&name(gate))).transpose()?,
            k: match spec.has_own_keys() {
                true => Some(self.projection(&name("self_attn.k_proj"))?),
                false => None,
            },
            v: match spec.key_values {
                KeyValues::Projected => Some(self.projection(&name("self_attn.v_proj"))?),
                KeyValues::KeysAsValues | KeyValues::OfBlock(_) => None,
            },
            q_norm: self.optional(&name("self_attn.q_norm.weight")),
            k_norm: self.optional(&name("self_attn.k_norm.weight")),
            v_norm: match value_norm(spec) {
                0 => None,
                len => Some(ones(device, len)?),
            },
            sinks: self.optional(&name(SINKS)),
            o: self.projection(&name("self_attn.o_proj"))?,
        })
    }

    fn gated_delta(&mut self, prefix: &str) -> Result<GatedDelta> {
        let name = |n: &str| format!("{prefix}{n}");
        Ok(GatedDelta {
            qkv: self.projection(&name(DELTA_QKV))?,
            z: self.projection(&name(DELTA_Z))?,
            a: self.projection(&name(DELTA_A))?,
            b: self.projection(&name(DELTA_B))?,
            heads: DeltaWeights {
                convolution: self.vector(&name(DELTA_CONVOLUTION))?,
                a_log: self.vector(&name(DELTA_A_LOG))?,
                dt_bias: self.vector(&name(DELTA_DT_BIAS))?,
            },
            norm: self.vector(&name(DELTA_NORM))?,
            out: self.projection(&name(DELTA_OUT))?,
        })
    }

    fn mamba2(&mut self, prefix: &str) -> Result<Mamba2> {
        let name = |n: &str| format!("{prefix}{n}");
        Ok(Mamba2 {
            z: self.projection(&name(MAMBA_Z))?,
            xbc: self.projection(&name(MAMBA_XBC))?,
            dt: self.projection(&name(MAMBA_DT))?,
            heads: MambaWeights {
                convolution: self.vector(&name(MAMBA_CONVOLUTION))?,
                convolution_bias: self.optional(&name(MAMBA_CONVOLUTION_BIAS)),
                a_log: self.vector(&name(MAMBA_A_LOG))?,
                dt_bias: self.vector(&name(MAMBA_DT_BIAS))?,
                skip: self.vector(&name(MAMBA_D))?,
                norm: self.vector(&name(MAMBA_NORM))?,
            },
            out: self.projection(&name(MAMBA_OUT))?,
        })
    }

    fn mlp(&mut self, spec: &DenseMlpSpec, name: &str) -> Result<DenseMlp> {
        Ok(DenseMlp {
            gate: match spec.gated {
                true => Some(self.projection(&format!("{name}.gate_proj"))?),
                false => None,
            },
            up: self.projection(&format!("{name}.up_proj"))?,
            down: self.projection(&format!("{name}.down_proj"))?,
        })
    }

    fn experts(&mut self, spec: &ExpertsSpec, prefix: &str) -> Result<Experts> {
        let name = |n: &str| format!("{prefix}{n}");
        let shared = match &spec.shared {
            None => None,
            Some(shared) => Some((
                self.mlp(&shared.mlp, &name("mlp.shared_expert"))?,
                match shared.gated {
                    true => Some(self.linear(&name("mlp.shared_expert_gate.weight"))?),
                    false => None,
                },
            )),
        };
        Ok(Experts {
            router: self.projection(&name(router(spec.names)))?,
            correction: self.optional(&name(ROUTER_CORRECTION)),
            router_scales: match spec.router_scaled {
                true => Some([
                    self.vector(&name(ROUTER_SCALE))?,
                    self.vector(&name(EXPERT_SCALES))?,
                ]),
                false => None,
            },
            experts: (0..spec.count)
                .map(|expert| self.mlp(&spec.expert, &name(&format!("mlp.experts.{expert}"))))
                .collect::<Result<_>>()?,
            shared,
        })
    }
}
