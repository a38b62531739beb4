//! Attention of training, forward and backward: causal, over rows packed from several documents.

use super::super::driver::{DeviceSlice, Gpu, Launch, int};
use super::sizes::{expect_bf16, expect_room, expect_words};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;
use crate::tensor::AttentionShape;

kernels! {
    /// Both passes, by the elements of a head.
    enum AttentionPass(Arguments) {
        AttentionTrainingForward {
            Forward16 = "attention_training_forward_16",
            Forward32 = "attention_training_forward_32",
            Forward64 = "attention_training_forward_64",
            Forward80 = "attention_training_forward_80",
            Forward96 = "attention_training_forward_96",
            Forward128 = "attention_training_forward_128",
        }
        AttentionTrainingForwardWide {
            ForwardWide64 = "attention_training_forward_wide_64",
            ForwardWide128 = "attention_training_forward_wide_128",
        }
        AttentionTrainingBackward {
            Keys16 = "attention_training_keys_16",
            Keys32 = "attention_training_keys_32",
            Keys64 = "attention_training_keys_64",
            Keys80 = "attention_training_keys_80",
            Keys96 = "attention_training_keys_96",
            Keys128 = "attention_training_keys_128",
            Queries16 = "attention_training_queries_16",
            Queries32 = "attention_training_queries_32",
            Queries64 = "attention_training_queries_64",
            Queries80 = "attention_training_queries_80",
            Queries96 = "attention_training_queries_96",
            Queries128 = "attention_training_queries_128",
        }
        AttentionTrainingBackwardWide {
            KeysWide64 = "attention_training_keys_wide_64",
            KeysWide128 = "attention_training_keys_wide_128",
            QueriesWide64 = "attention_training_queries_wide_64",
            QueriesWide128 = "attention_training_queries_wide_128",
        }
    }

    /// Sums products of results and gradients.
    enum Delta(DeltaArguments) {
        AttentionTrainingBackward { Rows = "attention_training_delta" }
    }
}

/// Rows of a tile, and tiles in shared memory.
const TILE: usize = 64;
const TILES: usize = 6;
/// Queries per CTA of the forward pass, and its threads.
const FORWARD_ROWS: usize = 128;
const FORWARD_THREADS: u32 = 256;
const BACKWARD_THREADS: u32 = 128;
/// Hopper's kernels: rows per CTA, rows per step forward and backward, and threads.
const WIDE_ROWS: usize = 128;
const WIDE_FORWARD_STEP: usize = 128;
const WIDE_BACKWARD_STEP: usize = 64;
const WIDE_THREADS: u32 = 256;
/// Head dimensions that have Hopper kernels.
const WIDE_DIMS: [usize; 2] = [64, 128];
/// Rows per CTA of the kernel that sums products of results and gradients.
const DELTA_ROWS: usize = 4;
/// Head dimensions that have kernels.
const DIMS: [usize; 6] = [16, 32, 64, 80, 96, 128];

/// The kernels of [`DIMS`] and of [`WIDE_DIMS`], in their order.
const FORWARD: [AttentionPass; 6] = [
    AttentionPass::Forward16,
    AttentionPass::Forward32,
    AttentionPass::Forward64,
    AttentionPass::Forward80,
    AttentionPass::Forward96,
    AttentionPass::Forward128,
];
const KEYS: [AttentionPass; 6] = [
    AttentionPass::Keys16,
    AttentionPass::Keys32,
    AttentionPass::Keys64,
    AttentionPass::Keys80,
    AttentionPass::Keys96,
    AttentionPass::Keys128,
];
const QUERIES: [AttentionPass; 6] = [
    AttentionPass::Queries16,
    AttentionPass::Queries32,
    AttentionPass::Queries64,
    AttentionPass::Queries80,
    AttentionPass::Queries96,
    AttentionPass::Queries128,
];
const WIDE_FORWARD: [AttentionPass; 2] =
    [AttentionPass::ForwardWide64, AttentionPass::ForwardWide128];
const WIDE_KEYS: [AttentionPass; 2] = [AttentionPass::KeysWide64, AttentionPass::KeysWide128];
const WIDE_QUERIES: [AttentionPass; 2] =
    [AttentionPass::QueriesWide64, AttentionPass::QueriesWide128];

/// The kernel for heads of so many elements, of those for `dims`.
fn of_dim<const N: usize>(
    dim: usize,
    dims: [usize; N],
    kernels: [AttentionPass; N],
) -> Result<AttentionPass> {
    match dims.iter().position(|&d| d == dim) {
        Some(index) => Ok(kernels[index]),
        None => bail!(Internal, "no kernel for heads of {dim} elements"),
    }
}

/// Attention parameters and document bounds.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Heads of 16, 32, 64, 80, 96 or 128 elements, and their scores.
    pub shape: AttentionShape,
    /// u32 `[T]`: the first row of each row's document.
    pub starts: DeviceSlice<'a>,
    /// u32 `[T]`: one past the last row of each row's document.
    pub ends: DeviceSlice<'a>,
}

#[repr(C)]
struct Arguments {
    qkv: u64,
    out: u64,
    lse: u64,
    dout: u64,
    dqkv: u64,
    delta: u64,
    starts: u64,
    ends: u64,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    scale: f32,
    cap: f32,
}

#[repr(C)]
struct DeltaArguments {
    out: u64,
    dout: u64,
    delta: u64,
    rows: i32,
    heads: i32,
    dim: i32,
}

impl Attention<'_> {
    fn rows(&self) -> usize {
        self.starts.bytes() / size_of::<u32>()
    }

    /// Bytes of the tiles in shared memory, as `kernels/attention/training.cuh` lays them out.
    fn shared(&self) -> u32 {
        let pieces = self.shape.dim / 8;
        let exchanged = pieces >= 8 && pieces.is_power_of_two();
        let padding = if exchanged { 0 } else { 16 };
        (TILES * TILE * (2 * self.shape.dim + padding)) as u32
    }

    /// Whether Hopper's kernels serve this shape.
    fn is_wide(&self, gpu: &Gpu) -> bool {
        gpu.arch() == (9, 0)
            && WIDE_DIMS.contains(&self.shape.dim)
            && self.shape.score_cap.is_none()
    }

    fn arguments(
        &self,
        qkv: DeviceSlice<'_>,
        out: DeviceSlice<'_>,
        lse: DeviceSlice<'_>,
    ) -> Result<Arguments> {
        let (rows, heads, kv_heads, dim) = (
            self.rows(),
            self.shape.heads,
            self.shape.kv_heads,
            self.shape.dim,
        );
        if !DIMS.contains(&dim) {
            bail!(
                Unsupported,
                "training attention with heads of {dim} elements on a GPU; there are kernels for {DIMS:?}"
            );
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!(
                Internal,
                "{heads} query heads with {kv_heads} key/value heads"
            );
        }
        expect_words("the first rows of documents", self.starts, &[rows])?;
        expect_words("the last rows of documents", self.ends, &[rows])?;
        expect_bf16(
            "queries, keys and values",
            qkv,
            &[rows, heads + 2 * kv_heads, dim],
        )?;
        expect_bf16("the results of attention", out, &[rows, heads, dim])?;
        expect_words("logarithms of sums", lse, &[heads, rows])?;
        Ok(Arguments {
            qkv: qkv.address(),
            out: out.address(),
            lse: lse.address(),
            dout: 0,
            dqkv: 0,
            delta: 0,
            starts: self.starts.address(),
            ends: self.ends.address(),
            rows: int("rows", rows)?,
            heads: int("query heads", heads)?,
            kv_heads: int("key/value heads", kv_heads)?,
            window: int(
                "a window",
                self.shape.window.unwrap_or(0).min(i32::MAX as usize),
            )?,
            scale: self.shape.scale,
            cap: self.shape.score_cap.unwrap_or(0.0),
        })
    }
}

/// Forward pass, from normalized and rotated bf16 `qkv` `[T, (heads + 2 kv_heads) * dim]` to bf16 `out` `[T, heads * dim]`. Also stores the
/// natural log-sum-exp of the scores in f32 `lse` `[heads, T]`.
pub fn attention_forward(
    options: &Attention<'_>,
    qkv: DeviceSlice<'_>,
    out: DeviceSlice<'_>,
    lse: DeviceSlice<'_>,
) -> Result<()> {
    let arguments = options.arguments(qkv, out, lse)?;
    let (gpu, dim) = (qkv.gpu(), options.shape.dim);
    let blocks = |rows: usize| {
        [
            options.rows().div_ceil(rows) as u32,
            options.shape.heads as u32,
            1,
        ]
    };
    let planned = if options.is_wide(gpu) {
        // Queries, and two stages of keys and values.
        let shared = 2 * dim * (WIDE_ROWS + 4 * WIDE_FORWARD_STEP);
        let launch = Launch {
            shared: shared as u32,
            ..Launch::new(blocks(WIDE_ROWS), WIDE_THREADS)
        };
        launch.of(of_dim(dim, WIDE_DIMS, WIDE_FORWARD)?)
    } else {
        let launch = Launch {
            shared: options.shared(),
            ..Launch::new(blocks(FORWARD_ROWS), FORWARD_THREADS)
        };
        launch.of(of_dim(dim, DIMS, FORWARD)?)
    };
    // SAFETY: sizes were checked.
    unsafe { planned.run(gpu, &arguments) }
}

/// The backward pass of [`attention_forward`]: bf16 `dqkv` becomes the gradient of `qkv`, from bf16 `dout`, the gradient of the results.
/// `delta` has room for f32 `[heads, T]`.
pub fn attention_backward(
    options: &Attention<'_>,
    [qkv, out, lse]: [DeviceSlice<'_>; 3],
    dout: DeviceSlice<'_>,
    delta: DeviceSlice<'_>,
    dqkv: DeviceSlice<'_>,
) -> Result<()> {
    let (rows, heads, kv_heads, dim) = (
        options.rows(),
        options.shape.heads,
        options.shape.kv_heads,
        options.shape.dim,
    );
    let mut arguments = options.arguments(qkv, out, lse)?;
    expect_bf16("gradients of attention", dout, &[rows, heads, dim])?;
    expect_bf16(
        "gradients of queries, keys and values",
        dqkv,
        &[rows, heads + 2 * kv_heads, dim],
    )?;
    expect_room("sums of attention", delta, &[heads, rows])?;
    (arguments.dout, arguments.delta, arguments.dqkv) =
        (dout.address(), delta.address(), dqkv.address());
    let sums = DeltaArguments {
        out: out.address(),
        dout: dout.address(),
        delta: delta.address(),
        rows: arguments.rows,
        heads: arguments.heads,
        dim: int("elements of a head", dim)?,
    };
    let gpu = qkv.gpu();
    let launch = Launch::new(
        [(rows * heads).div_ceil(DELTA_ROWS) as u32, 1, 1],
        BACKWARD_THREADS,
    );
    // SAFETY: sizes were checked.
    unsafe { launch.of(Delta::Rows).run(gpu, &sums)? };
    let wide = options.is_wide(gpu);
    for (kernels, wide_kernels, heads) in
        [(KEYS, WIDE_KEYS, kv_heads), (QUERIES, WIDE_QUERIES, heads)]
    {
        let planned = if wide {
            // Two arrays of a CTA's rows, and two stages of the two arrays that it iterates over, with two numbers per row of those.
            let shared =
                2 * dim * (2 * WIDE_ROWS + 4 * WIDE_BACKWARD_STEP) + 16 * WIDE_BACKWARD_STEP;
            let grid = [rows.div_ceil(WIDE_ROWS) as u32, heads as u32, 1];
            let launch = Launch {
                shared: shared as u32,
                ..Launch::new(grid, WIDE_THREADS)
            };
            launch.of(of_dim(dim, WIDE_DIMS, wide_kernels)?)
        } else {
            let grid = [rows.div_ceil(TILE) as u32, heads as u32, 1];
            let launch = Launch {
                shared: options.shared(),
                ..Launch::new(grid, BACKWARD_THREADS)
            };
            launch.of(of_dim(dim, DIMS, kernels)?)
        };
        // SAFETY: as above.
        unsafe { planned.run(gpu, &arguments)? };
    }
    Ok(())
}
