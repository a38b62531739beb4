//! Loss of a text, and divergence from a reference, summed over tokens.

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::ops::likelihood::Likelihood;

use super::reader::log_sum;

/// Sums over predicted tokens.
#[derive(Default)]
pub(super) struct Sums {
    pub(super) loss: f64,
    pub(super) reference_loss: f64,
    pub(super) divergence: f64,
    pub(super) largest: f64,
    pub(super) same: usize,
    pub(super) predicted: usize,
}

/// How a token is predicted.
pub(super) struct Predicted {
    loss: f64,
    reference: Option<AgainstReference>,
}

struct AgainstReference {
    loss: f64,
    divergence: f64,
    is_same_top: bool,
}

impl Predicted {
    /// The prediction of `target` by logits, beside those of a reference.
    pub(super) fn new(logits: &[f32], reference: &[f32], target: u32) -> Result<Self> {
        let target = target as usize;
        if target >= logits.len() {
            bail!(
                InvalidArgument,
                "token {target} of the text is not among the model's {} tokens",
                logits.len()
            );
        }
        let (total, top) = log_sum(logits);
        let (reference_total, reference_top) = log_sum(reference);
        let terms = logits.iter().zip(reference).map(|(&l, &r)| {
            let expected = f64::from(r) - reference_total;
            expected.exp() * (expected - (f64::from(l) - total))
        });
        Ok(Predicted {
            loss: total - f64::from(logits[target]),
            reference: Some(AgainstReference {
                loss: reference_total - f64::from(reference[target]),
                divergence: terms.sum(),
                is_same_top: top == reference_top,
            }),
        })
    }
}

impl From<Likelihood> for Predicted {
    fn from(found: Likelihood) -> Self {
        Predicted {
            loss: -f64::from(found.log_probability),
            reference: None,
        }
    }
}

impl Sums {
    pub(super) fn add(&mut self, token: &Predicted) {
        self.loss += token.loss;
        self.predicted += 1;
        if let Some(reference) = &token.reference {
            self.reference_loss += reference.loss;
            self.divergence += reference.divergence;
            self.largest = self.largest.max(reference.divergence);
            self.same += usize::from(reference.is_same_top);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_models_do_not_diverge_and_others_do() {
        let mut sums = Sums::default();
        let a = [0.0, 1.0f32.ln(), 3.0f32.ln()];
        sums.add(&Predicted::new(&a, &a, 2).unwrap());
        assert!((sums.loss - (5.0f64 / 3.0).ln()).abs() < 1e-6);
        assert!(sums.divergence.abs() < 1e-12);
        assert_eq!(sums.same, 1);

        // p = (1/2, 1/2) against q = (1/4, 3/4).
        let mut sums = Sums::default();
        let token = Predicted::new(&[0.0, 3.0f32.ln()], &[1.0, 1.0], 0);
        sums.add(&token.unwrap());
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((sums.divergence - expected).abs() < 1e-6);
        assert!((sums.loss - 4f64.ln()).abs() < 1e-6);
        assert!((sums.reference_loss - 2f64.ln()).abs() < 1e-6);
        assert_eq!((sums.same, sums.predicted), (0, 1));
        let e = Predicted::new(&a, &a, 3).err().unwrap();
        assert_eq!(e.kind(), NVFP4::base::ErrorKind::InvalidArgument);
        assert!(e.message().contains("token 3"), "{e}");
    }
}
