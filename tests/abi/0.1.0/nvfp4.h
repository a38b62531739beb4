/*
 * libNVFP4: 4-bit floating point with block scales (NVFP4) for any host language. Quantize, multiply, and run Qwen3-class
 * language models whose weights stay in 4 bits.
 *
 *     NVFP4_Model *model = NULL;
 *     NVFP4_Session *session = NULL;
 *     if (NVFP4_model_load(path, strlen(path), NULL, NULL, &model) ||
 *         NVFP4_session_create(model, NULL, &session) ||
 *         NVFP4_session_chat(session, question, strlen(question), NULL, NULL, print_piece, NULL, NULL))
 *         fprintf(stderr, "%s\n", NVFP4_last_error());
 *
 * This file is the authority on the C interface: what is not in it is not part of it. It is generated from the library's
 * source; change it there. These are all the rules; OUT OF MEMORY, ASYNCHRONOUS ERRORS and REPRODUCIBILITY follow in detail
 * below.
 *
 * OWNERSHIP. Handles are reference-counted. A function that creates one gives the caller a reference, _retain adds one, and
 * _release gives one up (and accepts NULL). A handle keeps what it needs alive - a session its model, a view its memory - so
 * handles may be released in any order. A handle that is NULL, released, of another type or of another copy of the library gives
 * NVFP4_INVALID_HANDLE. The value of a released handle is never used again.
 *
 * ERRORS. A function that can fail returns an NVFP4_Status: NVFP4_OK (0) or a positive number. NVFP4_last_error() then gives a
 * message of one line for people, kept for each thread; NVFP4_take_error() turns it into an object that any thread may read.
 * Results go through pointers at the end of the parameters, and are untouched on failure unless the function says otherwise.
 *
 * THREADS. Any thread may call any function. A call needs 96 KiB of stack, besides the caller's own frames and callbacks. Calls on
 * one handle may overlap where the parameter is const. Where it is not const, a call has exclusive use of the handle, and an
 * overlapping call fails with NVFP4_BUSY.
 *
 * CALLBACKS take the host's user data (void *user) first and return an int32_t: 0 to go on, anything else to cancel. They run on
 * the thread that made the call, and never after it returns (log callbacks and files of models excepted). They must return: one that throws,
 * calls longjmp() or ends its thread by pthread_exit() ends the process. They may call the library, but not with a handle that is in
 * use.
 *
 * CANCELLING. Long calls take NVFP4_CallOptions: a cancel handle or a flag that any thread may set, even before the call begins.
 * pthread_cancel() of a thread in a call takes effect after the call, at the next cancellation point. The beginning of a call is
 * one, unless it releases something. The thread cannot be cancelled within a call, nor in callbacks, which must leave that so. A
 * thread whose cancel type is PTHREAD_CANCEL_ASYNCHRONOUS must not call.
 *
 * SIGNALS. The library handles none, raises none, and blocks all in its own threads; a signal interrupts no call. A signal handler
 * may call NVFP4_cancel_trigger() and NVFP4_cancel_reset(), and nothing else.
 *
 * FORK. A child process has its parent's models, sessions and tensors in host memory, and can use them. A session that was in use
 * by a thread of the parent at the fork gives NVFP4_BUSY in the child for ever, but can be released, and so does a queue. CUDA does
 * not work in the child of a process that has used it: everything on a GPU gives NVFP4_DEVICE_UNAVAILABLE there.
 *
 * UNLOADING. There is no init and no shutdown. Once loaded, the library stays in the process, even after dlclose(). A plugin that
 * is unloaded itself must first remove its log callbacks, and release the tensors over its own memory and the models of its files. A process may end at any
 * time. Constructors of shared libraries may call the library, and may wait for threads that do. Those threads must not ask for a
 * GPU or load a model there: that opens other libraries, for which the system first waits for the end of the constructor.
 *
 * VERSIONS. NVFP4_ABI_VERSION changes only when a program built with an older header would break. NVFP4_check_version() says
 * whether a library is compatible with a program, and what to install if not. On Linux the soname is libNVFP4.so.0, after
 * NVFP4_VERSION_MAJOR; libNVFP4.so is a link to it, for compilers and for hosts that load it by that name.
 *
 * TEXT is UTF-8. In: a pointer and a length in bytes; no NUL is needed. Out: the caller's buffer and its capacity. The length in
 * bytes is always written. The text is copied if it fits, followed by a NUL if that fits too; otherwise the result is
 * NVFP4_BUFFER_TOO_SMALL. A NULL buffer with capacity 0 asks for the length alone. ARRAYS OUT work the same, in elements. PATHS are
 * bytes, as the system has them, and need not be UTF-8; messages show what is not as U+FFFD.
 *
 * STRUCTS start with struct_size, the sizeof the struct as the caller was compiled; for elements of arrays it is a parameter.
 * Options have an _init function that sets struct_size and the defaults, and NULL stands for the defaults. In results the caller
 * sets struct_size. Later versions add fields at the end. A field that an older caller does not know has its default; a field that a
 * newer caller uses and the library does not know gives NVFP4_ABI_MISMATCH, as does a size that no version had. Flags are
 * int32_t, 0 or 1.
 */

/*
 * OUT OF MEMORY. Nothing but values crosses this interface: no exception, no panic, no signal, no exit, and no line on standard
 * error. Where the system refuses memory or threads, calls fail with NVFP4_OUT_OF_MEMORY, change nothing, and work again once
 * there is memory. _release always works. For this the library reserves 8 MiB of address space from the first call on, which
 * takes memory only when it is used. Calls that run third-party code which allocates reserve more while they run: 512 bytes for
 * each byte of text to be tokenized, 32 for each byte of a tokenizer.json, 16 for each byte of a message to be rendered. A call
 * that cannot have its reserve fails before it begins. Not covered are: a chat template, which is a program, that makes more of
 * its messages than that; the driver of a GPU; the C library where it ends the process itself, for which 1 MiB is kept; a system
 * that grants memory it does not have, and ends processes when they use it; and the stack of a process's first thread, if its
 * 96 KiB have not been touched before the process runs out of address space.
 *
 * ASYNCHRONOUS ERRORS. A call on tensors of a CUDA device checks its arguments, enqueues its work and returns; it waits for the
 * device only where this file says so. Two errors are found only when the work runs: values to be quantized that are not finite,
 * and block scales to be multiplied that are NaN or negative. They fail a later call on tensors of that device, on any thread,
 * with NVFP4_INVALID_ARGUMENT: the next one that waits for the device, or one before it if the device has got that far. The message
 * names the function that was given the tensor, its number among the calls that the device has checked, and the first wrong
 * element. The results of the faulty call, and everything computed from them, are undefined; the call that reports the error has
 * failed like any other. Each error is reported once; of several at once the message gives the first in full, and how many
 * there were. NVFP4_device_synchronize() waits for them. On the CPU a call has done its work, and reported its errors, when it
 * returns.
 *
 * REPRODUCIBILITY. On the CPU, a token's logits have the same bits whether it is run alone, in a batch with others, or in a prompt
 * divided in any way, on any number of threads and with any instruction set. On a GPU the same calls in the same order on the same
 * kind of GPU give the same bits. A prompt, a decode step, and a step with another number of sessions sum in different orders
 * there, so their logits differ by rounding; where two tokens are nearly equally probable, so may the choice. Calls of several
 * threads on one model run in the same passes, which are such steps. From the same logits every device chooses the same token.
 */

#ifndef NVFP4_H
#define NVFP4_H


#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define NVFP4_API __attribute__((visibility("default")))
#else
#define NVFP4_API
#endif

/* Defined in dlpack.h, which only hosts that use DLPack need. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

#ifdef __cplusplus
extern "C" {
#endif

/** Success. */
#define NVFP4_OK 0

/** An argument is outside what the function accepts: NULL, wrong shape, wrong dtype, out of range. */
#define NVFP4_INVALID_ARGUMENT 1

/** The request is well formed, but this build, device, format or architecture cannot do it. */
#define NVFP4_UNSUPPORTED 2

/** The system refused memory. */
#define NVFP4_OUT_OF_MEMORY 3

/** The allocation would exceed the budget of NVFP4_memory_set_budget(). */
#define NVFP4_OVER_BUDGET 4

/** Reading or writing a file failed. */
#define NVFP4_IO 5

/** A file's content contradicts itself or its format. */
#define NVFP4_CORRUPT_FILE 6

/** A named thing (file, tensor, key) is not there. */
#define NVFP4_NOT_FOUND 7

/** The tokens would not fit in the context. */
#define NVFP4_CONTEXT_FULL 8

/** The handle is in use by another call. */
#define NVFP4_BUSY 9

/** A callback, a cancel handle or a cancel flag ended the call. */
#define NVFP4_CANCELLED 10

/** The caller's buffer is too small; the required length was written. */
#define NVFP4_BUFFER_TOO_SMALL 11

/** A handle is NULL, stale, foreign or of another type. */
#define NVFP4_INVALID_HANDLE 12

/** A struct_size or version does not fit this library. */
#define NVFP4_ABI_MISMATCH 13

/** No such device, or its driver is missing. */
#define NVFP4_DEVICE_UNAVAILABLE 14

/** A bug in this library; the message is that of its panic. A handle that was in exclusive use can only be released. */
#define NVFP4_INTERNAL 15

/** Version of the library this header belongs to. */
#define NVFP4_VERSION_MAJOR 0

/** See #NVFP4_VERSION_MAJOR. */
#define NVFP4_VERSION_MINOR 1

/** See #NVFP4_VERSION_MAJOR. */
#define NVFP4_VERSION_PATCH 0

/** The three as one number that grows with each version: major * 10000 + minor * 100 + patch. */
#define NVFP4_VERSION_NUMBER 100

/**
 * Version of the binary interface (ABI) that this header describes. A program built with one number runs with any library
 * that reports the same number.
 */
#define NVFP4_ABI_VERSION 1

/** Log errors inside the library. */
#define NVFP4_LOG_ERROR 1

/** Log warnings, and more severe messages. */
#define NVFP4_LOG_WARN 2

/** Log milestones, and more severe messages. */
#define NVFP4_LOG_INFO 3

/** Log details, every error returned among them, and more severe messages. */
#define NVFP4_LOG_DEBUG 4

/** Log everything. */
#define NVFP4_LOG_TRACE 5

/** All tags together, but for #NVFP4_MEMORY_MAPPED. The peak is that of the sum. */
#define NVFP4_MEMORY_TOTAL 0

/** Weights in the form that kernels read. */
#define NVFP4_MEMORY_WEIGHTS 1

/** Cached keys and values of sessions. */
#define NVFP4_MEMORY_KV_CACHE 2

/** Activations and workspaces. */
#define NVFP4_MEMORY_SCRATCH 3

/** Tensors made through the tensor chapter or as results. */
#define NVFP4_MEMORY_TENSOR 4

/** Weights on GPUs. All NVFP4_MEMORY_DEVICE_* count GPU memory, and the others host memory. */
#define NVFP4_MEMORY_DEVICE_WEIGHTS 5

/** Cached keys and values of sessions on GPUs. */
#define NVFP4_MEMORY_DEVICE_KV_CACHE 6

/** Activations and workspaces on GPUs. */
#define NVFP4_MEMORY_DEVICE_SCRATCH 7

/** Tensors on GPUs. */
#define NVFP4_MEMORY_DEVICE_TENSOR 8

/**
 * Files of packed weights that are mapped into memory: host memory that processes share, and that the system may drop and read
 * again. Not in the total, and not limited by NVFP4_memory_set_budget().
 */
#define NVFP4_MEMORY_MAPPED 9

/** No managed memory. */
#define NVFP4_MANAGED_DISABLED 0

/** Managed memory if the device supports it, other memory otherwise. */
#define NVFP4_MANAGED_PREFERRED 1

/** Managed memory, or an error. */
#define NVFP4_MANAGED_REQUIRED 2

/** Unsigned byte; also a pair of packed 4-bit codes. All NVFP4_DTYPE_* are libtorch's numbers. */
#define NVFP4_DTYPE_UINT8 0

/** Signed byte. */
#define NVFP4_DTYPE_INT8 1

/** 16-bit integer. */
#define NVFP4_DTYPE_INT16 2

/** 32-bit integer. */
#define NVFP4_DTYPE_INT32 3

/** 64-bit integer. */
#define NVFP4_DTYPE_INT64 4

/** IEEE half precision. */
#define NVFP4_DTYPE_FLOAT16 5

/** IEEE single precision. */
#define NVFP4_DTYPE_FLOAT32 6

/** IEEE double precision. */
#define NVFP4_DTYPE_FLOAT64 7

/** A byte that is 0 or 1. */
#define NVFP4_DTYPE_BOOL 11

/** bfloat16. */
#define NVFP4_DTYPE_BFLOAT16 15

/** E4M3 without infinities, the type of NVFP4 block scales. */
#define NVFP4_DTYPE_FLOAT8_E4M3FN 24

/** A pair of E2M1 codes in one byte; an element is the pair. */
#define NVFP4_DTYPE_FLOAT4_E2M1FN_X2 45

/** The host's memory. All NVFP4_DEVICE_* are libtorch's numbers. */
#define NVFP4_DEVICE_CPU 0

/** A CUDA device, numbered from 0. */
#define NVFP4_DEVICE_CUDA 1

/**
 * The library's choice of a device for a model or a weight; its index is 0 (or -1). A model gets the GPU that has room for
 * it, or else the CPU, and NVFP4_model_info() says why; a weight gets CUDA device 0 if there is one, or else the CPU.
 */
#define NVFP4_DEVICE_AUTO -1

/** Two levels of scales: a global scale for the whole tensor, and the block scales. */
#define NVFP4_LEVELS_TWO 0

/** Block scales alone; the global scale is 1. */
#define NVFP4_LEVELS_SINGLE 1

/** The single-level rule of NVFP4_quantize(). */
#define NVFP4_LEVELS_LEGACY 2

/** The largest magnitude of a block becomes 6. */
#define NVFP4_RECIPE_AMAX 0

/** The largest magnitude of a block becomes 6 or 4, whichever has the smaller squared error. */
#define NVFP4_RECIPE_FOUR_OVER_SIX 1

/** Each block takes the scale, of all E4M3 scales, with the smallest squared error. */
#define NVFP4_RECIPE_SWEEP 2

/** To the nearest code; a tie goes to the even one, as in the hardware. */
#define NVFP4_ROUNDING_NEAREST_EVEN 0

/** To the nearest code; a tie goes away from zero. */
#define NVFP4_ROUNDING_HALF_AWAY 1

/** Randomly up or down, so that the expected result is the value. The seed makes it repeatable. */
#define NVFP4_ROUNDING_STOCHASTIC 2

/** NaN and infinity are errors that name the first index. */
#define NVFP4_NONFINITE_ERROR 0

/** NaN counts as 0, and infinity as the largest value that fits. */
#define NVFP4_NONFINITE_SATURATE 1

/** Scales row-major, `[.., K / 16]`. */
#define NVFP4_SCALES_LINEAR 0

/** Scales in the 128 x 4 tiles that tensor cores read, padded with zeros, as a tensor of one dimension. */
#define NVFP4_SCALES_SWIZZLED 1

/**
 * Activations that are not quantized (W4A16 with an NVFP4 weight): on the CPU in float; on a GPU in float16, each row
 * scaled by a power of two that keeps it in range, or in bfloat16 if the weight is bfloat16.
 */
#define NVFP4_ACTIVATIONS_EXACT 0

/**
 * Activations quantized to 8 bits, with a scale for each 32 values along K (W4A8). Faster, but not exact. Ignored with
 * dense weights. On the CPU only: with an NVFP4 weight on a GPU it is #NVFP4_UNSUPPORTED.
 */
#define NVFP4_ACTIVATIONS_INT8 1

/**
 * A kernel for the weight's format if the device has one, or else the decoded weight: today the same as
 * #NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK, but a later version may choose what is faster.
 */
#define NVFP4_COMPUTE_PATH_AUTO 0

/** A kernel for the weight's format, or #NVFP4_UNSUPPORTED. */
#define NVFP4_COMPUTE_PATH_KERNEL_ONLY 1

/** A kernel for the weight's format if the device has one, or else the decoded weight. */
#define NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK 2

/** The decoded weight. */
#define NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY 3

/** No 4-bit weight. */
#define NVFP4_FORMAT_NONE 0

/** NVFP4: E2M1 codes with an E4M3 scale for each 16 values along K. */
#define NVFP4_FORMAT_NVFP4 1

/** NF4, as bitsandbytes stores it. */
#define NVFP4_FORMAT_NF4 2

/** Weights of several formats. */
#define NVFP4_FORMAT_MIXED 3

/** Cached keys and values in IEEE half precision. */
#define NVFP4_KV_FLOAT16 0

/** Cached keys and values in IEEE single precision: unrounded, in twice the memory. On the CPU alone. */
#define NVFP4_KV_FLOAT32 1

/**
 * Cached keys and values as e4m3 codes of one byte, with a scale in single precision for each token and head: about half of the memory of
 * half precision. The largest magnitude of a key or value becomes 448, and an element is off by at most a sixteenth of itself, or by a
 * 1024th of the scale where that is more. On a GPU for models without sliding windows, soft caps and sinks whose heads have 32, 64 or 128
 * elements that all rotate; creating a session of another model there returns #NVFP4_UNSUPPORTED.
 */
#define NVFP4_KV_FLOAT8 2

/**
 * The file of packed weights beside the model's own, which `nvfp4 quantize --packed` writes, if it is there. Processes that load the model on the
 * CPU share the memory of what it holds. A file that is damaged or of other weights is #NVFP4_CORRUPT_FILE. Not used on a GPU, nor for files
 * that are given in memory.
 */
#define NVFP4_PACKED_AUTO 0

/** No such file, whether it is there or not: each process packs weights into memory of its own. */
#define NVFP4_PACKED_OFF 1

/** That file, or an error. */
#define NVFP4_PACKED_REQUIRED 2

/**
 * Prompts end soon: while other sessions generate, a prompt holds them up for 20 ms at a time, or for the time of three steps if that is longer.
 * On a Hopper GPU prompts of more than 2,048 tokens run beside steps, on four fifths of the multiprocessors, in working memory of their own.
 */
#define NVFP4_TUNING_THROUGHPUT 0

/**
 * Prompts hold up other sessions as little as possible: on the CPU a pass with a part of one takes less than two steps. On a Hopper GPU prompts run
 * beside steps, on half of the multiprocessors, and take two to three times as long as alone; on others a pass has 128 rows, steps and part
 * together, and a long prompt takes up to five times as long.
 */
#define NVFP4_TUNING_LATENCY 1

/** It begins a text, as the model's files say: BOS. */
#define NVFP4_TOKEN_ROLE_BEGINS_TEXT 1

/** It ends a text: EOS. */
#define NVFP4_TOKEN_ROLE_ENDS_TEXT 2

/** NVFP4_model_tokenize() with `add_special` adds it before or after a text. */
#define NVFP4_TOKEN_ROLE_ADDED 4

/** It ends a generation, unless `ignore_model_stops` is set: a stop token of the model. */
#define NVFP4_TOKEN_ROLE_ENDS_GENERATION 8

/** It fills rows of a batch in training: padding. */
#define NVFP4_TOKEN_ROLE_PADDING 16

/** It stands for text that the vocabulary cannot spell. */
#define NVFP4_TOKEN_ROLE_UNKNOWN 32

/** It stands between two texts: SEP. */
#define NVFP4_TOKEN_ROLE_SEPARATOR 64

/** It stands for a whole text in classification: CLS. */
#define NVFP4_TOKEN_ROLE_CLASSIFICATION 128

/** It stands for a token that is to be guessed: MASK. */
#define NVFP4_TOKEN_ROLE_MASK 256

/** It begins the reasoning of an answer. */
#define NVFP4_TOKEN_ROLE_BEGINS_REASONING 512

/** It ends the reasoning of an answer. */
#define NVFP4_TOKEN_ROLE_ENDS_REASONING 1024

/** It begins a tool call, or several. */
#define NVFP4_TOKEN_ROLE_BEGINS_TOOL_CALL 2048

/** It ends a tool call, or several. */
#define NVFP4_TOKEN_ROLE_ENDS_TOOL_CALL 4096

/** It begins a turn of a conversation: the first special token that the chat template writes for a message. */
#define NVFP4_TOKEN_ROLE_BEGINS_TURN 8192

/** It ends an answer: the chat template writes it after one, or it is known by its name. */
#define NVFP4_TOKEN_ROLE_ENDS_TURN 16384

/** A directory with safetensors in ModelOpt's layout, config and tokenizer. */
#define NVFP4_CONTAINER_MODELOPT 0

/** A `.dat` file of TorchSharp with single-level scales, and config and tokenizer beside it. */
#define NVFP4_CONTAINER_DAT 1

/**
 * Embedding and head in int8 if the source has them in at most 8 bits or is calibrated, and the container supports int8; otherwise in 16
 * bits: float16 stays, anything else becomes bfloat16. NVFP4 stays NVFP4. Only for conversions.
 */
#define NVFP4_TABLES_AUTO -1

/** Embedding and head in bfloat16, which every reader of such directories supports. */
#define NVFP4_TABLES_BFLOAT16 0

/** Embedding and head in NVFP4, a little more than a quarter of the bytes. */
#define NVFP4_TABLES_NVFP4 1

/** Embedding and head in int8 with one float32 scale per row, half of the bytes; not for `.dat`. Only for conversions. */
#define NVFP4_TABLES_INT8 2

/** A JSON schema, of draft 2020-12 or an earlier one that it names. The text is one line of JSON with a space after each comma and colon. */
#define NVFP4_GRAMMAR_JSON_SCHEMA 0

/** A regular expression that the whole text fits, in the syntax of Rust's crate `regex`, without look-around. */
#define NVFP4_GRAMMAR_REGEX 1

/** A context-free grammar, in the dialect of Lark that `llguidance` reads. */
#define NVFP4_GRAMMAR_LARK 2

/** Texts of which one is generated, as a JSON array of strings. */
#define NVFP4_GRAMMAR_CHOICES 3

/** A context-free grammar in GBNF, as llama.cpp reads it. Its rule `root` is the whole text. */
#define NVFP4_GRAMMAR_GBNF 4

/** Refuse tokens that do not fit: #NVFP4_CONTEXT_FULL, or #NVFP4_FINISH_CONTEXT within a generation. */
#define NVFP4_EVICTION_ERROR 0

/**
 * Drop old tokens: the older half of those after the first `keep`, or more if that is not enough. The remaining tokens are run again. A
 * chat drops whole turns, but never anything before the first user message, nor the last question.
 */
#define NVFP4_EVICTION_DROP_OLDEST 1

/**
 * A sliding window with attention sinks: keep the first `keep` tokens and the most recent ones, and drop `drop` tokens between them at a time.
 * The remaining tokens are run again at their new positions, so that the session is one that was given these tokens alone. A generation
 * goes on past the context, without an end if `max_tokens` sets none. Refuses chats, which keep whole turns.
 */
#define NVFP4_EVICTION_SLIDING_WINDOW 2

/**
 * A new random seed for each generation, which reports it in its result. Steps of sessions use one that is chosen when the
 * session is created, and again when it is truncated.
 */
#define NVFP4_SEED_NEW 18446744073709551615ull

/** The model writes tool calls as it likes. */
#define NVFP4_TOOL_CALLS_FREE 0

/** Each tool call that the model begins is held to the schema of its tool. Refused for models whose calls are not JSON between marks. */
#define NVFP4_TOOL_CALLS_HELD 1

/** As held, and the content of the answer begins with a call. */
#define NVFP4_TOOL_CALLS_REQUIRED 2

/** Nothing has ended the text yet. */
#define NVFP4_FINISH_NONE -1

/** A stop token ended the text, or nothing can follow it in its grammar. */
#define NVFP4_FINISH_STOP 0

/** A stop string ended the text. */
#define NVFP4_FINISH_STOP_STRING 1

/** `max_tokens` tokens were generated. */
#define NVFP4_FINISH_LENGTH 2

/** The context is full. */
#define NVFP4_FINISH_CONTEXT 3

/**
 * A callback, a cancel handle or a cancel flag ended it. The tokens generated until then are kept. If there are none, the
 * session is as it was before the call.
 */
#define NVFP4_FINISH_CANCELLED 4

/** The deadline of a generation in a queue has passed. Tokens are kept as for #NVFP4_FINISH_CANCELLED. */
#define NVFP4_FINISH_DEADLINE 5

/** A token, with the text that it completes. */
#define NVFP4_EVENT_TOKEN 0

/**
 * Text without a token: more text of the token before, or text that was held back because it might have begun a stop
 * string or a marker.
 */
#define NVFP4_EVENT_TEXT 1

/** The text itself: the answer in a chat, or everything that is generated outside a chat. */
#define NVFP4_PART_CONTENT 0

/** The model's reasoning before its answer. */
#define NVFP4_PART_REASONING 1

/**
 * A complete tool call: a JSON object with `id`, `type` and `function`, which has `name` and `arguments`, a string of
 * JSON.
 */
#define NVFP4_PART_TOOL_CALL 2

/** The end of a generation in a queue, whose last event this is. */
#define NVFP4_EVENT_END 2

/** The pooling that the model's files name; without one, #NVFP4_INVALID_ARGUMENT. */
#define NVFP4_POOLING_MODEL 0

/** The hidden row of the last token. */
#define NVFP4_POOLING_LAST 1

/** The mean of the hidden rows of all tokens. */
#define NVFP4_POOLING_MEAN 2

/** The hidden row of the first token. */
#define NVFP4_POOLING_CLS 3

/** None: the hidden row of every token, which the final norm gives and the output head reads. */
#define NVFP4_POOLING_NONE 4

/** Normalized if the model's files say so; never without pooling. */
#define NVFP4_NORMALIZE_MODEL 0

/** As pooling gives them. */
#define NVFP4_NORMALIZE_NO 1

/** Divided by their Euclidean length, so that a dot product of two is the cosine of their angle. */
#define NVFP4_NORMALIZE_YES 2

/** The rate stays constant after the warm-up. */
#define NVFP4_SCHEDULE_CONSTANT 0

/** The rate falls along half a cosine. */
#define NVFP4_SCHEDULE_COSINE 1

/** The rate falls linearly. */
#define NVFP4_SCHEDULE_LINEAR 2

/** The rate stays constant, and falls linearly over the last `decay_share` of the steps. */
#define NVFP4_SCHEDULE_STABLE 3

/** Gradients are not clipped. */
#define NVFP4_CLIP_NEVER 0

/** All gradients together are clipped to the norm `clip_norm`. Not with `release`. */
#define NVFP4_CLIP_GLOBAL 1

/** All gradients are multiplied by the factor that would have clipped those of the previous step to `clip_norm`. Only with `release`. */
#define NVFP4_CLIP_PREVIOUS 2

/** The gradients of each matrix are clipped to the norm `clip_norm`. Only with `release`. */
#define NVFP4_CLIP_TENSOR 3

/** An NVFP4 code and a residual of 4 bits, rounded stochastically: 8.5 bits per weight, of which 4.5 are delivered. */
#define NVFP4_WEIGHT_FORM_RESIDUAL4 0

/** An NVFP4 code and a residual of 8 bits, rounded stochastically. */
#define NVFP4_WEIGHT_FORM_RESIDUAL8 1

/** Two E2M1 codes; the second holds the remainder of the first. */
#define NVFP4_WEIGHT_FORM_TWO_TERM 2

/** One NVFP4 code, rounded stochastically: 4.5 bits per weight. */
#define NVFP4_WEIGHT_FORM_ONE_TERM 3

/** bfloat16, rounded stochastically. */
#define NVFP4_WEIGHT_FORM_BFLOAT16 4

/** float32. */
#define NVFP4_WEIGHT_FORM_FLOAT32 5

/** First moments as integers of 4 bits with dither, and block scales. */
#define NVFP4_FIRST_MOMENT_INT4 0

/** First moments in NVFP4, rounded stochastically. */
#define NVFP4_FIRST_MOMENT_NVFP4 1

/** First moments as integers of 8 bits, rounded stochastically. */
#define NVFP4_FIRST_MOMENT_INT8 2

/** First moments in float32. */
#define NVFP4_FIRST_MOMENT_FLOAT32 3

/** Square roots of second moments as integers of 4 bits, rounded stochastically, and block scales. */
#define NVFP4_SECOND_MOMENT_UINT4 0

/** Square roots of second moments in NVFP4, rounded stochastically. */
#define NVFP4_SECOND_MOMENT_NVFP4 1

/** Square roots of second moments as integers of 8 bits, rounded stochastically. */
#define NVFP4_SECOND_MOMENT_INT8 2

/** Second moments in float32. */
#define NVFP4_SECOND_MOMENT_FLOAT32 3

/**
 * The teacher's weights are on the device if both models fit in its memory with micro-batches of 4096 tokens, otherwise as
 * #NVFP4_TEACHER_STREAMED.
 */
#define NVFP4_TEACHER_AUTO 0

/** The teacher's weights are on the device. */
#define NVFP4_TEACHER_RESIDENT 1

/** The teacher's weights are read from its files in each pass, one matrix after another. The results have the same bits. */
#define NVFP4_TEACHER_STREAMED 2

/** Parameters were updated. */
#define NVFP4_STEP_UPDATED 0

/** The loss or a gradient was not finite, and no parameter was changed. */
#define NVFP4_STEP_SKIPPED 1

/** By the extension of a file: .tsv, .csv, .jsonl, .json or .txt, each also with .gz or .zst after it. */
#define NVFP4_DATA_BY_NAME -1

/** One row per line: a prompt, a tab and its answer. */
#define NVFP4_DATA_TSV 0

/** One row per line: a JSON object. */
#define NVFP4_DATA_JSONL 1

/** Plain text. */
#define NVFP4_DATA_TEXT 2

/** One row per record, with fields separated by commas; the first record names the columns. */
#define NVFP4_DATA_CSV 3

/** An array of JSON objects. */
#define NVFP4_DATA_JSON 4

/** Rows longer than a window are an error. */
#define NVFP4_LONG_REFUSE 0

/** The ends of rows longer than a window are cut off. */
#define NVFP4_LONG_TRUNCATE 1

/** Rows longer than a window are left out. */
#define NVFP4_LONG_DROP 2

/** Empty reasoning before an answer is learned with it. */
#define NVFP4_EMPTY_THINK_LEARN 0

/** Empty reasoning before an answer is context. */
#define NVFP4_EMPTY_THINK_GIVEN 1

/** Empty reasoning before an answer is left out. */
#define NVFP4_EMPTY_THINK_NONE 2

/** An adapter. See the adapter chapter. */
typedef struct NVFP4_Adapter NVFP4_Adapter;

/** Cancels long calls. See the chapter on long calls. */
typedef struct NVFP4_Cancel NVFP4_Cancel;

/** The documents of files. See the chapter on data for training. */
typedef struct NVFP4_Data NVFP4_Data;

/** Converts the tokens of one sequence to text. See the detokenizer chapter. */
typedef struct NVFP4_Detokenizer NVFP4_Detokenizer;

/** An error as an object, which may go to another thread. See NVFP4_take_error(). Immutable. */
typedef struct NVFP4_Error NVFP4_Error;

/** A grammar. See the grammar chapter. */
typedef struct NVFP4_Grammar NVFP4_Grammar;

/** A loaded model. See the model chapter. */
typedef struct NVFP4_Model NVFP4_Model;

/** A weight with the moments of its AdamW. See the chapter on training with the host's own passes. */
typedef struct NVFP4_OptimizerState NVFP4_OptimizerState;

/** Threads of the host. See the pool chapter. */
typedef struct NVFP4_Pool NVFP4_Pool;

/** A queue of a model. See the chapter on queues. */
typedef struct NVFP4_Queue NVFP4_Queue;

/** A session. See the session chapter. */
typedef struct NVFP4_Session NVFP4_Session;

/** A tensor. See the tensor chapter. */
typedef struct NVFP4_Tensor NVFP4_Tensor;

/** A trainer. See the training chapter. */
typedef struct NVFP4_Trainer NVFP4_Trainer;

/** A weight `[N, K]` prepared for products. Immutable; several threads may use it at once. */
typedef struct NVFP4_Weight NVFP4_Weight;

/**
 * The result of a call: #NVFP4_OK, or one of the errors from #NVFP4_INVALID_ARGUMENT on. A number never gets another
 * meaning.
 */
typedef int32_t NVFP4_Status;

/**
 * Receives a log message: one line of UTF-8, `length` bytes without a NUL. Unlike other callbacks it stays registered, and
 * is called on any thread that logs, on several at once too. Calls of the library from within it are not logged; it may
 * add and remove log callbacks, even itself, but should do no more. Its return value is ignored; return 0.
 */
typedef int32_t (*NVFP4_LogCallback)(void *user, int32_t level, const char *message, size_t length);

/** Called when the user data of a log callback is no longer used. */
typedef void (*NVFP4_LogRelease)(void *user);

/**
 * Receives the progress of a long call from time to time, on the thread that made it: `done` of `total`, in bytes of a file, values of a
 * tensor, or tokens (those of the prompt, then generated ones). Returns 0 to continue, anything else to cancel. It should be quick,
 * because the call waits for it. It may call the library, but not use the model that is being run: that fails with #NVFP4_BUSY.
 */
typedef int32_t (*NVFP4_ProgressCallback)(void *user, uint64_t done, uint64_t total);

/**
 * Cancellation and progress of a long call. Fill with NVFP4_call_options_init(), then change what is to differ. The struct and what it
 * points to must stay valid until the call returns.
 */
typedef struct NVFP4_CallOptions {
    /** sizeof(NVFP4_CallOptions) as the caller knows it. */
    uint32_t struct_size;
    /** Must be 0. */
    int32_t reserved;
    /** Cancels the call when triggered, also if it was triggered before. Default: NULL. */
    const NVFP4_Cancel *cancel;
    /**
     * Cancels the call when nonzero: a variable of the host, which any thread and any signal handler may write. Aligned to 4 bytes.
     * Default: NULL.
     */
    const volatile int32_t *cancel_flag;
    /** Called with the progress, and once more at the end. Default: NULL. */
    NVFP4_ProgressCallback progress;
    /** The first argument of `progress`. */
    void *user;
} NVFP4_CallOptions;

/**
 * Frees memory that the host lent to a tensor: called once with the data pointer and the host's user data, on the thread
 * that ends the last use of the memory.
 */
typedef void (*NVFP4_Deleter)(void *data, void *user);

/** How to quantize. Fill with NVFP4_quantize_options_init(), then change what is to differ. */
typedef struct NVFP4_QuantizeOptions {
    /** sizeof(NVFP4_QuantizeOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_LEVELS_*. Default: two. */
    int32_t levels;
    /** One of NVFP4_RECIPE_*. Default: amax. */
    int32_t recipe;
    /** One of NVFP4_ROUNDING_*. Default: to nearest even. */
    int32_t rounding;
    /** One of NVFP4_NONFINITE_*. Default: error. */
    int32_t nonfinite;
    /** One of NVFP4_SCALES_*. Default: linear. */
    int32_t scale_layout;
    /** Seed of stochastic rounding. Default: 0. */
    uint64_t seed;
    /**
     * Cancels NVFP4_tensor_quantize() and reports its progress, in values. Must be NULL where a model is loaded or
     * converted, which has one in its own options. Default: NULL.
     */
    const NVFP4_CallOptions *call;
} NVFP4_QuantizeOptions;

/** How to prepare a weight. Fill with NVFP4_weight_options_init(), then change what is to differ. */
typedef struct NVFP4_WeightOptions {
    /** sizeof(NVFP4_WeightOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_COMPUTE_PATH_*. Default: auto. */
    int32_t compute_path;
    /** One of NVFP4_DEVICE_*. Default: CPU. */
    int32_t device_type;
    /** The index of the device of that type. Default: 0. */
    int32_t device_index;
    /** One of NVFP4_SCALES_*, for NVFP4 weights. Default: linear. */
    int32_t scale_layout;
    /**
     * The type that a decoded weight is stored in: #NVFP4_DTYPE_FLOAT32, which decoding gives, or #NVFP4_DTYPE_FLOAT16 or
     * #NVFP4_DTYPE_BFLOAT16, to which it is rounded to nearest even. Default: float32.
     */
    int32_t dense_dtype;
    /**
     * 1 to count only GPU kernels as kernels, as TorchSharp.Q4.Extension does: on the CPU the kernel-only path is then an
     * error, and the other paths decode. Default: 0.
     */
    int32_t exclude_cpu_kernels;
    /** Must be 0. */
    int32_t reserved;
    /** The name of the backend to insist on, in UTF-8, or NULL for any. Default: NULL. */
    const char *backend;
    /** Bytes of `backend`. */
    size_t backend_length;
} NVFP4_WeightOptions;

/**
 * The description of a host's tensor; its elements are not needed. Later versions may add fields at the end: functions
 * that take an array of these also take the size of an element.
 */
typedef struct NVFP4_NamedTensor {
    /** Its name, in UTF-8. */
    const char *name;
    /** Bytes of `name`. */
    size_t name_length;
    /**
     * The element type, one of NVFP4_DTYPE_*. Tensors of other types may be in the set too, but not as parts of a 4-bit
     * weight.
     */
    int32_t dtype;
    /** Number of dimensions, at most 8. */
    int32_t rank;
    /** `rank` sizes, outermost first. */
    const int64_t *sizes;
} NVFP4_NamedTensor;

/** A summary of the 4-bit weights in a set of tensors. NVFP4_schema_report() has the details. */
typedef struct NVFP4_SchemaResult {
    /** sizeof(NVFP4_SchemaResult) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_FORMAT_*. */
    int32_t format;
    /** Number of tensors examined: those under the prefix. */
    size_t tensors;
    /** Number of 4-bit weights among them. */
    size_t weights;
    /** Number of problems that NVFP4_schema_validate() would report. */
    size_t problems;
    /** If there is exactly one weight, its output features N, or 0 if the shapes do not determine them. */
    int64_t out_features;
    /** If there is exactly one weight, its input features K, or 0 if the shapes do not determine them. */
    int64_t in_features;
    /** If there is exactly one weight, the number of values that share a scale, or 0 if the shapes do not determine it. */
    int64_t block;
} NVFP4_SchemaResult;

/** Runs a task once: see #NVFP4_PoolSubmit. Returns when the task has nothing more to do. */
typedef void (*NVFP4_PoolTask)(void *task);

/**
 * Schedules `run(task)` on a thread of the host, and returns at once. Returns 0 if `run(task)` will be called, once, in this process; anything
 * else if it will not.
 *
 * The task helps calls of models for as long as they have work, at least some hundred microseconds, and returns. It may begin when the pool
 * and its models are gone, and then returns at once. Its thread needs 512 KiB of stack. The function is called by threads that call a model of
 * the pool, by one at a time. It must not call the library.
 */
typedef int32_t (*NVFP4_PoolSubmit)(void *user, NVFP4_PoolTask run, void *task);

/** Called once, when neither the pool nor a model uses `user` any more, by the thread that released the last of them. */
typedef void (*NVFP4_PoolRelease)(void *user);

/** How to load a model. Fill with NVFP4_load_options_init(), then change what is to differ. */
typedef struct NVFP4_LoadOptions {
    /** sizeof(NVFP4_LoadOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * One of NVFP4_DEVICE_*. #NVFP4_DEVICE_AUTO is a GPU that has room for the model and supports it, or else the CPU. If
     * loading on that GPU fails for lack of memory or kernels, it starts again on the CPU. Default: CPU.
     */
    int32_t device_type;
    /** The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0. */
    int32_t device_index;
    /** CPU threads of this model, or 0 for those of NVFP4_set_threads(), which models share. Ignored on a GPU. Default: 0. */
    int32_t threads;
    /** One of NVFP4_ACTIVATIONS_*; on a GPU only #NVFP4_ACTIVATIONS_EXACT. Default: exact. */
    int32_t activations;
    /** 1 to load only tokenizer, embedding, final norm and output head, without the layers. Default: 0. */
    int32_t sampling_only;
    /** Cancels the call and reports the bytes read; NULL for neither. Default: NULL. */
    const NVFP4_CallOptions *call;
    /**
     * Bytes for the keys and values of all sessions together, reserved when the model is loaded; a session that needs more
     * gets #NVFP4_OUT_OF_MEMORY. 0 reserves nothing: memory is allocated as sessions grow, and is left to others until
     * then. Default: 0.
     */
    uint64_t kv_bytes;
    /**
     * 1 if sessions that begin with the same tokens share the keys, values and recurrent states of these, whichever of them
     * ran them first; 0 if only forks share. On the CPU this changes no result; on a GPU it changes logits by rounding, as
     * any other division of a prompt does, unless `deterministic` is 1. Default: 1.
     */
    int32_t prefix_cache;
    /**
     * 1 if the logits of a session are to have the same bits whatever runs beside it, however its prompt is divided, and
     * whether its tokens were run, found in the prefix cache, or run again after memory was short. Always so on the CPU, where
     * this is not read. On a GPU every row of a pass takes the same sums in the same order, by kernels that are slower for
     * prompts above all: docs/performance.md has figures. Other GPUs, drivers and versions of this library give other bits.
     * Default: 0.
     */
    int32_t deterministic;
    /**
     * Bytes of keys, values and states that are kept after the last session that used them, for later sessions that begin
     * with the same tokens: those used least recently give way first, and all of them as soon as a session needs memory.
     * With 0 sessions share only while they live, which takes no memory. Not read with `kv_bytes`: then all that is reserved
     * and that no session uses keeps such blocks. Default: 0.
     */
    uint64_t prefix_bytes;
    /**
     * Threads of the host that work for the model on the CPU, in place of the library's: a handle of NVFP4_pool_create(), or NULL for none.
     * Not together with `threads`. Ignored on a GPU. Default: NULL.
     */
    const NVFP4_Pool *pool;
    /**
     * 1 to lock the weights in host memory (mlock), so that the system never pages them out and no token waits for them.
     * #NVFP4_OUT_OF_MEMORY, with the bytes wanted and the limit, if the system refuses: RLIMIT_MEMLOCK (ulimit -l) must allow
     * for them; nothing stays locked then. Tables of embeddings that stay in their file are not locked. Without effect on a
     * GPU, whose memory is never paged out. Default: 0.
     */
    int32_t mlock;
    /**
     * One of NVFP4_PACKED_*: whether weights on the CPU are mapped from the file of packed weights beside the model's own, which processes
     * share. Default: #NVFP4_PACKED_AUTO.
     */
    int32_t packed;
    /** One of NVFP4_TUNING_*: the goal of passes with prompts while other sessions generate. Default: #NVFP4_TUNING_THROUGHPUT. */
    int32_t tuning;
    /**
     * Most tokens of prompts in such a pass, at least up to the next multiple of 16 of the session's positions; or 0 for as many as `tuning`
     * allows by the times of passes, which are measured while the model runs. Default: 0.
     */
    uint32_t prompt_tokens;
} NVFP4_LoadOptions;

/** Options of NVFP4_model_plan(). Fill with NVFP4_plan_options_init(), then change what is to differ. */
typedef struct NVFP4_PlanOptions {
    /** sizeof(NVFP4_PlanOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_KV_*: the type of the sessions' keys and values. Default: half precision. */
    int32_t kv_type;
    /** Sessions that take steps together, at least 1. Default: 1. */
    size_t sequences;
    /** Tokens that each session comes to, at most those that the model was made for; 0 for these. Default: 0. */
    size_t context;
    /** Bytes of the device's memory in which model and sessions are to fit; 0 for what is free on the device. Default: 0. */
    uint64_t budget_bytes;
} NVFP4_PlanOptions;

/**
 * The memory of a model and its sessions, in bytes. Numbers named `host` count host memory that a model on a GPU takes beside that of the
 * GPU, and are 0 on the CPU; the others count the memory of the device, which is host memory for the CPU. The driver, its libraries,
 * compiled kernels, tokenizers, texts and logits are not counted, as in NVFP4_memory_stats().
 */
typedef struct NVFP4_Plan {
    /** sizeof(NVFP4_Plan) as the caller knows it. Set it before the call. */
    uint32_t struct_size;
    /** The device of the plan: #NVFP4_DEVICE_CPU or #NVFP4_DEVICE_CUDA. */
    int32_t device_type;
    /** Its number. */
    int32_t device_index;
    /** 0. */
    int32_t reserved;
    /** Tokens of a session, as asked for. */
    uint64_t context;
    /**
     * Weights as they are held: what NVFP4_memory_stats() says of #NVFP4_MEMORY_WEIGHTS on the CPU and of
     * #NVFP4_MEMORY_DEVICE_WEIGHTS on a GPU once the model is loaded.
     */
    uint64_t weight_bytes;
    /** Tables in page-locked memory, of which a token reads one row. */
    uint64_t weight_host_bytes;
    /** Weights and working memory while the model is loaded, at most. */
    uint64_t peak_load_bytes;
    /** As above, in host memory. */
    uint64_t peak_load_host_bytes;
    /** Working memory of steps alone, without prompts. */
    uint64_t step_workspace_bytes;
    /** Working memory of steps and of the longest passes of prompts. On the CPU each session that runs a prompt itself keeps its own. */
    uint64_t workspace_bytes;
    /** Page-locked working memory, without the buffers through which the library copies. */
    uint64_t workspace_host_bytes;
    /** Most bytes of recorded steps, on the GPU and on the host together; 0 on the CPU. Only the driver knows the exact number. */
    uint64_t graph_bytes_bound;
    /** Keys and values of a token. */
    uint64_t kv_bytes_per_token;
    /** A block of keys and values, of all groups of layers together. */
    uint64_t kv_block_bytes;
    /** Tokens of a block. */
    uint64_t kv_block_positions;
    /** A recurrent state; 0 without recurrent layers. */
    uint64_t state_bytes;
    /** Blocks of a session of `context` tokens, its recurrent states included. Layers with a window free what it has passed. */
    uint64_t kv_bytes_per_sequence;
    /** The recurrent states among these blocks: that of the end, and those of earlier positions that a session keeps. */
    uint64_t state_bytes_per_sequence;
    /** Blocks of all sessions: as `kv_bytes` of NVFP4_LoadOptions, room for each to come to `context` tokens. */
    uint64_t kv_bytes;
    /** Bytes that are free on the device, or `budget_bytes`; UINT64_MAX if the system does not say. */
    uint64_t free_bytes;
    /**
     * Sessions of `context` tokens that fit there beside the model, and in `kv_bytes` of NVFP4_LoadOptions and the budget of
     * NVFP4_memory_set_budget() where these are set; UINT64_MAX if nothing limits them.
     */
    uint64_t sequences_that_fit;
    /**
     * Weights that are mapped from a file of packed weights, which processes share: what NVFP4_memory_stats() says of
     * #NVFP4_MEMORY_MAPPED once the model is loaded, but for the file's names and sums. Not in `weight_bytes`, and not in
     * `peak_load_bytes`.
     */
    uint64_t mapped_bytes;
} NVFP4_Plan;

/** The work of a model since it was loaded, and what it holds now. Set `struct_size` before NVFP4_model_statistics(). */
typedef struct NVFP4_ModelStatistics {
    /** sizeof(NVFP4_ModelStatistics) as the caller knows it. */
    uint32_t struct_size;
    /** Reserved; 0. */
    int32_t reserved;
    /** Passes over the weights. */
    uint64_t passes;
    /** Requests in them, counted once for each pass: requests / passes callers shared a pass on average. */
    uint64_t requests;
    /**
     * Tokens of prompts, run or found: those of requests for more than one token of a session, other than verifications of
     * drafted tokens.
     */
    uint64_t prompt_tokens;
    /** Prompt tokens that did not run, because the prefix cache had their keys and values. */
    uint64_t prompt_tokens_found;
    /** Tokens that ran one at a time, and drafted tokens that were right. */
    uint64_t step_tokens;
    /** Sessions that generate now. */
    uint64_t generating;
    /** Calls that wait now for a pass to begin. */
    uint64_t waiting;
    /** Blocks of keys, values and recurrent states that sessions hold now, each counted once however many share it. */
    uint64_t blocks_used;
    /** Their bytes. */
    uint64_t used_bytes;
    /** Blocks that the prefix cache alone holds now. */
    uint64_t blocks_cached;
    /** Their bytes. */
    uint64_t cached_bytes;
    /** Blocks that the prefix cache alone held, and gave up because memory was needed or its limit was reached. */
    uint64_t blocks_evicted;
    /** Bytes reserved by `kv_bytes` of NVFP4_LoadOptions. */
    uint64_t reserved_bytes;
    /**
     * Reserved bytes that neither sessions nor the prefix cache take. On a GPU the blocks that padding rows of passes write to, taken once
     * for each KV type in use, are in none of `used_bytes`, `cached_bytes` and `free_bytes`.
     */
    uint64_t free_bytes;
    /** Generations that found no block in what is reserved, gave theirs up to the others, waited and ran their tokens again. */
    uint64_t preemptions;
    /**
     * Tokens of sessions that ran again, or were found, because a step of the trainer had changed the weights: see NVFP4_trainer_model().
     * They count as prompt tokens too.
     */
    uint64_t recomputed_tokens;
    /** Tokens that eviction has dropped, because the contexts of sessions were full; also in calls that have failed since and were undone. */
    uint64_t evicted_tokens;
} NVFP4_ModelStatistics;

/**
 * A special token, or another one with a role. Later versions may add fields at the end: functions that take an array of these also take
 * the size of an element.
 */
typedef struct NVFP4_SpecialToken {
    /** The id. */
    int32_t token;
    /** The sum of its NVFP4_TOKEN_ROLE_*; 0 if none is known. */
    int32_t roles;
    /** Its name, the bytes that NVFP4_model_token_bytes() gives, without a NUL after them. Valid as long as the model has a reference. */
    const char *name;
    /** Bytes of `name`. */
    size_t name_length;
} NVFP4_SpecialToken;

/**
 * A message of a conversation. Later versions may add fields at the end: functions that take an array of these also take
 * the size of an element.
 */
typedef struct NVFP4_Message {
    /** The role: "system", "user" or "assistant", in UTF-8. */
    const char *role;
    /** Bytes of `role`. */
    size_t role_length;
    /** The text, in UTF-8. */
    const char *content;
    /** Bytes of `content`. */
    size_t content_length;
} NVFP4_Message;

/**
 * Reads `size` bytes of a file from `offset` on into `out`, all of which are in the file. Returns the number of bytes read: fewer than `size`
 * are an error, and so is a negative number, which the message of the error has. Called from several threads at the same time, threads of
 * the library among them. It must return, and must not call the library.
 */
typedef int64_t (*NVFP4_FileRead)(void *user, uint64_t offset, void *out, size_t size);

/**
 * Tells the host that the library does not use a file any more. Called on any thread, also during NVFP4_model_load_files() and the release
 * of a model or a session. It must return, and must not call the library.
 */
typedef void (*NVFP4_FileRelease)(void *user);

/**
 * A file of a model that the host gives: its bytes in `data`, or a function that reads them. Later versions may add fields at the end:
 * NVFP4_model_load_files() also takes the size of an element.
 */
typedef struct NVFP4_ModelFile {
    /** Its name in the model's directory, in UTF-8, such as config.json. Copied. */
    const char *name;
    /** Bytes of `name`. */
    size_t name_length;
    /** The content, which must stay and not change until `release` is called; NULL if `read` gives it. */
    const void *data;
    /** Bytes of the content. */
    uint64_t size;
    /** Reads the content; NULL if `data` is it. May be called until `release` is. */
    NVFP4_FileRead read;
    /** Called once when the library does not use the file any more; NULL for no call. */
    NVFP4_FileRelease release;
    /** The first argument of `read` and `release`. */
    void *user;
} NVFP4_ModelFile;

/** How to calibrate a model. Fill with NVFP4_calibrate_options_init(), then change what is to differ. Paths are read during the call only. */
typedef struct NVFP4_CalibrateOptions {
    /** sizeof(NVFP4_CalibrateOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * One of NVFP4_DEVICE_*: the device on which the model reads the text. The search for codes runs on the CPU. Default:
     * #NVFP4_DEVICE_CPU.
     */
    int32_t device_type;
    /** The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0. */
    int32_t device_index;
    /** Upper limit of text windows; 0 for 32 on a CPU and 128 on a GPU. Default: 0. */
    int32_t windows;
    /** Tokens per window; 0 for 1024 on a CPU and 2048 on a GPU, or the model's context if that is less. Default: 0. */
    size_t window;
    /**
     * Paths of files with text of the kinds that the model is used for, with rows as NVFP4_data_read() reads them. The library's own text
     * of prose, 38 languages, code and conversations fills the remaining windows. Default: NULL, for that text alone.
     */
    const char *const *files;
    /** Bytes of each path. */
    const size_t *file_lengths;
    /** Number of files. */
    size_t file_count;
    /**
     * Average bits per weight of the model's blocks, scales included: from 4.5, all NVFP4, to 8. The blocks that NVFP4 harms most get int8
     * rows. 0 for all NVFP4. Default: 0.
     */
    double budget;
    /**
     * Steps of distillation after the calibration, in which the whole model, still in NVFP4, learns the predictions of the original. For
     * GPUs: a step takes minutes on a CPU. Default: 0.
     */
    uint64_t distill_steps;
} NVFP4_CalibrateOptions;

/** How to convert a model. Fill with NVFP4_convert_options_init(), then change what is to differ. */
typedef struct NVFP4_ConvertOptions {
    /** sizeof(NVFP4_ConvertOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_CONTAINER_*: the output format. Default: ModelOpt. */
    int32_t container;
    /**
     * 1 to replace a directory that holds a model and no subdirectories, with everything in it; 0 to refuse a directory
     * that is not empty. Default: 0.
     */
    int32_t replace;
    /** 1 to keep the output head, or the table that it shares with the embedding, in its precision, whatever `tables` says. Default: 0. */
    int32_t keep_head;
    /**
     * Cancels the call, and reports progress in bytes of the source and of what is packed, or in shares of the work of a calibration; NULL
     * for neither. Default: NULL.
     */
    const NVFP4_CallOptions *call;
    /**
     * One of NVFP4_TABLES_*: format of the embedding and the output head. A tied head stays tied: the table is written once.
     * Default: #NVFP4_TABLES_AUTO.
     */
    int32_t tables;
    /** Must be 0. */
    int32_t reserved;
    /**
     * How to calibrate. Codes and scales of linear weights are then chosen so that their products with the inputs that occur in text
     * change least; a recipe is used only for weights that are not calibrated. NULL to quantize all weights by a recipe. Default: NULL.
     */
    const NVFP4_CalibrateOptions *calibrate;
    /**
     * 1 to also write `packed.nvfp4` into the directory `destination`: the weights as the CPU's kernels read them, which processes that load
     * the model on the CPU share. The directory appears with it or not at all. If `destination` is `source` itself, nothing is quantized
     * and that file alone is written; only `call` may then differ from its default. Not for `.dat`. Default: 0.
     */
    int32_t packed;
    /** Must be 0. */
    int32_t reserved2;
} NVFP4_ConvertOptions;

/** Kind of a grammar's source. Fill with NVFP4_grammar_options_init(), then change what is to differ. */
typedef struct NVFP4_GrammarOptions {
    /** sizeof(NVFP4_GrammarOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_GRAMMAR_*. Default: a JSON schema. */
    int32_t kind;
} NVFP4_GrammarOptions;

/** How to create a session. Fill with NVFP4_session_options_init(), then change what is to differ. */
typedef struct NVFP4_SessionOptions {
    /** sizeof(NVFP4_SessionOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_KV_*. Default: half precision. */
    int32_t kv_type;
    /** One of NVFP4_EVICTION_*. Default: error. */
    int32_t eviction;
    /**
     * 1 keeps the session out of the prefix cache: it runs all of its tokens, and no other session begins with its blocks. For measurements,
     * and where the time of a first token must not tell what others have asked. Default: 0.
     */
    int32_t is_private;
    /**
     * The most tokens to hold; memory is allocated as they are appended. 0, the default, is the context length of the
     * model.
     */
    size_t context;
    /**
     * Tokens at the beginning that eviction never drops. Default: 0, which is 4 for a sliding window. A chat's system prompt stays in any
     * case.
     */
    size_t keep;
    /** The system prompt of NVFP4_session_chat(), in UTF-8. Default: NULL, none. Copied. */
    const char *system;
    /** Bytes of `system`. */
    size_t system_length;
    /**
     * Tokens that a sliding window drops at a time, or more if that is not enough. The fewer, the more often the remaining ones run again.
     * Default: 0, half of those that are not kept. Must be 0 for other evictions.
     */
    size_t drop;
    /**
     * The adapter that the session's tokens run with, of the same model: see the adapter chapter. Its handle may be released while sessions
     * use it. Default: NULL, none.
     */
    const NVFP4_Adapter *adapter;
} NVFP4_SessionOptions;

/** The logits of a choice, for a processor. Later versions may add fields at the end: a field exists if `struct_size` includes it. */
typedef struct NVFP4_LogitsEvent {
    /** sizeof(NVFP4_LogitsEvent) as the library knows it. */
    uint32_t struct_size;
    /** The index of the session in a step; 0 for a single session. */
    int32_t index;
    /**
     * The logits, which the processor may change: one for each token of the vocabulary, minus infinity for excluded ones. Valid during the
     * callback.
     */
    float *logits;
    /** Elements of `logits`. */
    size_t logit_count;
    /**
     * The tokens that the generation has so far; none in a step and in NVFP4_session_sample(), whose choices are part of no generation. Valid
     * during the callback.
     */
    const int32_t *tokens;
    /** Elements of `tokens`. */
    size_t token_count;
} NVFP4_LogitsEvent;

/**
 * Changes the logits of a choice before the token is chosen. Returns 0 to go on, anything else to end the generation as
 * #NVFP4_FINISH_CANCELLED with the tokens so far; a step or a single choice then fails with #NVFP4_CANCELLED.
 *
 * The library checks the result. NaN, plus infinity, or no finite logit among the tokens that may be chosen fail the call, or the generation
 * in a queue, with #NVFP4_INVALID_ARGUMENT. A generation keeps the tokens before that, with their text and its result.
 *
 * It is called on the thread that runs the generation: the caller's, or in a queue one of the library's. Functions that use the session return
 * #NVFP4_BUSY there, as they do in an #NVFP4_TokenCallback; those that may read it during a call, and NVFP4_session_fork() within a generation,
 * do not.
 */
typedef int32_t (*NVFP4_LogitsProcessor)(void *user, const NVFP4_LogitsEvent *event);

/**
 * How to generate. Fill with NVFP4_generate_options_init(), or with the model's recommended settings by
 * NVFP4_model_generate_options(), then change what is to differ. Arrays and texts are read during the call only.
 */
typedef struct NVFP4_GenerateOptions {
    /** sizeof(NVFP4_GenerateOptions) as the caller knows it. */
    uint32_t struct_size;
    /** Divides the logits before the softmax. 0, the default, takes the argmax. */
    float temperature;
    /** Draws from this many of the most probable tokens. Default: 0, all. */
    int32_t top_k;
    /**
     * Draws from the fewest of the most probable tokens whose probabilities reach this sum. 0 takes the argmax. Default:
     * 1, all.
     */
    float top_p;
    /** Leaves out tokens less probable than this fraction of the most probable one. Default: 0, none. */
    float min_p;
    /**
     * Makes tokens that have occurred less probable: divides their logits if positive, else multiplies them. Default: 1,
     * no penalty.
     */
    float repetition_penalty;
    /** 1 treats the model's own stop tokens like any other token. Default: 0. */
    int32_t ignore_model_stops;
    /** 1 computes each token from the whole sequence without the KV cache, for comparison; slow. Default: 0. */
    int32_t replay;
    /**
     * 1 passes each token's log-probability to the callback, which copies the logits of each token to the host. Default:
     * 0.
     */
    int32_t log_probabilities;
    /**
     * The most tokens that the model's drafter guesses in a step, for one pass of the model to verify, up to 16; -1 drafts none. A
     * number is refused for a model without a drafter, unless there is a `draft_model`. The generated tokens are the same, on a GPU but
     * for rounding. Default: 0, which drafts if the model has a drafter, while that is faster.
     */
    int32_t drafts;
    /**
     * The most tokens to generate. Default: SIZE_MAX, as many as fit in the context, and any number with a sliding window. With 0 a prompt
     * is run and nothing is generated.
     */
    size_t max_tokens;
    /**
     * Makes the draws repeatable: the same logits, options, seed and position give the same token. The position counts all
     * tokens appended before, including those that eviction has dropped. Default: #NVFP4_SEED_NEW.
     */
    uint64_t seed;
    /** Tokens that end the text, besides the model's own stop tokens. A stop token is not appended. Default: NULL. */
    const int32_t *stop_tokens;
    /** Elements of `stop_tokens`. */
    size_t stop_token_count;
    /**
     * Stop strings, in UTF-8: each ends the text and is not part of it. Special tokens give no text, but a stop string may
     * contain the name of one. Default: NULL.
     */
    const char *const *stop_strings;
    /** Bytes of each of `stop_strings`. */
    const size_t *stop_string_lengths;
    /** Elements of `stop_strings` and of `stop_string_lengths`. */
    size_t stop_string_count;
    /** Cancels the call and reports the tokens run; NULL for neither. Default: NULL. */
    const NVFP4_CallOptions *call;
    /**
     * Holds the text to a grammar, in a chat the content of the answer: see the grammar chapter. It may be released while generations
     * follow it. Default: NULL, none.
     */
    const NVFP4_Grammar *grammar;
    /** One of NVFP4_TOOL_CALLS_*, for a chat without `grammar`. Default: free. */
    int32_t tool_calls;
    /**
     * Passes log-probabilities of this many most probable tokens with each token, up to 20, and the token's own. See `log_probabilities`.
     * Default: 0.
     */
    int32_t top_log_probabilities;
    /** Subtracted from the logits of tokens that the generation has at least once. See LOGITS in the chapter on sessions. Default: 0. */
    float presence_penalty;
    /** Subtracted from the logit of a token once for each time that the generation has it. Default: 0. */
    float frequency_penalty;
    /** Tokens whose logits get a bias; several biases of one token add up. Default: NULL. */
    const int32_t *logit_bias_tokens;
    /** The bias of each of `logit_bias_tokens`: a finite number, which is added to the logit, or minus infinity, which excludes the token. */
    const float *logit_biases;
    /** Elements of `logit_bias_tokens` and of `logit_biases`. */
    size_t logit_bias_count;
    /**
     * Token sequences that are not completed: where all but the last token of one are the end of the session's tokens, its last token is
     * excluded. Default: NULL.
     */
    const int32_t *const *bad_words;
    /** Tokens of each of `bad_words`, at least 1. */
    const size_t *bad_word_lengths;
    /** Elements of `bad_words` and of `bad_word_lengths`. */
    size_t bad_word_count;
    /**
     * The most tokens that a step drafts by prompt lookup, up to 16: where the session's last tokens have occurred in it before, those that
     * followed there, for one pass of the model to verify. It pays where an answer quotes its prompt or itself, as edits of code and
     * summaries do; how many are drafted follows from what has been fastest. The generated tokens are the same, on a GPU but for
     * rounding unless the model is `deterministic`. The model's drafter drafts nothing then. Not together with a number of `drafts`.
     * Default: 0, which looks nothing up.
     */
    size_t prompt_lookup;
    /**
     * Changes the logits before each choice; see LOGITS in the chapter on sessions. In a queue it is called on a thread of the library, and
     * must stay valid until the generation's end. Default: NULL, none.
     */
    NVFP4_LogitsProcessor logits_processor;
    /** `user` of `logits_processor`. */
    void *logits_user;
    /**
     * A smaller model with the same tokenizer, on any device, that guesses tokens for one pass of the session's model to verify. A step
     * guesses as many as have been fastest, up to 8 and possibly none, or as many as `drafts` says, none for -1. The generated tokens are the
     * same, on a GPU but for rounding unless the session's model is `deterministic`. The session's tokens run through the draft model too. The
     * session keeps their keys and values there, which the draft model's statistics count, and the draft model itself, until a generation
     * without it or with another one; the host may release it meanwhile. The drafter of the session's model guesses nothing then. Not
     * together with `prompt_lookup`. NVFP4_INVALID_ARGUMENT if a token has another text in the draft model, or if one of the two has no
     * tokenizer and their vocabularies differ in size. Without memory for its keys and values the generation goes on without drafts and
     * logs a warning; another fault of the draft model is that of the generation. Default: NULL, none.
     */
    const NVFP4_Model *draft_model;
    /**
     * Tokens at the end of the session that `repetition_penalty` counts, such as 64; the prompt's are among them as far as they reach. A
     * generation with a window drafts nothing. Default: 0, all tokens of the session.
     */
    size_t repetition_window;
    /**
     * New tokens before which those that end the text, the model's and `stop_tokens`, are not chosen, and stop strings are not looked for. At
     * most `max_tokens`. A grammar that allows nothing else ends the text all the same. Default: 0.
     */
    size_t min_tokens;
    /** Tokens that would complete a sequence of this many tokens that the session has already, prompt included, are excluded. Default: 0, none. */
    size_t no_repeat_ngram_size;
    /**
     * Strength of the DRY penalty, such as 0.8: where the session's last tokens have occurred before, the token that followed there loses
     * `dry_multiplier * dry_base^(n - dry_allowed_length)`, with the length n of the longest such repetition in tokens. Default: 0, off.
     */
    float dry_multiplier;
    /** At least 1. Default: 1.75. */
    float dry_base;
    /** Length of the shortest repetition with a penalty, at least 1. Default: 2. */
    size_t dry_allowed_length;
    /** Tokens at the end of the session in which repetitions are found. Default: 0, all tokens of the session. */
    size_t dry_window;
    /**
     * Strings, in UTF-8, that no repetition contains: one begins after the last of them. A token whose own text contains one has no penalty.
     * The text of a special token is its name. They need the model's tokenizer.
     */
    const char *const *dry_sequence_breakers;
    /** Bytes of each of `dry_sequence_breakers`. */
    const size_t *dry_sequence_breaker_lengths;
    /**
     * Elements of `dry_sequence_breakers` and of `dry_sequence_breaker_lengths`; 0 for none. Default: SIZE_MAX, which with NULL stands for
     * the four strings newline, colon, quotation mark and asterisk.
     */
    size_t dry_sequence_breaker_count;
    /** Excludes tokens whose logit is more than this many standard deviations below the largest. Default: 0, off. */
    float top_n_sigma;
    /**
     * Keeps the tokens whose surprise is nearest to the entropy, as many as reach this probability together (locally typical sampling).
     * Default: 1, all.
     */
    float typical_p;
    /** Probability with which a choice excludes the most probable tokens (XTC); `seed` decides on it as on draws. Default: 0, never. */
    float xtc_probability;
    /** Tokens with at least this probability are then excluded, but for the least probable of them. Default: 0.1. */
    float xtc_threshold;
} NVFP4_GenerateOptions;

/**
 * A token or a piece of text of a generation. Later versions may add fields at the end: a field exists if `struct_size`
 * includes it.
 */
typedef struct NVFP4_TokenEvent {
    /** sizeof(NVFP4_TokenEvent) as the library knows it. */
    uint32_t struct_size;
    /** One of NVFP4_EVENT_*. */
    int32_t kind;
    /** The token, or -1 if the event has none. */
    int32_t token;
    /** The index of the session in a batch; 0 for a single session. */
    int32_t index;
    /**
     * The new text: whole UTF-8 characters, without a NUL after them. Empty while a character, or a possible stop string
     * or marker of the model, is incomplete. The #NVFP4_PART_CONTENT texts of all events together are the text of the
     * generation, unless the callback ends it. Valid during the callback.
     */
    const char *text;
    /** Bytes of `text`. */
    size_t text_length;
    /**
     * The natural logarithm of the token's probability by the model's own logits, before temperature, penalties and
     * filters; NaN unless `log_probabilities` of the options is 1.
     */
    float log_probability;
    /** The kind of text that this is, or that is to come: one of NVFP4_PART_*. */
    int32_t part;
    /**
     * The most probable tokens by the model's own logits, in descending order: `top_log_probabilities` of the options. Valid during the
     * callback, as are their log-probabilities.
     */
    const int32_t *top_tokens;
    /** The natural logarithm of the probability of each of `top_tokens`. */
    const float *top_log_probabilities;
    /** Elements of `top_tokens` and of `top_log_probabilities`. */
    size_t top_count;
} NVFP4_TokenEvent;

/**
 * Receives each token when it is generated, and the text. Returns 0 to go on, anything else to end the generation, which
 * keeps that token.
 */
typedef int32_t (*NVFP4_TokenCallback)(void *user, const NVFP4_TokenEvent *event);

/** The result of a generation. Set `struct_size` before the call. */
typedef struct NVFP4_GenerationResult {
    /** sizeof(NVFP4_GenerationResult) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_FINISH_*. */
    int32_t finish;
    /** Tokens before the first generated one: all those in the session, or in a chat those that the turn added. */
    size_t prompt_tokens;
    /** Tokens generated, which are the last ones of the session, as far as eviction has not dropped them. */
    size_t generated_tokens;
    /**
     * Seconds from the beginning of the first pass over the weights to the first token: the time to run the part of the prompt that was
     * not cached. 0 if no pass had to run for it.
     */
    double prefill_seconds;
    /** Seconds from the call, or from the submission to a queue, to the first token. */
    double first_token_seconds;
    /** Seconds from the first token to the end. */
    double decode_seconds;
    /** The seed of the draws; the same seed repeats them. */
    uint64_t seed;
    /** Number of tool calls in the answer; NVFP4_session_tool_calls() gives them. */
    size_t tool_calls;
    /** Tokens that eviction has dropped for the generation and its prompt, since the context was full. */
    size_t evicted_tokens;
    /**
     * Seconds from the call, or from the submission to a queue, to the beginning of its first pass over the weights: the time for which it
     * waited for its turn in the queue, for memory, and for passes of other generations.
     */
    double queue_seconds;
    /**
     * The longest time from one token to the next, in seconds; 0 with fewer than two tokens. It includes the time of callbacks, and in a
     * queue that for which its events were not taken.
     */
    double longest_gap_seconds;
    /**
     * Tokens of `prompt_tokens` that did not run, since their keys and values were held already: by the session, or as the prefix of another
     * prompt.
     */
    size_t cached_tokens;
    /** Tokens that a drafter, a lookup or a draft model proposed: see `drafts`, `prompt_lookup` and `draft_model` of the options. */
    size_t drafted_tokens;
    /** Proposed tokens that the model itself chose, each of which saved a step. */
    size_t accepted_tokens;
    /** How often the generation gave its memory up to others, and ran its tokens again. */
    size_t preemptions;
} NVFP4_GenerationResult;

/**
 * How to render and answer a turn. Fill with NVFP4_chat_options_init(), then change what is to differ. Texts are read during the call
 * only.
 */
typedef struct NVFP4_ChatOptions {
    /** sizeof(NVFP4_ChatOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * 1 keeps the reasoning of earlier answers in the session, even if the template would remove it. A turn then runs only
     * its new tokens, but the model gets a prompt unlike those it was trained on, and the context fills sooner. Default:
     * 0.
     */
    int32_t keep_reasoning;
    /**
     * The most tokens of reasoning, or -1 for any number. After that many the library closes the reasoning with the text
     * that the model's maker provides for this, and the answer follows. No effect on models without reasoning. Default:
     * -1.
     */
    int64_t reasoning_budget;
    /**
     * Variables of the chat template: a JSON object such as `{"enable_thinking": false}`, or NULL for none. A
     * variable that the template never reads has no effect, and is logged as a warning. Default: NULL.
     */
    const char *variables;
    /** Bytes of `variables`. */
    size_t variables_length;
    /**
     * The tools that the model may call: a JSON array of `{"type": "function", "function": {"name": ..., "description":
     * ..., "parameters": {...}}}`, or NULL for none. #NVFP4_UNSUPPORTED if the template does not support tools. Default:
     * NULL.
     */
    const char *tools;
    /** Bytes of `tools`. */
    size_t tools_length;
    /**
     * A Jinja template in UTF-8 that renders the conversation in place of the model's own, or NULL for that. Reasoning, tool calls and
     * the ends of answers are recognised by it as they are by the model's. #NVFP4_INVALID_ARGUMENT names the line of one that does not
     * compile, or fails. The model keeps the 16 that were used last compiled. A conversation may go on with another one: see the beginning
     * of this chapter. Default: NULL.
     */
    const char *chat_template;
    /** Bytes of `chat_template`. */
    size_t chat_template_length;
} NVFP4_ChatOptions;

/** Limits of a queue. Fill with NVFP4_queue_options_init(), then change what is to differ. */
typedef struct NVFP4_QueueOptions {
    /** sizeof(NVFP4_QueueOptions) as the caller knows it. */
    uint32_t struct_size;
    /** The most generations that run at a time; others wait for one of them to end. Default: 256. */
    int32_t running;
    /** The most submissions that have not ended, running ones included. A further one is refused with #NVFP4_BUSY. Default: 4,096. */
    size_t submissions;
    /** The most events that wait to be taken. Default: 65,536. */
    size_t events;
} NVFP4_QueueOptions;

/** How to run a generation in a queue. Fill with NVFP4_submit_options_init(), then change what is to differ. */
typedef struct NVFP4_SubmitOptions {
    /** sizeof(NVFP4_SubmitOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * A waiting generation of a higher priority starts first; of equal ones, the one that was submitted first. Running generations are not
     * interrupted. Default: 0.
     */
    int32_t priority;
    /** Seconds after which the generation ends as #NVFP4_FINISH_DEADLINE, counted from its submission. Default: 0, never. */
    double deadline;
    /** Given back in each event of the generation. Default: NULL. */
    void *user;
} NVFP4_SubmitOptions;

/** An event of a generation in a queue. */
typedef struct NVFP4_QueueEvent {
    /** The number of the generation, which its submission gave. */
    uint64_t generation;
    /** `user` of its submission. */
    void *user;
    /**
     * The new text, as in an #NVFP4_TokenEvent; at the end of a generation that failed, the message of its error. Valid until the next
     * wait on this queue, or the queue's release.
     */
    const char *text;
    /** Bytes of `text`. */
    size_t text_length;
    /** One of NVFP4_EVENT_*. */
    int32_t kind;
    /** The token, or -1 if the event has none. */
    int32_t token;
    /** The kind of the text: one of NVFP4_PART_*. */
    int32_t part;
    /** The natural logarithm of the token's probability, as in an #NVFP4_TokenEvent; NaN if it was not requested. */
    float log_probability;
    /** At the end, one of NVFP4_FINISH_*; otherwise, and if the generation failed, #NVFP4_FINISH_NONE. */
    int32_t finish;
    /**
     * At the end, #NVFP4_OK or the error of a generation that failed, which leaves its session as NVFP4_session_generate() does; otherwise
     * #NVFP4_OK.
     */
    NVFP4_Status status;
    /** The most probable tokens, as in an #NVFP4_TokenEvent. Valid as long as the text, as are their log-probabilities. */
    const int32_t *top_tokens;
    /** The natural logarithm of the probability of each of `top_tokens`. */
    const float *top_log_probabilities;
    /** Elements of `top_tokens` and of `top_log_probabilities`. */
    size_t top_count;
} NVFP4_QueueEvent;

/** How to embed texts. Fill with NVFP4_embed_options_init(), then change what is to differ. */
typedef struct NVFP4_EmbedOptions {
    /** sizeof(NVFP4_EmbedOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_POOLING_*. Default: that of the model. */
    int32_t pooling;
    /** One of NVFP4_NORMALIZE_*. Default: what the model says. */
    int32_t normalize;
    /**
     * 1 to cut texts with more tokens than the model takes; the tokens that end every text stay. 0 refuses them with
     * #NVFP4_CONTEXT_FULL. Default: 0.
     */
    int32_t truncate;
    /** One of NVFP4_KV_*: the type of keys and values, which live while a text runs. Default: half precision. */
    int32_t kv_type;
    /**
     * 1 keeps texts out of the prefix cache, which pooling by the last token uses: no text begins with the blocks of another one or of a
     * session. Default: 0.
     */
    int32_t is_private;
    /**
     * Number of first elements that are kept, before they are normalized; 0 for all. For models whose embeddings may be cut, of
     * Matryoshka training. Default: 0.
     */
    size_t dimensions;
    /** A text that goes before each text, such as an instruction, in UTF-8; NULL for the prompt of `prompt_name`. Default: NULL. */
    const char *prompt;
    /** Bytes of `prompt`, which may be none. */
    size_t prompt_length;
    /**
     * The name of one of the model's prompts, such as "query", in UTF-8; NULL for the model's default prompt, which most models have not.
     * Default: NULL.
     */
    const char *prompt_name;
    /** Bytes of `prompt_name`. */
    size_t prompt_name_length;
    /** Cancels the call and reports the tokens run; NULL for neither. Default: NULL. */
    const NVFP4_CallOptions *call;
} NVFP4_EmbedOptions;

/**
 * How to train. Fill with NVFP4_trainer_options_init(), then change what is to differ. The text is read during the call
 * only.
 */
typedef struct NVFP4_TrainerOptions {
    /** sizeof(NVFP4_TrainerOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_DEVICE_*. #NVFP4_DEVICE_AUTO is the first GPU, or else the CPU. Default: CPU. */
    int32_t device_type;
    /** The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0. */
    int32_t device_index;
    /** CPU threads of this trainer, or 0 for those of NVFP4_set_threads(). Ignored on a GPU. Default: 0. */
    int32_t threads;
    /** One of NVFP4_SCHEDULE_*: the rate after the warm-up. Default: cosine. */
    int32_t schedule;
    /** One of NVFP4_CLIP_*. Default: global. */
    int32_t clip;
    /** One of NVFP4_WEIGHT_FORM_*: the stored form of matrices between steps. Default: a residual of 4 bits. */
    int32_t weights;
    /** One of NVFP4_FIRST_MOMENT_*. Default: 4 bits. */
    int32_t first_moments;
    /** One of NVFP4_SECOND_MOMENT_*. Default: 4 bits. */
    int32_t second_moments;
    /**
     * 1 to apply each gradient as soon as it is complete and keep none: gradients take no memory, and a step has one micro-batch. 0 to sum
     * gradients in float32. Default: 0.
     */
    int32_t release;
    /** 1 to recompute activations in the backward pass instead of keeping them. Default: 1. */
    int32_t recompute;
    /** Trains only this many last blocks, with the final norm and an untied head; -1 trains everything. Default: -1. */
    int32_t last_blocks;
    /** Total number of steps, which the schedule spans. Default: 1000. */
    uint64_t steps;
    /** Steps of linear warm-up at the beginning. Default: 0. */
    uint64_t warmup;
    /** Seed of the random bits of rounding. Default: 0. */
    uint64_t seed;
    /** The highest learning rate. Default: 0.001. */
    double rate;
    /** The final rate, as a share of the highest. Default: 0.1. */
    double floor;
    /** The share of the steps, at the end, in which #NVFP4_SCHEDULE_STABLE falls. Default: 0.2. */
    double decay_share;
    /**
     * Decoupled weight decay of matrices: each step multiplies them by 1 - rate x decay. Norms and biases have none. Default:
     * 0.1.
     */
    double weight_decay;
    /** Decay rate of first moments. Default: 0.9. */
    double beta1;
    /** Decay rate of second moments. Default: 0.95. */
    double beta2;
    /** Added to the square root of second moments. Default: 1e-8. */
    double eps;
    /** The bound of `clip`. Default: 1. */
    double clip_norm;
    /**
     * The share of the steps, at the end, in which passes use the NVFP4 codes alone, that is, the delivered weights. -1 for 0.3, or 0.15
     * for a model with random weights. Default: -1.
     */
    double delivered_share;
    /**
     * All settings as a JSON object, in the form of `config` in NVFP4_trainer_info(): missing keys have their defaults, and unknown ones
     * are errors. With it, leave every field above except those of the device at its default. Default: NULL.
     */
    const char *config;
    /** Bytes of `config`. */
    size_t config_length;
    /**
     * One of NVFP4_TABLES_*: the delivered form of the embedding and the output head. For bfloat16 and int8 they are stored in bfloat16;
     * for NVFP4 they are stored as `weights` says. #NVFP4_TABLES_AUTO takes the model's own form: NVFP4 if it has that, int8 if it holds
     * them in at most 8 bits, else bfloat16. Default: auto.
     */
    int32_t tables;
    /**
     * One of NVFP4_RECIPE_*: the rule for block scales when linear weights are quantized, at the beginning if the model does not hold them
     * in NVFP4, and when adapters are merged. Default: sweep.
     */
    int32_t weight_scales;
    /**
     * Path of a teacher: the trainer learns the predictions of this model, which must have the same vocabulary. The loss is (1 -
     * label_share) x teacher_temperature^2 x KL(teacher || model) + label_share x cross-entropy, at each label that counts. Set
     * `delivered_share` to 1 to bring an NVFP4 model closer to the one that it was quantized from. May be combined with `config`, as may
     * `teacher_memory`. Default: NULL, none.
     */
    const char *teacher;
    /** Bytes of `teacher`. */
    size_t teacher_length;
    /** Divides the logits of both models. Default: 1. */
    double teacher_temperature;
    /** The share of the labels' cross-entropy in the loss with a teacher, below 1. Default: 0. */
    double label_share;
    /** One of NVFP4_TEACHER_*: the place of the teacher's weights. Default: auto. */
    int32_t teacher_memory;
    /** Must be 0. */
    int32_t reserved;
} NVFP4_TrainerOptions;

/**
 * A micro-batch: documents in a row that go through the model together; no token attends to another document. Later versions may add
 * fields at the end: functions that take an array of these also take the size of an element.
 */
typedef struct NVFP4_MicroBatch {
    /** The tokens of all documents, as 32-bit integers of either sign. */
    const int32_t *tokens;
    /** For each token, the one that should follow; -100 or any negative number for none. */
    const int32_t *labels;
    /** Elements of `tokens` and of `labels`. */
    size_t token_count;
    /** Number of tokens of each document; their sum is `token_count`. NULL with 0 documents: all tokens are one document. */
    const size_t *document_lengths;
    /** Elements of `document_lengths`. */
    size_t document_count;
    /**
     * Weight of each label in the loss, finite and not negative. The loss is divided by the sum of the weights of the labels that count; a
     * label of weight 0 does not count. NULL: 1 for all.
     */
    const float *weights;
} NVFP4_MicroBatch;

/** The result of a step. Set `struct_size` before the call. */
typedef struct NVFP4_StepReport {
    /** sizeof(NVFP4_StepReport) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_STEP_*. */
    int32_t outcome;
    /** The number of the step, from 1. */
    uint64_t step;
    /** Labels that counted. */
    uint64_t targets;
    /** Mean cross-entropy of the labels that counted, in nats, before the step. */
    double loss;
    /** The learning rate. */
    double rate;
    /** Norm of all gradients before clipping. */
    double gradient_norm;
    /** Share of the trained weights of matrices whose stored code changed. */
    double changed;
    /** Share of these weights whose delivered NVFP4 code changed. */
    double changed_delivered;
} NVFP4_StepReport;

/** How to read data. Fill with NVFP4_data_options_init(), then change what is to differ. The text is read during the call only. */
typedef struct NVFP4_DataOptions {
    /** sizeof(NVFP4_DataOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_DATA_*: the format of all files. Default: by name. */
    int32_t format;
    /** One of NVFP4_LONG_*: the treatment of rows longer than a window. Texts are cut into several documents. Default: refuse. */
    int32_t long_rows;
    /**
     * One of NVFP4_EMPTY_THINK_*: the treatment of the empty reasoning that a template such as Qwen3's writes before an
     * answer without reasoning. Default: learn.
     */
    int32_t empty_think;
    /** 1 to learn all tokens instead of only answers. Default: 0. */
    int32_t train_on_all;
    /** 1 to leave out unusable rows instead of failing; NVFP4_data_report() counts them. Default: 0. */
    int32_t skip_bad_rows;
    /** Upper limit of tokens in a document, at least 4; 0 for 2048, or the model's context if that is less. Default: 0. */
    size_t window;
    /** Separator of the documents of a text, UTF-8; its line ends match LF and CRLF. Default: NULL, for none. */
    const char *separator;
    /** Bytes of `separator`. */
    size_t separator_length;
} NVFP4_DataOptions;

/** How to store a weight and its moments. Fill with NVFP4_optimizer_options_init(), then change what is to differ. */
typedef struct NVFP4_OptimizerOptions {
    /** sizeof(NVFP4_OptimizerOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_WEIGHT_FORM_*. Default: a residual of 4 bits. */
    int32_t weights;
    /** One of NVFP4_FIRST_MOMENT_*. Default: 4 bits. */
    int32_t first_moments;
    /** One of NVFP4_SECOND_MOMENT_*. Default: 4 bits. */
    int32_t second_moments;
    /** 1 to recompute block scales of weights in each step, a baseline; 0 to keep them while they fit. Default: 0. */
    int32_t fresh_scales;
    /** Must be 0. */
    int32_t reserved;
} NVFP4_OptimizerOptions;

/** The settings of a step of AdamW. Fill with NVFP4_step_options_init(), then change what is to differ. */
typedef struct NVFP4_StepOptions {
    /** sizeof(NVFP4_StepOptions) as the caller knows it. */
    uint32_t struct_size;
    /** Factor of the gradient, for clipping for example. Default: 1. */
    float gradient_scale;
    /** Learning rate. Default: 0.001. */
    double rate;
    /** Decay rate of the first moment. Default: 0.9. */
    double beta1;
    /** Decay rate of the second moment. Default: 0.95. */
    double beta2;
    /** Added to the square root of the second moment. Default: 1e-8. */
    double eps;
    /** Decoupled weight decay. Default: 0.1. */
    double weight_decay;
    /** Seed of the random bits of rounding, together with `tensor` and the number of the step. Default: 0. */
    uint64_t seed;
    /** Number of this weight among all that share the seed. Default: 0. */
    uint64_t tensor;
} NVFP4_StepOptions;

/**
 * @defgroup status Status numbers
 *
 * Every function that can fail returns an #NVFP4_Status. On any value but #NVFP4_OK outputs are untouched, unless the
 * function says otherwise, and the calling thread's last error message is set.
 */

/** The name of a status without its prefix ("INVALID_ARGUMENT"), or "unknown". The text is static. */
NVFP4_API const char *NVFP4_status_name(NVFP4_Status status);

/**
 * @defgroup last_error The last error of a thread
 *
 * Each thread keeps the message and status of its last failed call. An error can also be taken out as an object, for use on another
 * thread.
 */

/**
 * The message of the last call that failed on this thread: one line that says what was wrong and what would be right.
 * Empty if none has failed yet, never NULL. Valid until the next call on this thread that fails or belongs to the drop-in
 * chapter; do not free it.
 */
NVFP4_API
const char *NVFP4_last_error(void);

/**
 * The status that belongs to NVFP4_last_error(). After a function of the drop-in chapter, which returns no status, it
 * tells success from failure.
 */
NVFP4_API
NVFP4_Status NVFP4_last_status(void);

/**
 * Copies the message of NVFP4_last_error() into `buffer`, for hosts that may change threads between two calls. For the
 * buffer see TEXT above. This function never changes the last error: if it fails itself, only its status says so.
 */
NVFP4_API
NVFP4_Status NVFP4_last_error_copy(char *buffer,
                                   size_t capacity,
                                   size_t *length);

/**
 * Moves this thread's last error into an object with one reference, for another thread or for later; NVFP4_last_status()
 * is #NVFP4_OK afterwards. `out` gets NULL if no call has failed.
 */
NVFP4_API
NVFP4_Status NVFP4_take_error(NVFP4_Error **out);

/** The status of the call that failed; #NVFP4_OK for NULL, #NVFP4_INVALID_HANDLE if `error` is not a live NVFP4_Error. */
NVFP4_API
NVFP4_Status NVFP4_error_status(const NVFP4_Error *error);

/**
 * The message of the call that failed, as NVFP4_last_error() had it. Valid until the last reference is released. Empty for
 * NULL and if `error` is not a live NVFP4_Error; never NULL.
 */
NVFP4_API
const char *NVFP4_error_message(const NVFP4_Error *error);

/** Adds a reference to an error. */
NVFP4_API NVFP4_Status NVFP4_error_retain(NVFP4_Error *error);

/** Gives up a reference to an error. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_error_release(NVFP4_Error *error);

/**
 * @defgroup library The library itself: versions, logging, threads and the capabilities of this machine
 */

/** Version of the loaded library, as "major.minor.patch". The text is static. */
NVFP4_API const char *NVFP4_version(void);

/**
 * The #NVFP4_ABI_VERSION of the loaded library. A host that loads the library by name compares it with the one it was
 * built with.
 */
NVFP4_API
int32_t NVFP4_abi_version(void);

/** The #NVFP4_VERSION_NUMBER of the loaded library. */
NVFP4_API int32_t NVFP4_version_number(void);

/**
 * Checks that the loaded library is compatible with a program, which calls NVFP4_check_version(#NVFP4_ABI_VERSION,
 * #NVFP4_VERSION_NUMBER): the library must have the same binary interface and be no older than the header that the program
 * was built with. Otherwise the result is #NVFP4_ABI_MISMATCH, and the message names both versions and says what to
 * install.
 */
NVFP4_API
NVFP4_Status NVFP4_check_version(int32_t abi_version,
                                 int32_t version_number);

/**
 * Adds a log callback for the whole process: from now on it gets messages of `level`, one of NVFP4_LOG_*, and more severe
 * ones. Callbacks added before stay. Writes a number to `token` that NVFP4_log_remove() takes; numbers are not reused.
 * #NVFP4_UNSUPPORTED if the process is a Rust program with a `tracing` subscriber of its own, which gets the messages
 * already.
 *
 * - `release`: called once with `user` when the callback has been removed and will not be called again, on any thread; not
 *   called if this function fails. May be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_log_add(NVFP4_LogCallback callback,
                           void *user,
                           int32_t level,
                           NVFP4_LogRelease release,
                           uint64_t *token);

/**
 * Removes a callback of NVFP4_log_add(). When the function returns, the callback is not running and will not be called
 * again, and its user data has been released. Called from within a log callback it does not wait: other threads may still
 * be running the callback, and `release` is called when they are done. #NVFP4_NOT_FOUND if no callback has this token.
 */
NVFP4_API
NVFP4_Status NVFP4_log_remove(uint64_t token);

/**
 * Sets how many CPU threads are used by later calls, and by objects created later, unless their own options say otherwise.
 * From 0 to 1024; 0 takes the environment variable NVFP4_THREADS, or one thread per core. Results do not depend on it.
 */
NVFP4_API
NVFP4_Status NVFP4_set_threads(int32_t threads);

/**
 * Describes what this library can do on this machine, as JSON: version, CPU instruction set levels with the one in use,
 * the backends of linear layers, the CUDA backend (driver, devices, kernel compiler) with the reason why something is
 * unavailable, memory, and the environment variables that are set. Opens each GPU for a moment. Later versions may add
 * keys.
 */
NVFP4_API
NVFP4_Status NVFP4_diagnose(char *buffer,
                            size_t capacity,
                            size_t *length);

/**
 * @defgroup call Long calls: cancellation and progress
 *
 * Calls that may take long - loading, converting, quantizing, prompts, generations, session files - take an
 * #NVFP4_CallOptions, directly or within their options. Products of tensors take none and cannot be cancelled. A call can
 * be cancelled in three ways: by a cancel handle, by a flag in the host's memory, or by what its progress callback
 * returns. All of them are checked at least every 50 ms, on all devices, also while a prompt is run and while a call waits
 * for another. A cancel handle or flag that is set before a call begins ends the call at its start. One cancel handle may
 * serve many calls.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_CallOptions). */
NVFP4_API NVFP4_Status NVFP4_call_options_init(NVFP4_CallOptions *options, uint32_t struct_size);

/** Creates a cancel handle, not triggered yet. */
NVFP4_API NVFP4_Status NVFP4_cancel_create(NVFP4_Cancel **out);

/**
 * Cancels the calls that were given the handle, including those that have yet to begin. A generation or chat turn ends with the tokens it
 * has, if any, as #NVFP4_FINISH_CANCELLED; anything else fails with #NVFP4_CANCELLED. May be called from any thread, callback or signal
 * handler: it takes no lock and no memory. #NVFP4_INVALID_HANDLE if the handle is not a live cancel handle; NVFP4_last_error() is not
 * changed.
 */
NVFP4_API
NVFP4_Status NVFP4_cancel_trigger(NVFP4_Cancel *cancel);

/**
 * Resets the handle for further calls, so that it is no longer triggered. May be called wherever NVFP4_cancel_trigger() may, and does not
 * change NVFP4_last_error() either. A call that has already seen it triggered still ends; one that has not continues.
 */
NVFP4_API
NVFP4_Status NVFP4_cancel_reset(NVFP4_Cancel *cancel);

/** Writes 1 if the handle is triggered, else 0. */
NVFP4_API NVFP4_Status NVFP4_cancel_is_triggered(const NVFP4_Cancel *cancel, int32_t *triggered);

/** Adds a reference to a cancel handle. */
NVFP4_API NVFP4_Status NVFP4_cancel_retain(NVFP4_Cancel *cancel);

/** Gives up a reference to a cancel handle. After the last one the handle is stale; running calls continue with its last state. */
NVFP4_API
NVFP4_Status NVFP4_cancel_release(NVFP4_Cancel *cancel);

/**
 * @defgroup memory Memory: usage by purpose, a budget, and managed memory
 *
 * The library counts its own large allocations in bytes, for the whole process, in host memory and on GPUs. One budget
 * covers them all. Not counted are the memory of a GPU's driver, libraries and compiled kernels, and GPU memory that is
 * free but kept for reuse, which NVFP4_empty_cache() frees.
 *
 * Managed (unified) memory has the same address on the host and on CUDA devices, and its pages move between them. The
 * library puts a tensor there only when the host asks for it, by NVFP4_to_managed() or NVFP4_tensor_by_managed_policy().
 * The environment variable TS_Q4_DISABLE_UM (1, true or yes) disables it altogether.
 */

/**
 * Writes the bytes in use under `tag`, one of NVFP4_MEMORY_*: now, and the peak since the start or the last
 * NVFP4_memory_reset_peak().
 */
NVFP4_API NVFP4_Status NVFP4_memory_stats(int32_t tag, uint64_t *current, uint64_t *peak);

/** Resets all peaks to current use. */
NVFP4_API NVFP4_Status NVFP4_memory_reset_peak(void);

/**
 * Sets an upper limit for the bytes of all tags together, on the host and on GPUs; 0 removes it. An allocation that would exceed it fails
 * with #NVFP4_OVER_BUDGET. Existing allocations stay.
 */
NVFP4_API
NVFP4_Status NVFP4_memory_set_budget(uint64_t bytes);

/** Writes the limit set by NVFP4_memory_set_budget(), or 0 if there is none. */
NVFP4_API NVFP4_Status NVFP4_memory_get_budget(uint64_t *bytes);

/** Sets the process's policy on managed memory, one of NVFP4_MANAGED_*. It starts as #NVFP4_MANAGED_PREFERRED. */
NVFP4_API NVFP4_Status NVFP4_memory_set_managed_policy(int32_t policy);

/** Writes the effective policy: the one that was set, or #NVFP4_MANAGED_DISABLED if TS_Q4_DISABLE_UM disables it. */
NVFP4_API
NVFP4_Status NVFP4_memory_get_managed_policy(int32_t *policy);

/**
 * Writes 1 if tensors can be in managed memory of the CUDA device `device_index`, else 0: there is no such device, it
 * cannot share memory with the host while it works, or managed memory is disabled. NVFP4_diagnose() says which.
 */
NVFP4_API
NVFP4_Status NVFP4_memory_can_be_managed(int32_t device_index,
                                         int32_t *can);

/**
 * Applies the policy to a tensor that the CUDA device `device_index` will use, such as a weight. `out` gets a copy in
 * managed memory, prefetched to the device, or another handle of the tensor itself, which stays where it is. `read_mostly`
 * is 1 if it will be read far more often than written. The call fails if the policy requires managed memory and there is
 * none.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_by_managed_policy(const NVFP4_Tensor *tensor,
                                            int32_t device_index,
                                            int32_t read_mostly,
                                            NVFP4_Tensor **out);

/**
 * @defgroup tensor Tensors: typed, shaped views of memory
 *
 * A tensor is immutable in type and shape and may be used by several threads at once. The host must keep its memory
 * readable and unchanged while a call uses it.
 *
 * A tensor may be in host memory, in the memory of a CUDA device, or in managed memory, which counts as a device's here.
 * Computations with it run on its device and give tensors there; a function that works on host memory alone refuses it
 * with #NVFP4_UNSUPPORTED. Calls use device memory in the order of the legacy default stream: after the work that the
 * process enqueued there before the call, and before the work that it enqueues there later. A host that uses other streams
 * waits for them before a call, and lets them wait for the default stream after it.
 */

/**
 * Makes a tensor over the host's memory, without a copy.
 *
 * - `data`: the first element, aligned to its type. The library only reads it; it is not const because NVFP4_tensor_data()
 *   and DLPack hand it out for writing. NVFP4_tensor_from_host_read_only() is for memory that must not be written.
 * - `shape`, `rank`: the sizes, outermost first, and their number, at most 8; NULL and 0 for a scalar.
 * - `strides`: `rank` strides in elements, none negative, or NULL for a contiguous row-major tensor.
 * - `dtype`: one of NVFP4_DTYPE_*.
 * - `deleter`, `user`: the deleter is called as deleter(data, user) when the library no longer uses the memory. That may
 *   be after the release of the tensor, because other objects may share it. NULL if the memory outlives every use. Not
 *   called if this function fails.
 * - `out`: the tensor, one reference for the caller.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_host(void *data,
                                    const int64_t *shape,
                                    int32_t rank,
                                    const int64_t *strides,
                                    int32_t dtype,
                                    NVFP4_Deleter deleter,
                                    void *user,
                                    NVFP4_Tensor **out);

/**
 * As NVFP4_tensor_from_host(), over memory that must not be written: the tensor and its views are read-only, which
 * NVFP4_tensor_is_read_only() and NVFP4_tensor_to_dlpack_versioned() report.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_host_read_only(const void *data,
                                              const int64_t *shape,
                                              int32_t rank,
                                              const int64_t *strides,
                                              int32_t dtype,
                                              NVFP4_Deleter deleter,
                                              void *user,
                                              NVFP4_Tensor **out);

/**
 * Makes a tensor over memory of the CUDA device `device_index`, or over managed memory for it, without a copy. The
 * parameters are those of NVFP4_tensor_from_host(), with `data` an address on the device. When `deleter` is called, the
 * library's work with the memory may still be running, but comes before anything that is enqueued on the legacy default
 * stream from then on.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_device(void *data,
                                      const int64_t *shape,
                                      int32_t rank,
                                      const int64_t *strides,
                                      int32_t dtype,
                                      int32_t device_index,
                                      NVFP4_Deleter deleter,
                                      void *user,
                                      NVFP4_Tensor **out);

/**
 * Makes a contiguous tensor of zeros in the library's own memory, aligned to at least 64 bytes: on the host
 * (#NVFP4_DEVICE_CPU and 0) or on a CUDA device (#NVFP4_DEVICE_CUDA and its number).
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_empty(const int64_t *shape,
                                int32_t rank,
                                int32_t dtype,
                                int32_t device_type,
                                int32_t device_index,
                                NVFP4_Tensor **out);

/** Copies a tensor, wherever it is, to host memory or to the memory of a CUDA device, as a contiguous row-major tensor. */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_to_device(const NVFP4_Tensor *tensor,
                                         int32_t device_type,
                                         int32_t device_index,
                                         NVFP4_Tensor **out);

/**
 * Waits until all work that calls have enqueued on a device has run, and fails if the device has found an error in it: see
 * ASYNCHRONOUS ERRORS above. After #NVFP4_OK the results of all earlier calls are valid. On the host (#NVFP4_DEVICE_CPU
 * and 0) there is never anything to wait for.
 */
NVFP4_API
NVFP4_Status NVFP4_device_synchronize(int32_t device_type,
                                      int32_t device_index);

/**
 * Makes another view of a tensor's memory, which the view keeps alive: a transpose, a slice, another shape. `offset` is in
 * elements from the first one of `tensor`; `strides`, in elements, may be NULL for contiguous row-major. A view that would
 * exceed the tensor's memory is #NVFP4_INVALID_ARGUMENT.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_view(const NVFP4_Tensor *tensor,
                               const int64_t *shape,
                               int32_t rank,
                               const int64_t *strides,
                               int64_t offset,
                               NVFP4_Tensor **out);

/** Adds a reference to a tensor. */
NVFP4_API NVFP4_Status NVFP4_tensor_retain(NVFP4_Tensor *tensor);

/** Gives up a reference to a tensor. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_tensor_release(NVFP4_Tensor *tensor);

/** Writes the element type, one of NVFP4_DTYPE_*. */
NVFP4_API NVFP4_Status NVFP4_tensor_dtype(const NVFP4_Tensor *tensor, int32_t *dtype);

/**
 * Writes where the memory is: one of NVFP4_DEVICE_*, and the number of the device of that type. Managed memory belongs to
 * the CUDA device that works with it; NVFP4_is_managed_tensor() recognises it.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_device(const NVFP4_Tensor *tensor,
                                 int32_t *device_type,
                                 int32_t *device_index);

/** Copies the sizes, outermost first. Writes the number of dimensions to `rank`; see ARRAYS OUT above. */
NVFP4_API
NVFP4_Status NVFP4_tensor_shape(const NVFP4_Tensor *tensor,
                                int64_t *shape,
                                size_t capacity,
                                size_t *rank);

/** Copies the strides in elements. Writes the number of dimensions to `rank`; see ARRAYS OUT above. */
NVFP4_API
NVFP4_Status NVFP4_tensor_strides(const NVFP4_Tensor *tensor,
                                  int64_t *strides,
                                  size_t capacity,
                                  size_t *rank);

/**
 * Writes the address of the first element, a device address if the memory is on a device. Valid as long as the caller has a reference to
 * the tensor. Do not write through it while a call uses the tensor, or ever if the tensor is read-only. Not to be used if the tensor has
 * no elements.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_data(const NVFP4_Tensor *tensor,
                               void **data);

/**
 * Writes 1 to `read_only` if the memory must not be written, as its lender declared, else 0. The library itself never writes to a tensor
 * that it is given; results are new tensors.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_is_read_only(const NVFP4_Tensor *tensor,
                                       int32_t *read_only);

/** Writes the bytes of the elements without gaps, which NVFP4_tensor_copy_to_host() copies. */
NVFP4_API NVFP4_Status NVFP4_tensor_bytes(const NVFP4_Tensor *tensor, uint64_t *bytes);

/**
 * Copies the elements, from any place, to `destination` in host memory, contiguous and row-major. `bytes` must be exactly the number that
 * NVFP4_tensor_bytes() writes. From a GPU the call waits for the copy; if it then fails because of an earlier call (see ASYNCHRONOUS
 * ERRORS above), `destination` has been written.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_to_host(const NVFP4_Tensor *tensor,
                                       void *destination,
                                       size_t bytes);

/**
 * Converts the elements, whatever their type, to float and copies them to `destination` in host memory, contiguous and
 * row-major, as NVFP4_tensor_copy_to_host() does. `elements` must be exactly the tensor's number of elements. Packed 4-bit
 * codes cannot be converted: use NVFP4_tensor_dequantize().
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_as_float(const NVFP4_Tensor *tensor,
                                        float *destination,
                                        size_t elements);

/**
 * Takes ownership of a DLPack tensor in host memory (kDLCPU), CUDA memory (kDLCUDA) or managed memory (kDLCUDAManaged),
 * without a copy. Its deleter is called when the library no longer uses the memory, on any thread. If this function fails,
 * the DLPack tensor stays the caller's.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_dlpack(struct DLManagedTensor *managed,
                                      NVFP4_Tensor **out);

/**
 * As NVFP4_tensor_from_dlpack(), for a versioned DLPack tensor. With the flag DLPACK_FLAG_BITMASK_READ_ONLY the tensor and its views are
 * read-only: see NVFP4_tensor_is_read_only(). #NVFP4_UNSUPPORTED for a major version other than 1 (only the version is read then), for
 * padded elements of fewer than 8 bits, and for flags that this library does not know.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_dlpack_versioned(struct DLManagedTensorVersioned *managed,
                                                NVFP4_Tensor **out);

/**
 * Makes a DLPack tensor over the tensor's memory, without a copy; managed memory is exported as kDLCUDA. It keeps the
 * memory alive until its consumer calls its deleter, which may be after the release of `tensor`. A read-only tensor is
 * #NVFP4_UNSUPPORTED, because this form of DLPack has no read-only flag.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_to_dlpack(const NVFP4_Tensor *tensor,
                                    struct DLManagedTensor **out);

/**
 * As NVFP4_tensor_to_dlpack(), in the versioned form, with the read-only flag if the tensor is read-only. The version is 1.0, or 1.1 for
 * float8 and float4, which 1.1 introduced.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_to_dlpack_versioned(const NVFP4_Tensor *tensor,
                                              struct DLManagedTensorVersioned **out);

/**
 * @defgroup quantize Number formats: NVFP4 and NF4, both ways
 *
 * An NVFP4 tensor has three parts: 4-bit codes (E2M1), two to a byte with the even index in the low nibble; block scales
 * (E4M3), one for each 16 values along the last dimension K; and one float, the global scale. A value is code x block
 * scale x global scale. NVFP4 is converted where its tensors are, on the CPU or on a GPU; NF4 on the CPU only, in host
 * memory.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_QuantizeOptions). */
NVFP4_API
NVFP4_Status NVFP4_quantize_options_init(NVFP4_QuantizeOptions *options,
                                         uint32_t struct_size);

/**
 * Quantizes a tensor along its last dimension K to NVFP4.
 *
 * - `input`: `[.., K]` of a floating type, any strides; K a multiple of 16. On a GPU not float64.
 * - `options`: NULL for the defaults.
 * - `codes`: uint8 `[.., K / 2]`.
 * - `scales`: float8_e4m3fn `[.., K / 16]`, or one dimension if swizzled.
 * - `global_scale`: the global scale; 1 with a single level.
 *
 * A tensor on a GPU is quantized there, to the same bits as on the CPU: in one pass for a single level, in two for two
 * levels, and after a copy if its rows are unevenly spaced or not aligned to 16 bytes. With two levels the call waits for
 * the global scale, and fails itself if a value is not finite. With a single level it does not wait, and a later call
 * fails: see ASYNCHRONOUS ERRORS above.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_quantize(const NVFP4_Tensor *input,
                                   const NVFP4_QuantizeOptions *options,
                                   NVFP4_Tensor **codes,
                                   NVFP4_Tensor **scales,
                                   float *global_scale);

/**
 * Dequantizes NVFP4 to `[.., K]` of the floating type `dtype`: code x block scale x global_scale, exactly, then rounded to float and to
 * `dtype`. On a CUDA device the call waits until the scales have been checked, but not for the values.
 *
 * - `codes`: uint8 or float4_e2m1fn_x2 `[.., K / 2]`.
 * - `scales`: float8_e4m3fn, or uint8 holding its bytes, in the layout `scale_layout`, one of NVFP4_SCALES_*. A scale that
 *   is NaN or negative is an error.
 * - `global_scale`: finite and not negative.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_dequantize(const NVFP4_Tensor *codes,
                                     const NVFP4_Tensor *scales,
                                     float global_scale,
                                     int32_t scale_layout,
                                     int32_t dtype,
                                     NVFP4_Tensor **out);

/**
 * Quantizes a tensor, flattened, to NF4 in the layout of bitsandbytes: blocks of `block` values (64 is usual), two codes
 * to a byte, the first in the high nibble. The tensor is in host memory and has n values.
 *
 * - `codes`: uint8 `[ceil(n / 2)]`.
 * - `absmax`: float32 `[ceil(n / block)]`, the largest magnitude of each block.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_quantize_nf4(const NVFP4_Tensor *input,
                                       int64_t block,
                                       NVFP4_Tensor **codes,
                                       NVFP4_Tensor **absmax);

/**
 * Dequantizes NF4, in host memory, to a tensor of the given shape and floating type. `codes` and `absmax` are as
 * NVFP4_tensor_quantize_nf4() writes them. `quant_map` holds the 16 values of the codes; NULL for the standard ones.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_dequantize_nf4(const NVFP4_Tensor *codes,
                                         const NVFP4_Tensor *absmax,
                                         const NVFP4_Tensor *quant_map,
                                         int64_t block,
                                         const int64_t *shape,
                                         int32_t rank,
                                         int32_t dtype,
                                         NVFP4_Tensor **out);

/** Reorders row-major block scales `[rows, K / 16]` to #NVFP4_SCALES_SWIZZLED. */
NVFP4_API NVFP4_Status NVFP4_scales_swizzle(const NVFP4_Tensor *scales, NVFP4_Tensor **out);

/** Reorders swizzled block scales to row-major `[rows, k_blocks]`, where k_blocks is K / 16. */
NVFP4_API
NVFP4_Status NVFP4_scales_unswizzle(const NVFP4_Tensor *scales,
                                    int64_t rows,
                                    int64_t k_blocks,
                                    NVFP4_Tensor **out);

/**
 * Quantizes a weight `[.., K]` for training in 4 bits, with block scales alone: NVFP4_quantize() with a status. `qdata`
 * and `scale` are described there.
 */
NVFP4_API
NVFP4_Status NVFP4_quantize_packed(const NVFP4_Tensor *weight,
                                   NVFP4_Tensor **qdata,
                                   NVFP4_Tensor **scale);

/** Dequantizes the result of NVFP4_quantize_packed() to `[.., K]` of the floating type `dtype`. */
NVFP4_API
NVFP4_Status NVFP4_dequantize_packed(const NVFP4_Tensor *qdata,
                                     const NVFP4_Tensor *scale,
                                     int32_t dtype,
                                     NVFP4_Tensor **out);

/**
 * Rounds a weight `[.., K]` to 4 bits and back, for the forward pass of training in 4 bits: the values that
 * NVFP4_quantize_packed() stores, in the weight's own type. The gradient of these values is used unchanged as the gradient
 * of the weight (straight-through estimator).
 * - `keep`: 0 to compute the values in every call. 1 to cache them, for a weight that does not change: the first call computes
 *   them and waits, and later calls return a handle of the same tensor, which must not be written. They are kept as long as the
 *   weight's memory lives, or until NVFP4_ste_clear().
 */
NVFP4_API
NVFP4_Status NVFP4_ste_weight(const NVFP4_Tensor *weight,
                              int32_t keep,
                              NVFP4_Tensor **out);

/**
 * Drops the values that NVFP4_ste_weight() has cached: call it when weights have changed. NVFP4_empty_cache() drops those
 * of weights that no longer exist.
 */
NVFP4_API
NVFP4_Status NVFP4_ste_clear(void);

/**
 * @defgroup linear Products with weights in 4 bits
 *
 * There is no silent fallback: activations are quantized only if an option says so, and a weight is decoded to a dense one only if the
 * compute path allows it. NVFP4_weight_report() reports the chosen backend, and the reason if it is a fallback. There are three backends:
 * "nvfp4-kernel" and "nf4-kernel" read the 4-bit codes; "dequant-matmul" decodes the weight once, when it is prepared, and stores it
 * dense. In this version the CPU and CUDA devices have "nvfp4-kernel" and "dequant-matmul".
 *
 * A product is computed where its tensors are, and its result is there too: on the CPU for tensors in host memory, and on
 * a CUDA device for tensors in that device's memory or in managed memory, in stream order as the tensor chapter states.
 * The one exception is an input in host memory for a weight on a CUDA device: it is copied there, and the result is copied
 * back. Otherwise the tensors of a call and its weight must be in the same place; if not, the call fails with
 * #NVFP4_INVALID_ARGUMENT and a message that names both places. On a CUDA device tensors may be float16, bfloat16 or
 * float32, but not float64.
 *
 * A weight for a CUDA device is prepared from tensors in host memory, or in that device's memory without a copy through
 * the host. The call that prepares it waits for the device, and fails if a block scale is NaN or negative or a value of a
 * dense weight is not finite. Products with the weight need no such checks.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_WeightOptions). */
NVFP4_API NVFP4_Status NVFP4_weight_options_init(NVFP4_WeightOptions *options, uint32_t struct_size);

/**
 * Says as JSON which backend a weight of `format` (#NVFP4_FORMAT_NVFP4 or #NVFP4_FORMAT_NF4) would get with these options,
 * or fails as preparing it would. `options`: NULL for the defaults.
 *
 * - "format": "nvfp4" or "nf4".
 * - "backend": "nvfp4-kernel", "nf4-kernel" or "dequant-matmul".
 * - "path": "Auto", "KernelOnly", "KernelOrFallback" or "DequantMatmulOnly".
 * - "device": its name, as in NVFP4_diagnose().
 * - "fallback_reason": why it is not the kernel of the format, if that was wanted but could not be chosen; else null.
 */
NVFP4_API
NVFP4_Status NVFP4_backend_select(int32_t format,
                                  const NVFP4_WeightOptions *options,
                                  char *buffer,
                                  size_t capacity,
                                  size_t *length);

/**
 * Prepares the NVFP4 weight `[N, K]` for products: copies it in the order that the kernels read. The tensors may be
 * released afterwards. The weight is on the CPU, or on the CUDA device whose memory the tensors are in. The parameters are
 * those of NVFP4_tensor_dequantize(). NVFP4_weight_create_nvfp4() is the same with options.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_create(const NVFP4_Tensor *codes,
                                 const NVFP4_Tensor *scales,
                                 float global_scale,
                                 int32_t scale_layout,
                                 NVFP4_Weight **out);

/**
 * Prepares the NVFP4 weight `[N, K]` for products, as `options` say. NULL stands for the defaults, with the CUDA device
 * whose memory the tensors are in, if they are on one. The tensors may be released afterwards. A decoded weight takes 16
 * or 32 bits for each value: see NVFP4_weight_size().
 *
 * - `codes`, `scales`, `global_scale`: as NVFP4_tensor_dequantize() takes them.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_create_nvfp4(const NVFP4_Tensor *codes,
                                       const NVFP4_Tensor *scales,
                                       float global_scale,
                                       const NVFP4_WeightOptions *options,
                                       NVFP4_Weight **out);

/**
 * Prepares the NF4 weight `[n, k]`, whose tensors are in host memory, for products, as `options` say; NULL for the
 * defaults. `k` must be a multiple of 16. The tensors may be released afterwards. In this version no device has a kernel
 * for NF4: the weight is decoded to 16 or 32 bits for each value, or refused if the compute path is kernel-only.
 *
 * - `codes`: uint8, `n * k / 2` elements in any shape, the first code of a byte in the high nibble.
 * - `absmax`: of a floating type, one scale for each `block` values of the flattened weight.
 * - `quant_map`: the 16 values of the codes; NULL takes the standard ones.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_create_nf4(const NVFP4_Tensor *codes,
                                     const NVFP4_Tensor *absmax,
                                     const NVFP4_Tensor *quant_map,
                                     int64_t block,
                                     int64_t n,
                                     int64_t k,
                                     const NVFP4_WeightOptions *options,
                                     NVFP4_Weight **out);

/**
 * Prepares the dense weight `[N, K]` of a floating type for products, on the CPU or on the CUDA device whose memory it is in. K
 * must be a multiple of 16.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_create_dense(const NVFP4_Tensor *weight,
                                       NVFP4_Weight **out);

/**
 * Describes a prepared weight and its backend, as JSON: the keys of NVFP4_backend_select(), and "n", "k", "stored"
 * ("nvfp4", "f32", "f16" or "bf16") and "bytes" in memory. A weight of NVFP4_weight_create_dense() has format "dense",
 * backend "dense-matmul" and no path. Later versions may add keys.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_report(const NVFP4_Weight *weight,
                                 char *buffer,
                                 size_t capacity,
                                 size_t *length);

/** Adds a reference to a weight. */
NVFP4_API NVFP4_Status NVFP4_weight_retain(NVFP4_Weight *weight);

/** Gives up a reference to a weight. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_weight_release(NVFP4_Weight *weight);

/** Writes a weight's N (output features), K (input features) and bytes in memory. */
NVFP4_API
NVFP4_Status NVFP4_weight_size(const NVFP4_Weight *weight,
                               int64_t *n,
                               int64_t *k,
                               uint64_t *bytes);

/**
 * Multiplies `input` `[.., K]` by `weight` `[N, K]` transposed, accumulating in float.
 *
 * - `input`: of a floating type, any strides; in host memory, or in the memory of the weight's CUDA device.
 * - `activations`: one of NVFP4_ACTIVATIONS_*.
 * - `dtype`: the floating type of the result `[.., N]`, which is in the memory that the input is in.
 *
 * The call does not wait for the CUDA device if the input is on it. On the CPU, a row of the result has the same bits
 * whatever other rows are in the call, and on any number of threads. On a GPU the same call on the same machine gives the
 * same bits.
 */
NVFP4_API
NVFP4_Status NVFP4_linear(const NVFP4_Weight *weight,
                          const NVFP4_Tensor *input,
                          int32_t activations,
                          int32_t dtype,
                          NVFP4_Tensor **out);

/**
 * Multiplies two NVFP4 matrices (W4A4): a `[M, K]` times b `[N, K]` transposed, as `[M, N]` of the floating type `dtype`.
 * The result is the product of the exact decoded values, accumulated in float; only the order of summation is unspecified.
 * NVFP4_scaled_mm() is the same without global scales. The tensors are as for NVFP4_tensor_dequantize().
 *
 * All four tensors must be in the same place, and the result is there too. On a CUDA device the call does not wait: scales
 * that are NaN or negative fail a later call, see ASYNCHRONOUS ERRORS above. Codes and scales that are not contiguous, or
 * not aligned to 16 and 4 bytes, are copied first.
 */
NVFP4_API
NVFP4_Status NVFP4_matmul(const NVFP4_Tensor *a_codes,
                          const NVFP4_Tensor *a_scales,
                          float a_global_scale,
                          const NVFP4_Tensor *b_codes,
                          const NVFP4_Tensor *b_scales,
                          float b_global_scale,
                          int32_t scale_layout,
                          int32_t dtype,
                          NVFP4_Tensor **out);

/**
 * @defgroup schema Schemas: finding and checking the 4-bit weights in a set of named tensors
 *
 * Only names, types and shapes are read, so hosts need not pass the tensors themselves. Recognized are NVFP4 of TorchSharp hosts (`.qdata`
 * and `.scale`, with or without `.weight` before), ModelOpt, compressed-tensors and torchao, and NF4 of TorchSharp hosts (`.weight`,
 * `.absmax` and `.quant_map`) and bitsandbytes (`.weight`, `.weight.absmax` and so on). One part suffices to find a weight; missing parts
 * are then reported as problems.
 */

/**
 * Finds the 4-bit weights of a set of tensors.
 *
 * - `tensors`, `count`: the set; names must be unique.
 * - `tensor_size`: sizeof(NVFP4_NamedTensor), as the caller knows it.
 * - `prefix`, `prefix_length`: examines only the tensor of this name and those whose names begin with it and a dot, such
 *   as those of one layer; NULL and 0 for all.
 * - `result`: the caller sets its struct_size. A set without 4-bit weights has the format #NVFP4_FORMAT_NONE.
 */
NVFP4_API
NVFP4_Status NVFP4_schema_detect(const NVFP4_NamedTensor *tensors,
                                 size_t count,
                                 size_t tensor_size,
                                 const char *prefix,
                                 size_t prefix_length,
                                 NVFP4_SchemaResult *result);

/**
 * Describes the 4-bit weights of a set of tensors, as JSON: "format" ("none", "nvfp4", "nf4" or "mixed"), "tensors" (their
 * number), "problems", and "weights", each with its "name", "format", "convention", "keys" by role, "missing" keys,
 * "extra" keys of its module, "out_features", "in_features", "block" (null if the shapes do not determine it) and
 * "faults". The parameters are those of NVFP4_schema_detect(). Later versions may add keys.
 */
NVFP4_API
NVFP4_Status NVFP4_schema_report(const NVFP4_NamedTensor *tensors,
                                 size_t count,
                                 size_t tensor_size,
                                 const char *prefix,
                                 size_t prefix_length,
                                 char *buffer,
                                 size_t capacity,
                                 size_t *length);

/**
 * Checks the 4-bit weights of a set of tensors: no part may be missing, and types and shapes must fit together. The
 * message lists all problems, missing tensors first. #NVFP4_NOT_FOUND if there is no 4-bit weight, #NVFP4_INVALID_ARGUMENT
 * if one has a problem. The parameters are those of NVFP4_schema_detect().
 */
NVFP4_API
NVFP4_Status NVFP4_schema_validate(const NVFP4_NamedTensor *tensors,
                                   size_t count,
                                   size_t tensor_size,
                                   const char *prefix,
                                   size_t prefix_length);

/**
 * @defgroup pool Pools: threads of the host that work for models
 *
 * A model on the CPU divides its work among threads of the library. A host that has a pool of threads already, pinned to cores or shared with
 * other work, gives the model a pool made of that: the library then schedules tasks on it, and starts no threads for the model's passes.
 * Loading starts threads of its own, which end with it, and each generation of a queue has one.
 *
 * The thread that calls the model works too, and no call waits for a task that has not begun. A host may therefore run tasks late, on fewer
 * threads than were asked for, or not at all: calls only take longer. Results do not depend on it.
 */

/**
 * Makes a pool of the host's threads, for `pool` of #NVFP4_LoadOptions; any number of models may share it. In the child of a fork its models
 * run on the calling threads alone, because the child does not have the host's.
 *
 * - `threads`: most threads that work at a time for a call, the calling one included; 0 for as many as NVFP4_set_threads() says.
 * - `submit`: schedules a task. `release`: called when `user` is no longer used, but not if this function fails; NULL for none.
 *
 * Errors: #NVFP4_INVALID_ARGUMENT for a NULL `submit`, and for `threads` out of range.
 */
NVFP4_API
NVFP4_Status NVFP4_pool_create(int32_t threads,
                               NVFP4_PoolSubmit submit,
                               void *user,
                               NVFP4_PoolRelease release,
                               NVFP4_Pool **out);

/** Adds a reference to a pool. */
NVFP4_API NVFP4_Status NVFP4_pool_retain(NVFP4_Pool *pool);

/** Gives up a reference to a pool. After the last one the handle is stale; models that have the pool keep it. */
NVFP4_API NVFP4_Status NVFP4_pool_release(NVFP4_Pool *pool);

/**
 * @defgroup model Models: weights on disk, and weights, tokenizer and chat template in memory
 *
 * A model is immutable. Any number of sessions, on any threads, may run it at once: their tokens go through the weights together, so that
 * threads that generate get the speed of NVFP4_session_step_sample().
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_LoadOptions). */
NVFP4_API NVFP4_Status NVFP4_load_options_init(NVFP4_LoadOptions *options, uint32_t struct_size);

/**
 * Loads a model: a directory, or a `.safetensors`, `.dat` or `.gguf` file.
 *
 * - `path`, `path_length`: see TEXT above.
 * - `options`: NULL for the defaults.
 * - `quantize`: how to quantize dense weights to NVFP4 while loading; NULL keeps weights as they are stored.
 */
NVFP4_API
NVFP4_Status NVFP4_model_load(const char *path,
                              size_t path_length,
                              const NVFP4_LoadOptions *options,
                              const NVFP4_QuantizeOptions *quantize,
                              NVFP4_Model **out);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_PlanOptions). */
NVFP4_API NVFP4_Status NVFP4_plan_options_init(NVFP4_PlanOptions *options, uint32_t struct_size);

/**
 * Says what a model and its sessions take of memory, without loading it: reads the headers of its files, and takes milliseconds
 * however large it is. Weights and blocks are exact; working memory is that of the largest passes, to which it grows as they come.
 * Any number of threads may call it at once. Errors are those of NVFP4_model_load() for what no device can run, for options that do
 * not go together, and for a device that is not there; tensors and tokenizer are not read, so their faults are not found.
 *
 * - `path`, `path_length`: see TEXT above.
 * - `load`, `quantize`: as NVFP4_model_load() will have them; NULL for the defaults, and for weights as they are stored. With
 *   #NVFP4_DEVICE_AUTO the plan is that of the device that it would choose now. `call` is ignored.
 * - `options`: NULL for the defaults.
 * - `out`: the plan; its `struct_size` says how much of it the caller knows.
 */
NVFP4_API
NVFP4_Status NVFP4_model_plan(const char *path,
                              size_t path_length,
                              const NVFP4_LoadOptions *load,
                              const NVFP4_QuantizeOptions *quantize,
                              const NVFP4_PlanOptions *options,
                              NVFP4_Plan *out);

/** Adds a reference to a model. */
NVFP4_API NVFP4_Status NVFP4_model_retain(NVFP4_Model *model);

/** Gives up a reference to a model. After the last one the handle is stale; sessions keep the weights. */
NVFP4_API NVFP4_Status NVFP4_model_release(NVFP4_Model *model);

/**
 * Describes a model, as JSON: architecture, device, device_choice (one line that says why this device, for
 * #NVFP4_DEVICE_AUTO; else null), parameters (their number), weight_bytes, formats, sizes, kv_bytes_per_token,
 * stop_tokens. Later versions may add keys.
 */
NVFP4_API
NVFP4_Status NVFP4_model_info(const NVFP4_Model *model,
                              char *buffer,
                              size_t capacity,
                              size_t *length);

/**
 * Writes what a model has run since it was loaded, and what it holds now. From any thread at any time, in callbacks too, and without waiting
 * for a pass.
 *
 * - `out`: `struct_size` must be set; the caller owns it.
 */
NVFP4_API
NVFP4_Status NVFP4_model_statistics(const NVFP4_Model *model,
                                    NVFP4_ModelStatistics *out);

/**
 * Writes the prefix cache to a file: the keys, values and recurrent states of the blocks of tokens that sessions share, with these tokens,
 * whether sessions use them or the cache alone holds them. NVFP4_model_restore_prefixes() gives them to a later process. An existing file
 * is replaced only when the new one is complete; a call that fails leaves no file, and no cached block is lost. From any thread at any
 * time: sessions run meanwhile, and what gives way to them before it is read is not in the file.
 *
 * #NVFP4_INVALID_ARGUMENT for a model that was loaded with `prefix_cache` 0; #NVFP4_IO if the file cannot be written.
 *
 * - `path`, `path_length`: see TEXT above.
 * - `call`: cancels the call and reports the bytes written; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_model_save_prefixes(const NVFP4_Model *model,
                                       const char *path,
                                       size_t path_length,
                                       const NVFP4_CallOptions *call);

/**
 * Fills free memory of the prefix cache with a file of NVFP4_model_save_prefixes(), so that sessions that begin with its tokens run only the
 * rest, as in the process that saved it. The file may come from another device. If there is not room for all of it, what was used last is
 * restored; nothing gives way to it, and what is there already stays. `blocks_cached` of NVFP4_model_statistics() says what the cache
 * holds. From any thread at any time: sessions run meanwhile, and begin with what has been restored.
 *
 * The checksum of a file finds damage, not forgery: sessions begin with what it holds as if the model had run it, so restore files that you
 * trust as you trust the weights.
 *
 * #NVFP4_INVALID_ARGUMENT if other weights or other activations made the file, or if the model keeps no prefixes: it was loaded with
 * `prefix_cache` 0, or with neither `prefix_bytes` nor `kv_bytes`. #NVFP4_CORRUPT_FILE if the file is damaged or cut off,
 * #NVFP4_UNSUPPORTED if it is of another version, or of a type of keys that the device does not keep. The cache is then as it was. A call
 * that is cancelled leaves what it has restored.
 *
 * - `path`, `path_length`: see TEXT above.
 * - `call`: cancels the call and reports the bytes read: the file is read twice, first to check it; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_model_restore_prefixes(const NVFP4_Model *model,
                                          const char *path,
                                          size_t path_length,
                                          const NVFP4_CallOptions *call);

/** Writes the size of the vocabulary, which is the number of logits for a token. */
NVFP4_API NVFP4_Status NVFP4_model_vocab_size(const NVFP4_Model *model, size_t *size);

/**
 * Converts text to token ids. Names of special tokens in the text, such as `<|im_end|>`, become those tokens; for text of users use
 * NVFP4_model_tokenize_plain(), or pass it as messages to a session. `add_special` 1 adds the special tokens that the model expects around
 * a text, often a first one; a rendered chat has them already. Writes the number of tokens to `count`; see ARRAYS OUT above. Asking for
 * the number first does not double the work: the tokens are kept for this thread's next call with the same text.
 */
NVFP4_API
NVFP4_Status NVFP4_model_tokenize(const NVFP4_Model *model,
                                  const char *text,
                                  size_t text_length,
                                  int32_t add_special,
                                  int32_t *tokens,
                                  size_t capacity,
                                  size_t *count);

/**
 * Converts plain text, such as a user's, to token ids: the name of a special token in it becomes ordinary tokens. Otherwise as
 * NVFP4_model_tokenize(); a text without such names gives the same tokens. #NVFP4_UNSUPPORTED if the tokenizer has no other way to write
 * such a name.
 */
NVFP4_API
NVFP4_Status NVFP4_model_tokenize_plain(const NVFP4_Model *model,
                                        const char *text,
                                        size_t text_length,
                                        int32_t add_special,
                                        int32_t *tokens,
                                        size_t capacity,
                                        size_t *count);

/**
 * Converts token ids to text. `skip_special` 1 leaves out special tokens such as `<|im_end|>`. Ids in the model's vocabulary that its
 * tokenizer lacks, as padding of many models, give no text; ids that neither has are #NVFP4_INVALID_ARGUMENT. Bytes that are not valid
 * UTF-8 become U+FFFD: for a stream of tokens use a detokenizer or the text of a generation, which wait for whole characters. Asking for
 * the length first does not double the work, as for NVFP4_model_tokenize().
 */
NVFP4_API
NVFP4_Status NVFP4_model_detokenize(const NVFP4_Model *model,
                                    const int32_t *tokens,
                                    size_t count,
                                    int32_t skip_special,
                                    char *buffer,
                                    size_t capacity,
                                    size_t *length);

/**
 * Writes the bytes that a token adds to a text. They may be a part of a character. The bytes of all tokens of a text, one after the other, are
 * that text, as the tokenizer's normalizer has changed it: a sentencepiece tokenizer writes a space before the first word, which
 * NVFP4_model_detokenize() leaves out again, and others compose characters (NFC). Text that the vocabulary cannot spell is lost: its token is
 * the special one for unknown text. A special token has the bytes of its name. Ids in the model's vocabulary that its tokenizer lacks have
 * none; for ids that neither has, #NVFP4_INVALID_ARGUMENT names the range.
 *
 * - `buffer`, `capacity`, `length`: see ARRAYS OUT above.
 * - `is_special`: 1 if the token is special, so that its bytes are a name and no text, else 0. May be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_model_token_bytes(const NVFP4_Model *model,
                                     int32_t token,
                                     uint8_t *buffer,
                                     size_t capacity,
                                     size_t *length,
                                     int32_t *is_special);

/**
 * Writes the special tokens of a model, and other tokens that have a role, in order of their ids: those that its tokenizer marks as special;
 * those that `tokenizer_config.json`, `special_tokens_map.json`, the config or GGUF metadata name; stop tokens; and the marks of reasoning,
 * tool calls and turns that the library recognises by the chat template, as far as each is one token.
 *
 * - `tokens`: room for `capacity` elements of `token_size` bytes: sizeof(NVFP4_SpecialToken).
 * - `count`: see ARRAYS OUT above.
 */
NVFP4_API
NVFP4_Status NVFP4_model_special_tokens(const NVFP4_Model *model,
                                        NVFP4_SpecialToken *tokens,
                                        size_t token_size,
                                        size_t capacity,
                                        size_t *count);

/**
 * Renders a conversation with the model's chat template (ChatML if it has none): `count` messages, each of `message_size`
 * bytes, which is sizeof(NVFP4_Message). `add_generation_prompt` 1 appends the beginning of the assistant's answer. Asking
 * for the length first does not double the work, as for NVFP4_model_tokenize(). In this text, names of special tokens within
 * messages look like the template's own: do not tokenize it if the messages are untrusted, but let a session run them.
 */
NVFP4_API
NVFP4_Status NVFP4_model_render_chat(const NVFP4_Model *model,
                                     const NVFP4_Message *messages,
                                     size_t count,
                                     size_t message_size,
                                     int32_t add_generation_prompt,
                                     char *buffer,
                                     size_t capacity,
                                     size_t *length);

/**
 * @defgroup model_files Models from memory: files that the host gives under their names, as bytes or behind a function that reads them
 *
 * The library uses a file until it calls `release`, once for each file that a call was given, whatever comes of the call. It calls it as soon
 * as it can: when loading ends, for all files of a model on a GPU and of one whose output head is its embedding. Other models on the CPU read
 * rows of their embedding from its file while tokens run: what they use is released after the last reference to the model and its sessions.
 */

/**
 * Loads a model from files that the host gives: those of a model's directory by their names - config.json, tokenizer.json and others of
 * text, the weights as `.safetensors` with or without an index, as `.gguf` or as `.dat` - as NVFP4_model_load() loads a directory. Nothing
 * is written, and bytes in memory are not copied as a whole. Sessions that were saved with a model from disk are restored with the same
 * model from memory, and the other way round.
 *
 * - `files`, `count`: the files, at least one, each of `file_size` bytes, which is sizeof(NVFP4_ModelFile).
 * - `options`: NULL for the defaults.
 * - `quantize`: how to quantize dense weights to NVFP4 while loading; NULL keeps weights as they are stored.
 *
 * `release` of every file is called once, also if the call fails; only if `files` is no array of elements of `file_size` bytes, the library
 * cannot know the functions and calls none. A `read` that fails, or reads less, ends the call with #NVFP4_IO and a message with the file, the
 * offset and the bytes. A later call whose tokens need the file fails the same way.
 */
NVFP4_API
NVFP4_Status NVFP4_model_load_files(const NVFP4_ModelFile *files,
                                    size_t count,
                                    size_t file_size,
                                    const NVFP4_LoadOptions *options,
                                    const NVFP4_QuantizeOptions *quantize,
                                    NVFP4_Model **out);

/**
 * @defgroup convert Converting models: from disk to NVFP4 on disk, by their weights alone or calibrated by text
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ConvertOptions). */
NVFP4_API NVFP4_Status NVFP4_convert_options_init(NVFP4_ConvertOptions *options, uint32_t struct_size);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_CalibrateOptions). */
NVFP4_API
NVFP4_Status NVFP4_calibrate_options_init(NVFP4_CalibrateOptions *options,
                                          uint32_t struct_size);

/**
 * Converts a model on disk to NVFP4 on disk, one tensor at a time: linear weights are quantized, the rest is kept. The destination is
 * replaced as a whole once the new model is complete; a call that fails leaves it unchanged, and leaves no other files behind. A model
 * that NVFP4_model_load() would refuse is refused with the same message, before anything is written if no weights have to be read to find
 * out.
 *
 * A calibration keeps its finished blocks in a folder beside the destination, with `.calibration` after its name, until the model is
 * written. If the call was cancelled or interrupted, a repeated call continues after them.
 *
 * - `source`: a model, as for NVFP4_model_load().
 * - `destination`: a directory that does not exist or is empty, or one to replace; for `.dat` a file, which is replaced if
 *   it exists.
 * - `options`: NULL for the defaults.
 * - `quantize`: NULL for the defaults: two-level scales for ModelOpt, single-level scales for `.dat`, and the recipe amax.
 *   The recipe sweep has a smaller error and takes two to three times as long; it is the default with `calibrate`.
 */
NVFP4_API
NVFP4_Status NVFP4_model_convert(const char *source,
                                 size_t source_length,
                                 const char *destination,
                                 size_t destination_length,
                                 const NVFP4_ConvertOptions *options,
                                 const NVFP4_QuantizeOptions *quantize);

/**
 * @defgroup grammar Grammars: texts that generations are held to
 *
 * A grammar is a JSON schema, a regular expression, a Lark or GBNF grammar or a list of choices, compiled once for the tokens of a model. A
 * generation whose options name it gives a text that fits as a whole, unless it ends before the text does: by its length, a full context,
 * a stop string or the caller. Reasoning before the answer of a chat stays free. Grammars never change: any number of generations may
 * follow one at the same time, on any threads.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_GrammarOptions). */
NVFP4_API NVFP4_Status NVFP4_grammar_options_init(NVFP4_GrammarOptions *options, uint32_t struct_size);

/**
 * Compiles a grammar for a model, which must have a tokenizer. The first one of a model also prepares its vocabulary, which takes up to
 * some seconds for a large one and is kept with the model.
 *
 * A grammar that takes more than 100 ms of a processor's time, or what the environment's NVFP4_GRAMMAR_MS allows, or 64 MB of memory to
 * compile is refused, and one that no text fits, as far as that shows. The error of what is not supported names its place: a JSON pointer into the schema, a byte of the regular expression,
 * or a line and column.
 *
 * - `options`: the kind of the source. NULL for a JSON schema.
 * - `text`, `length`: the source, in UTF-8. Copied.
 */
NVFP4_API
NVFP4_Status NVFP4_grammar_create(const NVFP4_Model *model,
                                  const NVFP4_GrammarOptions *options,
                                  const char *text,
                                  size_t length,
                                  NVFP4_Grammar **out);

/** Adds a reference to a grammar. */
NVFP4_API NVFP4_Status NVFP4_grammar_retain(NVFP4_Grammar *grammar);

/** Gives up a reference to a grammar. After the last one the handle is stale; generations that follow the grammar go on. */
NVFP4_API
NVFP4_Status NVFP4_grammar_release(NVFP4_Grammar *grammar);

/**
 * @defgroup adapter LoRA adapters of a loaded model
 *
 * An adapter is a directory in peft's format, adapter_config.json and adapter_model.safetensors, as `nvfp4 train --adapter` and peft write
 * it: factors of low rank beside linear maps of a model's blocks. Sessions whose options name it run with it; others run the model as it
 * is, with the bits that they have without adapters. Any number of adapters may be loaded, and calls of sessions with different ones run
 * together. The model's drafter guesses without adapters, which changes no token.
 *
 * Sessions begin with cached prefixes of others that have an adapter of the same content, and of no other. A session keeps its adapter
 * from its first token to its end, and so do its forks; a saved session is restored where that adapter is loaded.
 *
 * Models on the CPU and on a CUDA device take them; a CUDA device takes none beside routed experts and per-layer inputs.
 */

/**
 * Loads an adapter for a model. It takes memory of the model's device for its factors, in the types that they are stored in, and is not
 * copied for sessions.
 *
 * #NVFP4_INVALID_ARGUMENT if it is of another base: a name, a shape or a rank is not what the model and its own config say.
 * #NVFP4_UNSUPPORTED for what is not only factors beside linear maps of blocks (DoRA, biases, whole modules, embeddings, the output layer,
 * routers), for ranks above 1,024, and on a CUDA device beside routed experts and per-layer inputs. #NVFP4_OUT_OF_MEMORY where its factors
 * do not fit. The error names the tensor or the setting, and nothing is kept.
 *
 * - `path`, `path_length`: the directory, in UTF-8.
 * - `call`: cancels the call; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_adapter_load(const NVFP4_Model *model,
                                const char *path,
                                size_t path_length,
                                const NVFP4_CallOptions *call,
                                NVFP4_Adapter **out);

/**
 * Describes an adapter, as JSON: name (of its directory), rank (the largest), projections (the number of adapted linear maps), bytes (in
 * memory), identity (16 hexadecimal digits, the same for the same content) and sessions (the number that use it now, forks included).
 * Later versions may add keys. From any thread at any time.
 */
NVFP4_API
NVFP4_Status NVFP4_adapter_info(const NVFP4_Adapter *adapter,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/**
 * Waits until no session uses an adapter, forks and restored sessions included. Releasing the last reference then frees its memory at once;
 * without waiting, the memory goes with the last session. New sessions may name the adapter at any time. A callback of a session that uses
 * the adapter waits in vain, until the call is cancelled.
 *
 * - `call`: cancels the call; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_adapter_wait(const NVFP4_Adapter *adapter,
                                const NVFP4_CallOptions *call);

/** Adds a reference to an adapter. */
NVFP4_API NVFP4_Status NVFP4_adapter_retain(NVFP4_Adapter *adapter);

/**
 * Gives up a reference to an adapter. After the last one the handle is stale; sessions that use the adapter go on, and its memory is freed
 * with the last of them.
 */
NVFP4_API
NVFP4_Status NVFP4_adapter_release(NVFP4_Adapter *adapter);

/**
 * @defgroup session Sessions: conversations and other sequences of tokens, with their KV cache
 *
 * A session holds its tokens with their cached keys and values, so that a call runs only new tokens. It keeps its model
 * alive. Only one call at a time may use it: another one meanwhile, even from a callback, fails with #NVFP4_BUSY. Its
 * length, memory and messages can be read at any time; during a call they are those from before the call. A call that
 * fails leaves the session unchanged.
 *
 * LOGITS. Each choice of a token starts from the model's logits, and changes a copy of them in this order: `logit_biases` are added;
 * `presence_penalty + frequency_penalty * n` is subtracted from the logit of each token that this generation has n > 0 times, as OpenAI
 * defines it (tokens of the prompt do not count, in contrast to `repetition_penalty`); `bad_words`, `no_repeat_ngram_size` and `min_tokens`
 * exclude tokens; the grammar excludes what does not fit; `repetition_penalty` divides or multiplies those of tokens in its window; the
 * DRY penalty is subtracted; the host's own `logits_processor` changes the result as it likes, except that what the grammar excludes stays
 * excluded. Then come `top_n_sigma`, `typical_p`, XTC, `temperature`, `top_k`, `top_p` and `min_p`. The argmax is chosen from the same
 * logits. Tokens that a grammar forces are not chosen, and follow none of this. Log-probabilities are those of the model's own logits.
 *
 * On a GPU each choice copies its logits to the host if one of these is set beside a grammar, `repetition_penalty`, `temperature`, `top_k`,
 * `top_p` and `min_p`, which the device applies; a `repetition_window` counts as one. A generation with any of these drafts nothing. A choice
 * from logits in host memory copies 4 bytes for each token of the vocabulary, and with a processor reads them once more to check them.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_SessionOptions). */
NVFP4_API NVFP4_Status NVFP4_session_options_init(NVFP4_SessionOptions *options, uint32_t struct_size);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_GenerateOptions). */
NVFP4_API
NVFP4_Status NVFP4_generate_options_init(NVFP4_GenerateOptions *options,
                                         uint32_t struct_size);

/** Creates an empty session of a model. `options`: NULL for the defaults. */
NVFP4_API
NVFP4_Status NVFP4_session_create(const NVFP4_Model *model,
                                  const NVFP4_SessionOptions *options,
                                  NVFP4_Session **out);

/** Adds a reference to a session. */
NVFP4_API NVFP4_Status NVFP4_session_retain(NVFP4_Session *session);

/**
 * Gives up a reference to a session. After the last one the handle is stale; a call that is using the session is not
 * disturbed, and a generation that was submitted to a queue ends as #NVFP4_FINISH_CANCELLED.
 */
NVFP4_API
NVFP4_Status NVFP4_session_release(NVFP4_Session *session);

/**
 * Appends tokens and runs them, many at a time: the prefill of a prompt.
 *
 * - `call`: cancels the call and reports the tokens run; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_prefill(NVFP4_Session *session,
                                   const int32_t *tokens,
                                   size_t count,
                                   const NVFP4_CallOptions *call);

/** Appends tokens and runs them one after the other, which is slower: for comparison. See REPRODUCIBILITY above. */
NVFP4_API
NVFP4_Status NVFP4_session_prefill_token_by_token(NVFP4_Session *session,
                                                  const int32_t *tokens,
                                                  size_t count,
                                                  const NVFP4_CallOptions *call);

/**
 * Appends one token and runs it: a decode step. Tokens before it that have not been run yet are run too: the last token of
 * a generation, or those that remain after an eviction.
 *
 * - `call`: as for NVFP4_session_prefill().
 */
NVFP4_API
NVFP4_Status NVFP4_session_decode(NVFP4_Session *session,
                                  int32_t token,
                                  const NVFP4_CallOptions *call);

/**
 * Copies the logits of the next token, one for each token id. Writes their number, the vocabulary size, to `count`; see
 * ARRAYS OUT above. Runs tokens that have not been run yet, as NVFP4_session_decode() does.
 *
 * - `call`: as for NVFP4_session_prefill().
 */
NVFP4_API
NVFP4_Status NVFP4_session_logits(NVFP4_Session *session,
                                  float *logits,
                                  size_t capacity,
                                  size_t *count,
                                  const NVFP4_CallOptions *call);

/**
 * Chooses the next token as NVFP4_session_generate() would, without appending it. `options`: NULL for the argmax; options
 * on stops and lengths are ignored.
 */
NVFP4_API
NVFP4_Status NVFP4_session_sample(NVFP4_Session *session,
                                  const NVFP4_GenerateOptions *options,
                                  int32_t *token);

/**
 * Fills `options` as NVFP4_generate_options_init() does, and with the temperature, top_k, top_p, min_p and repetition
 * penalty that the model recommends in `generation_config.json` or in a GGUF file's metadata. What it does not recommend
 * has the default; with no recommendation at all that is the argmax. The model's own stop tokens need no option.
 */
NVFP4_API
NVFP4_Status NVFP4_model_generate_options(const NVFP4_Model *model,
                                          NVFP4_GenerateOptions *options,
                                          uint32_t struct_size);

/**
 * Generates tokens after those in the session, which must not be empty: prefill a prompt first. A cancelled generation
 * does not fail, whenever it is cancelled: it returns #NVFP4_OK with #NVFP4_FINISH_CANCELLED and keeps the tokens it has. One that fails
 * leaves the session as it was, except where its `logits_processor` has written what no token can be chosen from: then it keeps them too.
 *
 * - `options`: NULL for the defaults.
 * - `callback`, `user`: receives the tokens and text; may be NULL. NVFP4_session_text() gives the text afterwards.
 * - `result`: how it ended, counts and times; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_generate(NVFP4_Session *session,
                                    const NVFP4_GenerateOptions *options,
                                    NVFP4_TokenCallback callback,
                                    void *user,
                                    NVFP4_GenerationResult *result);

/**
 * Copies the text of the last generation, or in a chat the content of the last answer; empty before the first. An
 * incomplete character at its end is left out: if the next generation completes it, that text begins with it. For the
 * buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_text(NVFP4_Session *session,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/** Copies the result of the last generation; its `finish` is #NVFP4_FINISH_NONE before the first. Set `struct_size` before the call. */
NVFP4_API
NVFP4_Status NVFP4_session_result(NVFP4_Session *session,
                                  NVFP4_GenerationResult *result);

/** Writes the number of tokens in the session; during a call, the number from before it. */
NVFP4_API NVFP4_Status NVFP4_session_length(const NVFP4_Session *session, size_t *length);

/**
 * Writes the number of tokens that eviction has dropped since the session was empty, because the context was full; during a call, the
 * number from before it. `evicted_tokens` of NVFP4_model_statistics() counts those of all sessions of a model, also during a call.
 */
NVFP4_API
NVFP4_Status NVFP4_session_evicted(const NVFP4_Session *session,
                                   size_t *count);

/** Writes the most tokens that the session can hold. */
NVFP4_API NVFP4_Status NVFP4_session_context(const NVFP4_Session *session, size_t *context);

/**
 * Writes the bytes of the session's KV cache, including those it shares with forks; during a call, the bytes from before
 * it.
 */
NVFP4_API
NVFP4_Status NVFP4_session_memory(const NVFP4_Session *session,
                                  uint64_t *bytes);

/** Copies the tokens in the session. Writes their number to `count`; see ARRAYS OUT above. */
NVFP4_API
NVFP4_Status NVFP4_session_tokens(NVFP4_Session *session,
                                  int32_t *tokens,
                                  size_t capacity,
                                  size_t *count);

/**
 * Drops the tokens from position `length` on. If the cut is inside an answer, the conversation then ends with the rest of
 * that answer, otherwise with the last whole answer before it. Draws continue from position `length`. With `length` 0 it
 * is NVFP4_session_reset().
 */
NVFP4_API
NVFP4_Status NVFP4_session_truncate(NVFP4_Session *session,
                                    size_t length);

/** Drops all tokens and the conversation. The options stay. */
NVFP4_API NVFP4_Status NVFP4_session_reset(NVFP4_Session *session);

/**
 * Creates a second session in the same state. The two share the memory of their KV caches as far as neither writes to it.
 *
 * A session that generates, in this thread's callback, in another thread or in a queue, is forked after its last token, and goes on: the
 * second session has the tokens so far, as if the generation had been cancelled then, and not what options of it, such as a grammar, know of
 * them. This waits for the end of a step that runs. #NVFP4_BUSY
 * if any other call uses the session, and while it runs a prompt or waits for memory or for its turn in a queue.
 */
NVFP4_API
NVFP4_Status NVFP4_session_fork(NVFP4_Session *session,
                                NVFP4_Session **out);

/**
 * Writes the session to a file, including its KV cache and conversation. An existing file is replaced only when the new
 * one is complete.
 *
 * - `call`: cancels the call and reports the bytes written; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_save(NVFP4_Session *session,
                                const char *path,
                                size_t path_length,
                                const NVFP4_CallOptions *call);

/**
 * Creates a session from a file of NVFP4_session_save(), in the state that was saved. `model` must be the model that ran
 * it, and the session's adapter, if it has one, must be loaded for it.
 *
 * - `call`: cancels the call and reports the bytes read; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_restore(const NVFP4_Model *model,
                                   const char *path,
                                   size_t path_length,
                                   const NVFP4_CallOptions *call,
                                   NVFP4_Session **out);

/**
 * Copies the session to memory: the bytes of a file of NVFP4_session_save(). Writes their number to `length`; see ARRAYS OUT above.
 * They go into the buffer as they come: no second copy is held, and a call that fails may have written some.
 *
 * - `call`: cancels the call and reports the bytes written; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_save_bytes(NVFP4_Session *session,
                                      uint8_t *buffer,
                                      size_t capacity,
                                      size_t *length,
                                      const NVFP4_CallOptions *call);

/**
 * Creates a session from bytes of NVFP4_session_save_bytes(), or those of a file of NVFP4_session_save(), in the state that was saved.
 * `model` must be the model that ran it, with the session's adapter, if it has one. The bytes are read during the call only.
 *
 * - `call`: cancels the call and reports the bytes read; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_restore_bytes(const NVFP4_Model *model,
                                         const uint8_t *bytes,
                                         size_t length,
                                         const NVFP4_CallOptions *call,
                                         NVFP4_Session **out);

/**
 * Gives the log-probabilities of continuations, each as if it stood alone after the tokens of the session, which keeps its tokens. With an
 * empty session they are whole texts, whose first token nothing predicts: begin them with the token that the model expects at the
 * beginning, as NVFP4_model_tokenize() does.
 *
 * The continuations share the cache of the session's tokens, and up to 64 of them run together, in passes as long as those of a prompt. On a
 * GPU their logits stay on the device. On the CPU a result has the same bits alone and beside others.
 *
 * - `continuations`, `lengths`: `count` arrays of tokens with their lengths. #NVFP4_CONTEXT_FULL if one does not fit after the session's
 *   tokens; nothing is evicted.
 * - `call`: cancels the call and reports the tokens run; may be NULL.
 * - `log_probabilities`: receives the natural logarithm of each token's probability after the tokens before it, by the model's own logits:
 *   one for each token of the first continuation, then those of the second, and so on. NaN for a token that no other stands before.
 * - `is_argmax`: receives 1 for each token that is the argmax, and 0 for others; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_score(NVFP4_Session *session,
                                 const int32_t *const *continuations,
                                 const size_t *lengths,
                                 size_t count,
                                 const NVFP4_CallOptions *call,
                                 float *log_probabilities,
                                 int32_t *is_argmax);

/**
 * Appends `tokens[i]` to `sessions[i]`, for `count` sessions, and runs them all in one pass over the weights, which takes
 * little longer than a decode step of one session. The sessions must be distinct and of the same model handle. A call that
 * fails leaves all of them unchanged.
 *
 * Where only the next tokens are wanted, NVFP4_session_step_sample() is faster: this function copies the logits of every
 * session to the host.
 *
 * - `call`: cancels the pass; may be NULL. Its progress callback is not called.
 * - `statuses`: may be NULL; then a session that cannot be run fails the call. Otherwise `count` elements, all written if
 *   the other arguments are valid. A session whose handle is stale or in use, whose context is full, that is listed twice,
 *   or whose token is not in the vocabulary gets its status and stays unchanged, and the others are run. The call then
 *   returns #NVFP4_OK, with the message of the first such session in NVFP4_last_error(). The sessions that were run get
 *   the status of the call.
 */
NVFP4_API
NVFP4_Status NVFP4_session_step(NVFP4_Session *const *sessions,
                                const int32_t *tokens,
                                size_t count,
                                const NVFP4_CallOptions *call,
                                NVFP4_Status *statuses);

/**
 * NVFP4_session_step() that also chooses the next token of each session, on the device of the model: on a GPU no logits
 * are copied to the host. `next[i]` is the token that NVFP4_session_sample() would choose, and is not appended: to
 * generate, pass it as the token of the next step, until a stop token or your length limit ends that sequence; a
 * detokenizer says when. Sequences may join and leave between any two steps. Keep the order of `sessions`: with the same
 * sessions, and `next` as their tokens, a GPU has already begun the next step when it is called.
 *
 * - `options`: how to choose, `options[i]` for `sessions[i]`; options on stops and lengths are ignored. NULL, for one
 *   session or for all, takes the argmax. Logits that biases, bad words or a processor change, and those whose
 *   log-probabilities NVFP4_session_top_log_probabilities() is to give, are copied to the host. Several sessions may share one: draws depend on its seed and on the number of
 *   tokens appended to each session. If `options[i]->call` is cancelled before the pass begins, that session is left out
 *   with the status #NVFP4_CANCELLED; its progress callback is not called.
 * - `call`, `statuses`: as for NVFP4_session_step().
 * - `next`: `count` tokens, unchanged for sessions that were not run. May be the same array as `tokens`.
 */
NVFP4_API
NVFP4_Status NVFP4_session_step_sample(NVFP4_Session *const *sessions,
                                       const int32_t *tokens,
                                       size_t count,
                                       const NVFP4_GenerateOptions *const *options,
                                       const NVFP4_CallOptions *call,
                                       int32_t *next,
                                       NVFP4_Status *statuses);

/**
 * Copies log-probabilities of the last token that NVFP4_session_sample() or NVFP4_session_step_sample() chose for this session: first that
 * token with its own, then the most probable ones, among which it may be again. Writes their number to `count`: 1 +
 * `top_log_probabilities`, or 0 if the options of that call asked for none; see ARRAYS OUT above.
 *
 * - `tokens`, `log_probabilities`: `capacity` elements each, or NULL for one that is not wanted.
 */
NVFP4_API
NVFP4_Status NVFP4_session_top_log_probabilities(NVFP4_Session *session,
                                                 int32_t *tokens,
                                                 float *log_probabilities,
                                                 size_t capacity,
                                                 size_t *count);

/**
 * @defgroup chat Chat: conversations in the format that a model was trained on
 *
 * A turn takes the conversation in the format of common chat servers, and generates the answer. It is a JSON array of
 * messages, each an object with `role` (system, developer, user, assistant or tool) and `content` (a string, or an array
 * of parts `{"type": "text", "text": ...}`). An assistant's message may also have `reasoning_content`, the reasoning
 * before the answer, and `tool_calls`; a tool's message has the `tool_call_id` that it answers.
 *
 * The model's chat template (ChatML if it has none) renders that as text. The longest common prefix of this text and the
 * tokens in the session is kept in the cache, and only the rest is run. So regenerating an answer, changing an earlier
 * message or the system prompt, and passing the results of tools are turns like any other. Names of special tokens within
 * messages are treated as plain text.
 *
 * A turn may take another template than the one before: the whole conversation is rendered by it, and again the longest common prefix of
 * tokens is kept, often none. With `keep_reasoning` the tokens in the session stay, and the other template writes only what follows them.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ChatOptions). */
NVFP4_API NVFP4_Status NVFP4_chat_options_init(NVFP4_ChatOptions *options, uint32_t struct_size);

/**
 * Adds a user message to the conversation of the session and generates the answer. The first turn needs an empty session,
 * and begins with the system prompt of the session's options.
 *
 * - `text`, `text_length`: the user's message, in UTF-8.
 * - `chat`: NULL for the options of the turn before, or the defaults.
 * - The rest is as for NVFP4_session_generate(). A turn that is cancelled without a generated token is no part of the
 *   conversation: the session is as it was before the call.
 * - With `max_tokens` 0 the prompt is run and nothing is generated, so that steps of many sessions can continue from there.
 */
NVFP4_API
NVFP4_Status NVFP4_session_chat(NVFP4_Session *session,
                                const char *text,
                                size_t text_length,
                                const NVFP4_ChatOptions *chat,
                                const NVFP4_GenerateOptions *options,
                                NVFP4_TokenCallback callback,
                                void *user,
                                NVFP4_GenerationResult *result);

/**
 * Generates the answer to a conversation that is passed as a whole; the system prompt of the session's options is not
 * used. With `max_tokens` 0 the prompt is run and nothing is generated, so that steps of many sessions can continue from
 * there, unless the turn was cancelled.
 *
 * - `messages`, `messages_length`: a JSON array, as described at the beginning of this chapter. Error messages name the
 *   line and column, or the number of the message.
 * - `chat`: NULL for the options of the turn before, or the defaults.
 * - The rest is as for NVFP4_session_chat().
 */
NVFP4_API
NVFP4_Status NVFP4_session_chat_messages(NVFP4_Session *session,
                                         const char *messages,
                                         size_t messages_length,
                                         const NVFP4_ChatOptions *chat,
                                         const NVFP4_GenerateOptions *options,
                                         NVFP4_TokenCallback callback,
                                         void *user,
                                         NVFP4_GenerationResult *result);

/**
 * Copies the conversation of the chat turns, as a JSON array of messages like those of NVFP4_session_chat_messages(),
 * including the last answer with its reasoning and tool calls; during a call, the conversation from before it. For the
 * buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_messages(const NVFP4_Session *session,
                                    char *buffer,
                                    size_t capacity,
                                    size_t *length);

/** Copies the model's reasoning before the last answer; empty if there was none. For the buffer see TEXT above. */
NVFP4_API
NVFP4_Status NVFP4_session_reasoning(NVFP4_Session *session,
                                     char *buffer,
                                     size_t capacity,
                                     size_t *length);

/**
 * Copies the tool calls of the last answer, as a JSON array of objects like those of #NVFP4_PART_TOOL_CALL. Pass their
 * results as messages of the role tool. For the buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_tool_calls(NVFP4_Session *session,
                                      char *buffer,
                                      size_t capacity,
                                      size_t *length);

/**
 * Copies the text that a turn with these messages is rendered as. `add_generation_prompt` 1 appends the beginning of the
 * assistant's answer. Asking for the length first does not double the work, as for NVFP4_model_tokenize(). In this text,
 * names of special tokens within messages look like the template's own: do not tokenize it if the messages are untrusted,
 * but let a session run them, or take their tokens from NVFP4_model_tokenize_messages().
 *
 * - `messages`, `messages_length`, `chat`: as for NVFP4_session_chat_messages(); `chat` NULL for the defaults.
 */
NVFP4_API
NVFP4_Status NVFP4_model_render_messages(const NVFP4_Model *model,
                                         const char *messages,
                                         size_t messages_length,
                                         const NVFP4_ChatOptions *chat,
                                         int32_t add_generation_prompt,
                                         char *buffer,
                                         size_t capacity,
                                         size_t *length);

/**
 * Converts a conversation to the token ids that a session runs for it: those of the text that it is rendered as, in which names
 * of special tokens within messages are plain text. For hosts that run a prompt themselves, in chunks for example. Writes the
 * number of tokens to `count`; see ARRAYS OUT above. Asking for the number first does not double the work, as for
 * NVFP4_model_tokenize().
 *
 * - The rest is as for NVFP4_model_render_messages().
 */
NVFP4_API
NVFP4_Status NVFP4_model_tokenize_messages(const NVFP4_Model *model,
                                           const char *messages,
                                           size_t messages_length,
                                           const NVFP4_ChatOptions *chat,
                                           int32_t add_generation_prompt,
                                           int32_t *tokens,
                                           size_t capacity,
                                           size_t *count);

/**
 * @defgroup queue Queues: many generations, and no thread of the host for each
 *
 * A queue of a model runs generations that are submitted to it, and lists their events: tokens, text, and the end of each generation. A
 * program of one thread submits as many as it likes and takes the events when it likes; a file descriptor that is readable while there
 * are any makes a queue part of a loop on epoll, libuv or asyncio. Generations of all queues, and of calls of other threads, are run in
 * the same passes over the weights.
 *
 * From its submission until the #NVFP4_EVENT_END of its generation, a session is in use: calls on it fail with #NVFP4_BUSY, except those
 * that may read it during a call. It can be used again as soon as that event can be taken. NVFP4_session_text(),
 * NVFP4_session_result() and the like then say what the generation left.
 *
 * Each running generation has a thread of the library, which blocks all signals. Events wait in memory until they are taken; with as
 * many as `events` of the options, generations pause until some are.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_QueueOptions). */
NVFP4_API NVFP4_Status NVFP4_queue_options_init(NVFP4_QueueOptions *options, uint32_t struct_size);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_SubmitOptions). */
NVFP4_API NVFP4_Status NVFP4_submit_options_init(NVFP4_SubmitOptions *options, uint32_t struct_size);

/** Creates a queue of a model, which it keeps alive. It has no thread before its first submission. `options`: NULL for the defaults. */
NVFP4_API
NVFP4_Status NVFP4_queue_create(const NVFP4_Model *model,
                                const NVFP4_QueueOptions *options,
                                NVFP4_Queue **out);

/** Adds a reference to a queue. */
NVFP4_API NVFP4_Status NVFP4_queue_retain(NVFP4_Queue *queue);

/**
 * Gives up a reference to a queue. The last one ends its generations, which keep the tokens they have, without waiting for them: each
 * session can be used again within a pass. No event of them follows. A wait on the queue fails with #NVFP4_CANCELLED.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_release(NVFP4_Queue *queue);

/**
 * Submits a generation: appends tokens to a session and generates from there, as NVFP4_session_prefill() and NVFP4_session_generate() do.
 * Returns at once. A generation that fails, or ends before its first token, leaves the session as it was before.
 *
 * - `tokens`, `count`: the prompt; none to generate from what the session holds. Copied.
 * - `options`: NULL for the defaults. Copied, except a cancel flag and what a `logits_processor` uses, which must stay valid until the
 *   generation's end. A cancel handle may be released before. There must be no progress callback.
 * - `submit`: NULL for the defaults. Copied.
 * - `generation`: receives its number, which is not 0 and which the queue does not use again.
 *
 * #NVFP4_BUSY if the session is in use, or if the queue is full.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_generate(const NVFP4_Queue *queue,
                                  NVFP4_Session *session,
                                  const int32_t *tokens,
                                  size_t count,
                                  const NVFP4_GenerateOptions *options,
                                  const NVFP4_SubmitOptions *submit,
                                  uint64_t *generation);

/** Submits a chat turn like NVFP4_session_chat(), whose texts are copied. The rest is as for NVFP4_queue_generate(). */
NVFP4_API
NVFP4_Status NVFP4_queue_chat(const NVFP4_Queue *queue,
                              NVFP4_Session *session,
                              const char *text,
                              size_t text_length,
                              const NVFP4_ChatOptions *chat,
                              const NVFP4_GenerateOptions *options,
                              const NVFP4_SubmitOptions *submit,
                              uint64_t *generation);

/** Submits a chat turn like NVFP4_session_chat_messages(), whose texts are copied. The rest is as for NVFP4_queue_generate(). */
NVFP4_API
NVFP4_Status NVFP4_queue_chat_messages(const NVFP4_Queue *queue,
                                       NVFP4_Session *session,
                                       const char *messages,
                                       size_t messages_length,
                                       const NVFP4_ChatOptions *chat,
                                       const NVFP4_GenerateOptions *options,
                                       const NVFP4_SubmitOptions *submit,
                                       uint64_t *generation);

/**
 * Takes events, oldest first. Those of one generation are in order, and its #NVFP4_EVENT_END is the last. Without any it waits for one.
 * Only one call at a time may wait on a queue: another one meanwhile fails with #NVFP4_BUSY.
 *
 * - `events`: room for `capacity` events, at least 1, of `event_size` bytes: sizeof(NVFP4_QueueEvent).
 * - `timeout_ms`: the longest time to wait, in milliseconds; 0 to return at once, -1 to wait for ever.
 * - `count`: receives the number of events. It is 0 after the timeout, or after NVFP4_queue_wake().
 */
NVFP4_API
NVFP4_Status NVFP4_queue_wait(NVFP4_Queue *queue,
                              NVFP4_QueueEvent *events,
                              size_t event_size,
                              size_t capacity,
                              int64_t timeout_ms,
                              size_t *count);

/**
 * Lets one NVFP4_queue_wait() return without events: the one that waits, or the next one that finds none. For a thread that is to do
 * something else, or to end.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_wake(const NVFP4_Queue *queue);

/**
 * Ends a generation, which keeps the tokens that it has; its #NVFP4_EVENT_END follows. One that has ended is left alone. May be called
 * from any thread.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_cancel(const NVFP4_Queue *queue,
                                uint64_t generation);

/**
 * Writes a file descriptor that is readable while there are events to take, or NVFP4_queue_wake() was called. The host polls it and does
 * not read, write or close it: the queue does. Linux only.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_fd(const NVFP4_Queue *queue,
                            int32_t *fd);

/**
 * Writes the numbers of submissions that wait to begin, of generations that run, and of events that wait to be taken. Each place may be
 * NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_queue_counts(const NVFP4_Queue *queue,
                                size_t *waiting,
                                size_t *running,
                                size_t *events);

/**
 * @defgroup detokenizer Detokenizers: text from tokens one by one, for hosts that step many sessions
 *
 * A detokenizer follows one sequence. It takes each token, returns the text that the token completes, in whole characters, and says when
 * the sequence ends, as NVFP4_session_generate() would: by a stop token, a stop string, or its length. Text that may be the beginning of a
 * stop string is held back until that is decided.
 */

/**
 * Creates a detokenizer of a model, which must have a tokenizer.
 *
 * - `tokens`, `count`: the tokens before the first one that is pushed. Their text is not given, but may end within a
 *   character, which the next token completes. NULL and 0 at the start of a text, such as an answer.
 * - `options`: when the sequence ends: stop tokens and strings, whether the model's own stop tokens count, and the most
 *   tokens. NULL for the defaults. Copied.
 */
NVFP4_API
NVFP4_Status NVFP4_detokenizer_create(const NVFP4_Model *model,
                                      const int32_t *tokens,
                                      size_t count,
                                      const NVFP4_GenerateOptions *options,
                                      NVFP4_Detokenizer **out);

/**
 * Adds the next token. Writes the text that it completes, UTF-8 with a NUL after it, to `text`, and its length in bytes to
 * `length`; the text is valid until the next call with this detokenizer. Writes to `finish`, one of NVFP4_FINISH_*,
 * whether and how the sequence ends with this token. A stop token is not part of the sequence and gives no text; any other
 * last token is part of it. A sequence that has ended takes no more tokens.
 *
 * - `length`, `finish`: may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_detokenizer_push(NVFP4_Detokenizer *detokenizer,
                                    int32_t token,
                                    const char **text,
                                    size_t *length,
                                    int32_t *finish);

/**
 * Adds the next token to each of several detokenizers, in one call: the same results as a call of NVFP4_detokenizer_push() for each. The
 * detokenizers may be of different models, and each is there once. If a call fails, none of them has changed, and no result is written.
 *
 * - `detokenizers`, `tokens`: `count` elements each.
 * - `texts`: receives `count` texts, each valid until the next call with its detokenizer.
 * - `lengths`, `finishes`: receive `count` elements each; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_detokenizers_push(NVFP4_Detokenizer *const *detokenizers,
                                     const int32_t *tokens,
                                     size_t count,
                                     const char **texts,
                                     size_t *lengths,
                                     int32_t *finishes);

/**
 * Ends the sequence if no token has. Gives the text that was held back because it might have begun a stop string; after a
 * stop string there is none. An incomplete character gives no text: see NVFP4_detokenizer_create() for continuing it.
 *
 * - `text`, `length`: as for NVFP4_detokenizer_push().
 */
NVFP4_API
NVFP4_Status NVFP4_detokenizer_finish(NVFP4_Detokenizer *detokenizer,
                                      const char **text,
                                      size_t *length);

/** Adds a reference to a detokenizer. */
NVFP4_API NVFP4_Status NVFP4_detokenizer_retain(NVFP4_Detokenizer *detokenizer);

/** Gives up a reference to a detokenizer. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_detokenizer_release(NVFP4_Detokenizer *detokenizer);

/**
 * @defgroup embedding Embeddings: numbers that stand for texts, near each other for texts of like meaning
 *
 * A model with the files of sentence-transformers says how its texts are embedded: `modules.json`, `1_Pooling/config.json`,
 * `config_sentence_transformers.json`. So does a GGUF file with a pooling type. Those of NVFP4_model_info() are in its `embedding`:
 * `pooling`, `normalize`, `include_prompt`, `prompts`, `default_prompt`, `max_tokens`, and `fault`, the reason why they cannot be followed.
 * Any other model embeds by the pooling that the caller names.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_EmbedOptions). */
NVFP4_API NVFP4_Status NVFP4_embed_options_init(NVFP4_EmbedOptions *options, uint32_t struct_size);

/**
 * Embeds texts: one row of numbers for each, `[count, dimensions]` in the order of the texts. The prompt goes before each text, and the
 * tokens that the model expects around every text are added, as sentence-transformers does; names of special tokens in a text become those
 * tokens. An empty text has these tokens alone; one that has none is #NVFP4_INVALID_ARGUMENT, as
 * every other text that cannot be embedded, with its number. No texts are no error.
 *
 * Everything is checked before the first token runs. Texts run together, beside the tokens of other threads, and long ones in several passes;
 * where memory for keys and values is short, fewer of them at a time. On the CPU an embedding has the same bits whatever is embedded with it.
 * From any thread at any time, several calls at once.
 *
 * - `texts`, `lengths`: `count` texts in UTF-8 with their lengths in bytes.
 * - `options`: NULL for the defaults.
 * - `embeddings`, `capacity`, `length`: see ARRAYS OUT above. The numbers of elements are those of the model's rows, `hidden_size` of
 *   NVFP4_model_info(), or `dimensions` of the options. A call that fails may have written some.
 * - `rows`: receives the number of rows of each text, which is 1 with pooling and its number of tokens without; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_model_embed_texts(const NVFP4_Model *model,
                                     const char *const *texts,
                                     const size_t *lengths,
                                     size_t count,
                                     const NVFP4_EmbedOptions *options,
                                     float *embeddings,
                                     size_t capacity,
                                     size_t *length,
                                     size_t *rows);

/**
 * Embeds lists of tokens as they are: without a prompt, and without tokens that the model expects around a text. Otherwise as
 * NVFP4_model_embed_texts(); a list without tokens is #NVFP4_INVALID_ARGUMENT.
 *
 * - `tokens`, `lengths`: `count` arrays of tokens with their lengths.
 * - `options`: NULL for the defaults.
 * - `embeddings`, `capacity`, `length`, `rows`: as for NVFP4_model_embed_texts().
 */
NVFP4_API
NVFP4_Status NVFP4_model_embed(const NVFP4_Model *model,
                               const int32_t *const *tokens,
                               const size_t *lengths,
                               size_t count,
                               const NVFP4_EmbedOptions *options,
                               float *embeddings,
                               size_t capacity,
                               size_t *length,
                               size_t *rows);

/**
 * @defgroup trainer Training: steps on a model's weights, which are stored in 4 bits with their optimizer's moments
 *
 * A trainer holds the parameters of a dense model and steps them by AdamW, as its options say; the host brings the batches. Only one call
 * at a time may use it: another one meanwhile, even from a callback, fails with #NVFP4_BUSY. NVFP4_trainer_info() can be called at any
 * time. A call that fails leaves the trainer unchanged, unless its description says otherwise. The same batches, options and seed give the
 * same bits on the same device with the same number of threads.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_TrainerOptions). */
NVFP4_API NVFP4_Status NVFP4_trainer_options_init(NVFP4_TrainerOptions *options, uint32_t struct_size);

/**
 * Creates a trainer of a dense model: a directory, or a `.safetensors`, `.dat` or `.gguf` file. Its weights are read and rounded to the
 * stored forms of the options. The file stays open.
 *
 * - `path`, `path_length`: UTF-8.
 * - `options`: NULL for the defaults.
 * - `call`: cancels the call before it reads weights; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_create(const char *path,
                                  size_t path_length,
                                  const NVFP4_TrainerOptions *options,
                                  const NVFP4_CallOptions *call,
                                  NVFP4_Trainer **out);

/**
 * Creates a trainer from a checkpoint, with its settings. Further steps have the same bits as training without a stop. A checkpoint of
 * another model is #NVFP4_INVALID_ARGUMENT, with the names that differ.
 *
 * - `path`, `path_length`: the model that training began with, as for NVFP4_trainer_create().
 * - `directory`, `directory_length`: a directory of NVFP4_trainer_save(), whose last checkpoint is taken, or one of its checkpoints.
 * - `options`: the device and threads, and the teacher that training began with, if any; NULL for the CPU. Leave everything else at its
 *   default.
 * - `call`: cancels the call before it reads the checkpoint; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_resume(const char *path,
                                  size_t path_length,
                                  const char *directory,
                                  size_t directory_length,
                                  const NVFP4_TrainerOptions *options,
                                  const NVFP4_CallOptions *call,
                                  NVFP4_Trainer **out);

/** Adds a reference to a trainer. */
NVFP4_API NVFP4_Status NVFP4_trainer_retain(NVFP4_Trainer *trainer);

/** Gives up a reference to a trainer. After the last one the handle is stale; models obtained from it keep the weights. */
NVFP4_API
NVFP4_Status NVFP4_trainer_release(NVFP4_Trainer *trainer);

/**
 * Takes a step by the gradients of all micro-batches together, in which each label counts by its weight. Labels that are all negative,
 * tokens or labels outside the vocabulary, documents longer than the model's context, and lengths that do not sum to the number of tokens
 * are errors, found before anything is changed.
 *
 * If a loss or gradient is not finite, no parameter changes, and the step is reported as #NVFP4_STEP_SKIPPED; too many skipped steps in a
 * row are an error. With `release`, a gradient that is not finite after others were applied is #NVFP4_INTERNAL, and the message of any
 * other error after that point says so too: resume from the last checkpoint.
 *
 * While a pass of NVFP4_trainer_model() runs, it waits for that; on a thread within such a pass it is #NVFP4_BUSY.
 *
 * - `batches`, `batch_count`, `batch_size`: micro-batches, each of `batch_size` bytes, which is sizeof(NVFP4_MicroBatch).
 * - `call`: reports the tokens done. Cancels the step while it waits, between micro-batches, and between blocks of their forward passes, with
 *   everything unchanged. With `release` it is cancelled only before the backward pass. May be NULL.
 * - `report`: the result of the step; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_step(NVFP4_Trainer *trainer,
                                const NVFP4_MicroBatch *batches,
                                size_t batch_count,
                                size_t batch_size,
                                const NVFP4_CallOptions *call,
                                NVFP4_StepReport *report);

/**
 * Writes the mean cross-entropy of the labels that count, by their weights, in nats. Changes nothing.
 *
 * - `batches`, `batch_count`, `batch_size`: as for NVFP4_trainer_step().
 * - `delivered`: 1 for the NVFP4 codes alone, as they are exported; 0 for the full stored precision.
 * - `call`: cancels the call between blocks; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_evaluate(NVFP4_Trainer *trainer,
                                    const NVFP4_MicroBatch *batches,
                                    size_t batch_count,
                                    size_t batch_size,
                                    int32_t delivered,
                                    const NVFP4_CallOptions *call,
                                    double *loss);

/**
 * Writes the mean cross-entropy of the labels that count, and the mean divergence from the predictions of the trainer's teacher
 * at them, KL(teacher || model) at temperature 1, both in nats. Changes nothing. #NVFP4_INVALID_ARGUMENT without a teacher.
 *
 * - `batches`, `batch_count`, `batch_size`: as for NVFP4_trainer_step().
 * - `delivered`: 1 for the NVFP4 codes alone, as they are exported; 0 for the full stored precision.
 * - `call`: cancels the call between blocks; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_compare(NVFP4_Trainer *trainer,
                                   const NVFP4_MicroBatch *batches,
                                   size_t batch_count,
                                   size_t batch_size,
                                   int32_t delivered,
                                   const NVFP4_CallOptions *call,
                                   double *loss,
                                   double *divergence);

/**
 * Describes a trainer, as JSON: steps, skipped (steps that changed nothing), parameters, trained_weights (of matrices),
 * bytes (of parameters and moments), config (all settings), architecture, vocab_size, device, trains_delivered. During a
 * call it is the state from before the call. Later versions may add keys.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_info(const NVFP4_Trainer *trainer,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/**
 * Writes a checkpoint with the complete state of training into a directory, under the number of the last step (`step-00000020`), and
 * removes all but the last `keep` checkpoints there. A failed write leaves nothing.
 *
 * - `directory`, `directory_length`: UTF-8; created if it does not exist.
 * - `data`, `data_length`: JSON that NVFP4_trainer_data() returns when the trainer is resumed, such as the position in the data;
 *   NULL for none.
 * - `keep`: at least 1.
 * - `call`: cancels the call at its start; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_save(NVFP4_Trainer *trainer,
                                const char *directory,
                                size_t directory_length,
                                const char *data,
                                size_t data_length,
                                size_t keep,
                                const NVFP4_CallOptions *call);

/**
 * Copies the JSON that was last saved with NVFP4_trainer_save(), or with the checkpoint that the trainer was resumed from; `null` if there
 * is none. For the buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_data(const NVFP4_Trainer *trainer,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/**
 * Writes the delivered model to a directory in ModelOpt's layout, with config and tokenizer of the model that training began with.
 * Unchanged tensors are written as in that model, or as NVFP4_model_convert() would write them: codes, scales and bytes. Matrices trained
 * in a form of NVFP4 keep the codes that they are trained in; others are written in bfloat16 or float32, as they are stored.
 *
 * - `tables`: one of NVFP4_TABLES_*: the form of the embedding and the output head; #NVFP4_TABLES_AUTO for the one that they are trained
 *   for.
 * - `replace`: 1 to replace a directory that holds a model; 0 to refuse a directory that is not empty.
 * - `call`: cancels the call at its start; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_export_directory(NVFP4_Trainer *trainer,
                                            const char *path,
                                            size_t path_length,
                                            int32_t tables,
                                            int32_t replace,
                                            const NVFP4_CallOptions *call);

/**
 * Writes the delivered model to a `.dat` file, every tensor in its type in the `.dat` file that training began with.
 *
 * - `call`: cancels the call at its start; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_export_dat(NVFP4_Trainer *trainer,
                                      const char *path,
                                      size_t path_length,
                                      const NVFP4_CallOptions *call);

/**
 * Writes the adapters of a trainer with `recipe.lora` in its config to a directory in peft's format: `adapter_model.safetensors` in
 * float32 and `adapter_config.json`. NVFP4_trainer_export_directory() writes the model with the adapters merged.
 *
 * - `base`, `base_length`: the name of the base model in `adapter_config.json`: a directory, or a name of the Hugging Face hub.
 * - `replace`: 1 to replace a directory that holds an adapter; 0 to refuse a directory that is not empty.
 * - `call`: cancels the call at its start; may be NULL.
 *
 * #NVFP4_INVALID_ARGUMENT if all parameters are trained; #NVFP4_UNSUPPORTED if the checkpoint holds adapted matrices as parts of larger
 * ones, for which peft has no such adapter.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_export_adapter(NVFP4_Trainer *trainer,
                                          const char *path,
                                          size_t path_length,
                                          const char *base,
                                          size_t base_length,
                                          int32_t replace,
                                          const NVFP4_CallOptions *call);

/**
 * Writes the model under training with its delivered weights, for sessions beside the steps. It runs on the trainer's memory: matrices are
 * not copied. On the CPU its products are slower than those of a loaded model, and have the same bits. As long as it lives, later calls write
 * the same model. It may outlive the trainer, and then keeps the last weights.
 *
 * The model follows the steps, and so do its sessions, forks of them too: they keep their tokens and conversations, and run the tokens that
 * older weights have run again when they are next asked for what follows. The answer is that of a new session with the same tokens, on the CPU
 * to the last bit. No session begins with keys and values of older weights. A session file has the weights of its time: after a step that
 * changes weights it is refused. What older weights have computed is not saved: a session that is saved after such a step, before it has
 * run, has its tokens in the file.
 *
 * Threads may run sessions while another one calls NVFP4_trainer_step(). The step waits for the pass that runs, passes wait for the step,
 * and who has waited longer goes first; a prompt of several passes runs anew after a step between them, and the next step waits for its end.
 * A generation goes on after a step: its tokens before it are of the weights before, those after it of the weights after. Cancellation and
 * deadlines end a call that waits. A token callback may call NVFP4_trainer_step(), because no pass runs meanwhile. A progress callback of a
 * call that runs the model may not, nor may a callback of the step run the model: these fail with #NVFP4_BUSY, because the thread would wait
 * for itself.
 *
 * If the model cannot follow a step for lack of memory, the log says so, and calls that run it fail with #NVFP4_INVALID_ARGUMENT until this
 * function or another step has succeeded.
 *
 * - `call`: cancels the call; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_trainer_model(NVFP4_Trainer *trainer,
                                 const NVFP4_CallOptions *call,
                                 NVFP4_Model **out);

/**
 * @defgroup data Data for training: files of rows, tokenized, with the learned tokens marked
 *
 * A data handle holds the documents of files: rows as `nvfp4 train` reads them, rendered by a model's chat template, with the learned
 * tokens and the weight of each in the loss. docs/training.md describes the files. The documents come in the order of the files. A row is
 * one document, or one for each of its answers if a template drops earlier reasoning; a text longer than a window is several.
 *
 * Handles are immutable: any number of threads may use one at a time.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_DataOptions). */
NVFP4_API NVFP4_Status NVFP4_data_options_init(NVFP4_DataOptions *options, uint32_t struct_size);

/**
 * Reads files into documents for a model. Unusable rows, and rows longer than a window, are #NVFP4_INVALID_ARGUMENT unless the options
 * allow them; the message names the first by file and line.
 *
 * - `model`, `model_length`: the model that will learn them, as for NVFP4_trainer_create(). Only its tokenizer, its chat template and the
 *   size of its vocabulary are read, no weights.
 * - `files`, `file_lengths`, `file_count`: paths, and their lengths in bytes.
 * - `options`: NULL for the defaults.
 * - `call`: reports the rows read, and cancels the call; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_data_read(const char *model,
                             size_t model_length,
                             const char *const *files,
                             const size_t *file_lengths,
                             size_t file_count,
                             const NVFP4_DataOptions *options,
                             const NVFP4_CallOptions *call,
                             NVFP4_Data **out);

/** Adds a reference to data. */
NVFP4_API NVFP4_Status NVFP4_data_retain(NVFP4_Data *data);

/** Gives up a reference to data. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_data_release(NVFP4_Data *data);

/** Writes the number of documents. */
NVFP4_API NVFP4_Status NVFP4_data_count(const NVFP4_Data *data, size_t *count);

/**
 * Copies a document in the form of NVFP4_MicroBatch: its tokens, the label of each token (the next token, or -1 if that is not learned),
 * and the weight of each label in the loss, 0 without a label.
 *
 * - `index`: the document, from 0.
 * - `tokens`, `labels`, `weights`, `capacity`: buffers with room for `capacity` elements each; any may be NULL. With a
 *   capacity of 0 only the length is written.
 * - `length`: the number of its tokens. A capacity below that, other than 0, is #NVFP4_BUFFER_TOO_SMALL.
 */
NVFP4_API
NVFP4_Status NVFP4_data_document(const NVFP4_Data *data,
                                 size_t index,
                                 int32_t *tokens,
                                 int32_t *labels,
                                 float *weights,
                                 size_t capacity,
                                 size_t *length);

/**
 * Describes a document as JSON: file, line, and for each of its tokens its id (tokens), the text that it completes (pieces), whether it is
 * special, whether it is learned, and its weight (weights). Unlike labels, these refer to the token itself, not to the one before it.
 * Later versions may add keys. For the buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_data_mask(const NVFP4_Data *data,
                             size_t index,
                             char *buffer,
                             size_t capacity,
                             size_t *length);

/**
 * Summarizes the read as JSON: files (path, bytes, checksum), rows, bad_rows, truncated, dropped. Later versions may add keys. For the
 * buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_data_report(const NVFP4_Data *data,
                               char *buffer,
                               size_t capacity,
                               size_t *length);

/**
 * @defgroup optimizer Training with the host's own passes: the optimizer of one weight, and linear layers with a weight in 4 bits
 *
 * For hosts that compute gradients themselves, for example with TorchSharp's autograd. Functions here that take tensors as `void *` take
 * an #NVFP4_Tensor, or a pointer to a libtorch tensor like the drop-in functions; all tensors of a call must be of one kind. Results are
 * of that kind and in the same place. Only one call at a time may use an optimizer: another one meanwhile fails with #NVFP4_BUSY. On a GPU
 * tensors are bfloat16 or float32, products and gradients are rounded to bfloat16, and calls are ordered with libtorch's current stream.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_OptimizerOptions). */
NVFP4_API
NVFP4_Status NVFP4_optimizer_options_init(NVFP4_OptimizerOptions *options,
                                          uint32_t struct_size);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_StepOptions). */
NVFP4_API NVFP4_Status NVFP4_step_options_init(NVFP4_StepOptions *options, uint32_t struct_size);

/**
 * Creates the optimizer of a weight `[.., K]`, K a multiple of 16. The values are copied and rounded to nearest; moments are zero.
 *
 * - `weight`: a floating tensor, of this library or of libtorch. The state is in the same place.
 * - `options`: NULL for the defaults.
 */
NVFP4_API
NVFP4_Status NVFP4_optimizer_create(void *weight,
                                    const NVFP4_OptimizerOptions *options,
                                    NVFP4_OptimizerState **out);

/**
 * Creates an optimizer from a copy by NVFP4_optimizer_save(), on any device. Further steps have the same bits as without the copy.
 *
 * - `device_type`, `device_index`: one of NVFP4_DEVICE_*, and its number.
 * - `libtorch`: 1 if its results should be tensors of libtorch, 0 if of this library.
 */
NVFP4_API
NVFP4_Status NVFP4_optimizer_restore(const uint8_t *bytes,
                                     size_t length,
                                     int32_t device_type,
                                     int32_t device_index,
                                     int32_t libtorch,
                                     NVFP4_OptimizerState **out);

/** Adds a reference to an optimizer. */
NVFP4_API NVFP4_Status NVFP4_optimizer_retain(NVFP4_OptimizerState *state);

/** Gives up a reference to an optimizer. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_optimizer_release(NVFP4_OptimizerState *state);

/**
 * Takes a step of AdamW, with the bias correction of its number. A gradient that is not finite is #NVFP4_INVALID_ARGUMENT, and changes
 * nothing. Waits for a GPU.
 *
 * - `gradient`: of the weight's shape and in its place, bfloat16 or float32, on the CPU any floating type.
 * - `options`: NULL for the defaults.
 * - `changed`, `changed_delivered`: the number of weights whose stored code changed, and whose delivered code changed; each may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_optimizer_step(NVFP4_OptimizerState *state,
                                  void *gradient,
                                  const NVFP4_StepOptions *options,
                                  uint64_t *changed,
                                  uint64_t *changed_delivered);

/** Writes the number of steps made, and the bytes held; each may be NULL. */
NVFP4_API
NVFP4_Status NVFP4_optimizer_size(const NVFP4_OptimizerState *state,
                                  uint64_t *steps,
                                  uint64_t *bytes);

/**
 * Writes the weight as a tensor of the floating type `dtype`, of the kind that the optimizer was created with.
 *
 * - `delivered`: 1 for the NVFP4 codes alone, 0 for the full stored precision.
 */
NVFP4_API
NVFP4_Status NVFP4_optimizer_weight(NVFP4_OptimizerState *state,
                                    int32_t delivered,
                                    int32_t dtype,
                                    void **out);

/**
 * Writes the delivered weight, as NVFP4 in host memory. #NVFP4_UNSUPPORTED for bfloat16 and float32.
 *
 * - `codes`: uint8 `[.., K / 2]`.
 * - `scales`: float8_e4m3fn `[.., K / 16]`.
 * - `global_scale`: the global scale.
 */
NVFP4_API
NVFP4_Status NVFP4_optimizer_delivered(NVFP4_OptimizerState *state,
                                       NVFP4_Tensor **codes,
                                       NVFP4_Tensor **scales,
                                       float *global_scale);

/** Copies the complete state, for NVFP4_optimizer_restore(). Writes the number of bytes to `length`; see ARRAYS OUT above. */
NVFP4_API
NVFP4_Status NVFP4_optimizer_save(NVFP4_OptimizerState *state,
                                  uint8_t *buffer,
                                  size_t capacity,
                                  size_t *length);

/**
 * Writes a seed for #NVFP4_ROUNDING_STOCHASTIC, derived from three numbers, for NVFP4_QuantizeOptions. Every tensor and step then has its
 * own random bits, and each element by its index.
 */
NVFP4_API
NVFP4_Status NVFP4_rounding_seed(uint64_t seed,
                                 uint64_t tensor,
                                 uint64_t step,
                                 uint64_t *out);

/**
 * Multiplies `x` `[.., K]` by the transpose of a weight `[N, K]`, whose values are rounded to 4 bits as by NVFP4_ste_weight(): `[.., N]`
 * in the type of `x`. Sums are float32.
 */
NVFP4_API
NVFP4_Status NVFP4_ste_linear(void *x,
                              void *weight,
                              void **out);

/**
 * The gradients of NVFP4_ste_linear(), from the gradient of its result. The gradient of `x` goes through the rounded weight; that of the
 * weight passes the rounding unchanged (straight-through estimator).
 *
 * - `gradient`: `[.., N]`.
 * - `dx`: the gradient of `x`, in its shape and type; NULL if it is not wanted.
 * - `dweight`: the gradient of `weight`, in its shape and type; NULL if it is not wanted.
 */
NVFP4_API
NVFP4_Status NVFP4_ste_linear_backward(void *x,
                                       void *weight,
                                       void *gradient,
                                       void **dx,
                                       void **dweight);

/**
 * @defgroup torchsharp Drop-in functions for TorchSharp hosts, with the signatures those hosts bind
 *
 * They take tensor handles as `void *`: either #NVFP4_Tensor, or pointers to libtorch tensors (2.10 or later), which TorchSharp has in
 * Tensor.Handle. All handles of a call must be of one kind. Results are always new handles of that kind, which the caller releases or
 * disposes of. libtorch is looked up in the process when such a handle is passed; it is not needed otherwise.
 *
 * The functions return no status: after a call, NVFP4_last_status() is #NVFP4_OK or says why a result is NULL. When
 * NVFP4_quantize, NVFP4_scaled_mm or NVFP4_to_managed fails on tensors of TorchSharp, its own error check after the call
 * throws the message.
 *
 * On a GPU they are asynchronous, like libtorch: errors that the device finds fail a later call, see ASYNCHRONOUS ERRORS
 * above.
 *
 * libtorch's tensors may have any strides and offset, and may require a gradient; results never do. They are read in
 * place, and results are allocated by libtorch. On a GPU the work is ordered with libtorch's current stream.
 */

/**
 * Quantizes `input` `[.., K]` (float16, bfloat16 or float32; K a multiple of 16) with block scales alone.
 *
 * - `qdata`: uint8 `[.., K / 2]`, the even index in the low nibble; NULL on failure.
 * - `scale`: float8_e4m3fn `[.., K / 16]`, row-major: amax / 6, clamped to [2^-16, 448]; NULL on failure.
 *
 * The results are where the input is. On a GPU they have the same bits as on the CPU, and the call does not wait. For
 * libtorch's tensors they are matrices: the leading dimensions are flattened into one.
 */
NVFP4_API
void NVFP4_quantize(void *input,
                    void **qdata,
                    void **scale);

/**
 * Multiplies two NVFP4 matrices: `[M, N]` of `out_dtype` (5 float16, 15 bfloat16 or 6 float32), or NULL on failure.
 *
 * - `mat1`: uint8 `[M, K / 2]`.
 * - `mat2`: uint8 `[K / 2, N]`, the transposed view of `[N, K / 2]`.
 * - `scale_a`, `scale_b`: float8_e4m3fn, or uint8 holding its bytes, in swizzled order (#NVFP4_SCALES_SWIZZLED) for M rows
 *   and for N rows.
 *
 * The product is computed where the four tensors are, and the result is there too; the call does not wait for a GPU: see
 * NVFP4_matmul().
 */
NVFP4_API
void *NVFP4_scaled_mm(void *mat1,
                      void *mat2,
                      void *scale_a,
                      void *scale_b,
                      int8_t out_dtype);

/**
 * Frees what the library keeps for reuse: workspaces, the threads of calls that name no device, and free memory of the
 * GPUs in use, for which it waits. Objects that are in use keep what they need. Not needed before the process ends.
 */
NVFP4_API
void NVFP4_empty_cache(void);

/**
 * Whether tensors can be in managed (unified) memory of CUDA device 0: 1 or 0. NVFP4_diagnose() says why not. Also 0 if
 * the process has a libtorch that cannot use such memory.
 */
NVFP4_API
int32_t NVFP4_can_use_managed(void);

/** Whether a tensor is in managed memory: 1 or 0; also 0 if the handle is not a tensor. */
NVFP4_API int32_t NVFP4_is_managed_tensor(void *tensor);

/**
 * Gives a tensor with the values of `input` in managed memory: a copy, or another handle of `input` if that is in managed
 * memory already. NULL on failure. The tensor belongs to the CUDA device `prefetch_device`; with -1 to the device of the
 * input, or to device 0 if that is in host memory.
 *
 * - `prefetch_device`: the CUDA device to prefetch it to, or -1 for none.
 * - `read_mostly`: non-zero if it will be read far more often than written.
 */
NVFP4_API
void *NVFP4_to_managed(void *input,
                       int32_t prefetch_device,
                       int32_t read_mostly);

/** Prefetches a tensor in managed memory to the CUDA device `device_index`, or to the host with -1. */
NVFP4_API void NVFP4_managed_prefetch(void *tensor, int32_t device_index);

#ifdef __cplusplus
}  /* extern "C" */
#endif

#endif  /* NVFP4_H */
