//! Norm and rotation of each query and key head, forward and backward.

use super::super::driver::{DeviceSlice, Launch, int};
use super::array::{PartialSums, add_partial_sums};
use super::sizes::{PIECE, bf16_elements, expect_bf16, expect_f32, expect_room, f32_elements};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;

kernels! {
    /// Norms and rotation of heads.
    enum HeadsKernel(HeadsArguments) {
        HeadsTraining {
            Forward = "train_heads",
            Backward = "train_heads_backward",
        }
    }
}

const THREADS: u32 = 256;
/// Upper limit of elements of a head, and the factor that its elements and its rotating elements are a multiple of.
const MOST_ELEMENTS: usize = 256;
const MULTIPLE: usize = 16;
/// Upper limit of CTAs that share the rows of a backward pass.
const MOST_BLOCKS: usize = 512;

/// Shape of bf16 query, key and value rows `[T, (heads + 2 kv_heads) * dim]`, with their norms and rotation.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head: a multiple of 16 up to 256.
    pub dim: usize,
    /// The f32 weights of the norms of queries and keys, `[dim]`.
    pub norms: [Option<DeviceSlice<'a>>; 2],
    /// Added to the mean square.
    pub eps: f32,
    /// f32 cosines of the rotation, `[T, rotary_dim / 2]`. Within the first rotary_dim elements of a head, a multiple of 16, element i
    /// pairs with element i + rotary_dim / 2; the others pass unchanged.
    pub cos: DeviceSlice<'a>,
    /// f32 sines of the rotation, `[T, rotary_dim / 2]`.
    pub sin: DeviceSlice<'a>,
}

#[repr(C)]
struct HeadsArguments {
    qkv: u64,
    dout: u64,
    out: u64,
    q_norm: u64,
    k_norm: u64,
    cos: u64,
    sin: u64,
    partial: u64,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    dim: i32,
    half: i32,
    lanes: i32,
    eps: f32,
}

impl Heads<'_> {
    fn all(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    /// Lanes per head: a power of two that divides a warp.
    fn lanes(&self) -> usize {
        (self.dim / PIECE).next_power_of_two()
    }

    /// The arguments of both passes, and the number of rows.
    fn arguments(
        &self,
        qkv: DeviceSlice<'_>,
        out: DeviceSlice<'_>,
    ) -> Result<(HeadsArguments, usize)> {
        let (all, dim) = (self.all(), self.dim);
        if all == 0 || dim == 0 || dim > MOST_ELEMENTS || !dim.is_multiple_of(MULTIPLE) {
            bail!(
                Unsupported,
                "training {all} heads of {dim} on a GPU; head_dim must be a multiple of {MULTIPLE} up to {MOST_ELEMENTS}"
            );
        }
        let rows = bf16_elements(qkv) / (all * dim);
        let half = f32_elements(self.cos).checked_div(rows).unwrap_or(0);
        if 2 * half > dim || !(2 * half).is_multiple_of(MULTIPLE) {
            bail!(
                Unsupported,
                "training heads of {dim} of which {} elements rotate on a GPU; they must be a multiple of {MULTIPLE} up to {dim}",
                2 * half
            );
        }
        expect_bf16("queries, keys and values", qkv, &[rows, all, dim])?;
        expect_bf16("what heads become", out, &[rows, all, dim])?;
        expect_f32("cosines", self.cos, &[rows, half])?;
        expect_f32("sines", self.sin, &[rows, half])?;
        for norm in self.norms.into_iter().flatten() {
            expect_f32("the norm of heads", norm, &[dim])?;
        }
        let [q_norm, k_norm] = self.norms.map(|norm| norm.map_or(0, |norm| norm.address()));
        let arguments = HeadsArguments {
            qkv: qkv.address(),
            dout: 0,
            out: out.address(),
            q_norm,
            k_norm,
            cos: self.cos.address(),
            sin: self.sin.address(),
            partial: 0,
            rows: int("rows", rows)?,
            heads: int("query heads", self.heads)?,
            kv_heads: int("key/value heads", self.kv_heads)?,
            dim: dim as i32,
            half: half as i32,
            lanes: self.lanes() as i32,
            eps: self.eps,
        };
        Ok((arguments, rows))
    }
}

/// Normalizes and rotates the queries and keys of `qkv` into `out` of the same shape, and copies the values. `out` may be `qkv`.
pub fn heads_forward(heads: &Heads<'_>, qkv: DeviceSlice<'_>, out: DeviceSlice<'_>) -> Result<()> {
    let (arguments, rows) = heads.arguments(qkv, out)?;
    let of_block = THREADS as usize / heads.lanes();
    let blocks = int("blocks", (rows * heads.all()).div_ceil(of_block))?;
    let launch = Launch::new([blocks as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(HeadsKernel::Forward).run(qkv.gpu(), &arguments) }
}

fn blocks(rows: usize) -> usize {
    rows.min(MOST_BLOCKS)
}

/// f32 elements of the partial sums of [`heads_backward`], which needs none without norms.
pub fn heads_partial(rows: usize, dim: usize) -> usize {
    blocks(rows) * 2 * dim
}

/// The backward pass of [`heads_forward`]: `dqkv` becomes the gradient of `qkv`, from `dout`, the gradient of the results. Also adds to
/// `dnorms`, the f32 gradients `[dim]` of the norms, where present. `dqkv` may be `dout`. `partial` has room for [`heads_partial`]
/// elements.
pub fn heads_backward(
    heads: &Heads<'_>,
    qkv: DeviceSlice<'_>,
    dout: DeviceSlice<'_>,
    dqkv: DeviceSlice<'_>,
    partial: DeviceSlice<'_>,
    dnorms: [Option<DeviceSlice<'_>>; 2],
) -> Result<()> {
    let (mut arguments, rows) = heads.arguments(qkv, dqkv)?;
    let (dim, blocks) = (heads.dim, blocks(rows));
    expect_bf16("gradients of heads", dout, &[rows, heads.all(), dim])?;
    if heads.norms.map(|norm| norm.is_some()) != dnorms.map(|dnorm| dnorm.is_some()) {
        bail!(
            Internal,
            "norms of queries and keys {:?} with gradients {:?}; there must be a gradient for each norm",
            heads.norms.map(|norm| norm.is_some()),
            dnorms.map(|dnorm| dnorm.is_some())
        );
    }
    arguments.dout = dout.address();
    if heads.norms.iter().any(Option::is_some) {
        expect_room("partial sums of heads", partial, &[blocks, 2, dim])?;
        arguments.partial = partial.address();
    }
    let launch = Launch::new([blocks as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe {
        launch
            .of(HeadsKernel::Backward)
            .run(qkv.gpu(), &arguments)?;
    }
    for (i, dnorm) in dnorms.into_iter().enumerate() {
        let partial = PartialSums {
            partial,
            parts: blocks,
            stride: 2 * dim,
            first: i * dim,
        };
        dnorm.map_or(Ok(()), |dnorm| add_partial_sums(&partial, dnorm, dim))?;
    }
    Ok(())
}
