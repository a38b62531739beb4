//! 4-bit integers with a scale and a zero point for each group of inputs, as AutoGPTQ, AutoAWQ, compressed-tensors and MLX pack them into
//! 32-bit words; read only. A value is `(code - zero) * scale`, of MLX `code * scale + bias`. Files of the first two store the transposed
//! weight: a row of theirs is an input.

use std::ops::Range;

use half::{bf16, f16};

use crate::base::{Result, memory};
use crate::tensor::DType;

/// Codes in a word.
pub(super) const WORD: usize = 8;

/// How codes lie in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Codes: a word has eight inputs of an output. Zero points: a word has eight outputs, in order.
    Gptq,
    /// Codes and zero points: a word has eight outputs, the even ones first.
    Awq,
    /// The weight is not transposed, as in compressed-tensors and MLX. Codes: a word has eight inputs of an output. Zero points: a word has
    /// eight outputs, in order.
    Rows,
}

/// The zero point of files without.
const MIDDLE: u8 = 8;

/// The stored tensors of a weight `[outputs, inputs]`, by their index, and how they are read.
#[derive(Debug)]
pub(super) struct Int4 {
    pub(super) packing: Packing,
    /// Words: GPTQ `[inputs / 8, outputs]`, AWQ `[inputs, outputs / 8]`, rows `[outputs, inputs / 8]`.
    pub(super) codes: usize,
    /// Words `[groups, outputs / 8]`, rows `[outputs / 8, groups]`; 8 for all without them.
    pub(super) zeros: Option<usize>,
    /// `[groups, outputs]`, rows `[outputs, groups]`.
    pub(super) scales: usize,
    /// MLX's biases, in the shape and type of the scales. They replace zero points.
    pub(super) biases: Option<usize>,
    /// Type of the scales: F32, F16 or BF16.
    pub(super) scale_type: DType,
    pub(super) outputs: usize,
    /// The group of each input.
    pub(super) groups: Vec<u32>,
    /// Groups that have scales.
    pub(super) group_count: usize,
    /// Zero points are stored minus this, modulo 16.
    pub(super) zero_offset: u8,
    /// Other stored tensors that belong to it.
    pub(super) also: Vec<usize>,
}

/// The 4-bit code at `place` of a word.
fn code(word: [u8; 4], place: usize) -> u8 {
    (u32::from_le_bytes(word) >> (4 * place)) as u8 & 15
}

/// The place in AWQ's words of the output that is `index` of eight.
fn place_of_output(index: usize) -> usize {
    index / 2 + 4 * (index % 2)
}

impl Int4 {
    fn inputs(&self) -> usize {
        self.groups.len()
    }

    fn place(&self, output: usize) -> usize {
        match self.packing {
            Packing::Gptq | Packing::Rows => output % WORD,
            Packing::Awq => place_of_output(output % WORD),
        }
    }

    /// The scale in these bytes.
    fn scale(&self, bytes: &[u8]) -> f32 {
        match (self.scale_type, bytes) {
            (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (DType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        }
    }

    /// [`Int4::rows_f32`] of [`Packing::Rows`].
    fn rows_of_words(
        &self,
        rows: Range<usize>,
        read: impl Fn(usize, Range<usize>, &mut Vec<u8>) -> Result<()>,
        out: &mut [f32],
    ) -> Result<()> {
        let (inputs, groups, width) = (self.inputs(), self.group_count, self.scale_type.bytes());
        let words = rows.start / WORD..rows.end.div_ceil(WORD);
        let (mut codes, mut zeros) = (Vec::new(), Vec::new());
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        let of = |rows: &Range<usize>, bytes: usize| rows.start * bytes..rows.end * bytes;
        if let Some(stored) = self.zeros {
            read(stored, of(&words, 4 * groups), &mut zeros)?;
        }
        read(self.scales, of(&rows, width * groups), &mut scales)?;
        if let Some(stored) = self.biases {
            read(stored, of(&rows, width * groups), &mut biases)?;
        }
        read(self.codes, of(&rows, inputs / 2), &mut codes)?;
        let zeros = zeros.as_chunks::<4>().0;
        for (i, (row, values)) in rows.zip(out.chunks_exact_mut(inputs)).enumerate() {
            let codes = &codes[i * inputs / 2..][..inputs / 2];
            let float = |of: &[u8], group: usize| {
                let at = width * (i * groups + group);
                self.scale(&of[at..at + width])
            };
            let group_of_zeros = (row / WORD - words.start) * groups;
            for (input, value) in values.iter_mut().enumerate() {
                let group = self.groups[input] as usize;
                let stored = codes[input / 2] >> (4 * (input % 2)) & 15;
                let scale = float(&scales, group);
                let zero = match zeros.get(group_of_zeros + group) {
                    Some(word) => code(*word, row % WORD),
                    None => MIDDLE,
                };
                *value = match self.biases {
                    Some(_) => f32::from(stored) * scale + float(&biases, group),
                    None => f32::from(stored as i8 - zero as i8) * scale,
                };
            }
        }
        Ok(())
    }

    /// Decodes the values of `rows` to `out`, `[rows, inputs]`. `read` gives a range of bytes of a stored tensor in a buffer.
    pub(super) fn rows_f32(
        &self,
        rows: Range<usize>,
        read: impl Fn(usize, Range<usize>, &mut Vec<u8>) -> Result<()>,
        out: &mut [f32],
    ) -> Result<()> {
        if self.packing == Packing::Rows {
            return self.rows_of_words(rows, read, out);
        }
        let (inputs, outputs, n) = (self.inputs(), self.outputs, rows.len());
        let first_word = rows.start / WORD;
        let words = first_word..rows.end.div_ceil(WORD);
        let groups = self.group_count;
        let mut bytes = Vec::new();
        let mut zeros = memory::zeros::<u8>(groups * n)?;
        let mut scales = memory::zeros::<f32>(groups * n)?;
        for group in 0..groups {
            let start = group * outputs / WORD;
            if let Some(stored) = self.zeros {
                let range = 4 * (start + words.start)..4 * (start + words.end);
                read(stored, range, &mut bytes)?;
            }
            let stored = bytes.as_chunks::<4>().0;
            for (output, zero) in rows.clone().zip(&mut zeros[group * n..]) {
                let stored = code(stored[output / WORD - first_word], self.place(output));
                *zero = (stored + self.zero_offset) & 15;
            }
            let (start, width) = (group * outputs, self.scale_type.bytes());
            read(
                self.scales,
                width * (start + rows.start)..width * (start + rows.end),
                &mut bytes,
            )?;
            let stored = bytes.chunks_exact(width);
            for (stored, scale) in stored.zip(&mut scales[group * n..]) {
                *scale = self.scale(stored);
            }
        }
        let mut value = |row: usize, input: usize, code: u8| {
            let at = self.groups[input] as usize * n + row;
            out[row * inputs + input] = f32::from(code as i8 - zeros[at] as i8) * scales[at];
        };
        if self.packing == Packing::Gptq {
            for word in 0..inputs / WORD {
                let start = word * outputs;
                read(
                    self.codes,
                    4 * (start + rows.start)..4 * (start + rows.end),
                    &mut bytes,
                )?;
                for (row, stored) in bytes.as_chunks::<4>().0.iter().enumerate() {
                    (0..WORD).for_each(|i| value(row, word * WORD + i, code(*stored, i)));
                }
            }
        } else {
            for input in 0..inputs {
                let start = input * outputs / WORD;
                read(
                    self.codes,
                    4 * (start + words.start)..4 * (start + words.end),
                    &mut bytes,
                )?;
                let stored = bytes.as_chunks::<4>().0;
                for (row, output) in rows.clone().enumerate() {
                    let word = stored[output / WORD - first_word];
                    value(row, input, code(word, self.place(output)));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUTS: usize = 24;
    const INPUTS: usize = 32;
    const GROUPS: usize = 2;

    fn code_of(output: usize, input: usize) -> u32 {
        ((7 * output + 5 * input + output * input) % 16) as u32
    }

    fn zero_of(output: usize, group: usize) -> u32 {
        ((3 * output + 11 * group) % 16) as u32
    }

    fn scale_of(output: usize, group: usize) -> f32 {
        f16::from_f32(0.01 * (1 + output + 30 * group) as f32).to_f32()
    }

    /// Words of eight codes each.
    fn words(codes: impl Iterator<Item = [u32; 8]>) -> Vec<u8> {
        let word = |codes: [u32; 8]| (0..8).map(|i| codes[i] << (4 * i)).sum::<u32>();
        codes.flat_map(|codes| word(codes).to_le_bytes()).collect()
    }

    /// The outputs that AutoAWQ writes into a word, lowest bits first, as its packing code names them.
    const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    /// Words of outputs, for each of `rows` rows.
    fn of_outputs(rows: usize, order: [usize; 8], code: impl Fn(usize, usize) -> u32) -> Vec<u8> {
        let places = (0..rows).flat_map(|row| (0..OUTPUTS / 8).map(move |word| (row, word)));
        words(places.map(|(row, word)| order.map(|i| code(8 * word + i, row))))
    }

    fn check(weight: &Int4, stored: &[Vec<u8>; 3]) {
        for rows in [0..OUTPUTS, 0..1, 5..19, 23..24] {
            let mut out = vec![f32::NAN; rows.len() * INPUTS];
            let read = |tensor: usize, range: Range<usize>, to: &mut Vec<u8>| {
                to.clear();
                to.extend_from_slice(&stored[tensor][range]);
                Ok(())
            };
            weight.rows_f32(rows.clone(), read, &mut out).unwrap();
            for (output, row) in rows.zip(out.chunks(INPUTS)) {
                for (input, value) in row.iter().enumerate() {
                    let group = weight.groups[input] as usize;
                    let steps = code_of(output, input) as f32 - zero_of(output, group) as f32;
                    assert_eq!(*value, steps * scale_of(output, group), "{output} {input}");
                }
            }
        }
    }

    fn scales() -> Vec<u8> {
        let all = (0..GROUPS).flat_map(|g| (0..OUTPUTS).map(move |o| scale_of(o, g)));
        all.flat_map(|s| f16::from_f32(s).to_le_bytes()).collect()
    }

    #[test]
    fn gptq_packs_inputs_and_may_order_groups() {
        let places = (0..INPUTS / 8).flat_map(|word| (0..OUTPUTS).map(move |o| (word, o)));
        let codes =
            words(places.map(|(word, o)| std::array::from_fn(|i| code_of(o, 8 * word + i))));
        let in_order = |i: usize| (i * GROUPS / INPUTS) as u32;
        for (offset, group) in [(1, in_order as fn(usize) -> u32), (0, |i| (i % 2) as u32)] {
            let stored = |o, g| (zero_of(o, g) + 16 - offset) % 16;
            let zeros = of_outputs(GROUPS, [0, 1, 2, 3, 4, 5, 6, 7], stored);
            let weight = Int4 {
                packing: Packing::Gptq,
                codes: 0,
                zeros: Some(1),
                scales: 2,
                biases: None,
                scale_type: DType::F16,
                outputs: OUTPUTS,
                groups: (0..INPUTS).map(group).collect(),
                group_count: GROUPS,
                zero_offset: offset as u8,
                also: Vec::new(),
            };
            check(&weight, &[codes.clone(), zeros, scales()]);
        }
    }

    #[test]
    fn awq_packs_outputs_the_even_ones_first() {
        let weight = Int4 {
            packing: Packing::Awq,
            codes: 0,
            zeros: Some(1),
            scales: 2,
            biases: None,
            scale_type: DType::F16,
            outputs: OUTPUTS,
            groups: (0..INPUTS).map(|i| (i * GROUPS / INPUTS) as u32).collect(),
            group_count: GROUPS,
            zero_offset: 0,
            also: Vec::new(),
        };
        let codes = of_outputs(INPUTS, AWQ_ORDER, code_of);
        let zeros = of_outputs(GROUPS, AWQ_ORDER, zero_of);
        check(&weight, &[codes, zeros, scales()]);
    }
}
