//! A mixture of NVFP4 experts on the device. Rows that [`route`](super::router::route) has sorted by expert are multiplied tile by tile, and
//! the results summed, all without the host.

use std::fmt;
use std::sync::Arc;

use super::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use super::kernel::kernels;
use super::linear::{
    Activation, Biased, CHUNK_BYTES, CHUNK_K, CHUNK_ROWS, GatedUnit, Gating, Matrix,
    MatrixArgument, MatrixShape,
};
use super::routing::Routing;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::tensor::WeightType;

kernels! {
    /// Products of rows with their experts, by the pairs of a tile: gate and up with their unit, up alone with its squared ReLU, and down.
    enum Products(ProductArguments) {
        LinearExperts {
            Glu8 = "linear_experts_glu_8",
            Glu16 = "linear_experts_glu_16",
            Glu32 = "linear_experts_glu_32",
            Glu64 = "linear_experts_glu_64",
            Relu8 = "linear_experts_relu2_8",
            Relu16 = "linear_experts_relu2_16",
            Relu32 = "linear_experts_relu2_32",
            Relu64 = "linear_experts_relu2_64",
            Plain8 = "linear_experts_8",
            Plain16 = "linear_experts_16",
            Plain32 = "linear_experts_32",
            Plain64 = "linear_experts_64",
        }
    }
}

impl Products {
    /// Gate and up with their unit, by the pairs of a tile from 8 on.
    const GLU: [Products; 4] = [Self::Glu8, Self::Glu16, Self::Glu32, Self::Glu64];
    /// Up alone with its squared ReLU.
    const RELU: [Products; 4] = [Self::Relu8, Self::Relu16, Self::Relu32, Self::Relu64];
    /// Down.
    const PLAIN: [Products; 4] = [Self::Plain8, Self::Plain16, Self::Plain32, Self::Plain64];

    /// The kernels of gate and up, or of up alone.
    const fn gate_up(gated: bool) -> [Products; 4] {
        if gated { Self::GLU } else { Self::RELU }
    }
}

/// Warps of a CTA of the GEMM, each with two rows of chunks.
const WARPS: usize = 4;
/// Features that a CTA multiplies.
const FEATURES: usize = 2 * CHUNK_ROWS * WARPS;
/// Placeholder in products without a gated linear unit.
const NO_UNIT: GatedUnit = GatedUnit::Plain(Activation::Silu);
/// Bytes of a tile record: expert, first pair, number of pairs, and four unused bytes.
const TILE_BYTES: usize = 16;
/// Tiles that a launch takes.
const MOST_TILES: usize = 65_535;

/// The projections of an expert.
#[derive(Clone, Copy)]
pub struct ExpertMatrices<'a> {
    /// `[intermediate, hidden]`, if the expert has a gate.
    pub gate: Option<Biased<'a>>,
    /// `[intermediate, hidden]`.
    pub up: Biased<'a>,
    /// `[hidden, intermediate]`.
    pub down: Biased<'a>,
}

/// Weights of one block's experts, as kernels find them. Keeps the weights in memory; biases must outlive it.
#[derive(Debug)]
pub struct ExpertTable {
    /// Addresses of gate, up and down of each expert; zeros for a gate that it lacks.
    table: DeviceBuffer,
    experts: usize,
    /// `[intermediate, hidden]`.
    up: MatrixShape,
    has_gates: bool,
    _weights: Vec<Arc<DeviceBuffer>>,
}

/// Words of an expert in a table: of gate, up and down.
const EXPERT_WORDS: usize = 9;

impl ExpertTable {
    /// Bytes of the table of `experts` experts.
    pub const fn bytes_of(experts: usize) -> usize {
        experts * EXPERT_WORDS * size_of::<u64>()
    }

    /// Refuses the type of an expert's projection that no kernel multiplies.
    pub fn check_storage(expert: usize, what: &str, storage: WeightType) -> Result<()> {
        match storage {
            WeightType::Nvfp4 => Ok(()),
            _ => bail!(
                Unsupported,
                "the {what} projection of expert {expert} is held as {storage:?}; a GPU has kernels for experts in NVFP4 alone: quantize the model, or its weights while it is loaded"
            ),
        }
    }

    /// Builds the table from the projections of each expert, which all have a gate or all have none.
    pub fn new(gpu: &Arc<Gpu>, experts: &[ExpertMatrices<'_>]) -> Result<ExpertTable> {
        let Some(first) = experts.first() else {
            bail!(Internal, "a mixture without experts");
        };
        let (up, has_gates) = (first.up.0.shape(), first.gate.is_some());
        let (inner, outer) = ((up.rows, up.cols), (up.cols, up.rows));
        let mut table: Vec<u64> = Vec::with_capacity(experts.len() * EXPERT_WORDS);
        let mut weights = Vec::with_capacity(experts.len() * 3);
        for (number, expert) in experts.iter().enumerate() {
            if expert.gate.is_some() != has_gates {
                bail!(Internal, "some experts have gates, and expert {number} not");
            }
            for (what, biased, wanted) in [
                ("gate", expert.gate, inner),
                ("up", Some(expert.up), inner),
                ("down", Some(expert.down), outer),
            ] {
                let Some((w, bias)) = biased else {
                    table.extend([0; 3]);
                    continue;
                };
                check_projection(number, what, w, wanted)?;
                table.extend(MatrixArgument::words((w, bias))?);
                weights.push(w.shared_values());
            }
        }
        Ok(ExpertTable {
            table: DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, &table)?,
            experts: experts.len(),
            up,
            has_gates,
            _weights: weights,
        })
    }
}

/// Refuses a projection of an expert that no kernel multiplies, or of another shape than `[rows, cols]`.
fn check_projection(expert: usize, what: &str, w: &Matrix, wanted: (usize, usize)) -> Result<()> {
    ExpertTable::check_storage(expert, what, w.storage())?;
    if (w.rows(), w.cols()) != wanted {
        bail!(
            Internal,
            "the {what} projection of expert {expert} is {:?}, not {wanted:?}",
            (w.rows(), w.cols())
        );
    }
    Ok(())
}

/// Scratch memory of a mixture.
#[derive(Debug)]
pub struct ExpertScratch {
    rows: usize,
    /// f32 `[rows, experts + 1]`: logits of the router, and of the gate of the shared expert.
    pub(super) logits: DeviceBuffer,
    pub(super) choices: DeviceBuffer,
    pub(super) weights: DeviceBuffer,
    pub(super) places: DeviceBuffer,
    pub(super) sources: DeviceBuffer,
    pub(super) tiles: DeviceBuffer,
    /// f16 `[pairs, intermediate]`.
    inner: DeviceBuffer,
    /// f32 `[pairs, hidden]`.
    pub(super) made: DeviceBuffer,
}

impl ExpertScratch {
    /// Bytes of the buffers, in their order, for `rows` rows of `hidden` elements.
    fn sizes(
        routing: Routing,
        rows: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<[usize; 8]> {
        let bytes = |sizes: &[usize]| product("experts", sizes);
        let pairs = rows * routing.per_token;
        let tiles = routing.most_tiles_up_to(rows);
        let of_pair = bytes(&[pairs, 4])?;
        Ok([
            bytes(&[rows, routing.experts + 1, 4])?,
            of_pair,
            of_pair,
            of_pair,
            of_pair,
            bytes(&[tiles, TILE_BYTES])?,
            bytes(&[pairs, intermediate, 2])?,
            bytes(&[pairs, hidden, 4])?,
        ])
    }

    /// Bytes of scratch for `rows` rows of `hidden` elements.
    pub fn bytes_of(
        routing: Routing,
        rows: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<usize> {
        let sizes = Self::sizes(routing, rows, intermediate, hidden)?;
        Ok(sizes.iter().sum())
    }

    /// Allocates scratch for `rows` rows of `hidden` elements.
    pub fn new(
        gpu: &Arc<Gpu>,
        routing: Routing,
        rows: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<ExpertScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let [
            logits,
            choices,
            weights,
            places,
            sources,
            tiles,
            inner,
            made,
        ] = Self::sizes(routing, rows, intermediate, hidden)?;
        Ok(ExpertScratch {
            rows,
            logits: scratch(logits)?,
            choices: scratch(choices)?,
            weights: scratch(weights)?,
            places: scratch(places)?,
            sources: scratch(sources)?,
            tiles: scratch(tiles)?,
            inner: scratch(inner)?,
            made: scratch(made)?,
        })
    }

    pub(super) fn check(&self, routing: &Routing, rows: usize) -> Result<()> {
        routing.check()?;
        if rows > self.rows {
            bail!(Internal, "{rows} rows, and room for {}", self.rows);
        }
        self.logits
            .holds("logits of experts", &[rows, routing.experts + 1, 4])?;
        self.choices
            .holds("choices of experts", &[rows, routing.per_token, 4])?;
        self.tiles
            .holds("tiles of experts", &[routing.tiles(rows).most, TILE_BYTES])
    }
}

#[repr(C)]
struct ProductArguments {
    x: u64,
    sources: u64,
    tiles: u64,
    experts: u64,
    out: u64,
    n: i32,
    k: i32,
    factor: f32,
    out_scale: f32,
    gating: Gating,
}

/// How routed rows are multiplied by their experts, tile by tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsPlan {
    planned: Planned<Products>,
    rows: usize,
    /// Output features.
    features: usize,
}

impl fmt::Display for ExpertsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

impl ExpertsPlan {
    /// Gate and up projections of `rows` rows, or up alone, by up's shape `[intermediate, hidden]`.
    pub fn gate_up(
        routing: &Routing,
        rows: usize,
        up: MatrixShape,
        gated: bool,
    ) -> Result<ExpertsPlan> {
        // With a gate, half of the features that a CTA multiplies are of the gate.
        let of_cta = if gated { FEATURES / 2 } else { FEATURES };
        let kernels = Products::gate_up(gated);
        ExpertsPlan::of(routing, rows, kernels, (up.rows, of_cta))
    }

    /// Down projections of `rows` rows, by up's shape `[intermediate, hidden]`.
    pub fn down(routing: &Routing, rows: usize, up: MatrixShape) -> Result<ExpertsPlan> {
        ExpertsPlan::of(routing, rows, Products::PLAIN, (up.cols, FEATURES))
    }

    /// By the kernel for the tiles of `rows` rows; `of_cta` is the number of output features per CTA.
    fn of(
        routing: &Routing,
        rows: usize,
        kernels: [Products; 4],
        (features, of_cta): (usize, usize),
    ) -> Result<ExpertsPlan> {
        let tiles = routing.tiles(rows);
        // Ring stages, as in `kernels/linear/experts.cu`.
        let (kernel, stages) = match tiles.pairs {
            8 => (kernels[0], 6),
            16 => (kernels[1], 4),
            32 => (kernels[2], 3),
            _ => (kernels[3], 3),
        };
        if tiles.most > MOST_TILES {
            bail!(
                Unsupported,
                "{rows} rows have {} tiles of experts; a launch takes {MOST_TILES}",
                tiles.most
            );
        }
        let grid = [features.div_ceil(of_cta) as u32, tiles.most as u32, 1];
        let launch = Launch {
            shared: (stages * (2 * WARPS * CHUNK_BYTES + tiles.pairs * CHUNK_K * 2)) as u32,
            ..Launch::new(grid, 32 * WARPS as u32)
        };
        Ok(ExpertsPlan {
            planned: launch.of(kernel),
            rows,
            features,
        })
    }

    /// Fails for other products than those that it was made for.
    fn check(&self, kernels: [Products; 4], features: usize) -> Result<()> {
        if self.features != features || !kernels.contains(&self.planned.kernel) {
            bail!(
                Internal,
                "products planned as {self} of {} features, for {kernels:?} and {features} features",
                self.features
            );
        }
        Ok(())
    }
}

fn check_table(table: &ExpertTable, routing: &Routing) -> Result<()> {
    if table.experts != routing.experts {
        bail!(
            Internal,
            "{} experts routed, of {}",
            routing.experts,
            table.experts
        );
    }
    Ok(())
}

/// The activation between the projections of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertUnit {
    /// A gated linear unit.
    Gated(GatedUnit),
    /// `max(up, 0)^2`, without a gate.
    ReluSquared,
}

/// Gate and up projections, or up alone, and the unit of each row's experts, from f16 rows `x` `[rows, hidden]`, by
/// [`ExpertsPlan::gate_up`]. The result, divided by `divisor` so that f16 holds it, stays in scratch for [`experts_down`].
pub fn experts_gate_up(
    gpu: &Gpu,
    routing: &Routing,
    table: &ExpertTable,
    x: &DeviceBuffer,
    plan: &ExpertsPlan,
    (unit, divisor): (ExpertUnit, u32),
    scratch: &ExpertScratch,
) -> Result<()> {
    let rows = plan.rows;
    check_table(table, routing)?;
    scratch.check(routing, rows)?;
    let gated = match (unit, table.has_gates) {
        (ExpertUnit::Gated(gated), true) => Some(gated),
        (ExpertUnit::ReluSquared, false) => None,
        (unit, has_gates) => bail!(Internal, "{unit:?} for experts with gates: {has_gates}"),
    };
    let (n, k) = (table.up.rows, table.up.cols);
    plan.check(Products::gate_up(table.has_gates), n)?;
    x.holds("activations", &[rows, k, 2])?;
    let pairs = rows * routing.per_token;
    scratch
        .inner
        .holds("activations of experts", &[pairs, n, 2])?;
    let arguments = ProductArguments {
        x: x.address(),
        sources: scratch.sources.address(),
        tiles: scratch.tiles.address(),
        experts: table.table.address(),
        out: scratch.inner.address(),
        n: int("output features", n)?,
        k: int("K", k)?,
        factor: 1.0,
        out_scale: 1.0 / divisor as f32,
        gating: gated.unwrap_or(NO_UNIT).argument(),
    };
    // SAFETY: sizes were checked, and the table keeps the weights.
    unsafe { plan.planned.run(gpu, &arguments) }
}

/// Down projections of the experts, from the result of [`experts_gate_up`], which was divided by `divisor`, by [`ExpertsPlan::down`].
pub fn experts_down(
    gpu: &Gpu,
    routing: &Routing,
    table: &ExpertTable,
    plan: &ExpertsPlan,
    divisor: f32,
    scratch: &ExpertScratch,
) -> Result<()> {
    let rows = plan.rows;
    check_table(table, routing)?;
    scratch.check(routing, rows)?;
    let (n, k) = (table.up.cols, table.up.rows);
    plan.check(Products::PLAIN, n)?;
    let pairs = rows * routing.per_token;
    scratch
        .inner
        .holds("activations of experts", &[pairs, k, 2])?;
    scratch.made.holds("products of experts", &[pairs, n, 4])?;
    let arguments = ProductArguments {
        x: scratch.inner.address(),
        sources: 0,
        tiles: scratch.tiles.address(),
        experts: table.table.address(),
        out: scratch.made.address(),
        n: int("output features", n)?,
        k: int("K", k)?,
        factor: divisor,
        out_scale: 1.0,
        gating: NO_UNIT.argument(),
    };
    // SAFETY: sizes were checked, and the table keeps the weights.
    unsafe { plan.planned.run(gpu, &arguments) }
}
