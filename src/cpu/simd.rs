//! The vector operations of the kernel bodies in `generic`: sixteen `f32` lanes, in as many registers as needed. Every level has the same
//! sixteen lanes, uses fused multiply-adds in the same order and reduces along the same tree, so all give the same bits.

use super::packed::UNIT_BYTES;
use crate::format::e2m1::VALUES;

/// Operations on sixteen `f32` lanes.
///
/// # Safety
/// Implementations use instructions of their level: methods may be called only if [`super::Level::is_present`] holds for it, from functions
/// compiled with its target features. Pointers need no alignment; they must be valid for the number of elements that each method states.
pub(super) unsafe trait Simd {
    /// Sixteen `f32`.
    type V: Copy;
    /// Sixty-four 4-bit codes, one per byte: four consecutive k of sixteen rows, in the order of the packed layout.
    type N: Copy;

    /// Tokens per tile of the blocked products, so that the accumulators fill the register file.
    const TILE: usize;
    /// Tokens per tile of the int8 products.
    const INT8_TILE: usize;
    /// Tokens per pass of a skinny GEMM, exact and int8; at most 8.
    const SKINNY_TOKENS: [usize; 2];
    /// Outputs of 16 rows that a skinny GEMM sums at once, up to four row groups of a token: enough to hide the latency of a multiply-add,
    /// if registers allow.
    const SKINNY_SUMS: usize;
    /// Number of tokens from which unpacking into a panel is faster than skinny GEMMs, exact and int8.
    const PANEL_TOKENS: [usize; 2];
    /// Offset added to doubled codes in integer panels, as the level's dot instruction requires.
    const CODE_OFFSET: i32;

    unsafe fn splat(x: f32) -> Self::V;
    /// Reads 16 `f32`.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Writes 16 `f32`.
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn abs(a: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `yes` in lanes where `a < b`, else `no`.
    unsafe fn select_less(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// The largest power of two that is not above a normal `a` without its sign.
    unsafe fn power_below(a: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a * 2^n`, where each lane of `n` is an integer and the result is normal.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;
    /// The sum of the lanes along the tree (i, i+8), (i, i+4), (i, i+2), (i, i+1).
    unsafe fn sum(a: Self::V) -> f32;
    /// The largest lane.
    unsafe fn largest(a: Self::V) -> f32;

    /// Reads 16 IEEE half-precision values.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Reads 16 bfloat16 values.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Reads 16 `i8` as numbers.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// Reads 16 e4m3 bytes. One that is negative or NaN gives some number, which differs between levels.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// Reads 16 e4m3 bytes with signs; none may be NaN.
    unsafe fn load_signed_e4m3(p: *const u8) -> Self::V;
    /// Writes 16 lanes that hold integers in -127..=127 as `i8`.
    unsafe fn store_i8(p: *mut i8, v: Self::V);

    /// Reads one unit (64 bytes: 16 rows by 8 k) and keeps the codes of its first four k, or of its last four.
    unsafe fn nibbles(p: *const u8, last: bool) -> Self::N;
    /// The four k of a half unit as values, one vector of 16 rows each.
    unsafe fn decode(n: Self::N) -> [Self::V; 4];
    /// Writes a half unit as 64 bytes for [`Simd::dot`]: doubled values plus [`Simd::CODE_OFFSET`], four k of a row together.
    unsafe fn store_codes(p: *mut u8, n: Self::N);
    /// For 16 rows, the exact sum over 16 k of code times activation, as `f32`. `codes` holds 256 bytes from
    /// [`Simd::store_codes`], `x` 16 bytes, and `offset` is `CODE_OFFSET` times the sum of `x`.
    unsafe fn dot(codes: *const u8, x: *const i8, offset: i32) -> Self::V;
    /// [`Simd::dot`] of a packed block, two units, with `T` tokens, `row` blocks apart in `x` and `offsets`.
    #[inline(always)]
    unsafe fn block_dots<const T: usize>(
        units: *const u8,
        x: *const i8,
        offsets: *const i32,
        row: usize,
    ) -> [Self::V; T] {
        let mut codes = [0; 256];
        // SAFETY: forwarded; the four halves fill `codes`.
        unsafe {
            for quarter in 0..4 {
                let half = Self::nibbles(units.add(quarter / 2 * UNIT_BYTES), quarter % 2 == 1);
                Self::store_codes(codes.as_mut_ptr().add(quarter * 64), half);
            }
            let mut dots = [Self::splat(0.0); T];
            for t in 0..T {
                dots[t] = Self::dot(codes.as_ptr(), x.add(t * row * 16), *offsets.add(t * row));
            }
            dots
        }
    }

    /// Prefetches the cache line at `p`; any address will do.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
}

/// The bits that count of an e4m3 byte whose sign was extended to 32 bits, after a shift by 20 to the left: its sign, and its exponent and
/// mantissa in the places of those of f32.
pub(super) const SIGNED_E4M3: u32 = 0x87f0_0000;

/// One byte of each e2m1 value's `f32` bit pattern, for table look-ups that assemble values by bytes. The two low bytes of every value are
/// zero, so `shift` is 16 or 24.
pub(super) const fn value_bytes(shift: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        let bits = VALUES[code].to_bits();
        assert!(bits & 0xffff == 0 && shift >= 16);
        bytes[code] = (bits >> shift) as u8;
        code += 1;
    }
    bytes
}

/// Each e2m1 value doubled, which makes it an integer from -12 to 12, plus `offset`.
pub(super) const fn doubled_codes(offset: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = ((VALUES[code] * 2.0) as i32 + offset) as u8;
        code += 1;
    }
    bytes
}
