//! The GPU against the processor and against f64: each kernel family on random data of ragged shapes, with outputs poisoned
//! first, and whole models. Without a CUDA device every test says SKIPPED, unless NVFP4_REQUIRE names `cuda`.

#[path = "../common/mod.rs"]
mod common;
mod support;

mod adapters;
mod attention;
mod calibrated;
mod compare;
mod delta;
mod deterministic;
mod drafts;
mod experts;
mod footprint;
mod fused;
mod int8;
mod linear;
mod mamba;
mod memory;
mod mixtures;
mod models;
mod pointwise;
mod prefixes;
mod recurrent;
mod sampling;
mod scaled;
mod sessions;
mod teacher;
mod tensors;
mod training;
mod training_model;
mod training_optimizer;
mod unfused_attention;
