//! The sources of kernels: every header, and every unit, which is a source that is compiled by itself. `build.rs` includes this file as a
//! module too, so it imports only the compiler's options.

use std::hash::Hasher;
use std::sync::OnceLock;

use include_dir::{Dir, File, include_dir};
use twox_hash::XxHash3_64;

use super::driver::nvrtc::{Source, options};

/// The folder of the sources. Files are named by their paths within it, and sources include headers by these names.
static KERNELS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/kernels");

/// Name and text of every header, in the order of their names.
fn headers() -> &'static [(&'static str, &'static str)] {
    static HEADERS: OnceLock<Vec<(&str, &str)>> = OnceLock::new();
    fn collect(folder: &'static Dir<'static>, found: &mut Vec<(&'static str, &'static str)>) {
        folder.dirs().for_each(|inner| collect(inner, found));
        let headers = folder.files().filter_map(|f| {
            let name = f.path().to_str().filter(|name| name.ends_with(".cuh"))?;
            Some((name, f.contents_utf8()?))
        });
        found.extend(headers);
    }
    HEADERS.get_or_init(|| {
        let mut found = Vec::new();
        collect(&KERNELS, &mut found);
        found.sort_unstable();
        found
    })
}

macro_rules! units {
    ($($name:ident = $path:literal),+ $(,)?) => {
        /// A source file that is compiled by itself.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unit { $(#[doc = $path] $name,)+ }

        impl Unit {
            /// Every unit.
            pub const ALL: &'static [Unit] = &[$(Unit::$name,)+];

            /// Path under `kernels/`.
            pub const fn path(self) -> &'static str { match self { $(Unit::$name => $path,)+ } }
        }
    };
}

units! {
    Adapter = "adapter/adapter.cu",
    ReadAll = "bandwidth/read.cu",
    Glu = "activation/glu.cu",
    Pointwise = "activation/pointwise.cu",
    PerLayerGate = "activation/per_layer.cu",
    ActivationTraining = "activation/training.cu",
    AttentionDecode = "attention/decode.cu",
    AttentionDecodeF8 = "attention/decode_f8.cu",
    AttentionDecodeFixed = "attention/decode_fixed.cu",
    AttentionDecodeFixedF8 = "attention/decode_fixed_f8.cu",
    AttentionDecodeFixedGeneral = "attention/decode_fixed_general.cu",
    AttentionDecodeGeneral = "attention/decode_general.cu",
    AttentionDecodeLimited = "attention/decode_limited.cu",
    AttentionDecodeWide = "attention/decode_wide.cu",
    AttentionDecodeWidest = "attention/decode_widest.cu",
    AttentionPrefill = "attention/prefill.cu",
    AttentionPrefillF8 = "attention/prefill_f8.cu",
    AttentionPrefillWide = "attention/prefill_wide.cu",
    AttentionPrefillWidest = "attention/prefill_widest.cu",
    AttentionReference = "attention/reference.cu",
    AttentionRows = "attention/rows.cu",
    AttentionRowsF8 = "attention/rows_f8.cu",
    AttentionTrainingForward = "attention/training_forward.cu",
    AttentionTrainingBackward = "attention/training_backward.cu",
    AttentionTrainingForwardWide = "attention/training_forward_wide.cu",
    AttentionTrainingBackwardWide = "attention/training_backward_wide.cu",
    DeltaConv = "delta/conv.cu",
    DeltaNorm = "delta/norm.cu",
    DeltaRule = "delta/rule.cu",
    DeltaSingle = "delta/single.cu",
    DeltaStep = "delta/step.cu",
    Embed = "embed/embed.cu",
    PerLayerInputs = "embed/per_layer.cu",
    EmbedTraining = "embed/training.cu",
    ExpertsRoute = "experts/route.cu",
    ExpertsSum = "norm/sum_experts.cu",
    ExpertsSumBeside = "norm/sum_experts_beside.cu",
    ExpertRows = "experts/rows.cu",
    LinearDense = "linear/dense.cu",
    LinearExperts = "linear/experts.cu",
    LinearInt8 = "linear/int8.cu",
    LinearInt8Row = "linear/int8_row.cu",
    LinearPack = "linear/pack.cu",
    LinearRow = "linear/row.cu",
    LinearRowNorms = "linear/row_norms.cu",
    LinearRows = "linear/rows.cu",
    LinearSkinny = "linear/skinny.cu",
    LinearSkinnyAdapted = "linear/skinny_adapted.cu",
    LinearSkinnyRanges = "linear/skinny_ranges.cu",
    LinearTf32 = "linear/tf32.cu",
    LinearTiled = "linear/tiled.cu",
    LinearWide = "linear/wide.cu",
    LinearWideAdapted = "linear/wide_adapted.cu",
    MambaConv = "mamba/conv.cu",
    MambaNorm = "mamba/norm.cu",
    MambaScan = "mamba/scan.cu",
    AdamW = "optimizer/adamw.cu",
    DecodeMatrix = "optimizer/decode.cu",
    CrossEntropy = "loss/cross_entropy.cu",
    Divergence = "loss/divergence.cu",
    L1 = "loss/l1.cu",
    DrafterRows = "norm/drafter.cu",
    PostNorm = "norm/post_norm.cu",
    ProjectionNorms = "norm/projections.cu",
    RmsNorm = "norm/rms_norm.cu",
    RmsNormF32 = "norm/rms_norm_f32.cu",
    NormTraining = "norm/training.cu",
    Amax = "quantize/amax.cu",
    Calibrated = "quantize/calibrated.cu",
    CheckScales = "quantize/check.cu",
    Dequantize = "quantize/dequantize.cu",
    Expand = "quantize/expand.cu",
    Moments = "quantize/moments.cu",
    Quantize = "quantize/quantize.cu",
    QuantizeSearch = "quantize/search.cu",
    Swizzle = "quantize/swizzle.cu",
    OperandTraining = "quantize/training.cu",
    Rotate = "rope/rotate.cu",
    RopeStore = "rope/store.cu",
    RopeStoreF8 = "rope/store_f8.cu",
    RopeStoreGeneral = "rope/store_general.cu",
    HeadsTraining = "rope/training.cu",
    Argmax = "sample/argmax.cu",
    Draw = "sample/draw.cu",
    Likelihood = "sample/likelihood.cu",
    Mask = "sample/mask.cu",
    ScaledMmDequantize = "scaled_mm/dequantize.cu",
    ScaledMmProduct = "scaled_mm/product.cu",
    Gather = "tensor/gather.cu",
    InputMoments = "tensor/input_moments.cu",
    Statistics = "tensor/statistics.cu",
    ArrayTraining = "tensor/training.cu",
}

impl Unit {
    /// Whether the unit has kernels for an architecture, as the compiler names it.
    pub(crate) fn is_for(self, target: &str) -> bool {
        // Products by warpgroups, and those with the same bits.
        let is_for_hopper = matches!(
            self,
            Unit::LinearWide
                | Unit::LinearWideAdapted
                | Unit::LinearSkinnyRanges
                | Unit::AttentionTrainingForwardWide
                | Unit::AttentionTrainingBackwardWide
        );
        let needs_clusters = self == Unit::DeltaStep;
        (target == "sm_90a" || !is_for_hopper) && (!target.starts_with("sm_8") || !needs_clusters)
    }

    /// The units with kernels for an architecture, as the compiler names it.
    pub fn for_target(target: &str) -> impl Iterator<Item = Unit> {
        let all = Unit::ALL.iter().copied();
        all.filter(move |unit| unit.is_for(target))
    }

    /// The source to compile. A test checks that every unit is embedded.
    pub(crate) fn source(self) -> Source<'static> {
        source(self.path(), self.text().unwrap_or_default())
    }

    fn text(self) -> Option<&'static str> {
        KERNELS.get_file(self.path()).and_then(File::contents_utf8)
    }
}

/// A source that may include the library's headers.
pub(crate) fn source<'a>(path: &'a str, text: &'a str) -> Source<'a> {
    Source {
        path,
        text,
        headers: headers(),
    }
}

/// Hash of the unit's sources and options. Machine code depends on it and on the compiler's version.
pub(crate) fn fingerprint(unit: Unit, target: &str) -> u64 {
    /// The hash state after the headers, which all units share.
    static OF_HEADERS: OnceLock<XxHash3_64> = OnceLock::new();
    let of_headers = || {
        let mut sum = XxHash3_64::new();
        for (name, source) in headers() {
            sum.write(name.as_bytes());
            sum.write(source.as_bytes());
        }
        sum
    };
    let mut sum = OF_HEADERS.get_or_init(of_headers).clone();
    sum.write(unit.source().text.as_bytes());
    for option in options(target) {
        sum.write(option.as_bytes());
    }
    sum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_embedded() {
        // Each header that a source includes is one that the compiler is given.
        let known = |name: &str| headers().iter().any(|(header, _)| *header == name);
        let units = Unit::ALL.iter().map(|unit| unit.text().unwrap());
        for source in units.chain(headers().iter().map(|(_, source)| *source)) {
            for line in source.lines() {
                let Some(included) = line.strip_prefix("#include \"") else {
                    continue;
                };
                let name = included.trim_end_matches('"');
                assert!(known(name), "kernels/{name} is included and not embedded");
            }
        }
    }
}
