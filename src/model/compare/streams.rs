//! Relative errors of residual streams, summed over the batches of a text.

use crate::base::Result;
use crate::ops::{Array, Mixed};

/// Sums of squares for one block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ErrorSums {
    difference: f64,
    reference: f64,
}

impl ErrorSums {
    /// Adds the elements of two streams.
    pub(super) fn add(&mut self, examined: &[f32], reference: &[f32]) {
        for (&a, &b) in examined.iter().zip(reference) {
            let (a, b) = (f64::from(a), f64::from(b));
            self.difference += (a - b) * (a - b);
            self.reference += b * b;
        }
    }

    /// Root mean square of the difference over that of the reference; 0 for streams that are both zero.
    pub(super) fn relative(&self) -> f64 {
        match self.difference == 0.0 {
            true => 0.0,
            false => (self.difference / self.reference).sqrt(),
        }
    }
}

/// Host memory for the two streams that are compared.
#[derive(Debug, Default)]
pub(super) struct HostStreams {
    examined: Vec<f32>,
    reference: Vec<f32>,
}

impl HostStreams {
    /// Reads the first `len` elements of the stream that others are compared with.
    pub(super) fn set_reference(&mut self, stream: &Array<Mixed>, len: usize) -> Result<()> {
        read(stream, len, &mut self.reference)
    }

    /// Adds the errors of a stream to `sums`.
    pub(super) fn add(&mut self, stream: &Array<Mixed>, sums: &mut ErrorSums) -> Result<()> {
        read(stream, self.reference.len(), &mut self.examined)?;
        sums.add(&self.examined, &self.reference);
        Ok(())
    }
}

fn read(stream: &Array<Mixed>, len: usize, to: &mut Vec<f32>) -> Result<()> {
    to.resize(len, 0.0);
    stream.first(len)?.read(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_reference() {
        let mut sums = ErrorSums::default();
        assert_eq!(sums.relative(), 0.0);
        sums.add(&[3.0, 4.0], &[3.0, 4.0]);
        assert_eq!(sums.relative(), 0.0);
        // The difference has squares of 9 + 16, the reference of 2 (9 + 16).
        sums.add(&[0.0, 8.0], &[3.0, 4.0]);
        assert!((sums.relative() - 0.5f64.sqrt()).abs() < 1e-12);
    }
}
