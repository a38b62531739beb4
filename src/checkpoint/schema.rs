//! Detects 4-bit weights in a set of named tensors, by names, types and shapes alone: for hosts that keep their tensors themselves. Names
//! follow the readers' conventions. Faults are collected, so that a host can report all at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::Encoding;
use super::keys::{self, Convention};
use super::layout::{Fault, nf4_block, nvfp4_form};
use crate::base::Result;
use crate::base::error::bail;
use crate::format::nvfp4::BLOCK;
use crate::tensor::{DType, Shape};

/// Both dimensions of packed codes must be multiples of this, as TorchSharp hosts require.
const ALIGNMENT: usize = 8;

/// A tensor as described by its host.
#[derive(Clone, Debug)]
pub struct Named<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type; `None` for a type that this library does not have.
    pub dtype: Option<DType>,
    /// Its sizes.
    pub shape: Shape,
}

/// Type and shape of a tensor.
#[derive(Clone, Copy)]
struct Seen<'a> {
    dtype: DType,
    shape: &'a Shape,
}

impl<'a> Seen<'a> {
    /// In the terms of the readers.
    fn described(self) -> (Encoding, &'a [usize]) {
        let dtype = match self.dtype {
            // Files store packed codes as bytes.
            DType::F4E2M1x2 => DType::U8,
            dtype => dtype,
        };
        (Encoding::Dense(dtype), self.shape.sizes())
    }
}

/// A 4-bit weight and the tensors that make it up.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Logical name of the weight, `model.layers.0.mlp.up_proj.weight`, whatever its tensors are called.
    pub name: String,
    /// [`Encoding::Nvfp4`] or [`Encoding::Nf4`].
    pub format: Encoding,
    /// Name of the convention.
    pub convention: &'static str,
    /// Role and key of each present tensor.
    pub tensors: Vec<(&'static str, String)>,
    /// Keys of required tensors that are missing.
    pub missing: Vec<String>,
    /// Other keys of the same module, such as a bias.
    pub extra: Vec<String>,
    /// Rows, if the shapes determine them; flattened NF4 codes do not.
    pub out_features: Option<usize>,
    /// Columns, if the shapes determine them.
    pub in_features: Option<usize>,
    /// Values that share a scale, if the shapes determine them.
    pub block: Option<usize>,
    /// Other faults, each naming its tensor.
    pub faults: Vec<String>,
}

/// Result of a detection: the 4-bit weights of a set of tensors.
#[derive(Clone, Debug)]
pub struct Schema {
    /// Its 4-bit weights, by name.
    pub weights: Vec<Weight>,
    /// Number of tensors examined.
    pub tensors: usize,
}

/// Formats of the weights in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// No 4-bit weights.
    None,
    /// All are NVFP4.
    Nvfp4,
    /// All are NF4.
    Nf4,
    /// Some are NVFP4 and some NF4.
    Mixed,
}

impl Format {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Format::None => "none",
            Format::Nvfp4 => "nvfp4",
            Format::Nf4 => "nf4",
            Format::Mixed => "mixed",
        }
    }
}

impl Schema {
    /// The formats of its weights.
    pub fn format(&self) -> Format {
        let has = |format| self.weights.iter().any(|w| w.format == format);
        match (has(Encoding::Nvfp4), has(Encoding::Nf4)) {
            (false, false) => Format::None,
            (true, false) => Format::Nvfp4,
            (false, true) => Format::Nf4,
            (true, true) => Format::Mixed,
        }
    }

    /// Number of faults; each missing tensor counts as one.
    pub fn problems(&self) -> usize {
        let of = |w: &Weight| w.missing.len() + w.faults.len();
        self.weights.iter().map(of).sum()
    }

    /// Fails for a set without 4-bit weights, and for any fault: a single message names every missing tensor and every other fault.
    pub fn check(&self) -> Result<()> {
        if self.weights.is_empty() {
            bail!(
                NotFound,
                "none of the {} tensors belongs to a 4-bit weight: NVFP4 is stored as .qdata and .scale, NF4 as .weight, .absmax and .quant_map",
                self.tensors
            );
        }
        if self.problems() == 0 {
            return Ok(());
        }
        let missing: BTreeSet<_> = self.weights.iter().flat_map(|w| &w.missing).collect();
        let missing: Vec<_> = missing.iter().map(|key| format!("'{key}'")).collect();
        let mut parts = Vec::new();
        if !missing.is_empty() {
            parts.push(format!("missing tensors: {}", missing.join(", ")));
        }
        parts.extend(self.weights.iter().flat_map(|w| &w.faults).cloned());
        bail!(InvalidArgument, "{}", parts.join("; "))
    }
}

/// Detects the 4-bit weights among `tensors` whose names are `prefix` or begin with `prefix.`; all if it is empty.
pub fn detect(tensors: &[Named], prefix: &str) -> Result<Schema> {
    let mut by_name = BTreeMap::new();
    for tensor in tensors {
        if by_name.insert(tensor.name, tensor).is_some() {
            bail!(
                InvalidArgument,
                "two tensors are both called '{}'",
                tensor.name
            );
        }
    }
    let set = Set(by_name);
    let selected = |name: &str| match name.strip_prefix(prefix) {
        Some(rest) => prefix.is_empty() || rest.is_empty() || rest.starts_with('.'),
        None => false,
    };
    let mut weights: BTreeMap<String, Weight> = BTreeMap::new();
    let mut looked_at = 0;
    for (&name, &tensor) in set.0.iter().filter(|(name, _)| selected(name)) {
        looked_at += 1;
        let Some(weight) = set.weight(name, tensor) else {
            continue;
        };
        if let Some(first) = weights.get_mut(&weight.name) {
            // Tables without codes all lead to one weight. A tensor with the weight's own name has already been reported by the codes with
            // another name.
            let both_nf4 = (first.format, weight.format) == (Encoding::Nf4, Encoding::Nf4);
            if !both_nf4 && name != weight.name {
                let text = format!("'{name}': {} is stored twice", weight.name);
                first.faults.push(text);
            }
            continue;
        }
        weights.insert(weight.name.clone(), weight);
    }
    Ok(Schema {
        weights: weights.into_values().collect(),
        tensors: looked_at,
    })
}

struct Set<'a>(BTreeMap<&'a str, &'a Named<'a>>);

impl Set<'_> {
    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// The weight whose first part is the tensor `key`.
    fn weight(&self, key: &str, tensor: &Named) -> Option<Weight> {
        if let Some(keys) = keys::nvfp4(key) {
            return Some(self.nvfp4(key, keys));
        }
        if let Some(module) = keys::nf4_module(key)
            && !self.has(&keys::weight(module))
        {
            let keys = keys::nf4(module, |key| self.has(key))?;
            return Some(self.nf4(keys));
        }
        let module = key.strip_suffix(".weight")?;
        if let Some(keys) = keys::nf4(module, |key| self.has(key)) {
            return Some(self.nf4(keys));
        }
        let modelopt = keys::modelopt(module);
        let global = modelopt.global.iter().any(|g| self.has(&g.key));
        if tensor.dtype == Some(DType::U8) && (global || self.has(&modelopt.scales)) {
            return Some(self.nvfp4(key, modelopt));
        }
        None
    }

    fn nvfp4(&self, key: &str, keys: keys::Nvfp4) -> Weight {
        let mut found = Found::new(self, &keys.module, Encoding::Nvfp4, keys.convention);
        let codes = found.tensor("codes", key, true);
        if let Some(codes) = codes {
            found.codes(key, codes);
            if let &[rows, packed] = codes.shape.sizes() {
                (found.weight.out_features, found.weight.in_features) =
                    (Some(rows), Some(packed * 2));
            }
        }
        found.weight.block = Some(BLOCK);
        let scales = found.tensor("scales", &keys.scales, true);
        if let (Some(codes), Some(scales)) = (codes, scales) {
            let form = nvfp4_form(keys.convention, codes.described(), scales.described());
            for fault in form.err().into_iter().flatten() {
                match fault {
                    Fault::Codes(text) => found.fault(key, &text),
                    Fault::Scales(text) => found.fault(&keys.scales, &text),
                }
            }
        }
        if let Some(global) = &keys.global {
            found.table("global scale", &global.key, global.required, 1);
        }
        // If the codes have their own name, a tensor with the weight's name is a second weight.
        if key != found.weight.name && self.has(&found.weight.name) {
            let text = format!("{} is stored twice", found.weight.name);
            found.fault(key, &text);
        }
        found.weight
    }

    fn nf4(&self, keys: keys::Nf4) -> Weight {
        let mut found = Found::new(self, &keys.module, Encoding::Nf4, keys.convention);
        let key = found.weight.name.clone();
        let mut values = None;
        if let Some(codes) = found.tensor("codes", &key, true) {
            let (encoding, sizes) = codes.described();
            if encoding.element_bytes() != Some(1) {
                found.fault(
                    &key,
                    &format!("packed 4-bit codes are bytes, not {encoding}"),
                );
            }
            values = Some(codes.shape.elements() * 2);
            match *sizes {
                // The shape in bitsandbytes; its state holds the shape of the weight.
                [bytes, 1] if bytes > 0 => {}
                [rows, packed] => {
                    (found.weight.out_features, found.weight.in_features) =
                        (Some(rows), Some(packed * 2));
                    found.codes(&key, codes);
                }
                _ => found.codes(&key, codes),
            }
        }
        let absmax = found.tensor("absmax", &keys.absmax, true);
        found.table("quant_map", &keys.quant_map, true, 16);
        let mut nested = false;
        if let Some(extra) = &keys.extra {
            if self.has(&extra.fp4_state) {
                found.fault(
                    &extra.fp4_state,
                    "the FP4 type of bitsandbytes is not supported; NF4 is",
                );
            } else {
                found.tensor("state", &extra.state, true);
            }
            nested = self.has(&extra.nested_absmax);
            if nested {
                found.tensor("nested_absmax", &extra.nested_absmax, true);
                found.table("nested_quant_map", &extra.nested_quant_map, true, 256);
            }
        }
        if let Some(absmax) = absmax {
            let fits = match nested {
                true => absmax.dtype == DType::U8,
                false => absmax.dtype.is_float(),
            };
            if !fits {
                let wanted = if nested {
                    "uint8, as it is quantized itself"
                } else {
                    "of a floating type"
                };
                found.fault(
                    &keys.absmax,
                    &format!("it is {}; it must be {wanted}", absmax.dtype.name()),
                );
            }
            if let Some(values) = values {
                let scales = absmax.shape.elements();
                found.weight.block = nf4_block(values, scales);
                if found.weight.block.is_none() {
                    let text = format!("{scales} scales do not divide {values} values into blocks");
                    found.fault(&keys.absmax, &text);
                }
            }
        }
        found.weight
    }
}

/// A weight under construction.
struct Found<'a> {
    set: &'a Set<'a>,
    weight: Weight,
}

impl<'a> Found<'a> {
    fn new(set: &'a Set<'a>, module: &str, format: Encoding, convention: Convention) -> Self {
        // Names that begin with "module." are adjacent.
        let prefix = format!("{module}.");
        let all = (Bound::Included(&*prefix), Bound::Unbounded);
        let extra = set.0.range::<str, _>(all).map(|(name, _)| *name);
        Found {
            set,
            weight: Weight {
                name: keys::weight(module),
                format,
                convention: convention.name(),
                tensors: Vec::new(),
                missing: Vec::new(),
                extra: extra
                    .take_while(|name| name.starts_with(&prefix))
                    .map(str::to_owned)
                    .collect(),
                out_features: None,
                in_features: None,
                block: None,
                faults: Vec::new(),
            },
        }
    }

    fn fault(&mut self, key: &str, text: &str) {
        self.weight.faults.push(format!("'{key}': {text}"));
    }

    /// Registers the tensor `key` as the weight's `role`.
    fn tensor(&mut self, role: &'static str, key: &str, required: bool) -> Option<Seen<'a>> {
        let Some(tensor) = self.set.0.get(key) else {
            if required {
                self.weight.missing.push(key.to_owned());
            }
            return None;
        };
        self.weight.tensors.push((role, key.to_owned()));
        self.weight.extra.retain(|extra| extra != key);
        if tensor.dtype.is_none() {
            self.fault(key, "its type is none that this library has");
        }
        Some(Seen {
            dtype: tensor.dtype?,
            shape: &tensor.shape,
        })
    }

    /// Registers the tensor `key`, which must have `elements` floats.
    fn table(&mut self, role: &'static str, key: &str, required: bool, elements: usize) {
        let Some(table) = self.tensor(role, key, required) else {
            return;
        };
        if !table.dtype.is_float() || table.shape.elements() != elements {
            let text = format!(
                "it is {} of shape {:?}; a {role} has {elements} of a floating type",
                table.dtype.name(),
                table.shape.sizes()
            );
            self.fault(key, &text);
        }
    }

    /// Checks the codes of either format.
    fn codes(&mut self, key: &str, codes: Seen) {
        let sizes = codes.shape.sizes();
        match *sizes {
            [rows, packed] if rows > 0 && packed > 0 => {
                if rows % ALIGNMENT != 0 || packed % ALIGNMENT != 0 {
                    let text = format!("its dimensions {sizes:?} are not aligned to {ALIGNMENT}");
                    self.fault(key, &text);
                }
            }
            [_, _] => self.fault(
                key,
                &format!("its shape is {sizes:?}; a weight has elements"),
            ),
            _ => self.fault(
                key,
                &format!("its shape is {sizes:?}; a weight has two dimensions"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Type and sizes.
    type Kind<'a> = (DType, &'a [usize]);

    fn set<'a>(tensors: &[(&'a str, DType, &[usize])]) -> Vec<Named<'a>> {
        tensors
            .iter()
            .map(|&(name, dtype, sizes)| Named {
                name,
                dtype: Some(dtype),
                shape: Shape::contiguous(sizes).unwrap(),
            })
            .collect()
    }

    fn of(tensors: &[(&str, DType, &[usize])]) -> Schema {
        detect(&set(tensors), "").unwrap()
    }

    use DType::{BF16, F8E4M3, F16, F32, U8};

    #[test]
    fn nvfp4_is_found_under_every_name_it_has() {
        for (codes, scales, convention) in [
            ("l.qdata", "l.scale", "dat"),
            ("l.weight.qdata", "l.weight.scale", "dat"),
            ("l._weight_qdata", "l._weight_scale", "torchao"),
        ] {
            let s = of(&[
                (codes, U8, &[16, 32]),
                (scales, F8E4M3, &[16, 4]),
                ("l.bias", BF16, &[16]),
            ]);
            s.check().unwrap();
            let w = &s.weights[0];
            assert_eq!(
                (s.format(), s.weights.len(), s.tensors),
                (Format::Nvfp4, 1, 3)
            );
            assert_eq!((&*w.name, w.convention), ("l.weight", convention));
            assert_eq!(
                (w.out_features, w.in_features, w.block),
                (Some(16), Some(64), Some(16))
            );
            assert_eq!(w.extra, ["l.bias"]);
        }
        for (codes, global) in [
            ("l.weight", "l.weight_scale_2"),
            ("l.weight_packed", "l.weight_global_scale"),
        ] {
            let whole: [(&str, DType, &[usize]); 3] = [
                (codes, U8, &[16, 32]),
                ("l.weight_scale", F8E4M3, &[16, 4]),
                (global, F32, &[1]),
            ];
            of(&whole).check().unwrap();
            let e = of(&whole[..2]).check().unwrap_err();
            assert_eq!(e.message(), format!("missing tensors: '{global}'"));
            assert_eq!(
                of(&whole).weights[0].tensors[2],
                ("global scale", global.to_owned())
            );
        }
    }

    #[test]
    fn scales_come_in_the_types_that_the_reader_takes() {
        for dtype in [F8E4M3, U8, F16, F32] {
            let s = of(&[("l.qdata", U8, &[16, 32]), ("l.scale", dtype, &[16, 4])]);
            assert!(s.check().is_ok(), "{}", dtype.name());
        }
        let e = of(&[("l.qdata", U8, &[16, 32]), ("l.scale", BF16, &[16, 5])])
            .check()
            .unwrap_err();
        assert!(
            e.message().contains("[16, 5]") && e.message().contains("not BF16"),
            "{e}"
        );
    }

    #[test]
    fn nf4_is_found_beside_its_module_and_beside_its_weight() {
        let s = of(&[
            ("l.weight", U8, &[16, 64]),
            ("l.absmax", F32, &[32]),
            ("l.quant_map", F32, &[16]),
        ]);
        s.check().unwrap();
        let w = &s.weights[0];
        assert_eq!((s.format(), w.convention), (Format::Nf4, "torchsharp"));
        assert_eq!(
            (w.out_features, w.in_features, w.block),
            (Some(16), Some(128), Some(64))
        );

        let s = of(&[
            ("l.weight", U8, &[1024, 1]),
            ("l.weight.absmax", U8, &[32]),
            ("l.weight.quant_map", F32, &[16]),
            ("l.weight.nested_absmax", F32, &[1]),
            ("l.weight.nested_quant_map", F32, &[256]),
            ("l.weight.quant_state.bitsandbytes__nf4", U8, &[90]),
        ]);
        s.check().unwrap();
        let w = &s.weights[0];
        assert_eq!(
            (w.convention, w.tensors.len(), w.extra.len()),
            ("bitsandbytes", 6, 0)
        );
        assert_eq!(
            (w.out_features, w.in_features, w.block),
            (None, None, Some(64))
        );
    }

    #[test]
    fn everything_missing_is_in_one_message() {
        let s = of(&[
            ("a.qdata", U8, &[8, 8]),
            ("b.weight", U8, &[8, 8]),
            ("b.quant_map", F32, &[16]),
            ("c.absmax", F32, &[2]),
            ("d.weight", F32, &[8, 8]),
        ]);
        assert_eq!(
            (s.format(), s.problems(), s.weights.len()),
            (Format::Mixed, 4, 3)
        );
        let e = s.check().unwrap_err();
        assert_eq!(
            e.message(),
            "missing tensors: 'a.scale', 'b.absmax', 'c.quant_map', 'c.weight'"
        );
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let refused = |tensors: &[(&str, DType, &[usize])], parts: &[&str]| {
            let e = of(tensors).check().unwrap_err();
            for part in parts {
                assert!(e.message().contains(part), "'{part}' is not in: {e}");
            }
        };
        let nf4 = |weight: Kind, absmax: Kind, map: Kind, parts: &[&str]| {
            let tensors = [
                ("l.weight", weight.0, weight.1),
                ("l.absmax", absmax.0, absmax.1),
                ("l.quant_map", map.0, map.1),
            ];
            refused(&tensors, parts);
        };
        refused(
            &[("l.qdata", U8, &[7, 9]), ("l.scale", U8, &[7, 1])],
            &[
                "'l.qdata': its dimensions [7, 9] are not aligned to 8",
                "K = 18",
            ],
        );
        refused(
            &[("l.qdata", F16, &[16, 16]), ("l.scale", F16, &[16])],
            &["bytes, not F16", "[16, 2]"],
        );
        refused(
            &[("l.qdata", U8, &[0, 16]), ("l.scale", U8, &[0, 2])],
            &["has elements"],
        );
        refused(
            &[("l.qdata", U8, &[2, 8, 16]), ("l.scale", U8, &[2, 8, 2])],
            &["two dimensions"],
        );
        let (weight, map): (Kind, Kind) = ((U8, &[16, 64]), (F32, &[16]));
        nf4(
            (F16, &[7, 9]),
            (F16, &[1]),
            (F16, &[16]),
            &["aligned to 8", "bytes, not F16"],
        );
        nf4(
            weight,
            (F32, &[31]),
            map,
            &["31 scales do not divide 2048 values"],
        );
        nf4(weight, (F32, &[0]), map, &["0 scales"]);
        nf4(weight, (U8, &[32]), map, &["'l.absmax': it is uint8"]);
        nf4(
            weight,
            (F32, &[32]),
            (F32, &[15]),
            &["'l.quant_map'", "16 of a floating type"],
        );
        refused(
            &[
                ("l.weight", U8, &[512, 1]),
                ("l.weight.quant_state.bitsandbytes__fp4", U8, &[9]),
            ],
            &["FP4", "'l.weight.absmax', 'l.weight.quant_map'"],
        );
        refused(
            &[("l.norm", F32, &[8]), ("l.scale", F32, &[8])],
            &["none of the 2 tensors"],
        );
    }

    #[test]
    fn a_weight_that_is_stored_twice_is_a_fault_once() {
        let (q, s): (Kind, Kind) = ((U8, &[8, 8]), (U8, &[8, 1]));
        let twice = |others: &[(&str, DType, &[usize])]| {
            let mut tensors = vec![("l.qdata", q.0, q.1), ("l.scale", s.0, s.1)];
            tensors.extend(others);
            let found = of(&tensors);
            assert_eq!((found.format(), found.problems()), (Format::Nvfp4, 1));
            assert!(
                found
                    .check()
                    .unwrap_err()
                    .message()
                    .contains("l.weight is stored twice")
            );
        };
        twice(&[("l.weight", F32, &[8, 16])]);
        twice(&[("l.weight.qdata", q.0, q.1), ("l.weight.scale", s.0, s.1)]);
        twice(&[
            ("l.weight", U8, &[8, 8]),
            ("l.absmax", F32, &[2]),
            ("l.quant_map", F32, &[16]),
        ]);
        let mut unknown = set(&[("l.qdata", q.0, q.1), ("l.scale", s.0, s.1)]);
        unknown[1].dtype = None;
        let e = detect(&unknown, "").unwrap().check().unwrap_err();
        assert!(e.message().contains("'l.scale': its type"), "{e}");
        let same = set(&[("l.qdata", q.0, q.1), ("l.qdata", q.0, q.1)]);
        assert!(
            detect(&same, "")
                .unwrap_err()
                .message()
                .contains("'l.qdata'")
        );
    }

    #[test]
    fn a_prefix_is_whole_parts_of_a_name() {
        let tensors = set(&[
            ("m.1.q.qdata", U8, &[8, 8]),
            ("m.1.q.scale", U8, &[8, 1]),
            ("m.10.q.weight", U8, &[8, 64]),
            ("m.10.q.absmax", F32, &[16]),
            ("m.10.q.quant_map", F32, &[16]),
        ]);
        for (prefix, format, weights, looked_at) in [
            ("", Format::Mixed, 2, 5),
            ("m", Format::Mixed, 2, 5),
            ("m.1", Format::Nvfp4, 1, 2),
            ("m.1.q", Format::Nvfp4, 1, 2),
            ("m.10.q.weight", Format::Nf4, 1, 1),
            ("m.1.q.", Format::None, 0, 0),
            ("q", Format::None, 0, 0),
        ] {
            let s = detect(&tensors, prefix).unwrap();
            assert_eq!(
                (s.format(), s.weights.len(), s.tensors),
                (format, weights, looked_at),
                "{prefix}"
            );
        }
    }
}
