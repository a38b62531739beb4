//! The NVIDIA driver: loading, devices and contexts, stream order, memory, copies, graphs, the kernel compiler, modules and launches. Knows
//! no operation: what launchers keep on a device is [`Attached`] to it, and what they launch is a [`KernelUnit`].

mod arena;
mod attached;
mod context;
mod copy;
mod error;
mod event;
mod gpu;
mod graph;
mod lane;
mod launch;
mod loading;
mod managed;
mod memory;
mod module;
pub(super) mod nvrtc;
mod order;
mod recording;
mod staged;
mod staging;

pub use arena::{Arena, Arenas};
pub(super) use attached::Attached;
pub use context::KeepContext;
pub(super) use error::check;
pub use event::Event;
pub use gpu::{Gpu, open_gpus};
pub use graph::Graph;
pub use lane::Lane;
pub(super) use launch::{Launch, Planned, int};
pub(super) use loading::driver;
pub use loading::{check_managed, count, unavailable};
pub use managed::ManagedBuffer;
pub(super) use managed::prefetch;
pub use memory::{DeviceBuffer, DeviceSlice, Pinned};
pub use module::compiler;
#[cfg(all(test, embedded_kernels))]
pub(super) use module::image;
pub(super) use module::{Kernel, KernelUnit, Module, compile};
pub(super) use nvrtc::Source;
pub use nvrtc::{TARGETS, target};
pub use order::HostStream;
pub(super) use recording::recorded;
pub use staged::StagedBuffer;
pub(super) use staging::{STAGING, Staging, keep, take};
