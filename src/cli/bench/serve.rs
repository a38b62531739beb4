//! `nvfp4 bench --serve`: requests that arrive one after the other, as at a server. Measures rates, the time to the first token, and the time
//! between tokens.

use std::time::{Duration, Instant};

use NVFP4::base::Result;
use NVFP4::format::random;
use NVFP4::session::{
    GenerateOptions, Happened, Queue, QueueOptions, Session, SessionOptions, Submission,
};
use serde::Serialize;

use super::super::{model, output};

/// The seed of arrivals, lengths and tokens.
const SEED: u64 = 0x5e7e;
/// Events that are taken at a time.
const TAKEN: usize = 1024;

/// When requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Arrivals {
    /// All at the beginning.
    All,
    /// By a Poisson process of so many a second.
    Rate(f64),
}

/// Parses `all`, or requests a second.
pub(super) fn arrivals(text: &str) -> std::result::Result<Arrivals, String> {
    match (text, text.parse::<f64>()) {
        ("all", _) => Ok(Arrivals::All),
        (_, Ok(rate)) if rate > 0.0 && rate <= 1e6 => Ok(Arrivals::Rate(rate)),
        _ => Err("takes requests a second, above 0, or the word all".to_owned()),
    }
}

/// Requests to serve.
pub(super) struct Load<'a> {
    pub(super) model: &'a model::ModelArgs,
    pub(super) arrivals: Arrivals,
    pub(super) requests: usize,
    pub(super) prompt_tokens: usize,
    pub(super) gen_tokens: usize,
    /// Share of the lengths by which they vary.
    pub(super) spread: f64,
    pub(super) drafts: Option<usize>,
    pub(super) json: bool,
}

/// A median and two high percentiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Percentiles {
    median: f64,
    p95: f64,
    p99: f64,
    longest: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Percentiles {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.max(1) - 1).copied().unwrap_or(0.0)
        };
        Percentiles {
            median: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            longest: at(1.0),
        }
    }
}

#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    requests: usize,
    /// Requests that arrive in a second; null for all at once.
    rate: Option<f64>,
    prompt_tokens: usize,
    gen_tokens: usize,
    /// From the first arrival to the last token.
    seconds: f64,
    prompt_tok_s: f64,
    gen_tok_s: f64,
    requests_s: f64,
    /// From a request's arrival to its first token.
    ttft_ms: Percentiles,
    /// Between two tokens of a request.
    between_tokens_ms: Percentiles,
    /// Requests that shared a pass over the weights, on average.
    requests_in_a_pass: f64,
}

/// A request, and the times of its tokens.
struct Request {
    arrival: Duration,
    prompt: Vec<u32>,
    gen_tokens: usize,
    last: Option<Instant>,
}

/// The requests, in the order of their arrival. Lengths are even within `spread` of the given ones.
fn requests(args: &Load<'_>, vocabulary: u64) -> Vec<Request> {
    let unit = |stream: u64, i: usize| {
        let bits = random::bits(SEED + stream, i as u64) >> 11;
        (bits as f64 + 0.5) / (1u64 << 53) as f64
    };
    let length = |stream, i, mean: usize| {
        let factor = 1.0 + args.spread * (2.0 * unit(stream, i) - 1.0);
        ((mean as f64 * factor).round() as usize).max(1)
    };
    let mut now = 0.0;
    let made = (0..args.requests).map(|i| {
        if let (Arrivals::Rate(rate), true) = (args.arrivals, i > 0) {
            now -= unit(0, i).ln() / rate;
        }
        let count = length(1, i, args.prompt_tokens) as u64;
        let tokens =
            (0..count).map(|t| (random::bits(SEED ^ (i as u64 + 1), t) % vocabulary) as u32);
        Request {
            arrival: Duration::from_secs_f64(now),
            prompt: tokens.collect(),
            gen_tokens: length(2, i, args.gen_tokens),
            last: None,
        }
    });
    made.collect()
}

pub(super) fn run(args: &Load<'_>) -> Result<()> {
    let model = args.model.load()?;
    model::warn_of_template(&model);
    let mut all = requests(args, model.spec().vocab_size as u64);
    let queue = Queue::new(QueueOptions {
        running: args.requests,
        submissions: args.requests,
        ..QueueOptions::default()
    })?;
    let submit = |number: usize, request: &mut Request| -> Result<()> {
        let options = SessionOptions {
            context: request.prompt.len() + request.gen_tokens,
            kv: args.model.kv.into(),
            ..SessionOptions::default()
        };
        let generate = GenerateOptions {
            max_tokens: request.gen_tokens,
            ignore_model_stops: true,
            drafts: args.drafts.or(Some(0)),
            ..GenerateOptions::default()
        };
        let (model, prompt) = (model.clone(), std::mem::take(&mut request.prompt));
        queue.submit(Submission {
            work: Box::new(move |on_piece| {
                let mut session = Session::new(model, &options)?;
                let made = session.generate_after(&prompt, &generate, on_piece)?;
                Ok(made.finish)
            }),
            priority: 0,
            deadline: None,
            is_cancelled: Box::new(|| false),
            user_data: number,
        })?;
        Ok(())
    };
    let prompt_tokens: usize = all.iter().map(|request| request.prompt.len()).sum();
    let gen_tokens: usize = all.iter().map(|request| request.gen_tokens).sum();
    let bar = output::count_bar("serving", args.requests as u64);
    let (mut first, mut between) = (Vec::new(), Vec::new());
    let (mut submitted, mut ended) = (0, 0);
    let passes = model.pass_counts();
    let start = Instant::now();
    while ended < args.requests {
        while let Some(next) = all.get_mut(submitted)
            && next.arrival <= start.elapsed()
        {
            submit(submitted, next)?;
            submitted += 1;
        }
        let next = all.get(submitted);
        let pause = next.map(|next| next.arrival.saturating_sub(start.elapsed()));
        let events = queue.wait(TAKEN, pause)?;
        let now = Instant::now();
        for event in events {
            let request = &mut all[event.user_data];
            match event.what {
                Happened::Piece { token: Some(_), .. } => match request.last.replace(now) {
                    None => first.push((now - start - request.arrival).as_secs_f64() * 1e3),
                    Some(last) => between.push((now - last).as_secs_f64() * 1e3),
                },
                Happened::Piece { .. } => {}
                Happened::Ended(Ok(_)) => {
                    ended += 1;
                    bar.inc(1);
                }
                Happened::Ended(Err(e)) => {
                    return Err(e.within(format_args!("request {}", event.user_data)));
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let after = model.pass_counts();
    let report = Report {
        model: model::shown(&args.model.model),
        device: model.device().name(),
        requests: args.requests,
        rate: match args.arrivals {
            Arrivals::All => None,
            Arrivals::Rate(rate) => Some(rate),
        },
        prompt_tokens,
        gen_tokens,
        seconds,
        prompt_tok_s: prompt_tokens as f64 / seconds,
        gen_tok_s: gen_tokens as f64 / seconds,
        requests_s: args.requests as f64 / seconds,
        ttft_ms: Percentiles::of(first),
        between_tokens_ms: Percentiles::of(between),
        requests_in_a_pass: (after.requests - passes.requests) as f64
            / (after.passes - passes.passes).max(1) as f64,
    };
    show(args, &report)
}

fn show(args: &Load<'_>, report: &Report) -> Result<()> {
    if args.json {
        return output::json(report);
    }
    output::line(format_args!(
        "{}: {} requests in {:.2} s: {:.2} requests, {:.1} prompt tokens and {:.1} generated tokens a second",
        report.device,
        report.requests,
        report.seconds,
        report.requests_s,
        report.prompt_tok_s,
        report.gen_tok_s
    ))?;
    for (name, times) in [
        ("to the first token", report.ttft_ms),
        ("between tokens", report.between_tokens_ms),
    ] {
        output::line(format_args!(
            "{name}: median {:.1} ms, 95 % {:.1} ms, 99 % {:.1} ms, longest {:.1} ms",
            times.median, times.p95, times.p99, times.longest
        ))?;
    }
    output::line(format_args!(
        "{:.1} requests in a pass on average",
        report.requests_in_a_pass
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_nearest_rank() {
        let of = Percentiles::of((1..=200).rev().map(f64::from).collect());
        let expected = Percentiles {
            median: 100.0,
            p95: 190.0,
            p99: 198.0,
            longest: 200.0,
        };
        assert_eq!(of, expected);
        assert_eq!(Percentiles::of(vec![7.0]).p99, 7.0);
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    #[test]
    fn arrivals_are_a_rate_or_all() {
        assert_eq!(arrivals("all"), Ok(Arrivals::All));
        assert_eq!(arrivals("2.5"), Ok(Arrivals::Rate(2.5)));
        for wrong in ["0", "-1", "nan", "inf", "some"] {
            assert!(arrivals(wrong).is_err(), "{wrong}");
        }
    }
}
