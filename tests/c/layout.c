/* Sizes and offsets of the structs in the header, as a host in another language has to mirror them. The same numbers stand in
 * src/abi/layout.rs; changing one of them breaks hosts. */
#include "check.h"
#include <stddef.h>

#define SIZE(type, bytes) CHECK(sizeof(type) == (bytes))
#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

int main(void)
{
    SIZE(NVFP4_Status, 4);
    SIZE(size_t, 8);

    SIZE(NVFP4_QuantizeOptions, 40);
    AT(NVFP4_QuantizeOptions, struct_size, 0);
    AT(NVFP4_QuantizeOptions, levels, 4);
    AT(NVFP4_QuantizeOptions, recipe, 8);
    AT(NVFP4_QuantizeOptions, rounding, 12);
    AT(NVFP4_QuantizeOptions, nonfinite, 16);
    AT(NVFP4_QuantizeOptions, scale_layout, 20);
    AT(NVFP4_QuantizeOptions, seed, 24);
    AT(NVFP4_QuantizeOptions, call, 32);

    SIZE(NVFP4_WeightOptions, 48);
    AT(NVFP4_WeightOptions, struct_size, 0);
    AT(NVFP4_WeightOptions, compute_path, 4);
    AT(NVFP4_WeightOptions, device_type, 8);
    AT(NVFP4_WeightOptions, device_index, 12);
    AT(NVFP4_WeightOptions, scale_layout, 16);
    AT(NVFP4_WeightOptions, dense_dtype, 20);
    AT(NVFP4_WeightOptions, exclude_cpu_kernels, 24);
    AT(NVFP4_WeightOptions, reserved, 28);
    AT(NVFP4_WeightOptions, backend, 32);
    AT(NVFP4_WeightOptions, backend_length, 40);

    SIZE(NVFP4_NamedTensor, 32);
    AT(NVFP4_NamedTensor, name, 0);
    AT(NVFP4_NamedTensor, name_length, 8);
    AT(NVFP4_NamedTensor, dtype, 16);
    AT(NVFP4_NamedTensor, rank, 20);
    AT(NVFP4_NamedTensor, sizes, 24);

    SIZE(NVFP4_SchemaResult, 56);
    AT(NVFP4_SchemaResult, struct_size, 0);
    AT(NVFP4_SchemaResult, format, 4);
    AT(NVFP4_SchemaResult, tensors, 8);
    AT(NVFP4_SchemaResult, weights, 16);
    AT(NVFP4_SchemaResult, problems, 24);
    AT(NVFP4_SchemaResult, out_features, 32);
    AT(NVFP4_SchemaResult, in_features, 40);
    AT(NVFP4_SchemaResult, block, 48);

    SIZE(NVFP4_CallOptions, 40);
    AT(NVFP4_CallOptions, struct_size, 0);
    AT(NVFP4_CallOptions, reserved, 4);
    AT(NVFP4_CallOptions, cancel, 8);
    AT(NVFP4_CallOptions, cancel_flag, 16);
    AT(NVFP4_CallOptions, progress, 24);
    AT(NVFP4_CallOptions, user, 32);

    SIZE(NVFP4_TokenEvent, 40);
    AT(NVFP4_TokenEvent, struct_size, 0);
    AT(NVFP4_TokenEvent, kind, 4);
    AT(NVFP4_TokenEvent, token, 8);
    AT(NVFP4_TokenEvent, index, 12);
    AT(NVFP4_TokenEvent, text, 16);
    AT(NVFP4_TokenEvent, text_length, 24);
    AT(NVFP4_TokenEvent, log_probability, 32);
    AT(NVFP4_TokenEvent, part, 36);

    SIZE(NVFP4_LoadOptions, 32);
    AT(NVFP4_LoadOptions, call, 24);
    AT(NVFP4_LoadOptions, struct_size, 0);
    AT(NVFP4_LoadOptions, device_type, 4);
    AT(NVFP4_LoadOptions, device_index, 8);
    AT(NVFP4_LoadOptions, threads, 12);
    AT(NVFP4_LoadOptions, activations, 16);
    AT(NVFP4_LoadOptions, sampling_only, 20);

    SIZE(NVFP4_ConvertOptions, 40);
    AT(NVFP4_ConvertOptions, call, 16);
    AT(NVFP4_ConvertOptions, struct_size, 0);
    AT(NVFP4_ConvertOptions, container, 4);
    AT(NVFP4_ConvertOptions, replace, 8);
    AT(NVFP4_ConvertOptions, keep_head, 12);
    AT(NVFP4_ConvertOptions, tables, 24);
    AT(NVFP4_ConvertOptions, reserved, 28);
    AT(NVFP4_ConvertOptions, calibrate, 32);
    SIZE(NVFP4_CalibrateOptions, 64);
    AT(NVFP4_CalibrateOptions, struct_size, 0);
    AT(NVFP4_CalibrateOptions, device_type, 4);
    AT(NVFP4_CalibrateOptions, device_index, 8);
    AT(NVFP4_CalibrateOptions, windows, 12);
    AT(NVFP4_CalibrateOptions, window, 16);
    AT(NVFP4_CalibrateOptions, files, 24);
    AT(NVFP4_CalibrateOptions, file_lengths, 32);
    AT(NVFP4_CalibrateOptions, file_count, 40);
    AT(NVFP4_CalibrateOptions, budget, 48);
    AT(NVFP4_CalibrateOptions, distill_steps, 56);

    SIZE(NVFP4_Message, 32);
    AT(NVFP4_Message, role, 0);
    AT(NVFP4_Message, role_length, 8);
    AT(NVFP4_Message, content, 16);
    AT(NVFP4_Message, content_length, 24);

    SIZE(NVFP4_SessionOptions, 48);
    AT(NVFP4_SessionOptions, struct_size, 0);
    AT(NVFP4_SessionOptions, kv_type, 4);
    AT(NVFP4_SessionOptions, eviction, 8);
    AT(NVFP4_SessionOptions, reserved, 12);
    AT(NVFP4_SessionOptions, context, 16);
    AT(NVFP4_SessionOptions, keep, 24);
    AT(NVFP4_SessionOptions, system, 32);
    AT(NVFP4_SessionOptions, system_length, 40);

    SIZE(NVFP4_GenerateOptions, 104);
    AT(NVFP4_GenerateOptions, log_probabilities, 32);
    AT(NVFP4_GenerateOptions, reserved, 36);
    AT(NVFP4_GenerateOptions, call, 96);
    AT(NVFP4_GenerateOptions, struct_size, 0);
    AT(NVFP4_GenerateOptions, temperature, 4);
    AT(NVFP4_GenerateOptions, top_k, 8);
    AT(NVFP4_GenerateOptions, top_p, 12);
    AT(NVFP4_GenerateOptions, min_p, 16);
    AT(NVFP4_GenerateOptions, repetition_penalty, 20);
    AT(NVFP4_GenerateOptions, ignore_model_stops, 24);
    AT(NVFP4_GenerateOptions, replay, 28);
    AT(NVFP4_GenerateOptions, max_tokens, 40);
    AT(NVFP4_GenerateOptions, seed, 48);
    AT(NVFP4_GenerateOptions, stop_tokens, 56);
    AT(NVFP4_GenerateOptions, stop_token_count, 64);
    AT(NVFP4_GenerateOptions, stop_strings, 72);
    AT(NVFP4_GenerateOptions, stop_string_lengths, 80);
    AT(NVFP4_GenerateOptions, stop_string_count, 88);

    SIZE(NVFP4_GenerationResult, 64);
    AT(NVFP4_GenerationResult, struct_size, 0);
    AT(NVFP4_GenerationResult, finish, 4);
    AT(NVFP4_GenerationResult, prompt_tokens, 8);
    AT(NVFP4_GenerationResult, generated_tokens, 16);
    AT(NVFP4_GenerationResult, prefill_seconds, 24);
    AT(NVFP4_GenerationResult, first_token_seconds, 32);
    AT(NVFP4_GenerationResult, decode_seconds, 40);
    AT(NVFP4_GenerationResult, seed, 48);
    AT(NVFP4_GenerationResult, tool_calls, 56);

    SIZE(NVFP4_ChatOptions, 48);
    AT(NVFP4_ChatOptions, struct_size, 0);
    AT(NVFP4_ChatOptions, keep_reasoning, 4);
    AT(NVFP4_ChatOptions, reasoning_budget, 8);
    AT(NVFP4_ChatOptions, variables, 16);
    AT(NVFP4_ChatOptions, variables_length, 24);
    AT(NVFP4_ChatOptions, tools, 32);
    AT(NVFP4_ChatOptions, tools_length, 40);

    SIZE(NVFP4_TrainerOptions, 208);
    AT(NVFP4_TrainerOptions, struct_size, 0);
    AT(NVFP4_TrainerOptions, device_type, 4);
    AT(NVFP4_TrainerOptions, device_index, 8);
    AT(NVFP4_TrainerOptions, threads, 12);
    AT(NVFP4_TrainerOptions, schedule, 16);
    AT(NVFP4_TrainerOptions, clip, 20);
    AT(NVFP4_TrainerOptions, weights, 24);
    AT(NVFP4_TrainerOptions, first_moments, 28);
    AT(NVFP4_TrainerOptions, second_moments, 32);
    AT(NVFP4_TrainerOptions, release, 36);
    AT(NVFP4_TrainerOptions, recompute, 40);
    AT(NVFP4_TrainerOptions, last_blocks, 44);
    AT(NVFP4_TrainerOptions, steps, 48);
    AT(NVFP4_TrainerOptions, warmup, 56);
    AT(NVFP4_TrainerOptions, seed, 64);
    AT(NVFP4_TrainerOptions, rate, 72);
    AT(NVFP4_TrainerOptions, floor, 80);
    AT(NVFP4_TrainerOptions, decay_share, 88);
    AT(NVFP4_TrainerOptions, weight_decay, 96);
    AT(NVFP4_TrainerOptions, beta1, 104);
    AT(NVFP4_TrainerOptions, beta2, 112);
    AT(NVFP4_TrainerOptions, eps, 120);
    AT(NVFP4_TrainerOptions, clip_norm, 128);
    AT(NVFP4_TrainerOptions, delivered_share, 136);
    AT(NVFP4_TrainerOptions, config, 144);
    AT(NVFP4_TrainerOptions, config_length, 152);
    AT(NVFP4_TrainerOptions, tables, 160);
    AT(NVFP4_TrainerOptions, weight_scales, 164);
    AT(NVFP4_TrainerOptions, teacher, 168);
    AT(NVFP4_TrainerOptions, teacher_length, 176);
    AT(NVFP4_TrainerOptions, teacher_temperature, 184);
    AT(NVFP4_TrainerOptions, label_share, 192);
    AT(NVFP4_TrainerOptions, teacher_memory, 200);
    AT(NVFP4_TrainerOptions, reserved, 204);

    SIZE(NVFP4_DataOptions, 48);
    AT(NVFP4_DataOptions, struct_size, 0);
    AT(NVFP4_DataOptions, format, 4);
    AT(NVFP4_DataOptions, long_rows, 8);
    AT(NVFP4_DataOptions, empty_think, 12);
    AT(NVFP4_DataOptions, train_on_all, 16);
    AT(NVFP4_DataOptions, skip_bad_rows, 20);
    AT(NVFP4_DataOptions, window, 24);
    AT(NVFP4_DataOptions, separator, 32);
    AT(NVFP4_DataOptions, separator_length, 40);
    SIZE(NVFP4_MicroBatch, 48);
    AT(NVFP4_MicroBatch, tokens, 0);
    AT(NVFP4_MicroBatch, labels, 8);
    AT(NVFP4_MicroBatch, token_count, 16);
    AT(NVFP4_MicroBatch, document_lengths, 24);
    AT(NVFP4_MicroBatch, document_count, 32);
    AT(NVFP4_MicroBatch, weights, 40);

    SIZE(NVFP4_StepReport, 64);
    AT(NVFP4_StepReport, struct_size, 0);
    AT(NVFP4_StepReport, outcome, 4);
    AT(NVFP4_StepReport, step, 8);
    AT(NVFP4_StepReport, targets, 16);
    AT(NVFP4_StepReport, loss, 24);
    AT(NVFP4_StepReport, rate, 32);
    AT(NVFP4_StepReport, gradient_norm, 40);
    AT(NVFP4_StepReport, changed, 48);
    AT(NVFP4_StepReport, changed_delivered, 56);

    SIZE(NVFP4_OptimizerOptions, 24);
    AT(NVFP4_OptimizerOptions, struct_size, 0);
    AT(NVFP4_OptimizerOptions, weights, 4);
    AT(NVFP4_OptimizerOptions, first_moments, 8);
    AT(NVFP4_OptimizerOptions, second_moments, 12);
    AT(NVFP4_OptimizerOptions, fresh_scales, 16);
    AT(NVFP4_OptimizerOptions, reserved, 20);

    SIZE(NVFP4_StepOptions, 64);
    AT(NVFP4_StepOptions, struct_size, 0);
    AT(NVFP4_StepOptions, gradient_scale, 4);
    AT(NVFP4_StepOptions, rate, 8);
    AT(NVFP4_StepOptions, beta1, 16);
    AT(NVFP4_StepOptions, beta2, 24);
    AT(NVFP4_StepOptions, eps, 32);
    AT(NVFP4_StepOptions, weight_decay, 40);
    AT(NVFP4_StepOptions, seed, 48);
    AT(NVFP4_StepOptions, tensor, 56);

    return report("layout");
}
