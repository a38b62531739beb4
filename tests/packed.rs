//! Packed weights on disk: the bits of models that map them, what they take of memory, and files that are damaged, stale or of other weights.
//! Counts memory, which needs a process of its own; nextest provides one.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use NVFP4::base::directory;
use NVFP4::base::files::{FileContent, GivenFiles};
use NVFP4::base::memory::{self, Tag};
use NVFP4::base::threads::Pool;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::checkpoint::{PACKED_FILE, PackedFile, SourceFile};
use NVFP4::engine::capacity::{PlanOptions, plan};
use NVFP4::engine::{NewTokens, Served};
use NVFP4::format::nvfp4::{QuantizeOptions, Recipe};
use NVFP4::model::convert::{Container, ConvertOptions, ConvertProgress, convert};
use NVFP4::model::placement::needs_of;
use NVFP4::model::{Device, KvType, LoadOptions, PackedUse, Scratch, Wanted, open, pack};
use NVFP4::ops::DeviceKind;
use common::{Copy, change_tensor, expect_kind, golden, options, some_tokens};

/// Names the folder of a model to the child of the test of two processes.
const FOLDER: &str = "NVFP4_TEST_PACKED_FOLDER";

fn packed(case: &str) -> Copy {
    let copy = Copy::of(case, "packed");
    pack(&copy.0, &Device::cpu(Some(2)).unwrap()).unwrap();
    copy
}

fn with(packed: PackedUse) -> LoadOptions {
    LoadOptions {
        packed,
        ..options()
    }
}

fn load(dir: &Path, packed: PackedUse) -> Result<Arc<Served>> {
    Served::load(dir, &with(packed))
}

/// Sets the time of the last write of the weights in a folder back, as a copy or a download changes it.
fn age(dir: &Path) {
    let then = SystemTime::now() - Duration::from_secs(3600);
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let is_of_weights = ["safetensors", "gguf"].map(Some);
        let extension = path.extension().and_then(|e| e.to_str());
        if is_of_weights.contains(&extension) {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_modified(then).unwrap();
        }
    }
}

/// The bits of logits after some tokens.
fn bits(model: &Served) -> Vec<u32> {
    let tokens = some_tokens(model, 9);
    let mut sequence = model.sequence(16, KvType::F32).unwrap();
    let work = vec![NewTokens {
        tokens: &tokens,
        sequence: &mut sequence,
        wanted: Wanted::Last,
    }];
    let mut logits = Vec::new();
    let outputs = model.run(work, false, &mut Scratch::new(), &mut logits);
    outputs.unwrap().into_iter().for_each(|o| drop(o.unwrap()));
    assert!(!logits.is_empty());
    logits.iter().map(|x| x.to_bits()).collect()
}

/// A golden of GGUF in a folder of its own.
fn gguf_folder(case: &str) -> Copy {
    let dir = std::env::temp_dir().join(format!("nvfp4-packed-{case}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    fs::copy(common::gguf(case), dir.join("model.gguf")).unwrap();
    Copy(dir)
}

/// All families and forms of weights: the same bits and the same fingerprint, whether the file is taken as it is or compared, and as many
/// mapped and other bytes as planned.
#[test]
fn a_mapped_model_has_the_bits_of_a_packed_one() {
    let cases = fs::read_dir(golden("")).unwrap();
    let cases = cases.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let cases = cases.filter(|case| golden(case).join("config.json").exists());
    let ggufs = ["gemma4_perlayer", "gptoss_mxfp4", "qwen3moe_normalized"].into_iter();
    let folders = cases.map(|case| Copy::of(&case, "packed"));
    let folders: Vec<Copy> = folders.chain(ggufs.map(gguf_folder)).collect();
    assert!(folders.len() > 50, "{}", folders.len());
    for copy in folders {
        let (dir, name) = (&copy.0, copy.0.display());
        let own = load(dir, PackedUse::Auto).unwrap();
        assert_eq!(own.info().mapped_bytes, 0, "{name}");
        let (expected, fingerprint) = (bits(&own), own.fingerprint());
        let all = own.info().weight_bytes;
        drop(own);
        pack(dir, &Device::cpu(Some(2)).unwrap()).unwrap();
        for is_aged in [false, true] {
            if is_aged {
                age(dir);
            }
            let used = || memory::usage(Tag::Weights).current;
            let (before, total) = (used(), memory::total().current);
            let planned = plan(dir, &with(PackedUse::Required), &PlanOptions::default()).unwrap();
            assert_eq!(memory::mapped().current, 0, "{name}");
            memory::reset_peak();
            let model = load(dir, PackedUse::Required).unwrap();
            let peak = memory::total().peak - total;
            assert_eq!(used() - before, planned.weights.host, "{name}");
            assert!(
                peak <= planned.load_peak.host,
                "{name}: {peak}, {planned:?}"
            );
            let info = model.info();
            assert_eq!(info.mapped_bytes, planned.mapped_bytes, "{name}");
            assert_eq!(info.weight_bytes, all, "{name}");
            assert_eq!(info.mapped_bytes + planned.weights.host, all, "{name}");
            assert!(memory::mapped().current > info.mapped_bytes, "{name}");
            assert_eq!(model.fingerprint(), fingerprint, "{name}");
            assert_eq!(bits(&model), expected, "{name}");
            drop(model);
            assert_eq!(memory::mapped().current, 0, "{name}");
        }
        let own = load(dir, PackedUse::Off).unwrap();
        assert_eq!(own.info().mapped_bytes, 0, "{name}");
        assert_eq!(own.fingerprint(), fingerprint, "{name}");
    }
}

/// Mapped weights are no memory of the model's own, and a GPU maps none.
#[test]
fn the_choice_of_a_device_counts_mapped_weights_apart() {
    let copy = Copy::of("qwen3_untied", "packed");
    let needs = |device| needs_of(&*open(&copy.0).unwrap(), device, false).unwrap();
    let (own, on_gpu) = (needs(DeviceKind::Cpu), needs(DeviceKind::Cuda));
    assert_eq!((own.mapped, own.total()), (0, own.own));
    pack(&copy.0, &Device::cpu(Some(2)).unwrap()).unwrap();
    let options = PlanOptions::default();
    let planned = plan(&copy.0, &with(PackedUse::Required), &options).unwrap();
    let mapped = needs(DeviceKind::Cpu);
    assert!(mapped.mapped > 0);
    assert_eq!(mapped.mapped, planned.mapped_bytes);
    assert_eq!(mapped.total(), own.own);
    assert_eq!(needs(DeviceKind::Cuda), on_gpu);
    assert_eq!(memory::mapped().current, 0);
}

/// Matrices that loading quantizes are packed into memory, and the rest is mapped.
#[test]
fn quantizing_while_loading_maps_what_it_leaves() {
    for case in ["qwen3_untied", "qwen3_tied", "gptoss_nvfp4"] {
        let copy = packed(case);
        let load = |packed| {
            let options = LoadOptions {
                quantize: Some(QuantizeOptions::default()),
                ..with(packed)
            };
            let planned = plan(&copy.0, &options, &PlanOptions::default()).unwrap();
            (Served::load(&copy.0, &options).unwrap(), planned)
        };
        let (own, _) = load(PackedUse::Off);
        let (mapped, planned) = load(PackedUse::Required);
        assert_eq!(bits(&mapped), bits(&own), "{case}");
        assert_eq!(mapped.fingerprint(), own.fingerprint(), "{case}");
        assert_eq!(mapped.info().mapped_bytes, planned.mapped_bytes, "{case}");
    }
}

/// A conversion packs before its model is in place: one that ends on the way leaves nothing new, and the next one succeeds.
#[test]
fn a_conversion_appears_with_its_packed_weights_or_not_at_all() {
    let dir = std::env::temp_dir().join(format!("nvfp4-packed-whole-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let scratch = Copy(dir);
    let source = open(&golden("qwen3_untied")).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let out = scratch.0.join("out");
    let convert = |replace, stop: &dyn Fn(ConvertProgress<'_>) -> bool| {
        let options = ConvertOptions {
            replace,
            packed: Some(device.clone()),
            ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
        };
        let (pool, mut last, mut is_stopped) = (Pool::new(2).unwrap(), (0, 1), false);
        let report = convert(&*source, &out, &options, &pool, &mut |p| {
            assert!(p.done >= last.0 && !is_stopped, "{p:?}");
            last = (p.done, p.total);
            is_stopped = stop(p);
            match is_stopped {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        assert_eq!(report.is_ok(), last.0 == last.1 && !is_stopped);
        report
    };
    let names = |dir: &Path| directory::names(dir).unwrap();
    let first = |p: ConvertProgress<'_>| p.tensor == PACKED_FILE;
    let last = |p: ConvertProgress<'_>| p.done == p.total;
    for stop in [&first as &dyn Fn(ConvertProgress<'_>) -> bool, &last] {
        for _ in 0..2 {
            expect_kind(convert(false, stop), ErrorKind::Cancelled, PACKED_FILE);
            assert_eq!(names(&scratch.0), [""; 0]);
        }
    }
    let report = convert(false, &|_| false).unwrap().packed.unwrap();
    let file = PackedFile::open(&out.join(PACKED_FILE), 1)
        .unwrap()
        .unwrap();
    assert_eq!(report.file, out.join(PACKED_FILE));
    file.verify().unwrap();
    assert_eq!(report.bytes, file.mapping().len() as u64);
    // The weights are as they were when they were packed, and are not compared with it.
    let sources = SourceFile::all(&*open(&out).unwrap()).unwrap();
    assert_eq!(file.contents().sources, sources);
    load(&out, PackedUse::Required).unwrap();
    let before = names(&out);
    for stop in [&first as &dyn Fn(ConvertProgress<'_>) -> bool, &last] {
        expect_kind(convert(true, stop), ErrorKind::Cancelled, PACKED_FILE);
        assert_eq!(
            (names(&scratch.0), names(&out)),
            (vec!["out".into()], before.clone())
        );
        assert_eq!(SourceFile::all(&*open(&out).unwrap()).unwrap(), sources);
    }
    convert(true, &|_| false).unwrap();
    assert_ne!(SourceFile::all(&*open(&out).unwrap()).unwrap(), sources);
    load(&out, PackedUse::Required).unwrap();
    // An empty directory is filled in place.
    fs::remove_dir_all(&out).unwrap();
    fs::create_dir(&out).unwrap();
    expect_kind(convert(false, &last), ErrorKind::Cancelled, PACKED_FILE);
    assert_eq!(names(&out), [""; 0]);
    convert(false, &|_| false).unwrap();
    assert_eq!(names(&out), before);
    load(&out, PackedUse::Required).unwrap();
}

#[test]
fn a_dat_has_no_packed_weights() {
    let source = open(&golden("qwen3_untied")).unwrap();
    let options = ConvertOptions {
        packed: Some(Device::cpu(Some(1)).unwrap()),
        ..ConvertOptions::new(Container::Dat, Recipe::Amax)
    };
    let place = std::env::temp_dir().join(format!("nvfp4-packed-{}.dat", std::process::id()));
    let refused = convert(
        &*source,
        &place,
        &options,
        &Pool::new(1).unwrap(),
        &mut |_| ControlFlow::Continue(()),
    );
    expect_kind(refused, ErrorKind::InvalidArgument, "not beside a .dat");
    assert!(!place.exists());
}

#[test]
fn weights_that_changed_are_not_taken_from_an_old_file() {
    let copy = packed("qwen3_tied");
    let invalid = ErrorKind::CorruptFile;
    change_tensor(&copy, "model.layers.0.mlp.up_proj.weight", |_, _, bytes| {
        bytes[5] ^= 0x10;
    });
    for packed in [PackedUse::Auto, PackedUse::Required] {
        let refused = load(&copy.0, packed);
        expect_kind(refused, invalid, "model.layers.0.mlp.up_proj.weight");
        let refused = load(&copy.0, packed);
        expect_kind(
            refused,
            invalid,
            "is not of these weights, of which it has other values",
        );
    }
    // Without the file, and with a new one, they load.
    let changed = bits(&load(&copy.0, PackedUse::Off).unwrap());
    pack(&copy.0, &Device::cpu(Some(2)).unwrap()).unwrap();
    assert_eq!(bits(&load(&copy.0, PackedUse::Required).unwrap()), changed);
    // The file of another model.
    let other = packed("qwen3_untied");
    fs::copy(other.0.join(PACKED_FILE), copy.0.join(PACKED_FILE)).unwrap();
    expect_kind(
        load(&copy.0, PackedUse::Auto),
        invalid,
        "is not of these weights",
    );
    let planned = plan(&copy.0, &options(), &PlanOptions::default());
    assert!(planned.is_ok());
}

/// A block scale that a stranger wrote into the file, which is no number: a folder that was copied is compared with its weights.
#[test]
fn a_copied_file_with_other_bytes_is_refused() {
    let copy = packed("qwen3_tied");
    let path = copy.0.join(PACKED_FILE);
    let file = PackedFile::open(&path, 1).unwrap().unwrap();
    file.verify().unwrap();
    let matrix = &file.contents().matrices["model.layers.1.mlp.down_proj.weight"];
    let scales = matrix.range.start + 512;
    drop(file);
    let mut bytes = fs::read(&path).unwrap();
    bytes[scales] = 0x7f;
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes).unwrap();
    let file = PackedFile::open(&path, 1).unwrap().unwrap();
    expect_kind(file.verify(), ErrorKind::CorruptFile, "checksum");
    drop(file);
    // Weights that are as they were when they were packed are not read, and the model computes with what is there.
    let model = load(&copy.0, PackedUse::Required).unwrap();
    drop(model);
    age(&copy.0);
    let refused = load(&copy.0, PackedUse::Required);
    let words = "model.layers.1.mlp.down_proj.weight";
    expect_kind(refused, ErrorKind::CorruptFile, words);
}

#[test]
fn a_file_for_other_names_is_not_used() {
    let copy = packed("qwen3_tied");
    let (from, to) = (
        copy.0.join("model.safetensors"),
        copy.0.join("other.safetensors"),
    );
    fs::rename(from, to).unwrap();
    let _ = fs::remove_file(copy.0.join("expected.safetensors"));
    let model = load(&copy.0, PackedUse::Auto).unwrap();
    assert_eq!(model.info().mapped_bytes, 0);
    let words = "has the weights of model.safetensors, not of other.safetensors";
    let required = load(&copy.0, PackedUse::Required);
    expect_kind(required, ErrorKind::NotFound, words);
}

#[test]
fn required_packed_weights_are_there_or_refused() {
    let missing = load(&golden("qwen3_tied"), PackedUse::Required);
    expect_kind(missing, ErrorKind::NotFound, "there is no");
    let copy = packed("qwen3_tied");
    let files = fs::read_dir(&copy.0).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let content: Arc<dyn FileContent> = Arc::new(fs::read(&path).unwrap());
        (
            path.file_name().unwrap().to_str().unwrap().to_owned(),
            content,
        )
    });
    let files = GivenFiles::new(files).unwrap();
    let model = Served::load_given(&files, &options()).unwrap();
    assert_eq!(model.info().mapped_bytes, 0);
    let given = Served::load_given(&files, &with(PackedUse::Required));
    expect_kind(given, ErrorKind::Unsupported, "are not mapped");
}

/// Packing checks weights as loading does. A refusal leaves no file behind.
#[test]
fn a_model_that_cannot_be_loaded_is_not_packed() {
    let copy = Copy::of("qwen3_tied", "packed");
    let scales = "model.layers.0.mlp.up_proj.weight_scale";
    change_tensor(&copy, scales, |_, _, bytes| bytes[3] = 0x7f);
    let refused = pack(&copy.0, &Device::cpu(Some(2)).unwrap());
    expect_kind(refused, ErrorKind::CorruptFile, "up_proj");
    assert!(!copy.0.join(PACKED_FILE).exists());
}

/// Locked weights of a mapped model are the pages of the file.
#[test]
#[cfg(target_os = "linux")]
fn mapped_weights_can_be_locked() {
    let copy = packed("qwen3_tied");
    let locked = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.unwrap().parse::<u64>().unwrap() * 1024
    };
    let before = locked();
    let load = LoadOptions {
        mlock: true,
        ..with(PackedUse::Required)
    };
    let model = Served::load(&copy.0, &load).unwrap();
    let info = model.info();
    assert!(info.mapped_bytes > 64 << 10);
    assert!(locked() - before >= info.mapped_bytes);
    drop(model);
    assert_eq!(locked(), before);
}

/// Kilobytes of a mapped file in a process: resident, and private to it.
#[cfg(target_os = "linux")]
fn resident(process: &str, path: &Path) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{process}/smaps")).unwrap();
    let path = path.canonicalize().unwrap();
    let mut lines = maps.lines();
    let is_of_file = |line: &&str| line.ends_with(path.to_str().unwrap());
    assert!(
        lines.any(|line| is_of_file(&line)),
        "{process} does not map it"
    );
    let mut all = (0, 0);
    for line in lines.take(20) {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or("");
        let Some(number) = words.next().and_then(|n| n.parse::<u64>().ok()) else {
            continue;
        };
        match name {
            "Rss:" => all.0 = number,
            "Private_Clean:" | "Private_Dirty:" => all.1 += number,
            "VmFlags:" => break,
            _ => {}
        }
    }
    all
}

/// Runs a model that another process runs too, and waits until that has looked.
#[test]
fn child_that_maps_a_model() {
    let Some(dir) = std::env::var_os(FOLDER) else {
        return;
    };
    let model = load(&PathBuf::from(dir), PackedUse::Required).unwrap();
    bits(&model);
    println!("\nmapped");
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
#[cfg(target_os = "linux")]
fn two_processes_share_the_pages_of_a_model() {
    let copy = packed("qwen3_tied");
    let path = copy.0.join(PACKED_FILE);
    let model = load(&copy.0, PackedUse::Required).unwrap();
    bits(&model);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_maps_a_model", "--nocapture"])
        .env(FOLDER, &copy.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let is_ready = output.any(|line| line.unwrap() == "mapped");
    assert!(is_ready, "the child ended before it had mapped the model");
    let size = fs::metadata(&path).unwrap().len() / 1024;
    for process in ["self".to_owned(), child.id().to_string()] {
        let (resident, private) = resident(&process, &path);
        assert!(
            resident * 10 >= size * 9,
            "{process}: {resident} of {size} kB"
        );
        assert_eq!(private, 0, "{process}");
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    // The end of its output is read too, as it could not end otherwise.
    output.for_each(|line| drop(line.unwrap()));
    assert!(child.wait().unwrap().success());
    assert_eq!(open(&copy.0).unwrap().files().len(), 1);
}
