//! Which devices this machine has, how much memory, and which of them has room for a model.

use std::path::Path;

use NVFP4::base::{Error, Result, memory};
use NVFP4::checkpoint::{self, Checkpoint};
use NVFP4::cuda::{self, Report};
use NVFP4::model;

use super::output;

/// Positions of a conversation that are counted as needed.
const CONTEXT: usize = 4096;

/// What of a device's memory a model may take: the rest is the system's, other programs' and working memory.
const SHARE: f64 = 0.9;

/// A device that can run models.
pub(super) struct Room {
    /// `cpu`, `cuda:0`.
    pub(super) device: String,
    /// Its name for people.
    label: String,
    /// Bytes of its memory.
    total: u64,
    /// Bytes that nobody uses now.
    free: u64,
}

impl Room {
    /// Whether a model that needs so many bytes fits, if nothing else runs.
    pub(super) fn fits(&self, needs: u64) -> bool {
        needs as f64 <= self.total as f64 * SHARE
    }

    /// Whether it fits beside what runs now.
    fn fits_now(&self, needs: u64) -> bool {
        needs as f64 <= self.free as f64 * SHARE
    }
}

/// The bytes that an opened model takes with a conversation of usual length; `quantize` if its dense weights are quantized while
/// they are loaded.
pub(super) fn needs_of(checkpoint: &dyn Checkpoint, quantize: bool) -> Result<u64> {
    let estimate = model::estimate(checkpoint, quantize)?;
    let positions = estimate.max_positions.min(CONTEXT) as u64;
    Ok(estimate.weight_bytes + estimate.kv_bytes_per_token * positions)
}

/// The processor, if the system tells its memory, and the GPUs that can be used.
pub(super) fn rooms(report: &Report) -> Vec<Room> {
    let cpu = memory::of_machine().map(|total| Room {
        device: "cpu".to_owned(),
        label: "the processor".to_owned(),
        total,
        free: total,
    });
    cpu.into_iter().chain(gpus(report)).collect()
}

fn gpus(report: &Report) -> Vec<Room> {
    let usable = report.devices.iter().filter(|_| report.available);
    let gpu = |d: &cuda::DeviceReport| {
        let details = d.details.as_ref()?;
        Some(Room {
            device: format!("cuda:{}", d.index),
            label: details.name.clone(),
            total: details.total_bytes as u64,
            free: details.free_bytes as u64,
        })
    };
    usable.filter_map(gpu).collect()
}

/// A device, and why it was chosen.
#[derive(Debug, PartialEq)]
pub(super) struct Choice {
    /// `cpu`, `cuda:0`.
    pub(super) device: String,
    pub(super) reason: String,
    /// Whether there was another to choose.
    pub(super) had_others: bool,
}

/// Chooses where to run the models at `paths`, all of them at once: the GPU with the most room if they fit, else the processor.
/// `forbids` says why no GPU will do, if that is so.
pub(super) fn choose(paths: &[&Path], quantize: bool, forbids: Option<&str>) -> Choice {
    let report = cuda::report();
    let gpus = gpus(&report);
    let needs = || {
        paths.iter().try_fold(0, |sum, path| {
            Ok::<u64, Error>(sum + needs_of(&*checkpoint::open(path)?, quantize)?)
        })
    };
    let cpu = |reason: &str| Choice {
        device: "cpu".to_owned(),
        reason: reason.to_owned(),
        had_others: !gpus.is_empty(),
    };
    match (&report.reason, forbids) {
        (Some(reason), _) => cpu(reason),
        (None, Some(reason)) => cpu(reason),
        (None, None) => match needs() {
            Ok(needs) => among(&gpus, needs),
            // Loading it says what is wrong with it.
            Err(_) => cpu("what the model takes is not known"),
        },
    }
}

/// The GPU with the most room for so many bytes, if they fit.
fn among(gpus: &[Room], needs: u64) -> Choice {
    let Some(gpu) = gpus.iter().max_by_key(|gpu| gpu.free) else {
        return Choice {
            device: "cpu".to_owned(),
            reason: "no GPU can be used".to_owned(),
            had_others: false,
        };
    };
    let (device, who) = match gpu.fits_now(needs) {
        true => (gpu.device.clone(), gpu.label.clone()),
        false => ("cpu".to_owned(), format!("{} ({})", gpu.device, gpu.label)),
    };
    Choice {
        device,
        reason: format!(
            "{who} has {} free, and the model takes {}",
            output::size(gpu.free),
            output::size(needs)
        ),
        had_others: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: usize, free: u64) -> Room {
        Room {
            device: format!("cuda:{index}"),
            label: "A GPU".to_owned(),
            total: 100_000_000_000,
            free,
        }
    }

    #[test]
    fn the_gpu_with_the_most_room() {
        let two = [gpu(0, 10_000_000_000), gpu(1, 20_000_000_000)];
        let choice = among(&two, 15_000_000_000);
        assert_eq!(choice.device, "cuda:1");
        assert!(choice.reason.contains("20.0 GB free") && choice.reason.contains("takes 15.0 GB"));
        let choice = among(&two, 19_000_000_000);
        assert_eq!(choice.device, "cpu");
        assert!(
            choice.reason.starts_with("cuda:1 (A GPU) has 20.0 GB free"),
            "{choice:?}"
        );
        assert_eq!(among(&[], 1).device, "cpu");
        assert!(two[0].fits(15_000_000_000) && !two[0].fits(95_000_000_000));
    }
}
