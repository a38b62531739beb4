//! What gradients add up to.

use super::super::{Device, Mixed, Slice};
use super::only_on_the_cpu;
use crate::base::Result;

/// What is known of some gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// The sum of their squares.
    pub squares: f64,
}

impl Statistics {
    /// Whether every gradient is finite.
    pub fn is_finite(&self) -> bool {
        self.squares.is_finite()
    }
}

fn of_host(values: &[f32]) -> Statistics {
    // Squares of finite f32 are finite in f64, and so is the sum of any number of them that fits in memory.
    Statistics {
        squares: values.iter().map(|&v| f64::from(v) * f64::from(v)).sum(),
    }
}

/// Of gradients in mixed precision.
pub fn of_gradients(device: &Device, values: Slice<'_, Mixed>) -> Result<Statistics> {
    match device {
        Device::Cpu(_) => Ok(of_host(values.host()?)),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// Of gradients in f32.
pub fn of_floats(device: &Device, values: Slice<'_>) -> Result<Statistics> {
    match device {
        Device::Cpu(_) => Ok(of_host(values.host()?)),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}
