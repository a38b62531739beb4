//! The registry of all kernel units: their embedded machine code, their argument sizes, and how the driver compiles and loads them.

use std::sync::OnceLock;

use miniz_oxide::inflate::decompress_slice_iter_to_slice;

use super::driver::{self, Attached, Gpu, KernelUnit, Source, compiler, target};
use super::units::{Unit, fingerprint, source};
use super::{
    adapter, attention, bandwidth, calibrated, convert, delta, drafter, elementwise, expert_sums,
    experts, linear, mamba, operand, per_layer, quantize, router, row_norms, rows, sample,
    scaled_mm, tensor, training, unfused,
};
use crate::base::Result;
use crate::base::error::err;

/// Embedded machine code, as a zlib stream. It is some 8 MB for each architecture, of which a process uses one.
struct Embedded {
    unit: Unit,
    target: &'static str,
    fingerprint: u64,
    /// Whether its fingerprint matches the sources of this build; computed on first use.
    is_current: OnceLock<bool>,
    /// Bytes of the unpacked image.
    length: usize,
    packed: &'static [u8],
}

impl Embedded {
    /// Unpacks the machine code. Fails if the library is damaged.
    fn unpack(&self) -> Result<Vec<u8>> {
        let mut image = vec![0; self.length];
        let packed = std::iter::once(self.packed);
        match decompress_slice_iter_to_slice(&mut image, packed, true, false) {
            Ok(length) if length == self.length => Ok(image),
            _ => Err(err!(
                Internal,
                "the kernels of {} for {} in this library are damaged; install it again",
                self.unit.path(),
                self.target
            )),
        }
    }
}

// `static EMBEDDED: [Embedded; N]`, written by `build.rs`; empty unless the build embeds kernels.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

fn embedded(unit: Unit, target: &str) -> Option<&'static Embedded> {
    let found = EMBEDDED
        .iter()
        .find(|e| e.unit == unit && e.target == target)?;
    let is_current = || found.fingerprint == fingerprint(unit, target);
    found.is_current.get_or_init(is_current).then_some(found)
}

/// Whether every kernel for an architecture is embedded, so that no compiler is needed.
pub(super) fn is_embedded(arch: (i32, i32)) -> bool {
    let target = target(arch);
    Unit::for_target(&target).all(|unit| embedded(unit, &target).is_some())
}

/// Fails unless kernels for this architecture are available: embedded, or by a compiler.
pub fn have_kernels(arch: (i32, i32)) -> Result<()> {
    match is_embedded(arch) {
        true => Ok(()),
        false => compiler().map(|_| ()),
    }
}

/// Compiles a unit for an architecture, given as [`target`] names it. Needs no GPU. Returns machine code and the assembler's
/// report on registers and spills.
pub fn compile(unit: Unit, target: &str) -> Result<(Vec<u8>, String)> {
    driver::compile(unit.source(), target)
}

/// Compiles a source that is not the library's, under the name `path`. It may include the library's headers.
#[doc(hidden)]
pub fn compile_source(path: &str, text: &str, target: &str) -> Result<(Vec<u8>, String)> {
    driver::compile(source(path, text), target)
}

/// Bytes of the one argument that a kernel's launcher passes, which must match the kernel's parameter.
pub fn argument_bytes(kernel: &str) -> Option<usize> {
    let by_name = [
        adapter::ARGUMENTS,
        bandwidth::ARGUMENTS,
        calibrated::ARGUMENTS,
        convert::ARGUMENTS,
        delta::ARGUMENTS,
        drafter::ARGUMENTS,
        elementwise::ARGUMENTS,
        expert_sums::ARGUMENTS,
        experts::ARGUMENTS,
        mamba::ARGUMENTS,
        operand::ARGUMENTS,
        per_layer::ARGUMENTS,
        quantize::ARGUMENTS,
        router::ARGUMENTS,
        row_norms::ARGUMENTS,
        rows::ARGUMENTS,
        sample::ARGUMENTS,
        scaled_mm::ARGUMENTS,
        tensor::ARGUMENTS,
        unfused::ARGUMENTS,
    ];
    let mut all = by_name
        .iter()
        .chain(linear::ARGUMENTS)
        .chain(training::ARGUMENTS)
        .flat_map(|kernels| kernels.iter().copied())
        .chain(attention::arguments());
    let found = all.find(|(name, _)| *name == kernel);
    found.map(|(_, bytes)| bytes)
}

impl KernelUnit for Unit {
    fn path(self) -> &'static str {
        Unit::path(self)
    }

    fn source(self) -> Source<'static> {
        Unit::source(self)
    }

    fn fingerprint(self, target: &str) -> u64 {
        fingerprint(self, target)
    }

    fn is_for(self, target: &str) -> bool {
        Unit::is_for(self, target)
    }

    fn embedded(self, target: &str) -> Option<Result<Vec<u8>>> {
        embedded(self, target).map(Embedded::unpack)
    }

    fn prefers_cache(self) -> bool {
        training::CACHED.contains(&self)
    }
}

impl Gpu {
    /// Fails unless kernels for this device are available: see [`have_kernels`]. Success is remembered.
    pub fn need_kernels(&self) -> Result<()> {
        self.attached_or(|| have_kernels(self.arch()).map(|()| HasKernels))?;
        Ok(())
    }

    /// Compiles and loads the units that are not ready, in parallel on all threads. Skips units without kernels for this device. Other
    /// threads may use the device meanwhile. Once `give_up` returns true, on any thread, no further unit is begun; a running compilation
    /// cannot be stopped.
    pub fn prepare(&self, units: &[Unit], give_up: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        self.load_units(units, give_up)
    }
}

/// Attached to a device whose kernels are available.
struct HasKernels;

impl Attached for HasKernels {}

#[cfg(all(test, embedded_kernels))]
mod tests {
    use super::driver::{TARGETS, image};
    use super::*;

    /// Architectures that this build embeds kernels for.
    fn targets() -> impl Iterator<Item = &'static str> {
        let has = |target: &str| EMBEDDED.iter().any(|e| e.target == target);
        TARGETS.iter().copied().filter(move |target| has(target))
    }

    #[test]
    fn embedded_kernels_need_no_compiler() {
        assert!(targets().count() > 0);
        for target in targets() {
            for unit in Unit::for_target(target) {
                assert!(
                    embedded(unit, target).is_some(),
                    "{} for {target} is not embedded",
                    unit.path()
                );
                assert!(
                    image(unit, target).unwrap().starts_with(b"\x7fELF"),
                    "{} for {target} is no machine code",
                    unit.path()
                );
            }
        }
        assert!(is_embedded((9, 0)) && !is_embedded((7, 5)));
    }

    #[test]
    fn damaged_kernels_are_an_error() {
        let whole = &EMBEDDED[0];
        let damaged = |length, packed| Embedded {
            unit: whole.unit,
            target: whole.target,
            fingerprint: whole.fingerprint,
            is_current: OnceLock::new(),
            length,
            packed,
        };
        let mut flipped = whole.packed.to_vec();
        flipped[whole.packed.len() / 2] ^= 0x10;
        for other in [
            damaged(whole.length, flipped.leak()),
            damaged(whole.length, &whole.packed[..whole.packed.len() / 2]),
            damaged(whole.length - 1, whole.packed),
            damaged(whole.length + 1, whole.packed),
        ] {
            let said = other.unpack().unwrap_err().to_string();
            assert!(said.contains(whole.unit.path()), "{said}");
        }
    }

    /// Drop-in calls ask each time. The sources of an architecture's kernels with their headers are some 1.5 MB: they are hashed only once.
    #[test]
    fn sources_are_hashed_once() {
        assert!(is_embedded((9, 0)));
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            have_kernels((9, 0)).unwrap();
        }
        // Hashing them each time would read more than a gigabyte.
        let taken = start.elapsed();
        assert!(taken < std::time::Duration::from_millis(500), "{taken:?}");
    }
}
