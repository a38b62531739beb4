//! Norms and activations that are fused into products, against f64.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::{
    self, Biased, DeviceBuffer, FusedNorm, GemmPlan, Glu, Gpu, Hardware, Input, InputForm, Layout,
    LinearScratch, MatrixShape, NormScratch, Output, ResidualRow,
};
use NVFP4::tensor::WeightType;

use crate::common::expect_kind;
use crate::support::{
    EPS, EXACT, F16, Product, Weight, as_f64, assert_close, gpu, in_layout, joined_products,
    norm_factor, normal, poisoned, read_f16, read_f32, rms_norm, rounded, shapes, sums, swiglu,
    upload,
};

fn norm_factors(x: &[f32], width: usize) -> Vec<f64> {
    let rows = x.chunks_exact(width);
    rows.map(norm_factor).collect()
}

/// Random rows that a kernel has normalized, as the input of products.
struct Normalized<'a> {
    gpu: &'a Arc<Gpu>,
    scratch: &'a LinearScratch,
    m: usize,
    k: usize,
    layout: Layout,
    rows: DeviceBuffer,
    /// The rows that the host has normalized, as f16 holds them.
    exact: Vec<f64>,
    seed: u64,
}

impl<'a> Normalized<'a> {
    /// Normalizes `m` rows of `k`, and checks the factors that the norm leaves.
    fn new(
        gpu: &'a Arc<Gpu>,
        scratch: &'a LinearScratch,
        m: usize,
        k: usize,
        seed: u64,
    ) -> Normalized<'a> {
        let (x, norm) = (normal(seed + 10, m * k), normal(seed + 11, k));
        let (device_x, device_norm) = (upload(gpu, &x), upload(gpu, &norm));
        let layout = Layout::taken(&Hardware::of(gpu).unwrap(), m);
        let rows = poisoned(gpu, layout.elements(m, k) * 2);
        let factors = poisoned(gpu, m * 4);
        cuda::rms_norm(
            gpu,
            &device_x,
            0,
            &device_norm,
            EPS,
            m,
            k,
            &rows,
            layout,
            Some(&factors),
        )
        .unwrap();
        let want = norm_factors(&x, k);
        assert_close(&read_f32(&factors, m), &want, EXACT, "factors");
        Normalized {
            gpu,
            scratch,
            m,
            k,
            layout,
            rows,
            exact: rounded(&rms_norm(&x, &norm)),
            seed,
        }
    }

    fn weight(&self, features: usize, number: u64) -> Weight {
        Weight::new(self.gpu, features, self.k, self.seed + number)
    }

    /// Products with three biased weights in one call.
    fn check_products(&self, features: [usize; 3]) {
        let weights = [0, 1, 2].map(|i| self.weight(features[i], i as u64));
        let matrices = weights.each_ref().map(Weight::biased);
        let input = self.layout.input(&self.rows, 1.0);
        let got = Product::of(self.gpu, self.scratch, input, self.m, &matrices).f32s();
        let want = joined_products(&weights, &self.exact);
        // A norm in f32 rounds some values to the other neighbour in f16.
        assert_close(&got, &want, 2e-4, "norm and three products");
    }

    /// The gated linear unit of two weights, where a kernel fuses it.
    fn check_gated(&self, features: usize) {
        let (gate, up) = (self.weight(features, 20), self.weight(features, 21));
        let both = [gate.plain(), up.plain()];
        let hardware = Hardware::of(self.gpu).unwrap();
        let input = self.layout.input(&self.rows, 1.0);
        let (glu, form) = (self.layout.glu(Glu::default()), input.form());
        if GemmPlan::find(&hardware, self.m, &shapes(&both), glu, form).is_none() {
            return;
        }
        let product = Product::of(self.gpu, self.scratch, input, self.m, &both);
        let want = swiglu(&self.exact, &gate, &up);
        assert_close(&product.gated(self.layout), &want, F16, "norm, gate, up");
    }
}

#[test]
fn fused_norms_and_activations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let scratch = LinearScratch::new(&gpu, 128, 4400, 0).unwrap();
    for (i, &(m, k, features)) in [
        (1, 2560, [512, 128, 120]),
        (1, 4400, [40, 24, 8]),
        (4, 576, [72, 40, 33]),
        (5, 1168, [136, 40, 9]),
        (6, 9728, [2560, 16, 8]),
        (8, 2560, [512, 128, 120]),
        (8, 20000, [40, 8, 8]),
        (16, 256, [64, 8, 16]),
        (11, 1024, [256, 64, 64]),
        (45, 528, [200, 8, 64]),
        (128, 1024, [301, 64, 64]),
    ]
    .iter()
    .enumerate()
    {
        let rows = Normalized::new(&gpu, &scratch, m, k, 50 * i as u64);
        rows.check_products(features);
        rows.check_gated(features[0]);
    }
}

/// A row that products make themselves: `x` plus the norm of `y`, which is then normalized.
struct MadeRow {
    y: DeviceBuffer,
    post: DeviceBuffer,
    x: DeviceBuffer,
    next: DeviceBuffer,
    sum: DeviceBuffer,
    /// The sum, and its norm, on the host.
    want_sum: Vec<f32>,
    want_normed: Vec<f64>,
}

impl MadeRow {
    fn new(gpu: &Arc<Gpu>, k: usize, seed: u64) -> MadeRow {
        let [y, post, x, next] = [2, 3, 4, 5].map(|i| normal(seed + i, k));
        let normed = rms_norm(&y, &post);
        let sum: Vec<f32> = normed.iter().zip(&x).map(|(a, b)| a + b).collect();
        MadeRow {
            y: upload(gpu, &y),
            post: upload(gpu, &post),
            x: upload(gpu, &x),
            next: upload(gpu, &next),
            sum: poisoned(gpu, k * 4),
            want_normed: as_f64(&rms_norm(&sum, &next)),
            want_sum: sum,
        }
    }

    fn input(&self) -> Input<'_> {
        Input::Residual(ResidualRow {
            y: &self.y,
            post: &self.post,
            x: &self.x,
            weight: &self.next,
            sum: &self.sum,
            eps: EPS,
        })
    }
}

/// Products of a row that they compute themselves: the residual stream plus the norm of an addend, normalized.
#[test]
fn products_of_residual_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let hardware = Hardware::of(&gpu).unwrap();
    for (i, (k, n)) in [(48, 40), (2560, 264), (3840, 4096), (4096, 72)]
        .into_iter()
        .enumerate()
    {
        let seed = 2000 + 20 * i as u64;
        let [first, second] = [0, 1].map(|i| Weight::new(&gpu, n, k, seed + i));
        let row = MadeRow::new(&gpu, k, seed);
        let x = &row.want_normed;
        let scratch = LinearScratch::new(&gpu, 1, k, 0).unwrap();
        let both = [first.plain(), second.plain()];
        let products = [first.product(x), second.product(x)].concat();
        let gated = swiglu(x, &first, &second);
        for (output, want) in [
            (Output::F32, products),
            (Output::Glu(Glu::default()), gated),
        ] {
            let what = format!("K = {k}, N = {n}, {output:?}");
            let form = InputForm::Residual;
            let served = GemmPlan::find(&hardware, 1, &shapes(&both), output, form);
            assert!(served.is_some(), "{what}");
            let features = want.len();
            let out = poisoned(&gpu, features * 4);
            Product::of(&gpu, &scratch, row.input(), 1, &both)
                .output(output)
                .stride(features)
                .write(&out);
            let got = match output {
                Output::F32 => read_f32(&out, features),
                _ => read_f16(&out, features),
            };
            assert_close(&got, &want, 2.0 * F16, &what);
            let (got, want) = (read_f32(&row.sum, k), as_f64(&row.want_sum));
            assert_close(&got, &want, EXACT, &format!("{what}, the sum"));
        }
    }
    // Longer rows, and several, are for a kernel of their own.
    for (m, cols) in [(1, 4112), (2, 2560)] {
        let shape = MatrixShape {
            storage: WeightType::Nvfp4,
            rows: 512,
            cols,
        };
        let (output, form) = (Output::F32, InputForm::Residual);
        assert!(GemmPlan::find(&hardware, m, &[shape], output, form).is_none());
    }
}

/// The weights around a fused norm: a product makes `m` rows of `width` from rows of `k`, and other products take them.
struct Around {
    m: usize,
    k: usize,
    width: usize,
    layout: Layout,
    maker: Weight,
    takers: [Weight; 3],
    /// The up projection whose gate is the first of `takers`.
    up: Weight,
}

impl Around {
    fn new(
        gpu: &Arc<Gpu>,
        (m, k, width, features): (usize, usize, usize, [usize; 3]),
        seed: u64,
    ) -> Around {
        Around {
            m,
            k,
            width,
            layout: Layout::taken(&Hardware::of(gpu).unwrap(), m),
            maker: Weight::new(gpu, width, k, seed),
            takers: features.map(|n| Weight::new(gpu, n, width, seed + n as u64)),
            up: Weight::new(gpu, features[0], width, seed + 1),
        }
    }

    fn three(&self) -> [Biased<'_>; 3] {
        self.takers.each_ref().map(Weight::biased)
    }

    fn gate_and_up(&self) -> [Biased<'_>; 2] {
        [self.takers[0].plain(), self.up.plain()]
    }

    fn serves(&self, hardware: &Hardware, takes: &[Biased<'_>], output: Output) -> bool {
        let (m, layout, maker) = (self.m, self.layout, self.maker.device.shape());
        let form = InputForm::FusedNorm(layout);
        GemmPlan::before_norm(hardware, m, maker, layout).is_some()
            && GemmPlan::find(hardware, m, &shapes(takes), output, form).is_some()
    }
}

/// The rows around a fused norm.
struct Fused<'a> {
    gpu: &'a Arc<Gpu>,
    scratch: &'a LinearScratch,
    around: &'a Around,
    norms: NormScratch,
    norm: Vec<f32>,
    device_norm: DeviceBuffer,
    input: DeviceBuffer,
    /// The residual stream before the first product.
    before: Vec<f32>,
    /// The residual stream after it.
    after: Vec<f64>,
}

impl<'a> Fused<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        scratch: &'a LinearScratch,
        around: &'a Around,
        seed: u64,
    ) -> Fused<'a> {
        let &Around {
            m,
            k,
            width,
            layout,
            ref maker,
            ..
        } = around;
        let (before, norm) = (normal(seed + 2, m * width), normal(seed + 3, width));
        let input = normal(seed + 4, m * k);
        let mut device_input = poisoned(gpu, layout.elements(m, k) * 2);
        device_input
            .write(0, &in_layout(layout, &input, m, k))
            .unwrap();
        let before: Vec<f32> = before.iter().map(|v| v * 5.0).collect();
        Fused {
            gpu,
            scratch,
            around,
            norms: NormScratch::new(gpu, width).unwrap(),
            device_norm: upload(gpu, &norm),
            norm,
            input: device_input,
            after: sums(&maker.biased_product(&rounded(&input)), &before),
            before,
        }
    }

    fn fused<'b>(&'b self, turn: usize, x: &'b DeviceBuffer) -> FusedNorm<'b> {
        FusedNorm {
            scratch: &self.norms,
            turn,
            x,
            weight: &self.device_norm,
            eps: EPS,
        }
    }

    /// Leaves the factors that a norm before this one leaves, of rows that are smaller by `scale`.
    fn leave_factors(&self, turn: usize, scale: impl Fn(usize) -> f32) {
        let Around {
            m, width, layout, ..
        } = *self.around;
        let last: Vec<f32> = (0..m * width)
            .map(|i| self.after[i] as f32 / scale(i / width))
            .collect();
        cuda::rms_norm(
            self.gpu,
            &upload(self.gpu, &last),
            0,
            &self.device_norm,
            1e-30,
            m,
            width,
            &poisoned(self.gpu, layout.elements(m, width) * 2),
            layout,
            Some(self.norms.factors(turn + 1)),
        )
        .unwrap();
    }

    /// Adds to the residual stream, and runs the products that apply the norm. Every third row is `a` times as large as the factors say,
    /// and the others are `b` times as large.
    fn check(&self, turn: usize, a: f32, b: f32) {
        let Around { m, width, .. } = *self.around;
        let what = format!("{m} rows of {width}, factors {a:e}, {b:e} too large");
        let x = upload(self.gpu, &self.before);
        self.leave_factors(turn, |row| if row % 3 == turn { a } else { b });
        let fused = self.fused(turn, &x);
        let input = self.around.layout.input(&self.input, 1.0);
        cuda::linear_add_norm(self.gpu, input, m, self.around.maker.biased(), &fused).unwrap();
        let x = read_f32(&x, m * width);
        assert_close(&x, &self.after, EXACT, &what);

        let normed = rounded(&rms_norm(&x, &self.norm));
        self.check_products(&fused, &normed, &what);
        let left = read_f32(self.norms.factors(turn), m);
        assert_close(&left, &norm_factors(&x, width), EXACT, &what);
        self.check_gated(&fused, &normed, &what);
    }

    fn product<'b>(&'b self, fused: &FusedNorm<'b>, takes: &[Biased<'b>]) -> Product<'b> {
        let input = Input::FusedNorm(*fused, self.around.layout);
        Product::of(self.gpu, self.scratch, input, self.around.m, takes)
    }

    fn check_products(&self, fused: &FusedNorm<'_>, normed: &[f64], what: &str) {
        let takers = &self.around.takers;
        let all = takers.iter().map(|w| w.rows).sum();
        let got = self.product(fused, &self.around.three()).f32s();
        let want = joined_products(takers, normed);
        let rows = got.chunks_exact(all).zip(want.chunks_exact(all));
        for (row, (got, want)) in rows.enumerate() {
            // Both round to f16, of different multiples.
            assert_close(got, want, F16, &format!("{what}: row {row}"));
        }
    }

    fn check_gated(&self, fused: &FusedNorm<'_>, normed: &[f64], what: &str) {
        let product = self.product(fused, &self.around.gate_and_up());
        let want = swiglu(normed, &self.around.takers[0], &self.around.up);
        // Few features are small by cancellation.
        assert_close(&product.gated(self.around.layout), &want, 3.0 * F16, what);
    }

    /// Demands that rows and features that do not fit are refused.
    fn check_refusals(&self) {
        let (gpu, m) = (self.gpu, self.around.m);
        let wrong = self.fused(0, &self.device_norm);
        let input = self.around.layout.input(&self.input, 1.0);
        if m > 1 {
            expect_kind(
                cuda::linear_add_norm(gpu, input, m, self.around.maker.biased(), &wrong),
                ErrorKind::Internal,
                "bytes, and its buffer has",
            );
        }
        expect_kind(
            cuda::linear_add_norm(gpu, input, m, self.around.three()[0], &wrong),
            ErrorKind::Internal,
            "features added to rows of",
        );
    }
}

/// A product that prepares rows for a norm, and products that apply it: with rows of the magnitude of the rows before, and with rows
/// that have grown or shrunk so much that they are normalized from the residual stream.
#[test]
fn norms_fused_into_products_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let hardware = Hardware::of(&gpu).unwrap();
    let scratch = LinearScratch::new(&gpu, 16, 9728, 0).unwrap();
    for (i, case) in [
        (1, 4096, 2560, [512, 128, 120]),
        (1, 9728, 2560, [512, 128, 120]),
        (1, 80, 64, [40, 24, 8]),
        (2, 1168, 320, [72, 40, 33]),
        (4, 9728, 2560, [64, 16, 8]),
        (3, 272, 1088, [136, 40, 9]),
        (5, 256, 576, [136, 40, 9]),
        (8, 4096, 2560, [512, 128, 120]),
        (8, 9728, 2560, [512, 128, 120]),
        (11, 528, 1024, [64, 8, 16]),
        (16, 9728, 2560, [72, 8, 16]),
        (16, 144, 3072, [72, 8, 16]),
        (4, 60_000, 64, [40, 24, 8]),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 7000 + 50 * i as u64;
        let around = Around::new(&gpu, case, seed);
        let (three, two) = (around.three(), around.gate_and_up());
        if !around.serves(&hardware, &three, Output::F32) {
            // Blocks do not hold all rows of the last case at once.
            let large = around.m > 4 || around.k == 60_000;
            assert!(large, "up to 4 rows are served by every GPU");
            continue;
        }
        assert!(around.serves(&hardware, &two, around.layout.glu(Glu::default())));
        assert!(!around.serves(&hardware, &three[..1], Output::F16));

        let fused = Fused::new(&gpu, &scratch, &around, seed);
        for turn in 0..2 {
            for (a, b) in [(1.0, 1.0), (1.0, 1e-5), (1e4, 30.0), (3e-7, 1.0)] {
                fused.check(turn, a, b);
            }
        }
        fused.check_refusals();
    }
}
