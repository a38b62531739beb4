//! int8 rows as ModelOpt and compressed-tensors store them: read, written, refused, and run.

use std::path::Path;
use std::sync::Arc;

use super::common::expect_kind;
use super::files::{Scratch, tensors};
use NVFP4::base::threads::Pool;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::checkpoint::{
    Checkpoint, DatWriter, Encoding, Metadata, ModelOptWriter, Planned, TokenizerSource, Writer,
};
use NVFP4::engine::Served;
use NVFP4::format::int8;
use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::training::Source;
use NVFP4::model::{self, Device, KvType, LoadOptions, Logits, Scratch as Room};
use NVFP4::tensor::DType;
use half::{bf16, f16};
use serde_json::{Value, json};

/// Codes of every value.
fn codes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 37 % 256) as u8).collect()
}

/// Scales that f16 and bfloat16 hold, too.
fn scales(rows: usize) -> Vec<f32> {
    (0..rows).map(|r| 0.25 + r as f32 / 8.0).collect()
}

fn stored(dtype: &str, values: &[f32]) -> Vec<u8> {
    let each = |&v: &f32| match dtype {
        "F32" => v.to_le_bytes().to_vec(),
        "F16" => f16::from_f32(v).to_le_bytes().to_vec(),
        _ => bf16::from_f32(v).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

type Item<'a> = (&'a str, &'a str, &'a str, Vec<u8>);

fn open(items: &[Item<'_>]) -> Result<Box<dyn Checkpoint>> {
    model::open_bytes("x.safetensors", tensors(items))
}

/// Checks codes, scales and values of `a.weight`.
fn check(opened: &dyn Checkpoint, shape: &[usize], codes: &[u8], scales: &[f32]) {
    let entry = opened.find("a.weight").unwrap();
    assert_eq!((&entry.shape[..], entry.encoding), (shape, Encoding::Int8));
    let (rows, cols) = (entry.rows(), entry.cols());
    for some in [0..rows, rows / 2..rows, rows - 1..rows] {
        let (mut got, mut got_scales) = (vec![0; some.len() * cols], vec![0.0; some.len()]);
        opened
            .rows_int8(entry, some.clone(), &mut got, &mut got_scales)
            .unwrap();
        let want = &codes[some.start * cols..some.end * cols];
        assert!(got == want && got_scales == scales[some.clone()]);
        let mut values = vec![0.0; got.len()];
        opened.rows_f32(entry, some.clone(), &mut values).unwrap();
        for (i, value) in values.iter().enumerate() {
            let scale = scales[some.start + i / cols];
            assert_eq!(*value, f32::from(want[i] as i8) * scale);
        }
    }
}

#[test]
fn both_conventions_are_read() {
    let (codes, scales) = (codes(6 * 48), scales(6));
    for dtype in ["F32", "F16", "BF16"] {
        for (shape, scale_shape, format) in [
            ("[6,48]", "[6]", "modelopt"),
            ("[6,48]", "[6,1]", "compressed-tensors"),
            ("[2,3,48]", "[2,3]", "modelopt"),
            ("[2,3,48]", "[2,3,1]", "compressed-tensors"),
        ] {
            let opened = open(&[
                ("a.weight", "I8", shape, codes.clone()),
                ("a.weight_scale", dtype, scale_shape, stored(dtype, &scales)),
                ("b.weight", "I8", "[2]", vec![1, 2]),
            ])
            .unwrap();
            assert_eq!((opened.entries().len(), opened.format()), (2, format));
            let sizes: Vec<usize> = serde_json::from_str(shape).unwrap();
            check(&*opened, &sizes, &codes, &scales);
        }
    }
    // Without a scale they are integers, and one scale is every row's.
    let opened = open(&[("a.weight", "I8", "[6,48]", codes.clone())]).unwrap();
    let plain = opened.find("a.weight").unwrap();
    assert_eq!(plain.encoding, Encoding::Dense(DType::I8));
    let words = "'a.weight' is I8, not INT8";
    let read = opened.rows_int8(plain, 0..1, &mut [0; 48], &mut [0.0]);
    expect_kind(read, ErrorKind::InvalidArgument, words);
    let opened = open(&[
        ("a.weight", "I8", "[6,48]", codes.clone()),
        ("a.weight_scale", "F32", "[1]", stored("F32", &[0.5])),
    ])
    .unwrap();
    check(&*opened, &[6, 48], &codes, &[0.5; 6]);
}

/// Four values per int32, each plus 128, as compressed-tensors packs weights without 8-bit activations.
#[test]
fn packed_integers_are_read() {
    let (codes, scales) = (codes(6 * 48), scales(6));
    let packed: Vec<u8> = codes.iter().map(|c| c.wrapping_add(128)).collect();
    let shape = |cols: i64| [6i64, cols].iter().flat_map(|d| d.to_le_bytes()).collect();
    let items = |cols: i64, packed: Vec<u8>, packed_shape: &'static str| {
        open(&[
            ("a.weight_packed", "I32", packed_shape, packed),
            ("a.weight_scale", "BF16", "[6,1]", stored("BF16", &scales)),
            ("a.weight_shape", "I64", "[2]", shape(cols)),
        ])
    };
    let opened = items(48, packed.clone(), "[6,12]").unwrap();
    assert_eq!(opened.entries().len(), 1);
    check(&*opened, &[6, 48], &codes, &scales);
    // Integers of other sizes are not int8 weights, whatever their other properties.
    for (cols, bytes, packed_shape) in [
        (96, packed.clone(), "[6,12]"),
        (-48, packed.clone(), "[6,12]"),
        (47, packed.clone(), "[6,12]"),
        (48, packed[..144].to_vec(), "[6,6]"),
    ] {
        let opened = items(cols, bytes, packed_shape);
        let found = opened
            .ok()
            .and_then(|o| o.find("a.weight").map(|e| e.encoding));
        assert_ne!(found, Some(Encoding::Int8), "{cols} columns");
    }
}

#[test]
fn what_is_no_int8_weight_is_refused() {
    let refused =
        |weight: &str, scale: (&str, &str, &[f32]), zero: Option<Vec<u8>>, kind, words| {
            let elements: Vec<usize> = serde_json::from_str(weight).unwrap();
            let mut items = vec![
                ("a.weight", "I8", weight, codes(elements.iter().product())),
                ("a.weight_scale", scale.0, scale.1, stored(scale.0, scale.2)),
            ];
            if let Some(zero) = zero {
                items.push(("a.weight_zero_point", "I8", "[2,1]", zero));
            }
            match words {
                "" => assert!(open(&items).is_ok()),
                words => expect_kind(open(&items), kind, words),
            }
        };
    let (corrupt, unsupported) = (ErrorKind::CorruptFile, ErrorKind::Unsupported);
    let one_a_row = "int8 weights of shape [2, 16] take one scale, or one per row";
    refused(
        "[2,16]",
        ("F32", "[4]", &[1.0; 4]),
        None,
        unsupported,
        one_a_row,
    );
    refused(
        "[2,16]",
        ("F32", "[2,2]", &[1.0; 4]),
        None,
        unsupported,
        one_a_row,
    );
    refused(
        "[16]",
        ("F32", "[1]", &[1.0]),
        None,
        corrupt,
        "at least two dimensions",
    );
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let words = "'a.weight_scale': the scale of row 1 is";
        refused("[2,16]", ("F32", "[2]", &[1.0, bad]), None, corrupt, words);
    }
    let two: (&str, &str, &[f32]) = ("F32", "[2,1]", &[1.0; 2]);
    refused("[2,16]", two, Some(vec![0; 2]), unsupported, "");
    let words = "'a.weight_zero_point': int8 weights with zero points are not supported";
    refused("[2,16]", two, Some(vec![0, 3]), unsupported, words);
    let e = open(&[
        ("a.weight", "I8", "[2,16]", codes(32)),
        ("a.weight_scale", "I32", "[2]", vec![1; 8]),
    ]);
    expect_kind(
        e,
        unsupported,
        "scales of int8 weights are F32, BF16 or F16, not I32",
    );
}

fn plan() -> Vec<Planned> {
    let planned = |name: &str, shape: &[usize], encoding| Planned {
        name: name.into(),
        shape: shape.into(),
        encoding,
    };
    vec![
        planned("model.embed_tokens.weight", &[5, 32], Encoding::Int8),
        planned(
            "model.layers.0.mlp.up_proj.weight",
            &[2, 32],
            Encoding::Nvfp4,
        ),
        planned(
            "model.layers.0.mlp.gate.weight",
            &[2, 32],
            Encoding::Dense(DType::BF16),
        ),
    ]
}

/// A directory with int8 tables reads back. Its config is ModelOpt's: an algorithm for each layer where a model has several.
#[test]
fn a_directory_says_what_each_layer_is() {
    let scratch = Scratch::new();
    let place = scratch.0.join("out");
    let metadata = Metadata {
        config: Some(json!({"model_type": "qwen2", "tie_word_embeddings": true})),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let (codes, scales) = (codes(5 * 32), scales(5));
    let write = |codes: &[u8], scales: &[f32]| -> Result<()> {
        let mut writer = Box::new(ModelOptWriter::create(&place, &plan(), &metadata)?);
        writer.begin("model.embed_tokens.weight", 1.0)?;
        // A run of rows at a time.
        writer.int8(&codes[..64], &scales[..2])?;
        writer.int8(&codes[64..], &scales[2..])?;
        writer.begin("model.layers.0.mlp.up_proj.weight", 0.5)?;
        writer.nvfp4(&[0x21; 32], &[0x38; 4])?;
        writer.begin("model.layers.0.mlp.gate.weight", 1.0)?;
        writer.values(&[1.0; 64])?;
        writer.finish()
    };
    let e = write(&codes, &[1.0; 6]).unwrap_err();
    assert!(
        e.message()
            .contains("96 codes in rows of 32 take 3 scales, not 4"),
        "{e}"
    );
    let e = write(&codes, &[1.0, 1.0, 1.0, 0.0, 1.0]).unwrap_err();
    assert!(e.message().contains("the scale of row 3 is 0"), "{e}");
    write(&codes, &scales).unwrap();

    let bytes = std::fs::read(place.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let table = file.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!(
        (table.dtype(), table.shape(), table.data()),
        (safetensors::Dtype::I8, &[5, 32][..], &codes[..])
    );
    let scale = file.tensor("model.embed_tokens.weight_scale").unwrap();
    assert_eq!(
        (scale.dtype(), scale.shape()),
        (safetensors::Dtype::F32, &[5][..])
    );
    assert_eq!(scale.data(), stored("F32", &scales));

    let json = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(place.join(name)).unwrap()).unwrap()
    };
    let layers = json!({
        "model.embed_tokens": {"quant_algo": "W8A16"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    });
    let config = &json("config.json")["quantization_config"];
    let own = &json("hf_quant_config.json")["quantization"];
    for (described, ignored) in [(config, "ignore"), (own, "exclude_modules")] {
        assert_eq!(described["quant_algo"], "MIXED_PRECISION");
        assert_eq!(described["quantized_layers"], layers);
        assert_eq!(described[ignored], json!(["model.layers.0.mlp.gate"]));
    }
    let opened = model::open(&place).unwrap();
    let entry = opened.find("model.embed_tokens.weight").unwrap();
    let (mut got, mut got_scales) = (vec![0; codes.len()], vec![0.0; 5]);
    opened
        .rows_int8(entry, 0..5, &mut got, &mut got_scales)
        .unwrap();
    assert!(got == codes && got_scales == scales);
    expect_kind(
        DatWriter::create(&scratch.0.join("x.dat"), &plan()),
        ErrorKind::Unsupported,
        "'model.embed_tokens.weight': .dat holds no INT8",
    );
}

/// All logits of a few tokens.
fn logits(path: &Path, threads: usize) -> (Vec<u32>, Arc<Served>) {
    let device = Device::cpu(Some(threads)).unwrap();
    let model = Served::load(path, &LoadOptions::new(device)).unwrap();
    let tokens: Vec<u32> = (0..11).map(|i| i * 29 % 150).collect();
    let mut cache = model.sequence(tokens.len(), KvType::F32).unwrap();
    let mut out = Vec::new();
    model
        .forward(&tokens, &mut cache, &mut Room::new(), Logits::All, &mut out)
        .unwrap();
    (out.iter().map(|v| v.to_bits()).collect(), model)
}

/// Models with int8 tables give the results of float32 tables with the same values, on any number of threads, and keep them as int8.
#[test]
fn a_model_keeps_its_tables_in_int8() {
    for (case, has_head) in [("qwen3_tied", false), ("qwen3_untied", true)] {
        let scratch = Scratch::new();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden/model")
            .join(case);
        let place = scratch.0.join("int8");
        let options = ConvertOptions {
            tables: Tables::Int8,
            ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
        };
        let pool = Pool::new(2).unwrap();
        convert(
            &*model::open(&golden).unwrap(),
            &place,
            &options,
            &pool,
            &mut |_| std::ops::ControlFlow::Continue(()),
        )
        .unwrap();
        let source = model::open(&place).unwrap();
        assert_eq!(source.find("lm_head.weight").is_some(), has_head);
        let plan: Vec<Planned> = source
            .entries()
            .iter()
            .map(|entry| Planned {
                encoding: match entry.encoding {
                    Encoding::Int8 => Encoding::Dense(DType::F32),
                    same => same,
                },
                ..Planned::from(entry)
            })
            .collect();
        let wide = scratch.0.join("wide");
        let mut writer = Box::new(ModelOptWriter::create(&wide, &plan, source.metadata()).unwrap());
        for entry in source.entries() {
            writer.copy(&*source, entry).unwrap();
        }
        writer.finish().unwrap();

        // Training begins with the values.
        let training = Source::open(&place).unwrap();
        let table = training.layout().embedding;
        assert_eq!(training.encoding(table).unwrap(), Encoding::Int8);
        let entry = source.find("model.embed_tokens.weight").unwrap();
        let mut rows = [0, 1].map(|_| vec![0.0; 3 * entry.cols()]);
        training.matrix(table, 5..8, &mut rows[0]).unwrap();
        source.rows_f32(entry, 5..8, &mut rows[1]).unwrap();
        assert!(rows[0] == rows[1], "{case}");

        let (one, model) = logits(&place, 1);
        let (three, _) = logits(&place, 3);
        assert!(one == three, "{case}: bits depend on threads");
        let (want, of_wide) = logits(&wide, 1);
        let float =
            |bits: &[u32]| -> Vec<f32> { bits.iter().map(|&b| f32::from_bits(b)).collect() };
        let (got, want) = (float(&one), float(&want));
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs());
        let worst = worst.fold(0f32, f32::max);
        assert!(worst <= 2e-5, "{case}: {worst}");

        let spec = model.spec();
        let info = model.info();
        let held = &info.formats["int8"];
        assert_eq!(
            (held.tensors, info.embedding_in_file),
            (1, has_head),
            "{case}"
        );
        let rows = spec.vocab_size.next_multiple_of(16);
        assert_eq!(held.bytes as usize, rows * (spec.hidden_size + 4), "{case}");
        assert!(info.weight_bytes < of_wide.info().weight_bytes);
        // Threads do not change it, values do.
        assert_eq!(model.fingerprint(), logits(&place, 2).1.fingerprint());
        assert_ne!(model.fingerprint(), of_wide.fingerprint());
    }
}

#[test]
fn the_format_and_the_reader_agree() {
    let values: Vec<f32> = (0..4 * 32).map(|i| (i as f32 - 60.0) / 7.0).collect();
    let (mut codes, mut scales) = (vec![0; 128], vec![0.0; 4]);
    int8::quantize_rows(&values, 32, 0, &mut codes, &mut scales).unwrap();
    let opened = open(&[
        ("a.weight", "I8", "[4,32]", codes.clone()),
        ("a.weight_scale", "F32", "[4]", stored("F32", &scales)),
    ])
    .unwrap();
    check(&*opened, &[4, 32], &codes, &scales);
}
