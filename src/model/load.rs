//! Weights out of a checkpoint. Everything is looked up and its shape checked before anything is read; then tensors are
//! packed on several threads, a run of rows at a time, while the calling thread reports progress and hears about cancelling. What
//! passes through is summed up on the way, so that a model knows its fingerprint without being read twice.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::LoadOptions;
use super::config::Config;
use super::weights::{Embedding, Layer, Projection, Weights};
use crate::base::call::{self, Progress};
use crate::base::checksum::{Checksum, RowsChecksum};
use crate::base::error::{Error, bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::{ErrorKind, Result, threads};
use crate::checkpoint::{Checkpoint, Encoding, Entry};
use crate::format::nvfp4::{self, BLOCK, NonFinite, QuantizeOptions};
use crate::ops::Device;
use crate::ops::linear::{DenseType, Linear, ReadNvfp4};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const NORM: &str = "model.norm.weight";

/// Values read at a time where this file reads them itself: so few that they are still in a core's own cache when they are used.
const VALUES: usize = 1 << 16;
/// Bytes of an embedding that one thread looks through.
const CHECKED: u64 = 16 << 20;
/// How often the calling thread looks up from waiting.
const REPORT: Duration = Duration::from_millis(20);
/// Missing names that a message spells out.
const NAMED: usize = 64;

/// A tensor that a model has.
struct Wanted {
    name: String,
    shape: Vec<usize>,
    required: bool,
}

fn layer_name(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

/// Everything that one layer has.
fn layer_tensors(config: &Config) -> Vec<(String, Vec<usize>, bool)> {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    let mut out = vec![
        ("input_layernorm.weight".to_owned(), vec![hidden], true),
        (
            "post_attention_layernorm.weight".to_owned(),
            vec![hidden],
            true,
        ),
    ];
    for (name, rows, cols, bias) in [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    ] {
        out.push((format!("{name}.weight"), vec![rows, cols], true));
        out.push((format!("{name}.bias"), vec![rows], bias));
    }
    if config.architecture.qk_norm {
        for name in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
            out.push((name.to_owned(), vec![config.head_dim], true));
        }
    }
    out
}

/// How a matrix is held in memory.
enum Held {
    Nvfp4,
    Dense(DenseType),
}

/// How the matrix of an entry is held, where dense ones are quantized on the way or not.
fn held(entry: &Entry, quantize: bool) -> Held {
    match entry.encoding {
        Encoding::Nvfp4 => Held::Nvfp4,
        _ if quantize => Held::Nvfp4,
        Encoding::BF16 => Held::Dense(DenseType::BF16),
        Encoding::F16 => Held::Dense(DenseType::F16),
        _ => Held::Dense(DenseType::F32),
    }
}

/// Bytes that the weights of a checkpoint take once loaded, but for what kernels round up to.
pub(super) fn weight_bytes(
    checkpoint: &dyn Checkpoint,
    config: &Config,
    quantize: bool,
) -> Result<u64> {
    let found = find(checkpoint, config, false)?;
    let has_head = found.iter().any(|(name, _)| name == HEAD);
    let bytes = |(name, entry): &(String, &Entry)| {
        let elements = entry.rows() as u64 * entry.cols() as u64;
        match held(entry, quantize) {
            // An embedding with a head beside it stays in the file.
            _ if name == EMBEDDING && has_head => 0,
            _ if entry.shape.len() == 1 => elements * 4,
            Held::Nvfp4 => elements / 2 + elements / BLOCK as u64,
            Held::Dense(dtype) => elements * dtype.dtype().bytes() as u64,
        }
    };
    Ok(found.iter().map(bytes).sum())
}

/// What a job makes of its entry.
enum Job {
    Matrix,
    Vector,
    /// Only looks whether all values of these rows are finite.
    Check(Range<usize>),
}

/// Rows of an entry that are read at a time.
fn run_of(entry: &Entry) -> usize {
    (VALUES / entry.cols()).clamp(1, entry.rows())
}

/// Bytes of so many rows of an entry.
fn bytes_of(entry: &Entry, rows: usize) -> u64 {
    entry.bytes * rows as u64 / entry.rows() as u64
}

enum Loaded {
    Matrix(Linear),
    Vector(Buffer<f32>),
}

/// Finds every tensor that the model needs. All missing names, and then all wrong shapes, are reported together.
fn find<'a>(
    checkpoint: &'a dyn Checkpoint,
    config: &Config,
    sampling_only: bool,
) -> Result<Vec<(String, &'a Entry)>> {
    let mut wanted: Vec<Wanted> = Vec::new();
    let mut want = |name: String, shape: Vec<usize>, required| {
        wanted.push(Wanted {
            name,
            shape,
            required,
        });
    };
    let table = vec![config.vocab_size, config.hidden_size];
    want(EMBEDDING.to_owned(), table.clone(), true);
    want(HEAD.to_owned(), table, !config.tied);
    want(NORM.to_owned(), vec![config.hidden_size], true);
    if !sampling_only {
        // GGUF has one flag for attention biases, and leaves the output's out where there is none.
        let lenient = checkpoint.format() == "gguf";
        let tensors = layer_tensors(config);
        for layer in 0..config.layers {
            for (name, shape, required) in &tensors {
                let required = *required && !(lenient && name == "self_attn.o_proj.bias");
                want(layer_name(layer, name), shape.clone(), required);
            }
        }
    }
    let (mut found, mut missing, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for w in wanted {
        match checkpoint.find(&w.name) {
            None if w.required => missing.push(w.name),
            None => {}
            Some(entry) if entry.shape != w.shape => wrong.push(format!(
                "{} has shape {:?}, expected {:?}",
                w.name, entry.shape, w.shape
            )),
            Some(entry) if entry.encoding.is_integer() => wrong.push(format!(
                "{} is stored as {}, and nothing says how weights come of that",
                w.name, entry.encoding
            )),
            Some(entry) => found.push((w.name, entry)),
        }
    }
    if !missing.is_empty() {
        bail!(
            NotFound,
            "{} tensors of this {} model are missing: {}",
            missing.len(),
            config.architecture.name,
            listed(&missing)
        );
    }
    if !wrong.is_empty() {
        bail!(CorruptFile, "{}", listed(&wrong));
    }
    if !sampling_only {
        check_nothing_left_out(checkpoint, config, &found)?;
    }
    Ok(found)
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED);
    let named = names[..names.len() - more].join(", ");
    match more {
        0 => named,
        _ => format!("{named} and {more} more"),
    }
}

/// A weight or bias in a layer that the forward pass would not use means that the model is not what its config says.
fn check_nothing_left_out(
    checkpoint: &dyn Checkpoint,
    config: &Config,
    found: &[(String, &Entry)],
) -> Result<()> {
    let used: std::collections::HashSet<&str> = found.iter().map(|(n, _)| n.as_str()).collect();
    let extra: Vec<String> = checkpoint
        .entries()
        .iter()
        .map(|e| e.name.as_str())
        .filter(|n| n.starts_with("model.layers.") && !used.contains(n))
        .filter(|n| n.ends_with(".weight") || n.ends_with(".bias"))
        .map(str::to_owned)
        .collect();
    if !extra.is_empty() {
        bail!(
            Unsupported,
            "{} tensors have no place in a {} model of {} layers: {}",
            extra.len(),
            config.architecture.name,
            config.layers,
            listed(&extra)
        );
    }
    Ok(())
}

/// What the packing threads share.
struct Shared<'a> {
    checkpoint: &'a dyn Checkpoint,
    device: &'a Device,
    quantize: Option<&'a QuantizeOptions>,
    /// Whether all that looks at the embedding is the quantizing of the head that is tied to it.
    checked_by_head: bool,
    /// What the tensors of the model hold, by name.
    sums: Mutex<BTreeMap<String, RowsChecksum>>,
    /// The next job.
    next: AtomicUsize,
    /// Bytes that have been read.
    done: AtomicU64,
    /// The first job that has failed. Those before it go on, so that a broken file gives the same message every time.
    failed: AtomicUsize,
    cancelled: AtomicBool,
}

impl Shared<'_> {
    /// Whether nobody needs a job any more.
    fn is_moot(&self, job: usize) -> bool {
        self.cancelled.load(Ordering::Relaxed) || job > self.failed.load(Ordering::Relaxed)
    }
}

/// A job in a thread's hands.
struct Work<'a> {
    shared: &'a Shared<'a>,
    number: usize,
    /// What it makes, by its name in the model.
    name: &'a str,
}

impl Work<'_> {
    /// Tells that `bytes` more of the checkpoint have been read; an error once the job is to stop.
    fn advance(&self, bytes: u64) -> Result<()> {
        self.shared.done.fetch_add(bytes, Ordering::Relaxed);
        if self.shared.is_moot(self.number) {
            bail!(Cancelled, "loading was cancelled");
        }
        Ok(())
    }

    fn vector(&self, entry: &Entry) -> Result<Buffer<f32>> {
        let mut values = Buffer::zeroed(Tag::Weights, entry.cols())?;
        self.shared.checkpoint.rows_f32(entry, 0..1, &mut values)?;
        check_finite(&values, 0, entry.cols())?;
        let mut sum = RowsChecksum::new();
        sum.add_f32(0, entry.cols(), &values);
        self.record(self.name, sum);
        self.advance(entry.bytes)?;
        Ok(values)
    }

    /// Adds to what is known of the tensor `name`.
    fn record(&self, name: &str, sum: RowsChecksum) {
        let mut sums = self
            .shared
            .sums
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        sums.entry(name.to_owned()).or_default().merge(sum);
    }

    fn check(&self, entry: &Entry, rows: Range<usize>) -> Result<()> {
        let mut sum = RowsChecksum::new();
        self.each_run(entry, rows, |first, values| {
            check_finite(values, first, entry.cols())?;
            sum.add_f32(first, entry.cols(), values);
            self.advance(bytes_of(entry, values.len() / entry.cols()))
        })?;
        self.record(self.name, sum);
        Ok(())
    }

    fn each_run(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (run, cols) = (run_of(entry), entry.cols());
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, run.min(rows.len()) * cols)?;
        for first in rows.clone().step_by(run) {
            let n = run.min(rows.end - first);
            let values = &mut values[..n * cols];
            let rows = first..first + n;
            self.shared.checkpoint.rows_f32(entry, rows, values)?;
            each(first, values)?;
        }
        Ok(())
    }

    fn matrix(&self, entry: &Entry) -> Result<Linear> {
        let (rows, cols) = (entry.rows(), entry.cols());
        let Held::Dense(dtype) = held(entry, self.shared.quantize.is_some()) else {
            return self.packed(entry);
        };
        let mut sum = RowsChecksum::new();
        let linear = Linear::dense(
            self.shared.device,
            rows,
            cols,
            dtype,
            &mut |range, values| {
                self.shared
                    .checkpoint
                    .rows_f32(entry, range.clone(), values)?;
                sum.add_f32(range.start, cols, values);
                self.advance(bytes_of(entry, range.len()))
            },
        )?;
        self.record(self.name, sum);
        Ok(linear)
    }

    /// A matrix in NVFP4, as it is stored or quantized on the way.
    fn packed(&self, entry: &Entry) -> Result<Linear> {
        let cols = entry.cols();
        let Some(options) = self
            .shared
            .quantize
            .filter(|_| entry.encoding != Encoding::Nvfp4)
        else {
            let global = self.shared.checkpoint.global_scale(entry)?;
            return self.nvfp4(entry, global, &mut |range, codes, scales| {
                self.shared
                    .checkpoint
                    .rows_nvfp4(entry, range, codes, scales)
            });
        };
        let is_table = self.shared.checked_by_head && entry.name == EMBEDDING;
        let (mut amax, mut sum) = (0f32, RowsChecksum::new());
        self.each_run(entry, 0..entry.rows(), |first, values| {
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
        self.nvfp4(entry, global, &mut |range, codes, scales| {
            // The packer may take more rows at a time than this thread has room for.
            for first in range.clone().step_by(run) {
                let (at, n) = (first - range.start, run.min(range.end - first));
                let values = &mut values[..n * cols];
                let rows = first..first + n;
                self.shared.checkpoint.rows_f32(entry, rows, values)?;
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

    /// The weight whose codes and block scales `read` gives.
    fn nvfp4(&self, entry: &Entry, global: f32, read: &mut ReadNvfp4) -> Result<Linear> {
        let (rows, cols) = (entry.rows(), entry.cols());
        let mut sums = [RowsChecksum::new(); 2];
        let linear = Linear::nvfp4(
            self.shared.device,
            rows,
            cols,
            global,
            &mut |range, codes, scales| {
                read(range.clone(), codes, scales)?;
                sums[0].add(range.start, cols / 2, codes);
                sums[1].add(range.start, cols / BLOCK, scales);
                self.advance(bytes_of(entry, range.len()))
            },
        )?;
        let [codes, scales] = sums.map(RowsChecksum::finish);
        let mut whole = RowsChecksum::new();
        for (i, word) in [codes, scales, global.to_bits().into()]
            .into_iter()
            .enumerate()
        {
            whole.add(i, 8, &word.to_le_bytes());
        }
        self.record(self.name, whole);
        Ok(linear)
    }
}

/// Values that packing refuses are no fault of the caller's: the file holds them.
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

/// Loads all weights of `config` from `checkpoint`, and gives a checksum of them all too. What `meanwhile` makes of the embedding is
/// made while they are read, on a thread of its own.
pub(super) fn load<T: Send>(
    checkpoint: Arc<dyn Checkpoint>,
    config: &Config,
    options: &LoadOptions,
    meanwhile: impl FnOnce(&Embedding) -> Result<T> + Send,
) -> Result<(Weights, u64, T)> {
    let found = find(&*checkpoint, config, options.sampling_only)?;
    let table = found[0].1;
    let tied = !found.iter().any(|(name, _)| name == HEAD);
    // The head holds the embedding's exact values unless it was quantized on the way.
    let shared = tied && (table.encoding == Encoding::Nvfp4 || options.quantize.is_none());
    let checked_by_head = tied
        && options
            .quantize
            .as_ref()
            .is_none_or(|q| q.nonfinite == NonFinite::Error);

    let mut jobs: Vec<(String, &Entry, Job)> = Vec::new();
    for (name, entry) in found {
        if name == EMBEDDING {
            if tied {
                jobs.push((HEAD.to_owned(), entry, Job::Matrix));
            }
            if !checked_by_head {
                let row_bytes = entry.bytes.div_ceil(entry.rows() as u64);
                let step = (CHECKED / row_bytes.max(1)).max(1) as usize;
                for first in (0..entry.rows()).step_by(step) {
                    let rows = first..(first + step).min(entry.rows());
                    jobs.push((name.clone(), entry, Job::Check(rows)));
                }
            }
        } else if entry.shape.len() == 1 {
            jobs.push((name, entry, Job::Vector));
        } else {
            jobs.push((name, entry, Job::Matrix));
        }
    }
    let embedding = if shared {
        Embedding::Head
    } else {
        let entry = table.clone();
        Embedding::File {
            checkpoint: checkpoint.clone(),
            entry,
        }
    };
    let made = Mutex::new(None);
    let (mut loaded, sum) = threads::scope(|scope| {
        let make = || {
            let result = meanwhile(&embedding);
            *made.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        };
        scope
            .start("nvfp4-embedding", make)
            .map_err(|e| err!(OutOfMemory, "starting a thread to load with: {e}"))?;
        run(&*checkpoint, &jobs, options, checked_by_head)
    })?;
    let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    let made = made.ok_or_else(|| err!(Internal, "nothing was made of the embedding"))??;
    let layers = match options.sampling_only {
        true => 0,
        false => config.layers,
    };
    let weights = Weights {
        embedding,
        layers: (0..layers)
            .map(|i| loaded.layer(i))
            .collect::<Result<_>>()?,
        norm: loaded.vector(NORM)?,
        head: loaded.projection("lm_head")?,
    };
    Ok((weights, sum, made))
}

/// Tells that a thread is done, also by a panic.
struct Done<'a>(&'a Mutex<usize>, &'a Condvar);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.1.notify_one();
    }
}

/// Runs the jobs on the device's threads and reports progress on this one. Gives what they have made, and a checksum of what it is
/// made of.
fn run(
    checkpoint: &dyn Checkpoint,
    jobs: &[(String, &Entry, Job)],
    options: &LoadOptions,
    checked_by_head: bool,
) -> Result<(Parts, u64)> {
    let shared = Shared {
        checkpoint,
        device: &options.device,
        quantize: options.quantize.as_ref(),
        checked_by_head,
        sums: Mutex::default(),
        next: AtomicUsize::new(0),
        done: AtomicU64::new(0),
        failed: AtomicUsize::new(usize::MAX),
        cancelled: AtomicBool::new(false),
    };
    let total = jobs
        .iter()
        .map(|(_, entry, job)| match job {
            Job::Check(rows) => bytes_of(entry, rows.len()),
            Job::Matrix | Job::Vector => entry.bytes,
        })
        .sum();
    let parts = Mutex::new(HashMap::new());
    let failure: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    // Threads that are at work. A channel would note the end of this thread's storage, for which the C library takes memory.
    let (working, finished) = (Mutex::new(0usize), Condvar::new());
    let work = || {
        loop {
            let number = shared.next.fetch_add(1, Ordering::Relaxed);
            let Some((name, entry, job)) = jobs.get(number) else {
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
            let made = match job {
                Job::Matrix => work.matrix(entry).map(|m| Some(Loaded::Matrix(m))),
                Job::Vector => work.vector(entry).map(|v| Some(Loaded::Vector(v))),
                Job::Check(rows) => work.check(entry, rows.clone()).map(|()| None),
            };
            match made {
                Ok(None) => {}
                Ok(Some(loaded)) => {
                    let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
                    parts.insert(name.clone(), loaded);
                }
                // It was stopped, and has no fault of its own.
                Err(_) if shared.is_moot(number) => {}
                Err(e) => {
                    shared.failed.fetch_min(number, Ordering::Relaxed);
                    let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                    if failure.as_ref().is_none_or(|(at, _)| number < *at) {
                        *failure = Some((number, of_the_file(e).within(&entry.name)));
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
        for i in 0..options.device.threads().min(jobs.len()) {
            let work = || {
                let _done = Done(&working, &finished);
                work();
            };
            *lock() += 1;
            if let Err(e) = scope.start(&format!("nvfp4-load-{i}"), work) {
                *lock() -= 1;
                // Fewer threads only take longer.
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
    let mut sum = Checksum::new();
    let sums = shared.sums.into_inner();
    for (name, rows) in sums.unwrap_or_else(PoisonError::into_inner) {
        sum.update(name.as_bytes());
        sum.update(&rows.finish().to_le_bytes());
    }
    let parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((Parts(parts), sum.finish()))
}

/// Loaded tensors, taken out by name as the model is put together.
struct Parts(HashMap<String, Loaded>);

impl Parts {
    fn vector(&mut self, name: &str) -> Result<Buffer<f32>> {
        self.optional(name)
            .ok_or_else(|| err!(Internal, "{name} was not loaded"))
    }

    fn optional(&mut self, name: &str) -> Option<Buffer<f32>> {
        match self.0.remove(name) {
            Some(Loaded::Vector(v)) => Some(v),
            _ => None,
        }
    }

    fn projection(&mut self, name: &str) -> Result<Projection> {
        match self.0.remove(&format!("{name}.weight")) {
            Some(Loaded::Matrix(linear)) => Ok(Projection {
                linear,
                bias: self.optional(&format!("{name}.bias")),
            }),
            _ => bail!(Internal, "{name}.weight was not loaded"),
        }
    }

    fn layer(&mut self, i: usize) -> Result<Layer> {
        let name = |n: &str| layer_name(i, n);
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"))?,
            q: self.projection(&name("self_attn.q_proj"))?,
            k: self.projection(&name("self_attn.k_proj"))?,
            v: self.projection(&name("self_attn.v_proj"))?,
            q_norm: self.optional(&name("self_attn.q_norm.weight")),
            k_norm: self.optional(&name("self_attn.k_norm.weight")),
            o: self.projection(&name("self_attn.o_proj"))?,
            post_norm: self.vector(&name("post_attention_layernorm.weight"))?,
            gate: self.projection(&name("mlp.gate_proj"))?,
            up: self.projection(&name("mlp.up_proj"))?,
            down: self.projection(&name("mlp.down_proj"))?,
        })
    }
}
