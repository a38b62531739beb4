//! Routes the rows of a mixture to their experts: the logits of the router, the choice, and the order of pairs of a row and an expert.

use std::fmt;

use super::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use super::experts::ExpertScratch;
use super::kernel::kernels;
use super::linear::Biased;
use super::routing::{ExpertTiles, Routing};
use crate::base::Result;
use crate::base::error::bail;

kernels! {
    /// Routes rows and sorts them by expert: few rows at once, or many in two steps.
    enum Route(RouteArguments) {
        ExpertsRoute {
            Few = "experts_route_few",
            Rows = "experts_route",
            Group = "experts_group",
        }
    }
}

/// Most rows that a single CTA routes and sorts, with their expert pairs.
const FEW_ROWS: usize = 16;
const FEW_PAIRS: usize = 512;

#[repr(C)]
struct RouteArguments {
    logits: u64,
    choices: u64,
    weights: u64,
    places: u64,
    sources: u64,
    tiles: u64,
    unfit: u64,
    correction: u64,
    factors: u64,
    scale: f32,
    groups: i32,
    top_groups: i32,
    rows: i32,
    stride: i32,
    experts: i32,
    per_token: i32,
    normalized: i32,
    tile_pairs: i32,
    max_tiles: i32,
    layer: i32,
}

/// Numbers of a router for each expert, f32 `[experts]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouterVectors<'a> {
    /// Added to sigmoids for the choice; the softmax has none.
    pub correction: Option<&'a DeviceBuffer>,
    /// Factors of the experts' weights.
    pub factors: Option<&'a DeviceBuffer>,
}

/// Where the product with a router goes, and the distance of its rows: logits of the experts, and that of the gate of the shared expert, by
/// which [`sum_experts`](super::expert_sums::sum_experts) multiplies. The router is `[experts, hidden]`, and the gate after it, if there is
/// one, `[1, hidden]`.
pub fn router_logits<'a>(
    routing: &Routing,
    matrices: &[Biased<'_>],
    scratch: &'a ExpertScratch,
) -> Result<(&'a DeviceBuffer, usize)> {
    let rows: Vec<usize> = matrices.iter().map(|(w, _)| w.rows()).collect();
    match rows[..] {
        [experts] | [experts, 1] if experts == routing.experts => {
            Ok((&scratch.logits, routing.experts + 1))
        }
        _ => bail!(
            Internal,
            "a router and its gate of {rows:?} rows for {} experts",
            routing.experts
        ),
    }
}

/// How rows are routed: by one kernel if they are few, else by one that routes and one that sorts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutePlan {
    first: Planned<Route>,
    second: Option<Planned<Route>>,
    rows: usize,
    tiles: ExpertTiles,
}

impl fmt::Display for RoutePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.fmt(f)?;
        if let Some(second) = &self.second {
            write!(f, "; {second}")?;
        }
        write!(f, ", tiles of {} pairs", self.tiles.pairs)
    }
}

impl RoutePlan {
    /// How `rows` rows are routed.
    pub fn choose(routing: &Routing, rows: usize) -> RoutePlan {
        let planned = |blocks: usize, threads: u32, kernel: Route| {
            Launch::new([blocks as u32, 1, 1], threads).of(kernel)
        };
        let is_few = rows <= FEW_ROWS && rows * routing.per_token <= FEW_PAIRS;
        let (first, second) = match is_few {
            true => (planned(1, 32 * FEW_ROWS as u32, Route::Few), None),
            false => (
                planned(rows.div_ceil(4), 128, Route::Rows),
                Some(planned(routing.experts, 512, Route::Group)),
            ),
        };
        RoutePlan {
            first,
            second,
            rows,
            tiles: routing.tiles(rows),
        }
    }
}

/// Routes the rows of `plan` by the logits in [`router_logits`], and cuts their expert pairs into tiles. If a logit is not finite, `unfit`, a
/// u32 a row, becomes 1 + `layer` unless it is set already.
pub fn route(
    gpu: &Gpu,
    routing: &Routing,
    vectors: RouterVectors<'_>,
    plan: &RoutePlan,
    scratch: &ExpertScratch,
    (unfit, layer): (&DeviceBuffer, usize),
) -> Result<()> {
    scratch.check(routing, plan.rows)?;
    unfit.holds("rows that cannot be routed", &[plan.rows, 4])?;
    check_vectors(routing, vectors)?;
    let arguments = arguments(routing, vectors, plan, scratch, (unfit, layer))?;
    for planned in [Some(plan.first), plan.second].into_iter().flatten() {
        // SAFETY: sizes were checked.
        unsafe { planned.run(gpu, &arguments)? };
    }
    Ok(())
}

/// Refuses vectors of other sizes than the rule's, and a correction without sigmoids or sigmoids without one.
fn check_vectors(routing: &Routing, vectors: RouterVectors<'_>) -> Result<()> {
    let RouterVectors {
        correction,
        factors,
    } = vectors;
    for vector in correction.iter().chain(&factors) {
        vector.holds("numbers of experts", &[routing.experts, 4])?;
    }
    if correction.is_some() != routing.sigmoid.is_some() {
        bail!(Internal, "{routing:?} with the correction {correction:?}");
    }
    Ok(())
}

/// The kernels' description of the rule, and where results go.
fn arguments(
    routing: &Routing,
    vectors: RouterVectors<'_>,
    plan: &RoutePlan,
    scratch: &ExpertScratch,
    (unfit, layer): (&DeviceBuffer, usize),
) -> Result<RouteArguments> {
    Ok(RouteArguments {
        logits: scratch.logits.address(),
        choices: scratch.choices.address(),
        weights: scratch.weights.address(),
        places: scratch.places.address(),
        sources: scratch.sources.address(),
        tiles: scratch.tiles.address(),
        unfit: unfit.address(),
        correction: vectors.correction.map_or(0, DeviceBuffer::address),
        factors: vectors.factors.map_or(0, DeviceBuffer::address),
        scale: routing.sigmoid.map_or(1.0, |sigmoid| sigmoid.scale),
        groups: routing.sigmoid.map_or(1, |sigmoid| sigmoid.groups) as i32,
        top_groups: routing.sigmoid.map_or(1, |sigmoid| sigmoid.top_groups) as i32,
        rows: int("rows", plan.rows)?,
        stride: (routing.experts + 1) as i32,
        experts: routing.experts as i32,
        per_token: routing.per_token as i32,
        normalized: routing.normalized.into(),
        tile_pairs: plan.tiles.pairs as i32,
        max_tiles: int("tiles", plan.tiles.most)?,
        layer: int("the layer", layer)?,
    })
}
