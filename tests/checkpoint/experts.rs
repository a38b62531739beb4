//! Stacks of experts, `[E, rows, cols]`, seen as one matrix after the other in every encoding; and float8 weights with block scales.

use std::path::Path;

use super::common::expect_kind;
use super::files::{Gguf, Scratch, tensors};
use NVFP4::base::ErrorKind;
use NVFP4::checkpoint::{Checkpoint, Encoding};
use NVFP4::format::{e4m3, nvfp4};
use NVFP4::model;
use NVFP4::tensor::DType;

const NVFP4: u32 = 40;

fn values(checkpoint: &dyn Checkpoint, name: &str) -> Vec<f32> {
    let entry = checkpoint.find(name).unwrap_or_else(|| panic!("{name}"));
    let (rows, cols) = (entry.rows(), entry.cols());
    let mut out = vec![f32::NAN; rows * cols];
    checkpoint.rows_f32(entry, 0..rows, &mut out).unwrap();
    // Any range of rows equals that part of the whole.
    for rows in [0..1, rows / 3..rows / 2 + 1, rows - 1..rows] {
        let mut run = vec![f32::NAN; rows.len() * cols];
        checkpoint.rows_f32(entry, rows.clone(), &mut run).unwrap();
        let whole = &out[rows.start * cols..rows.end * cols];
        let same = run
            .iter()
            .zip(whole)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "rows {rows:?} of {name}");
    }
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Every block type, as the golden has it and with its rows stacked as experts.
#[test]
fn every_gguf_type_can_be_stacked() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint/blocks.gguf");
    let source = model::open(&golden).unwrap();
    let mut stacked = 0;
    for entry in source.entries() {
        let parts = source.parts(entry).unwrap();
        let (rows, cols) = (entry.rows(), entry.cols());
        let [experts, each] = match (rows % 2, rows % 3) {
            (0, _) => [2, rows / 2],
            (_, 0) => [3, rows / 3],
            _ => [rows, 1],
        };
        let mut data = vec![0; parts[0].bytes];
        source.read_part(&parts[0], 0, &mut data).unwrap();
        let dims = [cols as u64, each as u64, experts as u64];
        let name = "blk.0.ffn_up_exps.weight";
        let gguf = Gguf::new("qwen3moe")
            .with_pair(Gguf::pair(
                "qwen3moe.attention.head_count",
                4,
                &[1, 0, 0, 0],
            ))
            .with_pair(Gguf::pair(
                "qwen3moe.expert_feed_forward_length",
                4,
                &[1, 0, 0, 0],
            ))
            .tensor(name, &dims, parts[0].type_code, 0)
            .with_data(data);
        let opened = model::open_bytes("x.gguf", gguf.build()).unwrap();
        let name = "model.layers.0.mlp.experts.up_proj.weight";
        let found = opened.find(name).unwrap();
        assert_eq!(found.shape, [experts, each, cols]);
        // Stacks in MXFP4 are read as NVFP4 too, without loss.
        let encoding = match entry.encoding.name() {
            "MXFP4" => Encoding::Mxfp4,
            _ => entry.encoding,
        };
        assert_eq!((found.rows(), found.encoding), (rows, encoding));
        let want = values(&*source, &entry.name);
        assert_eq!(bits(&values(&*opened, name)), bits(&want), "{}", entry.name);
        if entry.encoding == Encoding::Nvfp4 {
            assert_eq!(packed(&*opened, name), packed(&*source, &entry.name));
        }
        stacked += 1;
    }
    assert_eq!(stacked, 18);
}

/// Codes and block scales of all rows.
fn packed(checkpoint: &dyn Checkpoint, name: &str) -> (Vec<u8>, Vec<u8>) {
    let entry = checkpoint.find(name).unwrap();
    let (rows, cols) = (entry.rows(), entry.cols());
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 16]);
    checkpoint
        .rows_nvfp4(entry, 0..rows, &mut codes, &mut scales)
        .unwrap();
    (codes, scales)
}

/// Rows of 64 values as GGUF stores them: four block scales, then codes.
fn nvfp4_rows(rows: usize) -> Vec<u8> {
    (0..rows * 36)
        .map(|i| match i % 36 {
            scale @ 0..4 => 0x30 + scale as u8 + (i / 36) as u8,
            _ => (i * 37 % 251) as u8,
        })
        .collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Two experts of three rows, and the tensor "…exps.scale".
fn experts(scale: &[u64], kind: u32, stored: &[u8]) -> Vec<u8> {
    let mut data = nvfp4_rows(6);
    data.resize(data.len().next_multiple_of(32), 0);
    let at = data.len() as u64;
    data.extend(stored);
    Gguf::new("qwen3moe")
        .with_pair(Gguf::pair(
            "qwen3moe.attention.head_count",
            4,
            &[1, 0, 0, 0],
        ))
        .with_pair(Gguf::pair(
            "qwen3moe.expert_feed_forward_length",
            4,
            &[1, 0, 0, 0],
        ))
        .tensor("blk.0.ffn_gate_exps.weight", &[64, 3, 2], NVFP4, 0)
        .tensor("blk.0.ffn_gate_exps.scale", scale, kind, at)
        .with_data(data)
        .build()
}

#[test]
fn stacked_nvfp4_has_a_global_scale_for_each_expert() {
    let name = "model.layers.0.mlp.experts.gate_proj.weight";
    for scales in [[0.75f32, 3.5], [0.3, 0.3]] {
        let opened = model::open_bytes("x.gguf", experts(&[2], 0, &f32s(&scales))).unwrap();
        let entry = opened.find(name).unwrap();
        assert_eq!(opened.global_scales(entry).unwrap(), scales);
        assert_eq!(entry.bytes, 6 * 36 + 8);
        assert_eq!(opened.entries().len(), 1);
        let (codes, block_scales) = packed(&*opened, name);
        let mut want = vec![0.0; 6 * 64];
        for (expert, want) in want.chunks_exact_mut(3 * 64).enumerate() {
            let codes = &codes[expert * 96..][..96];
            let block_scales = &block_scales[expert * 12..][..12];
            nvfp4::dequantize(codes, block_scales, scales[expert], want).unwrap();
        }
        assert_eq!(bits(&values(&*opened, name)), bits(&want));
        match scales[0] == scales[1] {
            true => assert_eq!(opened.global_scale(entry).unwrap(), 0.3),
            false => expect_kind(
                opened.global_scale(entry),
                ErrorKind::Unsupported,
                "has 2 global scales, one per expert",
            ),
        }
    }
    let opened = model::open_bytes("x.gguf", experts(&[1], 0, &f32s(&[0.5]))).unwrap();
    let entry = opened.find(name).unwrap();
    assert_eq!(opened.global_scales(entry).unwrap(), [0.5]);
    assert_eq!(opened.global_scale(entry).unwrap(), 0.5);
}

#[test]
fn scales_of_experts_that_do_not_fit_are_refused() {
    let refused = |bytes: Vec<u8>, kind: ErrorKind, words: &str| {
        expect_kind(model::open_bytes("x.gguf", bytes), kind, words);
    };
    let unsupported = ErrorKind::Unsupported;
    let takes = "'blk.0.ffn_gate_exps.weight' of shape [2, 3, 64] takes one F32 scale, or 2, one per expert";
    refused(experts(&[3], 0, &[0; 12]), unsupported, takes);
    refused(experts(&[2, 1], 0, &[0; 8]), unsupported, takes);
    refused(experts(&[2], 1, &[0; 4]), unsupported, takes);
    let nan = experts(&[2], 0, &f32s(&[1.0, f32::NAN]));
    refused(nan, ErrorKind::CorruptFile, "'blk.0.ffn_gate_exps.scale'");
}

#[test]
fn experts_are_stacked_in_safetensors() {
    let codes: Vec<u8> = (0..2 * 3 * 16).map(|i| (i * 29) as u8).collect();
    let scales: Vec<u8> = (0..2 * 3 * 2).map(|i| 0x30 + i as u8).collect();
    let dense: Vec<f32> = (0..24).map(|i| i as f32 - 7.5).collect();
    let file = tensors(&[
        ("e.gate.weight", "U8", "[2,3,16]", codes.clone()),
        ("e.gate.weight_scale", "F8_E4M3", "[2,3,2]", scales.clone()),
        ("e.gate.weight_scale_2", "F32", "[]", f32s(&[0.5])),
        ("e.up.weight", "F32", "[2,3,4]", f32s(&dense)),
    ]);
    let opened = model::open_bytes("x.safetensors", file).unwrap();
    let entry = opened.find("e.gate.weight").unwrap();
    assert_eq!((&entry.shape[..], entry.rows()), (&[2, 3, 32][..], 6));
    assert_eq!(
        packed(&*opened, "e.gate.weight"),
        (codes.clone(), scales.clone())
    );
    let mut want = vec![0.0; 6 * 32];
    nvfp4::dequantize(&codes, &scales, 0.5, &mut want).unwrap();
    assert_eq!(bits(&values(&*opened, "e.gate.weight")), bits(&want));
    assert_eq!(values(&*opened, "e.up.weight"), dense);
}

/// Float8 weights of `shape`, with `scales` of type `dtype` and `scales_shape`, and possibly the config's block size.
struct Blocks<'a> {
    weight: (&'a str, &'a [usize]),
    scales: (&'a str, &'a [usize], Vec<u8>),
    config: Option<&'a str>,
}

/// The codes 0 to 0x7e, again and again.
fn codes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 0x7f) as u8).collect()
}

impl Blocks<'_> {
    fn open(&self) -> NVFP4::base::Result<Box<dyn Checkpoint>> {
        let scratch = Scratch::new();
        let (dtype, shape) = self.weight;
        let width = if dtype == "BF16" { 2 } else { 1 };
        let weight = codes(width * shape.iter().product::<usize>());
        let (scale_dtype, scale_shape, scales) = &self.scales;
        let file = tensors(&[
            ("a.weight", dtype, &format!("{shape:?}"), weight),
            (
                "a.weight_scale_inv",
                scale_dtype,
                &format!("{scale_shape:?}"),
                scales.clone(),
            ),
        ]);
        let path = scratch.0.join("model.safetensors");
        std::fs::write(&path, file).unwrap();
        if let Some(size) = self.config {
            let config = format!(r#"{{"quantization_config":{{"weight_block_size":{size}}}}}"#);
            std::fs::write(scratch.0.join("config.json"), config).unwrap();
        }
        model::open(&path)
    }
}

#[test]
fn float8_is_scaled_by_the_blocks_that_the_config_names() {
    let bf16 = |values: &[f32]| -> Vec<u8> {
        let top = |v: &f32| ((v.to_bits() >> 16) as u16).to_le_bytes();
        values.iter().flat_map(top).collect()
    };
    let scales: Vec<f32> = (0..24).map(|i| 1.5 - i as f32 / 4.0).collect();
    // Shape, blocks, and lines and columns of scales in each matrix.
    for (shape, size, [lines, columns]) in [
        (&[130usize, 257][..], None, [2, 3]),
        (&[130, 257], Some("null"), [2, 3]),
        (&[7, 40], Some("[2, 16]"), [4, 3]),
        (&[2, 7, 40], Some("[2, 16]"), [4, 3]),
        (&[3, 128, 128], None, [1, 1]),
    ] {
        let block = match size {
            Some("[2, 16]") => [2, 16],
            _ => [128, 128],
        };
        let [leading @ .., rows, cols] = shape else {
            unreachable!("all have rows and columns")
        };
        let matrices: usize = leading.iter().product();
        let scale_shape = [leading, &[lines, columns]].concat();
        let count = matrices * lines * columns;
        for (dtype, stored) in [
            ("F32", f32s(&scales[..count])),
            ("BF16", bf16(&scales[..count])),
        ] {
            let blocks = Blocks {
                weight: ("F8_E4M3", shape),
                scales: (dtype, &scale_shape, stored),
                config: size,
            };
            let opened = blocks.open().unwrap();
            let entry = opened.find("a.weight").unwrap();
            assert_eq!(
                (&entry.shape[..], entry.encoding),
                (shape, Encoding::Dense(DType::F8E4M3))
            );
            assert_eq!(opened.entries().len(), 1);
            assert!(opened.plain(entry).is_none());
            let codes = codes(matrices * rows * cols);
            let want: Vec<f32> = (0..codes.len())
                .map(|i| {
                    let (matrix, row, col) = (i / cols / rows, i / cols % rows, i % cols);
                    let line = matrix * lines + row / block[0];
                    e4m3::decode(codes[i]) * scales[line * columns + col / block[1]]
                })
                .collect();
            assert_eq!(
                bits(&values(&*opened, "a.weight")),
                bits(&want),
                "{shape:?} {dtype}"
            );
        }
    }
    // A stack with one scale for each matrix, or for each row.
    for (scale_shape, per_scale) in [
        (&[2usize, 1, 1][..], 24),
        (&[2], 24),
        (&[2, 3], 8),
        (&[2, 3, 1], 8),
    ] {
        let stack = Blocks {
            weight: ("F8_E4M3", &[2, 3, 8]),
            scales: ("F32", scale_shape, f32s(&scales[..48 / per_scale])),
            config: None,
        };
        let got = values(&*stack.open().unwrap(), "a.weight");
        let want = codes(48)
            .into_iter()
            .enumerate()
            .map(|(i, code)| e4m3::decode(code) * scales[i / per_scale]);
        assert_eq!(
            bits(&got),
            bits(&want.collect::<Vec<_>>()),
            "{scale_shape:?}"
        );
    }
    // One scale for all of it is one block.
    let one = Blocks {
        weight: ("F8_E4M3", &[3, 4]),
        scales: ("F32", &[], f32s(&[0.25])),
        config: Some("null"),
    };
    let want: Vec<f32> = codes(12).iter().map(|&c| e4m3::decode(c) / 4.0).collect();
    assert_eq!(values(&*one.open().unwrap(), "a.weight"), want);
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let refused = |blocks: Blocks, kind: ErrorKind, words: &str| {
        expect_kind(blocks.open(), kind, words);
    };
    let with = |shape: &'static [usize], scales: &'static [usize], config| Blocks {
        weight: ("F8_E4M3", shape),
        scales: ("F32", scales, vec![0; 4 * scales.iter().product::<usize>()]),
        config,
    };
    let corrupt = ErrorKind::CorruptFile;
    let wrong = "'a.weight_scale_inv': its shape is [1, 2], but 'a.weight' of shape [130, 128] in blocks of 128 x 128 takes scales of shape [2, 1]";
    refused(with(&[130, 128], &[1, 2], None), corrupt, wrong);
    let flat = "takes scales of shape [2, 1, 1]";
    refused(with(&[2, 8, 8], &[3, 1], None), corrupt, flat);
    let vector = "'a.weight' of shape [64] in blocks of 128 x 128 takes scales of shape [1, 1]";
    refused(with(&[64], &[2, 1], None), corrupt, vector);
    for size in [
        "[0, 128]",
        "[128]",
        "[128, 128, 1]",
        "128",
        "[1.5, 2]",
        "\"x\"",
    ] {
        let named = format!("weight_block_size is {}", size.replace(", ", ","));
        refused(with(&[2, 8], &[1, 2], Some(size)), corrupt, &named);
    }
    let dense = Blocks {
        weight: ("BF16", &[2, 8]),
        ..with(&[2, 8], &[1, 1], None)
    };
    refused(
        dense,
        ErrorKind::Unsupported,
        "it scales 'a.weight', which is BF16",
    );
    let integers = Blocks {
        scales: ("I32", &[1, 1], vec![0; 4]),
        ..with(&[2, 8], &[1, 1], None)
    };
    let types = "F32, BF16, F16 or, of MXFP8, U8, not I32";
    refused(integers, ErrorKind::Unsupported, types);
}
