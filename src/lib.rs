#![doc = include_str!("README.md")]
//!
//! # A conversation
//!
//! A [served model](engine::Served) is loaded once and shared; a [`Session`](session::Session) is one sequence of tokens on it, whose keys and
//! values stay from one turn to the next.
//!
//! ```
//! use std::{ops::ControlFlow, path::Path};
//!
//! use NVFP4::base::Result;
//! use NVFP4::engine::Served;
//! use NVFP4::model::{Device, LoadOptions};
//! use NVFP4::session::{GenerateOptions, Session, SessionOptions};
//!
//! /// `path` is a directory as it is published (safetensors), or a `.gguf`, `.safetensors` or `.dat` file.
//! fn answer(path: &Path, question: &str) -> Result<String> {
//!     let model = Served::load(path, &LoadOptions::new(Device::cpu(None)?))?;
//!     let mut session = Session::new(model.clone(), &SessionOptions::default())?;
//!     let options = GenerateOptions { max_tokens: 60, ..GenerateOptions::of(&model) };
//!     let answer = session.chat(question, None, &options, &mut |piece| {
//!         print!("{}", piece.text);
//!         ControlFlow::Continue(())
//!     })?;
//!     Ok(answer.text)
//! }
//! # // A model that the published package is too small for.
//! # let model = Path::new("tests/data/verse-10m");
//! # if model.exists() {
//! #     assert!(answer(model, "HAMLET.")?.len() > 20);
//! # }
//! # NVFP4::base::Result::Ok(())
//! ```
//!
//! # Training
//!
//! A [`Trainer`](train::Trainer) steps all parameters of a model, or [adapters](train::Lora) beside it; [`train::run`](train::run::run)
//! does a whole run with data, evaluation and checkpoints.
//!
//! ```
//! use std::path::Path;
//!
//! use NVFP4::base::Result;
//! use NVFP4::model::Device;
//! use NVFP4::model::training::Source;
//! use NVFP4::train::{Config, MicroBatch, Trainer};
//!
//! /// One document, again and again; each token is to predict the next one. Gives the losses.
//! fn learn(path: &Path, tokens: &[u32]) -> Result<Vec<f64>> {
//!     let labels: Vec<i32> = tokens[1..].iter().map(|&t| t as i32).collect();
//!     let batch = MicroBatch { tokens: &tokens[..labels.len()], documents: &[labels.len()], labels: &labels, weights: None };
//!     let source = Source::open(path)?;
//!     let mut trainer = Trainer::new(&Device::cpu(None)?, &source, &Config { steps: 10, ..Config::default() })?;
//!     (0..10).map(|_| Ok(trainer.step(&[batch])?.loss)).collect()
//! }
//! # let model = Path::new("tests/golden/model/qwen3_tied");
//! # if model.exists() {
//! #     let losses = learn(model, &[11, 80, 63, 194, 161, 130, 163, 144])?;
//! #     assert!(losses[9] < losses[0], "{losses:?}");
//! # }
//! # NVFP4::base::Result::Ok(())
//! ```
//!
//! # Where things are
//!
//! | to | see |
//! |---|---|
//! | quantize and dequantize matrices | [`ops::quantize`], [`format::nvfp4`], and [`format::nf4`] |
//! | multiply matrices in 4 bits (W4A4) | [`ops::quantize::scaled_mm`] |
//! | multiply with a prepared weight (W4A16, W4A8) | [`ops::linear::Linear`], [`ops::linear::linear`] |
//! | do that on tensors of any type, stride and place, with DLPack | [`tensor::Tensor`], [`ops::tensors`] |
//! | load a model, and choose where it runs | [`engine::Served`], [`model::LoadOptions`], [`model::placement`] |
//! | run batches on its weights | [`model::Model::run`] |
//! | hold conversations, with reasoning and tools | [`session::Session`], [`session::ChatOptions`], [`session::GenerateOptions`] |
//! | step several sequences together | [`session::step_choose`] |
//! | train a model | [`train::Trainer`], [`train::Config`], [`train::run`] |
//! | optimize a weight of one's own in 4 bits | [`ops::tensors::TensorOptimizer`] |
//! | quantize a model on disk | [`model::convert`] |
//! | read and write checkpoints | [`checkpoint::open`], [`checkpoint::Writer`] |
//! | make tokens of text | [`text::Tokenizer`], [`text::ChatTemplate`] |
//! | account for memory, and bound it | [`base::memory`] |
//! | cancel a long call, and see how far it is | [`base::call`] |
//! | know what went wrong | [`base::Error`], [`base::ErrorKind`] |
//!
//! Modules are floors: imports point only downward, never sideways.
//!
//! | floor | modules |
//! |---|---|
//! | 8 | [`abi`] (and the `nvfp4` command) |
//! | 7 | [`session`], [`train`] |
//! | 6 | [`engine`] |
//! | 5 | [`model`] |
//! | 4 | [`ops`] |
//! | 3 | [`cpu`], [`cuda`], [`checkpoint`], [`text`] |
//! | 2 | [`tensor`] |
//! | 1 | [`mod@format`] |
//! | 0 | [`base`] |
//!
//! # What to know
//!
//! - The feature `allocator`, on by default, sets the global allocator, [`base::alloc::Allocator`], by which calls end in an error where
//!   the system refuses memory. A program that wants another one leaves the feature out (`default-features = false`): a refusal then ends
//!   the process where a dependency allocates, and the memory that a chat template takes has no limit.
//! - Everything that is shared ([`Served`](engine::Served), [`Linear`](ops::linear::Linear), [`Device`](ops::Device)) may be used from any
//!   thread at a time.
//! - Events go to [`tracing`](https://docs.rs/tracing).
//! - GPU kernels are compiled by NVRTC when they are first used, and kept on disk. `NVFP4_EMBED_KERNELS=1 cargo build` compiles them
//!   beforehand.
//! - The feature `cli`, on by default, is what the `nvfp4` command alone needs.
//! - Before 1.0 a minor version may change the Rust interface. The C interface keeps its promise from 0.1 on: see [`abi`].

// The file must be called libNVFP4.so, so the crate takes its name from the file rather than from Rust's convention.
#![allow(non_snake_case)]

pub mod base;
pub mod format;
pub mod tensor;

pub mod checkpoint;
pub mod cpu;
pub mod cuda;
pub mod text;

pub mod ops;

pub mod model;

pub mod engine;

pub mod session;
pub mod train;

pub mod abi;

#[cfg(feature = "allocator")]
#[global_allocator]
static ALLOCATOR: base::alloc::Allocator = base::alloc::Allocator;
