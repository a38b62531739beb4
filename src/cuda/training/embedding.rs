//! The gradient of an embedding: rows of the residual stream's gradient, added up by token.

use super::super::driver::{DeviceSlice, Launch, int};
use super::super::units::Unit;
use super::sizes::{PIECE, expect_words, f32_elements, rows};
use crate::base::Result;
use crate::base::error::err;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("train_embed", size_of::<EmbedArguments>())];

const THREADS: u32 = 128;

/// The rows of a batch by token, in u32.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// Rows, by token; each is a row of the gradients.
    pub order: DeviceSlice<'a>,
    /// Where each token's rows begin in `order`, and where the last one's end: `[m + 1]`.
    pub offsets: DeviceSlice<'a>,
    /// The tokens, of which no two are equal: `[m]`.
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

/// For each token of `tokens`, adds up its rows of bf16 `dx` `[T, width]` in their order in f32, times `scale`. Bf16 `gradient` `[rows,
/// width]` is that of the tokens from `first_id` on, others are left out. If `add`, sums are added to it before they are rounded;
/// else it becomes the sums, and zero for tokens that do not occur. `width` is a multiple of 16. What `tokens` holds is the caller's word.
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
    // SAFETY: the struct is the kernel's; sizes were checked; rows, offsets and tokens are the caller's word.
    unsafe { launch.run(dx.gpu(), Unit::EmbedTraining, "train_embed", &arguments) }
}
