//! AdamW on quantized matrices in their stored form, and their decoding for products.

use std::ops::Range;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::driver::{DeviceBuffer, DeviceSlice, Launch, int};
use crate::cuda::kernel::kernels;
use crate::cuda::linear::{CHUNK_K, pack_rows};
use crate::cuda::units::Unit;
use crate::format::adamw::{
    Band, Coefficients, FieldBytes, FirstForm, Forms, GROUP_ROWS, Keys, SecondForm, WeightForm,
};
use crate::format::nvfp4::BLOCK;
use crate::format::residual::Bits;

kernels! {
    /// An AdamW step of a matrix, for the default forms and for any.
    enum MatrixStep(StepArguments) {
        AdamW {
            Default = "adamw_default",
            Any = "adamw_any",
        }
    }

    /// An AdamW step of a vector.
    enum VectorStep(VectorArguments) {
        AdamW { Elements = "adamw_vector" }
    }

    /// Decodes a matrix, of the default form and of any.
    enum Decode(DecodeArguments) {
        DecodeMatrix {
            Default = "decode_matrix_default",
            Any = "decode_matrix_any",
        }
    }

    /// Unpacks chunks.
    enum Unpack(UnpackArguments) {
        DecodeMatrix { Chunks = "unpack_matrix" }
    }
}

/// Units whose kernels prefer a multiprocessor's memory as L1 cache: AdamW steps read gradients twice. With 20 KB of cache in place of 150
/// KB they take 16 % longer.
pub(in crate::cuda) const CACHED: &[Unit] = &[Unit::AdamW];

const THREADS: u32 = 128;
const STEP_WARPS: usize = THREADS as usize / 32;
/// `sizeof(Shared)` in `kernels/optimizer/adamw.cu`.
const STEP_SHARED: u32 = 4 * 16 * THREADS + 48;
/// CTAs of a step that a multiprocessor runs at once, limited by registers.
const BLOCKS_AT_ONCE: usize = 5;
/// The largest cluster that every device with clusters supports.
const MOST_SPLITS: usize = 8;
/// Fixed cost of a CTA, in rounds of chunks: fitted to measurements of eleven shapes.
const ROUND_OVERHEAD: f64 = 2.0;
/// Bytes of offloaded moments that are on the device at once.
pub const OFFLOAD_ROOM: usize = 32 << 20;
/// Alignment of each array in that memory.
const ALIGNMENT: usize = 256;
/// Upper limit of columns of a matrix: `MOST_COLUMNS` in `kernels/optimizer/adamw.cu`.
const MOST_COLUMNS: usize = 1 << 19;
/// Upper limit of CTAs along the second dimension of a grid.
const MOST_ROWS: usize = 65_535;

/// The stored weights of a matrix `[.., cols]`.
#[derive(Clone, Copy, Debug)]
pub struct TrainedWeights<'a> {
    /// The stored form.
    pub form: WeightForm,
    /// Elements of a row, a multiple of 16.
    pub cols: usize,
    /// The global scale.
    pub global: f32,
    /// Codes: NVFP4 codes with their scales in inference's chunk order, see [`chunk_bytes`]; dense values row-major.
    pub codes: DeviceSlice<'a>,
    /// The residue that is stored beside the codes, row-major.
    pub rest: DeviceSlice<'a>,
}

/// Stored moments of a matrix, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Moments<'a> {
    /// Codes.
    pub codes: DeviceSlice<'a>,
    /// One scale per 16 elements, unless the moments are float32.
    pub scales: DeviceSlice<'a>,
    /// One float32 per group of 8 rows, unless the moments are float32.
    pub globals: DeviceSlice<'a>,
}

/// An AdamW step of the rows of a matrix from `first_row` on.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep<'a> {
    /// How the matrix is stored.
    pub forms: Forms,
    /// Coefficients of the step.
    pub coefficients: Coefficients,
    /// The random streams of the matrix.
    pub keys: Keys,
    /// The whole matrix.
    pub weights: TrainedWeights<'a>,
    /// Its first moments.
    pub first: Moments<'a>,
    /// Its second moments.
    pub second: Moments<'a>,
    /// The first row, a multiple of 8.
    pub first_row: usize,
    /// Gradients of the rows, bf16 `[.., cols]`.
    pub gradients: DeviceSlice<'a>,
    /// A float32 factor of the gradients, in addition to that of the coefficients. The step does nothing if it is not finite.
    pub clip: Option<DeviceSlice<'a>>,
    /// Three 64-bit counters that the step adds to: weights whose stored code changes, weights whose delivered code changes, and blocks
    /// that the largest block scale clips.
    pub counters: DeviceSlice<'a>,
}

/// Bytes of an NVFP4 matrix in inference's chunk order.
pub fn chunk_bytes(rows: usize, cols: usize) -> Result<usize> {
    use crate::cuda::linear::{CHUNK_BYTES, CHUNK_ROWS};
    product(
        "an NVFP4 weight",
        &[
            rows.div_ceil(CHUNK_ROWS),
            cols.div_ceil(CHUNK_K),
            CHUNK_BYTES,
        ],
    )
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WeightsArgument {
    codes: u64,
    rest: u64,
    global: f32,
    form: i32,
    cols: i32,
    chunks: i32,
}

impl WeightsArgument {
    fn new(w: &TrainedWeights<'_>, rows: usize) -> Result<WeightsArgument> {
        if !w.cols.is_multiple_of(BLOCK) {
            bail!(
                Internal,
                "rows of {} elements; they must be multiples of {BLOCK}",
                w.cols
            );
        }
        let blocks = product("a matrix", &[rows, w.cols / BLOCK])?;
        match w.form.is_packed() {
            true => w.codes.holds("codes", &[chunk_bytes(rows, w.cols)?])?,
            false => w.codes.holds("weights", &[blocks, w.form.codes().codes])?,
        }
        w.rest.holds("residuals", &[blocks, w.form.rest().codes])?;
        Ok(WeightsArgument {
            codes: w.codes.address(),
            rest: w.rest.address(),
            global: w.global,
            form: match w.form {
                WeightForm::Residual(Bits::Four) => 0,
                WeightForm::Residual(Bits::Eight) => 1,
                WeightForm::TwoTerm => 2,
                WeightForm::OneTerm => 3,
                WeightForm::Bf16 => 4,
                WeightForm::F32 => 5,
            },
            cols: int("columns", w.cols)?,
            chunks: int("chunks", w.cols.div_ceil(crate::cuda::linear::CHUNK_K))?,
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MomentsArgument {
    codes: u64,
    scales: u64,
    globals: u64,
    form: i32,
}

impl MomentsArgument {
    /// Moments of a whole matrix.
    fn new(
        m: &Moments<'_>,
        bytes: FieldBytes,
        rows: usize,
        cols: usize,
        form: i32,
    ) -> Result<MomentsArgument> {
        let blocks = product("moments", &[rows, cols / BLOCK])?;
        m.codes.holds("moments", &[blocks, bytes.codes])?;
        if bytes.scaled {
            m.scales.holds("scales of moments", &[blocks])?;
            m.globals
                .holds("global scales of moments", &[rows.div_ceil(GROUP_ROWS), 4])?;
        }
        Ok(MomentsArgument {
            codes: m.codes.address(),
            scales: m.scales.address(),
            globals: m.globals.address(),
            form,
        })
    }

    /// First and second moments of a matrix with this many rows.
    fn of_step(step: &AdamWStep<'_>, rows: usize) -> Result<[MomentsArgument; 2]> {
        let (forms, cols) = (&step.forms, step.weights.cols);
        let first_form = match forms.first {
            FirstForm::Int4 => 0,
            FirstForm::Nvfp4 => 1,
            FirstForm::Int8 => 2,
            FirstForm::F32 => 3,
        };
        let second_form = match forms.second {
            SecondForm::Uint4 => 0,
            SecondForm::Nvfp4 => 1,
            SecondForm::Int8 => 2,
            SecondForm::F32 => 3,
        };
        Ok([
            Self::new(&step.first, forms.first.field(), rows, cols, first_form)?,
            Self::new(&step.second, forms.second.field(), rows, cols, second_form)?,
        ])
    }
}

#[repr(C)]
struct StepArguments {
    w: WeightsArgument,
    first: MomentsArgument,
    second: MomentsArgument,
    gradients: u64,
    keys: Keys,
    counters: u64,
    clip: u64,
    coefficients: Coefficients,
    first_row: i32,
    rows: i32,
    band: Band,
    follows: i32,
    leads: i32,
}

impl StepArguments {
    /// The argument of a step of its own launch; the rows have been checked.
    fn new(step: &AdamWStep<'_>, [first, second]: [MomentsArgument; 2]) -> Result<StepArguments> {
        let rows = step.gradients.bytes() / (2 * step.weights.cols);
        Ok(StepArguments {
            w: WeightsArgument::new(&step.weights, step.first_row + rows)?,
            first,
            second,
            gradients: step.gradients.address(),
            keys: step.keys,
            counters: step.counters.address(),
            clip: step.clip.map_or(0, |c| c.address()),
            coefficients: step.coefficients,
            first_row: int("rows", step.first_row)?,
            rows: int("rows", rows)?,
            band: step.forms.keep_scale.band(step.forms.weight),
            follows: 0,
            leads: 0,
        })
    }
}

/// AdamW steps of disjoint rows, which may run at the same time. The bits are those of [`crate::format::adamw::step`].
pub fn adamw(steps: &[AdamWStep<'_>]) -> Result<()> {
    // All steps are checked before any launch: one that lets the next start must have a next.
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let rows = step.first_row + rows_of(step)?;
        let moments = MomentsArgument::of_step(step, rows)?;
        all.push(StepArguments::new(step, moments)?);
    }
    for (i, (step, arguments)) in steps.iter().zip(&mut all).enumerate() {
        arguments.follows = (i > 0).into();
        arguments.leads = (i + 1 < steps.len()).into();
        launch(step, arguments)?;
    }
    Ok(())
}

/// An AdamW step with moments in page-locked host memory. The moments of some rows at a time are copied to the device and back. A kernel
/// that accesses them over the bus itself takes several times as long.
pub fn adamw_offloaded<'a>(step: &AdamWStep<'a>) -> Result<()> {
    let (rows, cols) = (rows_of(step)?, step.weights.cols);
    let whole = MomentsArgument::of_step(step, step.first_row + rows)?;
    let (blocks, row) = (cols / BLOCK, 2 * cols);
    let fields = [step.forms.first.field(), step.forms.second.field()];
    let group: usize = fields.iter().map(|&bytes| group_bytes(bytes, blocks)).sum();
    let at_once = (OFFLOAD_ROOM / group).max(1) * GROUP_ROWS;
    let room = at_once.min(rows).div_ceil(GROUP_ROWS) * group + 6 * ALIGNMENT;
    let room = DeviceBuffer::uninit(step.gradients.gpu(), Tag::DeviceScratch, room)?;
    for begin in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - begin);
        let first_row = step.first_row + begin;
        let mut copies = Vec::with_capacity(6);
        let mut at = 0;
        let mut place = |from: DeviceSlice<'a>, range: Range<usize>| {
            let to = at;
            at = (to + range.len()).next_multiple_of(ALIGNMENT);
            copies.push((from, range.clone(), to));
            // The kernel counts from the first row of the matrix.
            (room.address() + to as u64).wrapping_sub(range.start as u64)
        };
        let groups = first_row / GROUP_ROWS..(first_row + count).div_ceil(GROUP_ROWS);
        let mut part_of = |moments: &Moments<'a>, bytes: FieldBytes, whole: MomentsArgument| {
            let of = |each: usize| first_row * blocks * each..(first_row + count) * blocks * each;
            let scaled = usize::from(bytes.scaled);
            let globals = 4 * scaled * groups.start..4 * scaled * groups.end;
            MomentsArgument {
                codes: place(moments.codes, of(bytes.codes)),
                scales: place(moments.scales, of(scaled)),
                globals: place(moments.globals, globals),
                ..whole
            }
        };
        let moments = [
            part_of(&step.first, fields[0], whole[0]),
            part_of(&step.second, fields[1], whole[1]),
        ];
        for (from, range, to) in &copies {
            DeviceSlice::from(&room).copy_from(*to, from, range.start, range.len())?;
        }
        let part = AdamWStep {
            first_row,
            gradients: step.gradients.part(begin * row..(begin + count) * row)?,
            ..*step
        };
        launch(&part, &StepArguments::new(&part, moments)?)?;
        for (from, range, to) in &copies {
            from.copy_from(range.start, &(&room).into(), *to, range.len())?;
        }
    }
    Ok(())
}

/// Bytes of the moments of a group of rows.
fn group_bytes(bytes: FieldBytes, blocks: usize) -> usize {
    let scaled = usize::from(bytes.scaled);
    GROUP_ROWS * blocks * (bytes.codes + scaled) + 4 * scaled
}

/// The number of gradient rows. Checks the whole step.
fn rows_of(step: &AdamWStep<'_>) -> Result<usize> {
    let (cols, bytes) = (step.weights.cols, step.gradients.bytes());
    if bytes == 0 || !bytes.is_multiple_of(2 * cols) || !step.first_row.is_multiple_of(GROUP_ROWS) {
        bail!(
            Internal,
            "a step of {bytes} bytes of gradients from row {} on, in rows of {cols}",
            step.first_row
        );
    }
    if cols > MOST_COLUMNS {
        bail!(
            Unsupported,
            "a matrix of {cols} columns on a GPU; at most {MOST_COLUMNS} can be trained"
        );
    }
    step.counters.holds("counters", &[3, 8])?;
    if let Some(clip) = step.clip {
        clip.holds("a factor", &[4])?;
    }
    Ok(bytes / (2 * cols))
}

/// Enqueues a step.
fn launch(step: &AdamWStep<'_>, arguments: &StepArguments) -> Result<()> {
    let (forms, cols) = (&step.forms, step.weights.cols);
    let groups = (step.gradients.bytes() / (2 * cols)).div_ceil(GROUP_ROWS);
    // The kernel for the default forms reads pairs of blocks at once, and moves weights.
    let default = Forms {
        keep_scale: forms.keep_scale,
        ..Forms::default()
    };
    let moves = !step.coefficients.is_still();
    let kernel = if *forms == default && moves && cols.is_multiple_of(2 * BLOCK) {
        MatrixStep::Default
    } else {
        MatrixStep::Any
    };
    let gpu = step.gradients.gpu();
    let splits = match gpu.arch().0 {
        ..9 => 1,
        _ => splits(groups, cols, gpu.multiprocessors() * BLOCKS_AT_ONCE),
    };
    let launch = Launch {
        shared: STEP_SHARED,
        cluster: splits as u32,
        ..Launch::new([groups as u32, 1, splits as u32], THREADS)
    };
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(gpu, arguments) }
}

/// Number of CTAs that divide the columns of a group of rows, in whole blocks, when `at_once` CTAs run at once. Chooses the fewest rounds
/// of chunks.
fn splits(groups: usize, cols: usize, at_once: usize) -> usize {
    let chunks = cols.div_ceil(CHUNK_K);
    let rounds = |splits: usize| {
        let (blocks, each) = (groups * splits, chunks.div_ceil(splits * STEP_WARPS));
        // CTAs of a partial last round run faster, because there are fewer of them.
        let (full, rest) = (blocks / at_once, (blocks % at_once) as f64 / at_once as f64);
        let last = if rest > 0.0 { 0.3 + 0.7 * rest } else { 0.0 };
        (full as f64 + last) * (each as f64 + ROUND_OVERHEAD)
    };
    (1..=MOST_SPLITS.min(chunks))
        .min_by(|&a, &b| rounds(a).total_cmp(&rounds(b)))
        .unwrap_or(1)
}

#[repr(C)]
struct VectorArguments {
    weights: u64,
    first: u64,
    second: u64,
    gradients: u64,
    clip: u64,
    coefficients: Coefficients,
    count: i32,
}

/// An AdamW step of a float32 parameter by float32 gradients, which become zero.
pub fn adamw_vector(
    coefficients: &Coefficients,
    weights: DeviceSlice<'_>,
    [first, second]: [DeviceSlice<'_>; 2],
    gradients: DeviceSlice<'_>,
    clip: Option<DeviceSlice<'_>>,
) -> Result<()> {
    let count = weights.bytes() / 4;
    for x in [first, second, gradients] {
        x.holds("a vector's state", &[count, 4])?;
    }
    if let Some(clip) = clip {
        clip.holds("a factor", &[4])?;
    }
    let arguments = VectorArguments {
        weights: weights.address(),
        first: first.address(),
        second: second.address(),
        gradients: gradients.address(),
        clip: clip.map_or(0, |c| c.address()),
        coefficients: *coefficients,
        count: int("elements", count)?,
    };
    let launch = Launch::new([(count as u32).div_ceil(THREADS), 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe {
        launch
            .of(VectorStep::Elements)
            .run(weights.gpu(), &arguments)
    }
}

#[repr(C)]
struct DecodeArguments {
    w: WeightsArgument,
    out: u64,
    tokens: u64,
    first_row: i32,
    rows: i32,
    whole: i32,
}

/// Decodes rows of a matrix of `rows` rows to bf16 `out` `[.., cols]`: those from `first_row` on, or those that `tokens` (32-bit integers)
/// names. With `whole`, decodes the full stored precision; otherwise the delivered weights.
pub fn decode_matrix(
    w: &TrainedWeights<'_>,
    rows: usize,
    first_row: usize,
    tokens: Option<DeviceSlice<'_>>,
    whole: bool,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let count = out.bytes() / (2 * w.cols);
    let inside = match tokens {
        Some(tokens) => tokens.bytes() == 4 * count,
        None => first_row + count <= rows,
    };
    if out.bytes() != count * 2 * w.cols || !inside {
        bail!(
            Internal,
            "{count} rows from {first_row} on of a matrix of {rows}, to {} bytes",
            out.bytes()
        );
    }
    let arguments = DecodeArguments {
        w: WeightsArgument::new(w, rows)?,
        out: out.address(),
        tokens: tokens.map_or(0, |t| t.address()),
        first_row: int("rows", first_row)?,
        rows: int("rows", count)?,
        whole: whole.into(),
    };
    let kernel = if w.form == WeightForm::default() {
        Decode::Default
    } else {
        Decode::Any
    };
    let grid = [
        (w.cols / BLOCK).div_ceil(THREADS as usize) as u32,
        count.min(MOST_ROWS) as u32,
        1,
    ];
    // SAFETY: sizes were checked. The caller vouches for tokens.
    unsafe {
        Launch::new(grid, THREADS)
            .of(kernel)
            .run(out.gpu(), &arguments)
    }
}

/// Packs codes `[rows, cols / 2]` and scales `[rows, cols / 16]` into inference's chunk order. A partial group of 8 rows is padded with
/// zeros.
pub fn pack_matrix(
    codes: DeviceSlice<'_>,
    scales: DeviceSlice<'_>,
    (rows, cols): (usize, usize),
    chunks: DeviceSlice<'_>,
) -> Result<()> {
    codes.holds("codes", &[rows, cols / 2])?;
    scales.holds("scales", &[rows, cols / BLOCK])?;
    chunks.holds("an NVFP4 weight", &[chunk_bytes(rows, cols)?])?;
    // SAFETY: all three have room for the rows.
    unsafe { pack_rows(codes, scales, rows, cols, chunks) }
}

#[repr(C)]
struct UnpackArguments {
    chunks: u64,
    codes: u64,
    scales: u64,
    rows: i32,
    cols: i32,
}

/// The inverse of [`pack_matrix`].
pub fn unpack_matrix(
    chunks: DeviceSlice<'_>,
    (rows, cols): (usize, usize),
    codes: DeviceSlice<'_>,
    scales: DeviceSlice<'_>,
) -> Result<()> {
    codes.holds("codes", &[rows, cols / 2])?;
    scales.holds("scales", &[rows, cols / BLOCK])?;
    chunks.holds("an NVFP4 weight", &[chunk_bytes(rows, cols)?])?;
    let arguments = UnpackArguments {
        chunks: chunks.address(),
        codes: codes.address(),
        scales: scales.address(),
        rows: int("rows", rows)?,
        cols: int("columns", cols)?,
    };
    let grid = [
        (cols / BLOCK).div_ceil(THREADS as usize) as u32,
        rows.min(MOST_ROWS) as u32,
        1,
    ];
    // SAFETY: sizes were checked.
    unsafe {
        Launch::new(grid, THREADS)
            .of(Unpack::Chunks)
            .run(chunks.gpu(), &arguments)
    }
}
