//! The inner loop of plain GEMMs, on panels that the caller has packed.

use crate::cpu::simd::Simd;

/// `c[r, 0..16] += sum over k of a[k, r] b[k, 0..16]` for `R` rows, `stride` floats apart in `c`. Each sum is one chain of multiply-adds
/// along k, so the result depends neither on `R` nor on the level.
///
/// # Safety
/// As for [`Simd`], with `k * R` floats at `a`, `k * 16` at `b`, and 16 in each of `R` rows at `c`.
#[inline(always)]
pub(in crate::cpu) unsafe fn panel_product<S: Simd, const R: usize>(
    k: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let mut sums = [S::splat(0.0); R];
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = S::load(c.add(r * stride));
        }
        for i in 0..k {
            let b = S::load(b.add(i * 16));
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = S::fma(S::splat(*a.add(i * R + r)), b, *sum);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            S::store(c.add(r * stride), sum);
        }
    }
}
