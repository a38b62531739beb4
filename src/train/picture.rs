//! The picture of losses over steps, in SVG.

use std::fmt::Write as _;

use super::row::Row;

/// Points of a line that a picture shows at most.
const POINTS: usize = 600;
const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
/// Entries of the legend that stand beside each other, and the height of such a line.
const LEGENDS: usize = 3;
const LEGEND: f64 = 18.0;
const BOTTOM: f64 = 48.0;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#333}.axis{stroke:#333}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}\
.train{stroke:#2a78c2}.delivered{stroke:#c2452a}.stored{stroke:#7a9a2a}.set1{stroke:#8a4fb5}.set2{stroke:#c28a1a}.set3{stroke:#2aa198}.set4{stroke:#666}.back{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}.train{stroke:#6fb3f0}.delivered{stroke:#f08a6f}\
.stored{stroke:#b8d66f}.set1{stroke:#c79be6}.set2{stroke:#e8bd63}.set3{stroke:#6fd3cb}.set4{stroke:#aaa}.back{fill:#1b1b1b}}";
/// Colours of sets beside the first, which come again where there are more sets.
const COLOURS: usize = 4;

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

/// Round numbers from `low` to `high`, some five of them.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * power);
    let step = step.into_iter().find(|&s| s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// A text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// The picture of these rows; `sets` are the names of the evaluation sets.
pub(super) fn picture(rows: &[Row], sets: &[String]) -> String {
    let line = |value: &dyn Fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = rows.iter().filter_map(|r| Some((r.step as f64, value(r)?)));
        points.filter(|(_, y)| y.is_finite()).collect()
    };
    // A teacher's run is trained on divergence, which is far below the labels' loss.
    let diverges = rows.iter().any(|r| r.eval_divergence_delivered.is_some());
    let named = |set: &str| match diverges {
        true => format!("{} divergence", escaped(set)),
        false => escaped(set),
    };
    let name = match (sets, diverges) {
        ([first, _, ..], _) => named(first),
        (_, true) => "divergence".to_owned(),
        (_, false) => "evaluation".to_owned(),
    };
    let mut lines = vec![
        (
            "training".to_owned(),
            "train".to_owned(),
            thinned(&line(&|r| Some(r.loss))),
        ),
        (
            format!("{name}, as delivered"),
            "delivered".to_owned(),
            line(&|r| match diverges {
                true => r.eval_divergence_delivered,
                false => r.eval_loss_delivered,
            }),
        ),
        (
            format!("{name}, as stored"),
            "stored".to_owned(),
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
            format!("set{}", i % COLOURS + 1),
            line(&delivered),
        ));
    }
    lines.retain(|(_, _, points)| !points.is_empty());
    let top = TOP + LEGEND * (lines.len().div_ceil(LEGENDS).max(1) - 1) as f64;
    let all = || lines.iter().flat_map(|(_, _, points)| points);
    let last = rows.last().map_or(1.0, |r| r.step as f64).max(2.0);
    let first = rows.first().map_or(1.0, |r| r.step as f64).min(last - 1.0);
    let mut low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let mut high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    if !low.is_finite() {
        (low, high) = (0.0, 1.0);
    }
    let room = ((high - low) * 0.05).max(1e-3);
    (low, high) = (low - room, high + room);
    let x = |step: f64| LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |loss: f64| HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - top - BOTTOM);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Loss by step\">\n\
         <style>{STYLE}</style>\n<rect class=\"back\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n"
    );
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    // Writing to a string cannot fail.
    for tick in ticks(low, high) {
        let y = y(tick);
        let digits = if high - low < 0.5 { 3 } else { 2 };
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick:.digits$}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }
    for tick in ticks(first, last) {
        if tick.fract() == 0.0 {
            let x = x(tick);
            let _ = writeln!(
                out,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 5.0,
                bottom + 20.0
            );
        }
    }
    let _ = writeln!(
        out,
        "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {top}V{bottom}H{right}\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">step</text>\n\
         <text x=\"{LEFT}\" y=\"{:.1}\" text-anchor=\"end\">nats</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        top - 12.0
    );
    for (i, (name, class, points)) in lines.iter().enumerate() {
        let path: Vec<String> = points
            .iter()
            .map(|&(step, loss)| format!("{:.1},{:.1}", x(step), y(loss)))
            .collect();
        let at = LEFT + 24.0 + 265.0 * (i % LEGENDS) as f64;
        let height = 20.0 + LEGEND * (i / LEGENDS) as f64;
        let _ = writeln!(
            out,
            "<polyline class=\"line {class}\" points=\"{}\"/>\n\
             <line class=\"line {class}\" x1=\"{at}\" y1=\"{height}\" x2=\"{}\" y2=\"{height}\"/>\
             <text x=\"{}\" y=\"{}\">{name} {:.4}</text>",
            path.join(" "),
            at + 20.0,
            at + 26.0,
            height + 4.0,
            points.last().map_or(f64::NAN, |p| p.1)
        );
        // A line of one point cannot be seen.
        if class != "train" || points.len() == 1 {
            for &(step, loss) in points {
                let _ = writeln!(
                    out,
                    "<circle class=\"line {class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>",
                    x(step),
                    y(loss)
                );
            }
        }
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::super::row::example as row;
    use super::*;

    #[test]
    fn pictures_of_little_and_of_much() {
        let picture = |rows: &[Row]| picture(rows, &[]);
        assert!(!picture(&[]).contains("NaN"));
        let one = picture(&[row(1)]);
        assert!(!one.contains("NaN") && one.contains("<circle class=\"line train\""));
        let many: Vec<Row> = (1..=10_000).map(row).collect();
        let drawn = picture(&many[..5000]);
        let train = drawn
            .lines()
            .find(|l| l.contains("line train\" points"))
            .unwrap();
        assert!(train.matches(',').count() <= POINTS && !drawn.contains("NaN"));
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    }
}
