//! Compiles every kernel for every architecture without a GPU, and checks the assembler's report, the use of tensor cores, and that a
//! launcher passes as many bytes as its kernel takes. Without NVRTC every test says SKIPPED, unless NVFP4_REQUIRE names `nvrtc`; tests that
//! disassemble are skipped without nvdisasm, unless it names `nvdisasm`. `tests/kernels/run.sh` installs both. Kernels without a GPU are
//! emulated, which takes g++.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use NVFP4::base::{ErrorKind, env};
use NVFP4::cpu::Cpu;
use NVFP4::cpu::training::{MatrixRows, Rows, RowsStep, weight_global};
use NVFP4::cuda::{self, Drawn, ScaledTile, TARGETS, Unit};
use NVFP4::format::adamw::{
    Coefficients, FieldBytes, FirstForm, Forms, GROUP_ROWS, Hyperparameters, KeepScale, Keys,
    SecondForm, WeightForm, decode_weights,
};
use NVFP4::format::nvfp4::{self, Levels, NonFinite, QuantizeOptions, Recipe};
use NVFP4::format::residual::Bits;
use NVFP4::format::{Rounding, random, swizzle};
use NVFP4::ops::sample::{self, Choice, SamplingOptions};
use NVFP4::tensor::DType;

/// The instruction with which all kernels of a unit use tensor cores, for units that do; a name that ends with a dot is a prefix.
fn multiply(unit: Unit, target: &str) -> Option<&'static str> {
    const F16: &str = "HMMA.16816.F32";
    const NVFP4: &str = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X";
    const WARPGROUP: &str = "HGMMA.";
    match unit {
        Unit::LinearSkinny
        | Unit::LinearSkinnyAdapted
        | Unit::LinearSkinnyRanges
        | Unit::LinearTiled
        | Unit::AttentionDecode
        | Unit::AttentionDecodeFixed
        | Unit::AttentionDecodeWide
        | Unit::AttentionDecodeWidest
        | Unit::AttentionPrefill
        | Unit::AttentionPrefillWidest
        | Unit::AttentionRows => Some(F16),
        Unit::LinearWide
        | Unit::LinearWideAdapted
        | Unit::AttentionTrainingForwardWide
        | Unit::AttentionTrainingBackwardWide => Some(WARPGROUP),
        Unit::LinearTf32 => Some("HMMA.1688.F32.TF32"),
        Unit::ScaledMmProduct if target.starts_with("sm_12") => Some(NVFP4),
        Unit::ScaledMmProduct => Some(F16),
        _ => None,
    }
}

fn is_required(tool: &str) -> bool {
    env::required_capabilities().iter().any(|c| c == tool)
}

/// Machine code and the assembler's report; nothing where there is no compiler.
fn compile(unit: Unit, target: &str) -> Option<(Vec<u8>, String)> {
    match cuda::compile(unit, target) {
        Ok(compiled) => Some(compiled),
        Err(e) if e.kind() == ErrorKind::DeviceUnavailable && !is_required("nvrtc") => {
            println!("SKIPPED {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The assembler's report on a function.
#[derive(Debug, Default, PartialEq)]
struct Usage {
    stack: usize,
    spill_stores: usize,
    spill_loads: usize,
}

/// Reads a report: `Function properties for NAME`, and in the next line numbers of bytes.
fn usage(report: &str) -> BTreeMap<String, Usage> {
    let mut all = BTreeMap::new();
    let mut lines = report.lines();
    while let Some(line) = lines.next() {
        let Some((_, name)) = line.split_once("Function properties for ") else {
            continue;
        };
        let numbers = lines.next().unwrap_or_default();
        let bytes = |what: &str| -> usize {
            let text = numbers
                .split(',')
                .find_map(|part| part.trim().strip_suffix(what));
            text.and_then(|n| n.split_whitespace().last()?.parse().ok())
                .unwrap_or_else(|| panic!("no number of{what} for {name} in '{numbers}'"))
        };
        let usage = Usage {
            stack: bytes(" bytes stack frame"),
            spill_stores: bytes(" bytes spill stores"),
            spill_loads: bytes(" bytes spill loads"),
        };
        all.insert(name.trim().to_owned(), usage);
    }
    all
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> usize {
    let mut word = [0; 8];
    word[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(word) as usize
}

/// The sections of a 64-bit ELF file.
fn sections(image: &[u8]) -> Vec<(String, &[u8])> {
    assert!(
        image.starts_with(b"\x7fELF\x02\x01"),
        "not a 64-bit ELF file"
    );
    let (table, size, count, names) = (
        number::<8>(image, 0x28),
        number::<2>(image, 0x3a),
        number::<2>(image, 0x3c),
        number::<2>(image, 0x3e),
    );
    let section = |i: usize| -> (usize, &[u8]) {
        let header = &image[table + i * size..][..size];
        let (kind, offset, length) = (
            number::<4>(header, 4),
            number::<8>(header, 0x18),
            number::<8>(header, 0x20),
        );
        const NO_BITS: usize = 8;
        (
            number::<4>(header, 0),
            if kind == NO_BITS {
                &[]
            } else {
                &image[offset..offset + length]
            },
        )
    };
    let (_, names) = section(names);
    let name = |at: usize| {
        names[at..]
            .iter()
            .take_while(|&&b| b != 0)
            .map(|&b| char::from(b))
            .collect()
    };
    (0..count)
        .map(section)
        .map(|(at, bytes)| (name(at), bytes))
        .collect()
}

/// Bytes of parameters by kernel, from the attributes that the driver reads too.
fn parameter_bytes(image: &[u8]) -> BTreeMap<String, usize> {
    /// An attribute with a value of two bytes, and its number.
    const HALF_WORD: u8 = 3;
    const PARAMETER_SIZE: u8 = 0x19;
    /// An attribute whose value has the length in its two bytes.
    const SIZED: u8 = 4;
    let mut all = BTreeMap::new();
    for (name, attributes) in sections(image) {
        let Some(kernel) = name.strip_prefix(".nv.info.") else {
            continue;
        };
        let mut at = 0;
        while at < attributes.len() {
            let (format, attribute, value) = (
                attributes[at],
                attributes[at + 1],
                number::<2>(attributes, at + 2),
            );
            if (format, attribute) == (HALF_WORD, PARAMETER_SIZE) {
                all.insert(kernel.to_owned(), value);
            }
            at += if format == SIZED { 4 + value } else { 4 };
        }
    }
    all
}

/// Names of functions that have the instruction; nothing where there is no disassembler.
fn functions_with(instruction: &str, image: &[u8], name: &str) -> Option<BTreeSet<String>> {
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.cubin", std::process::id()));
    std::fs::write(&path, image).unwrap();
    let output = Command::new("nvdisasm").arg("-c").arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    let output = match output {
        Ok(output) => output,
        Err(e) => {
            assert!(
                !is_required("nvdisasm"),
                "NVFP4_REQUIRE names nvdisasm: {e}"
            );
            println!("SKIPPED instructions: nvdisasm: {e}");
            return None;
        }
    };
    assert!(
        output.status.success(),
        "nvdisasm: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let is_it = |word: &str| match instruction.ends_with('.') {
        true => word.starts_with(instruction),
        false => word == instruction,
    };
    let (mut function, mut found) = ("", BTreeSet::new());
    let text = String::from_utf8(output.stdout).unwrap();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix(".text.") {
            function = rest.trim_end_matches(':');
        } else if line.split_whitespace().any(is_it) {
            found.insert(function.to_owned());
        }
    }
    Some(found)
}

/// A complaint about a kernel's spills; none are allowed.
fn spills(usage: &Usage) -> Option<String> {
    let bytes = usage.spill_stores + usage.spill_loads;
    (bytes > 0).then(|| format!("spills {bytes} bytes: {usage:?}"))
}

fn check(target: &str) {
    check_units(target, |_| true);
}

fn check_units(target: &str, is_due: impl Fn(&Unit) -> bool) {
    let mut complaints = String::new();
    for unit in Unit::for_target(target).filter(is_due) {
        let Some((image, report)) = compile(unit, target) else {
            return;
        };
        assert!(
            !report.contains("wgmma.mma_async instructions are serialized"),
            "{}: {report}",
            unit.path()
        );
        let usage = usage(&report);
        let kernels = parameter_bytes(&image);
        assert!(!kernels.is_empty(), "{}: no kernels", unit.path());
        let multiply = multiply(unit, target).unwrap_or_default();
        let multiplying = (!multiply.is_empty())
            .then(|| functions_with(multiply, &image, &format!("{unit:?}-{target}")))
            .flatten();
        let mut complain = |kernel: &str, what: &str| {
            writeln!(complaints, "  {}: {kernel}: {what}", unit.path()).unwrap()
        };
        for (function, usage) in &usage {
            if usage.stack > 0 {
                println!("{target} {function}: {} bytes of local memory", usage.stack);
            }
            if let Some(complaint) = spills(usage) {
                complain(function, &complaint);
            }
        }
        for (kernel, &bytes) in &kernels {
            if !usage.contains_key(kernel) {
                complain(kernel, "not in the assembler's report");
            }
            match cuda::argument_bytes(kernel) {
                Some(passed) if passed == bytes => {}
                Some(passed) => complain(
                    kernel,
                    &format!("takes {bytes} bytes of arguments, and its launcher passes {passed}"),
                ),
                None => complain(kernel, "no launcher's ARGUMENTS in src/cuda name it"),
            }
            // One that only adds up parts has nothing to multiply.
            let sums = kernel.ends_with("_sum");
            if !sums && multiplying.as_ref().is_some_and(|m| !m.contains(kernel)) {
                complain(kernel, &format!("has no {multiply}"));
            }
        }
    }
    assert!(complaints.is_empty(), "for {target}:\n{complaints}");
}

/// Architectures that are checked with all units only where tests are long, because each takes three minutes. What they compile otherwise
/// than both sm_80 and sm_90a is in the units here, but for the number of blocks in `rms_norm.cu`.
const LONG: &[(&str, &[Unit])] = &[
    ("sm_86", &[]),
    ("sm_89", &[]),
    ("sm_100a", &[Unit::MambaScan, Unit::AdamW, Unit::LinearInt8]),
    ("sm_103a", &[]),
    ("sm_120a", &[]),
    ("sm_121a", &[Unit::Adapter, Unit::ScaledMmProduct]),
];

fn check_if_due(target: &str) {
    match LONG.iter().find(|(long, _)| *long == target) {
        Some((_, own)) if !env::tests_are_long() => {
            println!("{target} is checked with all units where NVFP4_LONG is set");
            check_units(target, |unit| own.contains(unit));
        }
        _ => check(target),
    }
}

macro_rules! targets {
    ($($name:ident)+) => {
        $(#[test] fn $name() { check_if_due(stringify!($name)); })+

        #[test]
        fn every_target_has_a_test() {
            assert_eq!(TARGETS, [$(stringify!($name),)+]);
        }
    };
}

targets! { sm_80 sm_86 sm_89 sm_90a sm_100a sm_103a sm_120a sm_121a }

/// Compiles a program of tests/kernels/emulated for the CPU, with this `__CUDA_ARCH__`, and runs it. Returns its output; `None` without a
/// compiler.
fn emulate(name: &str, arch: u32) -> Option<String> {
    emulate_with(name, arch, &[]).map(|said| String::from_utf8(said).unwrap())
}

/// As `emulate`, with data on standard input.
fn emulate_with(name: &str, arch: u32, input: &[u8]) -> Option<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{name}-{arch}-{}", std::process::id()));
    let compiled = Command::new("g++")
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg("-Wno-unknown-pragmas")
        .arg(format!("-D__CUDA_ARCH__={arch}"))
        .arg("-I")
        .arg(root.join("tests/kernels/emulated"))
        .arg("-I")
        .arg(root.join("kernels"))
        .arg(root.join(format!("tests/kernels/emulated/{name}.cpp")))
        .arg("-o")
        .arg(&program)
        .output();
    let compiled = match compiled {
        Ok(output) => output,
        Err(e) => {
            assert!(!is_required("g++"), "NVFP4_REQUIRE names g++: {e}");
            println!("SKIPPED kernels on an emulated GPU: g++: {e}");
            return None;
        }
    };
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");
    let mut child = Command::new(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input).unwrap());
        child.wait_with_output().unwrap()
    });
    std::fs::remove_file(&program).unwrap();
    println!("{name} for {arch}: {}", output.status);
    Some(output.stdout)
}

/// Kernels of scaled_mm from their sources, on the processor: with f16 tensor cores, and with those that multiply e2m1, which
/// the instruction's description stands in for. And a launcher asks for a block as its kernel is.
#[test]
fn scaled_products_are_right_on_an_emulated_gpu() {
    let mut wanted = String::new();
    for tile in ScaledTile::ALL {
        let (threads, shared) = tile.block();
        let kernel = tile.kernel();
        writeln!(wanted, "{kernel}: {threads} threads, {shared} bytes").unwrap();
    }
    wanted.push_str("ok\n");
    for arch in [800, 1200] {
        if let Some(said) = emulate("scaled_mm", arch) {
            assert_eq!(said, wanted, "for {arch}");
        }
    }
}

/// Packing, unpacking and products of few and of some tens of rows, from the kernels' sources, on the processor.
#[test]
fn products_are_right_on_an_emulated_gpu() {
    // Without an instruction that converts scales it takes as long again; those conversions run for experts too.
    let archs = match env::tests_are_long() {
        true => &[800, 900][..],
        false => &[900],
    };
    for &arch in archs {
        if let Some(said) = emulate("linear", arch) {
            assert_eq!(said, "ok\n", "for {arch}");
        }
    }
}

/// Routing, products with experts and their sum, and products with routers, from the kernels' sources, on the processor: with and without
/// an instruction that converts scales.
#[test]
fn experts_are_right_on_an_emulated_gpu() {
    for arch in [800, 900] {
        if let Some(said) = emulate("experts", arch) {
            assert_eq!(said, "ok\n", "for {arch}");
        }
    }
}

/// Norm and rotation, the cache's keys and values, and attention of rows and of tokens, from the kernels' sources, on the processor.
#[test]
fn attention_is_right_on_an_emulated_gpu() {
    // Codes in 8 bits are widened by integer operations below sm_89, which takes as long again.
    let archs = match env::tests_are_long() {
        true => &[800, 900][..],
        false => &[900],
    };
    for &arch in archs {
        if let Some(said) = emulate("attention", arch) {
            assert_eq!(said, "ok\n", "for {arch}");
        }
    }
}

/// Convolution, recurrence and gated norm of gated-delta-net layers, from the kernels' sources, on the processor.
#[test]
fn delta_layers_are_right_on_an_emulated_gpu() {
    if let Some(said) = emulate("delta", 900) {
        assert_eq!(said, "ok\n");
    }
}

/// Convolution, recurrence and gated norm of Mamba-2 layers, from the kernels' sources, on the processor.
#[test]
fn mamba_layers_are_right_on_an_emulated_gpu() {
    if let Some(said) = emulate("mamba", 900) {
        assert_eq!(said, "ok\n");
    }
}

/// Values for 24 blocks of 16: random ones of many magnitudes; some on the thresholds between codes under scales that are e4m3 values,
/// and their neighbours; zeros of both signs; with `odd`, NaN and infinities too.
fn values_to_quantize(seed: u64, odd: bool) -> Vec<f32> {
    (0..24 * 16u64)
        .map(|i| {
            let (block, chance) = (i / 16, random::bits(seed, 2 * i));
            let x = random::uniform(seed, 2 * i + 1) * 2.0 - 1.0;
            let size = 2f32.powi([0, 0, 3, -9, 8, -20, 1, 12][block as usize % 8]);
            match (block % 6, chance % 16) {
                (_, 0) if odd => {
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(chance >> 8) as usize % 3]
                }
                (0, _) => [0.0, -0.0][(chance >> 4) as usize % 2],
                // With 6 for the largest, every multiple of a quarter is a code or a tie.
                (1, 1) => 6.0,
                (1, _) => (x * 24.0).round() * 0.25,
                (2, _) => {
                    let scale = [1.125, 0.6875, 1.625, 13.0][(seed + block / 6) as usize % 4];
                    let tie =
                        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][(chance >> 8) as usize % 7] * scale;
                    match (i % 16, chance % 3) {
                        (0, _) => 6.0 * scale,
                        (_, 0) => tie,
                        (_, 1) => -f32::next_up(tie),
                        _ => f32::next_down(tie),
                    }
                }
                (_, 2) => -0.0,
                _ => x * size,
            }
        })
        .collect()
}

/// Invalid block scales, found by the kernel's source on the CPU.
#[test]
fn scales_that_are_none_are_found_on_an_emulated_gpu() {
    if let Some(said) = emulate("check", 900) {
        assert_eq!(said, "ok\n");
    }
}

/// The largest magnitude, and quantization by every rule, from the kernels' sources, on the processor: the bits of src/format.
#[test]
fn quantized_bits_are_right_on_an_emulated_gpu() {
    struct Wanted {
        what: String,
        said: [u32; 3],
        note: u64,
        codes: Vec<u8>,
        scales: Vec<u8>,
    }
    let (rows, blocks) = (3, 8);
    let (mut input, mut wanted) = (Vec::new(), Vec::new());
    let rules = [
        (Levels::Two, Recipe::Amax),
        (Levels::Two, Recipe::FourOverSix),
        (Levels::Two, Recipe::Sweep),
        (Levels::Single, Recipe::Amax),
        (Levels::Single, Recipe::Sweep),
        (Levels::Legacy, Recipe::Amax),
    ];
    let roundings = [
        Rounding::NearestEven,
        Rounding::HalfAway,
        Rounding::Stochastic,
    ];
    for (dtype, (levels, recipe), rounding, kind) in (0..3)
        .flat_map(|d| rules.map(|r| (d, r)))
        .flat_map(|(d, r)| roundings.map(|rounding| (d, r, rounding)))
        .flat_map(|(d, r, rounding)| (0..4).map(move |kind| (d, r, rounding, kind)))
    {
        // Plain; swizzled scales of rows with gaps; values that are not finite, saturated or noted.
        let (swizzled, padding, saturate) = (kind == 1, u32::from(kind == 1), kind == 2);
        if kind == 3 && levels == Levels::Two {
            // The largest magnitude tells of those.
            continue;
        }
        let options = QuantizeOptions {
            levels,
            recipe,
            rounding,
            nonfinite: if saturate {
                NonFinite::Saturate
            } else {
                NonFinite::Error
            },
            seed: 77,
        };
        let mut bytes = Vec::new();
        let x: Vec<f32> = values_to_quantize(wanted.len() as u64, kind >= 2)
            .iter()
            .map(|&v| match dtype {
                0 => v,
                1 => half::f16::from_f32(v).to_f32(),
                _ => half::bf16::from_f32(v).to_f32(),
            })
            .collect();
        for row in x.chunks_exact(blocks * 16) {
            // The gap between rows belongs to nobody.
            let gap = vec![f32::NAN; padding as usize * 16];
            for &v in row.iter().chain(&gap) {
                match dtype {
                    0 => bytes.extend(v.to_le_bytes()),
                    1 => bytes.extend(half::f16::from_f32(v).to_le_bytes()),
                    _ => bytes.extend(half::bf16::from_f32(v).to_le_bytes()),
                }
            }
        }
        let first = x.iter().position(|v| !v.is_finite());
        let note = match first.filter(|_| kind == 3) {
            None => u64::MAX,
            Some(at) => {
                let what = [x[at].is_nan(), x[at] == f32::INFINITY, true];
                (at as u64) << 8 | what.iter().position(|&is| is).unwrap() as u64
            }
        };
        assert_eq!(note != u64::MAX, kind == 3);
        // A noted value is also saturated.
        let saturating = QuantizeOptions {
            nonfinite: NonFinite::Saturate,
            ..options.clone()
        };
        let amax = nvfp4::amax(&x, 0, saturating.nonfinite).unwrap();
        let global = nvfp4::global_scale(amax, &options);
        let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
        nvfp4::quantize_rows(
            &x,
            blocks * 16,
            0,
            global,
            &saturating,
            &mut codes,
            &mut scales,
        )
        .unwrap();
        if swizzled {
            scales = swizzle::swizzle(&scales, rows, blocks).unwrap();
        }
        // As src/cuda/quantize.rs chooses.
        let family = match () {
            () if recipe != Recipe::Amax || rounding == Rounding::Stochastic => 2,
            () if levels != Levels::Two && rounding == Rounding::NearestEven && dtype > 0 => 1,
            () => 0,
        };
        let computed = u32::from(levels == Levels::Two);
        let head = [
            family,
            dtype,
            rows as u32,
            blocks as u32,
            padding,
            computed,
            1f32.to_bits(),
            nvfp4::largest(&options).to_bits(),
            u32::from(levels == Levels::Legacy),
            u32::from(saturate),
            u32::from(swizzled),
            rounding as u32,
            recipe as u32,
            scales.len() as u32,
        ];
        input.extend(head.iter().flat_map(|v| v.to_le_bytes()));
        input.extend(options.seed.to_le_bytes());
        input.extend(bytes);
        wanted.push(Wanted {
            what: format!("type {dtype}, {options:?}, swizzled {swizzled}"),
            said: [
                u32::from(kind == 3),
                if computed == 1 { amax.to_bits() } else { 0 },
                1,
            ],
            note,
            codes,
            scales,
        });
    }
    let Some(said) = emulate_with("quantize", 900, &input) else {
        return;
    };
    let mut rest = &said[..];
    let mut take = |n: usize| {
        let (front, back) = rest.split_at(n);
        rest = back;
        front.to_vec()
    };
    for w in wanted {
        let words: Vec<u8> = w.said.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(take(12), words, "report: {}", w.what);
        assert_eq!(take(8), w.note.to_le_bytes(), "note: {}", w.what);
        assert_eq!(take(w.codes.len()), w.codes, "codes: {}", w.what);
        assert_eq!(take(w.scales.len()), w.scales, "scales: {}", w.what);
    }
    assert!(rest.is_empty());
}

/// The bytes of rows of a matrix and of its moments, and of groups' global scales.
#[derive(Clone, PartialEq)]
struct TrainedRows {
    codes: Vec<u8>,
    scales: Vec<u8>,
    rest: Vec<u8>,
    moments: [(Vec<u8>, Vec<u8>, Vec<f32>); 2],
}

impl TrainedRows {
    fn new(forms: &Forms, rows: usize, cols: usize) -> TrainedRows {
        let (blocks, groups) = (rows * cols / 16, rows.div_ceil(GROUP_ROWS));
        let of = |bytes: FieldBytes| {
            let scales = if bytes.scaled { blocks } else { 0 };
            (vec![0; blocks * bytes.codes], vec![0; scales])
        };
        let (codes, scales) = of(forms.weight.codes());
        let (rest, _) = of(forms.weight.rest());
        TrainedRows {
            codes,
            scales,
            rest,
            moments: [forms.first.field(), forms.second.field()].map(|field| {
                let (codes, scales) = of(field);
                (codes, scales, vec![0.0; groups])
            }),
        }
    }

    /// All of it, as the program takes and gives it.
    fn parts(&self) -> [(&'static str, Vec<u8>); 9] {
        let bytes = |globals: &[f32]| globals.iter().flat_map(|g| g.to_le_bytes()).collect();
        let [first, second] = &self.moments;
        [
            ("codes", self.codes.clone()),
            ("scales", self.scales.clone()),
            ("residuals", self.rest.clone()),
            ("first moments", first.0.clone()),
            ("their scales", first.1.clone()),
            ("their global scales", bytes(&first.2)),
            ("second moments", second.0.clone()),
            ("their scales", second.1.clone()),
            ("their global scales", bytes(&second.2)),
        ]
    }
}

/// Puts the first weight of every third block at the end of its grid, where scales that clip leave the largest.
fn at_the_end(form: WeightForm, state: &mut TrainedRows) {
    let (bytes, beside) = (form.codes().codes, form.rest().codes);
    if !form.is_packed() {
        return;
    }
    for codes in state.codes.chunks_exact_mut(bytes).step_by(3) {
        codes[0] = codes[0] & 0xf0 | 7;
    }
    for rest in state.rest.chunks_exact_mut(beside.max(1)).step_by(3) {
        match form {
            WeightForm::Residual(Bits::Eight) => rest[0] = 127,
            _ => rest[0] = rest[0] & 0xf0 | 7,
        }
    }
}

/// AdamW on matrices in their stored form, and their values, from the kernels' sources, on the processor: the bits of src/format in every
/// form. Roots are exact here, so that only weights, into which quotients go, may differ: by the last place of the quotient, which decides
/// the rounding of few.
#[test]
fn optimizer_steps_are_right_on_an_emulated_gpu() {
    let four = WeightForm::Residual(Bits::Four);
    let forms = [
        (four, FirstForm::Int4, SecondForm::Uint4),
        (
            WeightForm::Residual(Bits::Eight),
            FirstForm::Int4,
            SecondForm::Uint4,
        ),
        (four, FirstForm::Nvfp4, SecondForm::Nvfp4),
        (WeightForm::TwoTerm, FirstForm::Int8, SecondForm::Int8),
        (WeightForm::OneTerm, FirstForm::Int4, SecondForm::F32),
        (WeightForm::Bf16, FirstForm::F32, SecondForm::F32),
        (WeightForm::F32, FirstForm::F32, SecondForm::Uint4),
    ];
    let cpu = Cpu::new(Some(1)).unwrap();
    let normal = |seed: u64, i: usize| {
        let sum: f32 = (0..4)
            .map(|k| random::uniform(seed, 4 * i as u64 + k))
            .sum();
        (sum - 2.0) * 1.7
    };
    let mut input = Vec::new();
    let mut wanted = Vec::new();
    for (i, (weight, first, second)) in forms.into_iter().enumerate() {
        // Whole chunks; chunks and groups that are cut short; and pairs of blocks too.
        for (case, (rows, cols)) in [(16, 256), (21, 160), (21, 144)].into_iter().enumerate() {
            let forms = Forms {
                weight,
                first,
                second,
                keep_scale: [
                    KeepScale::Near,
                    KeepScale::Held,
                    KeepScale::Held,
                    KeepScale::Never,
                ][(i + case) % 4],
            };
            // Some rows are zero at first, with their scales.
            let size = |row: usize| if row % 5 == 2 { 0.0 } else { 0.03 };
            let values: Vec<f32> = (0..rows * cols)
                .map(|i| normal(7, i) * size(i / cols))
                .collect();
            let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
                out.copy_from_slice(&values[range.start * cols..range.end * cols]);
                Ok(())
            };
            let global = weight_global(0.15);
            let mut state = TrainedRows::new(&forms, rows, cols);
            let codes = Rows {
                codes: &mut state.codes,
                scales: &mut state.scales,
            };
            cpu.encode_matrix(weight, 0..rows, cols, &read, global, codes, &mut state.rest)
                .unwrap();
            if forms.keep_scale == KeepScale::Held {
                at_the_end(weight, &mut state);
            }
            for step in 1..=6u64 {
                // The third setting moves no weight. The last ones make weights outgrow their scales, all block scales change, and the
                // largest scale clip.
                let settings = Hyperparameters {
                    rate: [2e-3, 2e-3, 0.0, 1e-3, 0.05, 0.9][step as usize - 1],
                    ..Hyperparameters::default()
                };
                let clip = (step % 2 == 0).then_some(0.37f32);
                let mut c = Coefficients::new(&settings, step, 0.7);
                let keys = Keys::new(5, 3 + i as u64, step);
                let first_row = if case > 0 && step == 4 { 8 } else { 0 };
                let gradients: Vec<u16> = (first_row * cols..rows * cols)
                    .map(|i| {
                        let size = [1e-3, 1.0, 1e-9, 0.0, 3e-2, 1e-30][i / cols / 2 % 6];
                        half::bf16::from_f32(normal(step + 100, i) * size).to_bits()
                    })
                    .collect();
                let is_default = Forms {
                    keep_scale: KeepScale::default(),
                    ..forms
                } == Forms::default();
                let band = forms.keep_scale.band(weight);
                let head = [
                    u32::from(!is_default || c.is_still() || cols % 32 != 0),
                    rows as u32,
                    cols as u32,
                    first_row as u32,
                    match weight {
                        WeightForm::Residual(Bits::Four) => 0,
                        WeightForm::Residual(Bits::Eight) => 1,
                        WeightForm::TwoTerm => 2,
                        WeightForm::OneTerm => 3,
                        WeightForm::Bf16 => 4,
                        WeightForm::F32 => 5,
                    },
                    first as u32,
                    second as u32,
                    band.least.to_bits(),
                    band.most.to_bits(),
                    band.spread.to_bits(),
                    global.to_bits(),
                    u32::from(clip.is_some()),
                    clip.unwrap_or(0.0).to_bits(),
                ];
                input.extend(head.iter().flat_map(|v| v.to_le_bytes()));
                let numbers = [
                    c.factor,
                    c.beta1,
                    c.rest1,
                    c.beta2,
                    c.rest2,
                    c.correction,
                    c.eps,
                    c.keep,
                    c.rate,
                ];
                input.extend(numbers.iter().flat_map(|v| v.to_le_bytes()));
                for key in [keys.rounding, keys.first, keys.previous] {
                    input.extend(key.to_le_bytes());
                }
                let mut put = |bytes: &[u8]| {
                    input.extend((bytes.len() as u32).to_le_bytes());
                    input.extend(bytes);
                };
                state.parts().iter().for_each(|(_, bytes)| put(bytes));
                put(&gradients
                    .iter()
                    .flat_map(|g| g.to_le_bytes())
                    .collect::<Vec<_>>());

                c.factor *= clip.unwrap_or(1.0);
                let this = RowsStep {
                    forms: &forms,
                    coefficients: &c,
                    keys: &keys,
                    cols,
                    first_row,
                    global,
                };
                let from = first_row * cols / 16;
                let (weights, beside) = (forms.weight.codes(), forms.weight.rest().codes);
                let scaled = |field: FieldBytes| from * usize::from(field.scaled);
                let [first_moments, second_moments] = &mut state.moments;
                let (f, s) = (forms.first.field(), forms.second.field());
                let rows_of = MatrixRows {
                    codes: Rows {
                        codes: &mut state.codes[from * weights.codes..],
                        scales: &mut state.scales[scaled(weights)..],
                    },
                    rest: &mut state.rest[from * beside..],
                    first: (
                        Rows {
                            codes: &mut first_moments.0[from * f.codes..],
                            scales: &mut first_moments.1[scaled(f)..],
                        },
                        &mut first_moments.2[first_row / GROUP_ROWS..],
                    ),
                    second: (
                        Rows {
                            codes: &mut second_moments.0[from * s.codes..],
                            scales: &mut second_moments.1[scaled(s)..],
                        },
                        &mut second_moments.2[first_row / GROUP_ROWS..],
                    ),
                };
                let floats: Vec<f32> = gradients
                    .iter()
                    .map(|&g| half::bf16::from_bits(g).to_f32())
                    .collect();
                let changes = cpu.adamw(&this, &floats, rows_of).unwrap();
                let what = format!("{forms:?} [{rows}, {cols}], step {step}");
                let counters = [changes.stored, changes.delivered, changes.clipped];
                wanted.push((what, forms, rows * cols, global, state.clone(), counters));
            }
        }
    }
    let Some(said) = emulate_with("optimizer", 900, &input) else {
        return;
    };
    let mut left = &said[..];
    for (what, forms, count, global, state, counters) in wanted {
        let mut take = |n: usize| {
            assert!(left.len() >= n, "{what}: the program has ended");
            let (front, back) = left.split_at(n);
            left = back;
            front.to_vec()
        };
        let mut found = state.clone();
        for (i, (name, want)) in state.parts().into_iter().enumerate() {
            let got = take(want.len());
            let differing = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            let dense = i == 0 && !forms.weight.is_packed();
            let most = match i {
                0 if dense => want.len(),
                0 | 2 => 2,
                _ => 0,
            };
            assert!(
                differing <= most,
                "{what}: {differing} of {} bytes of {name} differ",
                want.len()
            );
            if dense {
                let values = |codes: &[u8]| -> Vec<f32> {
                    codes
                        .chunks_exact(forms.weight.codes().codes)
                        .flat_map(|block| decode_weights(forms.weight, block, &[], 0, global, true))
                        .collect()
                };
                // The last places of an update, which is as large as 1; a bf16 that is rounded to its other neighbour is 2^-7 of it away.
                let relative = match forms.weight {
                    WeightForm::F32 => 1e-6,
                    _ => 0.01,
                };
                for (a, b) in values(&got).iter().zip(&values(&want)) {
                    let most = relative * b.abs() + 2e-7;
                    assert!((a - b).abs() <= most, "{what}: {a}, not {b}");
                }
            }
            match i {
                0 => found.codes = got,
                1 => found.scales = got,
                2 => found.rest = got,
                _ => {}
            }
        }
        for (i, want) in counters.into_iter().enumerate() {
            let got = u64::from_le_bytes(take(8).try_into().unwrap());
            let apart = if i < 2 { 2 } else { 0 };
            assert!(
                got.abs_diff(want) <= apart,
                "{what}: counter {i}: {got}, not {want}"
            );
        }
        for whole in [true, false] {
            let mut values = vec![0.0; count];
            let codes = (&found.codes[..], &found.scales[..]);
            cpu.decode_matrix(forms.weight, codes, &found.rest, global, whole, &mut values);
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
                .collect();
            assert!(take(2 * count) == bytes, "{what}: values, whole: {whole}");
        }
    }
    assert!(left.is_empty());
}

/// Tokens that the kernels choose, from their sources, on the processor, are those that the CPU chooses: all kinds of logits under
/// all kinds of options, in rows side by side.
#[test]
fn tokens_are_chosen_on_an_emulated_gpu_as_on_the_cpu() {
    let (mut input, mut wanted) = (Vec::new(), Vec::new());
    let mut scratch = sample::SampleScratch::default();
    for case in 0..60u64 {
        let pick = |salt: u64, of: u64| random::bits(900 + salt, case) % of;
        let rows = 1 + pick(0, 3) as usize;
        let vocabulary = [1usize, 40, 1000, 5003, 9000][pick(1, 5) as usize];
        let penalties = pick(2, 3) == 0;
        let words = vocabulary.div_ceil(32);
        let (mut rules, mut tokens) = (Vec::new(), Vec::new());
        let (mut occurred, mut logits) = (vec![0u32; rows * words], Vec::new());
        for row in 0..rows as u64 {
            let pick = |salt: u64, of: u64| random::bits(950 + salt, 8 * case + row) % of;
            let kind = pick(0, 8);
            let start = logits.len();
            logits.extend((0..vocabulary as u64).map(|i| {
                let bits = random::bits(31 * case + row, i);
                let x = (bits % 20_000) as f32 * 1e-3 - 8.0;
                match kind {
                    0 => x.round(),
                    // Thousands in one bucket, by their logits and by their numbers alone.
                    1 => x * 1e-4,
                    2 => -1.5,
                    3 if !bits.is_multiple_of(31) => f32::NEG_INFINITY,
                    4 => x * 0.1,
                    5 => [0.0, -0.0][(bits >> 40 & 1) as usize],
                    _ => x,
                }
            }));
            match pick(1, 12) {
                0 => logits[start + vocabulary / 2] = f32::NAN,
                1 => logits[start + vocabulary - 1] = f32::INFINITY,
                2 => logits[start..].fill(f32::NEG_INFINITY),
                _ => {}
            }
            let options = SamplingOptions {
                temperature: [0.0, 1e-30, 0.7, 1.0, 4.0, 1e30][pick(2, 6) as usize],
                top_k: [0, 1, 2, 40, 900, 10_000][pick(3, 6) as usize],
                top_p: [1.0, 0.95, 0.5, 0.0][pick(4, 4) as usize],
                min_p: [0.0, 0.02, 1.0][pick(5, 3) as usize],
                repetition_penalty: match penalties {
                    true => [1.0, 1.3, 0.7, f32::MAX][pick(6, 4) as usize],
                    false => 1.0,
                },
                seed: Some(case),
            };
            let history: Vec<u32> = (0..1 + pick(7, 40))
                .map(|i| (random::bits(case, i) % vocabulary as u64) as u32)
                .collect();
            let (last, before) = history.split_last().unwrap();
            for &token in before {
                occurred[row as usize * words + token as usize / 32] |= 1 << (token % 32);
            }
            let choice = Choice {
                options: &options,
                draw: case * row,
                history: &history,
                allowed: None,
            };
            tokens.push(last.cast_signed());
            rules.push(choice.rule());
            let want = sample::sample(&logits[start..], &choice, &mut scratch);
            wanted.push((
                want,
                format!("case {case}, row {row}, kind {kind}: {options:?}"),
            ));
        }
        let blocks = [1, 3, 40][pick(3, 3) as usize];
        let head = [
            rows as i32,
            vocabulary as i32,
            i32::from(penalties),
            blocks,
            1 + pick(4, 3) as i32,
        ];
        input.extend(head.iter().flat_map(|v| v.to_le_bytes()));
        for rule in &rules {
            input.extend(rule.seed.to_le_bytes());
            input.extend(rule.draw.to_le_bytes());
            let shape = [rule.scale, rule.least_log, rule.top_p, rule.penalty];
            input.extend(shape.iter().flat_map(|v| v.to_le_bytes()));
            input.extend(rule.top_k.to_le_bytes());
            input.extend(rule.reserved.to_le_bytes());
        }
        input.extend(tokens.iter().flat_map(|v| v.to_le_bytes()));
        input.extend(occurred.iter().flat_map(|v| v.to_le_bytes()));
        input.extend(logits.iter().flat_map(|v| v.to_le_bytes()));
    }
    let Some(said) = emulate_with("draw", 900, &input) else {
        return;
    };
    assert_eq!(said.len(), 4 * wanted.len());
    let mut refused = 0;
    for (said, (want, what)) in said.as_chunks().0.iter().zip(&wanted) {
        let got = match Drawn::read(i32::from_le_bytes(*said)) {
            Drawn::Token(token) => Ok(token),
            Drawn::AllRuledOut => Err("none of".to_owned()),
            Drawn::Unusable(token) => Err(format!("token {token} is not")),
        };
        match (got, want) {
            (Err(part), Err(e)) if e.message().contains(&part) => refused += 1,
            (got, want) => assert_eq!(got.as_ref().ok(), want.as_ref().ok(), "{what}"),
        }
    }
    assert!(refused > 5, "{refused} rows without a token");
}

/// Valid block scales, and the values of codes under them, by the kernels' sources on the CPU: they match src/format bit by bit.
#[test]
fn expanded_bits_are_right_on_an_emulated_gpu() {
    struct Wanted {
        what: String,
        found: u32,
        values: Vec<u8>,
    }
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let (mut input, mut wanted) = (Vec::new(), Vec::new());
    let mut case = |dtype: usize, rows: usize, scales: &[u8], global: f32, is_swizzled: bool| {
        let row_blocks = scales.len() / rows;
        let codes: Vec<u8> = (0..scales.len() as u64 * 8)
            .map(|i| random::bits(5, i) as u8)
            .collect();
        let values: Vec<f32> = nvfp4::unpack(&codes)
            .iter()
            .enumerate()
            .map(|(i, &code)| nvfp4::decode(code, scales[i / 16], global))
            .collect();
        let mut bytes = vec![0; values.len() * dtypes[dtype].bytes()];
        dtypes[dtype].from_f32(&values, &mut bytes).unwrap();
        let ordered = match is_swizzled {
            true => swizzle::swizzle(scales, rows, row_blocks).unwrap(),
            false => scales.to_vec(),
        };
        let head = [
            dtype,
            rows,
            row_blocks,
            usize::from(is_swizzled),
            ordered.len(),
        ];
        input.extend(head.iter().flat_map(|&v| (v as u32).to_le_bytes()));
        input.extend(global.to_le_bytes());
        input.extend(codes);
        input.extend(ordered);
        wanted.push(Wanted {
            what: format!(
                "type {dtype}, {rows} rows, {global:e}, swizzled {is_swizzled}, {scales:02x?}"
            ),
            found: u32::from(!scales.iter().all(|&s| nvfp4::is_block_scale(s))),
            values: bytes,
        });
    };
    // Every byte at every place of a word.
    for byte in 0..=255u8 {
        for place in 0..5 {
            let mut scales = [0x38; 5];
            scales[place] = byte;
            case(0, 1, &scales, 0.7, false);
        }
    }
    let scales: Vec<u8> = (0..3 * 7).map(|i| (i * 31 % 0x7f) as u8).collect();
    for global in [0.0, f32::from_bits(1), 1e-40, 0.00321, 1.0, 1e36, f32::MAX] {
        for dtype in 0..dtypes.len() {
            for is_swizzled in [false, true] {
                case(dtype, 3, &scales, global, is_swizzled);
            }
        }
    }
    let Some(said) = emulate_with("expand", 900, &input) else {
        return;
    };
    let mut rest = &said[..];
    let mut take = |n: usize| {
        let (front, back) = rest.split_at(n);
        rest = back;
        front.to_vec()
    };
    for w in wanted {
        let words: Vec<u8> = [w.found, 1].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(take(8), words, "found: {}", w.what);
        let got = take(w.values.len());
        // For NaN, which no scale gives, only the fact counts.
        if w.found == 0 {
            assert_eq!(got, w.values, "{}", w.what);
        } else {
            for (got, want) in got.chunks_exact(4).zip(w.values.chunks_exact(4)) {
                let [got, want] = [got, want].map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{}: {got}, not {want}", w.what);
            }
        }
    }
    assert!(rest.is_empty());
}

/// Factors of adapters beside projections, from the kernels' sources, on the processor.
#[test]
fn adapters_are_right_on_an_emulated_gpu() {
    if let Some(said) = emulate("adapter", 900) {
        assert_eq!(said, "ok\n");
    }
}

/// Norm, SwiGLU and argmax, from the kernels' sources, on the processor.
#[test]
fn what_stands_between_products_is_right_on_an_emulated_gpu() {
    if let Some(said) = emulate("glue", 900) {
        assert_eq!(said, "ok\n");
    }
}

/// Operations of training between GEMMs and attention, by the kernels' sources on the CPU.
#[test]
fn training_is_right_on_an_emulated_gpu() {
    if let Some(said) = emulate("training", 900) {
        assert_eq!(said, "ok\n");
    }
}

#[test]
fn reports_are_read_and_spills_refused() {
    let report = "ptxas info    : Compiling entry function 'f' for 'sm_80'\n\
                  ptxas info    : Function properties for f\n\
                  ptxas         .     48 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n\
                  ptxas info    : Used 32 registers, 400 bytes cmem[0]\n";
    let read = usage(report);
    let f = Usage {
        stack: 48,
        spill_stores: 16,
        spill_loads: 20,
    };
    assert_eq!(read.into_iter().collect::<Vec<_>>(), [("f".to_owned(), f)]);
    let of = |spill_loads| Usage {
        stack: 0,
        spill_stores: 0,
        spill_loads,
    };
    assert!(spills(&of(4)).is_some());
    assert!(spills(&of(0)).is_none());
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_named() {
    if compile(Unit::Glu, "sm_80").is_none() {
        return;
    }
    let error = cuda::compile(Unit::Glu, "sm_990a").unwrap_err();
    for part in ["does not know sm_990a", "newer", "NVFP4_NVRTC"] {
        assert!(error.message().contains(part), "{error}");
    }
}

/// The benchmarks' kernels are for Hopper alone, and measure nothing if they spill or the assembler takes a pipeline apart.
#[test]
fn benchmark_sources_compile_for_hopper() {
    if compile(Unit::Glu, "sm_90a").is_none() {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/micro/kernels");
    let mut compiled = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(&path).unwrap();
        let (image, report) = cuda::compile_source(&name, &source, "sm_90a").unwrap();
        assert!(!parameter_bytes(&image).is_empty(), "{name}: no kernels");
        assert!(
            !report.contains("wgmma.mma_async instructions are serialized"),
            "{name}: {report}"
        );
        for (kernel, usage) in usage(&report) {
            assert_eq!(usage, Usage::default(), "{name}: {kernel}");
        }
        compiled += 1;
    }
    assert!(compiled >= 6, "{compiled} sources");
}
