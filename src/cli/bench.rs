//! `nvfp4 bench`: prefill and decode speed, memory, and decode speed relative to the memory bandwidth. Medians of repeated runs after a
//! warm-up. With `--serve`, rates and times of requests that arrive one after the other.

mod serve;

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::base::memory::{self, Tag};
use NVFP4::engine::Served;
use NVFP4::format::random;
use NVFP4::model::{Activations, Device, KvType};
use NVFP4::session::{
    self, DraftCounts, GenerateOptions, SamplingOptions, Session, SessionOptions,
};
use serde::Serialize;

use super::{bandwidth, model, output};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    #[command(flatten)]
    adapter: model::AdapterArgs,
    /// Length of the prompt
    #[arg(long, default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens decoded after it
    #[arg(long, default_value_t = 128)]
    gen_tokens: usize,
    /// Sequences decoded together
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Measured runs
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Warm-up runs before them
    #[arg(long, default_value_t = 1)]
    warmup: usize,
    /// Decode after one token instead of after the prompt
    #[arg(long)]
    decode_from_empty: bool,
    /// Draft this many tokens a step at most, for one sequence of a model with a drafter or with --draft-model; without either, decoding
    /// drafts none
    #[arg(long)]
    drafts: Option<usize>,
    /// Draft by prompt lookup, at most this many tokens a step, for one sequence: the text that follows the prompt repeats itself or does not
    #[arg(long, default_value_t = 0, conflicts_with_all = ["serve", "drafts", "draft_model"])]
    prompt_lookup: usize,
    /// Draft by this model, loaded on the same device, for one sequence; without --drafts as many tokens as are fastest
    #[arg(long, value_name = "MODEL", conflicts_with = "serve")]
    draft_model: Option<OsString>,
    /// Serve requests that arrive at this rate a second, by a Poisson process, or `all` at once: measures the time to the first token and
    /// between tokens. `--prompt-tokens` and `--gen-tokens` are then the lengths of each request
    #[arg(long, value_name = "RATE|all", value_parser = serve::arrivals, conflicts_with_all = ["adapter", "batch", "runs", "warmup", "decode_from_empty"])]
    serve: Option<serve::Arrivals>,
    /// Requests of `--serve`
    #[arg(long, default_value_t = 64, requires = "serve")]
    requests: usize,
    /// Lengths of `--serve` vary evenly by this share of them
    #[arg(long, default_value_t = 0.0, requires = "serve", value_parser = spread)]
    spread: f64,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

fn spread(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("takes a share from 0 to 1".to_owned()),
    }
}

#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    activations: &'static str,
    prompt_tokens: usize,
    gen_tokens: usize,
    batch: usize,
    runs: usize,
    decode_from_empty: bool,
    /// Prompt tokens per second for one sequence.
    prefill_tok_s: f64,
    /// Tokens per second of all sequences together.
    decode_tok_s: f64,
    /// Milliseconds from the prompt to the first token.
    ttft_ms: f64,
    /// Peak of accounted memory, loading included.
    peak_bytes: u64,
    /// Sum of the peaks of weights, KV cache and workspaces on a GPU.
    peak_device_bytes: u64,
    /// Peak resident memory of the process.
    peak_resident_bytes: Option<u64>,
    weight_bytes: u64,
    kv_bytes: u64,
    /// Bytes that a decode step reads: weights, and the KV cache half-way through.
    bytes_per_step: u64,
    /// Measured read bandwidth of memory, in bytes per second.
    bandwidth: f64,
    /// Decode speed as a fraction of the limit by bandwidth.
    roofline: f64,
    load_seconds: f64,
    /// Drafted tokens of all measured runs, and those that were right, if drafts were asked for.
    drafts: Option<DraftCounts>,
}

struct Sample {
    prefill: f64,
    first_token: f64,
    decode: f64,
    drafts: DraftCounts,
}

impl Args {
    /// The option that asks for drafts, if one does.
    fn drafting_option(&self) -> Option<&'static str> {
        let options = [
            ("--drafts", self.drafts.is_some()),
            ("--draft-model", self.draft_model.is_some()),
            ("--prompt-lookup", self.prompt_lookup > 0),
        ];
        let given = options.into_iter().find(|(_, is_given)| *is_given);
        given.map(|(name, _)| name)
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    for (name, value) in [
        ("--prompt-tokens", args.prompt_tokens),
        ("--gen-tokens", args.gen_tokens),
        ("--batch", args.batch),
        ("--runs", args.runs),
        ("--requests", args.requests),
    ] {
        if value == 0 {
            bail!(InvalidArgument, "{name} must be at least 1");
        }
    }
    if let Some(arrivals) = args.serve {
        return serve::run(&serve::Load {
            model: &args.model,
            arrivals,
            requests: args.requests,
            prompt_tokens: args.prompt_tokens,
            gen_tokens: args.gen_tokens,
            spread: args.spread,
            drafts: args.drafts,
            json: args.json,
        });
    }
    if let Some(option) = args.drafting_option().filter(|_| args.batch > 1) {
        bail!(
            InvalidArgument,
            "{option} with --batch {}; drafts are measured with one sequence",
            args.batch
        );
    }
    let start = Instant::now();
    let (model, draft) = args.model.load_beside(args.draft_model.as_deref())?;
    model::warn_of_template(&model);
    let load_seconds = start.elapsed().as_secs_f64();
    let options = SessionOptions {
        context: args
            .prompt_tokens
            .saturating_add(args.gen_tokens)
            .saturating_add(1),
        kv: args.model.kv.into(),
        // Every run is to compute all of its prompt.
        private: true,
        adapter: args.adapter.load(&model)?,
        ..SessionOptions::default()
    };
    let mut sessions = (0..args.batch)
        .map(|_| {
            let mut session = Session::new(model.clone(), &options)?;
            session.set_drafts(draft.is_none() && args.drafts.is_some_and(|most| most > 0))?;
            Ok(session)
        })
        .collect::<Result<Vec<_>>>()?;

    let vocabulary = model.spec().vocab_size as u64;
    let prompts: Vec<Vec<u32>> = (0..args.batch as u64)
        .map(|s| {
            (0..args.prompt_tokens as u64)
                .map(|i| (random::bits(s, i) % vocabulary) as u32)
                .collect()
        })
        .collect();
    let rounds = args.warmup.saturating_add(args.runs);
    let bar = output::count_bar("measuring", rounds as u64);
    let mut samples = Vec::new();
    for i in 0..rounds {
        let sample = measure(&mut sessions, &prompts, draft.as_ref(), args)?;
        if i >= args.warmup {
            samples.push(sample);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let kv_bytes: u64 = sessions.iter().map(|s| s.kv_bytes() as u64).sum();
    let peak_bytes = memory::total().peak;
    let device = [
        Tag::DeviceWeights,
        Tag::DeviceKvCache,
        Tag::DeviceScratch,
        Tag::DeviceTensor,
    ];
    let peak_device_bytes = device.map(|tag| memory::usage(tag).peak).iter().sum();
    let peak_resident_bytes = peak_resident();
    let info = model.info();

    let bandwidth = match model.device() {
        Device::Cpu(cpu) => bandwidth::read(cpu)?,
        Device::Cuda(gpu) => NVFP4::cuda::read_bandwidth(gpu)?,
        device => bail!(
            Unsupported,
            "the bandwidth of {} cannot be measured",
            device.name()
        ),
    };
    let prefill = median(samples.iter().map(|s| s.prefill));
    let decode = median(samples.iter().map(|s| s.decode));
    // The cache grows while decoding; this many positions are read on average.
    let before = if args.decode_from_empty {
        1
    } else {
        args.prompt_tokens
    };
    let positions = before as f64 + args.gen_tokens as f64 / 2.0;
    let kv: KvType = args.model.kv.into();
    let kv_bytes_per_token = model.spec().kv_bytes_per_token(kv) as f64;
    // A GPU's weights include the embedding, of which a step reads one row.
    let weights = model.weights().bytes_per_step(model.spec(), args.batch);
    let read = weights + args.batch as f64 * kv_bytes_per_token * positions;
    let steps = args.gen_tokens as f64 / decode;
    let report = Report {
        model: model::shown(&args.model.model),
        device: model.device().name(),
        activations: match args.model.activations() {
            Activations::Exact => "exact",
            Activations::Int8 => "int8",
        },
        prompt_tokens: args.prompt_tokens,
        gen_tokens: args.gen_tokens,
        batch: args.batch,
        runs: args.runs,
        decode_from_empty: args.decode_from_empty,
        prefill_tok_s: args.prompt_tokens as f64 / prefill,
        decode_tok_s: steps * args.batch as f64,
        ttft_ms: median(samples.iter().map(|s| s.first_token)) * 1e3,
        peak_bytes,
        peak_device_bytes,
        peak_resident_bytes,
        weight_bytes: info.weight_bytes,
        kv_bytes,
        bytes_per_step: read as u64,
        bandwidth,
        roofline: steps * read / bandwidth,
        load_seconds,
        drafts: args.drafting_option().map(|_| DraftCounts {
            drafted: samples.iter().map(|s| s.drafts.drafted).sum(),
            accepted: samples.iter().map(|s| s.drafts.accepted).sum(),
        }),
    };
    if args.json {
        return output::json(&report);
    }
    output::line(format_args!(
        "{}: prefill {:.1} tok/s at {}, decode {:.1} tok/s at batch {}, first token after {:.1} ms",
        report.device,
        report.prefill_tok_s,
        report.prompt_tokens,
        report.decode_tok_s,
        report.batch,
        report.ttft_ms
    ))?;
    if let Some(drafts) = report.drafts {
        output::line(format_args!(
            "drafts: {} of {} tokens accepted",
            drafts.accepted, drafts.drafted
        ))?;
    }
    output::line(format_args!(
        "{} of weights, {} of keys and values, peak {}; {:.1} GB/s of memory, of which decoding uses {:.0} %",
        output::size(report.weight_bytes),
        output::size(report.kv_bytes),
        output::size(report.peak_bytes),
        report.bandwidth / 1e9,
        report.roofline * 100.0
    ))
}

fn measure(
    sessions: &mut [Session],
    prompts: &[Vec<u32>],
    draft: Option<&Arc<Served>>,
    args: &Args,
) -> Result<Sample> {
    let mut prefill = 0.0;
    let mut first_token = 0.0;
    let mut next = Vec::with_capacity(sessions.len());
    for (session, prompt) in sessions.iter_mut().zip(prompts) {
        session.reset()?;
        let start = Instant::now();
        session.prefill(prompt)?;
        prefill += start.elapsed().as_secs_f64();
        next.push(session.argmax()?);
        first_token += start.elapsed().as_secs_f64();
        if args.decode_from_empty {
            session.truncate(1)?;
        }
    }
    let n = sessions.len() as f64;
    let mut drafts = DraftCounts::default();
    let start = Instant::now();
    match &mut *sessions {
        [session] if args.drafting_option().is_some() => {
            let options = GenerateOptions {
                max_tokens: args.gen_tokens,
                ignore_model_stops: true,
                drafts: args.drafts,
                draft_model: draft.cloned(),
                prompt_lookup: args.prompt_lookup,
                ..GenerateOptions::default()
            };
            let answer = session.generate(&options, &mut |_| ControlFlow::Continue(()))?;
            drafts = answer.drafts;
        }
        _ => step_all(sessions, next, args.gen_tokens)?,
    }
    Ok(Sample {
        prefill: prefill / n,
        first_token: first_token / n,
        decode: start.elapsed().as_secs_f64(),
        drafts,
    })
}

/// Appends `count` tokens to each session, greedily, beginning with `next`.
fn step_all(sessions: &mut [Session], mut next: Vec<u32>, count: usize) -> Result<()> {
    let argmax = SamplingOptions::default();
    let greedy = vec![&argmax; sessions.len()];
    for i in 0..count {
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        next = session::step_choose(&mut all, &next, &greedy, i + 1 < count)?;
    }
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

/// Peak resident memory, if the system reports it.
fn peak_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
    }
}
