//! Selects the backend of products with a 4-bit weight: a pure function of the request and the available kernels. A request is met or
//! refused; a fallback comes with its reason. Prepares nothing.

use super::Device;
use crate::base::error::{Result, bail};

/// The format of a 4-bit weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// See [`crate::format::nvfp4`].
    Nvfp4,
    /// See [`crate::format::nf4`].
    Nf4,
}

impl WeightFormat {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            WeightFormat::Nvfp4 => "nvfp4",
            WeightFormat::Nf4 => "nf4",
        }
    }

    /// The backend whose kernel reads this format.
    const fn kernel(self) -> Backend {
        match self {
            WeightFormat::Nvfp4 => Backend::Nvfp4Kernel,
            WeightFormat::Nf4 => Backend::Nf4Kernel,
        }
    }
}

/// Allowed ways to compute a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ComputePath {
    /// The library's choice: currently a kernel for the format, or else the decoded weight.
    #[default]
    Auto,
    /// A kernel for the format, or an error.
    KernelOnly,
    /// A kernel for the format, or else the decoded weight.
    KernelOrFallback,
    /// The decoded weight.
    DequantMatmulOnly,
}

impl ComputePath {
    /// Every path.
    pub const ALL: [ComputePath; 4] = [
        ComputePath::Auto,
        ComputePath::KernelOnly,
        ComputePath::KernelOrFallback,
        ComputePath::DequantMatmulOnly,
    ];

    /// The name in host programs.
    pub const fn name(self) -> &'static str {
        match self {
            ComputePath::Auto => "Auto",
            ComputePath::KernelOnly => "KernelOnly",
            ComputePath::KernelOrFallback => "KernelOrFallback",
            ComputePath::DequantMatmulOnly => "DequantMatmulOnly",
        }
    }
}

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// A kernel that reads NVFP4 codes and scales: 4 bits stay 4 bits.
    Nvfp4Kernel,
    /// A kernel that reads NF4 codes and scales.
    Nf4Kernel,
    /// A dense product with the weight, which is decoded once when it is prepared.
    DequantMatmul,
}

impl Backend {
    /// Every backend.
    pub const ALL: [Backend; 3] = [
        Backend::Nvfp4Kernel,
        Backend::Nf4Kernel,
        Backend::DequantMatmul,
    ];

    /// The name in host programs.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Nvfp4Kernel => "nvfp4-kernel",
            Backend::Nf4Kernel => "nf4-kernel",
            Backend::DequantMatmul => "dequant-matmul",
        }
    }

    /// The backend called `name`, ignoring case and surrounding spaces.
    pub fn from_name(name: &str) -> Result<Backend> {
        let plain = name.trim().to_ascii_lowercase();
        match Backend::ALL.into_iter().find(|b| b.name() == plain) {
            Some(backend) => Ok(backend),
            None => bail!(
                InvalidArgument,
                "there is no backend '{name}'; there are {}",
                Backend::ALL.map(Backend::name).join(", ")
            ),
        }
    }
}

/// A caller's request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The weight's format.
    pub format: WeightFormat,
    /// The allowed ways to compute it.
    pub path: ComputePath,
    /// The one backend that the caller requires, if any.
    pub backend: Option<Backend>,
    /// Whether to ignore kernels of the CPU. TorchSharp hosts set it: to them kernels exist only on a GPU.
    pub exclude_cpu_kernels: bool,
}

/// The backend for a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The backend.
    pub backend: Backend,
    /// The reason for not using the format's kernel, if that was preferred.
    pub fallback_reason: Option<String>,
}

/// The backends of `device`, best first.
pub const fn present(device: &Device) -> &'static [Backend] {
    match device {
        Device::Cpu(_) | Device::Cuda(_) => &[Backend::Nvfp4Kernel, Backend::DequantMatmul],
    }
}

/// Chooses a backend for a weight on `device`.
pub fn choose(request: &Request, device: &Device) -> Result<Choice> {
    match device {
        Device::Cpu(_) if request.exclude_cpu_kernels => {
            let place = format!("{}, whose kernels the options exclude", device.name());
            choose_among(request, &place, &[Backend::DequantMatmul])
        }
        _ => choose_among(request, &device.name(), present(device)),
    }
}

/// Chooses among `present`, the backends of the device that `place` names.
fn choose_among(request: &Request, place: &str, present: &[Backend]) -> Result<Choice> {
    let (format, path) = (request.format, request.path);
    let kernel = format.kernel();
    let contradiction = match (path, request.backend) {
        (_, Some(named)) if named != kernel && named != Backend::DequantMatmul => {
            Some(format!("is not for {} weights", format.name()))
        }
        (ComputePath::KernelOnly, Some(Backend::DequantMatmul)) => {
            Some("is not a kernel, and the compute path is KernelOnly".to_owned())
        }
        (ComputePath::DequantMatmulOnly, Some(named)) if named != Backend::DequantMatmul => {
            Some("is a kernel, and the compute path is DequantMatmulOnly".to_owned())
        }
        _ => None,
    };
    if let (Some(why), Some(named)) = (contradiction, request.backend) {
        bail!(InvalidArgument, "backend '{}' {why}", named.name());
    }
    let wanted = match (path, request.backend) {
        (_, Some(named)) => named,
        (ComputePath::DequantMatmulOnly, None) => Backend::DequantMatmul,
        (ComputePath::Auto | ComputePath::KernelOnly | ComputePath::KernelOrFallback, None) => {
            kernel
        }
    };
    let missing = |backend: Backend| {
        let have: Vec<_> = present.iter().map(|b| b.name()).collect();
        let have = if have.is_empty() {
            "none".to_owned()
        } else {
            have.join(", ")
        };
        format!(
            "there is no {} for {place}; there is {have}",
            backend.name()
        )
    };
    if present.contains(&wanted) {
        return Ok(Choice {
            backend: wanted,
            fallback_reason: None,
        });
    }
    let may_fall_back = request.backend.is_none() && path != ComputePath::KernelOnly;
    if may_fall_back && present.contains(&Backend::DequantMatmul) {
        return Ok(Choice {
            backend: Backend::DequantMatmul,
            fallback_reason: Some(missing(wanted)),
        });
    }
    bail!(
        Unsupported,
        "compute path {} for {} weights: {}",
        path.name(),
        format.name(),
        missing(wanted)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind::{InvalidArgument, Unsupported};

    const DENSE: Backend = Backend::DequantMatmul;

    fn request(format: WeightFormat, path: ComputePath, backend: Option<Backend>) -> Request {
        Request {
            format,
            path,
            backend,
            exclude_cpu_kernels: false,
        }
    }

    /// Every path, for a device with the kernel and for one without: the backend, or the error.
    #[test]
    fn the_table_without_a_named_backend() {
        for (format, kernel) in [
            (WeightFormat::Nvfp4, Backend::Nvfp4Kernel),
            (WeightFormat::Nf4, Backend::Nf4Kernel),
        ] {
            let table = [
                (ComputePath::Auto, Ok(kernel), Ok(DENSE)),
                (ComputePath::KernelOnly, Ok(kernel), Err(Unsupported)),
                (ComputePath::KernelOrFallback, Ok(kernel), Ok(DENSE)),
                (ComputePath::DequantMatmulOnly, Ok(DENSE), Ok(DENSE)),
            ];
            for (path, with, without) in table {
                let request = request(format, path, None);
                let chosen = |present: &[Backend]| choose_among(&request, "the moon", present);
                let backend =
                    |present: &[Backend]| chosen(present).map(|c| c.backend).map_err(|e| e.kind());
                assert_eq!(backend(&[kernel, DENSE]), with, "{request:?}");
                assert_eq!(backend(&[DENSE]), without, "{request:?}");
                // A fallback has a reason; the requested backend is not a fallback.
                assert_eq!(chosen(&[kernel, DENSE]).unwrap().fallback_reason, None);
                let reason = match chosen(&[DENSE]) {
                    Ok(choice) => choice.fallback_reason,
                    Err(e) => Some(e.message().to_owned()),
                };
                let said = format!(
                    "there is no {} for the moon; there is dequant-matmul",
                    kernel.name()
                );
                let silent = path == ComputePath::DequantMatmulOnly;
                assert_eq!(reason.is_none(), silent, "{request:?}");
                assert!(reason.is_none_or(|r| r.ends_with(&said)), "{request:?}");
                // A device without any backend.
                let e = choose_among(&request, "the moon", &[]).unwrap_err();
                assert!(
                    e.kind() == Unsupported && e.message().ends_with("there is none"),
                    "{e}"
                );
            }
        }
    }

    #[test]
    fn a_named_backend_is_chosen_or_refused() {
        for (format, kernel, foreign) in [
            (
                WeightFormat::Nvfp4,
                Backend::Nvfp4Kernel,
                Backend::Nf4Kernel,
            ),
            (WeightFormat::Nf4, Backend::Nf4Kernel, Backend::Nvfp4Kernel),
        ] {
            for path in ComputePath::ALL {
                let chosen = |named, present: &[Backend]| {
                    choose_among(&request(format, path, Some(named)), "cpu", present)
                        .map(|c| (c.backend, c.fallback_reason))
                        .map_err(|e| e.kind())
                };
                let all = Backend::ALL;
                assert_eq!(chosen(foreign, &all), Err(InvalidArgument), "{path:?}");
                let (for_kernel, for_dense) = match path {
                    ComputePath::KernelOnly => (Ok((kernel, None)), Err(InvalidArgument)),
                    ComputePath::DequantMatmulOnly => (Err(InvalidArgument), Ok((DENSE, None))),
                    ComputePath::Auto | ComputePath::KernelOrFallback => {
                        (Ok((kernel, None)), Ok((DENSE, None)))
                    }
                };
                assert_eq!(chosen(kernel, &all), for_kernel, "{path:?}");
                assert_eq!(chosen(DENSE, &all), for_dense, "{path:?}");
                let absent = for_kernel.and(Err(Unsupported));
                assert_eq!(chosen(kernel, &[DENSE]), absent, "{path:?}");
            }
        }
    }

    #[test]
    fn names_come_back() {
        for backend in Backend::ALL {
            let shouted = format!(" {} ", backend.name().to_ascii_uppercase());
            assert_eq!(Backend::from_name(&shouted).unwrap(), backend);
        }
        let e = Backend::from_name("cublas").unwrap_err();
        assert!(
            e.message()
                .contains("'cublas'; there are nvfp4-kernel, nf4-kernel, dequant-matmul"),
            "{e}"
        );
    }

    #[test]
    fn the_cpu_has_a_kernel_for_nvfp4_and_none_for_nf4() {
        let device = Device::cpu(Some(1)).unwrap();
        let chosen = |format, path, exclude_cpu_kernels| {
            let request = Request {
                exclude_cpu_kernels,
                ..request(format, path, None)
            };
            choose(&request, &device)
        };
        let kernel = chosen(WeightFormat::Nvfp4, ComputePath::KernelOnly, false).unwrap();
        assert_eq!(kernel.backend, Backend::Nvfp4Kernel);
        let e = chosen(WeightFormat::Nf4, ComputePath::KernelOnly, false).unwrap_err();
        assert!(e.message().contains("no nf4-kernel for cpu ("), "{e}");
        let e = chosen(WeightFormat::Nvfp4, ComputePath::KernelOnly, true).unwrap_err();
        assert!(e.message().contains("options exclude"), "{e}");
        let dense = chosen(WeightFormat::Nvfp4, ComputePath::Auto, true).unwrap();
        assert_eq!(dense.backend, DENSE);
        assert!(dense.fallback_reason.unwrap().contains("options exclude"));
    }
}
