//! Mixtures of experts against f64: rows are routed, multiplied, added up and normalized.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::{
    self, Activation, BesideExperts, DeviceBuffer, ExpertMatrices, ExpertScratch, ExpertTable,
    ExpertUnit, ExpertsPlan, GatedUnit, Gpu, Hardware, Input, Layout, LinearScratch, NextNorm,
    Output, RoutePlan, RouterVectors, Routing, SharedExpert,
};
use NVFP4::tensor::SigmoidScoring;

use crate::common::expect_kind;
use crate::support::{
    DENSE, Dense, EPS, F16, HalfRows, Weight, as_f64, assert_close, gpu, normal, poisoned, product,
    read_f32, read_rows, rms_norm, upload, with_bias,
};

const HIDDEN: usize = 272;
/// Features between an expert's projections.
const WIDE: usize = 144;
/// Divisor of the activations between the projections of an expert.
const DIVISOR: u32 = 64;
/// The clamped unit; many gates and ups lie beyond its limit.
const CLAMPED: GatedUnit = GatedUnit::Clamped {
    alpha: 1.702,
    limit: 0.5,
};

/// Forms of experts and their router.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// SwiGLU, without biases.
    Qwen,
    /// Clamped units, and biases of experts and router.
    GptOss,
    /// Squared ReLUs without gates, and a router by sigmoids.
    Nemotron,
    /// Beside an MLP of all rows, with norms of both, and factors of the experts' weights.
    Gemma4,
}

/// Experts and a router for some rows, the expert of all rows, and the residual stream that their results are added to.
struct Mixture<'a> {
    gpu: &'a Arc<Gpu>,
    routing: Routing,
    rows: usize,
    /// The gate, up and down projections of each expert.
    experts: Vec<[Weight; 3]>,
    router: Dense,
    kind: Kind,
    router_bias: Vec<f32>,
    /// Added to the sigmoids for the choice.
    correction: Vec<f32>,
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
    /// Factors of the experts' weights.
    factors: Vec<f32>,
    /// The norms of the experts' sum, of the MLP beside them, and of both.
    norms: [Vec<f32>; 3],
}

/// The factor of the residual stream after a mixture beside an MLP.
const STREAM_FACTOR: f32 = 0.625;

/// Rows of the residual stream and of its norm on the device, and the bits of each row's note of a layer whose logits are not finite.
struct Results {
    residual: Vec<f32>,
    normed: Vec<f32>,
    unfit: Vec<f32>,
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
            kind: Kind::Qwen,
            router_bias: normal(seed + 7, routing.experts),
            correction: normal(seed + 8, routing.experts),
            gate: dense(1, seed + 3),
            has_gate: number.is_multiple_of(2),
            has_shared: number != 1,
            x: HalfRows::new(gpu, &normal(seed + 1, rows * HIDDEN)),
            made: normal(seed + 4, rows * HIDDEN),
            residual: normal(seed + 5, rows * HIDDEN),
            next: normal(seed + 6, HIDDEN),
            factors: normal(seed + 9, routing.experts),
            norms: [10, 11, 12].map(|i| normal(seed + i, HIDDEN)),
        }
    }

    /// Runs all kernels of the mixture.
    fn run(&self) -> Results {
        let (gpu, rows) = (self.gpu, self.rows);
        let layout = Layout::taken(&Hardware::of(gpu).unwrap(), rows);
        let normed = poisoned(gpu, layout.elements(rows, HIDDEN) * 2);
        let made = upload(gpu, &self.made);
        let (residual, next) = (upload(gpu, &self.residual), upload(gpu, &self.next));
        let unfit = upload(gpu, &vec![0u32; rows]);
        let scratch = ExpertScratch::new(gpu, self.routing, rows, WIDE, HIDDEN).unwrap();
        self.route_rows(&unfit, &scratch);
        self.run_experts(&scratch);
        let shared = self.has_shared.then_some(SharedExpert {
            made: &made,
            gated: self.has_gate,
        });
        let follows = NextNorm {
            weight: &next,
            layout,
            rows: &normed,
            factors: None,
        };
        if self.kind == Kind::Gemma4 {
            let [experts_norm, dense_norm, post_norm] =
                self.norms.each_ref().map(|n| upload(gpu, n));
            let factor = upload(gpu, &[STREAM_FACTOR]);
            let beside = BesideExperts {
                dense: &made,
                experts_norm: &experts_norm,
                dense_norm: &dense_norm,
                post_norm: &post_norm,
                scale: Some(&factor),
            };
            let (routing, next) = (&self.routing, Some(follows));
            cuda::sum_experts_beside(
                gpu, routing, beside, EPS, rows, HIDDEN, &residual, next, &scratch,
            )
            .unwrap();
        } else {
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
        }
        Results {
            residual: read_f32(&residual, rows * HIDDEN),
            normed: read_rows(layout, &normed, rows, HIDDEN),
            unfit: read_f32(&unfit, rows),
        }
    }

    /// Routes the rows.
    fn route_rows(&self, unfit: &DeviceBuffer, scratch: &ExpertScratch) {
        let (gpu, rows) = (self.gpu, self.rows);
        let linear_scratch = LinearScratch::new(gpu, rows, HIDDEN, 0).unwrap();
        let [bias, correction, factors] =
            [&self.router_bias, &self.correction, &self.factors].map(|v| upload(gpu, v));
        let router_bias = (self.kind == Kind::GptOss).then_some(&bias);
        let gate = self.has_gate.then_some((&self.gate.device, None));
        let router = std::iter::once((&self.router.device, router_bias));
        let matrices: Vec<_> = router.chain(gate).collect();
        let (logits, stride) = cuda::router_logits(&self.routing, &matrices, scratch).unwrap();
        let x = Input::Plain(&self.x.device, 1.0);
        let (output, own) = (Output::F32, &linear_scratch);
        cuda::linear(gpu, x, rows, &matrices, output, logits, stride, own).unwrap();
        let vectors = RouterVectors {
            correction: self.routing.sigmoid.map(|_| &correction),
            factors: (self.kind == Kind::Gemma4).then_some(&factors),
        };
        let (routing, notes) = (&self.routing, (unfit, 5));
        let plan = RoutePlan::choose(routing, rows);
        cuda::route(gpu, routing, vectors, &plan, scratch, notes).unwrap();
    }

    /// Runs the projections of the rows' experts.
    fn run_experts(&self, scratch: &ExpertScratch) {
        let (gpu, rows, x) = (self.gpu, self.rows, &self.x.device);
        let matrices = self.experts.iter().map(|expert| {
            let [gate, up, down] = expert.each_ref().map(|w| match self.kind {
                Kind::GptOss => w.biased(),
                Kind::Qwen | Kind::Nemotron | Kind::Gemma4 => w.plain(),
            });
            ExpertMatrices {
                gate: (self.kind != Kind::Nemotron).then_some(gate),
                up,
                down,
            }
        });
        let projections: Vec<ExpertMatrices<'_>> = matrices.collect();
        let table = ExpertTable::new(gpu, &projections).unwrap();
        let unit = match self.kind {
            Kind::Qwen | Kind::Gemma4 => ExpertUnit::Gated(GatedUnit::Plain(Activation::Silu)),
            Kind::GptOss => ExpertUnit::Gated(CLAMPED),
            Kind::Nemotron => ExpertUnit::ReluSquared,
        };
        let unit = (unit, DIVISOR);
        let (up, gated) = (projections[0].up.0.shape(), projections[0].gate.is_some());
        let plan = ExpertsPlan::gate_up(&self.routing, rows, up, gated).unwrap();
        cuda::experts_gate_up(gpu, &self.routing, &table, x, &plan, unit, scratch).unwrap();
        let (plan, divisor) = (
            ExpertsPlan::down(&self.routing, rows, up).unwrap(),
            DIVISOR as f32,
        );
        cuda::experts_down(gpu, &self.routing, &table, &plan, divisor, scratch).unwrap();
    }

    /// The experts that a row goes to, and their weights.
    fn route(&self, row: &[f64]) -> Vec<(usize, f64)> {
        let mut logits = product(row, &self.router.values, HIDDEN);
        if self.kind == Kind::GptOss {
            logits = with_bias(&logits, &self.router_bias);
        }
        let Routing {
            experts, per_token, ..
        } = self.routing;
        let all: f64 = logits.iter().map(|l| l.exp()).sum();
        let score = |e: usize| match self.routing.sigmoid {
            Some(_) => 1.0 / (1.0 + (-logits[e]).exp()),
            None => logits[e].exp() / all,
        };
        let sum = |e: usize| match self.routing.sigmoid {
            Some(_) => score(e) + f64::from(self.correction[e]),
            None => score(e),
        };
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| sum(b).total_cmp(&sum(a)));
        let mut scale = 1.0;
        if let Some(rule) = self.routing.sigmoid {
            scale = f64::from(rule.scale);
            let size = experts / rule.groups;
            // Experts of a group follow each other best first.
            let of_group = |g: usize| {
                let best = order.iter().filter(|&&e| e / size == g).take(2);
                best.map(|&e| sum(e)).sum::<f64>()
            };
            let mut groups: Vec<usize> = (0..rule.groups).collect();
            groups.sort_by(|&a, &b| of_group(b).total_cmp(&of_group(a)));
            groups.truncate(rule.top_groups);
            order.retain(|e| groups.contains(&(e / size)));
        }
        let chosen = &order[..per_token];
        let total: f64 = match self.routing.normalized {
            true => chosen.iter().map(|&e| score(e)).sum(),
            false => 1.0,
        };
        let factor = |e: usize| match self.kind {
            Kind::Gemma4 => f64::from(self.factors[e]),
            _ => 1.0,
        };
        let weights = chosen
            .iter()
            .map(|&e| (e, score(e) / total * scale * factor(e)));
        weights.collect()
    }

    /// The output of an expert for a row.
    fn expert(&self, expert: usize, row: &[f64]) -> Vec<f64> {
        let [gate, up, down] = &self.experts[expert];
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let of = |w: &Weight, x: &[f64]| match self.kind {
            Kind::GptOss => w.biased_product(x),
            Kind::Qwen | Kind::Nemotron | Kind::Gemma4 => w.product(x),
        };
        let (gate, up) = (of(gate, row), of(up, row));
        let unit = |(&g, &u): (&f64, &f64)| match (self.kind, CLAMPED) {
            (Kind::GptOss, GatedUnit::Clamped { alpha, limit }) => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let g = g.min(limit);
                (u.clamp(-limit, limit) + 1.0) * g * sigmoid(alpha * g)
            }
            (Kind::Nemotron, _) => u.max(0.0).powi(2),
            _ => g * sigmoid(g) * u,
        };
        let inner: Vec<f64> = gate.iter().zip(&up).map(unit).collect();
        of(down, &inner)
    }

    /// Adds the experts of a row and the MLP beside them to its residual stream.
    fn add_beside(&self, row: &[f64], stream: &mut [f64], made: &[f32]) {
        let mut experts = vec![0.0; HIDDEN];
        for (expert, weight) in self.route(row) {
            let out = self.expert(expert, row);
            let elements = experts.iter_mut().zip(&out);
            elements.for_each(|(s, v)| *s += weight * v);
        }
        let normed = |x: &[f64], norm: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            let elements = x.iter().zip(norm);
            elements.map(|(v, &w)| v * factor * f64::from(w)).collect()
        };
        let [experts_norm, dense_norm, post_norm] = &self.norms;
        let experts = normed(&experts, experts_norm);
        let dense = normed(&as_f64(made), dense_norm);
        let both: Vec<f64> = experts.iter().zip(&dense).map(|(a, b)| a + b).collect();
        for (x, v) in stream.iter_mut().zip(normed(&both, post_norm)) {
            *x = (*x + v) * f64::from(STREAM_FACTOR);
        }
    }

    /// The residual stream afterwards, in f64.
    fn expected(&self) -> Vec<f64> {
        let mut want = as_f64(&self.residual);
        let sums = want.chunks_exact_mut(HIDDEN);
        let rows = self.x.exact.chunks_exact(HIDDEN);
        for ((row, sum), made) in rows.zip(sums).zip(self.made.chunks_exact(HIDDEN)) {
            if self.kind == Kind::Gemma4 {
                self.add_beside(row, sum, made);
                continue;
            }
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

/// Scores by sigmoids, of the best of so many groups.
const fn sigmoids(groups: usize, top_groups: usize) -> Option<SigmoidScoring> {
    Some(SigmoidScoring {
        groups,
        top_groups,
        scale: 2.5,
    })
}

/// A mixture: experts, experts per row, whether their scores are normalized, rows, the form, and sigmoids in place of a softmax.
type Case = (usize, usize, bool, usize, Kind, Option<SigmoidScoring>);

const MIXTURES: [Case; 18] = [
    (16, 4, true, 1, Kind::Qwen, None),
    (16, 4, false, 17, Kind::Qwen, None),
    (128, 8, true, 2, Kind::Qwen, None),
    (40, 3, false, 33, Kind::Qwen, None),
    (6, 2, true, 60, Kind::Qwen, None),
    (4, 2, true, 150, Kind::Qwen, None),
    (32, 4, true, 1, Kind::GptOss, None),
    (8, 4, true, 90, Kind::GptOss, None),
    (128, 6, true, 1, Kind::Nemotron, sigmoids(1, 1)),
    (32, 4, false, 40, Kind::Nemotron, sigmoids(8, 3)),
    (6, 2, true, 60, Kind::Nemotron, sigmoids(3, 2)),
    (8, 4, true, 150, Kind::Nemotron, sigmoids(1, 1)),
    (256, 8, true, 1, Kind::Qwen, None),
    (24, 4, false, 16, Kind::Qwen, None),
    (40, 3, true, 16, Kind::Qwen, None),
    (64, 6, true, 11, Kind::Nemotron, sigmoids(4, 2)),
    (128, 8, true, 1, Kind::Gemma4, None),
    (16, 4, true, 40, Kind::Gemma4, None),
];

/// A mixture of experts, of one row to so many that tiles are as large as they get. Routers are of every type, some mixtures have an expert
/// of all rows, and some have biases and clamped units, or no gates and sigmoids for scores, in groups or not.
#[test]
fn mixtures_of_experts_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, (experts, per_token, normalized, rows, kind, sigmoid)) in
        MIXTURES.into_iter().enumerate()
    {
        let routing = Routing {
            experts,
            per_token,
            normalized,
            sigmoid,
        };
        let mixture = Mixture {
            kind,
            ..Mixture::new(&gpu, i, routing, rows)
        };
        let got = mixture.run();
        let what = format!("{per_token} of {experts} experts, {rows} rows");
        let want = mixture.expected();
        assert_close(&got.residual, &want, F16, &what);
        let added: Vec<f32> = want.iter().map(|&v| v as f32).collect();
        let normalized = as_f64(&rms_norm(&added, &mixture.next));
        let of_norm = format!("{what}, the norm after");
        assert_close(&got.normed, &normalized, 2.0 * F16, &of_norm);
        assert!(got.unfit.iter().all(|v| v.to_bits() == 0), "{what}");
        check_other_types(&gpu, &mixture.router);
    }
}

/// Experts in another type than NVFP4 are refused.
fn check_other_types(gpu: &Arc<Gpu>, other: &Dense) {
    let other = (&other.device, None);
    let matrices = ExpertMatrices {
        gate: None,
        up: other,
        down: other,
    };
    let refused = ExpertTable::new(gpu, &[matrices]);
    let what = "the up projection of expert 0";
    expect_kind(refused, ErrorKind::Unsupported, what);
}
