//! 4-bit integers of GPTQ and AWQ: read with the values that codes, zero points and scales stand for, loaded, estimated and quantized.

use NVFP4::checkpoint::Encoding;
use NVFP4::format::random;
use NVFP4::model;
use NVFP4::model::footprint::weight_bytes;
use NVFP4::ops::DeviceKind;
use half::f16;
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
}

impl Form {
    fn value(self, place: Place) -> f32 {
        let Place {
            output,
            input,
            shape: [rows, cols],
        } = place;
        let in_order = input * GROUPS / cols;
        let (group, of_output, offset) = match self {
            Form::Gptq { offset, is_ordered } => {
                let group = if is_ordered { ordered(input) } else { in_order };
                (group, output % 8, offset)
            }
            Form::Awq => (in_order, [0, 4, 1, 5, 2, 6, 3, 7][output % 8], 0),
        };
        let zero = (nibble(group * rows / 8 + output / 8, of_output) + offset) % 16;
        let code = match self {
            Form::Gptq { .. } => nibble(input / 8 * rows + output, input % 8),
            Form::Awq => nibble(input * rows / 8 + output / 8, of_output),
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
}
