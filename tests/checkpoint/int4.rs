//! 4-bit integers of GPTQ, AWQ, compressed-tensors and MLX: read with the values that codes, zero points and scales stand for, loaded, estimated and quantized.

use NVFP4::checkpoint::Encoding;
use NVFP4::format::random;
use NVFP4::model;
use NVFP4::model::footprint::weight_bytes;
use NVFP4::ops::DeviceKind;
use half::{bf16, f16};
use serde_json::{Value, json};

use super::files::Scratch;
use super::methods::{ATTENTION, Tensor, load, quantize, refused, with_attention, write};

/// Groups of scales of every weight.
const GROUPS: usize = 2;

/// The group of an input in files that are ordered by activations.
fn ordered(input: usize) -> usize {
    input % GROUPS
}

/// The word at `index` of every tensor of words.
fn word(index: usize) -> u32 {
    random::bits(11, index as u64) as u32
}

fn nibble(index: usize, place: usize) -> i32 {
    (word(index) >> (4 * place) & 15) as i32
}

/// The scale at `index` of every tensor of scales.
fn scale(index: usize) -> f16 {
    f16::from_f32(0.01 + (word(900 + index) % 64) as f32 / 1024.0)
}

/// The tensors of a weight `[rows, ..]` whose codes are words of the shape `codes`.
fn integers(module: &str, rows: usize, codes: [usize; 2]) -> Vec<Tensor> {
    let words = |part: &str, shape: [usize; 2]| {
        let bytes = (0..shape[0] * shape[1]).flat_map(|i| word(i).to_le_bytes());
        (
            format!("{module}.{part}"),
            "I32",
            shape.to_vec(),
            bytes.collect(),
        )
    };
    let scales = (0..GROUPS * rows).flat_map(|i| scale(i).to_le_bytes());
    vec![
        words("qweight", codes),
        words("qzeros", [GROUPS, rows / 8]),
        (
            format!("{module}.scales"),
            "F16",
            vec![GROUPS, rows],
            scales.collect(),
        ),
    ]
}

fn gptq(module: &str, [rows, cols]: [usize; 2]) -> Vec<Tensor> {
    let order = (0..cols).flat_map(|i| (ordered(i) as i32).to_le_bytes());
    let order = (
        format!("{module}.g_idx"),
        "I32",
        vec![cols],
        order.collect(),
    );
    let mut all = integers(module, rows, [cols / 8, rows]);
    all.push(order);
    all
}

fn awq(module: &str, [rows, cols]: [usize; 2]) -> Vec<Tensor> {
    integers(module, rows, [cols, rows / 8])
}

/// Gives the group of an input.
type Order = fn(usize) -> i32;

/// As compressed-tensors stores it.
#[derive(Clone, Copy)]
struct Rows {
    has_zeros: bool,
    order: Option<Order>,
    scale_type: &'static str,
}

/// The scale at `index` in bfloat16, of which each is a value of binary16 too.
fn short_scale(index: usize) -> bf16 {
    bf16::from_f32(0.5 + (word(900 + index) % 64) as f32 / 128.0)
}

/// A weight as MLX stores it.
fn mlx(module: &str, [rows, cols]: [usize; 2]) -> Vec<Tensor> {
    let codes = (0..rows * cols / 8).flat_map(|i| word(i).to_le_bytes());
    let floats = |part: &str, value: fn(usize) -> bf16| {
        let bytes = (0..rows * GROUPS).flat_map(|i| value(i).to_le_bytes());
        let name = format!("{module}.{part}");
        (name, "BF16", vec![rows, GROUPS], bytes.collect::<Vec<u8>>())
    };
    vec![
        (
            format!("{module}.weight"),
            "U32",
            vec![rows, cols / 8],
            codes.collect(),
        ),
        floats("scales", short_scale),
        floats("biases", bias),
    ]
}

fn bias(index: usize) -> bf16 {
    bf16::from_f32(-short_scale(index + 5).to_f32())
}

impl Rows {
    fn tensors(self, module: &str, [rows, cols]: [usize; 2]) -> Vec<Tensor> {
        let words = |part: &str, shape: [usize; 2]| {
            let bytes = (0..shape[0] * shape[1]).flat_map(|i| word(i).to_le_bytes());
            let name = format!("{module}.weight_{part}");
            (name, "I32", shape.to_vec(), bytes.collect::<Vec<u8>>())
        };
        let scales = (0..rows * GROUPS).map(short_scale);
        let scales = match self.scale_type {
            "BF16" => scales.flat_map(|s| s.to_le_bytes()).collect(),
            "F16" => scales
                .flat_map(|s| f16::from_f32(s.to_f32()).to_le_bytes())
                .collect(),
            _ => scales.flat_map(|s| s.to_f32().to_le_bytes()).collect(),
        };
        let shape = [rows, cols].map(|n| (n as i64).to_le_bytes()).concat();
        let mut all = vec![
            words("packed", [rows, cols / 8]),
            (
                format!("{module}.weight_scale"),
                self.scale_type,
                vec![rows, GROUPS],
                scales,
            ),
            (format!("{module}.weight_shape"), "I64", vec![2], shape),
        ];
        if self.has_zeros {
            all.push(words("zero_point", [rows / 8, GROUPS]));
        }
        if let Some(order) = self.order {
            let order = (0..cols).flat_map(|i| order(i).to_le_bytes()).collect();
            all.push((format!("{module}.weight_g_idx"), "I32", vec![cols], order));
        }
        all
    }

    fn value(self, place: Place) -> f32 {
        let (output, input, cols) = (place.output, place.input, place.shape[1]);
        let group = match self.order.map(|order| order(input)) {
            None | Some(-1) => input * GROUPS / cols,
            Some(group) => group as usize,
        };
        let zero = match self.has_zeros {
            true => nibble(output / 8 * GROUPS + group, output % 8),
            false => 8,
        };
        let code = nibble((output * cols + input) / 8, input % 8);
        (code - zero) as f32 * short_scale(output * GROUPS + group).to_f32()
    }
}

/// An element of a weight of this shape.
#[derive(Clone, Copy)]
struct Place {
    output: usize,
    input: usize,
    shape: [usize; 2],
}

/// How a file says what its integers stand for.
#[derive(Clone, Copy)]
enum Form {
    /// Zero points are stored minus `offset`.
    Gptq {
        offset: i32,
        is_ordered: bool,
    },
    Awq,
    Rows(Rows),
    Mlx,
}

impl Form {
    fn value(self, place: Place) -> f32 {
        let Place {
            output,
            input,
            shape: [rows, cols],
        } = place;
        if let Form::Rows(form) = self {
            return form.value(place);
        }
        let in_order = input * GROUPS / cols;
        if let Form::Mlx = self {
            let code = nibble((output * cols + input) / 8, input % 8);
            let at = output * GROUPS + in_order;
            return code as f32 * short_scale(at).to_f32() + bias(at).to_f32();
        }
        let (group, of_output, offset) = match self {
            Form::Gptq { offset, is_ordered } => {
                let group = if is_ordered { ordered(input) } else { in_order };
                (group, output % 8, offset)
            }
            Form::Awq | Form::Rows(_) | Form::Mlx => {
                (in_order, [0, 4, 1, 5, 2, 6, 3, 7][output % 8], 0)
            }
        };
        let zero = (nibble(group * rows / 8 + output / 8, of_output) + offset) % 16;
        let code = match self {
            Form::Gptq { .. } => nibble(input / 8 * rows + output, input % 8),
            Form::Awq | Form::Rows(_) | Form::Mlx => {
                nibble(input * rows / 8 + output / 8, of_output)
            }
        };
        (code - zero) as f32 * scale(group * rows + output).to_f32()
    }
}

/// The model with this attention is read, loaded, estimated and quantized.
fn check(all: &[Tensor], config: &Value, form: Form) {
    let scratch = Scratch::new();
    let (from, to) = (scratch.0.join("in"), scratch.0.join("out"));
    write(&from, all, config.clone());
    let opened = model::open(&from).unwrap();
    for (name, shape) in [("q_proj", [32, 32]), ("k_proj", [16, 32])] {
        let entry = opened.find(&format!("{ATTENTION}{name}.weight")).unwrap();
        assert_eq!(
            (entry.shape.as_slice(), entry.encoding),
            (&shape[..], Encoding::Int4)
        );
        let mut values = vec![0.0; shape[0] * shape[1]];
        opened.rows_f32(entry, 0..shape[0], &mut values).unwrap();
        for (i, found) in values.iter().enumerate() {
            let (output, input) = (i / shape[1], i % shape[1]);
            let place = Place {
                output,
                input,
                shape,
            };
            let what = format!("{config} {name}[{output}, {input}]");
            assert_eq!(*found, form.value(place), "{what}");
        }
    }
    load(&from).unwrap_or_else(|e| panic!("{config}: {e}"));
    weight_bytes(&*opened, DeviceKind::Cpu, false).unwrap();
    quantize(&from, &to).unwrap_or_else(|e| panic!("{config}: {e}"));
    load(&to).unwrap();
}

/// Both versions of GPTQ, ordered by activations and not, and AWQ.
#[test]
fn four_bit_integers_are_read() {
    let gptq_form = |offset, is_ordered| Form::Gptq { offset, is_ordered };
    for (config, form) in [
        (
            json!({"quant_method": "gptq", "bits": 4}),
            gptq_form(1, true),
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "desc_act": false}),
            gptq_form(1, false),
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
            gptq_form(0, true),
        ),
        (Value::Null, gptq_form(1, true)),
    ] {
        check(&with_attention(gptq), &config, form);
    }
    let config = json!({"quant_method": "awq", "bits": 4, "version": "gemm"});
    check(&with_attention(awq), &config, Form::Awq);
}

/// With zero points and without, ordered by activations, not, and with an order that says nothing; scales of all types.
#[test]
fn packed_integers_of_compressed_tensors_are_read() {
    let weights = json!({"num_bits": 4, "type": "int", "group_size": 16, "strategy": "group"});
    let config = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}
    });
    let orders: [Option<Order>; 3] = [None, Some(|i| ordered(i) as i32), Some(|_| -1)];
    for (order, scale_type) in orders.into_iter().zip(["BF16", "F16", "F32"]) {
        for has_zeros in [false, true] {
            let form = Rows {
                has_zeros,
                order,
                scale_type,
            };
            let all = with_attention(|module, shape| form.tensors(module, shape));
            check(&all, &config, Form::Rows(form));
        }
    }
}

/// Affine codes for all modules or for one, and those of other sizes and modes, which are refused.
#[test]
fn integers_of_mlx_are_read() {
    let all = with_attention(mlx);
    let q_proj = format!("{ATTENTION}q_proj");
    let four = json!({"group_size": 16, "bits": 4});
    for config in [
        four.clone(),
        json!({"group_size": 16, "bits": 4, "mode": "affine"}),
        json!({"group_size": 16, "bits": 4, q_proj.clone(): four}),
    ] {
        check(&all, &config, Form::Mlx);
    }
    for config in [
        json!({"group_size": 16, "bits": 8}),
        json!({"group_size": 32, "bits": 4}),
        json!({"group_size": 16, "bits": 4, "mode": "mxfp4"}),
        json!({"group_size": 16, "bits": 4, q_proj: {"group_size": 16, "bits": 6}}),
    ] {
        refused(
            &all,
            config,
            "MLX integers (quantization in config.json: affine ones of 4 bits",
        );
    }
}

/// Scales of integers in bfloat16, which newer files of GPTQ have.
#[test]
fn scales_may_be_bfloat16() {
    let gptq = with_attention(|module, shape| {
        let mut all = gptq(module, shape);
        let scales = (0..GROUPS * shape[0]).map(short_scale);
        all[2].1 = "BF16";
        all[2].3 = scales.flat_map(|s| s.to_le_bytes()).collect();
        all
    });
    let scratch = Scratch::new();
    write(
        &scratch.0,
        &gptq,
        json!({"quant_method": "gptq", "bits": 4}),
    );
    load(&scratch.0).unwrap();
    let opened = model::open(&scratch.0).unwrap();
    let entry = opened.find(&format!("{ATTENTION}q_proj.weight")).unwrap();
    let mut values = vec![0.0; 32];
    opened.rows_f32(entry, 0..1, &mut values).unwrap();
    // The first output, whose codes are the words 0, 32, 64 and 96 and whose zero points are the first of words 0 and 4.
    for (input, found) in values.iter().enumerate() {
        let group = ordered(input);
        let zero = (nibble(group * 4, 0) + 1) % 16;
        let steps = nibble(input / 8 * 32, input % 8) - zero;
        assert_eq!(*found, steps as f32 * short_scale(group * 32).to_f32());
    }
}

#[test]
fn other_zero_points_and_wrong_groups_are_refused() {
    let own = json!({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"});
    refused(
        &with_attention(gptq),
        own,
        "GPTQ integers ('model.layers.0.self_attn.q_proj.qweight')",
    );
    let wrong = with_attention(|module, shape| {
        let mut all = gptq(module, shape);
        all[3].3[4] = 2;
        all
    });
    let scratch = Scratch::new();
    let config = json!({"quant_method": "gptq", "bits": 4});
    write(&scratch.0, &wrong, config);
    let e = load(&scratch.0).unwrap_err();
    let words = "g_idx': input 1 is of group 2; there are 2 groups of scales";
    assert!(e.message().contains(words), "{e}");
    // Eight groups of 128 for 1,000 inputs would divide as groups of 125.
    let form = Rows {
        has_zeros: true,
        order: None,
        scale_type: "F16",
    };
    let weights = json!({"num_bits": 4, "type": "int", "group_size": 24});
    let config = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}
    });
    let scratch = Scratch::new();
    let packed = with_attention(|module, shape| form.tensors(module, shape));
    write(&scratch.0, &packed, config);
    let e = load(&scratch.0).unwrap_err();
    let words = "groups of config.json have [24]";
    assert!(e.message().contains(words), "{e}");
}
