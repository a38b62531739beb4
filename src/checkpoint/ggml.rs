//! Decodes GGML's block types, as stored in GGUF files, to f32. A block is a fixed run of consecutive elements of a row with its own
//! scales. Pure functions over bytes; knows nothing of files.

use half::f16;

use crate::format::e2m1;

/// Elements of a super-block of the K types.
pub(super) const SUPER: usize = 256;

/// Block types that can be decoded. Dense types and NVFP4 have their own encodings, see [`Encoding`](super::Encoding).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum GgmlType {
    /// 4-bit codes, one scale per 32.
    Q4_0,
    /// 4-bit codes, scale and minimum per 32.
    Q4_1,
    /// 5-bit codes, one scale per 32.
    Q5_0,
    /// 5-bit codes, scale and minimum per 32.
    Q5_1,
    /// Signed bytes, one scale per 32.
    Q8_0,
    /// 2-bit codes, 4-bit scales and minima per 16.
    Q2_K,
    /// 3-bit codes, 6-bit scales per 16.
    Q3_K,
    /// 4-bit codes, 6-bit scales and minima per 32.
    Q4_K,
    /// 5-bit codes, 6-bit scales and minima per 32.
    Q5_K,
    /// 6-bit codes, 8-bit scales per 16.
    Q6_K,
    /// 4-bit codes into a fixed table, one scale per 32.
    IQ4_NL,
    /// 4-bit codes into a fixed table, 6-bit scales per 32.
    IQ4_XS,
    /// e2m1 codes, a power-of-two scale per 32.
    MXFP4,
}

impl GgmlType {
    /// Its name in GGUF tools.
    pub const fn name(self) -> &'static str {
        match self {
            GgmlType::Q4_0 => "Q4_0",
            GgmlType::Q4_1 => "Q4_1",
            GgmlType::Q5_0 => "Q5_0",
            GgmlType::Q5_1 => "Q5_1",
            GgmlType::Q8_0 => "Q8_0",
            GgmlType::Q2_K => "Q2_K",
            GgmlType::Q3_K => "Q3_K",
            GgmlType::Q4_K => "Q4_K",
            GgmlType::Q5_K => "Q5_K",
            GgmlType::Q6_K => "Q6_K",
            GgmlType::IQ4_NL => "IQ4_NL",
            GgmlType::IQ4_XS => "IQ4_XS",
            GgmlType::MXFP4 => "MXFP4",
        }
    }
}

/// Decodes whole blocks.
pub(in crate::checkpoint) fn decode(block_type: GgmlType, bytes: &[u8], out: &mut [f32]) {
    match block_type {
        GgmlType::Q4_0 => each(bytes, out, q4_0),
        GgmlType::Q4_1 => each(bytes, out, q4_1),
        GgmlType::Q5_0 => each(bytes, out, q5_0),
        GgmlType::Q5_1 => each(bytes, out, q5_1),
        GgmlType::Q8_0 => each(bytes, out, q8_0),
        GgmlType::Q2_K => each(bytes, out, q2_k),
        GgmlType::Q3_K => each(bytes, out, q3_k),
        GgmlType::Q4_K => each(bytes, out, q4_k),
        GgmlType::Q5_K => each(bytes, out, q5_k),
        GgmlType::Q6_K => each(bytes, out, q6_k),
        GgmlType::IQ4_NL => each(bytes, out, iq4_nl),
        GgmlType::IQ4_XS => each(bytes, out, iq4_xs),
        GgmlType::MXFP4 => each(bytes, out, mxfp4),
    }
}

fn each<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let blocks = bytes.as_chunks().0;
    for (b, o) in blocks.iter().zip(out.as_chunks_mut().0) {
        block(b, o);
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q4_0(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for j in 0..16 {
        let q = b[2 + j];
        out[j] = d * (i32::from(q & 15) - 8) as f32;
        out[16 + j] = d * (i32::from(q >> 4) - 8) as f32;
    }
}

fn q4_1(b: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for j in 0..16 {
        let q = b[4 + j];
        out[j] = d * f32::from(q & 15) + m;
        out[16 + j] = d * f32::from(q >> 4) + m;
    }
}

/// The fifth bits of 32 elements, element `i` in bit `i`.
fn high_bits(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn q5_0(b: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    let high = high_bits(b, 2);
    for j in 0..16 {
        let q = u32::from(b[6 + j]);
        let low = (q & 15) | ((high >> j & 1) << 4);
        let upper = (q >> 4) | ((high >> (16 + j) & 1) << 4);
        out[j] = d * (low as i32 - 16) as f32;
        out[16 + j] = d * (upper as i32 - 16) as f32;
    }
}

fn q5_1(b: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let high = high_bits(b, 4);
    for j in 0..16 {
        let q = u32::from(b[8 + j]);
        let low = (q & 15) | ((high >> j & 1) << 4);
        let upper = (q >> 4) | ((high >> (16 + j) & 1) << 4);
        out[j] = d * low as f32 + m;
        out[16 + j] = d * upper as f32 + m;
    }
}

fn q8_0(b: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..]) {
        *o = f32::from(q as i8) * d;
    }
}

/// Layout: 16 bytes of scale (low nibble) and minimum (high nibble), 64 bytes of codes, the two f16 super-block scales. Each 32
/// bytes of codes serve 128 elements, two bits of every byte at a time.
fn q2_k(b: &[u8; 84], out: &mut [f32; SUPER]) {
    let (d, d_min) = (half_at(b, 80), half_at(b, 82));
    for (group, o) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(b[group] & 15);
        let minimum = d_min * f32::from(b[group] >> 4);
        let (half, shift, side) = (group / 8, group % 8 / 2 * 2, group % 2);
        let codes = &b[16 + 32 * half + 16 * side..][..16];
        for (o, &q) in o.iter_mut().zip(codes) {
            *o = scale * f32::from(q >> shift & 3) - minimum;
        }
    }
}

/// Layout: 32 bytes of third bits, 64 bytes of the two low bits, 12 bytes of 6-bit scales, one f16 super-block scale.
fn q3_k(b: &[u8; 110], out: &mut [f32; SUPER]) {
    let d = half_at(b, 108);
    let packed = &b[96..108];
    for (group, o) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = packed[group % 8] >> (group / 8 * 4) & 15;
        let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = d * (i32::from(low | high << 4) - 32) as f32;
        let (half, step, side) = (group / 8, group % 8 / 2, group % 2);
        let codes = &b[32 + 32 * half + 16 * side..][..16];
        let thirds = &b[16 * side..][..16];
        for ((o, &q), &third) in o.iter_mut().zip(codes).zip(thirds) {
            let low = i32::from(q >> (2 * step) & 3);
            let third = i32::from(third >> (4 * half + step) & 1);
            *o = scale * (low + 4 * third - 4) as f32;
        }
    }
}

/// The 6-bit scale and minimum of 32-element group `j` of a Q4_K or Q5_K block.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let shared = packed[j + 4];
        (
            (shared & 15) | (packed[j - 4] >> 6 << 4),
            (shared >> 4) | (packed[j] >> 6 << 4),
        )
    };
    (f32::from(scale), f32::from(minimum))
}

/// Layout: two f16 super-block scales, 12 bytes of scales and minima, 128 bytes of codes; 32 bytes serve two groups of 32.
fn q4_k(b: &[u8; 144], out: &mut [f32; SUPER]) {
    let (d, d_min) = (half_at(b, 0), half_at(b, 2));
    for (j, o) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(&b[4..16], j);
        let (scale, minimum) = (d * scale, d_min * minimum);
        let shift = j % 2 * 4;
        for (o, &q) in o.iter_mut().zip(&b[16 + j / 2 * 32..][..32]) {
            *o = scale * f32::from(q >> shift & 15) - minimum;
        }
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits before the codes: bit `j` of byte `l` belongs to element `l` of group `j`.
fn q5_k(b: &[u8; 176], out: &mut [f32; SUPER]) {
    let (d, d_min) = (half_at(b, 0), half_at(b, 2));
    let fifths = &b[16..48];
    for (j, o) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(&b[4..16], j);
        let (scale, minimum) = (d * scale, d_min * minimum);
        let shift = j % 2 * 4;
        let codes = &b[48 + j / 2 * 32..][..32];
        for ((o, &q), &fifth) in o.iter_mut().zip(codes).zip(fifths) {
            let code = (q >> shift & 15) | (fifth >> j & 1) << 4;
            *o = scale * f32::from(code) - minimum;
        }
    }
}

/// Layout: 128 bytes of low nibbles, 64 bytes of upper pairs of bits, 16 signed scales, one f16 super-block scale.
fn q6_k(b: &[u8; 210], out: &mut [f32; SUPER]) {
    let d = half_at(b, 208);
    for (j, o) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, quarter) = (j / 4, j % 4);
        let low = &b[64 * half + quarter % 2 * 32..][..32];
        let high = &b[128 + 32 * half..][..32];
        let nibble = quarter / 2 * 4;
        for (l, o) in o.iter_mut().enumerate() {
            let scale = d * f32::from(b[192 + 2 * j + l / 16] as i8);
            let code = (low[l] >> nibble & 15) | (high[l] >> (2 * quarter) & 3) << 4;
            *o = scale * (i32::from(code) - 32) as f32;
        }
    }
}

/// The non-linear 4-bit table of the IQ4 types.
const IQ4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

fn iq4_nl(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for j in 0..16 {
        let q = b[2 + j];
        out[j] = d * IQ4[usize::from(q & 15)];
        out[16 + j] = d * IQ4[usize::from(q >> 4)];
    }
}

/// Layout: one f16 super-block scale, 2 bytes of upper scale bits, 4 bytes of lower nibbles, then 16 bytes of codes per 32.
fn iq4_xs(b: &[u8; 136], out: &mut [f32; SUPER]) {
    let d = half_at(b, 0);
    let upper = u16::from_le_bytes([b[2], b[3]]);
    for (j, o) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = i32::from(b[4 + j / 2] >> (j % 2 * 4) & 15);
        let scale = low | i32::from(upper >> (2 * j) & 3) << 4;
        let scale = d * (scale - 32) as f32;
        for (l, &q) in b[8 + 16 * j..][..16].iter().enumerate() {
            o[l] = scale * IQ4[usize::from(q & 15)];
            o[16 + l] = scale * IQ4[usize::from(q >> 4)];
        }
    }
}

/// Half the value of an e8m0 byte, 2^(e - 128). GGML halves it and doubles the codes, so that 0xff, a NaN in the standard, stays finite.
/// Files decode the same here.
fn e8m0_half(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(1 << (21 + e)),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

fn mxfp4(b: &[u8; 17], out: &mut [f32; 32]) {
    let d = e8m0_half(b[0]);
    for j in 0..16 {
        let q = b[1 + j];
        out[j] = d * (2.0 * e2m1::VALUES[usize::from(q & 15)]);
        out[16 + j] = d * (2.0 * e2m1::VALUES[usize::from(q >> 4)]);
    }
}

/// Repacks MXFP4 blocks to codes with the even element in the low nibble, and separate scales. In a GGML block low nibbles hold the first
/// half of the elements.
pub(in crate::checkpoint) fn repack_mxfp4(bytes: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = bytes.as_chunks::<17>().0.iter();
    for ((b, codes), scale) in blocks.zip(codes.as_chunks_mut::<16>().0).zip(scales) {
        *scale = b[0];
        for i in 0..8 {
            let [even, odd] = [b[1 + 2 * i], b[2 + 2 * i]];
            codes[i] = (even & 15) | odd << 4;
            codes[8 + i] = even >> 4 | (odd & 0xf0);
        }
    }
}

/// Elements and bytes of an NVFP4 super-block: four scales, then the codes of four runs of 16.
const NVFP4_BLOCK: (usize, usize) = (64, 36);

/// The block scale for a GGML scale byte. GGML's unsigned E4M3 equals that of NVFP4 except for 0x7f, which is zero instead of NaN. A byte
/// with a sign bit stays as it is, and is later refused as an invalid block scale.
fn nvfp4_scale(byte: u8) -> u8 {
    match byte {
        0x7f => 0,
        scale => scale,
    }
}

/// Repacks NVFP4 blocks to codes with the even element in the low nibble, and separate scales. In a GGML block the codes of a run of 16 are
/// split by halves: low nibbles hold the first eight.
pub(in crate::checkpoint) fn repack_nvfp4(bytes: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let (elements, size) = NVFP4_BLOCK;
    for ((b, codes), scales) in bytes
        .chunks_exact(size)
        .zip(codes.chunks_exact_mut(elements / 2))
        .zip(scales.as_chunks_mut::<4>().0)
    {
        for s in 0..4 {
            scales[s] = nvfp4_scale(b[s]);
            let q = &b[4 + 8 * s..][..8];
            let packed = &mut codes[8 * s..][..8];
            for i in 0..4 {
                packed[i] = (q[2 * i] & 15) | q[2 * i + 1] << 4;
                packed[4 + i] = q[2 * i] >> 4 | (q[2 * i + 1] & 0xf0);
            }
        }
    }
}
