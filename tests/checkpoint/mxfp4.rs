//! Stacks of experts in MXFP4 of gpt-oss: their values, their NVFP4 form, and what is refused.

use super::common::expect_kind;
use super::files::tensors;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::checkpoint::{Checkpoint, Encoding, Entry};
use NVFP4::format::nvfp4;
use NVFP4::model;

const STACK: &str = "model.layers.0.mlp.experts.gate_up_proj";
const NAME: &str = "model.layers.0.mlp.experts.gate_up_proj.weight";

/// Two experts of four rows of 64 values.
const SHAPE: [usize; 3] = [2, 4, 64];
const BLOCKS: usize = 2 * 4 * 2;

/// All pairs of codes in turn.
fn some_codes() -> Vec<u8> {
    (0..BLOCKS * 16).map(|i| (i * 37 % 256) as u8).collect()
}

/// Scales from 2^-9 to 2^-4 for the first expert, and from 2^10 to 2^15 for the second.
fn some_scales() -> Vec<u8> {
    let scale = |i: usize| match i < BLOCKS / 2 {
        true => 118 + (i % 6) as u8,
        false => 137 + (i % 6) as u8,
    };
    (0..BLOCKS).map(scale).collect()
}

fn open(codes: (&str, Vec<u8>), scales: (&str, Vec<u8>)) -> Result<Box<dyn Checkpoint>> {
    let [blocks_key, scales_key] = ["blocks", "scales"].map(|part| format!("{STACK}_{part}"));
    let file = tensors(&[
        (&blocks_key, "U8", codes.0, codes.1),
        (&scales_key, "U8", scales.0, scales.1),
    ]);
    model::open_bytes("x.safetensors", file)
}

fn stack(codes: Vec<u8>, scales: Vec<u8>) -> Box<dyn Checkpoint> {
    open(("[2, 4, 2, 16]", codes), ("[2, 4, 2]", scales)).unwrap()
}

fn values(checkpoint: &dyn Checkpoint, entry: &Entry) -> Result<Vec<f32>> {
    let mut values = vec![f32::NAN; entry.rows() * entry.cols()];
    checkpoint.rows_f32(entry, 0..entry.rows(), &mut values)?;
    Ok(values)
}

/// The values of the NVFP4 form.
fn by_nvfp4(checkpoint: &dyn Checkpoint, entry: &Entry) -> Result<Vec<f32>> {
    let (rows, cols) = (entry.rows(), entry.cols());
    let globals = checkpoint.global_scales(entry)?.to_vec();
    let each = rows / globals.len();
    let mut values = Vec::new();
    for row in 0..rows {
        let (mut codes, mut scales) = (vec![0; cols / 2], vec![0; cols / 16]);
        checkpoint.rows_nvfp4(entry, row..row + 1, &mut codes, &mut scales)?;
        let mut held = vec![0.0; cols];
        nvfp4::dequantize(&codes, &scales, globals[row / each], &mut held)?;
        values.extend(held);
    }
    Ok(values)
}

#[test]
fn values_are_those_of_the_format_and_of_the_nvfp4_form() {
    let (codes, scales) = (some_codes(), some_scales());
    let opened = stack(codes.clone(), scales.clone());
    assert_eq!(opened.format(), "mxfp4");
    let entry = opened.find(NAME).unwrap();
    assert_eq!(
        (entry.encoding, &entry.shape[..]),
        (Encoding::Mxfp4, &SHAPE[..])
    );
    assert_eq!(entry.bytes, (codes.len() + scales.len()) as u64);
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let expected: Vec<f64> = (0..SHAPE.iter().product())
        .map(|i| {
            let code = usize::from(codes[i / 2] >> (4 * (i % 2)) & 15);
            let sign = if code < 8 { 1.0 } else { -1.0 };
            sign * magnitudes[code % 8] * 2f64.powi(i32::from(scales[i / 32]) - 127)
        })
        .collect();
    let f64s = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
    assert_eq!(f64s(values(&*opened, entry).unwrap()), expected);
    assert_eq!(f64s(by_nvfp4(&*opened, entry).unwrap()), expected);
    // Each expert has its own global scale, and none where block scales alone will do.
    assert_eq!(opened.global_scales(entry).unwrap(), [1.0, 128.0]);
}

#[test]
fn scales_that_nvfp4_cannot_hold_are_refused_by_their_place() {
    let last = BLOCKS - 1;
    for (at, scale, kind, words) in [
        (
            5,
            255,
            ErrorKind::CorruptFile,
            "'model.layers.0.mlp.experts.gate_up_proj_scales': the scale of expert 0, row 2, block 1 is 255, which is NaN",
        ),
        (
            last,
            100,
            ErrorKind::Unsupported,
            "expert 1 needs scales from 2^-27 to 2^15, 43 powers of two; NVFP4 holds 18 without loss",
        ),
        (
            last,
            253,
            ErrorKind::CorruptFile,
            "the scale of expert 1, row 3, block 1 is 2^126, with which a value is too large for f32",
        ),
    ] {
        let mut scales = some_scales();
        scales[at] = scale;
        // Codes of 0.5 and 6, which no other scale gives.
        let opened = stack(vec![0x71; BLOCKS * 16], scales);
        let entry = opened.find(NAME).unwrap();
        expect_kind(by_nvfp4(&*opened, entry), kind, words);
        if scale == 255 {
            expect_kind(values(&*opened, entry), kind, words);
        }
    }
    // The scale of a block of zeros says nothing.
    let (mut codes, mut scales) = (some_codes(), some_scales());
    codes[last * 16..].fill(0x80);
    scales[last] = 0;
    let opened = stack(codes, scales);
    let entry = opened.find(NAME).unwrap();
    let held = by_nvfp4(&*opened, entry).unwrap();
    assert_eq!(held, values(&*opened, entry).unwrap());
}

#[test]
fn shapes_and_missing_parts_are_refused_by_name() {
    let codes = || some_codes();
    for (of_codes, of_scales, words) in [
        (
            "[8, 2, 16]",
            "[8, 2]",
            "gate_up_proj_blocks': its shape is [8, 2, 16]; MXFP4 codes of a stack are [experts, rows, K / 32, 16]",
        ),
        (
            "[2, 4, 4, 8]",
            "[2, 4, 4]",
            "gate_up_proj_blocks': its shape is [2, 4, 4, 8]; MXFP4 codes",
        ),
        (
            "[2, 4, 2, 16]",
            "[4, 2, 2]",
            "gate_up_proj_scales': its shape is [4, 2, 2], but codes of shape [2, 4, 2, 16] take scales of shape [2, 4, 2]",
        ),
    ] {
        let scales = vec![127; if of_scales == "[2, 4, 4]" { 32 } else { 16 }];
        let opened = open((of_codes, codes()), (of_scales, scales));
        expect_kind(opened, ErrorKind::CorruptFile, words);
    }
    let key = format!("{STACK}_blocks");
    let other = format!("{STACK}_scales");
    let file = tensors(&[
        (&key, "U8", "[2, 4, 2, 16]", codes()),
        (&other, "I8", "[2, 4, 2]", some_scales()),
    ]);
    // Without a config that says so, tensors of another type are no MXFP4.
    let opened = model::open_bytes("x.safetensors", file).unwrap();
    assert!(opened.find(NAME).is_none() && opened.find(&key).is_some());
}
