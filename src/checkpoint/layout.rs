//! Groups stored tensors into weights by convention: `.qdata/.scale` (TorchSharp), ModelOpt, compressed-tensors, torchao, NF4 of
//! bitsandbytes and of TorchSharp, and scaled float8 and int8. Works on any named tensors, so all containers share it. An incomplete weight
//! is an error that names the missing part, never a guess.

use std::collections::HashMap;

use once_cell::sync::OnceCell;
use serde_json::Value as Json;

use super::int4::{Int4, Packing, WORD};
use super::keys::{self, Convention};
use super::method::{self, GptqForm};
use super::names;
use super::source::Source;
use super::tensors::{self, BlockScales, Mxfp4At, Nested, Nf4, Raw, Scales, Stored, StoredForm};
use super::{Encoding, Entry};
use crate::base::error::{bail, err};
use crate::base::size::round_up;
use crate::base::{Result, memory};
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle;
use crate::format::{int8, mxfp4};
use crate::tensor::DType;

/// Default rows and columns of float8 blocks, if the config does not say.
const F8_BLOCK: usize = 128;

/// Values that share a scale in the MX formats.
const MX_BLOCK: usize = mxfp4::BLOCK;

/// Logical entries in file order, and the name of the detected convention (`None` if every tensor is dense).
pub(super) struct Layout {
    pub(super) logical: Vec<(Entry, Stored)>,
    pub(super) convention: Option<&'static str>,
}

/// Groups `raws` into logical entries. With `strict`, a `.scale` can only be the partner of a `.qdata`, as in `.dat`. `config` is the
/// model's config, which gives the block sizes of float8 weights.
pub(super) fn group(
    sources: &[Source],
    raws: &[Raw],
    strict: bool,
    config: Option<&Json>,
) -> Result<Layout> {
    let mut by_key = HashMap::with_capacity(raws.len());
    for (i, raw) in raws.iter().enumerate() {
        let Some(first) = by_key.insert(raw.key.as_str(), i) else {
            continue;
        };
        let [first, second] = [raws[first].span.source, raw.span.source];
        if first == second {
            bail!(
                CorruptFile,
                "{}: the key '{}' stands twice",
                sources[second].name(),
                raw.key
            );
        }
        bail!(
            CorruptFile,
            "{}: the key '{}' stands twice, in {} too; an index would say which of them is the model's",
            sources[second].name(),
            raw.key,
            sources[first].name()
        );
    }
    Grouping {
        sources,
        raws,
        by_key,
        config,
        used: vec![false; raws.len()],
        convention: None,
    }
    .run(strict)
}

struct Grouping<'a> {
    sources: &'a [Source],
    raws: &'a [Raw],
    by_key: HashMap<&'a str, usize>,
    config: Option<&'a Json>,
    /// Tensors that already belong to an entry.
    used: Vec<bool>,
    convention: Option<&'static str>,
}

impl Grouping<'_> {
    fn run(mut self, strict: bool) -> Result<Layout> {
        let mut found: Vec<Option<(Entry, Stored)>> = Vec::with_capacity(self.raws.len());
        for i in 0..self.raws.len() {
            found.push(self.weight(i)?);
        }
        let mut logical = Vec::with_capacity(self.raws.len());
        for (i, weight) in found.into_iter().enumerate() {
            if let Some(weight) = weight {
                logical.push(weight);
            } else if !self.used[i] {
                let raw = &self.raws[i];
                if let Some(stack) = self.transposed(i) {
                    logical.push(stack);
                    continue;
                }
                if strict && let Some(base) = raw.key.strip_suffix(".scale") {
                    bail!(
                        CorruptFile,
                        "{}: there is no '{base}.qdata' for it",
                        self.place(i)
                    );
                }
                logical.push((
                    Entry {
                        name: names::logical(&raw.key),
                        shape: raw.shape.clone(),
                        encoding: raw.encoding,
                        bytes: raw.span.len() as u64,
                    },
                    Stored::Plain {
                        raw: i,
                        form: StoredForm::AS_STORED,
                    },
                ));
            }
        }
        Ok(Layout {
            logical,
            convention: self.convention,
        })
    }

    fn place(&self, i: usize) -> String {
        let raw = &self.raws[i];
        format!("{}: '{}'", self.sources[raw.span.source].name(), raw.key)
    }

    fn get(&self, key: &str) -> Option<usize> {
        self.by_key.get(key).copied()
    }

    /// The tensor `key`, which tensor `i` requires.
    fn partner(&self, i: usize, key: &str) -> Result<usize> {
        self.get(key)
            .ok_or_else(|| err!(CorruptFile, "{}: there is no '{key}' for it", self.place(i)))
    }

    /// The stored bytes of tensor `i`, which is small.
    fn bytes(&self, i: usize) -> Result<Vec<u8>> {
        let span = &self.raws[i].span;
        let mut staging = Vec::new();
        let bytes = self.sources[span.source].slice(span.range.clone(), &mut staging)?;
        Ok(bytes.to_vec())
    }

    /// The entry of a dense stack of experts of gpt-oss, whose matrices transformers stores transposed. It gets the name that the stack has
    /// where its rows are in order.
    fn transposed(&self, i: usize) -> Option<(Entry, Stored)> {
        const STACKS: [&str; 2] = [".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"];
        let raw = &self.raws[i];
        let &[count, cols, rows] = &raw.shape[..] else {
            return None;
        };
        let is_gpt_oss = self.config.is_some_and(|c| c["model_type"] == "gpt_oss");
        let is_stack = STACKS.iter().any(|stack| raw.key.ends_with(stack));
        if !is_gpt_oss || !is_stack || raw.encoding.element_bytes().is_none() {
            return None;
        }
        let entry = Entry {
            name: names::logical(&keys::weight(&raw.key)),
            shape: vec![count, rows, cols],
            encoding: raw.encoding,
            bytes: raw.span.len() as u64,
        };
        Some((entry, Stored::Transposed { raw: i }))
    }

    /// The entry with the values of tensor `i`, if that is the values tensor of a convention.
    fn weight(&mut self, i: usize) -> Result<Option<(Entry, Stored)>> {
        let key = self.raws[i].key.as_str();
        if let Some(module) = key.strip_suffix(".weight_packed")
            && let Some(shape) = self.packed_shape(i, module)?
        {
            let scales = self.partner(i, &format!("{module}.weight_scale"))?;
            let packed = &self.raws[i].shape;
            if *packed == [shape[0], shape[1] / 4] && shape[1].is_multiple_of(4) {
                return self.int8(i, module, shape, scales, true).map(Some);
            }
            if *packed == [shape[0], shape[1] / WORD]
                && shape[1].is_multiple_of(WORD)
                && shape[1] > 0
            {
                return self.packed_int4(i, module, shape, scales).map(Some);
            }
        }
        if let Some(keys) = keys::nvfp4(key) {
            return match self.is_nvfp4(i, &keys) {
                true => self.nvfp4(i, &keys).map(Some),
                false => Ok(None),
            };
        }
        if let Some(stack) = key.strip_suffix("_blocks") {
            return self.mxfp4(i, stack);
        }
        if self.raws[i].encoding == Encoding::Dense(DType::F8E4M3) {
            return self.float8(i);
        }
        if let Some(module) = key.strip_suffix(".qweight") {
            return self.int4(i, module);
        }
        let Some(module) = key.strip_suffix(".weight") else {
            return Ok(None);
        };
        if let [Some(scales), Some(biases)] =
            ["scales", "biases"].map(|part| self.get(&format!("{module}.{part}")))
        {
            return self.mlx(i, module, [scales, biases]);
        }
        if let Some(keys) = keys::nf4(module, |key| self.get(key).is_some()) {
            return match &keys.extra {
                Some(extra) => self.bitsandbytes(i, &keys, extra),
                None => self.torchsharp(i, &keys),
            }
            .map(Some);
        }
        if let Some(scales) = self.get(&format!("{module}.weight_scale_inv")) {
            bail!(
                Unsupported,
                "{}: it scales '{key}', which is {}; only float8 weights, F8_E4M3, are scaled block by block",
                self.place(scales),
                self.raws[i].encoding
            );
        }
        let modelopt = keys::modelopt(module);
        match self.raws[i].encoding {
            Encoding::Dense(DType::I8) => {
                let Some(scales) = self.get(&modelopt.scales) else {
                    return Ok(None);
                };
                self.check_inputs(i, module)?;
                let shape = self.raws[i].shape.clone();
                self.int8(i, module, shape, scales, false).map(Some)
            }
            Encoding::Dense(DType::U8) if self.is_nvfp4(i, &modelopt) => {
                self.check_is_whole(i, module)?;
                self.nvfp4(i, &modelopt).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Refuses weights with tensors that change the input or shift the values.
    fn check_is_whole(&self, i: usize, module: &str) -> Result<()> {
        self.check_inputs(i, module)?;
        self.refuse_beside(i, module, "weight_zero_point", "weights with zero points")
    }

    /// Refuses weights with tensors that change the input.
    fn check_inputs(&self, i: usize, module: &str) -> Result<()> {
        let what = "weights that need their inputs changed first";
        self.refuse_beside(i, module, "pre_quant_scale", what)?;
        self.refuse_beside(i, module, "svdquant_lora_a", what)
    }

    fn refuse_beside(&self, i: usize, module: &str, other: &str, what: &str) -> Result<()> {
        match self.get(&format!("{module}.{other}")) {
            Some(other) => bail!(
                Unsupported,
                "{}: {what} are not supported, as those of '{}'; export the model as plain NVFP4",
                self.place(other),
                self.raws[i].key
            ),
            None => Ok(()),
        }
    }

    /// Whether tensor `codes` belongs to an NVFP4 weight, which may be incomplete. Other formats use the same names: integers of
    /// compressed-tensors and torchao, and MXFP4, which has no global scale and one E8M0 scale per 32 values.
    fn is_nvfp4(&self, codes: usize, keys: &keys::Nvfp4) -> bool {
        let encoding = self.raws[codes].encoding;
        let scales = self.get(&keys.scales).map(|i| &self.raws[i]);
        let has_global = (keys.global.iter()).any(|global| self.get(&global.key).is_some());
        match keys.convention {
            Convention::CompressedTensors => {
                encoding.element_bytes() == Some(1)
                    && (has_global || scales.is_none_or(|s| !self.are_of_mxfp4(codes, s)))
            }
            Convention::TorchAo => {
                encoding == Encoding::Dense(DType::U8)
                    && scales.is_none_or(|s| {
                        s.encoding.element_bytes() == Some(1)
                            && (has_global || !self.are_of_mxfp4(codes, s))
                    })
            }
            Convention::ModelOpt => {
                has_global || scales.is_some_and(|s| s.encoding == Encoding::Dense(DType::F8E4M3))
            }
            Convention::Dat
            | Convention::BitsAndBytes
            | Convention::Mxfp4
            | Convention::Gptq
            | Convention::Awq
            | Convention::Mlx
            | Convention::TorchSharp => true,
        }
    }

    /// Whether `scales` has one E8M0 scale per 32 values of the 4-bit `codes`.
    fn are_of_mxfp4(&self, codes: usize, scales: &Raw) -> bool {
        let packed = self.raws[codes].shape.last().copied().unwrap_or(0);
        let blocks = scales.shape.last().copied().unwrap_or(0);
        scales.encoding == Encoding::Dense(DType::U8) && blocks == packed.div_ceil(MX_BLOCK / 2)
    }

    fn nvfp4(&mut self, codes: usize, keys: &keys::Nvfp4) -> Result<(Entry, Stored)> {
        let scales = self.partner(codes, &keys.scales)?;
        let (mut global_raw, mut global) = (None, 1.0);
        if let Some(stored) = &keys.global {
            global_raw = match stored.required {
                true => Some(self.partner(codes, &stored.key)?),
                false => self.get(&stored.key),
            };
            global = match global_raw {
                None => 1.0,
                Some(i) if stored.divides => self.reciprocal(i)?,
                Some(i) => self.global_scale(i)?,
            };
        }
        let (form, shape) = nvfp4_form(
            keys.convention,
            self.raws[codes].described(),
            self.raws[scales].described(),
        )
        .map_err(|faults| match faults.into_iter().next() {
            Some(Fault::Codes(text)) => err!(CorruptFile, "{}: {text}", self.place(codes)),
            Some(Fault::Scales(text)) => err!(CorruptFile, "{}: {text}", self.place(scales)),
            None => err!(Internal, "codes and scales are refused without a reason"),
        })?;
        let also: Vec<usize> = global_raw.into_iter().collect();
        let mut bytes = 0;
        for &i in [codes, scales].iter().chain(&also) {
            self.used[i] = true;
            bytes += self.raws[i].span.len() as u64;
        }
        self.convention.get_or_insert(keys.convention.name());
        Ok((
            Entry {
                name: names::logical(&keys::weight(&keys.module)),
                shape,
                encoding: Encoding::Nvfp4,
                bytes,
            },
            Stored::Nvfp4 {
                codes,
                scales,
                form,
                global,
                also,
            },
        ))
    }

    /// The entry of a stack of experts in MXFP4 of gpt-oss, with the name that the stack has where its rows are in order. `None` for a
    /// tensor of another kind with such a name.
    fn mxfp4(&mut self, codes: usize, stack: &str) -> Result<Option<(Entry, Stored)>> {
        let declared = self.config.and_then(method::declared);
        let is_declared = declared.is_some_and(|d| d["quant_method"] == "mxfp4");
        let key = format!("{stack}_scales");
        let scales = match self.get(&key) {
            None if !is_declared => return Ok(None),
            None => self.partner(codes, &key)?,
            Some(scales) => scales,
        };
        for (i, what) in [(codes, "codes"), (scales, "scales")] {
            let encoding = self.raws[i].encoding;
            if encoding != Encoding::Dense(DType::U8) {
                if !is_declared {
                    return Ok(None);
                }
                bail!(
                    CorruptFile,
                    "{}: {what} of MXFP4 are U8, not {encoding}",
                    self.place(i)
                );
            }
        }
        let (shape, of_scales) = (&self.raws[codes].shape[..], &self.raws[scales].shape[..]);
        const BYTES: usize = MX_BLOCK / 2;
        let &[count, rows, blocks, BYTES] = shape else {
            bail!(
                CorruptFile,
                "{}: its shape is {shape:?}; MXFP4 codes of a stack are [experts, rows, K / {MX_BLOCK}, {BYTES}]",
                self.place(codes)
            );
        };
        if of_scales != [count, rows, blocks] {
            bail!(
                CorruptFile,
                "{}: its shape is {of_scales:?}, but codes of shape {shape:?} take scales of shape {:?}",
                self.place(scales),
                [count, rows, blocks]
            );
        }
        let mut bytes = 0;
        for i in [codes, scales] {
            self.used[i] = true;
            bytes += self.raws[i].span.len() as u64;
        }
        self.convention.get_or_insert(Convention::Mxfp4.name());
        let entry = Entry {
            name: names::logical(&keys::weight(stack)),
            shape: vec![count, rows, blocks * MX_BLOCK],
            encoding: Encoding::Mxfp4,
            bytes,
        };
        let stored = Stored::Mxfp4 {
            at: Mxfp4At::Apart { codes, scales },
            globals: OnceCell::new(),
        };
        Ok(Some((entry, stored)))
    }

    /// The single value of a global scale tensor.
    fn scalar(&self, i: usize) -> Result<f32> {
        let raw = &self.raws[i];
        if raw.encoding != Encoding::Dense(DType::F32) {
            bail!(
                CorruptFile,
                "{}: a global scale is F32, not {}",
                self.place(i),
                raw.encoding
            );
        }
        if raw.elements() != 1 {
            bail!(
                Unsupported,
                "{}: its shape is {:?}; only one global scale per tensor is supported",
                self.place(i),
                raw.shape
            );
        }
        let values = f32s(&self.bytes(i)?);
        Ok(values[0])
    }

    fn global_scale(&self, i: usize) -> Result<f32> {
        let value = self.scalar(i)?;
        self.check_global_scale(i, value, "")?;
        Ok(value)
    }

    /// A global scale that the file stores as its reciprocal. Both must be valid global scales.
    fn reciprocal(&self, i: usize) -> Result<f32> {
        let divisor = self.scalar(i)?;
        self.check_global_scale(i, divisor, "as a divisor: ")?;
        let global = 1.0 / divisor;
        let what = format!("the reciprocal of the divisor {divisor:?}: ");
        self.check_global_scale(i, global, &what)?;
        Ok(global)
    }

    fn check_global_scale(&self, i: usize, value: f32, what: &str) -> Result<()> {
        nvfp4::check_global_scale(value)
            .map_err(|e| err!(CorruptFile, "{}: {what}{}", self.place(i), e.message()))
    }

    /// The entry of a float8 tensor, with its scales if present: `weight_scale` of compressed-tensors and ModelOpt, `weight_scale_inv` of
    /// DeepSeek, which multiplies despite its name.
    fn float8(&mut self, i: usize) -> Result<Option<(Entry, Stored)>> {
        let key = self.raws[i].key.as_str();
        let scales = ["_scale_inv", "_scale"]
            .iter()
            .find_map(|suffix| self.get(&format!("{key}{suffix}")));
        let Some(scales) = scales else {
            if key.ends_with(".weight")
                && self.raws[i].shape.len() > 1
                && self.config.and_then(method::declared).is_some()
            {
                bail!(
                    CorruptFile,
                    "{}: there is no '{key}_scale' and no '{key}_scale_inv' for it; the float8 weights of a model with a quantization_config have scales",
                    self.place(i)
                );
            }
            return Ok(None);
        };
        self.check_is_whole(i, key.strip_suffix(".weight").unwrap_or(key))?;
        let block_scales = self.f8_blocks(i, scales)?;
        self.scaled_f8(i, scales, block_scales).map(Some)
    }

    /// Scales of a float8 tensor: one, one per matrix, one per row, or one per block of its matrices.
    fn f8_blocks(&self, i: usize, scales: usize) -> Result<BlockScales> {
        let raw = &self.raws[i];
        let (all_rows, cols) = raw.matrix();
        let (matrix_rows, leading) = match &raw.shape[..] {
            [leading @ .., rows, _] => (*rows, leading),
            _ => (all_rows, &[][..]),
        };
        let block_scales = |matrix_rows, block| {
            Ok(BlockScales {
                values: self.f8_scales(scales)?,
                matrix_rows,
                block,
            })
        };
        let shape = &self.raws[scales].shape;
        if self.raws[scales].elements() == 1 {
            return block_scales(all_rows, [all_rows, cols]);
        }
        // Scales per row or matrix may have trailing dimensions of 1, and ModelOpt stores block scales as [rows, 1, columns, 1].
        let ends = shape.iter().rev().take_while(|&&n| n == 1).count();
        let trimmed = &shape[..shape.len() - ends];
        if trimmed == &raw.shape[..raw.shape.len().saturating_sub(1)] {
            return block_scales(all_rows, [1, cols]);
        }
        if !leading.is_empty() && trimmed == leading {
            return block_scales(matrix_rows, [matrix_rows, cols]);
        }
        let blocks = match shape[..] {
            [rows, 1, cols, 1] if leading.is_empty() => vec![rows, cols],
            _ => shape.clone(),
        };
        let sizes = self.f8_block_sizes(scales)?;
        let expected = |[rows, block_cols]: [usize; 2]| {
            let of_matrix = [matrix_rows.div_ceil(rows), cols.div_ceil(block_cols)];
            [leading, &of_matrix].concat()
        };
        let fitting: Vec<[usize; 2]> = sizes
            .iter()
            .copied()
            .filter(|&size| expected(size) == blocks)
            .collect();
        match fitting[..] {
            [size] => block_scales(matrix_rows, size),
            [] => bail!(
                CorruptFile,
                "{}: its shape is {shape:?}, but '{}' of shape {:?} in blocks of {} x {} takes scales of shape {:?}, or one per row, or one",
                self.place(scales),
                raw.key,
                raw.shape,
                sizes[0][0],
                sizes[0][1],
                expected(sizes[0])
            ),
            [first, second, ..] => bail!(
                Unsupported,
                "{}: its shape {shape:?} fits blocks of {} x {} and of {} x {}, which the config.json both names",
                self.place(scales),
                first[0],
                first[1],
                second[0],
                second[1]
            ),
        }
    }

    /// Rows and columns of float8 blocks by the config; several if its groups differ.
    fn f8_block_sizes(&self, scales: usize) -> Result<Vec<[usize; 2]>> {
        let config = self.config.and_then(method::declared);
        let sizes = config.map(method::block_sizes).transpose()?;
        Ok(match sizes {
            Some(sizes) if !sizes.is_empty() => sizes,
            _ if self.raws[scales].encoding == Encoding::Dense(DType::U8) => vec![[1, MX_BLOCK]],
            _ => vec![[F8_BLOCK; 2]],
        })
    }

    fn f8_scales(&self, scales: usize) -> Result<Vec<f32>> {
        let raw = &self.raws[scales];
        let mut values = memory::zeros(raw.elements())?;
        match raw.encoding {
            Encoding::Dense(DType::F32 | DType::BF16 | DType::F16) => {
                tensors::decode(raw.encoding, &self.bytes(scales)?, &mut values);
            }
            // Exponents of MXFP8, E8M0: powers of 2 from -127 to 127, and NaN.
            Encoding::Dense(DType::U8) => {
                for (value, exponent) in values.iter_mut().zip(self.bytes(scales)?) {
                    *value = match exponent {
                        u8::MAX => f32::NAN,
                        exponent => 2f32.powi(i32::from(exponent) - 127),
                    };
                }
            }
            other => bail!(
                Unsupported,
                "{}: scales of float8 weights are F32, BF16, F16 or, of MXFP8, U8, not {other}",
                self.place(scales)
            ),
        }
        Ok(values)
    }

    fn scaled_f8(
        &mut self,
        i: usize,
        scales: usize,
        block_scales: BlockScales,
    ) -> Result<(Entry, Stored)> {
        let (raw, scale_raw) = (&self.raws[i], &self.raws[scales]);
        self.used[i] = true;
        self.used[scales] = true;
        Ok((
            Entry {
                name: names::logical(&raw.key),
                shape: raw.shape.clone(),
                encoding: Encoding::Dense(DType::F8E4M3),
                bytes: (raw.span.len() + scale_raw.span.len()) as u64,
            },
            Stored::ScaledF8 {
                raw: i,
                scales,
                block_scales,
            },
        ))
    }

    /// int8 values with one scale or one per row, of ModelOpt, and of compressed-tensors, which stores a column of scales.
    fn int8(
        &mut self,
        codes: usize,
        module: &str,
        shape: Vec<usize>,
        scales: usize,
        is_biased: bool,
    ) -> Result<(Entry, Stored)> {
        let Some((_, leading)) = shape.split_last().filter(|(_, l)| !l.is_empty()) else {
            bail!(
                CorruptFile,
                "{}: int8 weights have at least two dimensions, not shape {shape:?}",
                self.place(codes)
            );
        };
        let rows = leading.iter().product();
        let given = &self.raws[scales].shape[..];
        let is_column = given.strip_suffix(&[1]) == Some(leading);
        if given != leading && !is_column && self.raws[scales].elements() != 1 {
            bail!(
                Unsupported,
                "{}: its shape is {given:?}; int8 weights of shape {shape:?} take one scale, or one per row",
                self.place(scales)
            );
        }
        let row_scales = self.int8_scales(scales, rows)?;
        let mut also = Vec::new();
        if let Some(zero_points) = self.get(&format!("{module}.weight_zero_point")) {
            if self.bytes(zero_points)?.iter().any(|&byte| byte != 0) {
                bail!(
                    Unsupported,
                    "{}: int8 weights with zero points are not supported; symmetric ones are",
                    self.place(zero_points)
                );
            }
            also.push(zero_points);
        }
        let shapes = self.get(&format!("{module}.weight_shape"));
        also.extend(shapes.filter(|_| is_biased));
        let mut bytes = 0;
        for &used in [codes, scales].iter().chain(&also) {
            self.used[used] = true;
            bytes += self.raws[used].span.len() as u64;
        }
        let convention = match is_column {
            true => Convention::CompressedTensors,
            false => Convention::ModelOpt,
        };
        self.convention.get_or_insert(convention.name());
        Ok((
            Entry {
                name: names::logical(&keys::weight(module)),
                shape,
                encoding: Encoding::Int8,
                bytes,
            },
            Stored::Int8 {
                codes,
                scales,
                row_scales,
                is_biased,
                also,
            },
        ))
    }

    /// Shape of integers that compressed-tensors packs into int32 words. `None` for other codes.
    fn packed_shape(&self, codes: usize, module: &str) -> Result<Option<Vec<usize>>> {
        let Some(stored) = self.get(&format!("{module}.weight_shape")) else {
            return Ok(None);
        };
        let described = |i: usize| (self.raws[i].encoding, self.raws[i].elements());
        if described(codes).0 != Encoding::Dense(DType::I32)
            || described(stored) != (Encoding::Dense(DType::I64), 2)
        {
            return Ok(None);
        }
        let bytes = self.bytes(stored)?;
        let sizes = bytes.as_chunks::<8>().0.iter();
        let sizes = sizes.map(|size| usize::try_from(i64::from_le_bytes(*size)).unwrap_or(0));
        Ok(Some(sizes.collect()))
    }

    /// 4-bit integers of compressed-tensors, each stored plus 8.
    fn packed_int4(
        &mut self,
        codes: usize,
        module: &str,
        shape: Vec<usize>,
        scales: usize,
    ) -> Result<(Entry, Stored)> {
        let (outputs, inputs) = (shape[0], shape[1]);
        let (Some(scale_type), &[rows, count]) = (
            scale_type(self.raws[scales].encoding),
            &self.raws[scales].shape[..],
        ) else {
            bail!(
                Unsupported,
                "{}: its type is {} and its shape {:?}; 4-bit integers take F32, F16 or BF16 of outputs and groups",
                self.place(scales),
                self.raws[scales].encoding,
                self.raws[scales].shape
            );
        };
        if rows != outputs || count == 0 {
            bail!(
                CorruptFile,
                "{}: its shape is [{rows}, {count}]; weights of shape {shape:?} take [{outputs}, groups]",
                self.place(scales)
            );
        }
        let mut also: Vec<usize> = self
            .get(&format!("{module}.weight_shape"))
            .into_iter()
            .collect();
        let mut zeros = None;
        if let Some(stored) = self.get(&format!("{module}.weight_zero_point")) {
            // Symmetric weights may have zero points of 0 that are not packed.
            if self.raws[stored].encoding == Encoding::Dense(DType::I32) {
                self.expect(
                    stored,
                    Encoding::Dense(DType::I32),
                    outputs.div_ceil(WORD) * count,
                )?;
                zeros = Some(stored);
            } else if self.raws[stored].elements() != outputs * count
                || self.bytes(stored)?.iter().any(|&byte| byte != 0)
            {
                bail!(
                    Unsupported,
                    "{}: zero points of 4-bit integers are read as packed I32, not as {} of shape {:?} unless all {} are 0",
                    self.place(stored),
                    self.raws[stored].encoding,
                    self.raws[stored].shape,
                    outputs * count
                );
            } else {
                also.push(stored);
            }
        }
        let order = self.get(&format!("{module}.weight_g_idx"));
        also.extend(order);
        // Without an order, all of its groups are -1.
        let is_ordered = match order {
            Some(order) => {
                self.expect(order, Encoding::Dense(DType::I32), inputs)?;
                self.bytes(order)?.iter().any(|&byte| byte != u8::MAX)
            }
            None => false,
        };
        let sizes = self.config.map_or_else(Vec::new, method::group_sizes);
        if count > 1 && !sizes.is_empty() && sizes.iter().all(|size| size * count != inputs) {
            bail!(
                Unsupported,
                "{}: {count} groups of {inputs} inputs, and groups of config.json have {sizes:?}; a last group that is not whole is not read",
                self.place(scales)
            );
        }
        let groups = match order.filter(|_| is_ordered) {
            Some(order) => self.group_of_each(order, inputs, count)?,
            None => self.groups_in_order(scales, inputs, count)?,
        };
        self.convention
            .get_or_insert(Convention::CompressedTensors.name());
        let weight = Int4 {
            packing: Packing::Rows,
            codes,
            zeros,
            scales,
            biases: None,
            scale_type,
            outputs,
            groups,
            group_count: count,
            zero_offset: 0,
            also,
        };
        Ok(self.int4_entry(module, inputs, weight))
    }

    /// 4-bit integers of MLX. `None` for integers of other sizes.
    fn mlx(
        &mut self,
        codes: usize,
        module: &str,
        [scales, biases]: [usize; 2],
    ) -> Result<Option<(Entry, Stored)>> {
        let Some(group_size) = self.config.and_then(|config| method::mlx(config, module)) else {
            return Ok(None);
        };
        let described = [codes, scales, biases].map(|i| self.raws[i].described());
        let [
            (Encoding::Dense(DType::I32), &[outputs, words]),
            (scale_encoding, &[rows, count]),
            (bias_encoding, bias_shape),
        ] = described
        else {
            return Ok(None);
        };
        let inputs = words.saturating_mul(WORD);
        let is_whole = rows == outputs && count.checked_mul(group_size) == Some(inputs);
        let (Some(scale_type), true) = (scale_type(scale_encoding), is_whole) else {
            return Ok(None);
        };
        if scale_encoding != bias_encoding || *bias_shape != [rows, count] {
            return Ok(None);
        }
        let groups = self.groups_in_order(scales, inputs, count)?;
        self.convention.get_or_insert(Convention::Mlx.name());
        let weight = Int4 {
            packing: Packing::Rows,
            codes,
            zeros: None,
            scales,
            biases: Some(biases),
            scale_type,
            outputs,
            groups,
            group_count: count,
            zero_offset: 0,
            also: Vec::new(),
        };
        Ok(Some(self.int4_entry(module, inputs, weight)))
    }

    /// The groups of inputs in their order.
    fn groups_in_order(&self, scales: usize, inputs: usize, groups: usize) -> Result<Vec<u32>> {
        if !inputs.is_multiple_of(groups) {
            bail!(
                CorruptFile,
                "{}: {groups} groups of scales for {inputs} inputs, which they do not divide",
                self.place(scales)
            );
        }
        let share = inputs / groups;
        Ok((0..inputs).map(|input| (input / share) as u32).collect())
    }

    /// The entry of 4-bit integers, whose tensors are used then.
    fn int4_entry(&mut self, module: &str, inputs: usize, weight: Int4) -> (Entry, Stored) {
        let parts = [weight.codes, weight.scales].into_iter();
        let mut bytes = 0;
        let others = weight.zeros.into_iter().chain(weight.biases);
        for used in parts.chain(others).chain(weight.also.iter().copied()) {
            self.used[used] = true;
            bytes += self.raws[used].span.len() as u64;
        }
        let entry = Entry {
            name: names::logical(&keys::weight(module)),
            shape: vec![weight.outputs, inputs],
            encoding: Encoding::Int4,
            bytes,
        };
        (entry, Stored::Int4(Box::new(weight)))
    }

    /// The scale of each of `rows` rows.
    fn int8_scales(&self, scales: usize, rows: usize) -> Result<Vec<f32>> {
        let raw = &self.raws[scales];
        let Encoding::Dense(DType::F32 | DType::BF16 | DType::F16) = raw.encoding else {
            bail!(
                Unsupported,
                "{}: scales of int8 weights are F32, BF16 or F16, not {}",
                self.place(scales),
                raw.encoding
            );
        };
        let mut values = memory::zeros(raw.elements())?;
        tensors::decode(raw.encoding, &self.bytes(scales)?, &mut values);
        int8::check_row_scales(&values, 0)
            .map_err(|e| err!(CorruptFile, "{}: {}", self.place(scales), e.message()))?;
        if let [one] = values[..]
            && rows > 1
        {
            values = memory::zeros(rows)?;
            values.fill(one);
        }
        Ok(values)
    }

    /// 4-bit integers of GPTQ or AWQ, which the shapes tell apart. `None` for integers of other sizes and layouts, which are not read.
    fn int4(&mut self, codes: usize, module: &str) -> Result<Option<(Entry, Stored)>> {
        let part = |name: &str| self.get(&format!("{module}.{name}"));
        let (Some(zeros), Some(scales)) = (part("qzeros"), part("scales")) else {
            return Ok(None);
        };
        let described = [codes, zeros, scales].map(|i| self.raws[i].described());
        let [
            (Encoding::Dense(DType::I32), &[high, wide]),
            (Encoding::Dense(DType::I32), &[groups, words]),
            (scale_encoding, &[scale_rows, outputs]),
        ] = described
        else {
            return Ok(None);
        };
        let Some(scale_type) = scale_type(scale_encoding) else {
            return Ok(None);
        };
        if groups != scale_rows || words.checked_mul(WORD) != Some(outputs) {
            return Ok(None);
        }
        let is_gptq = wide == outputs;
        let (packing, inputs) = match wide {
            _ if is_gptq => (Packing::Gptq, high.saturating_mul(WORD)),
            _ if wide == words => (Packing::Awq, high),
            _ => return Ok(None),
        };
        let form = match is_gptq {
            false => GptqForm {
                zero_offset: 0,
                is_ordered: false,
            },
            true => match method::gptq(self.config.and_then(method::declared)) {
                Some(form) => form,
                None => return Ok(None),
            },
        };
        let order = part("g_idx").filter(|_| is_gptq);
        let group_count = groups;
        let groups = match order {
            Some(order) if form.is_ordered => self.group_of_each(order, inputs, groups)?,
            _ => self.groups_in_order(scales, inputs, groups)?,
        };
        let convention = match is_gptq {
            true => Convention::Gptq,
            false => Convention::Awq,
        };
        self.convention.get_or_insert(convention.name());
        let weight = Int4 {
            packing,
            codes,
            zeros: Some(zeros),
            scales,
            biases: None,
            scale_type,
            outputs,
            groups,
            group_count,
            zero_offset: form.zero_offset,
            also: order.into_iter().collect(),
        };
        Ok(Some(self.int4_entry(module, inputs, weight)))
    }

    /// The group of each input, as `g_idx` names it.
    fn group_of_each(&self, order: usize, inputs: usize, groups: usize) -> Result<Vec<u32>> {
        self.expect(order, Encoding::Dense(DType::I32), inputs)?;
        let bytes = self.bytes(order)?;
        let each = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| i32::from_le_bytes(*b));
        let checked = each
            .enumerate()
            .map(|(input, group)| match u32::try_from(group) {
                Ok(group) if (group as usize) < groups => Ok(group),
                _ => bail!(
                    CorruptFile,
                    "{}: input {input} is of group {group}; there are {groups} groups of scales",
                    self.place(order)
                ),
            });
        checked.collect()
    }

    /// NF4 with its shape and block size in JSON beside it.
    fn bitsandbytes(
        &mut self,
        i: usize,
        keys: &keys::Nf4,
        extra: &keys::BitsAndBytes,
    ) -> Result<(Entry, Stored)> {
        let absmax = self.partner(i, &keys.absmax)?;
        let quant_map = self.partner(i, &keys.quant_map)?;
        if let Some(fp4) = self.get(&extra.fp4_state) {
            bail!(
                Unsupported,
                "{}: the FP4 type of bitsandbytes is not supported; NF4 is",
                self.place(fp4)
            );
        }
        let state_raw = self.partner(i, &extra.state)?;
        let state_bytes = self.raws[state_raw].span.len();
        if state_bytes > MAX_STATE {
            bail!(
                CorruptFile,
                "{}: it takes {state_bytes} bytes; a quant_state takes at most {MAX_STATE}",
                self.place(state_raw)
            );
        }
        let state: QuantState = serde_json::from_slice(&self.bytes(state_raw)?)
            .map_err(|e| err!(CorruptFile, "{}: {e}", self.place(state_raw)))?;
        let elements = state
            .shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .filter(|&n| n > 0 && n.div_ceil(2) == self.raws[i].span.len())
            .ok_or_else(|| {
                err!(
                    CorruptFile,
                    "{}: {} bytes of 4-bit codes do not hold shape {:?}",
                    self.place(i),
                    self.raws[i].span.len(),
                    state.shape
                )
            })?;
        if state.blocksize == 0 {
            bail!(CorruptFile, "{}: blocksize is 0", self.place(state_raw));
        }
        let table = self.table(quant_map)?;
        let blocks = elements.div_ceil(state.blocksize);
        let mut also = vec![quant_map, state_raw];
        let nested_absmax = self.get(&extra.nested_absmax);
        let nested = match nested_absmax {
            None => {
                self.expect(absmax, Encoding::Dense(DType::F32), blocks)?;
                None
            }
            Some(nested_absmax) => {
                let nested_map = self.partner(i, &extra.nested_quant_map)?;
                let (Some(block), Some(offset)) = (state.nested_blocksize, state.nested_offset)
                else {
                    bail!(
                        CorruptFile,
                        "{}: it lacks nested_blocksize or nested_offset",
                        self.place(state_raw)
                    );
                };
                if block == 0 {
                    bail!(
                        CorruptFile,
                        "{}: nested_blocksize is 0",
                        self.place(state_raw)
                    );
                }
                self.expect(absmax, Encoding::Dense(DType::U8), blocks)?;
                self.expect(
                    nested_absmax,
                    Encoding::Dense(DType::F32),
                    blocks.div_ceil(block),
                )?;
                also.extend([nested_absmax, nested_map]);
                Some(Nested {
                    absmax: f32s(&self.bytes(nested_absmax)?),
                    table: Box::new(self.table(nested_map)?),
                    block,
                    offset,
                })
            }
        };
        let nf4 = Nf4 {
            codes: i,
            absmax,
            block: state.blocksize,
            table,
            nested,
            also,
        };
        Ok(self.nf4(keys, state.shape, nf4))
    }

    /// NF4 whose codes alone give the shape, and whose number of scales gives the block size.
    fn torchsharp(&mut self, i: usize, keys: &keys::Nf4) -> Result<(Entry, Stored)> {
        let absmax = self.partner(i, &keys.absmax)?;
        let quant_map = self.partner(i, &keys.quant_map)?;
        let raw = &self.raws[i];
        let &[rows, packed] = raw.shape.as_slice() else {
            bail!(
                CorruptFile,
                "{}: codes of shape {:?}; NF4 codes without a quant_state are [N, K / 2]",
                self.place(i),
                raw.shape
            );
        };
        if raw.encoding != Encoding::Dense(DType::U8) {
            bail!(
                CorruptFile,
                "{}: packed 4-bit codes are bytes, not {}",
                self.place(i),
                raw.encoding
            );
        }
        // Shapes have been checked to fit in memory, so doubling cannot overflow 64 bits.
        let elements = 2 * rows * packed;
        let scales = self.raws[absmax].elements();
        let Some(block) = nf4_block(elements, scales) else {
            bail!(
                CorruptFile,
                "{}: {scales} scales for {elements} values; they do not divide into blocks",
                self.place(absmax)
            );
        };
        self.expect(
            absmax,
            Encoding::Dense(DType::F32),
            elements.div_ceil(block),
        )?;
        let nf4 = Nf4 {
            codes: i,
            absmax,
            block,
            table: self.table(quant_map)?,
            nested: None,
            also: vec![quant_map],
        };
        Ok(self.nf4(keys, vec![rows, 2 * packed], nf4))
    }

    /// The entry of an NF4 weight; marks its tensors as used.
    fn nf4(&mut self, keys: &keys::Nf4, shape: Vec<usize>, nf4: Nf4) -> (Entry, Stored) {
        let mut bytes = 0;
        for &used in [nf4.codes, nf4.absmax].iter().chain(&nf4.also) {
            self.used[used] = true;
            bytes += self.raws[used].span.len() as u64;
        }
        self.convention.get_or_insert(keys.convention.name());
        let entry = Entry {
            name: names::logical(&keys::weight(&keys.module)),
            shape,
            encoding: Encoding::Nf4,
            bytes,
        };
        (entry, Stored::Nf4(Box::new(nf4)))
    }

    fn expect(&self, i: usize, encoding: Encoding, elements: usize) -> Result<()> {
        let raw = &self.raws[i];
        if raw.encoding != encoding || raw.elements() != elements {
            bail!(
                CorruptFile,
                "{}: it is {} of shape {:?}, where {elements} elements of {encoding} are needed",
                self.place(i),
                raw.encoding,
                raw.shape
            );
        }
        Ok(())
    }

    fn table<const N: usize>(&self, i: usize) -> Result<[f32; N]> {
        self.expect(i, Encoding::Dense(DType::F32), N)?;
        let mut table = [0.0; N];
        table.copy_from_slice(&f32s(&self.bytes(i)?));
        Ok(table)
    }
}

/// A fault of a weight's tensors, and the tensor that has it.
pub(super) enum Fault {
    Codes(String),
    Scales(String),
}

/// Layout of an NVFP4 weight's scales, and the logical shape of the weight, from the stored encodings and shapes.
pub(super) fn nvfp4_form(
    convention: Convention,
    codes: (Encoding, &[usize]),
    scales: (Encoding, &[usize]),
) -> std::result::Result<(Scales, Vec<usize>), Vec<Fault>> {
    let is_bytes = |encoding: Encoding| encoding.element_bytes() == Some(1);
    let mut faults = Vec::new();
    if !is_bytes(codes.0) {
        let text = format!("packed 4-bit codes are bytes, not {}", codes.0);
        faults.push(Fault::Codes(text));
    }
    let Some((&packed, leading)) = codes.1.split_last().filter(|(_, l)| !l.is_empty()) else {
        faults.push(Fault::Codes(format!(
            "packed 4-bit codes have at least two dimensions, not shape {:?}",
            codes.1
        )));
        return Err(faults);
    };
    // Shapes have been checked to fit in memory, so doubling cannot overflow 64 bits.
    let cols = packed * 2;
    if cols % BLOCK != 0 {
        let text = format!("K = {cols} is not a multiple of {BLOCK}");
        faults.push(Fault::Codes(text));
        return Err(faults);
    }
    let rows: usize = leading.iter().product();
    let blocks = cols / BLOCK;
    let linear: Vec<usize> = leading.iter().copied().chain([blocks]).collect();
    let tiled = [round_up(rows, 128) / 4, round_up(blocks, 4) * 4];
    let form = if scales.1 == linear {
        match scales.0 {
            Encoding::Dense(DType::F16) if convention == Convention::Dat => Scales::F16,
            Encoding::Dense(DType::F32) if convention == Convention::Dat => Scales::F32,
            _ => Scales::Linear,
        }
    } else if convention == Convention::TorchAo
        && scales.1 == tiled
        && swizzle::len(rows, blocks).is_ok_and(|len| len == scales.1.iter().product::<usize>())
    {
        Scales::Swizzled
    } else {
        faults.push(Fault::Scales(format!(
            "its shape is {:?}, but codes of shape {:?} take scales of shape {linear:?}",
            scales.1, codes.1
        )));
        Scales::Linear
    };
    if matches!(form, Scales::Linear | Scales::Swizzled) && !is_bytes(scales.0) {
        let text = format!("block scales are e4m3 bytes, not {}", scales.0);
        faults.push(Fault::Scales(text));
    }
    match faults.is_empty() {
        true => Ok((form, leading.iter().copied().chain([cols]).collect())),
        false => Err(faults),
    }
}

/// Block sizes of bitsandbytes.
const NF4_BLOCKS: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Block size of `values` NF4 values with `scales` scales.
pub(super) fn nf4_block(values: usize, scales: usize) -> Option<usize> {
    match scales {
        0 => None,
        // A single block may have any size that holds all values.
        1 => Some(values.next_power_of_two().max(NF4_BLOCKS[1])),
        _ => NF4_BLOCKS
            .into_iter()
            .find(|&block| values.div_ceil(block) == scales)
            .or_else(|| values.is_multiple_of(scales).then(|| values / scales))
            .filter(|&block| block > 0),
    }
}

/// More bytes than the JSON beside any NF4 weight, which is some hundred bytes.
const MAX_STATE: usize = 1 << 20;

/// JSON that bitsandbytes stores beside an NF4 weight.
#[derive(serde::Deserialize)]
struct QuantState {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// The type of scales of integers, if it is one of those that are read.
fn scale_type(encoding: Encoding) -> Option<DType> {
    match encoding {
        Encoding::Dense(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Some(dtype),
        _ => None,
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_size_is_told_by_the_number_of_scales() {
        for block in NF4_BLOCKS {
            for values in [2 * block, 3 * block - 1, 5 * block + 2] {
                assert_eq!(nf4_block(values, values.div_ceil(block)), Some(block));
            }
        }
        assert_eq!(nf4_block(96, 6), Some(16));
        assert_eq!(nf4_block(32, 1), Some(64));
        assert_eq!(nf4_block(100, 1), Some(128));
        assert_eq!(nf4_block(100, 7), None);
        assert_eq!(nf4_block(0, 2), None);
    }
}
