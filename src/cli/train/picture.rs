//! The picture of losses over steps, in SVG. The observer of a run draws it.

use NVFP4::train::Row;

use crate::cli::chart::{COLOURS, Chart, Line, svg};

/// Maximum number of points in a line of a picture.
const POINTS: usize = 600;
/// Index of the first colour for the evaluation sets after the first; colours repeat if there are more sets.
const OF_SETS: usize = 3;

/// Means of neighbouring points, at most [`POINTS`] of them.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(POINTS).max(1);
    points
        .chunks(each)
        .map(|part| {
            let n = part.len() as f64;
            let sum = part.iter().fold((0.0, 0.0), |s, p| (s.0 + p.0, s.1 + p.1));
            (sum.0 / n, sum.1 / n)
        })
        .collect()
}

/// The picture of these rows; `sets` are the names of the evaluation sets.
pub(super) fn picture(rows: &[Row], sets: &[String]) -> String {
    let line = |value: &dyn Fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = rows.iter().filter_map(|r| Some((r.step as f64, value(r)?)));
        points.filter(|(_, y)| y.is_finite()).collect()
    };
    // Distillation trains on divergence, which is far below the labels' loss.
    let diverges = rows.iter().any(|r| r.eval_divergence_delivered.is_some());
    let named = |set: &str| match diverges {
        true => format!("{set} divergence"),
        false => set.to_owned(),
    };
    let name = match (sets, diverges) {
        ([first, _, ..], _) => named(first),
        (_, true) => "divergence".to_owned(),
        (_, false) => "evaluation".to_owned(),
    };
    let mut lines = vec![
        ("training".to_owned(), 0, thinned(&line(&|r| Some(r.loss)))),
        (
            format!("{name}, as delivered"),
            1,
            line(&|r| match diverges {
                true => r.eval_divergence_delivered,
                false => r.eval_loss_delivered,
            }),
        ),
        (
            format!("{name}, as stored"),
            2,
            line(&|r| match diverges {
                true => r.eval_divergence_stored,
                false => r.eval_loss_stored,
            }),
        ),
    ];
    for (i, set) in sets.iter().skip(1).enumerate() {
        let delivered = |r: &Row| {
            let losses = r.more.get(i).copied()??;
            match diverges {
                true => losses.divergence_delivered,
                false => Some(losses.delivered),
            }
        };
        lines.push((
            format!("{}, as delivered", named(set)),
            OF_SETS + i % (COLOURS - OF_SETS),
            line(&delivered),
        ));
    }
    let last = rows.last().map_or(1.0, |r| r.step as f64).max(2.0);
    let first = rows.first().map_or(1.0, |r| r.step as f64).min(last - 1.0);
    let lines = lines.into_iter().map(|(name, colour, points)| Line {
        name: format!("{name} {:.4}", points.last().map_or(f64::NAN, |p| p.1)),
        colour,
        // A line of a single point would be invisible.
        dots: colour != 0 || points.len() == 1,
        points,
    });
    let chart = Chart {
        x_name: "step".to_owned(),
        y_name: "nats".to_owned(),
        x: (first, last),
        marks: None,
        from_zero: false,
        lines: lines.collect(),
    };
    svg("Loss by step", &[chart])
}

#[cfg(test)]
mod tests {
    use NVFP4::train::Losses;

    use super::*;

    /// The row of a step, with an evaluation at every second step.
    fn row(step: u64) -> Row {
        Row {
            step,
            loss: 3.0 / step as f64,
            eval_loss_delivered: step.is_multiple_of(2).then_some(2.5),
            ..Row::default()
        }
    }

    /// The row of a step with evaluations of all sets.
    fn evaluated(step: u64, losses: &[Losses]) -> Row {
        Row {
            loss: if step == 0 { f64::NAN } else { 1.0 },
            eval_loss_delivered: Some(losses[0].delivered),
            eval_loss_stored: Some(losses[0].stored),
            eval_divergence_delivered: losses[0].divergence_delivered,
            eval_divergence_stored: losses[0].divergence_stored,
            more: losses[1..].iter().copied().map(Some).collect(),
            ..row(step)
        }
    }

    fn losses(delivered: f64) -> Losses {
        Losses {
            delivered,
            stored: delivered - 0.5,
            ..Losses::default()
        }
    }

    #[test]
    fn pictures_of_little_and_of_much() {
        let picture = |rows: &[Row]| picture(rows, &[]);
        assert!(!picture(&[]).contains("NaN"));
        let one = picture(&[row(1)]);
        assert!(!one.contains("NaN") && one.contains("<circle class=\"line c0\""));
        let four: Vec<Row> = (1..=4).map(row).collect();
        assert_eq!(picture(&four).matches("<polyline").count(), 2);
        let many: Vec<Row> = (1..=10_000).map(row).collect();
        let drawn = picture(&many[..5000]);
        let train = drawn
            .lines()
            .find(|l| l.contains("line c0\" points"))
            .unwrap();
        assert!(train.matches(',').count() <= POINTS && !drawn.contains("NaN"));
    }

    /// Each set after the first has its own line. The row before the first step has only evaluations.
    #[test]
    fn a_picture_of_several_sets() {
        let rows = [
            evaluated(0, &[losses(4.0), losses(5.0)]),
            row(1),
            evaluated(2, &[losses(2.0), losses(3.0)]),
        ];
        let svg = picture(&rows, &["eval".to_owned(), "a<b".to_owned()]);
        assert!(
            svg.contains("a&lt;b, as delivered 3.0000") && !svg.contains("NaN"),
            "{svg}"
        );
    }

    /// The picture shows divergences instead of losses in distillation.
    #[test]
    fn a_picture_of_divergences() {
        let taught = |delivered: f64| Losses {
            divergence_delivered: Some(delivered / 8.0),
            divergence_stored: Some(delivered / 16.0),
            ..losses(delivered)
        };
        let rows = [
            evaluated(0, &[losses(4.0), losses(5.0)]),
            evaluated(1, &[taught(2.0), taught(4.0)]),
        ];
        let svg = picture(&rows, &["eval".to_owned(), "law".to_owned()]);
        assert!(svg.contains("law divergence, as delivered 0.5000"), "{svg}");
    }
}
