//! The tensor names of 4-bit weights under each convention, and nothing but names: `layout` checks the tensors, and readers know how a file
//! stores them.

/// A convention for storing a 4-bit weight as several tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Convention {
    /// NVFP4 of TorchSharp hosts, `.qdata` and `.scale`: the layout of `.dat`.
    Dat,
    /// NVFP4 of compressed-tensors.
    CompressedTensors,
    /// NVFP4 of torchao.
    TorchAo,
    /// NVFP4 of NVIDIA's ModelOpt.
    ModelOpt,
    /// NF4 of bitsandbytes: parts are named after the weight, `.weight.absmax`.
    BitsAndBytes,
    /// 4-bit integers of GPTQ.
    Gptq,
    /// 4-bit integers of AWQ.
    Awq,
    /// 4-bit integers of MLX.
    Mlx,
    /// MXFP4 of gpt-oss, `_blocks` and `_scales`.
    Mxfp4,
    /// NF4 of TorchSharp hosts: parts are named after the module, `.absmax`.
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
            Convention::Gptq => "gptq",
            Convention::Awq => "awq",
            Convention::Mlx => "mlx",
            Convention::Mxfp4 => "mxfp4",
            Convention::TorchSharp => "torchsharp",
        }
    }
}

/// Key of the global scale of an NVFP4 weight.
#[derive(Debug, PartialEq)]
pub(super) struct Global {
    pub(super) key: String,
    /// Whether the weight cannot be read without it.
    pub(super) required: bool,
    /// Whether the file stores its reciprocal, by which values are divided.
    pub(super) divides: bool,
}

/// Keys of the tensors that form an NVFP4 weight together with its codes.
#[derive(Debug, PartialEq)]
pub(super) struct Nvfp4 {
    pub(super) convention: Convention,
    /// Common prefix of all the weight's keys.
    pub(super) module: String,
    pub(super) scales: String,
    pub(super) global: Option<Global>,
}

/// Keys of the tensors that form an NF4 weight together with its codes.
#[derive(Debug, PartialEq)]
pub(super) struct Nf4 {
    pub(super) convention: Convention,
    pub(super) module: String,
    pub(super) absmax: String,
    pub(super) quant_map: String,
    pub(super) extra: Option<BitsAndBytes>,
}

/// Additional keys of bitsandbytes.
#[derive(Debug, PartialEq)]
pub(super) struct BitsAndBytes {
    /// Shape and block size, as JSON.
    pub(super) state: String,
    /// Shape and block size of its FP4 type, as JSON.
    pub(super) fp4_state: String,
    pub(super) nested_absmax: String,
    pub(super) nested_quant_map: String,
}

/// The Hugging Face name of a module's weight.
pub(super) fn weight(module: &str) -> String {
    format!("{module}.weight")
}

/// The keys that belong to `key`, if only codes of an NVFP4 weight have such a name.
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

/// The keys of the weight of `module` as NVFP4 of ModelOpt, whose codes have the name of a dense weight.
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

/// The keys of the weight of `module` if it is NF4, whose codes have the name of a dense weight. Decided by the names in `has`. One part
/// suffices, so that an incomplete weight is detected.
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

/// The module whose NF4 weight a table named `key` would belong to.
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
