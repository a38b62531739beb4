//! Drafters: their logits against transformers, and generations with drafts against those without: the same tokens, logits and states.
//! Goldens and the script that made them (`drafter.py`) are in `tests/golden/model`.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::engine::{NewTokens, Served};
use NVFP4::model::{DrafterRows, KvType, Scratch, Wanted};
use NVFP4::session::{GenerateOptions, Generation, SamplingOptions, Session, SessionOptions};
use common::{Copy, expect_kind, golden, load, options, some_tokens};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, View};
use serde_json::{Value, json};

/// The bar of the parity tests.
const TOLERANCE: f32 = 2e-4;

const CASES: [&str; 3] = ["qwen35_drafter", "qwen35moe_drafter", "qwen3next_drafter"];

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let (values, _) = tensor.data().as_chunks::<4>();
    values.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn tokens(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap();
    let (values, _) = tensor.data().as_chunks::<8>();
    values
        .iter()
        .map(|b| i64::from_le_bytes(*b) as u32)
        .collect()
}
