//! Sizes and offsets of the structs in the header, which hosts in other languages mirror: changing one breaks them. `tests/c/layout.py`
//! asserts the same numbers in C, so a difference between the two compilers' layouts is found. A struct that grows keeps its old size in its
//! `EARLIER`; programs in `tests/abi` fail if it does not.

use std::mem::offset_of;

use super::call::NVFP4_CallOptions;
use super::chat::NVFP4_ChatOptions;
use super::convert::{NVFP4_CalibrateOptions, NVFP4_ConvertOptions};
use super::data::NVFP4_DataOptions;
use super::embedding::NVFP4_EmbedOptions;
use super::grammar::NVFP4_GrammarOptions;
use super::linear::NVFP4_WeightOptions;
use super::model::{
    NVFP4_LoadOptions, NVFP4_Message, NVFP4_ModelStatistics, NVFP4_Plan, NVFP4_PlanOptions,
    NVFP4_SpecialToken,
};
use super::model_files::NVFP4_ModelFile;
use super::optimizer::{NVFP4_OptimizerOptions, NVFP4_StepOptions};
use super::quantize::NVFP4_QuantizeOptions;
use super::queue::{NVFP4_QueueEvent, NVFP4_QueueOptions, NVFP4_SubmitOptions};
use super::schema::{NVFP4_NamedTensor, NVFP4_SchemaResult};
use super::session::{
    NVFP4_GenerateOptions, NVFP4_GenerationResult, NVFP4_LogitsEvent, NVFP4_SessionOptions,
    NVFP4_TokenEvent,
};
use super::trainer::{NVFP4_MicroBatch, NVFP4_StepReport, NVFP4_TrainerOptions};

/// The size of a struct on a 64-bit machine, and the offsets of its fields.
macro_rules! layout {
    ($name:ty, $size:literal, $($field:ident: $offset:literal),+) => {
        const _: () = assert!(size_of::<usize>() != 8 || (size_of::<$name>() == $size $(&& offset_of!($name, $field) == $offset)+));
    };
}

layout!(NVFP4_QuantizeOptions, 40, struct_size: 0, levels: 4, recipe: 8, rounding: 12, nonfinite: 16, scale_layout: 20, seed: 24, call: 32);
layout!(NVFP4_WeightOptions, 48, struct_size: 0, compute_path: 4, device_type: 8, device_index: 12, scale_layout: 16, dense_dtype: 20,
    exclude_cpu_kernels: 24, reserved: 28, backend: 32, backend_length: 40);
layout!(NVFP4_NamedTensor, 32, name: 0, name_length: 8, dtype: 16, rank: 20, sizes: 24);
layout!(NVFP4_SchemaResult, 56, struct_size: 0, format: 4, tensors: 8, weights: 16, problems: 24, out_features: 32, in_features: 40,
    block: 48);
layout!(NVFP4_CallOptions, 40, struct_size: 0, reserved: 4, cancel: 8, cancel_flag: 16, progress: 24, user: 32);
layout!(NVFP4_LoadOptions, 80, struct_size: 0, device_type: 4, device_index: 8, threads: 12, activations: 16, sampling_only: 20, call: 24,
    kv_bytes: 32, prefix_cache: 40, deterministic: 44, prefix_bytes: 48, pool: 56, mlock: 64, packed: 68, tuning: 72, prompt_tokens: 76);
layout!(NVFP4_PlanOptions, 32, struct_size: 0, kv_type: 4, sequences: 8, context: 16, budget_bytes: 24);
layout!(NVFP4_Plan, 168, struct_size: 0, device_type: 4, device_index: 8, reserved: 12, context: 16, weight_bytes: 24,
    weight_host_bytes: 32, peak_load_bytes: 40, peak_load_host_bytes: 48, step_workspace_bytes: 56, workspace_bytes: 64,
    workspace_host_bytes: 72, graph_bytes_bound: 80, kv_bytes_per_token: 88, kv_block_bytes: 96, kv_block_positions: 104,
    state_bytes: 112, kv_bytes_per_sequence: 120, state_bytes_per_sequence: 128, kv_bytes: 136, free_bytes: 144,
    sequences_that_fit: 152, mapped_bytes: 160);
layout!(NVFP4_ModelStatistics, 144, struct_size: 0, reserved: 4, passes: 8, requests: 16, prompt_tokens: 24, prompt_tokens_found: 32,
    step_tokens: 40, generating: 48, waiting: 56, blocks_used: 64, used_bytes: 72, blocks_cached: 80, cached_bytes: 88,
    blocks_evicted: 96, reserved_bytes: 104, free_bytes: 112, preemptions: 120, recomputed_tokens: 128,
    evicted_tokens: 136);
layout!(NVFP4_ConvertOptions, 48, struct_size: 0, container: 4, replace: 8, keep_head: 12, call: 16, tables: 24, reserved: 28,
    calibrate: 32, packed: 40, reserved2: 44);
layout!(NVFP4_CalibrateOptions, 64, struct_size: 0, device_type: 4, device_index: 8, windows: 12, window: 16, files: 24,
    file_lengths: 32, file_count: 40, budget: 48, distill_steps: 56);
layout!(NVFP4_Message, 32, role: 0, role_length: 8, content: 16, content_length: 24);
layout!(NVFP4_ModelFile, 56, name: 0, name_length: 8, data: 16, size: 24, read: 32, release: 40, user: 48);
layout!(NVFP4_SpecialToken, 24, token: 0, roles: 4, name: 8, name_length: 16);
layout!(NVFP4_SessionOptions, 64, struct_size: 0, kv_type: 4, eviction: 8, is_private: 12, context: 16, keep: 24, system: 32,
    system_length: 40, drop: 48, adapter: 56);
layout!(NVFP4_GenerateOptions, 296, struct_size: 0, temperature: 4, top_k: 8, top_p: 12, min_p: 16, repetition_penalty: 20,
    ignore_model_stops: 24, replay: 28, log_probabilities: 32, drafts: 36, max_tokens: 40, seed: 48, stop_tokens: 56,
    stop_token_count: 64, stop_strings: 72, stop_string_lengths: 80, stop_string_count: 88, call: 96,
    grammar: 104, tool_calls: 112, top_log_probabilities: 116, presence_penalty: 120, frequency_penalty: 124, logit_bias_tokens: 128,
    logit_biases: 136, logit_bias_count: 144, bad_words: 152, bad_word_lengths: 160, bad_word_count: 168,
    prompt_lookup: 176, logits_processor: 184, logits_user: 192,
    draft_model: 200, repetition_window: 208, min_tokens: 216, no_repeat_ngram_size: 224, dry_multiplier: 232, dry_base: 236,
    dry_allowed_length: 240, dry_window: 248, dry_sequence_breakers: 256, dry_sequence_breaker_lengths: 264,
    dry_sequence_breaker_count: 272, top_n_sigma: 280, typical_p: 284, xtc_probability: 288, xtc_threshold: 292);
layout!(NVFP4_GrammarOptions, 8, struct_size: 0, kind: 4);
layout!(NVFP4_TokenEvent, 64, struct_size: 0, kind: 4, token: 8, index: 12, text: 16, text_length: 24, log_probability: 32, part: 36,
    top_tokens: 40, top_log_probabilities: 48, top_count: 56);
layout!(NVFP4_LogitsEvent, 40, struct_size: 0, index: 4, logits: 8, logit_count: 16, tokens: 24, token_count: 32);
layout!(NVFP4_GenerationResult, 120, struct_size: 0, finish: 4, prompt_tokens: 8, generated_tokens: 16, prefill_seconds: 24,
    first_token_seconds: 32, decode_seconds: 40, seed: 48, tool_calls: 56, evicted_tokens: 64, queue_seconds: 72, longest_gap_seconds: 80,
    cached_tokens: 88, drafted_tokens: 96, accepted_tokens: 104, preemptions: 112);
layout!(NVFP4_QueueOptions, 24, struct_size: 0, running: 4, submissions: 8, events: 16);
layout!(NVFP4_SubmitOptions, 24, struct_size: 0, priority: 4, deadline: 8, user: 16);
layout!(NVFP4_QueueEvent, 80, generation: 0, user: 8, text: 16, text_length: 24, kind: 32, token: 36, part: 40, log_probability: 44,
    finish: 48, status: 52, top_tokens: 56, top_log_probabilities: 64, top_count: 72);
layout!(NVFP4_EmbedOptions, 72, struct_size: 0, pooling: 4, normalize: 8, truncate: 12, kv_type: 16, is_private: 20, dimensions: 24,
    prompt: 32, prompt_length: 40, prompt_name: 48, prompt_name_length: 56, call: 64);
layout!(NVFP4_TrainerOptions, 208, struct_size: 0, device_type: 4, device_index: 8, threads: 12, schedule: 16, clip: 20, weights: 24,
    first_moments: 28, second_moments: 32, release: 36, recompute: 40, last_blocks: 44, steps: 48, warmup: 56, seed: 64, rate: 72,
    floor: 80, decay_share: 88, weight_decay: 96, beta1: 104, beta2: 112, eps: 120, clip_norm: 128, delivered_share: 136,
    config: 144, config_length: 152, tables: 160, weight_scales: 164, teacher: 168, teacher_length: 176,
    teacher_temperature: 184, label_share: 192, teacher_memory: 200, reserved: 204);
layout!(NVFP4_DataOptions, 48, struct_size: 0, format: 4, long_rows: 8, empty_think: 12, train_on_all: 16, skip_bad_rows: 20, window: 24,
    separator: 32, separator_length: 40);
layout!(NVFP4_MicroBatch, 48, tokens: 0, labels: 8, token_count: 16, document_lengths: 24, document_count: 32, weights: 40);
layout!(NVFP4_StepReport, 64, struct_size: 0, outcome: 4, step: 8, targets: 16, loss: 24, rate: 32, gradient_norm: 40, changed: 48,
    changed_delivered: 56);
layout!(NVFP4_OptimizerOptions, 24, struct_size: 0, weights: 4, first_moments: 8, second_moments: 12, fresh_scales: 16, reserved: 20);
layout!(NVFP4_StepOptions, 64, struct_size: 0, gradient_scale: 4, rate: 8, beta1: 16, beta2: 24, eps: 32, weight_decay: 40, seed: 48,
    tensor: 56);
layout!(NVFP4_ChatOptions, 64, struct_size: 0, keep_reasoning: 4, reasoning_budget: 8, variables: 16, variables_length: 24, tools: 32,
    tools_length: 40, chat_template: 48, chat_template_length: 56);

#[cfg(test)]
mod tests {
    use super::super::arguments::{Element, Growing, elements, fill, options, results};
    use super::*;

    /// A later version of a struct, for which the current one is the earlier shape: one more field at its end, with a nonzero default.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Later<T> {
        known: T,
        added: u64,
    }
    // SAFETY: T is what the trait asks for, and a u64 follows it without padding, which `memory` asserts.
    unsafe impl<T: Growing> Growing for Later<T> {
        const NAME: &'static str = T::NAME;
        const EARLIER: &'static [usize] = &[size_of::<T>()];
        fn defaults() -> Self {
            Later {
                known: T::defaults(),
                added: 7,
            }
        }
    }
    // SAFETY: as above.
    unsafe impl<T: Element> Element for Later<T> {
        const NAME: &'static str = T::NAME;
        const EARLIER: &'static [usize] = &[size_of::<T>()];
        fn defaults() -> Self {
            Later {
                known: T::defaults(),
                added: 7,
            }
        }
    }

    fn bytes<T: Copy>(values: &[T]) -> &[u8] {
        // SAFETY: neither the structs nor integers have padding, so all of their bytes are there.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// A host's memory with two structs of today's shape. Every byte is 0x5a, except for the size at the beginning of the first.
    fn memory<T>(struct_size: Option<u32>) -> Vec<u64> {
        assert_eq!(size_of::<Later<T>>(), size_of::<T>() + 8);
        let mut memory = vec![0x5a5a_5a5a_5a5a_5a5a; size_of::<T>() / 4];
        if let Some(size) = struct_size {
            // SAFETY: a u64 has room for a u32.
            unsafe { memory.as_mut_ptr().cast::<u32>().write(size) };
        }
        memory
    }

    /// Options or results: everything in the host's struct is read and written, and nothing after it.
    fn grows<T: Growing>() {
        let size = size_of::<T>();
        let host = memory::<T>(Some(size as u32));
        // SAFETY: as many bytes are there as the size at the beginning says.
        let read = unsafe { options::<Later<T>>(host.as_ptr().cast()) }.unwrap();
        assert_eq!(bytes(&[read.known]), &bytes(&host)[..size], "{}", T::NAME);
        assert_eq!(read.added, 7, "{}", T::NAME);

        let defaults = <Later<T> as Growing>::defaults();
        for result in [false, true] {
            let mut written = host.clone();
            let place = written.as_mut_ptr().cast::<Later<T>>();
            // SAFETY: as above, and nobody else uses the memory.
            unsafe {
                match result {
                    false => fill(place, size as u32, defaults).unwrap(),
                    true => results(place).unwrap().unwrap()(defaults),
                }
            }
            let (written, known) = (bytes(&written), [defaults.known]);
            assert_eq!(written[..4], (size as u32).to_ne_bytes(), "{}", T::NAME);
            assert_eq!(written[4..size], bytes(&known)[4..], "{}", T::NAME);
            assert_eq!(written[size..], bytes(&host)[size..], "{}", T::NAME);
        }
    }

    /// Two elements of an array.
    fn grows_in_arrays<T: Element>() {
        let size = size_of::<T>();
        let host = memory::<T>(None);
        // SAFETY: two elements of that size are there.
        let read = unsafe { elements::<Later<T>>("items", host.as_ptr().cast(), 2, size) }.unwrap();
        for (i, item) in read.iter().enumerate() {
            let there = &bytes(&host)[i * size..][..size];
            assert_eq!(bytes(&[item.known]), there, "{}", T::NAME);
            assert_eq!(item.added, 7, "{}", T::NAME);
        }
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn a_later_library_takes_the_structs_of_today() {
        grows::<NVFP4_CallOptions>();
        grows::<NVFP4_ChatOptions>();
        grows::<NVFP4_ConvertOptions>();
        grows::<NVFP4_CalibrateOptions>();
        grows::<NVFP4_DataOptions>();
        grows::<NVFP4_GenerateOptions>();
        grows::<NVFP4_GrammarOptions>();
        grows::<NVFP4_GenerationResult>();
        grows::<NVFP4_LoadOptions>();
        grows::<NVFP4_ModelStatistics>();
        grows::<NVFP4_OptimizerOptions>();
        grows::<NVFP4_Plan>();
        grows::<NVFP4_PlanOptions>();
        grows::<NVFP4_QuantizeOptions>();
        grows::<NVFP4_SchemaResult>();
        grows::<NVFP4_SessionOptions>();
        grows::<NVFP4_StepOptions>();
        grows::<NVFP4_StepReport>();
        grows::<NVFP4_TrainerOptions>();
        grows::<NVFP4_WeightOptions>();
        grows_in_arrays::<NVFP4_Message>();
        grows_in_arrays::<NVFP4_MicroBatch>();
        grows_in_arrays::<NVFP4_NamedTensor>();
        grows_in_arrays::<NVFP4_SpecialToken>();
    }
}
