//! Valid block scales and global scales, and their values, which are the same for every way into NVFP4. One table of scales, odd ones among
//! them, goes through readers of every format, writers, packers, GEMMs and the C ABI.

use std::ptr::{null, null_mut};

use NVFP4::abi::linear::{
    NVFP4_matmul, NVFP4_weight_create, NVFP4_weight_create_nvfp4, NVFP4_weight_release,
};
use NVFP4::abi::quantize::{NVFP4_SCALES_LINEAR, NVFP4_dequantize_packed, NVFP4_tensor_dequantize};
use NVFP4::abi::tensor::{
    NVFP4_Tensor, NVFP4_tensor_copy_as_float, NVFP4_tensor_from_host, NVFP4_tensor_release,
};
use NVFP4::base::{Error, ErrorKind, Result};
use NVFP4::checkpoint::{self, DatWriter, Encoding, ModelOptWriter, Planned, Writer};
use NVFP4::format::nvfp4::{Nvfp4, dequantize, pack};
use NVFP4::format::{e2m1, e4m3, swizzle};
use NVFP4::model;
use NVFP4::ops::backend::Backend;
use NVFP4::ops::linear::Linear;
use NVFP4::ops::quantize;
use NVFP4::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DType, Tensor};

use super::files::{Gguf, Scratch, dat, dat_entry, tensors as safetensors};

const ROWS: usize = 2;
const COLS: usize = 64;
const BLOCKS: usize = COLS / 16;
/// Where the scale in question stands.
const ROW: usize = 1;
const BLOCK: usize = 2;

/// A weight of every code under a scale of 1, but for one block.
#[derive(Clone, Copy, Debug)]
struct Case {
    byte: u8,
    global: f32,
    valid: bool,
}

impl Case {
    fn codes(&self) -> Vec<u8> {
        let codes: Vec<u8> = (0..ROWS * COLS).map(|i| (i % 16) as u8).collect();
        pack(&codes).unwrap()
    }

    fn scales(&self) -> Vec<u8> {
        let mut scales = vec![0x38; ROWS * BLOCKS];
        scales[ROW * BLOCKS + BLOCK] = self.byte;
        scales
    }

    /// The values by their definition, in f64, which holds the products exactly: 2 bits by 4 by 24.
    fn values(&self) -> Vec<f32> {
        let scales = self.scales();
        (0..ROWS * COLS)
            .map(|i| {
                let code = f64::from(e2m1::decode((i % 16) as u8));
                let scale = f64::from(e4m3::decode(scales[i / 16]));
                (code * scale * f64::from(self.global)) as f32
            })
            .collect()
    }

    fn tensor(&self, layout: ScaleLayout) -> Nvfp4Tensor {
        let scales = match layout {
            ScaleLayout::Linear => self.scales(),
            ScaleLayout::Swizzled => swizzle::swizzle(&self.scales(), ROWS, BLOCKS).unwrap(),
        };
        let sizes = match layout {
            ScaleLayout::Linear => vec![ROWS, BLOCKS],
            ScaleLayout::Swizzled => vec![scales.len()],
        };
        Nvfp4Tensor {
            codes: bytes(&self.codes(), &[ROWS, COLS / 2], DType::U8),
            scales: bytes(&scales, &sizes, DType::F8E4M3),
            global: self.global,
            layout,
        }
    }

    fn host(&self) -> Nvfp4 {
        Nvfp4 {
            rows: ROWS,
            cols: COLS,
            codes: self.codes(),
            scales: self.scales(),
            global: self.global,
        }
    }
}

fn bytes(bytes: &[u8], sizes: &[usize], dtype: DType) -> Tensor {
    Tensor::build(sizes, dtype, |out| {
        out.copy_from_slice(bytes);
        Ok(())
    })
    .unwrap()
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for byte in 0..=255 {
        cases.push(Case {
            byte,
            global: 1.0,
            valid: byte <= 0x7e,
        });
    }
    for global in [
        0.0,
        f32::from_bits(1),
        1e-40,
        f32::MIN_POSITIVE,
        1.0 / 4096.0,
        0.00321,
        0.7,
        1024.0,
        1e30,
        // The largest scale under which every value is finite; one under which some values are not; the largest scale.
        f32::MAX / 2688.0,
        1e36,
        f32::MAX,
    ] {
        for byte in [0x00, 0x01, 0x0d, 0x38, 0x7e] {
            cases.push(Case {
                byte,
                global,
                valid: true,
            });
        }
    }
    for global in [
        -0.0,
        -f32::MIN_POSITIVE,
        -1.0,
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
    ] {
        cases.push(Case {
            byte: 0x38,
            global,
            valid: false,
        });
    }
    cases
}

/// How a door's values are compared.
#[derive(Clone, Copy, PartialEq)]
enum Compared {
    /// Bit for bit.
    Bits,
    /// As numbers: a sum has no negative zero.
    Sums,
}

struct Door {
    name: &'static str,
    /// The kind of its refusals.
    kind: ErrorKind,
    compared: Compared,
    /// Nothing if it cannot be asked this.
    values: fn(&Case) -> Option<Result<Vec<f32>>>,
}

/// Reads a file of one weight in every way there is, which must agree: as values, and as codes and scales, which are then packed.
fn read(file: &str, content: Vec<u8>) -> Result<Vec<f32>> {
    let opened = model::open_bytes(file, content)?;
    let entry = &opened.entries()[0];
    let mut values = vec![f32::NAN; ROWS * COLS];
    let plain = opened.rows_f32(entry, 0..ROWS, &mut values);
    let device = Device::cpu(Some(1))?;
    let global = opened.global_scale(entry)?;
    let packed = Linear::nvfp4(&device, ROWS, COLS, global, &mut |rows, codes, scales| {
        opened.rows_nvfp4(entry, rows, codes, scales)
    })
    .and_then(|w| rows_of(&w));
    match (plain, packed) {
        (Ok(()), Ok(packed)) => assert_eq!(bits(&values), bits(&packed), "{file}"),
        (Err(a), Err(b)) => {
            assert_eq!((a.kind(), a.message()), (b.kind(), b.message()), "{file}");
            return Err(a);
        }
        (a, b) => panic!("{file}: as values {a:?}, as codes {b:?}"),
    }
    Ok(values)
}

fn rows_of(weight: &Linear) -> Result<Vec<f32>> {
    let mut values = vec![f32::NAN; ROWS * COLS];
    for (row, out) in values.chunks_exact_mut(COLS).enumerate() {
        weight.row(row, out)?;
    }
    Ok(values)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn modelopt(case: &Case) -> Vec<u8> {
    safetensors(&[
        ("a.weight", "U8", "[2,32]", case.codes()),
        ("a.weight_scale", "F8_E4M3", "[2,4]", case.scales()),
        (
            "a.weight_scale_2",
            "F32",
            "[]",
            case.global.to_le_bytes().to_vec(),
        ),
    ])
}

/// The file holds the inverse, and not every number is one.
fn compressed(case: &Case) -> Option<Vec<u8>> {
    let divisor = 1.0 / case.global;
    if case.valid && (1.0 / divisor).to_bits() != case.global.to_bits() || divisor == f32::INFINITY
    {
        return None;
    }
    Some(safetensors(&[
        ("a.weight_packed", "U8", "[2,32]", case.codes()),
        ("a.weight_scale", "F8_E4M3", "[2,4]", case.scales()),
        (
            "a.weight_global_scale",
            "F32",
            "[1]",
            divisor.to_le_bytes().to_vec(),
        ),
    ]))
}

fn torchao(case: &Case, layout: ScaleLayout) -> Vec<u8> {
    let (shape, scales) = match layout {
        ScaleLayout::Linear => ("[2,4]", case.scales()),
        ScaleLayout::Swizzled => (
            "[32,16]",
            swizzle::swizzle(&case.scales(), ROWS, BLOCKS).unwrap(),
        ),
    };
    safetensors(&[
        ("a._weight_qdata", "U8", "[2,32]", case.codes()),
        ("a._weight_scale", "F8_E4M3", shape, scales),
        (
            "a._weight_per_tensor_scale",
            "F32",
            "[]",
            case.global.to_le_bytes().to_vec(),
        ),
    ])
}

/// A `.dat` has no global scale.
fn dat_of(case: &Case, elem_type: u64, scale: fn(u8) -> Vec<u8>) -> Option<Vec<u8>> {
    let scales: Vec<u8> = case.scales().into_iter().flat_map(scale).collect();
    (case.global == 1.0).then(|| {
        dat(&[
            dat_entry("a.weight.qdata", 0, &[2, 32], &case.codes()),
            dat_entry("a.weight.scale", elem_type, &[2, 4], &scales),
        ])
    })
}

/// The codes of a run of 16 are split by halves there.
fn gguf(case: &Case) -> Option<Vec<u8>> {
    // The one byte that GGUF means otherwise: its 0x7f is zero.
    if case.byte == 0x7f {
        return None;
    }
    let mut data = Vec::new();
    for scales in case.scales().chunks_exact(BLOCKS) {
        data.extend(scales);
        for _ in 0..BLOCKS {
            data.extend((0..8).map(|j: u8| j | (8 + j) << 4));
        }
    }
    data.resize(96, 0);
    data.extend(case.global.to_le_bytes());
    Some(
        Gguf::new("golden")
            .tensor("a.weight", &[COLS as u64, ROWS as u64], 40, 0)
            .tensor("a.scale", &[1], 0, 96)
            .with_data(data)
            .build(),
    )
}

/// Writes the weight and reads it again. Files are synced, which takes its time: some bytes, good and bad, stand for all.
fn written(
    case: &Case,
    create: impl FnOnce(&Scratch, &[Planned]) -> Result<Box<dyn Writer>>,
    file: &str,
) -> Option<Result<Vec<f32>>> {
    (case.byte % 9 == 2 || matches!(case.byte, 0x7e | 0x7f | 0x80 | 0xff))
        .then(|| write(case, create, file))
}

fn write(
    case: &Case,
    create: impl FnOnce(&Scratch, &[Planned]) -> Result<Box<dyn Writer>>,
    file: &str,
) -> Result<Vec<f32>> {
    let scratch = Scratch::new();
    let plan = [Planned {
        name: "a.weight".into(),
        shape: vec![ROWS, COLS],
        encoding: Encoding::Nvfp4,
    }];
    let mut writer = create(&scratch, &plan)?;
    writer.begin("a.weight", case.global)?;
    for (codes, scales) in case
        .codes()
        .chunks_exact(COLS / 2)
        .zip(case.scales().chunks_exact(BLOCKS))
    {
        writer.nvfp4(codes, scales)?;
    }
    writer.finish()?;
    read(file, std::fs::read(scratch.0.join(file)).unwrap())
}

fn device() -> Device {
    Device::cpu(Some(1)).unwrap()
}

/// Ones along the diagonal, so that a product with it is the other operand.
fn identity() -> Nvfp4 {
    let codes: Vec<u8> = (0..COLS * COLS)
        .map(|i| if i / COLS == i % COLS { 2 } else { 0 })
        .collect();
    Nvfp4 {
        rows: COLS,
        cols: COLS,
        codes: pack(&codes).unwrap(),
        scales: vec![0x38; COLS * BLOCKS],
        global: 1.0,
    }
}

fn identity_tensor() -> Nvfp4Tensor {
    let identity = identity();
    Nvfp4Tensor {
        codes: bytes(&identity.codes, &[COLS, COLS / 2], DType::U8),
        scales: bytes(&identity.scales, &[COLS, BLOCKS], DType::F8E4M3),
        global: 1.0,
        layout: ScaleLayout::Linear,
    }
}

/// A product takes values that are finite: infinity times zero is NaN.
fn has_products(case: &Case) -> bool {
    !case.valid || case.values().iter().all(|v| v.is_finite())
}

/// `[n, m]` as `[m, n]`.
fn turned(values: &[f32], m: usize) -> Vec<f32> {
    let n = values.len() / m;
    (0..values.len())
        .map(|i| values[i % n * m + i / n])
        .collect()
}

/// Handles of the C ABI for a case's parts.
struct Handles {
    codes: *mut NVFP4_Tensor,
    scales: *mut NVFP4_Tensor,
    /// The memory under them.
    _parts: [Vec<u8>; 2],
}

impl Handles {
    fn new(codes: Vec<u8>, scales: Vec<u8>, rows: i64) -> Handles {
        let mut parts = [codes, scales];
        let made = [
            (0, COLS as i64 / 2, DType::U8),
            (1, BLOCKS as i64, DType::F8E4M3),
        ]
        .map(|(i, cols, dtype)| {
            let (shape, mut out) = ([rows, cols], null_mut());
            // SAFETY: the memory outlives the handle, which is released first.
            let status = unsafe {
                NVFP4_tensor_from_host(
                    parts[i].as_mut_ptr().cast(),
                    shape.as_ptr(),
                    2,
                    null(),
                    dtype.code(),
                    None,
                    null_mut(),
                    &mut out,
                )
            };
            assert_eq!(status, 0);
            out
        });
        Handles {
            codes: made[0],
            scales: made[1],
            _parts: parts,
        }
    }

    fn of(case: &Case) -> Handles {
        Handles::new(case.codes(), case.scales(), ROWS as i64)
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for handle in [self.codes, self.scales] {
            // SAFETY: a live handle.
            assert_eq!(unsafe { NVFP4_tensor_release(handle) }, 0);
        }
    }
}

/// The result of a function of the C ABI.
fn said(status: i32) -> Result<()> {
    match ErrorKind::ALL.iter().find(|k| k.status() == status) {
        None => {
            assert_eq!(status, 0);
            Ok(())
        }
        Some(&kind) => Err(Error::new(kind, "by the C ABI")),
    }
}

/// The values of a tensor that a function of the C ABI gave.
fn taken(status: i32, tensor: *mut NVFP4_Tensor) -> Result<Vec<f32>> {
    said(status)?;
    let mut values = vec![f32::NAN; ROWS * COLS];
    // SAFETY: a live handle, and memory for its values.
    unsafe {
        assert_eq!(
            NVFP4_tensor_copy_as_float(tensor, values.as_mut_ptr(), values.len()),
            0
        );
        assert_eq!(NVFP4_tensor_release(tensor), 0);
    }
    Ok(values)
}

fn doors() -> Vec<Door> {
    use Compared::{Bits, Sums};
    use ErrorKind::{CorruptFile, InvalidArgument};
    let door = |name, kind, compared, values| Door {
        name,
        kind,
        compared,
        values,
    };
    vec![
        door("ModelOpt", CorruptFile, Bits, |c| {
            Some(read("x.safetensors", modelopt(c)))
        }),
        door("compressed-tensors", CorruptFile, Bits, |c| {
            Some(read("x.safetensors", compressed(c)?))
        }),
        door("torchao", CorruptFile, Bits, |c| {
            Some(read("x.safetensors", torchao(c, ScaleLayout::Linear)))
        }),
        door("torchao, swizzled", CorruptFile, Bits, |c| {
            Some(read("x.safetensors", torchao(c, ScaleLayout::Swizzled)))
        }),
        door("dat", CorruptFile, Bits, |c| {
            Some(read("x.dat", dat_of(c, 101, |b| vec![b])?))
        }),
        door("dat with scales in F16", CorruptFile, Bits, |c| {
            let half = |b| half::f16::from_f32(e4m3::decode(b)).to_le_bytes().to_vec();
            Some(read("x.dat", dat_of(c, 5, half)?))
        }),
        door("dat with scales in F32", CorruptFile, Bits, |c| {
            let float = |b| e4m3::decode(b).to_le_bytes().to_vec();
            Some(read("x.dat", dat_of(c, 6, float)?))
        }),
        door("a copied dat with scales in F16", CorruptFile, Bits, |c| {
            let half = |b| half::f16::from_f32(e4m3::decode(b)).to_le_bytes().to_vec();
            if c.valid && c.byte % 9 != 2 {
                return None;
            }
            let source = model::open_bytes("x.dat", dat_of(c, 5, half)?).unwrap();
            let scratch = Scratch::new();
            let path = scratch.0.join("y.dat");
            let mut writer = Box::new(DatWriter::create_like(&path, &*source).unwrap());
            Some(
                writer
                    .copy(&*source, &source.entries()[0])
                    .and_then(|()| writer.finish())
                    .and_then(|()| read("y.dat", std::fs::read(&path).unwrap())),
            )
        }),
        door("GGUF", CorruptFile, Bits, |c| {
            Some(read("x.gguf", gguf(c)?))
        }),
        door("a written ModelOpt folder", InvalidArgument, Bits, |c| {
            let create = |scratch: &Scratch, plan: &[Planned]| -> Result<Box<dyn Writer>> {
                Ok(Box::new(ModelOptWriter::create(
                    &scratch.0,
                    plan,
                    &checkpoint::Metadata::default(),
                )?))
            };
            written(c, create, "model.safetensors")
        }),
        door("a written dat", InvalidArgument, Bits, |c| {
            let create = |scratch: &Scratch, plan: &[Planned]| -> Result<Box<dyn Writer>> {
                Ok(Box::new(DatWriter::create(&scratch.0.join("m.dat"), plan)?))
            };
            match !c.valid || c.global == 1.0 {
                true => written(c, create, "m.dat"),
                false => None,
            }
        }),
        door("format::nvfp4::dequantize", InvalidArgument, Bits, |c| {
            let mut values = vec![f32::NAN; ROWS * COLS];
            Some(dequantize(&c.codes(), &c.scales(), c.global, &mut values).map(|()| values))
        }),
        door("ops::quantize::dequantize", InvalidArgument, Bits, |c| {
            Some(quantize::dequantize(&c.host()))
        }),
        door("a packed weight", InvalidArgument, Bits, |c| {
            let (codes, scales) = (c.codes(), c.scales());
            let weight = Linear::nvfp4(&device(), ROWS, COLS, c.global, &mut |_, a, b| {
                a.copy_from_slice(&codes);
                b.copy_from_slice(&scales);
                Ok(())
            });
            Some(weight.and_then(|w| rows_of(&w)))
        }),
        door("a weight of tensors", InvalidArgument, Bits, |c| {
            let weight = tensors::weight(&device(), &c.tensor(ScaleLayout::Linear));
            Some(weight.and_then(|w| rows_of(&w)))
        }),
        door("a weight, swizzled", InvalidArgument, Bits, |c| {
            let weight = tensors::weight(&device(), &c.tensor(ScaleLayout::Swizzled));
            Some(weight.and_then(|w| rows_of(&w)))
        }),
        door("a decoded weight", InvalidArgument, Bits, |c| {
            // Held as dense values, it is refused where those are not finite.
            has_products(c).then(|| {
                let q = c.tensor(ScaleLayout::Linear);
                tensors::weight_for(&device(), &q, Backend::DequantMatmul, DType::F32)
                    .and_then(|w| rows_of(&w))
            })
        }),
        door("tensors::dequantize", InvalidArgument, Bits, |c| {
            let tensor = tensors::dequantize(&device(), &c.tensor(ScaleLayout::Linear), DType::F32);
            Some(tensor.map(|t| t.to_f32().unwrap().to_vec()))
        }),
        door(
            "tensors::dequantize, swizzled",
            InvalidArgument,
            Bits,
            |c| {
                let tensor =
                    tensors::dequantize(&device(), &c.tensor(ScaleLayout::Swizzled), DType::F32);
                Some(tensor.map(|t| t.to_f32().unwrap().to_vec()))
            },
        ),
        door(
            "the first operand of a product",
            InvalidArgument,
            Sums,
            |c| {
                let mut out = vec![f32::NAN; ROWS * COLS];
                let mut ws = Workspace::new();
                has_products(c).then(|| {
                    quantize::scaled_mm(&device(), &c.host(), &identity(), &mut out, &mut ws)
                        .map(|()| out)
                })
            },
        ),
        door(
            "the second operand of a product",
            InvalidArgument,
            Sums,
            |c| {
                let mut out = vec![f32::NAN; ROWS * COLS];
                let mut ws = Workspace::new();
                has_products(c).then(|| {
                    quantize::scaled_mm(&device(), &identity(), &c.host(), &mut out, &mut ws)
                        .map(|()| turned(&out, ROWS))
                })
            },
        ),
        door("a product of tensors, first", InvalidArgument, Sums, |c| {
            let (q, mut ws) = (c.tensor(ScaleLayout::Linear), Workspace::new());
            has_products(c).then(|| {
                tensors::scaled_mm(&device(), &q, &identity_tensor(), DType::F32, &mut ws)
                    .map(|t| t.to_f32().unwrap().to_vec())
            })
        }),
        door("a product of tensors, second", InvalidArgument, Sums, |c| {
            let (q, mut ws) = (c.tensor(ScaleLayout::Linear), Workspace::new());
            has_products(c).then(|| {
                tensors::scaled_mm(&device(), &identity_tensor(), &q, DType::F32, &mut ws)
                    .map(|t| turned(&t.to_f32().unwrap(), ROWS))
            })
        }),
        door("NVFP4_tensor_dequantize", InvalidArgument, Bits, |c| {
            let (h, mut out) = (Handles::of(c), null_mut());
            // SAFETY: live handles, and a place for the result.
            let status = unsafe {
                NVFP4_tensor_dequantize(
                    h.codes,
                    h.scales,
                    c.global,
                    NVFP4_SCALES_LINEAR,
                    DType::F32.code(),
                    &mut out,
                )
            };
            Some(taken(status, out))
        }),
        door("NVFP4_dequantize_packed", InvalidArgument, Bits, |c| {
            let (h, mut out) = (Handles::of(c), null_mut());
            // SAFETY: as above.
            let status =
                unsafe { NVFP4_dequantize_packed(h.codes, h.scales, DType::F32.code(), &mut out) };
            let values = taken(status, out);
            // It takes no global scale.
            (c.global == 1.0).then_some(values)
        }),
        door("NVFP4_matmul", InvalidArgument, Sums, |c| {
            let (h, i) = (Handles::of(c), identity());
            let i = Handles::new(i.codes, i.scales, COLS as i64);
            has_products(c).then(|| {
                let mut out = null_mut();
                // SAFETY: as above.
                let status = unsafe {
                    NVFP4_matmul(
                        h.codes,
                        h.scales,
                        c.global,
                        i.codes,
                        i.scales,
                        1.0,
                        NVFP4_SCALES_LINEAR,
                        DType::F32.code(),
                        &mut out,
                    )
                };
                taken(status, out)
            })
        }),
        door("NVFP4_weight_create", InvalidArgument, Bits, |c| {
            let (h, mut out) = (Handles::of(c), null_mut());
            // SAFETY: as above; the weight is released.
            let created = said(unsafe {
                NVFP4_weight_create(h.codes, h.scales, c.global, NVFP4_SCALES_LINEAR, &mut out)
            });
            // Its rows cannot be read; the verdict counts.
            Some(created.map(|()| {
                // SAFETY: a live handle.
                assert_eq!(unsafe { NVFP4_weight_release(out) }, 0);
                c.values()
            }))
        }),
        door("NVFP4_weight_create_nvfp4", InvalidArgument, Bits, |c| {
            let (h, mut out) = (Handles::of(c), null_mut());
            // SAFETY: as above.
            let created = said(unsafe {
                NVFP4_weight_create_nvfp4(h.codes, h.scales, c.global, null(), &mut out)
            });
            Some(created.map(|()| {
                // SAFETY: a live handle.
                assert_eq!(unsafe { NVFP4_weight_release(out) }, 0);
                c.values()
            }))
        }),
    ]
}

#[test]
fn every_door_takes_the_same_scales_and_gives_the_same_values() {
    let mut faults = Vec::new();
    for door in doors() {
        let (mut taken, mut refused) = (0, 0);
        for case in cases() {
            let Some(result) = (door.values)(&case) else {
                continue;
            };
            let what = format!("{}: {case:?}", door.name);
            match result {
                Ok(_) if !case.valid => faults.push(format!("{what}: taken")),
                Err(e) if case.valid => faults.push(format!("{what}: refused: {e}")),
                Err(e) if e.kind() != door.kind => {
                    faults.push(format!("{what}: {:?}: {e}", e.kind()));
                }
                Err(_) => refused += 1,
                Ok(values) => {
                    let want = case.values();
                    let same = match door.compared {
                        Compared::Bits => bits(&values) == bits(&want),
                        Compared::Sums => values == want,
                    };
                    match same {
                        true => taken += 1,
                        false => {
                            let pairs = values.iter().zip(&want);
                            let (i, (got, want)) = pairs
                                .enumerate()
                                .find(|(_, (a, b))| a.to_bits() != b.to_bits())
                                .unwrap();
                            faults.push(format!("{what}: value {i} is {got:e}, not {want:e}"));
                        }
                    }
                }
            }
        }
        if faults.is_empty() {
            assert!(taken >= 10 && refused >= 10, "{}", door.name);
        }
    }
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

/// The message tells which scale it was, where rows are known.
#[test]
fn refusals_name_the_scale() {
    let case = Case {
        byte: 0xb6,
        global: 1.0,
        valid: false,
    };
    let place = format!("block {BLOCK} in row {ROW} has the byte 0xb6, which is negative");
    for door in doors() {
        let e = match (door.values)(&case) {
            Some(result) => result.unwrap_err(),
            None => panic!("{}: it has block scales", door.name),
        };
        let silent = door.name.starts_with("NVFP4_") || door.name.starts_with("format::");
        assert!(silent || e.message().contains(&place), "{}: {e}", door.name);
    }
}
