//! Kernels from a source outside the library, for hardware benchmarks and tests of faults. No part of the library's interface.

use std::borrow::Cow;
use std::sync::Arc;

use super::driver::{Gpu, Launch, Module, target};
use super::registry::compile_source;
use crate::base::Result;

/// A compiled source, loaded on a device.
pub struct Program {
    gpu: Arc<Gpu>,
    module: Module,
}

/// Launch shape of a program's kernel.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// Whether it may start before its predecessor has ended. It must then wait itself.
    pub overlap: bool,
}

impl Program {
    /// Compiles `source`, which may include the library's headers, for the device. `path` names it in messages.
    pub fn new(gpu: &Arc<Gpu>, path: &str, source: &str) -> Result<Program> {
        let (image, _) = compile_source(path, source, &target(gpu.arch()))?;
        gpu.bind()?;
        Ok(Program {
            gpu: gpu.clone(),
            module: Module::from_image(&image, Cow::Owned(path.to_owned()))?,
        })
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `arguments` must be the kernel's one parameter, in the kernel's layout. A kernel that touches memory it must not may overwrite any
    /// of the process's device memory, and can make the device unusable for the process.
    pub unsafe fn launch<T>(&self, kernel: &str, shape: Shape, arguments: &T) -> Result<()> {
        let launch = Launch {
            shared: shape.shared,
            ..Launch::new(shape.grid, shape.threads)
        };
        self.gpu.bind()?;
        let function = self.module.function(kernel)?;
        // SAFETY: the function is this module's; the rest is the caller's promise.
        unsafe { launch.enqueue(&self.gpu, function, kernel, shape.overlap, arguments) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The module is dropped next. In a lost context it cannot be unloaded, which does no harm.
        let _ = self.gpu.bind();
    }
}
