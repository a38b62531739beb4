//! The number formats against independent implementations, which `golden/format/make.py` names and used to make the file.

use NVFP4::format::nvfp4::{
    Levels, QuantizeOptions, Recipe, decode, dequantize, is_block_scale, pack, quantize,
};
use NVFP4::format::{Rounding, e2m1, e4m3, nf4, random, swizzle};
use safetensors::SafeTensors;

static FILE: &[u8] = include_bytes!("golden/format/format.safetensors");

fn bytes(name: &str) -> Vec<u8> {
    let file = SafeTensors::deserialize(FILE).unwrap();
    file.tensor(name).unwrap().data().to_vec()
}

fn values<T, const N: usize>(name: &str, from: fn([u8; N]) -> T) -> Vec<T> {
    let bytes = bytes(name);
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty());
    chunks.iter().copied().map(from).collect()
}

fn floats(name: &str) -> Vec<f32> {
    values(name, f32::from_le_bytes)
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The golden table over all bf16 bit patterns, from its runs.
fn over_bf16(name: &str) -> Vec<u8> {
    let starts = values(&format!("{name}.start"), u16::from_le_bytes);
    let codes = bytes(&format!("{name}.code"));
    let mut table = vec![0; 65536];
    for (start, code) in starts.into_iter().zip(codes) {
        table[usize::from(start)..].fill(code);
    }
    table
}

/// Calls `encode` with every bf16 value that is a number.
fn check_over_bf16(name: &str, encode: impl Fn(f32) -> u8) {
    const NO_CODE: u8 = 255;
    let mut checked = 0;
    for (pattern, expected) in over_bf16(name).into_iter().enumerate() {
        let value = f32::from_bits((pattern as u32) << 16);
        assert_eq!(value.is_nan(), expected == NO_CODE);
        if expected != NO_CODE {
            assert_eq!(encode(value), expected, "{value:e} ({pattern:#06x})");
            checked += 1;
        }
    }
    assert_eq!(checked, 65536 - 2 * 127);
}

#[test]
fn every_bf16_value_to_e4m3() {
    check_over_bf16("e4m3.of_bf16", e4m3::encode);
    for pattern in [0x7f81u32, 0x7fc0, 0x7fff, 0xff81, 0xffc0, 0xffff] {
        let byte = e4m3::encode(f32::from_bits(pattern << 16));
        assert_eq!(byte, if pattern < 0x8000 { 0x7f } else { 0xff });
    }
}

#[test]
fn every_bf16_value_to_e2m1() {
    check_over_bf16("e2m1.of_bf16", |v| {
        e2m1::encode(v, Rounding::NearestEven, 0)
    });
    check_over_bf16("e2m1.half_away_of_bf16", |v| {
        e2m1::encode(v, Rounding::HalfAway, 0)
    });
}

#[test]
fn every_e4m3_byte() {
    let golden = floats("e4m3.value");
    for byte in 0..=255u8 {
        let (ours, theirs) = (e4m3::decode(byte), golden[usize::from(byte)]);
        assert_eq!(ours.is_nan(), byte & 0x7f == 0x7f);
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
    }
}

#[test]
fn every_code_under_every_scale() {
    let golden = floats("product");
    let codes = pack(&(0..16).collect::<Vec<u8>>()).unwrap();
    for scale in 0..=255u8 {
        let mut out = [0f32; 16];
        let expanded = dequantize(&codes, &[scale], 1.0, &mut out);
        assert_eq!(expanded.is_ok(), is_block_scale(scale), "{scale:#04x}");
        for code in 0..16u8 {
            let ours = decode(code, scale, 1.0);
            let theirs = golden[16 * usize::from(scale) + usize::from(code)];
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "code {code}, scale {scale:#04x}: {ours}, not {theirs}"
            );
            if is_block_scale(scale) {
                assert_eq!(out[usize::from(code)].to_bits(), ours.to_bits());
            }
        }
    }
}

/// f64 holds the product of a code, a scale and a global scale exactly, 2 bits by 4 by 24, and its conversion rounds once.
#[test]
fn values_are_the_exact_products_rounded_once() {
    for global in [
        0.0,
        f32::from_bits(1),
        f32::from_bits(0x0055_5555),
        f32::MIN_POSITIVE,
        1.0 / 3.0,
        0.7,
        123.456,
        // Scale times global scale would be infinite, and infinity times a code of 0 NaN.
        1e36,
        f32::MAX,
    ] {
        for scale in (0..=255).filter(|&s| is_block_scale(s)) {
            for code in 0..16 {
                let exact = f64::from(e2m1::decode(code))
                    * f64::from(e4m3::decode(scale))
                    * f64::from(global);
                let ours = decode(code, scale, global);
                assert_eq!(
                    ours.to_bits(),
                    (exact as f32).to_bits(),
                    "code {code}, scale {scale:#04x}, global {global:e}: {ours:e}, not {exact:e}"
                );
            }
        }
    }
}

#[test]
fn random_bits() {
    let positions = values("random.position", u64::from_le_bytes);
    let bits = values("random.bits", u64::from_le_bytes);
    for (position, bits) in positions.chunks(2).zip(bits) {
        assert_eq!(random::bits(position[0], position[1]), bits, "{position:?}");
    }
}

#[test]
fn quantizers() {
    use Levels::{Legacy, Single, Two};
    use Recipe::{Amax, FourOverSix, Sweep};
    use Rounding::{HalfAway, NearestEven, Stochastic};
    let x = floats("quantize.x");
    for (name, levels, recipe, rounding) in [
        ("two.amax", Two, Amax, NearestEven),
        ("two.amax.half_away", Two, Amax, HalfAway),
        ("two.amax.stochastic", Two, Amax, Stochastic),
        ("two.four_over_six", Two, FourOverSix, NearestEven),
        ("two.sweep", Two, Sweep, NearestEven),
        ("single.amax", Single, Amax, NearestEven),
        ("single.amax.half_away", Single, Amax, HalfAway),
        ("single.amax.stochastic", Single, Amax, Stochastic),
        ("single.four_over_six", Single, FourOverSix, NearestEven),
        ("single.sweep", Single, Sweep, NearestEven),
        ("legacy", Legacy, Amax, NearestEven),
        ("legacy.half_away", Legacy, Amax, HalfAway),
    ] {
        let options = QuantizeOptions {
            levels,
            recipe,
            rounding,
            seed: 99,
            ..QuantizeOptions::default()
        };
        let q = quantize(&x, x.len() / 64, 64, &options).unwrap();
        assert_eq!(
            q.global.to_bits(),
            floats(&format!("quantize.{name}.global"))[0].to_bits(),
            "{name}"
        );
        assert_eq!(
            q.scales,
            bytes(&format!("quantize.{name}.scales")),
            "{name}"
        );
        assert_eq!(q.codes, bytes(&format!("quantize.{name}.codes")), "{name}");
    }
}

#[test]
fn nf4_both_ways() {
    assert_eq!(bits_of(&nf4::VALUES), bits_of(&floats("nf4.value")));
    let x = floats("nf4.x");
    let q = nf4::quantize(&x, 64).unwrap();
    assert_eq!(q.codes, bytes("nf4.codes"));
    assert_eq!(q.absmax, floats("nf4.absmax"));
    let mut back = vec![0.0; x.len()];
    nf4::dequantize(&q.codes, &q.absmax, &nf4::VALUES, 64, &mut back).unwrap();
    assert_eq!(bits_of(&back), bits_of(&floats("nf4.decoded")));
}

#[test]
fn swizzle_and_back() {
    let (linear, swizzled) = (bytes("swizzle.linear"), bytes("swizzle.swizzled"));
    assert_eq!(swizzle::swizzle(&linear, 200, 7).unwrap(), swizzled);
    assert_eq!(swizzle::unswizzle(&swizzled, 200, 7).unwrap(), linear);
}
