//! The safe interface of the CPU kernels: checks, splitting over threads, and scratch.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::kv::{KvPages, PAGE};
use super::level::Level;
use super::packed::{GROUP, Packed};
use super::table::{
    ATTENTION_QUERIES, Glu, INT8_SCALE_BLOCKS, MOST_INT8_TILE, MOST_SKINNY, Query, Scores, Table,
};
use super::workspace::{Workspace, WorkspaceSizes};
use crate::base::call::{self, Call};
use crate::base::error::{Result, bail};
use crate::base::threads::Pool;
use crate::format::nvfp4::BLOCK;
use crate::tensor::AttentionShape;
use crate::tensor::{KvType, WeightType};

/// Elements below which a second thread does not pay off for a pointwise operation.
const POINTWISE_GRAIN: usize = 16 * 1024;
/// Elements per part of a pointwise operation without rows.
const RUN: usize = 1024;
/// Tokens of one key/value head per part.
const ATTENTION_TOKENS: usize = 8;

/// A level's kernels with the threads they run on. Cheap to share; calls from several threads take turns on the pool.
pub struct Cpu {
    pub(super) table: &'static Table,
    pool: Pool,
}

/// An output pointer, of which threads write disjoint parts.
#[derive(Clone, Copy)]
pub(super) struct Out<T>(pub(super) *mut T);
// SAFETY: every use writes a part that no other thread touches; the uses say which.
unsafe impl<T> Send for Out<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Out<T> {}

impl<T> Out<T> {
    /// # Safety
    /// As for pointer addition.
    pub(super) unsafe fn at(self, i: usize) -> *mut T {
        // SAFETY: forwarded.
        unsafe { self.0.add(i) }
    }
}

/// The workspace of a skinny product of `m` tokens with `k` input features, at least two.
fn skinny_sizes(m: usize, k: usize) -> WorkspaceSizes {
    WorkspaceSizes {
        tiles: m * k,
        ..WorkspaceSizes::default()
    }
}

/// Floats of a row group that is unpacked for a thread: values, then block scales.
fn panel_floats(k: usize) -> usize {
    (k + k / BLOCK) * GROUP
}

/// Floats of a row group that is unpacked to bytes: block scales, then the bytes, counted in floats.
fn int8_panel_floats(blocks: usize) -> usize {
    blocks * (BLOCK * GROUP / 4 + GROUP)
}

/// Scores of a query that sees positions up to `end`. A softmax may begin anywhere in a page, and works on whole vectors.
fn scores_of_query(end: usize) -> usize {
    end.next_multiple_of(PAGE) + PAGE
}

impl Cpu {
    /// The best level present (or the one in `NVFP4_CPU`) on `threads` threads; `None` for `NVFP4_THREADS`, or one thread per available
    /// core.
    pub fn new(threads: Option<usize>) -> Result<Arc<Self>> {
        Self::with_level(Level::choose()?, threads)
    }

    /// A given level, which must be present.
    pub fn with_level(level: Level, threads: Option<usize>) -> Result<Arc<Self>> {
        let pool = Pool::new(threads.map_or_else(Pool::default_threads, Ok)?)?;
        Self::with_pool(level, pool)
    }

    /// The best level present, on the threads of a pool.
    pub fn of_pool(pool: Pool) -> Result<Arc<Self>> {
        Self::with_pool(Level::choose()?, pool)
    }

    fn with_pool(level: Level, pool: Pool) -> Result<Arc<Self>> {
        if !level.is_present() {
            bail!(Unsupported, "this machine does not have {}", level.name());
        }
        let table = Table::of(level);
        Ok(Arc::new(Cpu { table, pool }))
    }

    /// The level in use.
    pub fn level(&self) -> Level {
        self.table.level
    }

    /// The pool the kernels run on.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// `x` `[m, K]` times each transposed weight `[N, K]`, into its output `[m, N]`. Exact up to the order of summation in f32. With
    /// `int8`, activations for NVFP4 weights are first rounded to 8 bits, with one scale per 32 along K; dense weights stay exact.
    /// Cancelled with the thread's [`call`], as [`Cpu::attention`] is.
    pub fn linear(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        int8: bool,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Some(k) = outputs.first().map(|(w, _)| w.cols()) else {
            return Ok(());
        };
        for (w, y) in outputs.iter() {
            if w.cols() != k || x.len() != m * k || y.len() != m * w.rows() {
                bail!(
                    InvalidArgument,
                    "linear: {} inputs and {} outputs for {m} tokens and a weight [{}, {}]; they must be m * K and m * N",
                    x.len(),
                    y.len(),
                    w.rows(),
                    w.cols()
                );
            }
        }
        if m == 0 {
            return Ok(());
        }
        call::with(|call| {
            if int8 {
                let (mut quantized, mut dense): (Vec<_>, Vec<_>) = outputs
                    .iter_mut()
                    .map(|(w, y)| (*w, &mut **y))
                    .partition(|(w, _)| w.kind() == WeightType::Nvfp4);
                self.linear_int8(x, m, &mut quantized, workspace, call)?;
                self.linear_exact(x, m, &mut dense, workspace, call)?;
            } else {
                self.linear_exact(x, m, outputs, workspace, call)?;
            }
            call.check()
        })
    }

    /// The workspace of [`Cpu::linear`] of `m` tokens with a weight of this kind and `k` input features.
    pub fn linear_sizes(&self, m: usize, k: usize, kind: WeightType, int8: bool) -> WorkspaceSizes {
        match int8 && kind == WeightType::Nvfp4 {
            true => self.int8_sizes(m, k),
            false if m >= self.table.panel_tokens[0] => self.gemm_sizes(m, k),
            false if m > 1 => skinny_sizes(m, k),
            false => WorkspaceSizes::default(),
        }
    }

    fn gemm_sizes(&self, m: usize, k: usize) -> WorkspaceSizes {
        WorkspaceSizes {
            tiles: m.next_multiple_of(self.table.widest) * k,
            panels: self.pool.threads() * panel_floats(k),
            ..WorkspaceSizes::default()
        }
    }

    fn int8_sizes(&self, m: usize, k: usize) -> WorkspaceSizes {
        let blocks = k / BLOCK;
        let panels = match m < self.table.panel_tokens[1] {
            true => 0,
            false => self.pool.threads() * int8_panel_floats(blocks),
        };
        WorkspaceSizes {
            panels,
            codes: m * k,
            scales: m * blocks.div_ceil(INT8_SCALE_BLOCKS),
            offsets: m * blocks,
            ..WorkspaceSizes::default()
        }
    }

    /// The workspace of [`Cpu::attention`] of tokens before position `end`.
    pub fn attention_sizes(&self, end: usize) -> WorkspaceSizes {
        WorkspaceSizes {
            scores: self.pool.threads() * ATTENTION_QUERIES * scores_of_query(end),
            ..WorkspaceSizes::default()
        }
    }

    fn linear_exact(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        workspace: &mut Workspace,
        call: Call<'_>,
    ) -> Result<()> {
        if outputs.is_empty() {
            return Ok(());
        }
        if m < self.table.panel_tokens[0] {
            self.skinny(x, m, outputs, workspace, call)
        } else {
            self.gemm(x, m, outputs, workspace, call)
        }
    }

    fn skinny(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        workspace: &mut Workspace,
        call: Call<'_>,
    ) -> Result<()> {
        let k = x.len() / m;
        let most = self.table.skinny_tokens[0];
        // A single token already has the kernel's layout.
        let x = if m == 1 {
            x
        } else {
            workspace.fit(&skinny_sizes(m, k))?;
            for pass in passes(m, most) {
                let width = pass.len();
                let packed = &mut workspace.tiles[pass.start * k..pass.end * k];
                for (t, x) in x[pass.start * k..pass.end * k].chunks_exact(k).enumerate() {
                    for (packed, x) in packed.chunks_exact_mut(width).zip(x) {
                        packed[t] = *x;
                    }
                }
            }
            &workspace.tiles[..m * k]
        };
        self.by_groups(m, outputs, call, &|w, data, groups, out, row| {
            for pass in passes(m, most) {
                // SAFETY: the level is present, `x` has `pass.len()` tokens of 16 * blocks elements from `pass.start * k`, and the
                // rest is as `by_groups` says.
                unsafe {
                    self.table.skinny(w.kind())(
                        pass.len(),
                        data,
                        w.group_stride(),
                        groups,
                        w.blocks(),
                        x[pass.start * k..].as_ptr(),
                        w.global(),
                        out.add(pass.start * row),
                        row,
                    );
                }
            }
        });
        Ok(())
    }

    /// Splits the row groups of `outputs` `[m, N]` over threads. Calls `kernel` with a weight, the start of some of its row groups, their
    /// number, the place of the first token's outputs, and the distance in floats to the next token's. Stops early once `call` is over.
    fn by_groups(
        &self,
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        call: Call<'_>,
        kernel: &(dyn Fn(&Packed, *const u8, usize, *mut f32, usize) + Sync),
    ) {
        let work = Work::new(outputs);
        // Enough parts that one slow thread does not delay the rest; whole runs of groups for the kernel.
        let grain = (work.groups / (self.pool.threads() * 8))
            .clamp(4, 32)
            .next_multiple_of(4);
        self.pool.run(work.groups.div_ceil(grain), |part| {
            if call.is_over() {
                return;
            }
            work.for_each(
                part * grain..work.groups.min((part + 1) * grain),
                |w, out, groups| {
                    // SAFETY: the weight has these groups. Each part writes rows of its own groups only; the last group, if
                    // partial, goes through `ragged`, which has room for `m` tokens.
                    unsafe {
                        let data = |group: usize| w.data().as_ptr().add(group * w.group_stride());
                        let whole = groups.start..groups.end.min(w.rows() / GROUP);
                        if !whole.is_empty() {
                            let out = out.at(whole.start * GROUP);
                            kernel(w, data(whole.start), whole.len(), out, w.rows());
                        }
                        if groups.end > whole.end.max(groups.start) {
                            let last = groups.end - 1;
                            let mut ragged = [0.0; MOST_SKINNY * GROUP];
                            kernel(w, data(last), 1, ragged.as_mut_ptr(), GROUP);
                            let rows = w.rows() - last * GROUP;
                            for (t, ragged) in ragged.chunks_exact(GROUP).take(m).enumerate() {
                                let out = out.at(t * w.rows() + last * GROUP);
                                std::ptr::copy_nonoverlapping(ragged.as_ptr(), out, rows);
                            }
                        }
                    }
                },
            );
        });
    }

    fn gemm(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        workspace: &mut Workspace,
        call: Call<'_>,
    ) -> Result<()> {
        let k = x.len() / m;
        let blocks = k / BLOCK;
        let widest = self.table.widest;
        let last = self.table.width(m % widest);
        let tiles = m.div_ceil(widest);
        let width = |tile: usize| {
            if (tile + 1) * widest <= m {
                widest
            } else {
                last
            }
        };
        let threads = self.pool.threads();
        let panel_len = panel_floats(k);
        workspace.fit(&self.gemm_sizes(m, k))?;

        let packed = Out(workspace.tiles.as_mut_ptr());
        self.pool.run(tiles, |tile| {
            let width = width(tile);
            let tokens = tile * widest..m.min(tile * widest + width);
            // SAFETY: each part fills its own tile, which has room for `widest` tokens.
            let out =
                unsafe { std::slice::from_raw_parts_mut(packed.at(tile * widest * k), width * k) };
            for (i, out) in out.chunks_exact_mut(width).enumerate() {
                for (t, out) in out.iter_mut().enumerate() {
                    *out = if tokens.start + t < tokens.end {
                        x[(tokens.start + t) * k + i]
                    } else {
                        0.0
                    };
                }
            }
        });

        let work = Work::new(outputs);
        let panels = Out(workspace.panels.as_mut_ptr());
        let next = AtomicUsize::new(0);
        self.pool.run(threads, |thread| {
            // SAFETY: each part has its own panel; each group's rows are written by the one part that took it. Sizes are
            // those grown above, and the level is present.
            unsafe {
                let panel = panels.at(thread * panel_len);
                let scales = panel.add(k * GROUP);
                let mut result = [0.0; 12 * GROUP];
                debug_assert!(widest * GROUP <= result.len());
                loop {
                    let group = next.fetch_add(1, Relaxed);
                    if group >= work.groups || call.is_over() {
                        break;
                    }
                    work.for_each(group..group + 1, |w, out, groups| {
                        let group = groups.start;
                        let rows = GROUP.min(w.rows() - group * GROUP);
                        self.table.unpack(w.kind())(
                            w.data().as_ptr().add(group * w.group_stride()),
                            blocks,
                            panel,
                            scales,
                        );
                        for tile in 0..tiles {
                            let x = packed.at(tile * widest * k);
                            (self.table.tile)(
                                width(tile),
                                panel,
                                scales,
                                blocks,
                                x,
                                w.global(),
                                result.as_mut_ptr(),
                            );
                            for t in 0..widest.min(m - tile * widest) {
                                let out = out.at((tile * widest + t) * w.rows() + group * GROUP);
                                std::ptr::copy_nonoverlapping(
                                    result.as_ptr().add(t * GROUP),
                                    out,
                                    rows,
                                );
                            }
                        }
                    });
                }
            }
        });
        Ok(())
    }

    fn linear_int8(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Packed, &mut [f32])],
        workspace: &mut Workspace,
        call: Call<'_>,
    ) -> Result<()> {
        if outputs.is_empty() {
            return Ok(());
        }
        let k = x.len() / m;
        let blocks = k / BLOCK;
        let scale_row = blocks.div_ceil(INT8_SCALE_BLOCKS);
        let threads = self.pool.threads();
        workspace.fit(&self.int8_sizes(m, k))?;

        let codes = Out(workspace.codes.as_mut_ptr());
        let scales = Out(workspace.scales.as_mut_ptr());
        let offsets = Out(workspace.offsets.as_mut_ptr());
        self.pool.run(m, |t| {
            // SAFETY: the level is present; each part fills the row of its own token.
            unsafe {
                let x = x.as_ptr().add(t * k);
                let (codes, scales) = (codes.at(t * k), scales.at(t * scale_row));
                (self.table.quantize_row)(x, blocks, codes, scales, offsets.at(t * blocks));
            }
        });

        if m < self.table.panel_tokens[1] {
            let most = self.table.skinny_tokens[1];
            self.by_groups(m, outputs, call, &|w, data, groups, out, row| {
                for pass in passes(m, most) {
                    // SAFETY: the level is present, the tokens were quantized above, and the rest is as `by_groups` says.
                    unsafe {
                        (self.table.skinny_int8)(
                            pass.len(),
                            data,
                            w.group_stride(),
                            groups,
                            blocks,
                            codes.at(pass.start * k),
                            scales.at(pass.start * scale_row),
                            offsets.at(pass.start * blocks),
                            // Codes are doubled values.
                            w.global() * 0.5,
                            out.add(pass.start * row),
                            row,
                        );
                    }
                }
            });
            return Ok(());
        }

        let panel_len = int8_panel_floats(blocks);
        let work = Work::new(outputs);
        let panels = Out(workspace.panels.as_mut_ptr());
        let next = AtomicUsize::new(0);
        self.pool.run(threads, |thread| {
            // SAFETY: as in `gemm`.
            unsafe {
                let panel_scales = panels.at(thread * panel_len);
                let panel = panel_scales.add(blocks * GROUP).cast::<u8>();
                let mut result = [0.0; MOST_INT8_TILE * GROUP];
                loop {
                    let group = next.fetch_add(1, Relaxed);
                    if group >= work.groups || call.is_over() {
                        break;
                    }
                    work.for_each(group..group + 1, |w, out, groups| {
                        let group = groups.start;
                        let rows = GROUP.min(w.rows() - group * GROUP);
                        let data = w.data().as_ptr().add(group * w.group_stride());
                        (self.table.unpack_int8)(data, blocks, panel, panel_scales);
                        for first in (0..m).step_by(self.table.int8_tile) {
                            let tokens = self.table.int8_tile.min(m - first);
                            (self.table.tile_int8)(
                                tokens,
                                panel,
                                panel_scales,
                                blocks,
                                codes.at(first * k),
                                scales.at(first * scale_row),
                                offsets.at(first * blocks),
                                // Codes are doubled values.
                                w.global() * 0.5,
                                result.as_mut_ptr(),
                            );
                            for t in 0..tokens {
                                let out = out.at((first + t) * w.rows() + group * GROUP);
                                std::ptr::copy_nonoverlapping(
                                    result.as_ptr().add(t * GROUP),
                                    out,
                                    rows,
                                );
                            }
                        }
                    });
                }
            }
        });
        Ok(())
    }

    /// Causal attention of queries `[m, heads, dim]` over a layer's cache. Query row `i` is at position `first + i`, and sees the positions
    /// up to its own: all, or the last `window`. Query heads are shared evenly among key/value heads (GQA). `sinks` has one logit for each
    /// query head, which takes part in the softmax of each of its rows and has no value.
    pub fn attention(
        &self,
        q: &[f32],
        shape: &AttentionShape,
        sinks: Option<&[f32]>,
        kv: &KvPages<'_>,
        first: usize,
        out: &mut [f32],
        workspace: &mut Workspace,
    ) -> Result<()> {
        let layout = kv.layout();
        let AttentionShape {
            heads,
            kv_heads,
            dim,
            ..
        } = *shape;
        let row = heads * dim;
        if heads == 0
            || (kv_heads, dim) != (layout.heads(), layout.dim())
            || !heads.is_multiple_of(kv_heads)
            || !q.len().is_multiple_of(row)
            || out.len() != q.len()
        {
            bail!(
                InvalidArgument,
                "attention: {} query and {} output elements for {heads} heads of {dim} over {kv_heads} key/value heads",
                q.len(),
                out.len()
            );
        }
        let m = q.len() / row;
        let shared = heads / kv_heads;
        let window = shape.window.unwrap_or(usize::MAX);
        if window == 0
            || shape
                .score_cap
                .is_some_and(|cap| cap.is_nan() || cap <= 0.0)
        {
            bail!(
                InvalidArgument,
                "attention with a window of {window} and a score cap of {:?}; both must be positive",
                shape.score_cap
            );
        }
        if let Some(sinks) = sinks.filter(|sinks| sinks.len() != heads) {
            bail!(
                InvalidArgument,
                "attention: {} sinks for {heads} heads; there must be one for each",
                sinks.len()
            );
        }
        if m == 0 {
            return Ok(());
        }
        let pages = kv.covering((first + 1).saturating_sub(window)..first + m)?;
        let scores_of = Scores {
            scale: shape.scale,
            cap: shape.score_cap,
        };
        let room = scores_of_query(first + m);
        workspace.fit(&self.attention_sizes(first + m))?;
        let scores = Out(workspace.scores.as_mut_ptr());
        let out = Out(out.as_mut_ptr());
        let pages: Vec<Out<u8>> = pages
            .iter()
            .map(|page| Out(page.as_ptr().cast_mut()))
            .collect();
        let head_bytes = layout.head_bytes();
        let attend = match layout.kind() {
            KvType::F16 => self.table.attend_f16,
            KvType::F32 => self.table.attend_f32,
            KvType::F8 => self.table.attend_f8,
        };
        let spans = m.div_ceil(ATTENTION_TOKENS);
        let next = AtomicUsize::new(0);
        let attend_parts = |call: Call<'_>, thread: usize| {
            let pages: Vec<*const u8> = pages.iter().map(|p| p.0.cast_const()).collect();
            loop {
                let part = next.fetch_add(1, Relaxed);
                if part >= spans * kv_heads || call.is_over() {
                    break;
                }
                // The last tokens see the most positions: starting with them balances the threads.
                let (span, kv_head) = (spans - 1 - part / kv_heads, part % kv_heads);
                let tokens = span * ATTENTION_TOKENS..m.min((span + 1) * ATTENTION_TOKENS);
                let mut queries = [Query {
                    q: q.as_ptr(),
                    start: 0,
                    len: 0,
                    scores: scores.0,
                    out: out.0,
                    sink: None,
                }; ATTENTION_QUERIES];
                let mut filled = 0;
                for t in tokens {
                    for head in kv_head * shared..(kv_head + 1) * shared {
                        // SAFETY: indices lie within the checked lengths; each (token, head) is this part's alone, as is
                        // the thread's score room. Pages cover every position; the level is present.
                        unsafe {
                            let at = t * row + head * dim;
                            queries[filled] = Query {
                                q: q.as_ptr().add(at),
                                start: (first + t + 1).saturating_sub(window),
                                len: first + t + 1,
                                scores: scores.at((thread * ATTENTION_QUERIES + filled) * room),
                                out: out.at(at),
                                sink: sinks.map(|sinks| sinks[head]),
                            };
                            filled += 1;
                            if filled == ATTENTION_QUERIES {
                                attend(&queries, &pages, kv_head * head_bytes, dim, scores_of);
                                filled = 0;
                            }
                        }
                    }
                }
                // SAFETY: as above.
                unsafe {
                    attend(
                        &queries[..filled],
                        &pages,
                        kv_head * head_bytes,
                        dim,
                        scores_of,
                    );
                }
            }
        };
        call::with(|call| {
            self.pool
                .run(self.pool.threads(), |thread| attend_parts(call, thread));
            call.check()
        })
    }

    /// RMSNorm of each row of `x`, in place; rows have `weight.len()` elements.
    pub fn rms_norm(&self, x: &mut [f32], weight: &[f32], eps: f32) -> Result<()> {
        let n = weight.len();
        if n == 0 || !x.len().is_multiple_of(n) {
            bail!(
                InvalidArgument,
                "rms_norm: {} elements are not whole rows of {n}",
                x.len()
            );
        }
        let out = Out(x.as_mut_ptr());
        self.by_rows(x.len() / n, n, |row| {
            // SAFETY: the level is present; each row is normalized by one thread, within its `n` elements.
            unsafe {
                (self.table.rms_norm)(out.at(row * n), weight.as_ptr(), eps, n, out.at(row * n))
            }
        });
        Ok(())
    }

    /// `gate = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`.
    pub fn swiglu(&self, gate: &mut [f32], up: &[f32]) -> Result<()> {
        self.glu(self.table.swiglu, gate, up)
    }

    /// `gate = gelu(gate) * up`, with the tanh form of GELU.
    pub fn geglu(&self, gate: &mut [f32], up: &[f32]) -> Result<()> {
        self.glu(self.table.geglu, gate, up)
    }

    /// `gate = sigmoid(gate) * up`, with `sigmoid(x) = 1 / (1 + e^-x)`.
    pub fn sigmoid_gate(&self, gate: &mut [f32], up: &[f32]) -> Result<()> {
        self.glu(self.table.sigmoid_gate, gate, up)
    }

    /// `gate = (up + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)` and `up` clamped to `-limit..=limit`.
    pub fn clamped_swiglu(
        &self,
        gate: &mut [f32],
        up: &[f32],
        alpha: f32,
        limit: f32,
    ) -> Result<()> {
        self.by_runs(gate, up, &|gate, up, len| {
            // SAFETY: the level is present, and `by_runs` gives `len` elements.
            unsafe { (self.table.clamped_swiglu)(gate, up, len, alpha, limit) }
        })
    }

    fn glu(&self, glu: Glu, gate: &mut [f32], up: &[f32]) -> Result<()> {
        // SAFETY: the level is present, and `by_runs` gives `len` elements.
        self.by_runs(gate, up, &|gate, up, len| unsafe { glu(gate, up, len) })
    }

    /// Calls `each` with runs of the elements of `gate` and `up` and their number, on several threads.
    fn by_runs(
        &self,
        gate: &mut [f32],
        up: &[f32],
        each: &(dyn Fn(*mut f32, *const f32, usize) + Sync),
    ) -> Result<()> {
        if gate.len() != up.len() {
            bail!(
                InvalidArgument,
                "a gated activation of {} gate and {} up elements, which must be equal in number",
                gate.len(),
                up.len()
            );
        }
        let (n, out) = (gate.len(), Out(gate.as_mut_ptr()));
        self.by_rows(n.div_ceil(RUN), RUN, |run| {
            let len = RUN.min(n - run * RUN);
            // SAFETY: both have these elements; each run of them is one thread's.
            unsafe { each(out.at(run * RUN), up.as_ptr().add(run * RUN), len) }
        });
        Ok(())
    }

    /// `x = cap * tanh(x / cap)`.
    pub fn soft_cap(&self, x: &mut [f32], cap: f32) -> Result<()> {
        if !(cap > 0.0 && cap.is_finite()) {
            bail!(InvalidArgument, "a soft cap of {cap}; it must be positive");
        }
        let (n, out) = (x.len(), Out(x.as_mut_ptr()));
        self.by_rows(n.div_ceil(RUN), RUN, |run| {
            // SAFETY: the level is present; each run of elements is one thread's.
            unsafe { (self.table.soft_cap)(out.at(run * RUN), cap, RUN.min(n - run * RUN)) }
        });
        Ok(())
    }

    /// Read bandwidth of this level's instructions and threads, in bytes per second: the best of several passes over `buffer`, with and
    /// without prefetching. `buffer` must be larger than the caches, and have been written. Other load can only lower the result.
    pub fn read_bandwidth(&self, buffer: &[f32]) -> f64 {
        /// Floats per part; threads take parts as they become free.
        const PART: usize = 1 << 19;
        let parts = buffer.len() / PART;
        let mut best = f64::MAX;
        // How well hardware prefetches depends on the processor.
        for ahead in [0, 4096, 0, 4096, 0, 4096, 0, 4096] {
            let start = std::time::Instant::now();
            self.pool.run(parts, |part| {
                let x = &buffer[part * PART..(part + 1) * PART];
                // SAFETY: the level is present, and PART is a multiple of 64.
                std::hint::black_box(unsafe { (self.table.sum)(x.as_ptr(), PART, ahead) });
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
        (parts * PART * size_of::<f32>()) as f64 / best
    }

    /// Calls `each` for every row, on several threads if rows of `n` elements make that worthwhile.
    pub fn by_rows(&self, rows: usize, n: usize, each: impl Fn(usize) + Sync) {
        let grain = (POINTWISE_GRAIN / n.max(1)).max(1);
        self.pool.run(rows.div_ceil(grain), |part| {
            (part * grain..rows.min((part + 1) * grain)).for_each(&each);
        });
    }
}

/// Splits `m` tokens into the fewest passes of at most `most`, as even as possible.
fn passes(m: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let passes = m.div_ceil(most);
    (0..passes).map(move |i| m * i / passes..m * (i + 1) / passes)
}

/// The row groups of several weights as one range, so that they share a parallel region.
struct Work<'a> {
    weights: Vec<(&'a Packed, Out<f32>)>,
    groups: usize,
}

impl<'a> Work<'a> {
    fn new(outputs: &mut [(&'a Packed, &mut [f32])]) -> Self {
        let weights: Vec<_> = outputs
            .iter_mut()
            .map(|(w, y)| (*w, Out(y.as_mut_ptr())))
            .collect();
        let groups = weights.iter().map(|(w, _)| w.groups()).sum();
        Work { weights, groups }
    }

    /// Calls `each` with the part of `range` in each weight.
    fn for_each(&self, range: Range<usize>, mut each: impl FnMut(&Packed, Out<f32>, Range<usize>)) {
        let mut start = 0;
        for &(w, out) in &self.weights {
            let end = start + w.groups();
            if range.start < end && range.end > start {
                each(
                    w,
                    out,
                    range.start.max(start) - start..range.end.min(end) - start,
                );
            }
            start = end;
        }
    }
}
