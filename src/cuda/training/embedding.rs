//! The gradient of an embedding: sums the residual stream's gradient by token.

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{PIECE, expect_words, f32_elements, rows};
use crate::base::Result;
use crate::base::error::err;
use crate::cuda::kernel::kernels;

kernels! {
    /// Sums gradients by token.
    enum EmbedBackward(EmbedArguments) {
        EmbedTraining { Rows = "train_embed" }
    }
}

const THREADS: u32 = 128;

/// The rows of a batch grouped by token, in u32.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// Row indices into the gradients, grouped by token.
    pub order: DeviceSlice<'a>,
    /// Start of each token's rows in `order`, and the end of the last token's rows: `[m + 1]`.
    pub offsets: DeviceSlice<'a>,
    /// The distinct tokens: `[m]`.
    pub ids: DeviceSlice<'a>,
}

#[repr(C)]
struct EmbedArguments {
    dx: u64,
    order: u64,
    offsets: u64,
    ids: u64,
    gradient: u64,
    first_id: u32,
    rows: u32,
    width: i32,
    scale: f32,
    add: i32,
}

/// Sums the rows of bf16 `dx` `[T, width]` by token, in order and in f32, times `scale`. Bf16 `gradient` `[rows, width]` holds the tokens
/// from `first_id` on; others are skipped. With `add`, the sums are added to it before they are rounded; otherwise it becomes the sums,
/// with zero for tokens that do not occur. `width` is a multiple of 16. The caller vouches for the contents of `tokens`.
pub fn scatter_add(
    tokens: &TokenRows<'_>,
    dx: DeviceSlice<'_>,
    width: usize,
    scale: f32,
    first_id: usize,
    gradient: DeviceSlice<'_>,
    add: bool,
) -> Result<()> {
    rows("gradients of embedded rows", dx, width)?;
    let rows = rows("the gradient of an embedding", gradient, width)?;
    let count = f32_elements(tokens.ids);
    expect_words("tokens", tokens.ids, &[count])?;
    expect_words("offsets of tokens", tokens.offsets, &[count + 1])?;
    expect_words("rows by token", tokens.order, &[f32_elements(tokens.order)])?;
    if !add {
        gradient.clear(gradient.bytes())?;
    }
    let token = |what: &str, value: usize| {
        u32::try_from(value).map_err(|_| err!(Unsupported, "{what} is {value}; tokens are u32"))
    };
    let arguments = EmbedArguments {
        dx: dx.address(),
        order: tokens.order.address(),
        offsets: tokens.offsets.address(),
        ids: tokens.ids.address(),
        gradient: gradient.address(),
        first_id: token("the first token", first_id)?,
        rows: token("the number of tokens", rows)?,
        width: int("the width of an embedding", width)?,
        scale,
        add: i32::from(add),
    };
    let columns = (width / PIECE).div_ceil(THREADS as usize) as u32;
    let launch = Launch::new([int("tokens", count)? as u32, columns, 1], THREADS);
    // SAFETY: sizes were checked; the caller vouches for rows, offsets and tokens.
    unsafe { launch.of(EmbedBackward::Rows).run(dx.gpu(), &arguments) }
}
