//! The picture of a comparison: divergence by position, and divergence and relative errors by block.

use super::report::{Block, Report};
use crate::cli::chart::{Chart, Line, svg};

/// Charts of a report as SVG.
pub(super) fn picture(report: &Report) -> String {
    let by_block = |name: &str, colour: usize, value: fn(&Block) -> Option<f64>| {
        let blocks = report.blocks.iter().enumerate();
        let points = blocks.filter_map(|(i, block)| Some((i as f64, value(block)?)));
        line(name, colour, points)
    };
    let blocks = |y_name: &str, lines| Chart {
        x_name: "block".to_owned(),
        y_name: y_name.to_owned(),
        x: (0.0, (report.blocks.len() as f64 - 1.0).max(1.0)),
        marks: None,
        from_zero: true,
        lines,
    };
    let exchanged = by_block("KL with one block exchanged", 0, |b| b.divergence);
    let stream = by_block("error of the stream", 1, |b| Some(b.stream_error));
    let own = by_block("error of the block alone", 2, |b| Some(b.block_error));
    let mut charts = vec![by_position(report)];
    if !exchanged.points.is_empty() {
        charts.push(blocks("nats", vec![exchanged]));
    }
    charts.push(blocks("relative", vec![stream, own]));
    svg("Divergence by position and by block", &charts)
}

/// Divergence by ranges of positions. Ranges have equal width in the chart, because each is twice as long as the one before.
fn by_position(report: &Report) -> Chart {
    let ranges = || report.positions.iter().enumerate();
    let points = ranges().map(|(i, range)| (i as f64, range.divergence));
    let marks = ranges().map(|(i, range)| (i as f64, format!("{}-{}", range.first, range.last)));
    Chart {
        x_name: "position in the window".to_owned(),
        y_name: "nats".to_owned(),
        x: (-0.5, report.positions.len() as f64 - 0.5),
        marks: Some(marks.collect()),
        from_zero: true,
        lines: vec![line("KL from the reference", 0, points)],
    }
}

fn line(name: &str, colour: usize, points: impl Iterator<Item = (f64, f64)>) -> Line {
    Line {
        name: name.to_owned(),
        colour,
        points: points.filter(|(_, y)| y.is_finite()).collect(),
        dots: true,
    }
}
