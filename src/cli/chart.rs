//! SVG line charts, one below another, for light and dark pages: training losses and model comparisons.

use std::fmt::Write as _;

const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
/// Legend entries per line, and the height of such a line.
const LEGENDS: usize = 3;
const LEGEND: f64 = 18.0;
const BOTTOM: f64 = 48.0;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#333}.axis{stroke:#333}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}\
.c0{stroke:#2a78c2}.c1{stroke:#c2452a}.c2{stroke:#7a9a2a}.c3{stroke:#8a4fb5}.c4{stroke:#c28a1a}.c5{stroke:#2aa198}.c6{stroke:#666}.back{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}.c0{stroke:#6fb3f0}.c1{stroke:#f08a6f}\
.c2{stroke:#b8d66f}.c3{stroke:#c79be6}.c4{stroke:#e8bd63}.c5{stroke:#6fd3cb}.c6{stroke:#aaa}.back{fill:#1b1b1b}}";
/// Number of line colours.
pub(super) const COLOURS: usize = 7;

/// A line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    /// Its entry in the legend.
    pub(super) name: String,
    /// Index of its colour, below [`COLOURS`].
    pub(super) colour: usize,
    /// Points from left to right.
    pub(super) points: Vec<(f64, f64)>,
    /// Whether each point has a dot.
    pub(super) dots: bool,
}

/// A line chart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chart {
    /// Name of the lower axis.
    pub(super) x_name: String,
    /// Name of the left axis.
    pub(super) y_name: String,
    /// Range of the lower axis.
    pub(super) x: (f64, f64),
    /// Marks of the lower axis; round integers if `None`.
    pub(super) marks: Option<Vec<(f64, String)>>,
    /// Whether the left axis begins at 0 rather than near the lowest point.
    pub(super) from_zero: bool,
    /// Lines; those without points are left out.
    pub(super) lines: Vec<Line>,
}

/// About five round numbers from `low` to `high`, and the step between them.
fn ticks(low: f64, high: f64) -> (Vec<f64>, f64) {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * power);
    let step = step.into_iter().find(|&s| s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    ((first..=last).map(|i| i as f64 * step).collect(), step)
}

/// Escapes a text for XML. Control characters, which XML does not allow, become U+FFFD.
fn escaped(text: &str) -> String {
    let text: String = text
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

/// Charts one below another, as an SVG document with the description `label`.
pub(super) fn svg(label: &str, charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n\
         <style>{STYLE}</style>\n<rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
        escaped(label)
    );
    for (i, chart) in charts.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", HEIGHT * i as f64);
        Drawn::new(chart).write(&mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// A chart with its computed scales.
struct Drawn<'a> {
    chart: &'a Chart,
    lines: Vec<&'a Line>,
    /// The height of the legend.
    top: f64,
    /// Range of the left axis.
    low: f64,
    high: f64,
}

impl<'a> Drawn<'a> {
    fn new(chart: &'a Chart) -> Drawn<'a> {
        let lines: Vec<&Line> = chart
            .lines
            .iter()
            .filter(|l| !l.points.is_empty())
            .collect();
        let heights = || lines.iter().flat_map(|line| &line.points).map(|p| p.1);
        let mut low = heights().fold(f64::INFINITY, f64::min);
        let mut high = heights().fold(f64::NEG_INFINITY, f64::max);
        if !low.is_finite() || !high.is_finite() {
            (low, high) = (0.0, 1.0);
        }
        (low, high) = match chart.from_zero {
            true if high <= 0.0 => (0.0, 1.0),
            true => (0.0, 1.05 * high),
            false => {
                let room = ((high - low) * 0.05).max(1e-3);
                (low - room, high + room)
            }
        };
        let top = TOP + LEGEND * (lines.len().div_ceil(LEGENDS).max(1) - 1) as f64;
        Drawn {
            chart,
            lines,
            top,
            low,
            high,
        }
    }

    fn x(&self, at: f64) -> f64 {
        let (first, last) = self.chart.x;
        LEFT + (at - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, at: f64) -> f64 {
        let share = (at - self.low) / (self.high - self.low);
        HEIGHT - BOTTOM - share * (HEIGHT - self.top - BOTTOM)
    }

    // Writing to a string cannot fail.
    fn write(&self, out: &mut String) {
        self.write_axes(out);
        for (i, line) in self.lines.iter().enumerate() {
            self.write_line(out, i, line);
        }
    }

    fn write_axes(&self, out: &mut String) {
        let (bottom, right, top) = (HEIGHT - BOTTOM, WIDTH - RIGHT, self.top);
        let (marks, step) = ticks(self.low, self.high);
        let digits = (-step.log10().floor()).max(2.0) as usize;
        for mark in marks {
            let y = self.y(mark);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{mark:.digits$}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        let whole = || {
            let marks = ticks(self.chart.x.0, self.chart.x.1).0.into_iter();
            let marks = marks.filter(|mark| mark.fract() == 0.0);
            marks.map(|mark| (mark, mark.to_string())).collect()
        };
        for (mark, name) in self.chart.marks.clone().unwrap_or_else(whole) {
            let x = self.x(mark);
            let _ = writeln!(
                out,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 5.0,
                bottom + 20.0,
                escaped(&name)
            );
        }
        let _ = writeln!(
            out,
            "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {top}V{bottom}H{right}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text x=\"{LEFT}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 8.0,
            escaped(&self.chart.x_name),
            top - 12.0,
            escaped(&self.chart.y_name)
        );
    }

    fn write_line(&self, out: &mut String, i: usize, line: &Line) {
        let path: Vec<String> = line
            .points
            .iter()
            .map(|&(x, y)| format!("{:.1},{:.1}", self.x(x), self.y(y)))
            .collect();
        let at = LEFT + 24.0 + 265.0 * (i % LEGENDS) as f64;
        let height = 20.0 + LEGEND * (i / LEGENDS) as f64;
        let class = format!("line c{}", line.colour);
        let _ = writeln!(
            out,
            "<polyline class=\"{class}\" points=\"{}\"/>\n\
             <line class=\"{class}\" x1=\"{at}\" y1=\"{height}\" x2=\"{}\" y2=\"{height}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            path.join(" "),
            at + 20.0,
            at + 26.0,
            height + 4.0,
            escaped(&line.name)
        );
        for &(x, y) in line.points.iter().filter(|_| line.dots) {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>",
                self.x(x),
                self.y(y)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        Chart {
            x_name: "layer".to_owned(),
            y_name: "nats".to_owned(),
            x: (0.0, 10.0),
            marks: None,
            from_zero: true,
            lines: vec![Line {
                name: "a<b & \"c\"\u{1b}".to_owned(),
                colour: 1,
                points,
                dots: true,
            }],
        }
    }

    #[test]
    fn texts_are_escaped_and_numbers_finite() {
        let points = vec![(0.0, 1e-5), (10.0, 3e-5)];
        let drawn = svg("a \"label\"", &[chart(points), chart(Vec::new())]);
        assert!(
            drawn.contains("a&lt;b &amp; &quot;c&quot;\u{fffd}<"),
            "{drawn}"
        );
        assert!(drawn.contains("aria-label=\"a &quot;label&quot;\""));
        assert!(
            drawn.contains(">0.00001<") && drawn.contains(">0.00003<"),
            "{drawn}"
        );
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
        assert_eq!(drawn.matches("<g ").count(), 2);
        assert_eq!(drawn.matches("<circle").count(), 2);
        let zeros = svg("", &[chart(vec![(0.0, 0.0)])]);
        assert!(!zeros.contains("NaN") && !zeros.contains("inf"));
    }

    #[test]
    fn ticks_are_round() {
        let (marks, step) = ticks(0.0, 10.0);
        assert_eq!(marks, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(step, 2.0);
    }
}
