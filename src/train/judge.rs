//! Judges losses: tracks the best evaluation and its age, and detects divergence. Checkpoints store it.

use serde::{Deserialize, Serialize};

use super::row::{Losses, Score};

/// Updates whose losses are averaged to detect divergence.
const WINDOW: usize = 10;
/// The fewest losses that suffice to detect divergence at the end of a run.
const FEWEST: usize = 5;
/// A rise above the lowest mean, in nats, that is not noise.
const RISE: f64 = 1.0;

/// The evaluation with the lowest loss by the delivered weights; with a teacher, the lowest loss against it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Number of steps before it.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// Its divergence from a teacher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence: Option<f64>,
}

impl Best {
    /// Its score by the delivered weights.
    pub fn score(&self) -> Score {
        Score {
            loss: self.loss,
            divergence: self.divergence,
        }
    }
}

/// Losses of a model that predicts uniformly, in nats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uniform {
    /// Loss of a step, which differs from the cross-entropy if there is a teacher.
    pub(super) step: f64,
    /// Cross-entropy of labels.
    pub(super) labels: f64,
}

/// Loss history of a run, as far as decisions need it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Judge {
    /// The step of the last evaluation.
    pub(super) evaluated: Option<u64>,
    /// Losses of the deciding set before the first step.
    pub(super) start: Option<Losses>,
    /// Losses of the deciding set at the last evaluation.
    pub(super) last: Option<Losses>,
    pub(super) best: Option<Best>,
    /// Share of the labels in the distillation loss, from the trainer's settings.
    #[serde(skip)]
    pub(super) label_share: f64,
    /// Evaluations since the best one.
    pub(super) stale: u64,
    /// Losses of the most recent updates.
    recent: Vec<f64>,
    /// The lowest mean of recent losses so far; the loss of the first update counts as one.
    lowest: Option<f64>,
}

impl Judge {
    /// Records the losses of the deciding set after a step. Returns whether the delivered weights were never better.
    pub(super) fn evaluated(&mut self, step: u64, losses: Losses) -> bool {
        self.evaluated = Some(step);
        self.last = Some(losses);
        if step == 0 {
            self.start = Some(losses);
        }
        let deciding = self.deciding(losses.score());
        let of_best = self.best.map(|best| self.deciding(best.score()));
        let is_best = deciding.is_finite() && of_best.is_none_or(|best| deciding < best);
        if is_best {
            self.best = Some(Best {
                step,
                loss: losses.delivered,
                divergence: losses.divergence_delivered,
            });
            self.stale = 0;
        } else {
            self.stale += 1;
        }
        is_best
    }

    /// The loss that decides, at temperature 1: that of the labels, or with a teacher the mixture of both.
    fn deciding(&self, score: Score) -> f64 {
        match score.divergence {
            None => score.loss,
            Some(divergence) if self.label_share == 0.0 => divergence,
            Some(divergence) => {
                (1.0 - self.label_share) * divergence + self.label_share * score.loss
            }
        }
    }

    /// Records the loss of an update.
    pub(super) fn updated(&mut self, loss: f64) {
        if self.recent.len() == WINDOW {
            self.recent.remove(0);
        }
        self.recent.push(loss);
        let known = match self.recent.len() {
            WINDOW => self.mean(),
            _ => loss,
        };
        if self.lowest.is_none() || self.recent.len() == WINDOW {
            self.lowest = Some(self.lowest.map_or(known, |lowest| lowest.min(known)));
        }
    }

    fn mean(&self) -> f64 {
        self.recent.iter().sum::<f64>() / self.recent.len().max(1) as f64
    }

    /// Whether a loss is above `uniform`, that of an untrained model, and has risen to there from `from`.
    fn is_lost(loss: f64, from: Option<f64>, uniform: f64) -> bool {
        loss > uniform && from.is_some_and(|from| loss > from + RISE)
    }

    /// Whether the last update alone looks like divergence. It may be noise, but its state must not replace a good checkpoint.
    pub(super) fn is_suspicious(&self, uniform: Uniform) -> bool {
        let last = self.recent.last();
        last.is_some_and(|&last| Self::is_lost(last, self.lowest, uniform.step))
    }

    /// The reason if training has diverged: the mean of the last losses, or the last evaluation, has risen above `uniform`. A model with
    /// random weights begins there, so a loss that was above from the beginning counts only if it rises. At the end of a run fewer losses
    /// suffice.
    pub(super) fn diverged(&self, uniform: Uniform, at_end: bool) -> Option<String> {
        let count = self.recent.len();
        let enough = if at_end { FEWEST } else { WINDOW };
        let above = |uniform: f64| format!("above the {uniform:.4} of a model that knows nothing");
        if count >= enough && Self::is_lost(self.mean(), self.lowest, uniform.step) {
            return Some(format!(
                "the mean loss of the last {count} updates is {:.4}, {}, and it was {:.4}",
                self.mean(),
                above(uniform.step),
                self.lowest.unwrap_or_default()
            ));
        }
        // Training optimizes the stored weights; the delivered ones may be worse for a while.
        let (start, last) = (self.start?.stored, self.last?.stored);
        Self::is_lost(last, Some(start), uniform.labels).then(|| {
            let above = above(uniform.labels);
            format!("the evaluation loss is {last:.4}, {above}, and it was {start:.4} before the first step")
        })
    }

    /// The loss by the delivered weights before the first step and now, if it has become worse; with a teacher, the loss against it.
    pub(super) fn worse(&self, now: Option<Score>) -> Option<(f64, f64)> {
        let now = now.or(self.last.map(|l| l.score()))?;
        let (start, now) = (self.deciding(self.start?.score()), self.deciding(now));
        // NaN is worse than any loss.
        (now > start || now.is_nan()).then_some((start, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFORM: Uniform = Uniform {
        step: 8.0,
        labels: 8.0,
    };

    fn after(losses: impl IntoIterator<Item = f64>) -> (Judge, Option<usize>) {
        let mut judge = Judge::default();
        for (i, loss) in losses.into_iter().enumerate() {
            judge.updated(loss);
            if judge.diverged(UNIFORM, false).is_some() {
                return (judge, Some(i + 1));
            }
        }
        (judge, None)
    }

    fn both(loss: f64) -> Losses {
        Losses {
            delivered: loss,
            stored: loss,
            ..Losses::default()
        }
    }

    #[test]
    fn only_losses_that_rise_above_the_uniform_ones_and_stay_there_diverge() {
        // From random weights: noise around the uniform loss, then learning.
        let noisy = (0..40).map(|i| 8.1 + 0.8 * f64::from(i % 2) - 0.05 * f64::from(i));
        assert_eq!(after(noisy).1, None);
        // A text that the model predicts worse than uniformly.
        assert_eq!(after((0..40).map(|i| 12.0 - 0.1 * f64::from(i))).1, None);
        // Two bad batches.
        let spike = (0..40).map(|i| if i == 20 || i == 21 { 15.0 } else { 3.0 });
        assert_eq!(after(spike).1, None);
        let rising = (0..40).map(|i| if i < 20 { 3.0 } else { 12.0 });
        let (judge, at) = after(rising);
        assert_eq!(at, Some(26), "{judge:?}");
        assert!(judge.is_suspicious(UNIFORM));
        // Divergence from the first update on.
        assert_eq!(after((0..40).map(|i| 8.0 + f64::from(i))).1, Some(WINDOW));
        let (judge, at) = after((0..6).map(|i| 8.0 + f64::from(i)));
        assert_eq!(at, None);
        let said = judge.diverged(UNIFORM, true).unwrap();
        assert!(
            said.contains("10.5000") && said.contains("8.0000"),
            "{said}"
        );
    }

    #[test]
    fn evaluations_have_a_best_one() {
        let mut judge = Judge::default();
        assert!(judge.evaluated(0, both(5.0)));
        assert_eq!(judge.worse(None), None);
        assert!(!judge.evaluated(10, both(5.0)));
        assert!(judge.evaluated(20, both(4.0)));
        assert!(!judge.evaluated(30, both(f64::NAN)));
        assert!(!judge.evaluated(40, both(5.5)));
        assert_eq!((judge.best.unwrap().step, judge.stale), (20, 2));
        assert_eq!(judge.worse(None), Some((5.0, 5.5)));
        assert_eq!(judge.worse(Some(both(4.5).score())), None);
        assert_eq!(judge.diverged(UNIFORM, false), None);
        judge.evaluated(50, both(9.0));
        assert!(judge.diverged(UNIFORM, false).unwrap().contains("9.0000"));
        let kept: Judge = serde_json::from_value(serde_json::to_value(&judge).unwrap()).unwrap();
        assert_eq!(kept, judge);
    }

    /// With a teacher, the divergence decides, mixed with the labels by their share.
    #[test]
    fn the_best_evaluation_against_a_teacher() {
        let found = [(2.0, 0.5), (3.0, 0.25), (1.0, 0.5)];
        for (label_share, best) in [(0.0, 1), (0.75, 2)] {
            let mut judge = Judge {
                label_share,
                ..Judge::default()
            };
            for (step, (loss, divergence)) in found.into_iter().enumerate() {
                let losses = Losses {
                    divergence_delivered: Some(divergence),
                    divergence_stored: Some(divergence),
                    ..both(loss)
                };
                judge.evaluated(step as u64, losses);
            }
            let (loss, divergence) = found[best];
            let wanted = Best {
                step: best as u64,
                loss,
                divergence: Some(divergence),
            };
            assert_eq!(judge.best, Some(wanted));
            assert_eq!(judge.worse(None), None);
        }
    }
}
