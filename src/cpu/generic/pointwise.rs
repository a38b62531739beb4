//! RMSNorm, softmax, gated activations and soft caps over rows of any length: whole vectors first, then a zero-padded tail, which leaves
//! sums unchanged.

use crate::cpu::simd::Simd;

/// e^x for x <= 88, by range reduction to |r| <= ln(2)/2 and the Taylor series to r^7 (its remainder is below half an ulp).
/// Below -87 the result is that of -87, 1.6e-38.
#[inline(always)]
unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // ln(2) in two parts, the first with trailing zeros so that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    const SERIES: [f32; 7] = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    // SAFETY: registers only.
    unsafe {
        let x = S::max(S::min(x, S::splat(88.0)), S::splat(-87.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN2_LOW), S::fma(n, S::splat(-LN2_HIGH), x));
        let mut sum = S::splat(SERIES[0]);
        for c in &SERIES[1..] {
            sum = S::fma(sum, r, S::splat(*c));
        }
        S::scale_by_power(S::fma(sum, r, S::splat(1.0)), n)
    }
}

#[inline(always)]
unsafe fn load_tail<S: Simd>(p: *const f32, n: usize) -> S::V {
    let mut lanes = [0.0; 16];
    // SAFETY: `n` < 16 elements are readable.
    unsafe {
        std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
        S::load(lanes.as_ptr())
    }
}

#[inline(always)]
unsafe fn store_tail<S: Simd>(p: *mut f32, v: S::V, n: usize) {
    let mut lanes = [0.0; 16];
    // SAFETY: `n` < 16 elements are writable.
    unsafe {
        S::store(lanes.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight` for one row of `n`; `out` may be `x`.
///
/// # Safety
/// As for [`Simd`], with `n` elements behind each pointer.
#[inline(always)]
pub(in crate::cpu) unsafe fn rms_norm<S: Simd>(
    x: *const f32,
    weight: *const f32,
    eps: f32,
    n: usize,
    out: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        let whole = n / 16 * 16;
        let mut squares = S::splat(0.0);
        for i in (0..whole).step_by(16) {
            let v = S::load(x.add(i));
            squares = S::fma(v, v, squares);
        }
        if whole < n {
            let v = load_tail::<S>(x.add(whole), n - whole);
            squares = S::fma(v, v, squares);
        }
        let factor = S::splat(1.0 / (S::sum(squares) / n as f32 + eps).sqrt());
        for i in (0..whole).step_by(16) {
            let v = S::mul(S::load(x.add(i)), factor);
            S::store(out.add(i), S::mul(v, S::load(weight.add(i))));
        }
        if whole < n {
            let v = S::mul(load_tail::<S>(x.add(whole), n - whole), factor);
            let v = S::mul(v, load_tail::<S>(weight.add(whole), n - whole));
            store_tail::<S>(out.add(whole), v, n - whole);
        }
    }
}

/// `x / (1 + e^-t)`.
#[inline(always)]
unsafe fn gated<S: Simd>(x: S::V, t: S::V) -> S::V {
    // SAFETY: registers only.
    unsafe {
        let denominator = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), t)));
        S::div(x, denominator)
    }
}

/// The activation of a gated linear unit.
pub(in crate::cpu) trait Activation<S: Simd> {
    /// # Safety
    /// As for [`Simd`].
    unsafe fn of(x: S::V) -> S::V;
}

/// `x sigmoid(x)`.
pub(in crate::cpu) struct Silu;

impl<S: Simd> Activation<S> for Silu {
    #[inline(always)]
    unsafe fn of(x: S::V) -> S::V {
        // SAFETY: registers only.
        unsafe { gated::<S>(x, x) }
    }
}

/// `1 / (1 + e^-x)`.
pub(in crate::cpu) struct Sigmoid;

impl<S: Simd> Activation<S> for Sigmoid {
    #[inline(always)]
    unsafe fn of(x: S::V) -> S::V {
        // SAFETY: registers only.
        unsafe { gated::<S>(S::splat(1.0), x) }
    }
}

/// The tanh form of GELU, `x (1 + tanh(u)) / 2` with `u = sqrt(2/pi) (x + 0.044715 x^3)` (Hendrycks and Gimpel, 2016), which is
/// `x sigmoid(2 u)`.
pub(in crate::cpu) struct GeluTanh;

impl<S: Simd> Activation<S> for GeluTanh {
    #[inline(always)]
    unsafe fn of(x: S::V) -> S::V {
        /// 2 sqrt(2/pi).
        const FACTOR: f32 = 1.595_769;
        const CUBE: f32 = 0.044_715;
        // SAFETY: registers only.
        unsafe {
            let cube = S::mul(S::mul(x, x), S::mul(x, S::splat(CUBE)));
            gated::<S>(x, S::mul(S::add(x, cube), S::splat(FACTOR)))
        }
    }
}

/// `gate = act(gate) * up`, over `n` elements.
///
/// # Safety
/// As for [`Simd`], with `n` elements behind each pointer.
#[inline(always)]
pub(in crate::cpu) unsafe fn glu<S: Simd, A: Activation<S>>(
    gate: *mut f32,
    up: *const f32,
    n: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            let (g, u) = (S::load(gate.add(i)), S::load(up.add(i)));
            S::store(gate.add(i), S::mul(A::of(g), u));
        }
        if whole < n {
            let (g, u) = (
                load_tail::<S>(gate.add(whole), n - whole),
                load_tail::<S>(up.add(whole), n - whole),
            );
            store_tail::<S>(gate.add(whole), S::mul(A::of(g), u), n - whole);
        }
    }
}

/// `gate = (up + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)` and `up` clamped to `-limit..=limit`, over `n` elements. NaN
/// stays NaN.
///
/// # Safety
/// As for [`Simd`], with `n` elements behind each pointer.
#[inline(always)]
pub(in crate::cpu) unsafe fn clamped_swiglu<S: Simd>(
    gate: *mut f32,
    up: *const f32,
    n: usize,
    alpha: f32,
    limit: f32,
) {
    // SAFETY: forwarded.
    unsafe {
        let (alpha, most, least) = (S::splat(alpha), S::splat(limit), S::splat(-limit));
        // The value comes second: of two operands, one of them NaN, instructions give the second.
        let of = |g: S::V, u: S::V| {
            let g = S::min(most, g);
            let u = S::max(least, S::min(most, u));
            S::mul(S::add(u, S::splat(1.0)), gated::<S>(g, S::mul(alpha, g)))
        };
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            let (g, u) = (S::load(gate.add(i)), S::load(up.add(i)));
            S::store(gate.add(i), of(g, u));
        }
        if whole < n {
            let (g, u) = (
                load_tail::<S>(gate.add(whole), n - whole),
                load_tail::<S>(up.add(whole), n - whole),
            );
            store_tail::<S>(gate.add(whole), of(g, u), n - whole);
        }
    }
}

/// `x = cap * tanh(x / cap)`, over `n` elements; tanh as `2 sigmoid(2 x) - 1`.
///
/// # Safety
/// As for [`Simd`], with `n` elements behind the pointer.
#[inline(always)]
pub(in crate::cpu) unsafe fn soft_cap<S: Simd>(x: *mut f32, cap: f32, n: usize) {
    // SAFETY: forwarded.
    unsafe {
        let (to_exponent, from_sigmoid) = (S::splat(2.0 / cap), S::splat(2.0 * cap));
        let capped = |x: S::V| {
            let sigmoid = gated::<S>(S::splat(1.0), S::mul(x, to_exponent));
            S::fma(from_sigmoid, sigmoid, S::splat(-cap))
        };
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            S::store(x.add(i), capped(S::load(x.add(i))));
        }
        if whole < n {
            let tail = capped(load_tail::<S>(x.add(whole), n - whole));
            store_tail::<S>(x.add(whole), tail, n - whole);
        }
    }
}

/// Replaces `n` scores by e^(score - largest) and returns their sum. A `sink` takes part as one more score, which is not stored. Elements
/// from `n` to the next multiple of 16 are writable and become 0.
///
/// # Safety
/// As for [`Simd`], with `n` rounded up to 16 elements behind `scores`, and `n` > 0.
#[inline(always)]
pub(in crate::cpu) unsafe fn softmax<S: Simd>(
    scores: *mut f32,
    n: usize,
    sink: Option<f32>,
) -> f32 {
    // SAFETY: forwarded.
    unsafe {
        let padded = n.next_multiple_of(16);
        for i in n..padded {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut largest = S::splat(f32::NEG_INFINITY);
        for i in (0..padded).step_by(16) {
            largest = S::max(S::load(scores.add(i)), largest);
        }
        let largest = S::largest(largest);
        let largest = sink.map_or(largest, |sink| largest.max(sink));
        let of_sink = sink.map_or(0.0, |sink| {
            let mut lanes = [0.0; 16];
            S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(sink - largest)));
            lanes[0]
        });
        let largest = S::splat(largest);
        let mut sum = S::splat(0.0);
        for i in (0..padded).step_by(16) {
            S::store(
                scores.add(i),
                exp::<S>(S::sub(S::load(scores.add(i)), largest)),
            );
            if i + 16 > n {
                for j in n..padded {
                    *scores.add(j) = 0.0;
                }
            }
            sum = S::add(sum, S::load(scores.add(i)));
        }
        S::sum(sum) + of_sink
    }
}

/// The sum of `n` floats, `n` a multiple of 64, in some order, at the cost of reading them alone. Memory is prefetched `ahead` bytes early,
/// or not at all if that is 0.
///
/// # Safety
/// As for [`Simd`], with that much at `x`.
#[inline(always)]
pub(in crate::cpu) unsafe fn sum<S: Simd>(x: *const f32, n: usize, ahead: usize) -> f32 {
    // SAFETY: forwarded; any address may be prefetched.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        for i in (0..n).step_by(64) {
            let x = x.add(i);
            if ahead > 0 {
                for line in 0..4 {
                    S::prefetch(x.cast::<u8>().wrapping_add(ahead + line * 64));
                }
            }
            for j in 0..4 {
                sums[j] = S::add(sums[j], S::load(x.add(j * 16)));
            }
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}
