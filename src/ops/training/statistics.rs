//! What gradients add up to.

use super::super::{Device, Mixed, Slice};
use super::scratch;
use crate::base::Result;
use crate::cuda::training as cuda;

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
        Device::Cuda(_) => {
            let mut partial = scratch(device, cuda::STATISTICS_PARTIAL)?;
            let mut out = scratch(device, 3)?;
            cuda::gradient_statistics(
                values.cuda()?,
                partial.all_mut().cuda()?,
                out.all_mut().cuda()?,
            )?;
            let mut found = [0.0; 3];
            out.all().read(&mut found)?;
            let [squares, _, not_finite] = found;
            Ok(Statistics {
                squares: if not_finite == 0.0 {
                    f64::from(squares)
                } else {
                    f64::INFINITY
                },
            })
        }
    }
}

/// Of gradients in f32.
pub fn of_floats(device: &Device, values: Slice<'_>) -> Result<Statistics> {
    match device {
        Device::Cpu(_) => Ok(of_host(values.host()?)),
        Device::Cuda(_) => {
            let mut host = vec![0.0; values.len()];
            values.read(&mut host)?;
            Ok(of_host(&host))
        }
    }
}
