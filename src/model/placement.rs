//! Automatic choice of a device: lists the machine's devices and their memory, and chooses one with room for the model. Only chooses and
//! loads; the caller tells the user.

use std::fmt;

use super::{Activations, Device, KvType, footprint, spec_of};
use crate::base::ErrorKind::{DeviceUnavailable, OutOfMemory, Unsupported};
use crate::base::size::readable;
use crate::base::{Error, Result, host_memory};
use crate::checkpoint::Checkpoint;
use crate::cuda::{self, Report};
use crate::ops::DeviceKind;

/// Positions of a conversation for which memory is counted.
const CONTEXT: usize = 4096;

/// Share of a device's memory that a model may take. The rest is for the system, other programs and working memory.
const SHARE: f64 = 0.9;

/// A device that can run models.
#[derive(Clone, Debug)]
pub struct DeviceRoom {
    /// The N of `cuda:N`; `None` is the CPU.
    gpu: Option<usize>,
    /// Its name for people.
    label: String,
    /// Bytes of its memory.
    total: u64,
    /// Bytes currently unused.
    free: u64,
}

impl DeviceRoom {
    /// `cpu`, `cuda:0`.
    pub fn device(&self) -> String {
        device_name(self.gpu)
    }

    /// The kind of the device.
    pub fn kind(&self) -> DeviceKind {
        match self.gpu {
            None => DeviceKind::Cpu,
            Some(_) => DeviceKind::Cuda,
        }
    }

    /// Whether a model that needs `needs` bytes fits if nothing else runs.
    pub fn fits(&self, needs: u64) -> bool {
        needs as f64 <= self.total as f64 * SHARE
    }

    /// Whether it fits beside the programs that run now.
    fn fits_now(&self, needs: u64) -> bool {
        needs as f64 <= self.free as f64 * SHARE
    }
}

fn device_name(gpu: Option<usize>) -> String {
    match gpu {
        None => "cpu".to_owned(),
        Some(ordinal) => format!("cuda:{ordinal}"),
    }
}

/// Memory of a device that a model takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Weights and keys and values of its own.
    pub own: u64,
    /// Weights on the CPU that are mapped from a file of packed weights, which processes share.
    pub mapped: u64,
}

impl Needs {
    /// Both together.
    pub fn total(&self) -> u64 {
        self.own.saturating_add(self.mapped)
    }
}

/// The memory of a device that an opened model takes with a conversation of usual length; `quantize` says whether its dense weights are
/// quantized while loading.
pub fn needs_of(checkpoint: &dyn Checkpoint, device: DeviceKind, quantize: bool) -> Result<Needs> {
    let spec = spec_of(checkpoint)?;
    let positions = spec.max_positions.min(CONTEXT) as u64;
    let weights = weights_of(checkpoint, device, quantize)?;
    Ok(Needs {
        own: weights.own + spec.kv_bytes_per_token(KvType::F16) * positions,
        ..weights
    })
}

/// The memory of a device that an opened model's weights take.
fn weights_of(checkpoint: &dyn Checkpoint, device: DeviceKind, quantize: bool) -> Result<Needs> {
    let (weights, mapped) = footprint::weight_bytes(checkpoint, device, quantize)?;
    let own = match device {
        DeviceKind::Cpu => weights.host,
        DeviceKind::Cuda => weights.device,
    };
    Ok(Needs { own, mapped })
}

/// The bytes that an opened model takes of a GPU with what is reserved for keys and values, or else with a conversation of usual length.
fn required_by(checkpoint: &dyn Checkpoint, requirements: &Requirements) -> Result<u64> {
    let quantize = requirements.quantize;
    match requirements.kv_bytes {
        Some(bytes) => Ok(weights_of(checkpoint, DeviceKind::Cuda, quantize)?.own + bytes as u64),
        None => Ok(needs_of(checkpoint, DeviceKind::Cuda, quantize)?.own),
    }
}

/// The CPU, if the system reports its memory, and the usable GPUs.
pub fn rooms(report: &Report) -> Vec<DeviceRoom> {
    let cpu = host_memory::read().map(|memory| DeviceRoom {
        gpu: None,
        label: "the processor".to_owned(),
        total: memory.total,
        free: memory.available,
    });
    cpu.into_iter().chain(gpus(report)).collect()
}

fn gpus(report: &Report) -> Vec<DeviceRoom> {
    let usable = report.devices.iter().filter(|_| report.available);
    let gpu = |d: &cuda::DeviceReport| {
        let details = d.details.as_ref()?;
        Some(DeviceRoom {
            gpu: Some(d.index),
            label: details.name.clone(),
            total: details.total_bytes as u64,
            free: details.free_bytes as u64,
        })
    };
    usable.filter_map(gpu).collect()
}

/// Load options that restrict the choice of a device.
#[derive(Clone, Copy, Debug)]
pub struct Requirements {
    /// Whether dense weights are quantized while they are loaded.
    pub quantize: bool,
    /// Whether the layers are skipped.
    pub sampling_only: bool,
    /// Precision of activations in products with NVFP4 weights.
    pub activations: Activations,
    /// Element type of cached keys and values.
    pub kv: KvType,
    /// Bytes that are reserved for the keys and values of each model, if any are.
    pub kv_bytes: Option<usize>,
}

impl Requirements {
    /// The reason why no GPU qualifies, if so.
    fn exclude_gpus(&self) -> Option<&'static str> {
        match (self.activations, self.kv) {
            (Activations::Int8, _) => Some("8-bit activations were asked for"),
            (_, KvType::F32) => Some("keys and values in f32 were asked for"),
            _ if self.sampling_only => Some("a model without its layers has nothing for a GPU"),
            _ => None,
        }
    }
}

/// The chosen device and the reason. Shown as one line: `running on cuda:0: A GPU has 20.0 GB free, and the model takes 1.0 GB`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The N of `cuda:N`; `None` is the CPU.
    gpu: Option<usize>,
    reason: String,
    had_gpus: bool,
    /// Whether a GPU was chosen first but failed.
    after_all: bool,
}

impl Placement {
    /// Whether there was a GPU to choose.
    pub fn had_gpus(&self) -> bool {
        self.had_gpus
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, reason) = (device_name(self.gpu), &self.reason);
        let after_all = if self.after_all { " after all" } else { "" };
        write!(f, "running on {device}{after_all}: {reason}")
    }
}

/// Loads the models that `open` opens, all on one device: the GPU with the most room if they fit there, else the CPU, which `cpu` creates. If
/// a GPU turns out unable to run them, or lacks memory, they are loaded on the CPU instead. `open` is not called if no GPU can be used.
///
/// `told` receives each choice before `load` acts on it. `load` is called a second time if a GPU failed.
pub fn load<T>(
    open: impl FnOnce() -> Result<Vec<Box<dyn Checkpoint>>>,
    requirements: &Requirements,
    cpu: impl FnOnce() -> Result<Device>,
    told: impl Fn(&Placement),
    load: impl Fn(&Device, &Placement) -> Result<T>,
) -> Result<T> {
    let gpu = |ordinal| {
        let named = |e: Error| e.within(format_args!("device 'cuda:{ordinal}'"));
        Device::cuda(ordinal).map_err(named)
    };
    load_at(choose(open, requirements), gpu, cpu, told, load)
}

fn load_at<T>(
    mut placement: Placement,
    gpu: impl FnOnce(usize) -> Result<Device>,
    cpu: impl FnOnce() -> Result<Device>,
    told: impl Fn(&Placement),
    load: impl Fn(&Device, &Placement) -> Result<T>,
) -> Result<T> {
    told(&placement);
    if let Some(ordinal) = placement.gpu {
        match gpu(ordinal).and_then(|gpu| load(&gpu, &placement)) {
            // Its kernels support only some shapes, and other programs may take memory.
            Err(e) if [Unsupported, OutOfMemory, DeviceUnavailable].contains(&e.kind()) => {
                placement = Placement {
                    gpu: None,
                    reason: e.to_string(),
                    had_gpus: true,
                    after_all: true,
                };
                told(&placement);
            }
            loaded => return loaded,
        }
    }
    load(&cpu()?, &placement)
}

fn choose(
    open: impl FnOnce() -> Result<Vec<Box<dyn Checkpoint>>>,
    requirements: &Requirements,
) -> Placement {
    let report = cuda::report();
    let gpus = gpus(&report);
    let needs = || {
        open()?.iter().try_fold(0, |sum, checkpoint| {
            let needs = required_by(&**checkpoint, requirements)?;
            Ok::<u64, Error>(sum + needs)
        })
    };
    let cpu = |reason: &str| Placement {
        gpu: None,
        reason: reason.to_owned(),
        had_gpus: !gpus.is_empty(),
        after_all: false,
    };
    match (&report.reason, requirements.exclude_gpus()) {
        (Some(reason), _) => cpu(reason),
        (None, Some(reason)) => cpu(reason),
        (None, None) => match needs() {
            Ok(needs) => among(&gpus, needs),
            // Loading it reports the error.
            Err(_) => cpu("what the model takes is not known"),
        },
    }
}

/// The GPU with the most free memory if the model fits there, else the CPU.
fn among(gpus: &[DeviceRoom], needs: u64) -> Placement {
    let Some(room) = gpus.iter().max_by_key(|gpu| gpu.free) else {
        return Placement {
            gpu: None,
            reason: "no GPU can be used".to_owned(),
            had_gpus: false,
            after_all: false,
        };
    };
    let (gpu, who) = match room.fits_now(needs) {
        true => (room.gpu, room.label.clone()),
        false => (None, format!("{} ({})", room.device(), room.label)),
    };
    Placement {
        gpu,
        reason: format!(
            "{who} has {} free, and the model takes {}",
            readable(room.free),
            readable(needs)
        ),
        had_gpus: true,
        after_all: false,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::base::error::err;

    fn gpu(index: usize, free: u64) -> DeviceRoom {
        DeviceRoom {
            gpu: Some(index),
            label: "A GPU".to_owned(),
            total: 100_000_000_000,
            free,
        }
    }

    #[test]
    fn the_gpu_with_the_most_room() {
        let two = [gpu(0, 10_000_000_000), gpu(1, 20_000_000_000)];
        let fits = among(&two, 15_000_000_000);
        assert_eq!(
            fits.to_string(),
            "running on cuda:1: A GPU has 20.0 GB free, and the model takes 15.0 GB"
        );
        let large = among(&two, 19_000_000_000);
        assert_eq!(
            large.to_string(),
            "running on cpu: cuda:1 (A GPU) has 20.0 GB free, and the model takes 19.0 GB"
        );
        assert!(fits.had_gpus() && large.had_gpus());
        let none = among(&[], 1);
        assert_eq!(none.to_string(), "running on cpu: no GPU can be used");
        assert!(!none.had_gpus());
        assert!(two[0].fits(15_000_000_000) && !two[0].fits(95_000_000_000));
    }

    /// Loads with a GPU that fails with `failure`; returns the announced choices and the result. The devices are CPUs of 1 and 2 threads.
    fn said(failure: Option<Error>) -> (Vec<String>, Result<usize>) {
        let said = RefCell::new(Vec::new());
        let loaded = load_at(
            among(&[gpu(3, 1000)], 500),
            |ordinal| Device::cpu(Some(ordinal - 2)),
            || Device::cpu(Some(2)),
            |placement| said.borrow_mut().push(placement.to_string()),
            |device, _| match &failure {
                Some(e) if device.threads() == 1 => Err(e.clone()),
                _ => Ok(device.threads()),
            },
        );
        (said.into_inner(), loaded)
    }

    #[test]
    fn a_gpu_that_fails_leaves_the_model_to_the_cpu_and_the_reason_is_told() {
        let first = "running on cuda:3: A GPU has 1.0 kB free, and the model takes 500 B";
        let (lines, loaded) = said(None);
        assert_eq!((lines, loaded.unwrap()), (vec![first.to_owned()], 1));
        for failure in [
            err!(Unsupported, "heads of 80"),
            err!(OutOfMemory, "heads of 80"),
            err!(DeviceUnavailable, "heads of 80"),
        ] {
            let (lines, loaded) = said(Some(failure));
            let after_all = "running on cpu after all: heads of 80";
            assert_eq!(lines, [first, after_all]);
            assert_eq!(loaded.unwrap(), 2);
        }
        for failure in [
            err!(CorruptFile, "a bad file"),
            err!(Cancelled, "was cancelled"),
            err!(OverBudget, "the budget"),
        ] {
            let (lines, loaded) = said(Some(failure.clone()));
            assert_eq!(lines, [first]);
            assert_eq!(loaded.unwrap_err().kind(), failure.kind());
        }
    }

    #[test]
    fn what_a_gpu_does_not_do_excludes_it() {
        let plain = Requirements {
            quantize: true,
            sampling_only: false,
            activations: Activations::Exact,
            kv: KvType::F16,
            kv_bytes: None,
        };
        assert_eq!(plain.exclude_gpus(), None);
        for (requirements, reason) in [
            (
                Requirements {
                    activations: Activations::Int8,
                    ..plain
                },
                "8-bit activations",
            ),
            (
                Requirements {
                    kv: KvType::F32,
                    ..plain
                },
                "f32",
            ),
            (
                Requirements {
                    sampling_only: true,
                    ..plain
                },
                "layers",
            ),
        ] {
            let said = requirements.exclude_gpus().unwrap_or_default();
            assert!(said.contains(reason), "{requirements:?}: {said}");
        }
    }
}
