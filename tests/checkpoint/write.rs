//! Writers: output reads back the same, and a failed write leaves nothing behind and changes nothing.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use super::common::expect_kind;
use NVFP4::base::ErrorKind;
use NVFP4::checkpoint::{
    self, Checkpoint, DatWriter, Encoding, Metadata, ModelOptWriter, Planned, TokenizerSource,
    Writer, write_companions,
};
use NVFP4::model;
use safetensors::SafeTensors;

use super::files::{Scratch, dat, dat_entry, leb128};
use NVFP4::tensor::DType;

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/checkpoint")
        .join(name)
}

fn planned(name: &str, shape: &[usize], encoding: Encoding) -> Planned {
    Planned {
        name: name.into(),
        shape: shape.into(),
        encoding,
    }
}

fn plan() -> Vec<Planned> {
    vec![
        planned("norm.weight", &[3], Encoding::Dense(DType::F32)),
        planned("a.weight", &[2, 32], Encoding::Nvfp4),
        planned("half.weight", &[2, 2], Encoding::Dense(DType::F16)),
        planned("lm_head.weight", &[1, 3], Encoding::Dense(DType::BF16)),
    ]
}

const CODES: [u8; 32] = [0x21; 32];
const SCALES: [u8; 4] = [0x38, 0x40, 0x48, 0x7e];

fn write_plan(mut writer: Box<dyn Writer>, global: f32) -> NVFP4::base::Result<()> {
    writer.begin("norm.weight", 1.0)?;
    writer.values(&[1.0, -2.5, 3e-9])?;
    writer.begin("a.weight", global)?;
    writer.nvfp4(&CODES[..16], &SCALES[..2])?;
    writer.nvfp4(&CODES[16..], &SCALES[2..])?;
    writer.begin("half.weight", 1.0)?;
    writer.values(&[0.5, 1.5])?;
    writer.values(&[65504.0, -0.25])?;
    writer.begin("lm_head.weight", 1.0)?;
    writer.raw(&[0x80, 0x3f, 0, 0x40, 0x40, 0x40])?;
    writer.finish()
}

fn check_plan(checkpoint: &dyn Checkpoint, global: f32) {
    let read = |name: &str| {
        let entry = checkpoint.find(name).unwrap();
        let mut out = vec![0.0; entry.rows() * entry.cols()];
        checkpoint
            .rows_f32(entry, 0..entry.rows(), &mut out)
            .unwrap();
        out
    };
    let names: Vec<_> = checkpoint.entries().iter().map(Planned::from).collect();
    for planned in plan() {
        assert!(names.contains(&planned), "{names:?} lacks {planned:?}");
    }
    assert_eq!(names.len(), plan().len());
    assert_eq!(read("norm.weight"), [1.0, -2.5, 3e-9]);
    assert_eq!(read("half.weight"), [0.5, 1.5, 65504.0, -0.25]);
    assert_eq!(read("lm_head.weight"), [1.0, 2.0, 3.0]);
    let a = checkpoint.find("a.weight").unwrap();
    assert_eq!(checkpoint.global_scale(a).unwrap(), global);
    let (mut codes, mut scales) = ([0; 32], [0; 4]);
    checkpoint
        .rows_nvfp4(a, 0..2, &mut codes, &mut scales)
        .unwrap();
    assert_eq!((codes, scales), (CODES, SCALES));
    assert_eq!(read("a.weight")[..2], [0.5 * global, global]);
}

#[test]
fn dat_reads_back_and_is_laid_out_as_the_host_expects() {
    let scratch = Scratch::new();
    let path = scratch.0.join("m.dat");
    write_plan(Box::new(DatWriter::create(&path, &plan()).unwrap()), 1.0).unwrap();
    check_plan(&*model::open(&path).unwrap(), 1.0);
    let floats: Vec<u8> = [1.0f32, -2.5, 3e-9]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let halves = [0x00, 0x38, 0x00, 0x3e, 0xff, 0x7b, 0x00, 0xb4];
    let want = dat(&[
        dat_entry("norm.weight", 6, &[3], &floats),
        dat_entry("a.weight.qdata", 0, &[2, 16], &CODES),
        dat_entry("a.weight.scale", 101, &[2, 2], &SCALES),
        dat_entry("half.weight", 5, &[2, 2], &halves),
        dat_entry(
            "lm_head.weight",
            15,
            &[1, 3],
            &[0x80, 0x3f, 0, 0x40, 0x40, 0x40],
        ),
    ]);
    assert_eq!(std::fs::read(&path).unwrap(), want);
    assert_eq!(scratch.names(), ["m.dat"]);
}

#[test]
fn a_dat_copied_entry_by_entry_is_the_same_file() {
    let scratch = Scratch::new();
    let source = model::open(&golden("host.dat")).unwrap();
    let path = scratch.0.join("copy.dat");
    let mut writer = Box::new(DatWriter::create_like(&path, &*source).unwrap());
    for entry in source.entries() {
        writer.copy(&*source, entry).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(
        std::fs::read(&path).unwrap(),
        std::fs::read(golden("host.dat")).unwrap()
    );
    let other = model::open(&golden("modelopt.safetensors")).unwrap();
    let error = DatWriter::create_like(&path, &*other)
        .map(|_| ())
        .unwrap_err();
    assert!(error.message().contains("modelopt"), "{error}");
}

#[test]
fn requantized_entries_keep_their_element_types() {
    let scratch = Scratch::new();
    let original = scratch.0.join("old.dat");
    let entries = [
        dat_entry("w.weight.qdata", 100, &[1, 8], &[1; 8]),
        dat_entry("w.weight.scale", 24, &[1, 1], &[0x38]),
        dat_entry("v.qdata", 0, &[1, 8], &[2; 8]),
        dat_entry("v.scale", 5, &[1, 1], &[0, 0x3c]),
    ];
    std::fs::write(&original, dat(&entries)).unwrap();
    let source = model::open(&original).unwrap();
    let mut writer = Box::new(DatWriter::create_like(&original, &*source).unwrap());
    writer.begin("w.weight", 1.0).unwrap();
    writer.nvfp4(&[9; 8], &[0x40]).unwrap();
    let v = source.find("v.weight").unwrap();
    writer.copy(&*source, v).unwrap();
    writer.finish().unwrap();
    let want = [
        dat_entry("w.weight.qdata", 100, &[1, 8], &[9; 8]),
        dat_entry("w.weight.scale", 24, &[1, 1], &[0x40]),
        entries[2].clone(),
        entries[3].clone(),
    ];
    assert_eq!(std::fs::read(&original).unwrap(), dat(&want));
    let mut writer = DatWriter::create_like(&original, &*source).unwrap();
    writer
        .copy(&*source, source.find("w.weight").unwrap())
        .unwrap();
    writer.begin("v.weight", 1.0).unwrap();
    let error = writer.nvfp4(&[9; 8], &[0x40]).unwrap_err();
    assert!(error.message().contains("stored as floats"), "{error}");
}

#[test]
fn dat_holds_no_global_scale() {
    let scratch = Scratch::new();
    let path = scratch.0.join("m.dat");
    let writer = Box::new(DatWriter::create(&path, &plan()).unwrap());
    let error = write_plan(writer, 0.5).unwrap_err();
    assert!(error.message().contains("'a.weight'"), "{error}");
    assert!(error.message().contains("single-level"), "{error}");
    assert!(scratch.names().is_empty());
}

#[test]
fn modelopt_directory_reads_back_and_with_the_reference_implementation() {
    let scratch = Scratch::new();
    let source = scratch.0.join("source");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(source.join("chat_template.jinja"), "hello").unwrap();
    let metadata = Metadata {
        config: Some(serde_json::json!({"model_type": "qwen3", "quantization_config": {"old": 1}})),
        tokenizer: TokenizerSource::Directory(source.clone()),
        embedding: Vec::new(),
    };
    let path = scratch.0.join("out");
    let mut writer = Box::new(ModelOptWriter::create(&path, &plan(), &metadata).unwrap());
    writer
        .add_file("chat_template.jinja", b"hi".to_vec())
        .unwrap();
    expect_kind(
        writer.add_file("../up", Vec::new()),
        ErrorKind::InvalidArgument,
        "'../up' is not the name of a file",
    );
    write_plan(writer, 0.75).unwrap();
    let checkpoint = model::open(&path).unwrap();
    assert_eq!(checkpoint.format(), "modelopt");
    check_plan(&*checkpoint, 0.75);
    assert!(matches!(
        &checkpoint.metadata().tokenizer,
        TokenizerSource::Directory(d) if *d == path
    ));
    assert_eq!(
        std::fs::read(path.join("chat_template.jinja")).unwrap(),
        b"hi"
    );

    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.len(), 6);
    let weight = reference.tensor("a.weight").unwrap();
    assert_eq!(
        (weight.dtype(), weight.shape()),
        (safetensors::Dtype::U8, &[2, 16][..])
    );
    let scale = reference.tensor("a.weight_scale").unwrap();
    assert_eq!(
        (scale.dtype(), scale.shape()),
        (safetensors::Dtype::F8_E4M3, &[2, 2][..])
    );
    let global = reference.tensor("a.weight_scale_2").unwrap();
    assert_eq!(
        (global.dtype(), global.shape()),
        (safetensors::Dtype::F32, &[][..])
    );
    assert_eq!(global.data(), 0.75f32.to_le_bytes());
    for (name, tensor) in reference.tensors() {
        let offset = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        let width = tensor.dtype().bitsize() / 8;
        assert_eq!(offset % width, 0, "{name} is not aligned to its elements");
    }

    let config = checkpoint.metadata().config.as_ref().unwrap();
    assert_eq!(config["model_type"], "qwen3");
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], "modelopt");
    assert_eq!(quantization["quant_algo"], "W4A16_NVFP4");
    assert_eq!(
        quantization["config_groups"]["group_0"]["weights"]["group_size"],
        16
    );
    assert_eq!(
        quantization["ignore"],
        serde_json::json!(["half", "lm_head"])
    );
    let hf: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("hf_quant_config.json")).unwrap()).unwrap();
    for key in [
        "quant_algo",
        "kv_cache_quant_algo",
        "group_size",
        "exclude_modules",
    ] {
        assert!(hf["quantization"].get(key).is_some(), "{key}");
    }
}

#[test]
fn gguf_and_compressed_tensors_convert_to_modelopt() {
    for name in [
        "llama.gguf",
        "compressed.safetensors",
        "torchao.safetensors",
    ] {
        let scratch = Scratch::new();
        let source = model::open(&golden(name)).unwrap();
        let plan: Vec<Planned> = source.entries().iter().map(Planned::from).collect();
        let path = scratch.0.join("out");
        let mut writer = Box::new(ModelOptWriter::create(&path, &plan, source.metadata()).unwrap());
        for entry in source.entries() {
            writer.copy(&*source, entry).unwrap();
        }
        writer.finish().unwrap();
        let copy = model::open(&path).unwrap();
        assert_eq!(copy.entries().len(), plan.len());
        for entry in source.entries() {
            let twin = copy.find(&entry.name).unwrap();
            let read = |c: &dyn Checkpoint, e: &checkpoint::Entry| {
                let mut out = vec![0.0; e.rows() * e.cols()];
                c.rows_f32(e, 0..e.rows(), &mut out).unwrap();
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(
                read(&*source, entry),
                read(&*copy, twin),
                "{name}: {}",
                entry.name
            );
        }
    }
}

#[test]
fn block_formats_convert_to_float_but_are_not_written_as_they_are() {
    let scratch = Scratch::new();
    let source = model::open(&golden("nf4.safetensors")).unwrap();
    let path = scratch.0.join("m.dat");
    let same: Vec<Planned> = source.entries().iter().map(Planned::from).collect();
    let error = DatWriter::create(&path, &same).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let float: Vec<Planned> = same
        .into_iter()
        .map(|p| planned(&p.name, &p.shape, Encoding::Dense(DType::F32)))
        .collect();
    let mut writer = Box::new(DatWriter::create(&path, &float).unwrap());
    for entry in source.entries() {
        writer.copy(&*source, entry).unwrap();
    }
    writer.finish().unwrap();
    let copy = model::open(&path).unwrap();
    let (from, to) = (&source.entries()[0], &copy.entries()[0]);
    let (mut a, mut b) = (vec![0.0; from.cols()], vec![0.0; to.cols()]);
    source.rows_f32(from, 1..2, &mut a).unwrap();
    copy.rows_f32(to, 1..2, &mut b).unwrap();
    assert_eq!(a, b);
}

#[test]
fn misuse_is_refused_and_nothing_is_left_behind() {
    let scratch = Scratch::new();
    let path = scratch.0.join("m.dat");
    std::fs::write(&path, b"the old file").unwrap();
    let create = || Box::new(DatWriter::create(&path, &plan()).unwrap());

    let mut writer = create();
    expect_kind(
        writer.values(&[1.0]),
        ErrorKind::InvalidArgument,
        "no tensor was begun",
    );
    let error = writer.begin("a.weight", 1.0).unwrap_err();
    assert!(error.message().contains("'norm.weight'"), "{error}");
    writer.begin("norm.weight", 1.0).unwrap();
    let error = writer.values(&[0.0; 4]).unwrap_err();
    assert!(error.message().contains("takes 12 bytes"), "{error}");
    writer.values(&[0.0; 2]).unwrap();
    let error = writer.begin("a.weight", 1.0).unwrap_err();
    assert!(error.message().contains("8 of 12 bytes"), "{error}");
    writer.values(&[0.0]).unwrap();
    expect_kind(
        writer.begin("a.weight", f32::NAN),
        ErrorKind::InvalidArgument,
        "the global scale is NaN",
    );
    writer.begin("a.weight", 1.0).unwrap();
    expect_kind(
        writer.raw(&[0]),
        ErrorKind::InvalidArgument,
        "'a.weight' was planned as NVFP4",
    );
    let error = writer.nvfp4(&[0; 16], &[0; 3]).unwrap_err();
    assert!(error.message().contains("take 2 scales, not 3"), "{error}");
    let error = writer.finish().unwrap_err();
    assert!(error.message().contains("not whole"), "{error}");
    assert_eq!(scratch.names(), ["m.dat"]);

    let mut writer = create();
    writer.begin("norm.weight", 1.0).unwrap();
    writer.values(&[0.0; 3]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(error.message().contains("3 of 4 planned"), "{error}");

    let mut writer = create();
    writer.begin("norm.weight", 1.0).unwrap();
    writer.values(&[0.0; 3]).unwrap();
    writer.begin("a.weight", 1.0).unwrap();
    writer.nvfp4(&CODES, &SCALES).unwrap();
    writer.begin("half.weight", 1.0).unwrap();
    let error = writer.values(&[70000.0]).unwrap_err();
    assert!(error.message().contains("does not fit in F16"), "{error}");
    drop(writer);

    let bad = |p: Planned| DatWriter::create(&path, &[p]).map(|_| ()).unwrap_err();
    let nvfp4 = Encoding::Nvfp4;
    assert!(
        bad(planned("w", &[2, 24], nvfp4))
            .message()
            .contains("K = 24")
    );
    assert!(
        bad(planned("w", &[32], nvfp4))
            .message()
            .contains("two dimensions")
    );
    assert!(bad(planned("w", &[2, 0], nvfp4)).message().contains("is 0"));
    assert!(
        bad(planned("w", &[usize::MAX, 2], Encoding::Dense(DType::F32)))
            .message()
            .contains("overflows")
    );
    expect_kind(
        DatWriter::create(&path, &[]),
        ErrorKind::InvalidArgument,
        "the plan has no tensors",
    );
    let twice = [
        planned("w", &[1], Encoding::Dense(DType::F32)),
        planned("w", &[1], Encoding::Dense(DType::F32)),
    ];
    expect_kind(
        DatWriter::create(&path, &twice),
        ErrorKind::InvalidArgument,
        "names 'w' twice",
    );
    expect_kind(
        DatWriter::create(&scratch.0, &plan()),
        ErrorKind::InvalidArgument,
        "is not a place for a file",
    );
    expect_kind(
        DatWriter::create(&scratch.0.join("no/such/m.dat"), &plan()),
        ErrorKind::NotFound,
        "no/such",
    );

    assert_eq!(scratch.names(), ["m.dat"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"the old file");
}

#[test]
fn an_unfinished_directory_goes_away_and_an_old_one_stays() {
    let scratch = Scratch::new();
    let path = scratch.0.join("out");
    let mut writer = ModelOptWriter::create(&path, &plan(), &Metadata::default()).unwrap();
    writer.begin("norm.weight", 1.0).unwrap();
    drop(writer);
    assert!(scratch.names().is_empty());

    let none = Metadata::default();
    let replace = || Box::new(ModelOptWriter::replace(&path, &plan(), &none).unwrap());
    write_plan(replace(), 0.5).unwrap();
    let before = std::fs::read(path.join("model.safetensors")).unwrap();
    drop(replace());
    assert_eq!(
        std::fs::read(path.join("model.safetensors")).unwrap(),
        before
    );
    let refused = |writer: NVFP4::base::Result<ModelOptWriter>, part: &str| {
        let error = writer.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(part), "{error}");
    };
    refused(
        ModelOptWriter::create(&path, &plan(), &none),
        "is not empty, it holds hf_quant_config.json, model.safetensors;",
    );
    std::fs::write(path.join("merges.txt"), "of the old one").unwrap();
    write_plan(replace(), 0.25).unwrap();
    check_plan(&*model::open(&path).unwrap(), 0.25);
    assert_eq!(scratch.names(), ["out"]);
    let inside: Vec<_> = std::fs::read_dir(&path).unwrap().collect();
    assert_eq!(inside.len(), 2, "{inside:?}");

    let own = Metadata {
        config: None,
        tokenizer: TokenizerSource::Directory(path.clone()),
        embedding: Vec::new(),
    };
    refused(ModelOptWriter::create(&path, &plan(), &own), "being read");
    refused(ModelOptWriter::replace(&path, &plan(), &own), "being read");

    // A file that appeared while the new directory was written is not lost.
    let writer = replace();
    std::fs::create_dir(path.join("notes")).unwrap();
    let error = write_plan(writer, 0.5).unwrap_err();
    assert!(error.message().contains("the folder notes"), "{error}");
    check_plan(&*model::open(&path).unwrap(), 0.25);
    let empty = scratch.0.join("empty");
    std::fs::create_dir(&empty).unwrap();
    let writer = Box::new(ModelOptWriter::create(&empty, &plan(), &none).unwrap());
    std::fs::write(empty.join("x"), "").unwrap();
    let error = write_plan(writer, 0.5).unwrap_err();
    assert!(error.message().contains("it holds x;"), "{error}");
    assert_eq!(scratch.names(), ["empty", "out"]);
}

#[test]
fn companions_go_beside_a_dat_and_never_replace_others() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.0.join("source"), scratch.0.join("out"));
    std::fs::create_dir(&source).unwrap();
    std::fs::create_dir(&out).unwrap();
    std::fs::write(source.join("tokenizer.json"), "{\"t\":1}").unwrap();
    let metadata = Metadata {
        config: Some(serde_json::json!({"model_type": "qwen3", "quantization_config": {}})),
        tokenizer: TokenizerSource::Directory(source),
        embedding: Vec::new(),
    };
    let extra = [("chat_template.jinja".to_owned(), b"x".to_vec())];
    for _ in 0..2 {
        write_companions(&out, &metadata, &extra).unwrap();
    }
    write_plan(
        Box::new(DatWriter::create(&out.join("m.dat"), &plan()).unwrap()),
        1.0,
    )
    .unwrap();
    let opened = model::open(&out).unwrap();
    assert_eq!(
        opened.metadata().config,
        Some(serde_json::json!({"model_type": "qwen3"}))
    );
    assert!(matches!(
        opened.metadata().tokenizer,
        TokenizerSource::Directory(_)
    ));
    let other = Metadata {
        config: Some(serde_json::json!({"model_type": "llama"})),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let error = write_companions(&out, &other, &[]).unwrap_err();
    assert!(error.message().contains("config.json"), "{error}");
    assert_eq!(
        model::open(&out).unwrap().metadata().config,
        opened.metadata().config
    );
}

/// Printed by the writing process when it has seen every write refused.
const ALL_REFUSED: &str = "every write was refused";

/// The limit on file size stands in for a full disk: both end in a refused write. It binds a whole process, so the writing is
/// done by [`with_little_space`] in another one.
#[test]
fn a_full_disk_is_an_error_and_the_old_file_stays() {
    for how in ["at once", "halfway"] {
        let scratch = Scratch::new();
        std::fs::write(scratch.0.join("m.dat"), b"the old file").unwrap();
        let limit = if how == "at once" {
            "ulimit -f 16;"
        } else {
            ""
        };
        let run = Command::new("sh")
            .arg("-c")
            .arg(format!("trap '' XFSZ; {limit} exec \"$0\" \"$@\""))
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "write::with_little_space", "--nocapture"])
            .env("NVFP4_TEST_DIRECTORY", &scratch.0)
            .env("NVFP4_TEST_HOW", how)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success(), "{how}: {said}");
        assert!(said.contains(ALL_REFUSED), "{how}: {said}");
        assert_eq!(scratch.names(), ["m.dat"], "{how}");
        assert_eq!(
            std::fs::read(scratch.0.join("m.dat")).unwrap(),
            b"the old file"
        );
    }
}

/// Does nothing unless [`a_full_disk_is_an_error_and_the_old_file_stays`] starts it.
#[test]
fn with_little_space() {
    let Ok(directory) = std::env::var("NVFP4_TEST_DIRECTORY") else {
        return;
    };
    let directory = Path::new(&directory);
    let big = [planned("w", &[64, 1024], Encoding::Dense(DType::F32))];
    let refused = |error: NVFP4::base::Error, place: &str| {
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.message().contains(place), "{error}");
    };
    let out = directory.join("out");
    if std::env::var("NVFP4_TEST_HOW").unwrap() == "at once" {
        let dat = DatWriter::create(&directory.join("m.dat"), &big);
        refused(dat.map(|_| ()).unwrap_err(), "m.dat");
        let modelopt = ModelOptWriter::create(&out, &big, &Metadata::default());
        refused(modelopt.map(|_| ()).unwrap_err(), "model.safetensors");
        println!("{ALL_REFUSED}");
        return;
    }
    let writers: [(Box<dyn Writer>, &str); 2] = [
        (
            Box::new(DatWriter::create(&directory.join("m.dat"), &big).unwrap()),
            "m.dat",
        ),
        (
            Box::new(ModelOptWriter::create(&out, &big, &Metadata::default()).unwrap()),
            "model.safetensors",
        ),
    ];
    let limit = libc::rlimit {
        rlim_cur: 8192,
        rlim_max: 8192,
    };
    // SAFETY: the limit is a valid struct that lives through the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    for (mut writer, place) in writers {
        writer.begin("w", 1.0).unwrap();
        let written = (0..64).try_for_each(|_| writer.values(&[1.0; 1024]));
        refused(written.unwrap_err(), place);
    }
    println!("{ALL_REFUSED}");
}

/// Sparse files: more than 4 GB of holes with a tensor behind them.
#[test]
fn files_beyond_four_gigabytes() {
    const HOLE: u64 = (4 << 30) + 64;
    let scratch = Scratch::new();
    let header = format!(
        r#"{{"big":{{"dtype":"U8","shape":[{},64],"data_offsets":[0,{HOLE}]}},"last":{{"dtype":"F32","shape":[1],"data_offsets":[{HOLE},{}]}}}}"#,
        HOLE / 64,
        HOLE + 4
    );
    let mut safetensors = (header.len() as u64).to_le_bytes().to_vec();
    safetensors.extend(header.as_bytes());
    let mut dat = leb128(2);
    dat.extend(dat_entry("big", 0, &[HOLE / 64, 64], &[]));
    for (name, start) in [("m.safetensors", safetensors), ("m.dat", dat)] {
        let path = scratch.0.join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.write_all_at(&start, 0).unwrap();
        let at = start.len() as u64 + HOLE;
        file.write_all_at(&[42], at - 1).unwrap();
        let end = if name.ends_with("dat") {
            dat_entry("last", 6, &[1], &7.0f32.to_le_bytes())
        } else {
            7.0f32.to_le_bytes().to_vec()
        };
        file.write_all_at(&end, at).unwrap();
        let checkpoint = model::open(&path).unwrap();
        let big = checkpoint.find("big").unwrap();
        let mut row = [0.0; 64];
        let rows = big.rows();
        checkpoint.rows_f32(big, rows - 1..rows, &mut row).unwrap();
        assert_eq!((row[62], row[63]), (0.0, 42.0));
        let mut last = [0.0];
        let entry = checkpoint.find("last").unwrap();
        checkpoint.rows_f32(entry, 0..1, &mut last).unwrap();
        assert_eq!(last, [7.0]);
        std::fs::remove_file(&path).unwrap();
    }
}
