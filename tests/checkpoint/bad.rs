//! Corrupt files: each is an error that names the file and the entry, before anything large is allocated.

use std::path::Path;

use super::common::expect_kind;
use NVFP4::base::{Error, ErrorKind};
use NVFP4::checkpoint::Checkpoint;
use NVFP4::model;

use super::files::{Gguf, Scratch, dat, dat_entry, leb128, safetensors, tensors};

/// Opens `bytes` as `name`, which must fail with a message that holds the name and every needle.
fn refused(name: &str, bytes: Vec<u8>, needles: &[&str]) -> Error {
    match model::open_bytes(name, bytes) {
        Ok(_) => panic!("{name} was opened; wanted an error with {needles:?}"),
        Err(error) => {
            let message = error.message();
            for needle in [name].iter().chain(needles) {
                assert!(message.contains(needle), "'{message}' lacks '{needle}'");
            }
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::CorruptFile | ErrorKind::Unsupported
                ),
                "{:?}: {message}",
                error.kind()
            );
            error
        }
    }
}

/// Reads everything there is to read. Errors are fine here, panics are not.
fn walk(checkpoint: &dyn Checkpoint) {
    for entry in checkpoint.entries() {
        let rows = entry.rows();
        let mut row = vec![0.0; entry.cols()];
        for r in [0, rows - 1] {
            let _ = checkpoint.rows_f32(entry, r..r + 1, &mut row);
        }
        let mut codes = vec![0; entry.cols() / 2];
        let mut scales = vec![0; entry.cols() / 16];
        let _ = checkpoint.rows_nvfp4(entry, rows - 1..rows, &mut codes, &mut scales);
        let _ = checkpoint.global_scale(entry);
        assert!(checkpoint.parts(entry).is_ok());
    }
}

/// Files opened by path are read lazily, and files given as bytes are in memory: both give the same.
#[test]
fn files_are_read_as_bytes_are() {
    for (name, bytes) in good() {
        let scratch = Scratch::new();
        let path = scratch.0.join(name);
        let open = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let given = model::open_bytes(path.to_str().unwrap(), bytes.to_vec());
            (model::open(&path), given)
        };
        for len in 0..bytes.len() {
            match open(&bytes[..len]) {
                (Err(file), Err(given)) => assert_eq!(file.message(), given.message()),
                (file, given) => assert_eq!(file.is_ok(), given.is_ok(), "{name}: {len} bytes"),
            }
        }
        let (file, given) = open(&bytes);
        let (file, given) = (file.unwrap(), given.unwrap());
        assert_eq!(file.entries(), given.entries(), "{name}");
        for entry in file.entries() {
            let all = |checkpoint: &dyn Checkpoint, rows: std::ops::Range<usize>| {
                let mut values = vec![0.0; rows.len() * entry.cols()];
                let read = checkpoint.rows_f32(entry, rows.clone(), &mut values);
                let mut codes = vec![0; rows.len() * (entry.cols() / 2)];
                let mut scales = vec![0; rows.len() * (entry.cols() / 16)];
                let packed = checkpoint.rows_nvfp4(entry, rows, &mut codes, &mut scales);
                let bits: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
                (read.is_ok(), bits, packed.is_ok(), codes, scales)
            };
            for rows in [0..entry.rows(), entry.rows() / 2..entry.rows()] {
                let (file, given) = (all(&*file, rows.clone()), all(&*given, rows));
                assert!(file == given, "{name}: '{}'", entry.name);
            }
        }
    }
}

const HEADS: u32 = 2;

fn number_pair(key: &str, value: u32) -> Vec<u8> {
    Gguf::pair(key, 4, &value.to_le_bytes())
}

fn llama() -> Gguf {
    Gguf::new("llama").with_pair(number_pair("llama.attention.head_count", HEADS))
}

/// One small correct file per format and convention.
fn good() -> Vec<(&'static str, Vec<u8>)> {
    let zeros = |n: usize| vec![0x30u8; n];
    let state = br#"{"quant_type":"nf4","blocksize":64,"shape":[4,32],"nested_blocksize":256,"nested_offset":0.5}"#;
    let state_shape = format!("[{}]", state.len());
    vec![
        (
            "a.dat",
            dat(&[
                dat_entry("x.weight.qdata", 0, &[2, 16], &zeros(32)),
                dat_entry("x.weight.scale", 101, &[2, 2], &zeros(4)),
                dat_entry("norm", 6, &[3], &zeros(12)),
                dat_entry("h", 5, &[2, 2], &zeros(8)),
            ]),
        ),
        (
            "modelopt.safetensors",
            tensors(&[
                (
                    "a.weight_scale_2",
                    "F32",
                    "[]",
                    0.5f32.to_le_bytes().to_vec(),
                ),
                ("a.weight", "U8", "[2,8]", zeros(16)),
                ("a.weight_scale", "F8_E4M3", "[2,1]", zeros(2)),
                ("b", "BF16", "[3]", zeros(6)),
            ]),
        ),
        (
            "compressed.safetensors",
            tensors(&[
                (
                    "a.weight_global_scale",
                    "F32",
                    "[1]",
                    2.0f32.to_le_bytes().to_vec(),
                ),
                ("a.weight_packed", "U8", "[2,8]", zeros(16)),
                ("a.weight_scale", "F8_E4M3", "[2,1]", zeros(2)),
            ]),
        ),
        (
            "nf4.safetensors",
            tensors(&[
                ("a.weight.nested_absmax", "F32", "[1]", zeros(4)),
                ("a.weight.nested_quant_map", "F32", "[256]", zeros(1024)),
                ("a.weight.quant_map", "F32", "[16]", zeros(64)),
                ("a.weight", "U8", "[64,1]", zeros(64)),
                ("a.weight.absmax", "U8", "[2]", zeros(2)),
                (
                    "a.weight.quant_state.bitsandbytes__nf4",
                    "U8",
                    &state_shape,
                    state.to_vec(),
                ),
            ]),
        ),
        (
            "plain-nf4.safetensors",
            tensors(&[
                ("a.weight.absmax", "F32", "[2]", zeros(8)),
                ("a.weight.quant_map", "F32", "[16]", zeros(64)),
                ("a.weight", "U8", "[64,1]", zeros(64)),
                (
                    "a.weight.quant_state.bitsandbytes__nf4",
                    "U8",
                    "[31]",
                    br#"{"blocksize":64,"shape":[4,32]}"#.to_vec(),
                ),
            ]),
        ),
        (
            "nf4.dat",
            dat(&[
                dat_entry("x.weight", 0, &[4, 32], &zeros(128)),
                dat_entry("x.absmax", 6, &[4], &zeros(16)),
                dat_entry("x.quant_map", 6, &[16], &zeros(64)),
            ]),
        ),
        (
            "torchao.safetensors",
            tensors(&[
                ("a._weight_per_tensor_scale", "F32", "[]", zeros(4)),
                ("a._weight_qdata", "U8", "[2,8]", zeros(16)),
                ("a._weight_scale", "F8_E4M3", "[32,16]", zeros(128 * 4)),
            ]),
        ),
        (
            "float8.safetensors",
            tensors(&[
                ("a.weight_scale", "F32", "[2,1]", zeros(8)),
                ("a.weight", "F8_E4M3", "[2,16]", zeros(32)),
            ]),
        ),
        (
            "a.gguf",
            llama()
                .with_pair(Gguf::array_pair("tokenizer.ggml.tokens", 8, 1, &{
                    let mut text = 1u64.to_le_bytes().to_vec();
                    text.push(b'a');
                    text
                }))
                .with_pair(Gguf::text_pair("tokenizer.ggml.model", "gpt2"))
                .tensor("blk.0.attn_q.weight", &[64, 4], 40, 0)
                .tensor("blk.0.attn_q.scale", &[1], 0, 160)
                .tensor("blk.0.attn_k.weight", &[32, 4], 3, 192)
                .with_data(zeros(192 + 80))
                .build(),
        ),
    ]
}

#[test]
fn the_good_files_are_good() {
    for (name, bytes) in good() {
        let opened = model::open_bytes(name, bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let entry = &opened.entries()[0];
        assert!(
            opened
                .rows_f32(entry, 0..1, &mut vec![0.0; entry.cols()])
                .is_ok()
        );
        walk(&*opened);
    }
}

#[test]
fn truncation_at_any_byte_is_an_error() {
    for (name, bytes) in good() {
        for len in 0..bytes.len() {
            refused(name, bytes[..len].to_vec(), &[]);
        }
        let mut longer = bytes.clone();
        longer.push(0);
        if !name.ends_with("gguf") {
            refused(name, longer, &["1 bytes follow"]);
        }
    }
}

#[test]
fn any_flipped_bit_is_survived() {
    for (name, bytes) in good() {
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                if let Ok(opened) = model::open_bytes(name, flipped) {
                    walk(&*opened);
                }
            }
        }
    }
}

#[test]
fn empty_missing_and_foreign_files() {
    for name in ["a.dat", "a.safetensors", "a.gguf", "a.bin"] {
        refused(name, Vec::new(), &["is empty"]);
        let scratch = Scratch::new();
        let path = scratch.0.join(name);
        let error = model::open(&path).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        std::fs::write(&path, b"").unwrap();
        let error = model::open(&path).map(|_| ()).unwrap_err();
        assert!(error.message().contains("is empty"), "{error}");
    }
    refused(
        "a.bin",
        b"neither this nor that".to_vec(),
        &["no checkpoint known"],
    );
    refused(
        "a.gguf",
        b"neither this nor that".to_vec(),
        &["does not start with 'GGUF'"],
    );
    let scratch = Scratch::new();
    let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
    assert!(error.message().contains("holds no model"), "{error}");
    for name in ["a.gguf", "b.gguf"] {
        std::fs::write(scratch.0.join(name), b"GGUF").unwrap();
    }
    let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
    assert!(
        error
            .message()
            .contains("2 models; name the one to open, of a.gguf, b.gguf"),
        "{error}"
    );
    expect_kind(
        model::open(Path::new("/dev/null")),
        ErrorKind::InvalidArgument,
        "opening /dev/null: it is a device, not a regular file",
    );
}

/// Files of one tensor each, by their names.
fn folder(names: &[&str]) -> Scratch {
    let scratch = Scratch::new();
    for name in names {
        let content = match name.ends_with("json") {
            true => format!(r#"{{"weight_map":{{"{name}":"{name}.safetensors"}}}}"#).into_bytes(),
            false => tensors(&[(name, "U8", "[1]", vec![7])]),
        };
        std::fs::write(scratch.0.join(name), content).unwrap();
    }
    scratch
}

#[test]
fn folders_without_one_whole_model() {
    let shard = |n: u32| format!("model-0000{n}-of-00003.safetensors");
    for (names, kind, needles) in [
        (
            vec![shard(1), shard(3), "consolidated.safetensors".into()],
            ErrorKind::NotFound,
            vec![shard(2), "is missing".into(), "of the 3 files".into()],
        ),
        (
            vec!["b.safetensors".into(), "a.safetensors".into()],
            ErrorKind::InvalidArgument,
            vec!["2 models".into(), "of a.safetensors, b.safetensors".into()],
        ),
        (
            vec![
                "model.fp16.safetensors".into(),
                "model.bf16.safetensors".into(),
            ],
            ErrorKind::InvalidArgument,
            vec!["model.bf16.safetensors, model.fp16.safetensors".into()],
        ),
        (
            vec!["adapter_model.safetensors".into(), "mmproj-F16.gguf".into()],
            ErrorKind::NotFound,
            vec!["holds no model".into()],
        ),
        (
            vec!["model.safetensors.index.fp16.json".into()],
            ErrorKind::NotFound,
            vec!["model.safetensors.index.fp16.json.safetensors".into()],
        ),
    ] {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let scratch = folder(&names);
        let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for needle in needles.iter().map(String::as_str).chain(scratch.0.to_str()) {
            assert!(
                error.message().contains(needle),
                "'{error}' lacks '{needle}'"
            );
        }
    }
    // Shards of two models that happen to have matching names.
    let scratch = folder(&["m-1-of-2.safetensors"]);
    let path = |name: &str| scratch.0.join(name);
    std::fs::copy(path("m-1-of-2.safetensors"), path("m-2-of-2.safetensors")).unwrap();
    let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
    let message = error.message();
    assert_eq!(error.kind(), ErrorKind::CorruptFile);
    assert!(
        message.contains("m-2-of-2.safetensors") && message.contains("stands twice"),
        "{message}"
    );
}

#[test]
fn a_broken_config_is_named() {
    let scratch = Scratch::new();
    let (_, bytes) = &good()[0];
    std::fs::write(scratch.0.join("model.dat"), bytes).unwrap();
    std::fs::write(scratch.0.join("config.json"), b"{\"a\":").unwrap();
    let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
    assert!(error.message().contains("config.json"), "{error}");
    assert_eq!(error.kind(), ErrorKind::CorruptFile);
}

/// A count that a large file could hold must not be believed before its items are there. The file is a hole.
#[test]
fn counts_that_lie_in_large_files() {
    const LEN: u64 = 1 << 40;
    let gguf = |tensors: u64, pairs: Vec<u8>| {
        let mut gguf = Gguf::new("llama");
        gguf.pairs.push(pairs);
        gguf.tensor_count = Some(tensors);
        gguf.build()
    };
    let mut pairs = Gguf::new("llama");
    pairs.pair_count = Some(LEN / 16);
    let one = || number_pair("k", 1);
    let texts = |n| gguf(1, Gguf::array_pair("k", 8, n, &[]));
    for (name, start, needle) in [
        ("x.dat", leb128(LEN / 6), "its key is empty"),
        ("pairs.gguf", pairs.build(), "stands twice"),
        ("tensors.gguf", gguf(LEN / 40, one()), "0 dimensions"),
        (
            "texts.gguf",
            texts(LEN / 10),
            "an array of 109951162777 elements",
        ),
        (
            "bytes.gguf",
            gguf(1, Gguf::array_pair("k", 0, LEN / 2, &[])),
            "an array of 549755813888 elements",
        ),
    ] {
        let scratch = Scratch::new();
        let path = scratch.0.join(name);
        std::fs::write(&path, start).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(LEN).unwrap();
        let error = model::open(&path).map(|_| ()).unwrap_err();
        assert!(error.message().contains(needle), "{name}: {error}");
        assert_eq!(error.kind(), ErrorKind::CorruptFile, "{name}");
    }
}

mod dat_files {
    use super::*;

    #[test]
    fn lying_headers() {
        let file = "x.dat";
        let one = |entry: Vec<u8>| dat(&[entry]);
        refused(file, leb128(0), &["0 entries"]);
        refused(file, leb128(u64::MAX), &["entries do not fit"]);
        refused(file, vec![0x80; 20], &["the entry count", "64 bits"]);
        let mut long_key = leb128(1);
        long_key.extend(leb128(u64::MAX));
        long_key.extend([0; 8]);
        refused(
            file,
            long_key,
            &["entry 0", "the key takes 18446744073709551615 bytes"],
        );
        refused(
            file,
            one(dat_entry("", 0, &[1], &[0; 4])),
            &["entry 0", "empty"],
        );
        refused(
            file,
            one(dat_entry("w", 4711, &[1], &[0])),
            &["'w'", "elemType 4711"],
        );
        refused(
            file,
            one(dat_entry("w", 0, &[2, 0], &[0; 4])),
            &["'w'", "dimension 1 is 0"],
        );
        let negative = (-3i64) as u64;
        refused(
            file,
            one(dat_entry("w", 0, &[negative], &[0; 4])),
            &["'w'", "dimension 0 is -3"],
        );
        refused(
            file,
            one(dat_entry("w", 6, &[1 << 40, 1 << 40], &[0])),
            &["'w'", "overflow"],
        );
        refused(
            file,
            one(dat_entry("w", 6, &[1 << 20, 1 << 20], &[0])),
            &["'w'", "payload"],
        );
        refused(
            file,
            one(dat_entry("w", 0, &[1; 9], &[0])),
            &["'w'", "9 dimensions"],
        );
        let mut not_text = dat(&[dat_entry("w", 0, &[1], &[0])]);
        not_text[2] = 0xff;
        refused(file, not_text, &["entry 0", "not UTF-8"]);
    }

    #[test]
    fn pairs_that_do_not_fit() {
        let file = "x.dat";
        let codes = dat_entry("w.qdata", 0, &[2, 16], &[0; 32]);
        let scale = |dims: &[u64], n: usize| dat_entry("w.scale", 101, dims, &vec![0; n]);
        refused(
            file,
            dat(std::slice::from_ref(&codes)),
            &["'w.qdata'", "no 'w.scale'"],
        );
        refused(
            file,
            dat(&[scale(&[2, 2], 4)]),
            &["'w.scale'", "no 'w.qdata'"],
        );
        refused(
            file,
            dat(&[codes.clone(), scale(&[2, 3], 6)]),
            &["'w.scale'", "[2, 3]", "[2, 2]"],
        );
        refused(
            file,
            dat(&[codes.clone(), scale(&[4], 4)]),
            &["'w.scale'", "[4]", "[2, 2]"],
        );
        let odd = dat_entry("w.qdata", 0, &[2, 12], &[0; 24]);
        refused(
            file,
            dat(&[odd, scale(&[2, 1], 2)]),
            &["'w.qdata'", "K = 24", "multiple of 16"],
        );
        let flat = dat_entry("w.qdata", 0, &[32], &[0; 32]);
        refused(
            file,
            dat(&[flat, scale(&[4], 4)]),
            &["'w.qdata'", "two dimensions"],
        );
        let wide = dat_entry("w.qdata", 5, &[2, 16], &[0; 64]);
        refused(
            file,
            dat(&[wide, scale(&[2, 2], 4)]),
            &["'w.qdata'", "bytes, not F16"],
        );
        refused(
            file,
            dat(&[codes.clone(), scale(&[2, 2], 4), codes.clone()]),
            &["'w.qdata'", "twice"],
        );
        let dense = dat_entry("w.weight", 6, &[1], &[0; 4]);
        refused(
            file,
            dat(&[codes, scale(&[2, 2], 4), dense]),
            &["'w.weight'", "two tensors"],
        );
    }

    #[test]
    fn scales_that_are_no_scales() {
        let codes = dat_entry("w.qdata", 0, &[1, 16], &[0; 16]);
        let read = |scale: Vec<u8>| {
            let opened = model::open_bytes("x.dat", dat(&[codes.clone(), scale])).unwrap();
            let entry = &opened.entries()[0];
            let values = opened.rows_f32(entry, 0..1, &mut [0.0; 32]);
            let packed = opened.rows_nvfp4(entry, 0..1, &mut [0; 16], &mut [0; 2]);
            assert_eq!(values.is_ok(), packed.is_ok());
            values
        };
        assert!(read(dat_entry("w.scale", 101, &[1, 2], &[0x7e, 0])).is_ok());
        for bad in [0x7f, 0x80, 0xff] {
            let error = read(dat_entry("w.scale", 101, &[1, 2], &[0, bad])).unwrap_err();
            assert!(error.message().contains("'w.scale'"), "{error}");
        }
        let half = |v: f32| half::f16::from_f32(v).to_le_bytes();
        let pair = |a: f32, b: f32| [half(a), half(b)].concat();
        assert!(read(dat_entry("w.scale", 5, &[1, 2], &pair(1.0, 448.0))).is_ok());
        for bad in [0.3, 500.0, -1.0, f32::NAN] {
            let error = read(dat_entry("w.scale", 5, &[1, 2], &pair(1.0, bad))).unwrap_err();
            assert!(error.message().contains("'w.scale'"), "{error}");
        }
    }
}

mod safetensors_files {
    use super::*;

    #[test]
    fn lying_headers() {
        let file = "x.safetensors";
        let mut long = u64::MAX.to_le_bytes().to_vec();
        long.extend(b"{}");
        refused(file, long.clone(), &["18446744073709551615"]);
        long[..8].copy_from_slice(&99u64.to_le_bytes());
        refused(file, long, &["the header takes 99 bytes"]);
        refused(file, safetensors("{", b""), &["header"]);
        refused(file, safetensors("[]", b""), &["header"]);
        let one =
            |fields: &str, data: &[u8]| safetensors(&format!(r#"{{"w":{{{fields}}}}}"#), data);
        let w = |dtype: &str, shape: &str, offsets: &str| {
            one(
                &format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}"#),
                &[0; 8],
            )
        };
        assert!(model::open_bytes(file, w("F32", "[2]", "[0,8]")).is_ok());
        refused(file, w("F32", "[-2]", "[0,8]"), &["'w'", "shape"]);
        refused(file, w("F32", "[0]", "[0,0]"), &["8 bytes follow"]);
        refused(file, w("F32", "[0]", "[0,8]"), &["'w'", "takes 0 bytes"]);
        refused(file, w("F9", "[2]", "[0,800]"), &["'w'", "not within"]);
        refused(
            file,
            w("F32", "[2]", "[0,800]"),
            &["'w'", "not within the 8 bytes"],
        );
        refused(file, w("F32", "[2]", "[8,0]"), &["'w'", "[8, 0]"]);
        refused(file, w("F32", "[3]", "[0,8]"), &["'w'", "takes 12 bytes"]);
        refused(
            file,
            w("F32", "[4294967296,4294967296]", "[0,8]"),
            &["'w'", "overflows"],
        );
        refused(
            file,
            w("F32", "[4611686018427387905]", "[0,8]"),
            &["'w'", "overflows"],
        );
        refused(file, w("F32", "[99999999999999999999]", "[0,8]"), &["'w'"]);
        refused(
            file,
            one(r#""dtype":"F32""#, &[0; 8]),
            &["'w'", "data_offsets"],
        );
        let fields = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let twice = format!(r#"{{"w":{fields},"w":{fields}}}"#);
        refused(file, safetensors(&twice, &[0; 4]), &["'w'", "twice"]);
        let overlap = format!(r#"{{"w":{fields},"v":{fields}}}"#);
        refused(
            file,
            safetensors(&overlap, &[0; 4]),
            &["starts at 0", "ends at 4"],
        );
        let gap = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        refused(file, safetensors(gap, &[0; 2]), &["'w'", "starts at 1"]);
    }

    /// Float8 weights with a scale per block of 128 x 128; the last blocks are partial.
    #[test]
    fn blocks_of_float8_are_scaled() {
        let (rows, cols) = (130, 144);
        let codes: Vec<u8> = (0..rows * cols).map(|i| (i % 0x7f) as u8).collect();
        let scales = [0.5f32, 3.0, -0.25, 7.0];
        let bytes = tensors(&[
            ("a.weight", "F8_E4M3", "[130,144]", codes.clone()),
            (
                "a.weight_scale_inv",
                "F32",
                "[2,2]",
                scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
            ),
        ]);
        let file = model::open_bytes("x.safetensors", bytes).unwrap();
        let entry = file.find("a.weight").unwrap();
        for first in [0, 100, 127, 128] {
            let mut got = vec![0f32; (rows - first) * cols];
            file.rows_f32(entry, first..rows, &mut got).unwrap();
            for (i, value) in got.iter().enumerate() {
                let (row, col) = (first + i / cols, i % cols);
                let scale = scales[row / 128 * 2 + col / 128];
                let code = NVFP4::format::e4m3::decode(codes[row * cols + col]);
                assert_eq!(*value, code * scale, "[{row}, {col}]");
            }
        }
    }

    #[test]
    fn incomplete_conventions() {
        let file = "x.safetensors";
        let scale = ("a.weight_scale", "F8_E4M3", "[2,1]", vec![0; 2]);
        let weight = ("a.weight", "U8", "[2,8]", vec![0; 16]);
        let global = |value: f32| {
            (
                "a.weight_scale_2",
                "F32",
                "[]",
                value.to_le_bytes().to_vec(),
            )
        };
        let make = tensors;
        refused(
            file,
            make(&[weight.clone(), scale.clone()]),
            &["'a.weight'", "no 'a.weight_scale_2'"],
        );
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            refused(
                file,
                make(&[global(bad), weight.clone(), scale.clone()]),
                &["'a.weight_scale_2'", "finite"],
            );
        }
        let many = ("a.weight_scale_2", "F32", "[2]", vec![0; 8]);
        refused(
            file,
            make(&[many, weight.clone(), scale.clone()]),
            &["'a.weight_scale_2'", "one global scale"],
        );
        let short = ("a.weight_scale", "F8_E4M3", "[1,2]", vec![0; 2]);
        refused(
            file,
            make(&[global(1.0), weight.clone(), short]),
            &["'a.weight_scale'", "[1, 2]", "[2, 1]"],
        );
        let awq = ("a.pre_quant_scale", "F32", "[16]", vec![0; 64]);
        refused(
            file,
            make(&[global(1.0), awq, weight.clone(), scale.clone()]),
            &["'a.pre_quant_scale'", "not supported"],
        );
        let packed = ("a.weight_packed", "U8", "[2,8]", vec![0; 16]);
        refused(
            file,
            make(&[packed.clone(), scale.clone()]),
            &["'a.weight_packed'", "no 'a.weight_global_scale'"],
        );
        for bad in [0.0, 1e-45, f32::NAN, f32::INFINITY, -1.0] {
            let divisor = (
                "a.weight_global_scale",
                "F32",
                "[1]",
                bad.to_le_bytes().to_vec(),
            );
            refused(
                file,
                make(&[divisor, packed.clone(), scale.clone()]),
                &["'a.weight_global_scale'", "divisor"],
            );
        }
        let block_scales = ("a.weight_scale", "F32", "[2,2]", vec![0; 16]);
        let f8 = ("a.weight", "F8_E4M3", "[2,8]", vec![0; 16]);
        refused(
            file,
            make(&[block_scales, f8.clone()]),
            &["'a.weight_scale'", "one per row"],
        );
        // Weights whose scales are ignored would load, and be wrong.
        let by_block = ("a.weight_scale_inv", "F32", "[1,2]", vec![0; 8]);
        refused(
            file,
            make(&[by_block, f8.clone()]),
            &["'a.weight_scale_inv'", "'a.weight'", "[1, 2]", "[1, 1]"],
        );
        let zero_points = ("a.weight_zero_point", "F8_E4M3", "[2,1]", vec![0; 2]);
        let by_row = ("a.weight_scale", "F32", "[2,1]", vec![0; 8]);
        refused(
            file,
            make(&[by_row, zero_points, f8]),
            &["'a.weight_zero_point'", "zero points are not supported"],
        );
        refused(
            file,
            make(&[global(1.0), weight.clone()]),
            &["'a.weight'", "no 'a.weight_scale'"],
        );
        refused(
            file,
            make(std::slice::from_ref(&packed)),
            &["'a.weight_packed'", "no 'a.weight_scale'"],
        );
        let torchao = ("a._weight_qdata", "U8", "[2,8]", vec![0; 16]);
        refused(
            file,
            make(std::slice::from_ref(&torchao)),
            &["'a._weight_qdata'", "no 'a._weight_scale'"],
        );
        let short = ("a._weight_scale", "F8_E4M3", "[2]", vec![0; 2]);
        refused(
            file,
            make(&[torchao, short]),
            &["'a._weight_scale'", "[2]", "[2, 1]"],
        );
    }

    #[test]
    fn conventions_whose_k_is_no_multiple_of_16() {
        for (codes, scale, global) in [
            ("a.weight", "a.weight_scale", "a.weight_scale_2"),
            ("a.weight_packed", "a.weight_scale", "a.weight_global_scale"),
            (
                "a._weight_qdata",
                "a._weight_scale",
                "a._weight_per_tensor_scale",
            ),
            ("a.qdata", "a.scale", "b"),
        ] {
            let file = tensors(&[
                (global, "F32", "[1]", 1.0f32.to_le_bytes().to_vec()),
                (codes, "U8", "[2,12]", vec![0; 24]),
                (scale, "F8_E4M3", "[2,1]", vec![0; 2]),
            ]);
            refused(
                "x.safetensors",
                file,
                &[&format!("'{codes}'"), "K = 24 is not a multiple of 16"],
            );
        }
    }

    #[test]
    fn bad_nf4() {
        let file = "x.safetensors";
        let make = |state: &str, absmax: usize, map: usize, codes: usize| {
            tensors(&[
                (
                    "a.weight.absmax",
                    "F32",
                    &format!("[{absmax}]"),
                    vec![0; 4 * absmax],
                ),
                (
                    "a.weight.quant_map",
                    "F32",
                    &format!("[{map}]"),
                    vec![0; 4 * map],
                ),
                ("a.weight", "U8", &format!("[{codes},1]"), vec![0; codes]),
                (
                    "a.weight.quant_state.bitsandbytes__nf4",
                    "U8",
                    &format!("[{}]", state.len()),
                    state.as_bytes().to_vec(),
                ),
            ])
        };
        let good = r#"{"blocksize":64,"shape":[2,64]}"#;
        assert!(model::open_bytes(file, make(good, 2, 16, 64)).is_ok());
        refused(
            file,
            make(good, 3, 16, 64),
            &["'a.weight.absmax'", "2 elements"],
        );
        refused(
            file,
            make(good, 2, 15, 64),
            &["'a.weight.quant_map'", "16 elements"],
        );
        refused(
            file,
            make(good, 2, 16, 63),
            &["'a.weight'", "63 bytes", "[2, 64]"],
        );
        let cases = [
            (r#"{"blocksize":0,"shape":[2,64]}"#, "blocksize is 0"),
            (r#"{"blocksize":64}"#, "shape"),
            (r#"{"blocksize":64,"shape":[0]}"#, "[0]"),
            (
                r#"{"blocksize":64,"shape":[4294967296,4294967296]}"#,
                "4294967296",
            ),
            (r#"{"blocksize":64,"shape":[-1]}"#, "-1"),
            (
                r#"{"blocksize":64,"blocksize":32,"shape":[2,64]}"#,
                "duplicate",
            ),
            ("{", "quant_state"),
        ];
        for (state, needle) in cases {
            refused(file, make(state, 2, 16, 64), &["'a.weight", needle]);
        }
        let fp4 = tensors(&[
            ("a.weight.absmax", "F32", "[1]", vec![0; 4]),
            ("a.weight.quant_map", "F32", "[16]", vec![0; 64]),
            ("a.weight", "U8", "[8,1]", vec![0; 8]),
            (
                "a.weight.quant_state.bitsandbytes__fp4",
                "U8",
                "[2]",
                b"{}".to_vec(),
            ),
        ]);
        refused(file, fp4, &["bitsandbytes__fp4", "not supported"]);
        let lone = tensors(&[
            ("a.weight.absmax", "F32", "[1]", vec![0; 4]),
            ("a.weight", "U8", "[8,1]", vec![0; 8]),
        ]);
        refused(file, lone, &["'a.weight'", "no 'a.weight.quant_map'"]);
        let without_scales = tensors(&[
            ("a.weight.quant_map", "F32", "[16]", vec![0; 64]),
            ("a.weight", "U8", "[8,1]", vec![0; 8]),
        ]);
        refused(
            file,
            without_scales,
            &["'a.weight'", "no 'a.weight.absmax'"],
        );
    }

    #[test]
    fn bad_nf4_of_torchsharp() {
        let file = "x.dat";
        let make = |kind: u64, codes: &[u64], absmax: (u64, u64), map: u64| {
            let bytes = |n: u64, each: u64| vec![0; (n * each) as usize];
            let count = codes.iter().product::<u64>();
            let width = if absmax.0 == 6 { 4 } else { 2 };
            dat(&[
                dat_entry(
                    "a.weight",
                    kind,
                    codes,
                    &bytes(count, if kind == 5 { 2 } else { 1 }),
                ),
                dat_entry("a.absmax", absmax.0, &[absmax.1], &bytes(absmax.1, width)),
                dat_entry("a.quant_map", 6, &[map], &bytes(map, 4)),
            ])
        };
        assert!(model::open_bytes(file, make(0, &[4, 32], (6, 4), 16)).is_ok());
        for (content, needles) in [
            (make(0, &[128], (6, 4), 16), ["'a.weight'", "[N, K / 2]"]),
            (
                make(0, &[4, 32], (6, 7), 16),
                ["'a.absmax'", "7 scales for 256 values"],
            ),
            (
                make(0, &[4, 32], (5, 4), 16),
                ["'a.absmax'", "4 elements of F32"],
            ),
            (
                make(0, &[4, 32], (6, 4), 15),
                ["'a.quant_map'", "16 elements"],
            ),
            (
                make(5, &[4, 32], (6, 4), 16),
                ["'a.weight'", "bytes, not F16"],
            ),
        ] {
            refused(file, content, &needles);
        }
        let lone = dat(&[
            dat_entry("a.weight", 0, &[4, 32], &[0; 128]),
            dat_entry("a.absmax", 6, &[4], &[0; 16]),
        ]);
        refused(file, lone, &["'a.weight'", "no 'a.quant_map'"]);
    }

    #[test]
    fn bad_nested_nf4() {
        let file = "x.safetensors";
        let make = |state: &str, dtype: &str, nested: usize, map: usize| {
            let width = if dtype == "U8" { 1 } else { 4 };
            tensors(&[
                (
                    "a.weight.nested_absmax",
                    "F32",
                    &format!("[{nested}]"),
                    vec![0; 4 * nested],
                ),
                (
                    "a.weight.nested_quant_map",
                    "F32",
                    &format!("[{map}]"),
                    vec![0; 4 * map],
                ),
                ("a.weight.quant_map", "F32", "[16]", vec![0; 64]),
                ("a.weight.absmax", dtype, "[4]", vec![0; 4 * width]),
                ("a.weight", "U8", "[128,1]", vec![0; 128]),
                (
                    "a.weight.quant_state.bitsandbytes__nf4",
                    "U8",
                    &format!("[{}]", state.len()),
                    state.as_bytes().to_vec(),
                ),
            ])
        };
        let state = |block: &str| {
            format!(
                r#"{{"blocksize":64,"shape":[4,64],"nested_blocksize":{block},"nested_offset":0}}"#
            )
        };
        let good = state("2");
        assert!(model::open_bytes(file, make(&good, "U8", 2, 256)).is_ok());
        let state_key = "'a.weight.quant_state.bitsandbytes__nf4'";
        for (bytes, needles) in [
            (
                make(&good, "U8", 3, 256),
                ["'a.weight.nested_absmax'", "2 elements"],
            ),
            (
                make(&good, "U8", 2, 255),
                ["'a.weight.nested_quant_map'", "256 elements"],
            ),
            (make(&good, "F32", 2, 256), ["'a.weight.absmax'", "of U8"]),
            (
                make(&state("0"), "U8", 2, 256),
                [state_key, "nested_blocksize is 0"],
            ),
            (make(&state("-1"), "U8", 2, 256), [state_key, "-1"]),
            (
                make(&state("null"), "U8", 2, 256),
                [state_key, "lacks nested_blocksize"],
            ),
        ] {
            refused(file, bytes, &needles);
        }
        let whole = format!(
            r#"{{"blocksize":64,"shape":[4,64],"nested_blocksize":{}}}"#,
            u64::MAX
        );
        refused(
            file,
            make(&whole, "U8", 1, 256),
            &[state_key, "nested_offset"],
        );
    }

    #[test]
    fn indices() {
        let shard = |name: &str| tensors(&[(name, "U8", "[1]", vec![7])]);
        let attempt = |index: &str, shards: &[(&str, Vec<u8>)]| {
            let scratch = Scratch::new();
            std::fs::write(scratch.0.join("model.safetensors.index.json"), index).unwrap();
            for (name, bytes) in shards {
                std::fs::write(scratch.0.join(name), bytes).unwrap();
            }
            model::open(&scratch.0).map(|c| c.entries().len())
        };
        let two = r#"{"metadata":{},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#;
        let both = [("1.safetensors", shard("a")), ("2.safetensors", shard("b"))];
        assert_eq!(attempt(two, &both).unwrap(), 2);
        let error = attempt(two, &both[..1]).unwrap_err();
        assert!(error.message().contains("2.safetensors"), "{error}");
        expect_kind(
            attempt(two, &both[..1]),
            ErrorKind::NotFound,
            "index.json names the shard",
        );
        // Where a tensor is missing that the index names, it depends on the model whether that matters.
        let swapped = [("1.safetensors", shard("b")), ("2.safetensors", shard("a"))];
        assert_eq!(attempt(two, &swapped).unwrap(), 2);
        let twice = [("1.safetensors", shard("a")), ("2.safetensors", shard("a"))];
        assert_eq!(attempt(two, &twice).unwrap(), 1);
        let unnamed = r#"{"weight_map":{"b":"1.safetensors","c":"2.safetensors"}}"#;
        expect_kind(
            attempt(unnamed, &twice),
            ErrorKind::CorruptFile,
            "the key 'a' stands twice, in ",
        );
        let error = attempt(r#"{"weight_map":{"a":"1.safetensors"}}"#, &both).map(|_| ());
        assert!(error.is_ok());
        for outside in [
            "../1.safetensors",
            "/etc/passwd",
            "d/1.safetensors",
            "..",
            "",
        ] {
            let index = format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#);
            let error = attempt(&index, &[]).unwrap_err();
            assert!(error.message().contains("same directory"), "{error}");
        }
        expect_kind(
            attempt(r#"{"weight_map":{}}"#, &[]),
            ErrorKind::CorruptFile,
            "its weight_map is empty",
        );
        for index in ["", "{"] {
            let error = attempt(index, &[]).unwrap_err();
            assert!(error.message().contains("index.json"), "{error}");
        }
        let truncated = [
            ("1.safetensors", shard("a")[..20].to_vec()),
            both[1].clone(),
        ];
        let error = attempt(two, &truncated).unwrap_err();
        assert!(error.message().contains("1.safetensors"), "{error}");
        let empty = [both[0].clone(), ("2.safetensors", Vec::new())];
        let error = attempt(two, &empty).unwrap_err();
        assert!(
            error.message().contains("2.safetensors is empty"),
            "{error}"
        );
        let double = r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#;
        assert!(
            attempt(double, &both)
                .unwrap_err()
                .message()
                .contains("'a' stands twice")
        );
    }
}

mod gguf_files {
    use super::*;

    const F32: u32 = 0;
    const NVFP4: u32 = 40;

    #[test]
    fn lying_headers() {
        let file = "x.gguf";
        let base = llama().tensor("w", &[8], F32, 0).with_data(vec![0; 32]);
        assert!(model::open_bytes(file, base.build()).is_ok());
        let with = |change: &dyn Fn(&mut Gguf)| {
            let mut gguf = base.clone();
            change(&mut gguf);
            gguf.build()
        };
        refused(file, with(&|g| g.version = 1), &["version 1"]);
        refused(file, with(&|g| g.version = 4), &["version 4"]);
        refused(
            file,
            with(&|g| g.version = 3u32.swap_bytes()),
            &["big-endian"],
        );
        refused(
            file,
            with(&|g| g.tensor_count = Some(u64::MAX)),
            &["18446744073709551615 tensors"],
        );
        refused(file, with(&|g| g.tensor_count = Some(0)), &["0 tensors"]);
        refused(
            file,
            with(&|g| g.pair_count = Some(u64::MAX)),
            &["key-value pairs"],
        );
        refused(file, with(&|g| g.pairs.clear()), &["general.architecture"]);
        refused(
            file,
            with(&|g| g.pairs.push(g.pairs[0].clone())),
            &["'general.architecture'", "twice"],
        );
        refused(
            file,
            with(&|g| g.tensors.push(g.tensors[0].clone())),
            &["'w'", "twice"],
        );
        refused(
            file,
            with(&|g| {
                g.pairs.pop();
            }),
            &["llama.attention.head_count"],
        );
        let pair = |pair: Vec<u8>| base.clone().with_pair(pair).build();
        refused(
            file,
            pair(Gguf::pair("k", 13, &[0; 8])),
            &["'k'", "value type 13"],
        );
        refused(
            file,
            pair(Gguf::pair("k", 8, &u64::MAX.to_le_bytes())),
            &["'k'", "18446744073709551615"],
        );
        for kind in [0, 12] {
            refused(
                file,
                pair(Gguf::array_pair("k", kind, u64::MAX, &[])),
                &["'k'"],
            );
        }
        for kind in [8, 9] {
            refused(
                file,
                pair(Gguf::array_pair("k", kind, u64::MAX, &[])),
                &["'k'", "does not fit"],
            );
        }
        let deep: Vec<u8> = (0..9)
            .flat_map(|_| [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat())
            .collect();
        refused(
            file,
            pair(Gguf::array_pair("k", 9, 1, &deep)),
            &["'k'", "deep"],
        );
        let alignment = |n: u32| pair(number_pair("general.alignment", n));
        refused(file, alignment(0), &["general.alignment is 0"]);
        refused(file, alignment(24), &["general.alignment is 24"]);
        refused(
            file,
            pair(Gguf::text_pair("general.alignment", "32")),
            &["'general.alignment'"],
        );
    }

    #[test]
    fn lying_tensors() {
        let file = "x.gguf";
        let one = |dims: &[u64], kind: u32, offset: u64| {
            llama()
                .tensor("w", dims, kind, offset)
                .with_data(vec![0; 64])
                .build()
        };
        refused(file, one(&[], F32, 0), &["'w'", "0 dimensions"]);
        refused(file, one(&[1; 5], F32, 0), &["'w'", "5 dimensions"]);
        refused(
            file,
            one(&[-4i64 as u64], F32, 0),
            &["'w'", "dimension 0 is -4"],
        );
        refused(file, one(&[1 << 40, 1 << 40], F32, 0), &["'w'", "overflow"]);
        refused(file, one(&[1 << 62], F32, 0), &["'w'", "overflows"]);
        refused(file, one(&[1 << 20], F32, 0), &["'w'", "past the file"]);
        refused(file, one(&[8], F32, 1 << 40), &["'w'", "past the file"]);
        refused(file, one(&[8], F32, u64::MAX), &["'w'", "data offset"]);
        refused(
            file,
            one(&[8], F32, 16),
            &["'w'", "multiple of the alignment"],
        );
        refused(file, one(&[48], 2, 0), &["'w'", "whole Q4_0 blocks"]);
        refused(
            file,
            one(&[48], NVFP4, 0),
            &["'w'", "whole NVFP4 blocks of 64"],
        );
        refused(file, one(&[256], 16, 96), &["'w'", "past the file"]);
        refused(
            file,
            one(&[-4i64 as u64], 999, 0),
            &["'w'", "dimension 0 is -4"],
        );
        let overlap = llama()
            .tensor("v", &[16], F32, 0)
            .tensor("w", &[8], F32, 32)
            .with_data(vec![0; 64]);
        refused(file, overlap.build(), &["'v'", "'w'", "overlap"]);
    }

    #[test]
    fn scales_without_weights_and_odd_heads() {
        let file = "x.gguf";
        let data = vec![0; 512];
        let make = |gguf: Gguf| gguf.with_data(data.clone()).build();
        let scale = |dims: &[u64]| llama().tensor("a.scale", dims, F32, 0);
        refused(file, make(scale(&[1])), &["'a.scale'", "no 'a.weight'"]);
        refused(
            file,
            make(scale(&[1]).tensor("a.weight", &[8], F32, 32)),
            &["'a.scale'", "not NVFP4"],
        );
        refused(
            file,
            make(scale(&[2]).tensor("a.weight", &[64], NVFP4, 32)),
            &["'a.scale'", "one F32"],
        );
        let nan = llama()
            .tensor("a.scale", &[1], F32, 0)
            .tensor("a.weight", &[64], NVFP4, 32)
            .with_data([f32::NAN.to_le_bytes().to_vec(), vec![0; 64]].concat());
        refused(file, nan.build(), &["'a.scale'", "finite"]);
        let two = scale(&[1]).tensor("a.weight.scale", &[1], F32, 32).tensor(
            "a.weight",
            &[64],
            NVFP4,
            64,
        );
        refused(file, make(two), &["'a.weight'", "two scale tensors"]);
        let odd = llama().tensor("blk.0.attn_q.weight", &[8, 6], F32, 0);
        refused(file, make(odd), &["'blk.0.attn_q.weight'", "2 heads"]);
        let same =
            llama()
                .tensor("output.weight", &[8], F32, 0)
                .tensor("lm_head.weight", &[8], F32, 32);
        refused(file, make(same), &["'lm_head.weight'", "two tensors"]);
    }

    #[test]
    fn bad_vocabularies() {
        let file = "x.gguf";
        let text = |s: &str| [(s.len() as u64).to_le_bytes().to_vec(), s.into()].concat();
        let base = || {
            llama()
                .tensor("w", &[8], F32, 0)
                .with_data(vec![0; 32])
                .with_pair(Gguf::array_pair(
                    "tokenizer.ggml.tokens",
                    8,
                    2,
                    &[text("a"), text("b")].concat(),
                ))
        };
        refused(file, base().build(), &["tokenizer.ggml.model"]);
        let base = || base().with_pair(Gguf::text_pair("tokenizer.ggml.model", "gpt2"));
        assert!(model::open_bytes(file, base().build()).is_ok());
        let with = |pair: Vec<u8>| base().with_pair(pair).build();
        let id = |n: u32| number_pair("tokenizer.ggml.eos_token_id", n);
        refused(file, with(id(2)), &["eos_token_id", "2 tokens"]);
        assert!(model::open_bytes(file, with(id(u32::MAX))).is_ok());
        let types = Gguf::array_pair("tokenizer.ggml.token_type", 5, 1, &[1, 0, 0, 0]);
        refused(
            file,
            with(types),
            &["token_type", "1 elements for 2 tokens"],
        );
        let scores = Gguf::text_pair("tokenizer.ggml.scores", "many");
        refused(file, with(scores), &["scores", "a list of numbers"]);
        let merges = Gguf::array_pair("tokenizer.ggml.merges", 5, 1, &[1, 0, 0, 0]);
        refused(file, with(merges), &["merges", "a list of texts"]);
        let layers = Gguf::array_pair("llama.feed_forward_length", 4, 2, &[1, 0, 0, 0, 2, 0, 0, 0]);
        refused(
            file,
            with(layers),
            &["llama.feed_forward_length", "differs between layers"],
        );
    }
}

/// Sets of GGUF files that are not one model.
mod split_gguf_files {
    use super::*;

    const F32: u32 = 0;
    const NVFP4: u32 = 40;

    /// A part under construction. The first of a set has the metadata.
    #[derive(Clone)]
    struct Part {
        base: Gguf,
        no: Option<u16>,
        count: Option<u16>,
        tensors: Option<i32>,
        names: Vec<&'static str>,
    }

    impl Part {
        fn build(&self) -> Vec<u8> {
            let mut gguf = self.base.clone();
            for (key, value) in [("split.no", self.no), ("split.count", self.count)] {
                if let Some(value) = value {
                    gguf = gguf.with_pair(Gguf::pair(key, 2, &value.to_le_bytes()));
                }
            }
            if let Some(n) = self.tensors {
                let pair = Gguf::pair("split.tensors.count", 5, &n.to_le_bytes());
                gguf = gguf.with_pair(pair);
            }
            for name in &self.names {
                let at = gguf.data.len() as u64;
                gguf = gguf.tensor(name, &[8], F32, at);
                gguf.data.extend([0; 32]);
            }
            gguf.build()
        }
    }

    /// Three parts of a model of four tensors.
    fn set() -> Vec<Part> {
        let mut no_metadata = Gguf::new("");
        no_metadata.pairs.clear();
        let bases = [llama(), no_metadata.clone(), no_metadata];
        let names = [vec!["a", "b"], vec!["c"], vec!["d"]];
        (0..3)
            .zip(bases.into_iter().zip(names))
            .map(|(no, (base, names))| Part {
                base,
                no: Some(no),
                count: Some(3),
                tensors: Some(4),
                names,
            })
            .collect()
    }

    fn name(number: usize) -> String {
        format!("m-{number:05}-of-00003.gguf")
    }

    fn write(scratch: &Scratch, parts: &[Vec<u8>]) {
        for (i, bytes) in parts.iter().enumerate() {
            std::fs::write(scratch.0.join(name(i + 1)), bytes).unwrap();
        }
    }

    /// Opening any of the files and their directory must fail, with a message that has the path of the file `culprit` and every
    /// needle.
    fn damaged(parts: &[Vec<u8>], culprit: usize, needles: &[&str]) {
        let scratch = Scratch::new();
        write(&scratch, parts);
        let culprit = scratch.0.join(name(culprit));
        for opened in (1..=3)
            .map(|n| scratch.0.join(name(n)))
            .chain([scratch.0.clone()])
        {
            let error = model::open(&opened).map(|_| ()).unwrap_err();
            let message = error.message();
            assert_eq!(error.kind(), ErrorKind::CorruptFile, "{message}");
            for needle in needles.iter().copied().chain(culprit.to_str()) {
                assert!(message.contains(needle), "'{message}' lacks '{needle}'");
            }
        }
    }

    fn changed(change: impl Fn(&mut [Part])) -> Vec<Vec<u8>> {
        let mut parts = set();
        change(&mut parts);
        parts.iter().map(Part::build).collect()
    }

    #[test]
    fn the_good_set_is_good() {
        let scratch = Scratch::new();
        write(&scratch, &changed(|_| {}));
        assert_eq!(model::open(&scratch.0).unwrap().entries().len(), 4);
        // Optional metadata is left out.
        write(
            &scratch,
            &changed(|p| p.iter_mut().for_each(|p| p.tensors = None)),
        );
        assert_eq!(model::open(&scratch.0).unwrap().entries().len(), 4);
    }

    #[test]
    fn missing_parts() {
        for gone in 1..=3 {
            let scratch = Scratch::new();
            write(&scratch, &changed(|_| {}));
            std::fs::remove_file(scratch.0.join(name(gone))).unwrap();
            let there = (1..=3)
                .filter(|&n| n != gone)
                .map(|n| scratch.0.join(name(n)));
            for opened in there.chain([scratch.0.clone()]) {
                let error = model::open(&opened).map(|_| ()).unwrap_err();
                let missing = format!("{} is missing", name(gone));
                assert!(error.message().contains(&missing), "{error}");
                assert!(
                    error.message().contains(opened.to_str().unwrap()),
                    "{error}"
                );
                assert_eq!(error.kind(), ErrorKind::NotFound);
            }
        }
        for (i, bytes) in changed(|_| {}).into_iter().enumerate() {
            let part = format!("part {} of 3", i + 1);
            refused(&name(i + 1), bytes, &[&part, "the other parts are missing"]);
        }
        let scratch = Scratch::new();
        for odd in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-00003",
        ] {
            let path = scratch.0.join(odd);
            std::fs::write(&path, set()[0].build()).unwrap();
            let error = model::open(&path).map(|_| ()).unwrap_err();
            assert!(
                error.message().contains(odd)
                    && error.message().contains("PREFIX-00001-of-00003.gguf"),
                "{error}"
            );
        }
    }

    #[test]
    fn numbers_that_do_not_fit_the_name() {
        damaged(
            &changed(|p| p.swap(1, 2)),
            2,
            &["split.no is 2", "part 2", "whose split.no is 1"],
        );
        damaged(&changed(|p| p[1] = p[0].clone()), 2, &["split.no is 0"]);
        damaged(&changed(|p| p[2].no = None), 3, &["no split.no"]);
        damaged(
            &changed(|p| p[2].no = Some(3)),
            3,
            &["split.no is 3", "0 to 2"],
        );
        damaged(
            &changed(|p| p[1].count = Some(4)),
            2,
            &["split.count is 4", "3 parts"],
        );
        for count in [None, Some(1)] {
            let parts = changed(|p| p[1].count = count);
            let scratch = Scratch::new();
            write(&scratch, &parts);
            let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
            assert!(
                error.message().contains(&name(2))
                    && error.message().contains("no such split.count"),
                "{error}"
            );
        }
        let all = changed(|p| p.iter_mut().for_each(|p| p.count = Some(4)));
        let scratch = Scratch::new();
        write(&scratch, &all);
        let error = model::open(&scratch.0.join(name(3)))
            .map(|_| ())
            .unwrap_err();
        assert!(
            error.message().contains(&name(3)) && error.message().contains("split.count is 4"),
            "{error}"
        );
    }

    #[test]
    fn parts_of_several_models() {
        damaged(&changed(|p| p[2].names.push("c")), 3, &["'c'", &name(2)]);
        damaged(
            &changed(|p| p[1].tensors = Some(5)),
            2,
            &[
                "split.tensors.count is 5",
                "is 4",
                "not of one model",
                &name(1),
            ],
        );
        damaged(
            &changed(|p| p[1].base = Gguf::new("qwen3")),
            2,
            &["'qwen3'", "'llama'", "not of one model"],
        );
        damaged(
            &changed(|p| p[2].names.push("e")),
            1,
            &["split.tensors.count is 4", "3 parts hold 5 tensors"],
        );
        damaged(
            &changed(|p| {
                p.iter_mut().for_each(|p| {
                    p.names.clear();
                    p.tensors = None;
                });
            }),
            1,
            &["0 tensors"],
        );
        damaged(
            &changed(|p| p[0].base.pairs.clear()),
            1,
            &["general.architecture"],
        );
        // Both are a head's weight in the terms of Hugging Face.
        damaged(
            &changed(|p| {
                p[0].names[0] = "output.weight";
                p[2].names[0] = "lm_head.weight";
            }),
            3,
            &["two tensors are both 'lm_head.weight'"],
        );
    }

    #[test]
    fn damage_within_a_part_is_told_of_that_part() {
        let good = changed(|_| {});
        let scratch = Scratch::new();
        write(&scratch, &good);
        let path = scratch.0.join(name(2));
        for len in 0..good[1].len() {
            std::fs::write(&path, &good[1][..len]).unwrap();
            let error = model::open(&scratch.0).map(|_| ()).unwrap_err();
            assert!(error.message().contains(&name(2)), "{len}: {error}");
        }
        for (part, bytes) in good.iter().enumerate() {
            for at in 0..bytes.len() {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << (at % 8);
                std::fs::write(scratch.0.join(name(part + 1)), flipped).unwrap();
                if let Ok(opened) = model::open(&scratch.0) {
                    walk(&*opened);
                }
            }
            write(&scratch, &good);
        }
        let scale = Gguf::new("llama")
            .tensor("w.scale", &[1], F32, 0)
            .with_data(f32::NAN.to_le_bytes().to_vec());
        let weight = llama()
            .tensor("w.weight", &[64], NVFP4, 0)
            .with_data(vec![0; 64]);
        damaged(
            &changed(|p| {
                p[0].base = weight.clone();
                p[2].base = scale.clone();
                p.iter_mut().for_each(|p| {
                    p.names.clear();
                    p.tensors = None;
                });
            }),
            3,
            &["'w.scale'", "finite"],
        );
    }
}

/// Parts of a gated delta net that cannot be put in the order of their value heads, or have no logarithm.
#[test]
fn value_heads_of_gguf_files_must_divide() {
    let number =
        |key: &str, value: u32| Gguf::pair(&format!("qwen35.{key}"), 4, &value.to_le_bytes());
    // Two key heads, and value heads of `width` together.
    let open = |(heads, width): (u32, u32), name: &str, dims: &[u64], kind: u32, data: Vec<u8>| {
        let gguf = [
            ("attention.head_count", 2),
            ("ssm.state_size", 16),
            ("ssm.group_count", 2),
            ("ssm.time_step_rank", heads),
            ("ssm.inner_size", width),
        ]
        .into_iter()
        .fold(Gguf::new("qwen35"), |gguf, (key, value)| {
            gguf.with_pair(number(key, value))
        });
        let gguf = gguf.tensor(name, dims, kind, 0).with_data(data);
        model::open_bytes("x.gguf", gguf.build())
    };
    let (f32s, nvfp4) = (0, 40);
    let zeros = |count: usize| vec![0; count];
    expect_kind(
        open(
            (4, 32),
            "blk.0.attn_gate.weight",
            &[4, 33],
            f32s,
            zeros(33 * 16),
        ),
        ErrorKind::CorruptFile,
        "'blk.0.attn_gate.weight' of shape [33, 4] does not have 4 value heads of 8 for 2 key heads",
    );
    expect_kind(
        open(
            (4, 32),
            "blk.0.attn_qkv.weight",
            &[4, 95],
            f32s,
            zeros(95 * 16),
        ),
        ErrorKind::CorruptFile,
        "of shape [95, 4] does not have 4 value heads of 8 for 2 key heads after 64 rows of queries and keys",
    );
    expect_kind(
        open(
            (4, 30),
            "blk.0.ssm_out.weight",
            &[30, 4],
            f32s,
            zeros(30 * 16),
        ),
        ErrorKind::CorruptFile,
        "'qwen35.ssm.inner_size' is 30, which 4 value heads",
    );
    // Heads of 8 columns part the blocks of 16.
    expect_kind(
        open((8, 64), "blk.0.ssm_out.weight", &[64, 1], nvfp4, zeros(36)).map(drop),
        ErrorKind::Unsupported,
        "'blk.0.ssm_out.weight' is in NVFP4, whose blocks its heads divide",
    );
    let data = [-1f32, -2.0, 0.5, -1.0].map(f32::to_le_bytes).concat();
    let opened = open((4, 32), "blk.0.ssm_a", &[4], f32s, data).unwrap();
    let entry = opened.find("model.layers.0.linear_attn.A_log").unwrap();
    expect_kind(
        opened.rows_f32(entry, 0..1, &mut [0.0; 4]),
        ErrorKind::CorruptFile,
        "'blk.0.ssm_a': it has 0.5; expected finite numbers below 0, as -e^x is",
    );
}
