//! Mixtures of experts against f64: rows are routed, multiplied, added up and normalized.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::{
    self, Activation, Biased, DeviceBuffer, ExpertScratch, ExpertTable, GatedUnit, Gpu, Hardware,
    Layout, LinearScratch, NextNorm, Routing, SharedExpert,
};

use crate::common::expect_kind;
use crate::support::{
    DENSE, Dense, EPS, F16, HalfRows, Weight, as_f64, assert_close, gpu, normal, poisoned, product,
    read_f32, read_rows, rms_norm, upload, with_bias,
};

const HIDDEN: usize = 272;
/// Features between an expert's projections.
const WIDE: usize = 144;
/// What the activations between an expert's projections are divided by.
const DIVISOR: u32 = 64;
/// Of the clamped unit: many gates and ups lie beyond the limit.
const CLAMPED: GatedUnit = GatedUnit::Clamped {
    alpha: 1.702,
    limit: 0.5,
};

/// Experts and a router for some rows, the expert of all rows, and the residual stream that their results are added to.
struct Mixture<'a> {
    gpu: &'a Arc<Gpu>,
    routing: Routing,
    rows: usize,
    /// The gate, up and down projections of each expert.
    experts: Vec<[Weight; 3]>,
    router: Dense,
    /// Whether experts and the router have biases, and units are clamped, as in gpt-oss.
    is_gpt_oss: bool,
    router_bias: Vec<f32>,
    /// The gate of the expert of all rows.
    gate: Dense,
    has_gate: bool,
    has_shared: bool,
    x: HalfRows,
    /// Results of the expert of all rows.
    made: Vec<f32>,
    residual: Vec<f32>,
    /// The weight of the norm of the sum.
    next: Vec<f32>,
}

/// Rows of the residual stream and of its norm on the device, and the note of a layer whose values do not fit.
struct Results {
    residual: Vec<f32>,
    normed: Vec<f32>,
    unfit: u32,
}

impl<'a> Mixture<'a> {
    /// The mixture of a case, by its number.
    fn new(gpu: &'a Arc<Gpu>, number: usize, routing: Routing, rows: usize) -> Mixture<'a> {
        let seed = 900 + 1000 * number as u64;
        let expert = |e: u64| {
            [(WIDE, HIDDEN, 0), (WIDE, HIDDEN, 1), (HIDDEN, WIDE, 2)]
                .map(|(rows, cols, which)| Weight::new(gpu, rows, cols, seed + 3 * e + which))
        };
        let dense = |rows: usize, seed| {
            let values = normal(seed, rows * HIDDEN);
            let small: Vec<f32> = values.iter().map(|v| v * 0.05).collect();
            Dense::new(gpu, [rows, HIDDEN], DENSE[number % 3], &small)
        };
        Mixture {
            gpu,
            routing,
            rows,
            experts: (0..routing.experts as u64).map(expert).collect(),
            router: dense(routing.experts, seed + 2),
            is_gpt_oss: false,
            router_bias: normal(seed + 7, routing.experts),
            gate: dense(1, seed + 3),
            has_gate: number.is_multiple_of(2),
            has_shared: number != 1,
            x: HalfRows::new(gpu, &normal(seed + 1, rows * HIDDEN)),
            made: normal(seed + 4, rows * HIDDEN),
            residual: normal(seed + 5, rows * HIDDEN),
            next: normal(seed + 6, HIDDEN),
        }
    }

    /// Runs all kernels of the mixture.
    fn run(&self) -> Results {
        let (gpu, rows) = (self.gpu, self.rows);
        let layout = Layout::taken(&Hardware::of(gpu).unwrap(), rows);
        let normed = poisoned(gpu, layout.elements(rows, HIDDEN) * 2);
        let made = upload(gpu, &self.made);
        let (residual, next) = (upload(gpu, &self.residual), upload(gpu, &self.next));
        let unfit = upload(gpu, &[0u32]);
        let scratch = ExpertScratch::new(gpu, self.routing, rows, WIDE, HIDDEN).unwrap();
        self.run_experts(&unfit, &scratch);
        let shared = self.has_shared.then_some(SharedExpert {
            made: &made,
            gated: self.has_gate,
        });
        let follows = NextNorm {
            weight: &next,
            layout,
            rows: &normed,
        };
        cuda::sum_experts(
            gpu,
            &self.routing,
            shared,
            EPS,
            rows,
            HIDDEN,
            &residual,
            Some(follows),
            &scratch,
        )
        .unwrap();
        Results {
            residual: read_f32(&residual, rows * HIDDEN),
            normed: read_rows(layout, &normed, rows, HIDDEN),
            unfit: read_f32(&unfit, 1)[0].to_bits(),
        }
    }

    /// Routes the rows, and runs the projections of their experts.
    fn run_experts(&self, unfit: &DeviceBuffer, scratch: &ExpertScratch) {
        let (gpu, rows, x) = (self.gpu, self.rows, &self.x.device);
        let projections: Vec<[Biased<'_>; 3]> = self
            .experts
            .iter()
            .map(|expert| {
                expert.each_ref().map(|w| match self.is_gpt_oss {
                    true => w.biased(),
                    false => w.plain(),
                })
            })
            .collect();
        let table = ExpertTable::new(gpu, &projections).unwrap();
        let linear_scratch = LinearScratch::new(gpu, rows, HIDDEN, 0).unwrap();
        let glu = match self.is_gpt_oss {
            true => CLAMPED,
            false => GatedUnit::Plain(Activation::Silu),
        };
        let router_bias = upload(gpu, &self.router_bias);
        cuda::route(
            gpu,
            &self.routing,
            (&self.router.device, self.is_gpt_oss.then_some(&router_bias)),
            self.has_gate.then_some(&self.gate.device),
            x,
            rows,
            scratch,
            &linear_scratch,
            (unfit, 5),
        )
        .unwrap();
        let glu = (glu, DIVISOR);
        cuda::experts_gate_up(gpu, &self.routing, &table, x, rows, glu, scratch).unwrap();
        cuda::experts_down(gpu, &self.routing, &table, rows, DIVISOR as f32, scratch).unwrap();
    }

    /// The experts that a row goes to, and their weights.
    fn route(&self, row: &[f64]) -> Vec<(usize, f64)> {
        let mut logits = product(row, &self.router.values, HIDDEN);
        if self.is_gpt_oss {
            logits = with_bias(&logits, &self.router_bias);
        }
        let all: f64 = logits.iter().map(|l| l.exp()).sum();
        let mut order: Vec<usize> = (0..self.routing.experts).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let chosen = &order[..self.routing.per_token];
        let total: f64 = match self.routing.normalized {
            true => chosen.iter().map(|&e| logits[e].exp() / all).sum(),
            false => 1.0,
        };
        let weights = chosen.iter().map(|&e| (e, logits[e].exp() / all / total));
        weights.collect()
    }

    /// The output of an expert for a row.
    fn expert(&self, expert: usize, row: &[f64]) -> Vec<f64> {
        let [gate, up, down] = &self.experts[expert];
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let of = |w: &Weight, x: &[f64]| match self.is_gpt_oss {
            true => w.biased_product(x),
            false => w.product(x),
        };
        let (gate, up) = (of(gate, row), of(up, row));
        let unit = |(&g, &u): (&f64, &f64)| match CLAMPED {
            GatedUnit::Clamped { alpha, limit } if self.is_gpt_oss => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let g = g.min(limit);
                (u.clamp(-limit, limit) + 1.0) * g * sigmoid(alpha * g)
            }
            _ => g * sigmoid(g) * u,
        };
        let inner: Vec<f64> = gate.iter().zip(&up).map(unit).collect();
        of(down, &inner)
    }

    /// The residual stream afterwards, in f64.
    fn expected(&self) -> Vec<f64> {
        let mut want = as_f64(&self.residual);
        let sums = want.chunks_exact_mut(HIDDEN);
        let rows = self.x.exact.chunks_exact(HIDDEN);
        for ((row, sum), made) in rows.zip(sums).zip(self.made.chunks_exact(HIDDEN)) {
            for (expert, weight) in self.route(row) {
                let out = self.expert(expert, row);
                sum.iter_mut().zip(&out).for_each(|(s, v)| *s += weight * v);
            }
            if self.has_shared {
                let factor = match self.has_gate {
                    true => 1.0 / (1.0 + (-product(row, &self.gate.values, HIDDEN)[0]).exp()),
                    false => 1.0,
                };
                let elements = sum.iter_mut().zip(made);
                elements.for_each(|(s, &v)| *s += factor * f64::from(v));
            }
        }
        want
    }
}

/// A mixture of experts, of one row to so many that tiles are as large as they get. Routers are of every type, some mixtures have an expert
/// of all rows, and the last two have biases and clamped units.
#[test]
fn mixtures_of_experts_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, (experts, per_token, normalized, rows)) in [
        (16, 4, true, 1),
        (16, 4, false, 17),
        (128, 8, true, 2),
        (40, 3, false, 33),
        (6, 2, true, 60),
        (4, 2, true, 150),
        (32, 4, true, 1),
        (8, 4, true, 90),
    ]
    .into_iter()
    .enumerate()
    {
        let routing = Routing {
            experts,
            per_token,
            normalized,
        };
        let mixture = Mixture {
            is_gpt_oss: i >= 6,
            ..Mixture::new(&gpu, i, routing, rows)
        };
        let got = mixture.run();
        // Experts that are held otherwise are refused.
        let router = &mixture.router.device;
        expect_kind(
            ExpertTable::new(&gpu, &[[(router, None), (router, None), (router, None)]]),
            ErrorKind::Unsupported,
            "the gate projection of expert 0",
        );

        let what = format!("{per_token} of {experts} experts, {rows} rows");
        let want = mixture.expected();
        assert_close(&got.residual, &want, F16, &what);
        let added: Vec<f32> = want.iter().map(|&v| v as f32).collect();
        let normalized = as_f64(&rms_norm(&added, &mixture.next));
        let of_norm = format!("{what}, the norm after");
        assert_close(&got.normed, &normalized, 2.0 * F16, &of_norm);
        assert_eq!(got.unfit, 0, "{what}");
    }
}
