//! Checks that the learning rate is high enough for the precision of the stored weights.

/// Updates over which the share of changed weights is measured, and the share below which a warning is issued.
const MEASURED: u64 = 10;
const LITTLE: f64 = 1e-3;
/// The recommended share.
const ENOUGH: f64 = 1e-2;

/// Statistics of the first updates of a run.
#[derive(Default)]
pub(super) struct FirstUpdates {
    count: u64,
    rates: f64,
    /// Sum of the shares of changed weights.
    changed: f64,
}

impl FirstUpdates {
    /// Records an update. Returns a warning, once, if the first updates changed hardly any weight: then stochastic rounding dominates their
    /// changes. `highest` is the peak rate, which the warm-up may not have reached. An update at rate 0 does not count.
    pub(super) fn add(&mut self, rate: f64, changed: f64, highest: f64) -> Option<String> {
        if rate == 0.0 {
            return None;
        }
        self.count += 1;
        self.rates += rate;
        self.changed += changed;
        if self.count != MEASURED {
            return None;
        }
        let share = self.changed / self.rates * highest;
        if share >= LITTLE {
            return None;
        }
        let advice = match share > 0.0 {
            true => format!(
                "a rate of about {:.1e} would change {} % of them",
                highest * ENOUGH / share,
                100.0 * ENOUGH
            ),
            false => "the rate must be much higher".to_owned(),
        };
        Some(format!(
            "the learning rate of {highest:e} is below what the weights' storage can hold: of all trained weights, {:.4} % changed in a step, \
             measured over {MEASURED}; {advice}, and a recipe with an 8-bit residual or in float32 stores smaller steps",
            100.0 * share
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_that_change_hardly_a_weight_are_warned_of_once() {
        let mut updates = FirstUpdates::default();
        let said: Vec<_> = (0..30)
            .filter_map(|_| updates.add(5e-9, 2e-5, 1e-8))
            .collect();
        assert!(
            said.len() == 1 && said[0].contains("0.0040 % changed"),
            "{said:?}"
        );
        let mut updates = FirstUpdates::default();
        assert!((0..30).all(|_| updates.add(1e-5, 0.01, 1e-5).is_none()));
        // Nothing should change, or some of the rates are 0.
        let mut updates = FirstUpdates::default();
        assert!((0..30).all(|_| updates.add(0.0, 0.0, 0.0).is_none()));
        assert!((0..30).all(|i| {
            updates
                .add(f64::from(i % 2), 0.01 * f64::from(i % 2), 1.0)
                .is_none()
        }));
    }
}
