//! Log-probabilities of given tokens by rows of logits in host memory.

use std::f32::consts::LOG2_E;
use std::ops::ControlFlow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::base::{Result, memory};
use crate::cpu::{Cpu, sample};
use crate::ops::sample::{all_ruled_out, unusable};

/// A token by a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likelihood {
    /// The natural logarithm of its softmax probability, with an absolute error of at most 5e-6.
    pub log_probability: f32,
    /// Whether it is the argmax: the first of equal logits.
    pub is_argmax: bool,
}

/// Memory for one row.
#[derive(Default)]
struct LikelihoodScratch {
    logs: Vec<f32>,
    weights: Vec<f32>,
}

/// The likelihood of `tokens[i]` by row `i` of `logits`, `[tokens, vocabulary]`, on the threads of `cpu`. A result has the same bits on any
/// number of threads. Fails for logits that are NaN or plus infinity.
pub fn likelihoods(logits: &[f32], tokens: &[u32], cpu: &Cpu) -> Result<Vec<Likelihood>> {
    let vocabulary = logits.len() / tokens.len().max(1);
    let found: Vec<OnceLock<Result<Likelihood>>> = tokens.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let threads = cpu.pool().threads().min(tokens.len());
    cpu.pool().run(threads, |_| {
        let mut scratch = LikelihoodScratch::default();
        loop {
            let i = next.fetch_add(1, Relaxed);
            let Some(&token) = tokens.get(i) else { break };
            let row = &logits[i * vocabulary..][..vocabulary];
            let _ = found[i].set(likelihood(row, token, &mut scratch));
        }
    });
    let each = found.into_iter().map(OnceLock::into_inner);
    each.map(|found| found.expect("every row was taken"))
        .collect()
}

fn likelihood(row: &[f32], token: u32, scratch: &mut LikelihoodScratch) -> Result<Likelihood> {
    let largest = match sample::largest(row) {
        ControlFlow::Continue(largest) => largest,
        ControlFlow::Break(token) => return Err(unusable(token)),
    };
    if largest == f32::NEG_INFINITY {
        return Err(all_ruled_out(row.len(), None));
    }
    for values in [&mut scratch.logs, &mut scratch.weights] {
        values.clear();
        memory::make_room(values, row.len())?;
        values.resize(row.len(), 0.0);
    }
    let (logs, weights) = (&mut scratch.logs, &mut scratch.weights);
    sample::weigh(row, largest, LOG2_E, logs, weights)?;
    let sum: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let log_sum = (sum / 2f64.powi(40)).ln();
    let token = token as usize;
    Ok(Likelihood {
        log_probability: (f64::from(row[token]) - f64::from(largest) - log_sum) as f32,
        is_argmax: row[token] == largest && row[..token].iter().all(|&x| x < largest),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random;

    #[test]
    fn likelihoods_are_those_of_the_exact_softmax() {
        for vocabulary in [1, 15, 16, 150, 3001] {
            for width in [0.01, 3.0, 60.0] {
                let rows = 9;
                let logit = |i: usize| match random::bits(8, i as u64) % 3000 {
                    0 => f32::NEG_INFINITY,
                    x => (x as f32 / 3000.0 - 0.3) * width,
                };
                let mut logits: Vec<f32> = (0..rows * vocabulary).map(logit).collect();
                let tokens: Vec<u32> = (0..rows)
                    .map(|row| (random::bits(9, row as u64) % vocabulary as u64) as u32)
                    .collect();
                // Every row has a token, and some have their token as the argmax.
                for (row, &token) in tokens.iter().enumerate() {
                    logits[row * vocabulary] = logits[row * vocabulary].max(0.0);
                    if row % 3 == 0 {
                        logits[row * vocabulary + token as usize] = width;
                    }
                }
                let by = |threads| {
                    let cpu = Cpu::new(Some(threads)).unwrap();
                    likelihoods(&logits, &tokens, &cpu).unwrap()
                };
                let found = by(1);
                assert_eq!(found, by(3));
                for (i, (&token, found)) in tokens.iter().zip(&found).enumerate() {
                    let row = &logits[i * vocabulary..][..vocabulary];
                    let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                    let expected = f64::from(row[token as usize]) - sum.ln();
                    let error = f64::from(found.log_probability) - expected;
                    let is_near = error.abs() <= 5e-6 + expected.abs() * 1e-7;
                    assert!(is_near || expected == f64::NEG_INFINITY, "{error}");
                    let best = (0..vocabulary).reduce(|b, j| if row[j] > row[b] { j } else { b });
                    assert_eq!(found.is_argmax, best == Some(token as usize));
                }
            }
        }
    }

    #[test]
    fn refusals_and_ties() {
        let cpu = Cpu::new(Some(1)).unwrap();
        let one = |logits: &[f32], token| likelihoods(logits, &[token], &cpu);
        assert!(one(&[1.0, 2.0, 2.0], 1).unwrap()[0].is_argmax);
        assert!(!one(&[1.0, 2.0, 2.0], 2).unwrap()[0].is_argmax);
        for (bad, why) in [
            ([0.0, f32::NAN], "token 1"),
            ([f32::INFINITY, 0.0], "token 0"),
            ([f32::NEG_INFINITY; 2], "none of 2 logits"),
        ] {
            let e = one(&bad, 0).unwrap_err();
            assert!(e.message().contains(why), "{e}");
        }
        assert_eq!(likelihoods(&[], &[], &cpu).unwrap(), []);
    }
}
