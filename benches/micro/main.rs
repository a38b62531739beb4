//! Capabilities of the GPU, measured by small kernels: `cargo bench --bench micro -- [--json FILE] [names]`. The figures decide between
//! designs of the library's kernels, which the benchmark `cuda` measures; a mark is the value from which a design pays off.
//!
//! Sources lie in `kernels/` and are compiled for the device when they run. They use what only Hopper has.

mod barrier;
mod decode_loop;
mod nodes;
mod pipes;
mod products;
mod ring;
mod wgmma;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{DeviceBuffer, Gpu, Graph};

/// The architecture of all sources.
const ARCH: (i32, i32) = (9, 0);

/// The mark that a figure must reach for a design that relies on it.
#[derive(Clone, Copy)]
enum Mark {
    AtMost(f64),
    AtLeast(f64),
}

struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
    mark: Option<Mark>,
}

/// The figures of a run, printed as they come.
#[derive(Default)]
struct Figures {
    all: Vec<Figure>,
}

impl Figures {
    fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str, mark: Option<Mark>) {
        let name = name.into();
        let (wanted, verdict) = match mark {
            None => (String::new(), ""),
            Some(Mark::AtMost(most)) => (
                format!("<= {most}"),
                if value <= most { "pass" } else { "FAIL" },
            ),
            Some(Mark::AtLeast(least)) => (
                format!(">= {least}"),
                if value >= least { "pass" } else { "FAIL" },
            ),
        };
        println!("{name:52} {value:10.3} {unit:12} {wanted:>10} {verdict}");
        self.all.push(Figure {
            name,
            value,
            unit,
            mark,
        });
    }

    /// The figures as a list of objects: name, value, unit, and the mark, if any.
    fn json(&self) -> String {
        let mut text = String::from("[\n");
        for (i, f) in self.all.iter().enumerate() {
            let mark = match f.mark {
                None => String::new(),
                Some(Mark::AtMost(m)) => format!(", \"at_most\": {m}"),
                Some(Mark::AtLeast(m)) => format!(", \"at_least\": {m}"),
            };
            let comma = if i + 1 < self.all.len() { "," } else { "" };
            writeln!(
                text,
                "  {{\"name\": {:?}, \"value\": {}, \"unit\": {:?}{mark}}}{comma}",
                f.name, f.value, f.unit
            )
            .expect("a string takes any text");
        }
        text + "]\n"
    }
}

/// Device memory that holds zeros.
fn zeros(gpu: &Arc<Gpu>, bytes: usize) -> DeviceBuffer {
    DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, bytes).unwrap()
}

fn read_u64(buffer: &DeviceBuffer, count: usize) -> Vec<u64> {
    let mut values = vec![0u64; count];
    buffer.read(0, &mut values).unwrap();
    values
}

/// Median seconds of one replay of a graph, over `replays`.
fn time(gpu: &Gpu, graph: &Graph, replays: usize) -> f64 {
    let mut times = Vec::with_capacity(replays);
    for i in 0..replays + 2 {
        gpu.synchronize().unwrap();
        let start = Instant::now();
        graph.launch().unwrap();
        gpu.synchronize().unwrap();
        // The first replays are warm-up.
        if i >= 2 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    median(times)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

type Benchmark = fn(&Arc<Gpu>, &mut Figures);

/// The benchmarks by name. The top of each file says what it measures.
const ALL: &[(&str, Benchmark)] = &[
    ("pipes", pipes::run),
    ("wgmma", wgmma::run),
    ("decode_loop", decode_loop::run),
    ("ring", ring::run),
    ("barrier", barrier::run),
    ("nodes", nodes::run),
    ("few_rows", products::few_rows),
    ("many_rows", products::many_rows),
];

fn main() {
    let (mut json, mut names) = (None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = Some(arguments.next().expect("--json takes a file")),
            // A flag from cargo.
            flag if flag.starts_with("--") => {}
            name => names.push(name.to_owned()),
        }
    }
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(e) => return println!("SKIPPED no CUDA device: {e}"),
    };
    if gpu.arch() != ARCH {
        return println!("SKIPPED {gpu:?} is no Hopper GPU");
    }
    println!("{gpu:?}");
    let mut figures = Figures::default();
    for (name, run) in ALL {
        if names.is_empty() || names.iter().any(|n| n == name) {
            run(&gpu, &mut figures);
        }
    }
    if let Some(path) = json {
        std::fs::write(&path, figures.json()).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
}
