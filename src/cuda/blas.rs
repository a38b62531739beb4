//! cuBLASLt for large GEMMs, loaded at run time where it is installed.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::driver::{Attached, DeviceBuffer, Gpu};
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::base::{ErrorKind, Result};
use crate::tensor::product::{GemmForm, Sizes};

/// `CUBLAS_OP_N` and `CUBLAS_OP_T`.
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;

/// Element type of both operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    F16,
    Bf16,
    /// f32, multiplied in f32.
    F32,
}

/// A matrix at an address; `stride` elements lie between the starts of consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) address: u64,
    pub(super) stride: usize,
}

/// How a product is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Store {
    F32,
    /// Added to an f32 result.
    Add,
    /// Stored as f16, from f16 operands.
    F16,
    /// Stored as bf16, from bf16 operands.
    Bf16,
    /// Added to a bf16 result, from bf16 operands.
    AddBf16,
}

/// Rows for which the algorithm of a product of `m` rows is chosen: few numbers, because the choice and the first run of its kernel take
/// milliseconds, and prompts have any length.
fn rows_of_choice(m: usize) -> usize {
    match m {
        0..=256 => m.next_multiple_of(128),
        257..=1024 => m.next_multiple_of(256),
        _ => m.next_multiple_of(512),
    }
}

/// Key of the algorithm cache: the shape and types of a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    element: Element,
    form: GemmForm,
    sizes: Sizes,
    strides: [usize; 3],
    store: Store,
    /// The multiprocessors of a lane.
    lane: Option<usize>,
}

/// The cuBLASLt handle and the algorithms chosen so far.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    chosen: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for Blas {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Blas {}

fn check<T>(result: std::result::Result<T, CublasError>, doing: &str) -> Result<T> {
    result.map_err(|e| err!(Internal, "cuBLASLt, {doing}: {e}"))
}

/// A descriptor, destroyed when dropped.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the library and given back once.
        let _ = unsafe { (self.1)(self.0) };
    }
}

impl Blas {
    pub(super) fn new(gpu: &Gpu) -> Result<Blas> {
        // SAFETY: looking for a library runs its initialisers, which cuBLASLt's allow at any time.
        if !unsafe { sys::is_culib_present() } {
            bail!(
                DeviceUnavailable,
                "cuBLASLt (libcublasLt.so.13 or .so.12) was not found: prefill uses this library's own kernels, which are slower"
            );
        }
        gpu.bind()?;
        Ok(Blas {
            handle: check(result::create_handle(), "starting")?,
            chosen: Mutex::default(),
        })
    }

    /// `out[m, n] (+)= alpha * x[m, k] w[n, k]^T` with rows of `out` `stride` apart.
    pub(super) fn product(
        &self,
        gpu: &Gpu,
        element: Element,
        w: u64,
        n: usize,
        k: usize,
        alpha: f32,
        x: u64,
        m: usize,
        store: Store,
        out: u64,
        stride: usize,
        workspace: &DeviceBuffer,
    ) -> Result<()> {
        self.matmul_as(
            rows_of_choice(m),
            gpu,
            element,
            GemmForm::NT,
            Sizes { m, n, k },
            alpha,
            [(x, k), (w, k)].map(|(address, stride)| Rows { address, stride }),
            store,
            Rows {
                address: out,
                stride,
            },
            workspace,
        )
    }

    /// `out (+)= alpha` times the product of `a` and `b` in any [`GemmForm`].
    pub(super) fn matmul(
        &self,
        gpu: &Gpu,
        element: Element,
        form: GemmForm,
        sizes: Sizes,
        alpha: f32,
        operands: [Rows; 2],
        store: Store,
        out: Rows,
        workspace: &DeviceBuffer,
    ) -> Result<()> {
        self.matmul_as(
            sizes.m, gpu, element, form, sizes, alpha, operands, store, out, workspace,
        )
    }

    /// [`Blas::matmul`] by the algorithm for `chosen_rows` rows in the place of `m`, if that can do it.
    fn matmul_as(
        &self,
        chosen_rows: usize,
        gpu: &Gpu,
        element: Element,
        form: GemmForm,
        sizes: Sizes,
        alpha: f32,
        [x, w]: [Rows; 2],
        store: Store,
        out: Rows,
        workspace: &DeviceBuffer,
    ) -> Result<()> {
        let Sizes { m, n, k } = sizes;
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, CUBLASLT_MATMUL_DESC_TRANSA,
            CUBLASLT_MATMUL_DESC_TRANSB,
        };
        gpu.bind()?;
        let (to, beta) = match store {
            Store::F32 => (sys::cudaDataType_t::CUDA_R_32F, 0f32),
            Store::Add => (sys::cudaDataType_t::CUDA_R_32F, 1.0),
            Store::F16 => (sys::cudaDataType_t::CUDA_R_16F, 0.0),
            Store::Bf16 => (sys::cudaDataType_t::CUDA_R_16BF, 0.0),
            Store::AddBf16 => (sys::cudaDataType_t::CUDA_R_16BF, 1.0),
        };
        let layout = |kind, rows: usize, cols: usize, stride: usize| -> Result<_> {
            let layout =
                result::create_matrix_layout(kind, rows as u64, cols as u64, stride as i64);
            Ok(Owned(
                check(layout, "describing a matrix")?,
                result::destroy_matrix_layout,
            ))
        };
        // cuBLASLt is column-major: it sees our row-major operands transposed, and so its result too.
        let from = match element {
            Element::F16 => sys::cudaDataType_t::CUDA_R_16F,
            Element::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Element::F32 => sys::cudaDataType_t::CUDA_R_32F,
        };
        let left = match form {
            GemmForm::NT => layout(from, k, n, w.stride)?,
            GemmForm::NN | GemmForm::TN => layout(from, n, k, w.stride)?,
        };
        let right = |m| match form {
            GemmForm::NT | GemmForm::NN => layout(from, k, m, x.stride),
            GemmForm::TN => layout(from, m, k, x.stride),
        };
        let stored = |m| layout(to, n, m, out.stride);
        let (a, b, c) = (left, right(m)?, stored(m)?);
        let transposed = |it_is| if it_is { TRANSPOSED } else { AS_IT_IS };
        let operation = Owned(
            check(
                result::create_matmul_desc(
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cudaDataType_t::CUDA_R_32F,
                ),
                "describing a product",
            )?,
            result::destroy_matmul_desc,
        );
        let lane = gpu.lane();
        let target = lane
            .map(|multiprocessors| (CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, multiprocessors as i32));
        let attributes = [
            (
                CUBLASLT_MATMUL_DESC_TRANSA,
                transposed(form == GemmForm::NT),
            ),
            (
                CUBLASLT_MATMUL_DESC_TRANSB,
                transposed(form == GemmForm::TN),
            ),
        ];
        for (which, value) in attributes.into_iter().chain(target) {
            // SAFETY: the attribute is one such value.
            let set = unsafe {
                result::set_matmul_desc_attribute(
                    operation.0,
                    which,
                    (&raw const value).cast::<c_void>(),
                    size_of_val(&value),
                )
            };
            check(set, "describing a product")?;
        }
        let find = |m: usize| -> Result<sys::cublasLtMatmulAlgo_t> {
            let shape = Shape {
                element,
                form,
                sizes: Sizes { m, n, k },
                strides: [x.stride, w.stride, out.stride],
                store,
                lane,
            };
            let known = lock(&self.chosen).get(&shape).copied();
            if let Some(algorithm) = known {
                return Ok(algorithm);
            }
            let preference = Owned(
                check(result::create_matmul_pref(), "choosing an algorithm")?,
                result::destroy_matmul_pref,
            );
            let most = workspace.bytes();
            let (b, c) = (right(m)?, stored(m)?);
            // SAFETY: the attribute is a size; the descriptors are alive.
            let found = unsafe {
                check(
                    result::set_matmul_pref_attribute(
                        preference.0,
                        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                        (&raw const most).cast::<c_void>(),
                        size_of_val(&most),
                    ),
                    "choosing an algorithm",
                )?;
                check(
                    result::get_matmul_algo_heuristic(
                        self.handle,
                        operation.0,
                        a.0,
                        b.0,
                        c.0,
                        c.0,
                        preference.0,
                    ),
                    "choosing an algorithm",
                )
                .map_err(|e| e.within(format_args!("a product {form:?} of [{m}, {n}] over {k}")))?
            };
            lock(&self.chosen).insert(shape, found.algo);
            Ok(found.algo)
        };
        let multiply = |algorithm: sys::cublasLtMatmulAlgo_t| {
            // SAFETY: the operands are device memory of the sizes described, by the caller's checks; alpha and beta are read before the
            // call returns.
            unsafe {
                result::matmul(
                    self.handle,
                    operation.0,
                    (&raw const alpha).cast(),
                    (&raw const beta).cast(),
                    w.address as *const c_void,
                    a.0,
                    x.address as *const c_void,
                    b.0,
                    out.address as *const c_void,
                    c.0,
                    out.address as *mut c_void,
                    c.0,
                    &raw const algorithm,
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    gpu.stream().cast(),
                )
            }
        };
        let mut done = multiply(find(chosen_rows)?);
        if done.is_err() && chosen_rows != m {
            done = multiply(find(m)?);
        }
        // cuBLASLt does not report a device fault as such; the driver does.
        check(done, "multiplying").map_err(|e| gpu.synchronize().err().unwrap_or(e))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and given back once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Attached to a device: cuBLASLt, or the reason why it is missing.
struct Loaded(Result<Arc<Blas>>);

impl Attached for Loaded {}

impl Gpu {
    /// cuBLASLt, or the reason why it is missing. Only a missing library is remembered; one that failed to start, for lack of memory for
    /// example, is tried again.
    fn loaded_blas(&self) -> Result<Arc<Blas>> {
        let loaded = self.attached_or(|| match Blas::new(self) {
            Err(e) if e.kind() != ErrorKind::DeviceUnavailable => Err(e),
            state => Ok(Loaded(state.map(Arc::new))),
        })?;
        loaded.0.clone()
    }

    /// cuBLASLt, if available.
    pub(super) fn blas(&self) -> Option<Arc<Blas>> {
        self.loaded_blas().ok()
    }

    /// cuBLASLt, for callers that cannot do without it.
    pub(super) fn need_blas(&self) -> Result<Arc<Blas>> {
        self.loaded_blas()
            .map_err(|e| err!(Unsupported, "{}", e.message()))
    }

    /// Why cuBLASLt is unavailable; `None` if it is available.
    pub fn blas_unavailable(&self) -> Option<String> {
        self.loaded_blas().err().map(|e| e.message().to_owned())
    }
}
