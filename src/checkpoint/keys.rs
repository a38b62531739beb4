//! The names that conventions give to the several tensors of one 4-bit weight, and nothing but names: what must be in the
//! tensors is said by `layout`, and how a file holds them by its reader.

/// A way to store a 4-bit weight as several tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Convention {
    /// NVFP4 as TorchSharp hosts keep it, `.qdata` and `.scale`: the layout of `.dat`.
    Dat,
    /// NVFP4 of compressed-tensors.
    CompressedTensors,
    /// NVFP4 of torchao.
    TorchAo,
    /// NVFP4 of NVIDIA's ModelOpt.
    ModelOpt,
    /// NF4 of bitsandbytes: parts are named after the weight, `.weight.absmax`.
    BitsAndBytes,
    /// NF4 as TorchSharp hosts keep it: parts are named after the module, `.absmax`.
    TorchSharp,
}

impl Convention {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Convention::Dat => "dat",
            Convention::CompressedTensors => "compressed-tensors",
            Convention::TorchAo => "torchao",
            Convention::ModelOpt => "modelopt",
            Convention::BitsAndBytes => "bitsandbytes",
            Convention::TorchSharp => "torchsharp",
        }
    }
}

/// The global scale of an NVFP4 tensor.
#[derive(Debug, PartialEq)]
pub(super) struct Global {
    pub(super) key: String,
    /// Whether the weight cannot be read without it.
    pub(super) required: bool,
    /// Whether the file stores its reciprocal, which divides values.
    pub(super) divides: bool,
}

/// What belongs to the codes of an NVFP4 weight.
#[derive(Debug, PartialEq)]
pub(super) struct Nvfp4 {
    pub(super) convention: Convention,
    /// What every name of the weight begins with.
    pub(super) module: String,
    pub(super) scales: String,
    pub(super) global: Option<Global>,
}

/// What belongs to the codes of an NF4 weight.
#[derive(Debug, PartialEq)]
pub(super) struct Nf4 {
    pub(super) convention: Convention,
    pub(super) module: String,
    pub(super) absmax: String,
    pub(super) quant_map: String,
    pub(super) extra: Option<BitsAndBytes>,
}

/// What bitsandbytes stores beside the tables.
#[derive(Debug, PartialEq)]
pub(super) struct BitsAndBytes {
    /// Shape and block size, as JSON.
    pub(super) state: String,
    /// The same for its FP4 type.
    pub(super) fp4_state: String,
    pub(super) nested_absmax: String,
    pub(super) nested_quant_map: String,
}

/// The logical name of a module's weight, under which Hugging Face has it.
pub(super) fn weight(module: &str) -> String {
    format!("{module}.weight")
}

/// What belongs to `key`, if that is a name that only the codes of an NVFP4 weight have.
pub(super) fn nvfp4(key: &str) -> Option<Nvfp4> {
    if let Some(base) = key.strip_suffix(".qdata") {
        return Some(Nvfp4 {
            convention: Convention::Dat,
            module: base.strip_suffix(".weight").unwrap_or(base).to_owned(),
            scales: format!("{base}.scale"),
            global: None,
        });
    }
    if let Some(module) = key.strip_suffix(".weight_packed") {
        return Some(Nvfp4 {
            convention: Convention::CompressedTensors,
            module: module.to_owned(),
            scales: format!("{module}.weight_scale"),
            global: Some(Global {
                key: format!("{module}.weight_global_scale"),
                required: true,
                divides: true,
            }),
        });
    }
    let module = key.strip_suffix("._weight_qdata")?;
    Some(Nvfp4 {
        convention: Convention::TorchAo,
        module: module.to_owned(),
        scales: format!("{module}._weight_scale"),
        global: Some(Global {
            key: format!("{module}._weight_per_tensor_scale"),
            required: false,
            divides: false,
        }),
    })
}

/// What belongs to the weight of `module` if that is NVFP4 of ModelOpt, which has its codes under the name of a dense weight.
pub(super) fn modelopt(module: &str) -> Nvfp4 {
    Nvfp4 {
        convention: Convention::ModelOpt,
        module: module.to_owned(),
        scales: format!("{module}.weight_scale"),
        global: Some(Global {
            key: format!("{module}.weight_scale_2"),
            required: true,
            divides: false,
        }),
    }
}

/// What belongs to the weight of `module` if that is NF4, which has its codes under the name of a dense weight: told by the
/// names that `has` knows. One part is enough, so that a weight that is only half there is found out.
pub(super) fn nf4(module: &str, has: impl Fn(&str) -> bool) -> Option<Nf4> {
    let key = weight(module);
    let bitsandbytes = Nf4 {
        convention: Convention::BitsAndBytes,
        module: module.to_owned(),
        absmax: format!("{key}.absmax"),
        quant_map: format!("{key}.quant_map"),
        extra: Some(BitsAndBytes {
            state: format!("{key}.quant_state.bitsandbytes__nf4"),
            fp4_state: format!("{key}.quant_state.bitsandbytes__fp4"),
            nested_absmax: format!("{key}.nested_absmax"),
            nested_quant_map: format!("{key}.nested_quant_map"),
        }),
    };
    let states = bitsandbytes.extra.iter();
    if has(&bitsandbytes.absmax)
        || has(&bitsandbytes.quant_map)
        || states
            .flat_map(|s| [&s.state, &s.fp4_state])
            .any(|key| has(key))
    {
        return Some(bitsandbytes);
    }
    let torchsharp = Nf4 {
        convention: Convention::TorchSharp,
        absmax: format!("{module}.absmax"),
        quant_map: format!("{module}.quant_map"),
        extra: None,
        ..bitsandbytes
    };
    (has(&torchsharp.absmax) || has(&torchsharp.quant_map)).then_some(torchsharp)
}

/// The module whose NF4 weight a table called `key` would belong to.
pub(super) fn nf4_module(key: &str) -> Option<&str> {
    let base = key
        .strip_suffix(".absmax")
        .or_else(|| key.strip_suffix(".quant_map"))?;
    Some(base.strip_suffix(".weight").unwrap_or(base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_told_by_their_names() {
        for (key, module, scales) in [
            ("a.q.qdata", "a.q", "a.q.scale"),
            ("a.q.weight.qdata", "a.q", "a.q.weight.scale"),
            ("a.q.weight_packed", "a.q", "a.q.weight_scale"),
            ("a.q._weight_qdata", "a.q", "a.q._weight_scale"),
        ] {
            let found = nvfp4(key).unwrap();
            assert_eq!((&*found.module, &*found.scales), (module, scales));
        }
        assert_eq!(nvfp4("a.q.weight"), None);
        assert_eq!(nvfp4("a.qdata.weight"), None);
    }

    #[test]
    fn one_part_tells_nf4_and_its_convention() {
        let with = |part: &str| nf4("a", |key| key == part).map(|k| k.convention);
        assert_eq!(with("a.absmax"), Some(Convention::TorchSharp));
        assert_eq!(with("a.quant_map"), Some(Convention::TorchSharp));
        assert_eq!(with("a.weight.absmax"), Some(Convention::BitsAndBytes));
        let state = "a.weight.quant_state.bitsandbytes__fp4";
        assert_eq!(with(state), Some(Convention::BitsAndBytes));
        assert_eq!(with("a.scale"), None);
        assert_eq!(nf4_module("a.b.absmax"), Some("a.b"));
        assert_eq!(nf4_module("a.b.weight.quant_map"), Some("a.b"));
        assert_eq!(nf4_module("a.b.nested_absmax"), None);
    }
}
