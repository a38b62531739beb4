/*
 * libNVFP4: 4-bit floating point with block scales (NVFP4) for any host language. Quantize, multiply, and run Qwen3-class
 * language models whose weights stay in 4 bits.
 *
 *     NVFP4_Model *model = NULL;
 *     NVFP4_Session *session = NULL;
 *     if (NVFP4_model_load(path, strlen(path), NULL, NULL, &model) ||
 *         NVFP4_session_create(model, NULL, &session) ||
 *         NVFP4_session_chat(session, question, strlen(question), NULL, print_piece, NULL, NULL))
 *         fprintf(stderr, "%s\n", NVFP4_last_error());
 *
 * This file is the authority on the C interface: what is not in it is not part of it. It is generated from the library's
 * source; change it there. The rules, all of them; NOTHING BUT VALUES, ERRORS OF A GPU and SAME BITS go into detail below.
 *
 * OWNERSHIP. Handles are counted: what creates one gives the caller a reference, _retain adds one, _release gives one up (and takes
 * NULL). They keep what they need alive, a session its model, a view its memory, so any order of release is right. One that is
 * NULL, released, of another type or of another copy of the library gives NVFP4_INVALID_HANDLE. None is used again.
 *
 * ERRORS. What can fail returns an NVFP4_Status: NVFP4_OK (0) or a positive number. NVFP4_last_error() then has one line for people,
 * of the calling thread; NVFP4_take_error() makes an object of it that any thread may read. Results go through pointers, at the
 * end of the parameters, and are untouched on failure unless the function says otherwise.
 *
 * THREADS. Any thread may call any function, and needs 96 KiB of stack for it, beside its own frames and callbacks. Where a handle
 * parameter is const, calls may overlap. Where it is not, the call has the handle for itself, and another one gives NVFP4_BUSY.
 *
 * CALLBACKS take the caller's word (void *user) first and return an int32_t: 0 to go on, anything else to cancel. They run on the
 * thread that made the call, never after it returns (log callbacks excepted), must not throw or longjmp, and may call the library,
 * but not with a handle that is in use.
 *
 * CANCELLING. Long calls take NVFP4_CallOptions: a handle or a flag that ends them from anywhere, before they begin too.
 *
 * SIGNALS. The library handles none, raises none, and blocks all in its own threads; a signal interrupts no call. A handler may call
 * NVFP4_cancel_trigger() and NVFP4_cancel_reset(), and nothing else.
 *
 * FORK. A child has its parent's models, sessions and tensors of the CPU, and works with them. A session that a thread of the parent
 * was using then gives NVFP4_BUSY there for ever, and can be released. CUDA does not work in the child of a process that
 * has used it: all that is on a GPU gives NVFP4_DEVICE_UNAVAILABLE.
 *
 * UNLOADING. There is no init and no shutdown. Once loaded, the library stays in the process, whatever dlclose() says. Who leaves
 * takes back his log callbacks, and the tensors over memory that goes with him. A process may end at any time.
 *
 * VERSIONS. NVFP4_ABI_VERSION changes only when a program built with an older header would break: NVFP4_check_version() says whether a
 * library serves a program, and what to install if not. On Linux the soname is libNVFP4.so.0, after NVFP4_VERSION_MAJOR;
 * libNVFP4.so is a link for those who compile, and for hosts that load it by that name.
 *
 * TEXT is UTF-8. In: a pointer and a length in bytes; no NUL is needed. Out: the caller's buffer and its capacity; the length
 * in bytes is always written, the text is copied if it fits, and a NUL follows it if that fits too; else the result is
 * NVFP4_BUFFER_TOO_SMALL. A NULL buffer with capacity 0 asks for the length alone. ARRAYS OUT are the same, in elements.
 *
 * STRUCTS start with struct_size, sizeof the struct as the caller was compiled; for elements of arrays it is a parameter. Options
 * have an _init function that sets it with the defaults, and NULL means the defaults. For results the caller sets it. They grow at
 * their end in later versions: what an older caller does not know has its default, and what a newer caller uses that the library
 * does not know gives NVFP4_ABI_MISMATCH, as does a size that no version had. Flags are int32_t, 0 or 1.
 */

/*
 * NOTHING BUT VALUES crosses this interface: no exception, no panic, no signal, no exit, and no line on standard error. Where the
 * system refuses memory or threads, calls give NVFP4_OUT_OF_MEMORY, change nothing, and work when there is memory again. _release
 * always works. To that end the library keeps 8 MiB of address space in reserve from the first call on, which takes memory only
 * when it is used, and while a call runs more where code of others allocates: 512 bytes for each byte of text to be tokenized, 32 for
 * each of a tokenizer.json, 16 for each of a message to be rendered. Without its reserve a call does not begin. Four things are not
 * covered: a chat template, which is a program, that makes more of its messages than that; the driver of a GPU; the C library where
 * it ends the process itself, for which 1 MiB is kept; and a system that promises memory it does not have, and ends processes when
 * they use it. Nor does the first thread of a process have its 96 KiB of
 * stack if it has not used them before the process runs out of addresses.
 *
 * ERRORS OF A GPU. A call on tensors of a CUDA device checks its arguments, enqueues its work and returns; it waits for the
 * device only where this file says so. What the device alone can see - values that are not finite in what is quantized, block
 * scales that are NaN or negative in what is multiplied - it finds when the work runs. The next call on tensors of that device
 * then fails with NVFP4_INVALID_ARGUMENT, in whichever thread that is: a call that waits for the device, in any case; another,
 * if the device has come so far. The message names the function that was given the tensor, its number among the calls that the
 * device has checked, and the first element that is wrong. What that call gave is undefined, and so is what was made of it;
 * the call that reports it has failed like any other. Each such failure is reported once; of several at once the message has
 * the first in full, and how many there were. NVFP4_device_synchronize() asks for them. The CPU has done the work of a call,
 * and found all that is wrong with it, when the call returns.
 *
 * SAME BITS. On the CPU, a token's logits have the same bits alone, beside others in a batch, and in a prompt however it was
 * divided; on any number of threads and any instruction set. On a GPU the same calls in the same order on the same kind of GPU
 * give the same bits; a prompt, a decode step and a step of another number of sessions add up in different orders, so their
 * logits differ by rounding, and where two tokens are nearly equally likely, so may the choice. From the same logits the same
 * token is chosen everywhere.
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

/* From dlpack.h, which is only needed by those who use it. */
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

/** The allocation would pass the budget of NVFP4_memory_set_budget(). */
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

/** A callback or a cancel call stopped the work. */
#define NVFP4_CANCELLED 10

/** The caller's buffer is too small; the required length was written. */
#define NVFP4_BUFFER_TOO_SMALL 11

/** A handle is NULL, stale, foreign or of another type. */
#define NVFP4_INVALID_HANDLE 12

/** A struct_size or version does not fit this library. */
#define NVFP4_ABI_MISMATCH 13

/** No such device, or its driver is missing. */
#define NVFP4_DEVICE_UNAVAILABLE 14

/** A defect in this library; the message is the panic's. The handle that was in exclusive use, if any, stays unusable. */
#define NVFP4_INTERNAL 15

/** Version of the library this header belongs to. */
#define NVFP4_VERSION_MAJOR 0

/** See #NVFP4_VERSION_MAJOR. */
#define NVFP4_VERSION_MINOR 1

/** See #NVFP4_VERSION_MAJOR. */
#define NVFP4_VERSION_PATCH 0

/** The three in one number that grows with each version, major * 10000 + minor * 100 + patch. */
#define NVFP4_VERSION_NUMBER 100

/**
 * Version of the binary interface this header describes. A program built with one number runs with any library that
 * reports the same one.
 */
#define NVFP4_ABI_VERSION 1

/** Log what went wrong inside the library. */
#define NVFP4_LOG_ERROR 1

/** Log what may surprise, and more severe messages. */
#define NVFP4_LOG_WARN 2

/** Log milestones, and more severe messages. */
#define NVFP4_LOG_INFO 3

/** Log details, every error returned among them, and more severe messages. */
#define NVFP4_LOG_DEBUG 4

/** Log everything. */
#define NVFP4_LOG_TRACE 5

/** All tags together. Its peak is that of the sum. */
#define NVFP4_MEMORY_TOTAL 0

/** Weights in the form the kernels read. */
#define NVFP4_MEMORY_WEIGHTS 1

/** Cached keys and values of sessions. */
#define NVFP4_MEMORY_KV_CACHE 2

/** Activations and workspaces. */
#define NVFP4_MEMORY_SCRATCH 3

/** Tensors made through the tensor chapter or as results. */
#define NVFP4_MEMORY_TENSOR 4

/** Weights on GPUs. All NVFP4_MEMORY_DEVICE_* are of GPUs, and the others of the host. */
#define NVFP4_MEMORY_DEVICE_WEIGHTS 5

/** Cached keys and values of sessions on GPUs. */
#define NVFP4_MEMORY_DEVICE_KV_CACHE 6

/** Activations and workspaces on GPUs. */
#define NVFP4_MEMORY_DEVICE_SCRATCH 7

/** Tensors on GPUs. */
#define NVFP4_MEMORY_DEVICE_TENSOR 8

/** No managed memory. */
#define NVFP4_MANAGED_DISABLED 0

/** Managed memory where the device can, and other memory where it cannot. */
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

/** Two E2M1 codes in one byte; an element is the pair. */
#define NVFP4_DTYPE_FLOAT4_E2M1FN_X2 45

/** The host's memory. All NVFP4_DEVICE_* are libtorch's numbers. */
#define NVFP4_DEVICE_CPU 0

/** A CUDA device, numbered from 0. */
#define NVFP4_DEVICE_CUDA 1

/**
 * The library's choice, where a device is chosen for work; its index is 0 (or -1). A model gets the GPU that has room for it,
 * or else the CPU, and NVFP4_model_info() says why; a weight gets CUDA device 0 if there is one, or else the CPU.
 */
#define NVFP4_DEVICE_AUTO -1

/** A multiplier for the whole tensor above the block scales. */
#define NVFP4_LEVELS_TWO 0

/** Block scales alone; the multiplier is 1. */
#define NVFP4_LEVELS_SINGLE 1

/** The single-level rule of NVFP4_quantize(). */
#define NVFP4_LEVELS_LEGACY 2

/** The largest magnitude of a block becomes 6. */
#define NVFP4_RECIPE_AMAX 0

/** The largest magnitude of a block becomes 6 or 4, whichever has the smaller squared error. */
#define NVFP4_RECIPE_FOUR_OVER_SIX 1

/** The scale, of all there are, with the smallest squared error. */
#define NVFP4_RECIPE_SWEEP 2

/** To the nearer code; a tie goes to the even one. What the hardware does. */
#define NVFP4_ROUNDING_NEAREST_EVEN 0

/** To the nearer code; a tie goes away from zero. */
#define NVFP4_ROUNDING_HALF_AWAY 1

/** Up or down by chance, so that the expected result is the value. The seed fixes the chance. */
#define NVFP4_ROUNDING_STOCHASTIC 2

/** NaN and infinity are errors that name the first index. */
#define NVFP4_NONFINITE_ERROR 0

/** NaN counts as 0, an infinity as the largest value that fits. */
#define NVFP4_NONFINITE_SATURATE 1

/** Scales row-major, `[.., K / 16]`. */
#define NVFP4_SCALES_LINEAR 0

/** Scales in the 128 x 4 tiles that tensor cores read, padded with zeros, as one run of bytes. */
#define NVFP4_SCALES_SWIZZLED 1

/**
 * Activations as they are (W4A16 with an NVFP4 weight): on the CPU in float; on a GPU in float16, each row scaled by a power of
 * two that keeps it in range, or in bfloat16 where the weight is.
 */
#define NVFP4_ACTIVATIONS_EXACT 0

/**
 * Activations rounded to 8 bits, one scale for each 32 along K (W4A8). Faster, and not exact. Dense weights ignore it.
 * For the CPU only: with an NVFP4 weight on a GPU it is #NVFP4_UNSUPPORTED.
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

/** No weight in 4 bits. */
#define NVFP4_FORMAT_NONE 0

/** Codes of E2M1 with a scale for each 16 along K. */
#define NVFP4_FORMAT_NVFP4 1

/** NF4 of bitsandbytes. */
#define NVFP4_FORMAT_NF4 2

/** Weights of several formats. */
#define NVFP4_FORMAT_MIXED 3

/** A directory of safetensors in ModelOpt's layout, with config and tokenizer. */
#define NVFP4_CONTAINER_MODELOPT 0

/** TorchSharp's `.dat` with single-level scales, and config and tokenizer beside it. */
#define NVFP4_CONTAINER_DAT 1

/** Cached keys and values in IEEE half precision. */
#define NVFP4_KV_FLOAT16 0

/** Cached keys and values in IEEE single precision: unrounded, in twice the memory. */
#define NVFP4_KV_FLOAT32 1

/** Refuse tokens that do not fit: #NVFP4_CONTEXT_FULL, or #NVFP4_FINISH_CONTEXT within a generation. */
#define NVFP4_EVICTION_ERROR 0

/**
 * Forget old tokens: the older half of those after the first `keep`, or more if that is not enough. What stays is run anew. A chat
 * forgets whole turns, never what stands before the first user's words or the last question.
 */
#define NVFP4_EVICTION_DROP_OLDEST 1

/**
 * A seed that is drawn anew for each generation, whose result tells it. Steps of sessions draw it when the session is made, and
 * anew when it is cut.
 */
#define NVFP4_SEED_NEW 18446744073709551615ull

/** Nothing has ended the text yet. */
#define NVFP4_FINISH_NONE -1

/** A stop token ended the text. */
#define NVFP4_FINISH_STOP 0

/** A stop string ended the text. */
#define NVFP4_FINISH_STOP_STRING 1

/** As many tokens were generated as were allowed. */
#define NVFP4_FINISH_LENGTH 2

/** The context is full. */
#define NVFP4_FINISH_CONTEXT 3

/** A callback, a cancel handle or a flag ended it. What was generated until then is kept. */
#define NVFP4_FINISH_CANCELLED 4

/** A token, with the text that it completes. */
#define NVFP4_EVENT_TOKEN 0

/** No token, but text: more that the token before completes, or what was held back in case it was the beginning of something else. */
#define NVFP4_EVENT_TEXT 1

/** The text itself: the answer in a chat, and all that is generated outside of one. */
#define NVFP4_PART_CONTENT 0

/** What the model thinks before it answers. */
#define NVFP4_PART_REASONING 1

/** A call of a tool, whole: a JSON object with `id`, `type` and `function`, which has `name` and `arguments`, a text of JSON. */
#define NVFP4_PART_TOOL_CALL 2

/** What ends calls early. See the chapter on long calls. */
typedef struct NVFP4_Cancel NVFP4_Cancel;

/** The text of one sequence. See the detokenizer chapter. */
typedef struct NVFP4_Detokenizer NVFP4_Detokenizer;

/** An error as an object, which may go to another thread. See NVFP4_take_error(). Immutable. */
typedef struct NVFP4_Error NVFP4_Error;

/** A loaded model. See the model chapter. */
typedef struct NVFP4_Model NVFP4_Model;

/** A session. See the session chapter. */
typedef struct NVFP4_Session NVFP4_Session;

/** A tensor. See the tensor chapter. */
typedef struct NVFP4_Tensor NVFP4_Tensor;

/** A weight `[N, K]` prepared for products. Immutable; several threads may use it at once. */
typedef struct NVFP4_Weight NVFP4_Weight;

/** What a call came to: #NVFP4_OK, or #NVFP4_INVALID_ARGUMENT and the numbers after it, which are never reused. */
typedef int32_t NVFP4_Status;

/**
 * Takes a log message: one line of UTF-8, `length` bytes without a NUL. Unlike other callbacks it is kept, and called on
 * whichever thread has something to say, on several at once too. What it calls of the library is not logged; it may add and remove
 * log callbacks, itself too, but should do no more. Its result is ignored; return 0.
 */
typedef int32_t (*NVFP4_LogCallback)(void *user, int32_t level, const char *message, size_t length);

/** Takes back the word of a log callback. */
typedef void (*NVFP4_LogRelease)(void *user);

/**
 * Is told how far a long call is, now and then, on the thread that made it: in bytes of a file, in values of a tensor, or in tokens of a
 * prompt (a generation counts on with those it makes). Returns 0 to go on, anything else to cancel. It should be quick: the call waits for it.
 * It may call the library, but not use the model that is being run: that gives #NVFP4_BUSY.
 */
typedef int32_t (*NVFP4_ProgressCallback)(void *user, uint64_t done, uint64_t total);

/**
 * What may end a long call, and who hears how far it is. Fill with NVFP4_call_options_init(), then change what is to differ.
 * It and what it points to must stay as long as the call runs.
 */
typedef struct NVFP4_CallOptions {
    /** sizeof(NVFP4_CallOptions) as the caller knows it. */
    uint32_t struct_size;
    /** Leave it 0. */
    int32_t reserved;
    /** Ends the call when it is triggered, or if it has been. Default: NULL. */
    const NVFP4_Cancel *cancel;
    /**
     * Ends the call when it is not 0: a variable of the host, which any thread and any signal handler may write. Aligned to 4
     * bytes. Default: NULL.
     */
    const volatile int32_t *cancel_flag;
    /** Is told how far the call is, at its end too. Default: NULL. */
    NVFP4_ProgressCallback progress;
    /** The first argument of `progress`. */
    void *user;
} NVFP4_CallOptions;

/**
 * Takes back memory that the host lent: called once with the data pointer and the host's word, on whichever thread gives up
 * the last use of the memory.
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
    /** For stochastic rounding. Default: 0. */
    uint64_t seed;
    /**
     * What may end NVFP4_tensor_quantize(), and hears how far it is, in values. Leave it NULL where a model is loaded or converted: that
     * has one in its own options. Default: NULL.
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
    /** Which device of that type. Default: 0. */
    int32_t device_index;
    /** One of NVFP4_SCALES_*, for NVFP4 weights. Default: linear. */
    int32_t scale_layout;
    /**
     * What a decoded weight is held as: #NVFP4_DTYPE_FLOAT32, which is what decoding gives, or #NVFP4_DTYPE_FLOAT16 or
     * #NVFP4_DTYPE_BFLOAT16, to which that is rounded, to nearest even. Default: float32.
     */
    int32_t dense_dtype;
    /**
     * 1 to count only a GPU's kernels as kernels, which is how TorchSharp.Q4.Extension understands a CPU target: the
     * kernel-only path is an error there, and the other paths decode. Default: 0.
     */
    int32_t exclude_cpu_kernels;
    /** Must be 0. */
    int32_t reserved;
    /** The name of the only backend that will do, in UTF-8, or NULL. Default: NULL. */
    const char *backend;
    /** Bytes of `backend`. */
    size_t backend_length;
} NVFP4_WeightOptions;

/**
 * A tensor as its host describes it. Nothing is read but the description. Later versions may add to its end: where they are taken,
 * so is their size.
 */
typedef struct NVFP4_NamedTensor {
    /** Its name, in UTF-8. */
    const char *name;
    /** Bytes of `name`. */
    size_t name_length;
    /** The type of its elements, as NVFP4_DTYPE_* number it. Tensors of other types may be in the set, but in no 4-bit weight. */
    int32_t dtype;
    /** Dimensions, at most 8. */
    int32_t rank;
    /** `rank` sizes, outermost first. */
    const int64_t *sizes;
} NVFP4_NamedTensor;

/** What a set of tensors holds, in short. NVFP4_schema_report() has all of it. */
typedef struct NVFP4_SchemaResult {
    /** sizeof(NVFP4_SchemaResult) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_FORMAT_*. */
    int32_t format;
    /** Tensors looked at: those under the prefix. */
    size_t tensors;
    /** 4-bit weights among them. */
    size_t weights;
    /** What NVFP4_schema_validate() would complain of; 0 if it would not. */
    size_t problems;
    /** If there is exactly one weight, its output features, N; or 0 where the shapes do not tell. */
    int64_t out_features;
    /** If there is exactly one weight, its input features, K; or 0 where the shapes do not tell. */
    int64_t in_features;
    /** If there is exactly one weight, the values that share a scale; or 0 where the shapes do not tell. */
    int64_t block;
} NVFP4_SchemaResult;

/** How to load a model. Fill with NVFP4_load_options_init(), then change what is to differ. */
typedef struct NVFP4_LoadOptions {
    /** sizeof(NVFP4_LoadOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * One of NVFP4_DEVICE_*. #NVFP4_DEVICE_AUTO is the GPU that has room for the model, or else the CPU: also where the model
     * asks for what no GPU does, or a GPU fails for want of memory or kernels, in which case loading begins anew. Default: CPU.
     */
    int32_t device_type;
    /** Which device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0. */
    int32_t device_index;
    /**
     * CPU threads of this model, or 0 for those of NVFP4_set_threads(), which models share. A model on a GPU has no use for
     * them. Default: 0.
     */
    int32_t threads;
    /** One of NVFP4_ACTIVATIONS_*; a GPU has only the exact ones. Default: exact. */
    int32_t activations;
    /** 1 to leave out the layers: tokenizer, embedding, final norm and head only. Default: 0. */
    int32_t sampling_only;
    /** What may end the call, and who hears how many bytes are read; NULL for nobody. Default: NULL. */
    const NVFP4_CallOptions *call;
} NVFP4_LoadOptions;

/** A message of a conversation. Later versions may add to its end: where they are taken, so is their size. */
typedef struct NVFP4_Message {
    /** Who speaks: "system", "user", "assistant". */
    const char *role;
    /** Bytes of `role`. */
    size_t role_length;
    /** What is said. */
    const char *content;
    /** Bytes of `content`. */
    size_t content_length;
} NVFP4_Message;

/** How to convert a model. Fill with NVFP4_convert_options_init(), then change what is to differ. */
typedef struct NVFP4_ConvertOptions {
    /** sizeof(NVFP4_ConvertOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_CONTAINER_*; says what the destination becomes. Default: ModelOpt. */
    int32_t container;
    /**
     * 1 to replace a directory that holds a model, and no folders, with all that is in it; 0 to refuse one that is not empty.
     * Default: 0.
     */
    int32_t replace;
    /** 1 to leave the output head as it is. Default: 0. */
    int32_t keep_head;
    /** What may end the call, and who hears how many bytes of the source are done; NULL for nobody. Default: NULL. */
    const NVFP4_CallOptions *call;
} NVFP4_ConvertOptions;

/** How to make a session. Fill with NVFP4_session_options_init(), then change what is to differ. */
typedef struct NVFP4_SessionOptions {
    /** sizeof(NVFP4_SessionOptions) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_KV_*. Default: half precision. */
    int32_t kv_type;
    /** One of NVFP4_EVICTION_*. Default: error. */
    int32_t eviction;
    /** Leave it 0. */
    int32_t reserved;
    /** Tokens to hold at most; memory is taken as they come. 0, the default, is what the model was made for. */
    size_t context;
    /** Tokens at the beginning that eviction never forgets. Default: 0. A chat's system prompt stays in any case. */
    size_t keep;
    /** What chat turns tell the model first about its role. Default: NULL, nothing. Copied. */
    const char *system;
    /** Bytes of `system`. */
    size_t system_length;
} NVFP4_SessionOptions;

/**
 * How to generate. Fill with NVFP4_generate_options_init(), or as the model's maker asks with NVFP4_model_generate_options(), then
 * change what is to differ. Arrays and texts are read during the call only.
 */
typedef struct NVFP4_GenerateOptions {
    /** sizeof(NVFP4_GenerateOptions) as the caller knows it. */
    uint32_t struct_size;
    /** Divides the logits before a draw. 0, the default, takes the likeliest token. */
    float temperature;
    /** Draws from this many of the likeliest tokens. Default: 0, all. */
    int32_t top_k;
    /**
     * Draws from the fewest of the likeliest tokens whose probabilities reach this sum. 0 takes the likeliest
     * one. Default: 1, all.
     */
    float top_p;
    /** Leaves out tokens less likely than this share of the likeliest. Default: 0, none. */
    float min_p;
    /** Makes tokens that have occurred less likely. Default: 1, not at all. */
    float repetition_penalty;
    /** 1 takes the model's own stop tokens like any other. Default: 0. */
    int32_t ignore_model_stops;
    /** 1 computes each token from the whole sequence without the cache, for comparison; slow. Default: 0. */
    int32_t replay;
    /** 1 gives each token's log-probability to the callback, for which the logits of each come to the host. Default: 0. */
    int32_t log_probabilities;
    /** Leave it 0. */
    int32_t reserved;
    /** Tokens to generate at most. Default: SIZE_MAX, as many as the context has room for. With 0 a prompt is run and nothing generated. */
    size_t max_tokens;
    /**
     * Fixes the draws: the same seed at the same place gives the same token. A place is the number of tokens appended before
     * it, those that eviction has forgotten included. Default: #NVFP4_SEED_NEW.
     */
    uint64_t seed;
    /** Tokens that end the text, besides the model's own. The one that did is not appended. Default: NULL. */
    const int32_t *stop_tokens;
    /** Elements of `stop_tokens`. */
    size_t stop_token_count;
    /**
     * Texts that end the text and are not part of it, in UTF-8. A special token gives no text, but counts where one of these
     * has its name in it. Default: NULL.
     */
    const char *const *stop_strings;
    /** Bytes of each of `stop_strings`. */
    const size_t *stop_string_lengths;
    /** Elements of `stop_strings` and of `stop_string_lengths`. */
    size_t stop_string_count;
    /** What may end the call, and who hears how many tokens are run; NULL for nobody. Default: NULL. */
    const NVFP4_CallOptions *call;
} NVFP4_GenerateOptions;

/** What a generation has to say. Later versions may add to its end: a field is there if `struct_size` reaches that far. */
typedef struct NVFP4_TokenEvent {
    /** sizeof(NVFP4_TokenEvent) as the library knows it. */
    uint32_t struct_size;
    /** One of NVFP4_EVENT_*. */
    int32_t kind;
    /** The token, or -1 where the event is none. */
    int32_t token;
    /** Which session of a batch it is for; 0 for the only one. */
    int32_t index;
    /**
     * Whole UTF-8 characters without a NUL behind; none while a character, or what may be a stop string or a mark of the model's, is
     * incomplete. The contents of all events together are the generation's text, unless the callback ends it. Valid during
     * the callback.
     */
    const char *text;
    /** Bytes of `text`. */
    size_t text_length;
    /**
     * The natural logarithm of the token's probability as the model gives it, before temperature, penalties and the like; NaN
     * unless `log_probabilities` of the options is 1.
     */
    float log_probability;
    /** What the text is, or is going to be: one of NVFP4_PART_*. */
    int32_t part;
} NVFP4_TokenEvent;

/**
 * Is given each token as it comes, in the order of the text. Returns 0 to go on, anything else to end the generation, which keeps
 * that token.
 */
typedef int32_t (*NVFP4_TokenCallback)(void *user, const NVFP4_TokenEvent *event);

/** What a generation came to. Set `struct_size` before the call. */
typedef struct NVFP4_GenerationResult {
    /** sizeof(NVFP4_GenerationResult) as the caller knows it. */
    uint32_t struct_size;
    /** One of NVFP4_FINISH_*. */
    int32_t finish;
    /** Tokens before the first generated one: all that the session held, or those that a chat turn added. */
    size_t prompt_tokens;
    /** Tokens generated. They are the session's last ones. */
    size_t generated_tokens;
    /** Time for the prompt, as far as it had not been run. */
    double prefill_seconds;
    /** Time from the call to the first token. */
    double first_token_seconds;
    /** Time from the first token to the end. */
    double decode_seconds;
    /** The seed of the draws, which repeats them. */
    uint64_t seed;
    /** Calls of tools in the answer; NVFP4_session_tool_calls() has them. */
    size_t tool_calls;
} NVFP4_GenerationResult;

/**
 * How a turn is written and answered. Fill with NVFP4_chat_options_init(), then change what is to differ. Texts are read during the
 * call only.
 */
typedef struct NVFP4_ChatOptions {
    /** sizeof(NVFP4_ChatOptions) as the caller knows it. */
    uint32_t struct_size;
    /**
     * 1 leaves earlier answers in the session with their reasoning, whatever the template does about it: a turn then runs only
     * what it adds, but the model sees what it was not trained on, and the context fills sooner. Default: 0.
     */
    int32_t keep_reasoning;
    /**
     * The most tokens that a thought may have, or -1 for any number. Then it is ended in the words of the model's maker, and the answer
     * follows. A model that does not think has none to end. Default: -1.
     */
    int64_t reasoning_budget;
    /**
     * Variables of the model's template: a JSON object such as `{"enable_thinking": false}`, or NULL for none. One that the template
     * never reads changes nothing, and is logged as a warning. Default: NULL.
     */
    const char *variables;
    /** Bytes of `variables`. */
    size_t variables_length;
    /**
     * The tools that the model may call: a JSON array of `{"type": "function", "function": {"name": ..., "description": ...,
     * "parameters": {...}}}`, or NULL for none. #NVFP4_UNSUPPORTED if the template knows no tools. Default: NULL.
     */
    const char *tools;
    /** Bytes of `tools`. */
    size_t tools_length;
} NVFP4_ChatOptions;

/**
 * @defgroup status Status numbers and the last error
 *
 * Every function that can fail returns an #NVFP4_Status. On any value but #NVFP4_OK outputs are untouched (unless the
 * function says otherwise) and a message for people is kept for the calling thread.
 */

/** The name of a status without its prefix ("INVALID_ARGUMENT"), or "unknown". The text is static. */
NVFP4_API const char *NVFP4_status_name(NVFP4_Status status);

/**
 * The message of the last call that failed on this thread: one line, what was wrong and what would be right. Empty if none
 * failed yet. Never NULL. Valid until the next call on this thread that fails or is one of the drop-in chapter; never free it.
 */
NVFP4_API
const char *NVFP4_last_error(void);

/**
 * The status that belongs to NVFP4_last_error(): the way to tell success from failure after the functions of the drop-in
 * chapter, which have no status of their own.
 */
NVFP4_API
NVFP4_Status NVFP4_last_status(void);

/**
 * Copies the message of NVFP4_last_error() into `buffer`, for hosts that may change threads between two calls. For the
 * buffer see TEXT above. Reading an error never changes it: where this call itself fails, its status alone says so.
 */
NVFP4_API
NVFP4_Status NVFP4_last_error_copy(char *buffer,
                                   size_t capacity,
                                   size_t *length);

/**
 * Takes this thread's last error away as an object with one reference, for another thread to read or for later: NVFP4_last_status()
 * is #NVFP4_OK then. `out` gets NULL if no call has failed.
 */
NVFP4_API
NVFP4_Status NVFP4_take_error(NVFP4_Error **out);

/** The status of the call that failed; #NVFP4_OK for NULL, and #NVFP4_INVALID_HANDLE for what is no error. */
NVFP4_API NVFP4_Status NVFP4_error_status(const NVFP4_Error *error);

/**
 * The message of the call that failed, as NVFP4_last_error() had it: valid until the error is released for the last time. Empty for
 * NULL and for what is no error; never NULL.
 */
NVFP4_API
const char *NVFP4_error_message(const NVFP4_Error *error);

/** Adds a reference to an error. */
NVFP4_API NVFP4_Status NVFP4_error_retain(NVFP4_Error *error);

/** Gives up a reference to an error. After the last one the handle is stale. */
NVFP4_API NVFP4_Status NVFP4_error_release(NVFP4_Error *error);

/**
 * @defgroup library The library itself: versions, logging, threads and what this machine offers
 */

/** Version of the library that runs, as "major.minor.patch". The text is static. */
NVFP4_API const char *NVFP4_version(void);

/**
 * The #NVFP4_ABI_VERSION of the library that runs. A host that loads the library by name compares it with the one it was
 * built with.
 */
NVFP4_API
int32_t NVFP4_abi_version(void);

/** The #NVFP4_VERSION_NUMBER of the library that runs. */
NVFP4_API int32_t NVFP4_version_number(void);

/**
 * Whether the library that runs serves a program, given as NVFP4_check_version(#NVFP4_ABI_VERSION, #NVFP4_VERSION_NUMBER): it must
 * have the same binary interface and be no older than the header that the program was built with. If not, the result is
 * #NVFP4_ABI_MISMATCH, and the message names both versions and says what to install.
 */
NVFP4_API
NVFP4_Status NVFP4_check_version(int32_t abi_version,
                                 int32_t version_number);

/**
 * Sends log messages of `level` and more severe ones to `callback` from now on, for the whole process, beside those that were
 * added before. Writes a token to `token`, by which NVFP4_log_remove() takes the callback back; tokens are not reused.
 * #NVFP4_UNSUPPORTED, each time, if the process is a Rust program with a subscriber of `tracing` of its own: it has the messages
 * already.
 *
 * - `release`: called once with `user` when the callback has been removed and will not be called again, on whichever thread leaves
 *   it last; not if this call fails. May be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_log_add(NVFP4_LogCallback callback,
                           void *user,
                           int32_t level,
                           NVFP4_LogRelease release,
                           uint64_t *token);

/**
 * Takes back a callback of NVFP4_log_add(): when the call returns, it is not running and will not be called again, and its word has
 * been released. From within a log callback, where nobody can be waited for, other threads may still be in it: there the release
 * says when that is over. #NVFP4_NOT_FOUND if `token` is none, or was removed before.
 */
NVFP4_API
NVFP4_Status NVFP4_log_remove(uint64_t token);

/**
 * Sets how many CPU threads calls and objects made from now on use, where they are not told otherwise. 0 leaves it to the
 * environment variable NVFP4_THREADS, or one thread per core. Results do not depend on it.
 */
NVFP4_API
NVFP4_Status NVFP4_set_threads(int32_t threads);

/**
 * What this library can do on this machine, as JSON: version, CPU levels with the one in use, the backends of linear layers,
 * the CUDA backend (driver, devices, compiler of kernels) and why what of it is unavailable, memory, and the environment
 * variables that are set. Opens each GPU for a moment. Keys may be added in later versions.
 */
NVFP4_API
NVFP4_Status NVFP4_diagnose(char *buffer,
                            size_t capacity,
                            size_t *length);

/**
 * @defgroup call Long calls: ending them early, and hearing how far they are
 *
 * Calls that may take long - loading, converting, quantizing, prompts, generations, session files - take an #NVFP4_CallOptions, or
 * have one in their options; a product of tensors takes as long as its operations, and none. It names what ends them: a cancel handle, a flag of the host, or the answer of a progress callback. All of them
 * are looked at every 50 ms or more often, on all devices, also while a prompt is run and while a call waits for another. What is
 * set before a call begins ends it when it begins: nothing is lost, and one handle may be in many calls.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_CallOptions). */
NVFP4_API NVFP4_Status NVFP4_call_options_init(NVFP4_CallOptions *options, uint32_t struct_size);

/** Makes a cancel handle, which is not triggered. */
NVFP4_API NVFP4_Status NVFP4_cancel_create(NVFP4_Cancel **out);

/**
 * Ends the calls that the handle was given to, those that have yet to begin too: a generation with what it has, anything else with
 * #NVFP4_CANCELLED. From any thread, from a callback, and from a signal handler: it takes no lock and no memory. It leaves
 * no message: what is no live cancel handle gives #NVFP4_INVALID_HANDLE, and that is all there is to say.
 */
NVFP4_API
NVFP4_Status NVFP4_cancel_trigger(NVFP4_Cancel *cancel);

/**
 * Makes the handle as it was at first, for more calls. Like NVFP4_cancel_trigger() it leaves no message and may be called anywhere. A
 * call that has seen it triggered ends all the same; one that has not goes on.
 */
NVFP4_API
NVFP4_Status NVFP4_cancel_reset(NVFP4_Cancel *cancel);

/** Writes 1 if the handle is triggered, else 0. */
NVFP4_API NVFP4_Status NVFP4_cancel_is_triggered(const NVFP4_Cancel *cancel, int32_t *triggered);

/** Adds a reference to a cancel handle. */
NVFP4_API NVFP4_Status NVFP4_cancel_retain(NVFP4_Cancel *cancel);

/** Gives up a reference to a cancel handle. After the last one it is stale; calls that run with it go on, and see it as it is. */
NVFP4_API
NVFP4_Status NVFP4_cancel_release(NVFP4_Cancel *cancel);

/**
 * @defgroup memory Memory: what is in use and for what, and a limit
 *
 * All of it is the library's own account of its large allocations, for the whole process, in host memory and on GPUs. One
 * budget covers them all together. What a GPU's driver, libraries and compiled kernels take is not in it, nor memory of
 * GPUs that is free and kept for reuse, which NVFP4_empty_cache() gives back.
 *
 * Managed (unified) memory has one address for the host and for CUDA devices, between which its pages move. Nothing is put
 * there unless the host asks for it: by NVFP4_to_managed(), or by NVFP4_tensor_by_managed_policy(), for a weight, say, under
 * a policy of the process. The environment variable TS_Q4_DISABLE_UM (1, true or yes) switches it off altogether.
 */

/**
 * Writes the bytes in use under `tag`, one of NVFP4_MEMORY_*, now and at most since the start or the last
 * NVFP4_memory_reset_peak().
 */
NVFP4_API NVFP4_Status NVFP4_memory_stats(int32_t tag, uint64_t *current, uint64_t *peak);

/** Starts the peaks again from what is in use now. */
NVFP4_API NVFP4_Status NVFP4_memory_reset_peak(void);

/**
 * Sets the most bytes all tags together may use, of the host and of GPUs; 0 removes the limit. An allocation that would pass
 * it fails with #NVFP4_OVER_BUDGET. What is allocated already stays.
 */
NVFP4_API
NVFP4_Status NVFP4_memory_set_budget(uint64_t bytes);

/** Writes the limit set by NVFP4_memory_set_budget(), or 0 if there is none. */
NVFP4_API NVFP4_Status NVFP4_memory_get_budget(uint64_t *bytes);

/** Sets the policy of the process on managed memory, one of NVFP4_MANAGED_*. At first it is #NVFP4_MANAGED_PREFERRED. */
NVFP4_API
NVFP4_Status NVFP4_memory_set_managed_policy(int32_t policy);

/** Writes the policy in force: what was set, or #NVFP4_MANAGED_DISABLED where TS_Q4_DISABLE_UM says so. */
NVFP4_API NVFP4_Status NVFP4_memory_get_managed_policy(int32_t *policy);

/**
 * Writes 1 if tensors can be in managed memory of the CUDA device `device_index`, and else 0: there is no such device, it
 * cannot share memory with the host while it works, or managed memory is switched off. NVFP4_diagnose() says which.
 */
NVFP4_API
NVFP4_Status NVFP4_memory_can_be_managed(int32_t device_index,
                                         int32_t *can);

/**
 * Gives what the policy makes of a tensor that the CUDA device `device_index` will use, a weight say: a copy in managed memory,
 * brought to the device, or another handle of the tensor itself, which stays where it is. `read_mostly` is 1 if it will be
 * read far more than written. Where the policy requires managed memory and it cannot be had, the call fails.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_by_managed_policy(const NVFP4_Tensor *tensor,
                                            int32_t device_index,
                                            int32_t read_mostly,
                                            NVFP4_Tensor **out);

/**
 * @defgroup tensor Tensors: typed, shaped views of memory
 *
 * A tensor is immutable in type and shape and may be used by several threads at once. Its memory is the host's to keep
 * readable and unchanging while a call uses it.
 *
 * A tensor may be in the memory of a CUDA device, or in managed memory, which counts as a device's here. What computes with
 * it then runs on that device and gives tensors there; a function that works on host memory alone refuses it with
 * #NVFP4_UNSUPPORTED. Calls use such memory in the order of the legacy default stream: after what the process enqueued
 * there before the call, and before what it enqueues there after it. With other streams, wait for them before a call, and let
 * them wait for the default stream after it.
 */

/**
 * Makes a tensor over memory of the host, without a copy.
 *
 * - `data`: the first element, aligned to its type. The library only reads it; it is not const because NVFP4_tensor_data() and
 *   DLPack give it to those who may write. For memory that nobody may write to: NVFP4_tensor_from_host_read_only().
 * - `shape`, `rank`: sizes, outermost first; at most 8 dimensions; NULL and 0 for a scalar.
 * - `strides`: `rank` strides in elements, none negative, or NULL for row-major without gaps.
 * - `dtype`: one of NVFP4_DTYPE_*.
 * - `deleter`, `user`: called when the library is done with the memory, which may be after the release of the tensor: other
 *   objects may share it. NULL when the memory outlives every use. Not called if this function fails.
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
 * The same over memory that nobody may write to: the tensor and its views are read-only, as NVFP4_tensor_is_read_only() and
 * NVFP4_tensor_to_dlpack_versioned() say.
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
 * Makes a tensor over memory of the CUDA device `device_index`, or over managed memory for it, without a copy. The parameters
 * are those of NVFP4_tensor_from_host(), with `data` an address on the device. When `deleter` is called, the library's work
 * with the memory comes before what is enqueued on the legacy default stream from then on.
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
 * Makes a tensor of zeros in memory of the library, aligned to 64 bytes or more: on the host (#NVFP4_DEVICE_CPU and 0) or on a
 * CUDA device (#NVFP4_DEVICE_CUDA and its number).
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_empty(const int64_t *shape,
                                int32_t rank,
                                int32_t dtype,
                                int32_t device_type,
                                int32_t device_index,
                                NVFP4_Tensor **out);

/** Copies a tensor to the memory of a device, or of the host, row-major without gaps, from wherever it is. */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_to_device(const NVFP4_Tensor *tensor,
                                         int32_t device_type,
                                         int32_t device_index,
                                         NVFP4_Tensor **out);

/**
 * Waits until everything that calls have enqueued on a device has run, and fails if the device has found something wrong in one
 * of them: see ERRORS OF A GPU above. After #NVFP4_OK the results of all calls before this one are right. The host
 * (#NVFP4_DEVICE_CPU and 0) is never behind.
 */
NVFP4_API
NVFP4_Status NVFP4_device_synchronize(int32_t device_type,
                                      int32_t device_index);

/**
 * Makes another view of a tensor's memory, which it keeps alive: a transpose, a slice, another shape. `offset` counts
 * elements from the first one of `tensor`; `strides` may be NULL for row-major. A view that would leave the tensor's memory
 * is refused.
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
 * Writes where the memory is: one of NVFP4_DEVICE_*, and which device of that type. Managed memory is the device's that works
 * with it; NVFP4_is_managed_tensor() tells it apart.
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
 * Writes the address of the first element, on the device if the memory is there; valid as long as the caller has a reference to
 * the tensor. Do not write through it while a call uses the tensor, nor ever if the tensor is read-only. Of no use when the
 * tensor has no elements.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_data(const NVFP4_Tensor *tensor,
                               void **data);

/**
 * Writes 1 to `read_only` if nobody may write to the memory, as whoever lent it has said, and 0 if not. What the library computes
 * goes to memory of its own in any case: it writes to no tensor that it is given.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_is_read_only(const NVFP4_Tensor *tensor,
                                       int32_t *read_only);

/** Writes the bytes that the elements take without gaps: what NVFP4_tensor_copy_to_host() copies. */
NVFP4_API NVFP4_Status NVFP4_tensor_bytes(const NVFP4_Tensor *tensor, uint64_t *bytes);

/**
 * Copies the elements, wherever they are, to `destination` in host memory, row-major without gaps. `bytes` must be exactly what
 * NVFP4_tensor_bytes() says. From a GPU it waits for them; if that reports an earlier call, `destination` has been written.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_to_host(const NVFP4_Tensor *tensor,
                                       void *destination,
                                       size_t bytes);

/**
 * Copies the elements to `destination` in host memory as float, whatever their type, row-major without gaps, as
 * NVFP4_tensor_copy_to_host() does. `elements` must be exactly the tensor's number of elements. Packed 4-bit codes have no
 * values of their own: dequantize them.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_copy_as_float(const NVFP4_Tensor *tensor,
                                        float *destination,
                                        size_t elements);

/**
 * Takes over a DLPack tensor in host memory (kDLCPU), CUDA memory (kDLCUDA) or managed memory (kDLCUDAManaged), without a copy:
 * its deleter is called when the library is done with the memory, on whichever thread that is. If this function fails, the
 * tensor stays the caller's.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_dlpack(struct DLManagedTensor *managed,
                                      NVFP4_Tensor **out);

/**
 * Takes over a versioned DLPack tensor as NVFP4_tensor_from_dlpack() does one without a version. With the flag
 * DLPACK_FLAG_BITMASK_READ_ONLY the tensor and its views are read-only: see NVFP4_tensor_is_read_only(). Of a major version
 * other than 1, which is #NVFP4_UNSUPPORTED, nothing but the version is read; so are padded elements of fewer than 8 bits, and
 * flags that this library does not know.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_from_dlpack_versioned(struct DLManagedTensorVersioned *managed,
                                                NVFP4_Tensor **out);

/**
 * Makes a DLPack tensor over the tensor's memory, without a copy; managed memory is given as kDLCUDA. It keeps the memory alive
 * until its consumer calls its deleter, which may be after the release of `tensor`. A read-only tensor is #NVFP4_UNSUPPORTED, as
 * this form cannot say so.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_to_dlpack(const NVFP4_Tensor *tensor,
                                    struct DLManagedTensor **out);

/**
 * The same in the versioned form, which says that a read-only tensor is. The version is 1.0, or 1.1 for float8 and float4, which
 * came with it.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_to_dlpack_versioned(const NVFP4_Tensor *tensor,
                                              struct DLManagedTensorVersioned **out);

/**
 * @defgroup quantize Number formats: NVFP4 and NF4, both ways
 *
 * NVFP4 is two 4-bit codes (E2M1) to a byte, the even index in the low nibble; a scale (E4M3) for each 16 values along the
 * last dimension K; and one float that multiplies every value of the tensor. NVFP4 and the order of its scales are computed
 * where the tensors are, on the processor or on a GPU; NF4 on the processor, in host memory.
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
 * - `global_scale`: the multiplier; 1 when single-level.
 *
 * A tensor on a GPU is quantized there, in one pass without temporary memory (two for a second level; a copy first if rows
 * are at uneven distances or not aligned to 16 bytes), to the same bits. With two levels the call waits for the multiplier, and
 * values that are not finite are its own error; with one it does not wait, and they are that of a later call: see ERRORS OF A
 * GPU above.
 */
NVFP4_API
NVFP4_Status NVFP4_tensor_quantize(const NVFP4_Tensor *input,
                                   const NVFP4_QuantizeOptions *options,
                                   NVFP4_Tensor **codes,
                                   NVFP4_Tensor **scales,
                                   float *global_scale);

/**
 * Expands NVFP4 to `[.., K]` of the floating type `dtype`: code x block scale x global_scale, exactly, then rounded to float and to
 * `dtype`. On a CUDA device the call waits until the scales have been looked at, and not for the values.
 *
 * - `codes`: uint8 or float4_e2m1fn_x2 `[.., K / 2]`.
 * - `scales`: float8_e4m3fn, or uint8 holding its bytes, in the order `scale_layout` names. NaN and negative ones are an error.
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
 * Quantizes a tensor, flattened, to NF4 in the layout of bitsandbytes: blocks of `block` values (64 is usual), two codes to
 * a byte, the first in the high nibble.
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
 * Expands NF4 to a tensor of the given shape and floating type. `quant_map` holds the 16 values of the codes; NULL takes
 * the usual ones.
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

/** Quantizes a weight `[.., K]` for training in 4 bits: NVFP4_quantize() with a status. `qdata` and `scale` are as there. */
NVFP4_API
NVFP4_Status NVFP4_quantize_packed(const NVFP4_Tensor *weight,
                                   NVFP4_Tensor **qdata,
                                   NVFP4_Tensor **scale);

/** The values of what NVFP4_quantize_packed() gives, `[.., K]` of the floating type `dtype`. */
NVFP4_API
NVFP4_Status NVFP4_dequantize_packed(const NVFP4_Tensor *qdata,
                                     const NVFP4_Tensor *scale,
                                     int32_t dtype,
                                     NVFP4_Tensor **out);

/**
 * The values that a weight `[.., K]` has in the forward pass of training in 4 bits: what NVFP4_quantize_packed() leaves of them,
 * in the weight's type. The gradient of the weight is that of these values as it is (the straight-through estimator).
 *
 * - `keep`: 0 to compute them. Otherwise the weight must not change: its values are computed once, for which the call waits,
 *   and kept as long as its memory lives or until NVFP4_ste_clear(), and every such call gives a handle of the same tensor,
 *   which is only read.
 */
NVFP4_API
NVFP4_Status NVFP4_ste_weight(const NVFP4_Tensor *weight,
                              int32_t keep,
                              NVFP4_Tensor **out);

/**
 * Gives up the values that NVFP4_ste_weight() keeps: call it when weights have changed. Those of weights that are gone are also
 * given up by NVFP4_empty_cache().
 */
NVFP4_API
NVFP4_Status NVFP4_ste_clear(void);

/**
 * @defgroup linear Products with weights in 4 bits
 *
 * What is computed is what was asked for: activations are quantized only by option, and a weight is decoded to a dense one
 * only where the compute path allows that. What was chosen is reported, with the reason where one backend stands in for
 * another. There are three backends: "nvfp4-kernel" and "nf4-kernel" read the 4-bit codes, "dequant-matmul" decodes the weight
 * once, when it is prepared, and holds it dense. In this version the CPU and CUDA devices have "nvfp4-kernel"
 * and "dequant-matmul".
 *
 * A product is computed where its tensors are, and its result is there: on the processor for tensors in host memory, and on a
 * CUDA device for tensors in that device's memory or in managed memory, in the order of the default stream that the tensor
 * chapter states. Only a weight that was prepared for a CUDA device takes host memory there, and brings the result back. Tensors
 * of a call that are in different places, or not where their weight is, are #NVFP4_INVALID_ARGUMENT with a message that names
 * both. On a CUDA device tensors are float16, bfloat16 or float32 and not float64.
 *
 * A weight for a CUDA device is made of tensors in host memory or in that device's, and of the latter without leaving it.
 * Its checks are the same, and wait for the device: block scales that are NaN or negative and weights that are not finite are
 * errors of the call that prepares it. Products with it need no more checks.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_WeightOptions). */
NVFP4_API NVFP4_Status NVFP4_weight_options_init(NVFP4_WeightOptions *options, uint32_t struct_size);

/**
 * Says which backend a weight of `format` (#NVFP4_FORMAT_NVFP4 or #NVFP4_FORMAT_NF4) would have with these options, as JSON,
 * or fails as its preparation would. `options` may be NULL for the defaults.
 *
 * - "format": "nvfp4" or "nf4".
 * - "backend": "nvfp4-kernel", "nf4-kernel" or "dequant-matmul".
 * - "path": "Auto", "KernelOnly", "KernelOrFallback" or "DequantMatmulOnly".
 * - "device": its name, as in NVFP4_diagnose().
 * - "fallback_reason": why it is not the kernel of the format, where that was wanted; or null.
 */
NVFP4_API
NVFP4_Status NVFP4_backend_select(int32_t format,
                                  const NVFP4_WeightOptions *options,
                                  char *buffer,
                                  size_t capacity,
                                  size_t *length);

/**
 * Prepares the NVFP4 weight `[N, K]` for products: a copy in the order that the kernels read. The tensors may be released
 * afterwards. The weight is for the CPU, or for the CUDA device whose memory the tensors are in. NVFP4_weight_create_nvfp4()
 * is the same with options.
 */
NVFP4_API
NVFP4_Status NVFP4_weight_create(const NVFP4_Tensor *codes,
                                 const NVFP4_Tensor *scales,
                                 float global_scale,
                                 int32_t scale_layout,
                                 NVFP4_Weight **out);

/**
 * Prepares the NVFP4 weight `[N, K]` for products, as `options` say; NULL for the defaults, but for the CUDA device whose memory
 * the tensors are in if that is one's. The tensors may be released afterwards. A weight that was decoded takes 16 or 32 bits for each value: see NVFP4_weight_size().
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
 * Prepares the NF4 weight `[n, k]`, whose tensors are in host memory, for products, as `options` say; NULL for the defaults. K must
 * be a multiple of 16. The tensors may be released afterwards. In this version no device has a kernel for NF4: the weight is decoded, 16 or 32 bits for
 * each value, or refused where the compute path is kernel only.
 *
 * - `codes`: uint8, `n * k / 2` of them in any shape, the first of two in the high nibble.
 * - `absmax`: of a floating type, one for each `block` values of the flattened weight.
 * - `quant_map`: the 16 values of the codes; NULL takes the usual ones.
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
 * Says what multiplies with a weight, as JSON: the keys of NVFP4_backend_select(), and "n", "k", "stored" ("nvfp4", "f32",
 * "f16" or "bf16") and "bytes" in memory. A weight that was dense from the start has format "dense", backend "dense-matmul"
 * and no path. Keys may be added in later versions.
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
 * Multiplies: `input` `[.., K]` times `weight` `[N, K]` transposed, summed in float.
 *
 * - `input`: of a floating type, any strides; in host memory, or in the memory of the weight's CUDA device.
 * - `activations`: one of NVFP4_ACTIVATIONS_*.
 * - `dtype`: floating type of the result `[.., N]`, which is where the input is.
 *
 * The call does not wait for a CUDA device that has the input. On the CPU, a row of the result has the same bits whatever other rows are in the call, and on any number of threads. On a
 * GPU the same call on the same machine gives the same bits.
 */
NVFP4_API
NVFP4_Status NVFP4_linear(const NVFP4_Weight *weight,
                          const NVFP4_Tensor *input,
                          int32_t activations,
                          int32_t dtype,
                          NVFP4_Tensor **out);

/**
 * Multiplies two NVFP4 matrices (W4A4): a `[M, K]` times b `[N, K]` transposed, as `[M, N]` of the floating type `dtype`.
 * The exact product of the decoded values but for the order of summation, in float. NVFP4_scaled_mm() is the same without
 * global scales. What NVFP4_tensor_dequantize() refuses is refused.
 *
 * All four tensors are in one place, where the result is too. On a CUDA device the call does not wait: scales that are NaN or
 * negative are an error of a later call, see ERRORS OF A GPU above. Codes and scales with gaps, or not aligned to 16 and 4
 * bytes, are copied first.
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
 * @defgroup schema Schemas: which 4-bit weights a set of named tensors holds, and what is wrong with them
 *
 * Names, types and shapes tell, so hosts may keep the tensors themselves. Known are NVFP4 as TorchSharp hosts keep it
 * (`.qdata` and `.scale`, with or without `.weight` before), of ModelOpt, compressed-tensors and torchao, and NF4 of
 * TorchSharp hosts (`.weight`, `.absmax` and `.quant_map`) and of bitsandbytes (`.weight`, `.weight.absmax` and so on). One
 * part is enough for a weight to be found; what it lacks is then a problem.
 */

/**
 * Finds the 4-bit weights of a set of tensors.
 *
 * - `tensors`, `count`: the set; no two of one name.
 * - `tensor_size`: sizeof(NVFP4_NamedTensor), as the caller knows it.
 * - `prefix`: looks at the tensor of this name and at those whose names begin with it and a dot, such as one layer's; NULL
 *   and 0 for all.
 * - `result`: its struct_size is set by the caller. A set without 4-bit weights has #NVFP4_FORMAT_NONE.
 */
NVFP4_API
NVFP4_Status NVFP4_schema_detect(const NVFP4_NamedTensor *tensors,
                                 size_t count,
                                 size_t tensor_size,
                                 const char *prefix,
                                 size_t prefix_length,
                                 NVFP4_SchemaResult *result);

/**
 * Describes the 4-bit weights of a set of tensors, as JSON: "format" ("none", "nvfp4", "nf4" or "mixed"), "tensors" looked at,
 * "problems", and "weights", each with its "name", "format", "convention", "keys" by what they are for, "missing" keys,
 * "extra" keys of its module, "out_features", "in_features", "block" (null where the shapes do not tell) and "faults". The
 * parameters are those of NVFP4_schema_detect(). Keys may be added in later versions.
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
 * Checks the 4-bit weights of a set of tensors: no part is missing, and types and shapes fit together. All that is wrong is in
 * the one message, the missing tensors first. #NVFP4_NOT_FOUND if there is no 4-bit weight, #NVFP4_INVALID_ARGUMENT if one is
 * wrong. The parameters are those of NVFP4_schema_detect().
 */
NVFP4_API
NVFP4_Status NVFP4_schema_validate(const NVFP4_NamedTensor *tensors,
                                   size_t count,
                                   size_t tensor_size,
                                   const char *prefix,
                                   size_t prefix_length);

/**
 * @defgroup model Models: weights on disk, and weights, tokenizer and chat template in memory
 *
 * A model is immutable. Any number of sessions, on any threads, may run it at once.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_LoadOptions). */
NVFP4_API NVFP4_Status NVFP4_load_options_init(NVFP4_LoadOptions *options, uint32_t struct_size);

/**
 * Loads a model: a directory, or a `.safetensors`, `.dat` or `.gguf` file.
 *
 * - `path`, `path_length`: UTF-8.
 * - `options`: NULL for the defaults.
 * - `quantize`: how to quantize dense weights to NVFP4 while loading; NULL holds weights as they are stored.
 */
NVFP4_API
NVFP4_Status NVFP4_model_load(const char *path,
                              size_t path_length,
                              const NVFP4_LoadOptions *options,
                              const NVFP4_QuantizeOptions *quantize,
                              NVFP4_Model **out);

/** Adds a reference to a model. */
NVFP4_API NVFP4_Status NVFP4_model_retain(NVFP4_Model *model);

/** Gives up a reference to a model. After the last one the handle is stale; sessions keep the weights. */
NVFP4_API NVFP4_Status NVFP4_model_release(NVFP4_Model *model);

/**
 * What was loaded, as JSON: architecture, device, device_choice (why that one, as one line, where it was #NVFP4_DEVICE_AUTO;
 * null where it was named), parameters, weight_bytes, formats, sizes, kv_bytes_per_token, stop_tokens. Keys may be added in
 * later versions.
 */
NVFP4_API
NVFP4_Status NVFP4_model_info(const NVFP4_Model *model,
                              char *buffer,
                              size_t capacity,
                              size_t *length);

/** Writes the number of token ids, which is the number of logits. */
NVFP4_API NVFP4_Status NVFP4_model_vocab_size(const NVFP4_Model *model, size_t *size);

/**
 * Text to token ids. `add_special` 1 adds what the model wants around a text (a first token, often); a rendered chat has it
 * already. Writes the number of tokens to `count`; see ARRAYS OUT above. Asking for the number first costs nothing: the tokens
 * are kept for this thread's next call, which finds them if it is with the same text.
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
 * Token ids to text. `skip_special` 1 leaves out tokens such as `<|im_end|>`. Ids that the model knows and its tokenizer does
 * not, as many models have them, give no text; others are refused. Bytes that are no character become U+FFFD: for a stream
 * of tokens use the text that generation gives, which waits for whole characters. Asking for the length first costs nothing, as
 * for NVFP4_model_tokenize().
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
 * Renders a conversation with the model's chat template (ChatML if it has none): `count` messages, each of `message_size` bytes,
 * which is sizeof(NVFP4_Message). `add_generation_prompt` 1 opens the assistant's next turn. Asking for the length first costs
 * nothing, as for NVFP4_model_tokenize().
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

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ConvertOptions). */
NVFP4_API NVFP4_Status NVFP4_convert_options_init(NVFP4_ConvertOptions *options, uint32_t struct_size);

/**
 * Converts a model on disk to NVFP4 on disk, one tensor at a time: linear weights are quantized, the rest is kept. What was
 * there is replaced as a whole, when the new one is whole; a call that fails leaves it as it was, and nothing else.
 *
 * - `source`: what NVFP4_model_load() takes.
 * - `destination`: a directory that is not there yet or empty, or one to replace; a file for `.dat`, replaced if it is there.
 * - `options`: NULL for the defaults.
 * - `quantize`: NULL for the defaults, which are two-level scales for ModelOpt and single-level ones for `.dat`, and the recipe
 *   amax, as wherever this library quantizes. The sweep loses less and takes two to three times as long.
 */
NVFP4_API
NVFP4_Status NVFP4_model_convert(const char *source,
                                 size_t source_length,
                                 const char *destination,
                                 size_t destination_length,
                                 const NVFP4_ConvertOptions *options,
                                 const NVFP4_QuantizeOptions *quantize);

/**
 * @defgroup session Sessions: conversations and other sequences of tokens, run by a model
 *
 * A session holds its tokens with their cached keys and values, so that a call runs only what is new. It keeps its model
 * alive. One call at a time may use it: another one meanwhile, from a callback too, gets #NVFP4_BUSY. Length, memory and
 * messages can be asked for at any time: during a call they are as they were before it. A call that fails leaves the session
 * as it was.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_SessionOptions). */
NVFP4_API NVFP4_Status NVFP4_session_options_init(NVFP4_SessionOptions *options, uint32_t struct_size);

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_GenerateOptions). */
NVFP4_API
NVFP4_Status NVFP4_generate_options_init(NVFP4_GenerateOptions *options,
                                         uint32_t struct_size);

/** Makes an empty session of a model. `options`: NULL for the defaults. */
NVFP4_API
NVFP4_Status NVFP4_session_create(const NVFP4_Model *model,
                                  const NVFP4_SessionOptions *options,
                                  NVFP4_Session **out);

/** Adds a reference to a session. */
NVFP4_API NVFP4_Status NVFP4_session_retain(NVFP4_Session *session);

/** Gives up a reference to a session. After the last one the handle is stale; a call that is using it ends undisturbed. */
NVFP4_API
NVFP4_Status NVFP4_session_release(NVFP4_Session *session);

/**
 * Appends tokens and runs them, a whole prompt in blocks.
 *
 * - `call`: what may end it, and who hears how far it is; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_prefill(NVFP4_Session *session,
                                   const int32_t *tokens,
                                   size_t count,
                                   const NVFP4_CallOptions *call);

/** Appends tokens and runs them one after the other, more slowly: for comparison. See SAME BITS above. */
NVFP4_API
NVFP4_Status NVFP4_session_prefill_token_by_token(NVFP4_Session *session,
                                                  const int32_t *tokens,
                                                  size_t count,
                                                  const NVFP4_CallOptions *call);

/**
 * Appends one token and runs it, with what has not been run before it: the last token of a generation, or what eviction left.
 *
 * - `call`: as for NVFP4_session_prefill().
 */
NVFP4_API
NVFP4_Status NVFP4_session_decode(NVFP4_Session *session,
                                  int32_t token,
                                  const NVFP4_CallOptions *call);

/**
 * Copies the logits of the token to come, one for each token id. Writes their number to `count`; see ARRAYS OUT above. Runs what has
 * not been run, as NVFP4_session_decode() does.
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
 * Chooses the token to come as NVFP4_session_generate() would, and does not append it. `options`: NULL for the likeliest
 * one; what concerns stops and lengths has no part in it.
 */
NVFP4_API
NVFP4_Status NVFP4_session_sample(NVFP4_Session *session,
                                  const NVFP4_GenerateOptions *options,
                                  int32_t *token);

/**
 * Fills `options` as NVFP4_generate_options_init() does, and with the temperature, top_k, top_p, min_p and repetition penalty that the
 * model's maker asks for, in `generation_config.json` or in a GGUF file's metadata. Where nothing is said they are the defaults,
 * which take the likeliest token. The tokens that end an answer need no option: the model knows them.
 */
NVFP4_API
NVFP4_Status NVFP4_model_generate_options(const NVFP4_Model *model,
                                          NVFP4_GenerateOptions *options,
                                          uint32_t struct_size);

/**
 * Generates from where the session stands, which takes a prefilled prompt. Cancelling it is no failure, but gives what there is:
 * see #NVFP4_FINISH_CANCELLED.
 *
 * - `options`: NULL for the defaults.
 * - `callback`, `user`: may be NULL; NVFP4_session_text() has the text afterwards.
 * - `result`: what it came to; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_generate(NVFP4_Session *session,
                                    const NVFP4_GenerateOptions *options,
                                    NVFP4_TokenCallback callback,
                                    void *user,
                                    NVFP4_GenerationResult *result);

/**
 * Copies the text of the last generation, of a chat the answer's content, which is empty before the first. A character that it left
 * unfinished is not part of it, whatever ended it: if the next generation completes the character, its text begins with it. For the
 * buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_text(NVFP4_Session *session,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/** Writes how many tokens the session holds; during a call, how many it held before. */
NVFP4_API NVFP4_Status NVFP4_session_length(const NVFP4_Session *session, size_t *length);

/** Writes how many tokens the session can hold. */
NVFP4_API NVFP4_Status NVFP4_session_context(const NVFP4_Session *session, size_t *context);

/**
 * Writes the bytes of the session's cached keys and values, those it shares with forks included; during a call, what they were
 * before.
 */
NVFP4_API
NVFP4_Status NVFP4_session_memory(const NVFP4_Session *session,
                                  uint64_t *bytes);

/** Copies the tokens that the session holds. Writes their number to `count`; see ARRAYS OUT above. */
NVFP4_API
NVFP4_Status NVFP4_session_tokens(NVFP4_Session *session,
                                  int32_t *tokens,
                                  size_t capacity,
                                  size_t *count);

/**
 * Forgets the tokens from `length` on. A conversation then ends in the answer that the cut is in, or else with the last one before
 * it. Draws are then those that followed `length` before; cut to 0, the session is as after NVFP4_session_reset().
 */
NVFP4_API
NVFP4_Status NVFP4_session_truncate(NVFP4_Session *session,
                                    size_t length);

/** Forgets all tokens and the conversation. The options stay. */
NVFP4_API NVFP4_Status NVFP4_session_reset(NVFP4_Session *session);

/** Makes a second session in the same state. The two share their cache's memory as far as neither writes to it. */
NVFP4_API
NVFP4_Status NVFP4_session_fork(NVFP4_Session *session,
                                NVFP4_Session **out);

/**
 * Writes the session to a file, cache and conversation included. A file that was there is replaced only when the new one
 * is whole.
 *
 * - `call`: what may end it, and who hears how many bytes are written; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_save(NVFP4_Session *session,
                                const char *path,
                                size_t path_length,
                                const NVFP4_CallOptions *call);

/**
 * Makes a session as it was when it was written to a file. `model` must be the model that ran it.
 *
 * - `call`: what may end it, and who hears how many bytes are read; may be NULL.
 */
NVFP4_API
NVFP4_Status NVFP4_session_restore(const NVFP4_Model *model,
                                   const char *path,
                                   size_t path_length,
                                   const NVFP4_CallOptions *call,
                                   NVFP4_Session **out);

/**
 * Appends `tokens[i]` to `sessions[i]`, `count` of both, and runs them in one pass over the weights, which takes little
 * longer than one of them. The sessions are different ones of the same model handle. If it fails, all are as they were.
 *
 * NVFP4_session_step_sample() is the faster call where only the next tokens are wanted: here the logits of every session come to
 * the host.
 *
 * - `call`: what may end the pass; may be NULL. Its progress callback is not called.
 * - `statuses`: may be NULL: then a session that cannot take its token fails the call. Otherwise `count` of them, all written
 *   if the other arguments are right: a session whose handle is stale or in use, whose context is full, or that is there twice,
 *   or whose token is none of the model's, gets its status and stays as it is, and the others are run. The call is
 *   #NVFP4_OK then, with the first one's message in NVFP4_last_error(); the status of those that were run is the call's.
 */
NVFP4_API
NVFP4_Status NVFP4_session_step(NVFP4_Session *const *sessions,
                                const int32_t *tokens,
                                size_t count,
                                const NVFP4_CallOptions *call,
                                NVFP4_Status *statuses);

/**
 * NVFP4_session_step(), and writes the token to come of each session to `next`, chosen where the model runs: on a GPU no logits
 * come to the host. `next[i]` is what NVFP4_session_sample() would choose then, and is not appended: to generate, pass it as
 * the token of the next step, until a stop token or length of yours ends that sequence; a detokenizer says when. Sequences may join
 * and leave between any two steps. The order of `sessions` is best kept: with the same sessions, and `next` as their tokens, a GPU
 * has begun the next step before it is asked for.
 *
 * - `options`: how to choose, `options[i]` for `sessions[i]`; of each, what concerns stops and lengths has no part in it. NULL,
 *   for one or for all, takes the likeliest token. One may stand for several sessions: draws depend on its seed and on how many
 *   tokens were appended to a session. What ends `options[i].call` before the pass begins leaves out that session, with
 *   #NVFP4_CANCELLED; its progress callback is not called.
 * - `call`, `statuses`: as for NVFP4_session_step().
 * - `next`: `count` tokens; those of sessions that were not run are unchanged. It may be `tokens`.
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
 * @defgroup chat Conversations, as a model was trained to have them
 *
 * A turn gives the conversation as chat servers take it, and generates the answer: JSON of an array of messages, each an object with
 * `role` (system, developer, user, assistant or tool) and `content` (a text, or an array of parts `{"type": "text", "text": ...}`).
 * An assistant's message may have `reasoning_content`, what was thought before, and `tool_calls`; a tool's has the
 * `tool_call_id` that it answers.
 *
 * The model's chat template (ChatML if it has none) writes that as text. Of the tokens that the session holds those stay with which
 * the new text begins, and the rest is run: so an answer that is asked for again, an earlier message that has changed, another system
 * prompt and the results of tools are turns as any other. Names of special tokens in messages count as plain text.
 */

/** Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ChatOptions). */
NVFP4_API NVFP4_Status NVFP4_chat_options_init(NVFP4_ChatOptions *options, uint32_t struct_size);

/**
 * Says something to the model and generates the answer: a turn whose messages are those that the session has, and one more of the
 * user's. The first takes an empty session, and begins with the system prompt of its options.
 *
 * - `text`, `text_length`: what the user says, in UTF-8.
 * - `chat`: NULL for the options of the turn before, or the defaults.
 * - The rest is as for NVFP4_session_generate(). Cancelled before its first token is due, it fails with #NVFP4_CANCELLED.
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
 * Generates the answer to a conversation, all of which is given; the system prompt of the session's options has no part in it. With
 * `max_tokens` 0 the prompt is run and nothing generated, so that steps of many sessions can go on from there.
 *
 * - `messages`, `messages_length`: a JSON array, as said at the top of this chapter. What is wrong with it is told with line and
 *   column, or with the number of the message.
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
 * Copies the conversation of the chat turns, as a JSON array of messages like those of NVFP4_session_chat_messages(), the last answer
 * with its reasoning and calls of tools; during a call, as it was before. For the buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_messages(const NVFP4_Session *session,
                                    char *buffer,
                                    size_t capacity,
                                    size_t *length);

/** Copies what the model thought before the last answer; empty where it did not. For the buffer see TEXT above. */
NVFP4_API
NVFP4_Status NVFP4_session_reasoning(NVFP4_Session *session,
                                     char *buffer,
                                     size_t capacity,
                                     size_t *length);

/**
 * Copies the calls of tools in the last answer, as a JSON array of objects like those of #NVFP4_PART_TOOL_CALL. Their results go back as
 * messages of the role tool. For the buffer see TEXT above.
 */
NVFP4_API
NVFP4_Status NVFP4_session_tool_calls(NVFP4_Session *session,
                                      char *buffer,
                                      size_t capacity,
                                      size_t *length);

/**
 * Copies the text that a turn with these messages is written as. `add_generation_prompt` 1 opens the assistant's answer. Asking for
 * the length first costs nothing, as for NVFP4_model_tokenize(). Names of special tokens in messages cannot be told from
 * the template's own in this text: where strangers write messages, let a session run them.
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
 * @defgroup detokenizer Text as tokens come, for hosts that step many sessions
 *
 * A detokenizer follows one sequence: it is given each token, gives the text that the token completes, in whole characters, and says
 * what ends the sequence, as NVFP4_session_generate() would: a stop token, a stop string, or its length. What may be the beginning
 * of a stop string waits until that is decided.
 */

/**
 * Makes a detokenizer of a model, which must have a tokenizer.
 *
 * - `tokens`, `count`: what the sequence holds already: its text is not given again, but may end within a character, which the next
 *   token goes on with. NULL and 0 at the start of a text, as an answer is.
 * - `options`: what ends the sequence: stop tokens and strings, whether the model's own stop tokens count, and how many tokens it
 *   may have. NULL for the defaults. Copied.
 */
NVFP4_API
NVFP4_Status NVFP4_detokenizer_create(const NVFP4_Model *model,
                                      const int32_t *tokens,
                                      size_t count,
                                      const NVFP4_GenerateOptions *options,
                                      NVFP4_Detokenizer **out);

/**
 * Adds the next token. Writes the text that it completes, UTF-8 with a NUL behind it, to `text` and its bytes to `length`; the text
 * is valid until the next call with this detokenizer. Writes what ends the sequence with this token to `finish`, one of
 * NVFP4_FINISH_*: a stop token then is not part of the sequence, and gives no text; any other token is. After that no token is taken.
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
 * Ends the sequence, where no token has. Gives the text that was held back in case it was the beginning of a stop string; there is
 * none after a stop string. A character that is unfinished gives none: see NVFP4_detokenizer_create() for what follows it.
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
 * @defgroup torchsharp Drop-in functions for TorchSharp hosts, with the signatures those hosts bind
 *
 * They take tensor handles as `void *`: either #NVFP4_Tensor, or pointers to tensors of libtorch (2.10 or later), as TorchSharp's
 * Tensor.Handle has them. All handles of a call are of one kind, and results are new handles of that kind, the caller's to
 * release or to dispose of; never those that were passed. libtorch is looked for in the process when such a handle comes; it
 * is not needed otherwise.
 *
 * The functions have no status: after a call, NVFP4_last_status() is #NVFP4_OK or says why a result is NULL. TorchSharp itself
 * throws the message when NVFP4_quantize, NVFP4_scaled_mm or NVFP4_to_managed fails on its tensors and the host then looks for
 * errors, as it does after these three.
 *
 * On a GPU they are asynchronous, as libtorch is: what the device finds wrong is the failure of a later call, see ERRORS OF A GPU
 * above.
 *
 * libtorch's tensors may have any strides and offset, and may require a gradient: results never do. They are read where they
 * are, and results are made in libtorch's own memory. On a GPU the order is that of libtorch's current stream.
 */

/**
 * Quantizes `input` `[.., K]` (float16, bfloat16 or float32; K a multiple of 16) with block scales alone.
 *
 * - `qdata`: uint8 `[.., K / 2]`, the even index in the low nibble; NULL on failure.
 * - `scale`: float8_e4m3fn `[.., K / 16]`, row-major: amax / 6, clamped to [2^-16, 448]; NULL on failure.
 *
 * The results are where the input is: on a GPU one pass over it makes them, to the same bits, and the call does not wait for it.
 * Those of libtorch are matrices: the leading dimensions become one.
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
 * - `scale_a`, `scale_b`: float8_e4m3fn, or uint8 holding its bytes, in swizzled order (#NVFP4_SCALES_SWIZZLED) for M and for
 *   N rows.
 *
 * The product is computed where the four tensors are, and is there; the call does not wait for a GPU: see NVFP4_matmul().
 */
NVFP4_API
void *NVFP4_scaled_mm(void *mat1,
                      void *mat2,
                      void *scale_a,
                      void *scale_b,
                      int8_t out_dtype);

/**
 * Frees what the library keeps for reuse: workspaces, the threads of calls that name no device, and memory of the GPUs that
 * are in use, for which it waits. Objects that are in use keep what they need. Nothing has to be freed this way before the
 * process ends.
 */
NVFP4_API
void NVFP4_empty_cache(void);

/**
 * Whether tensors can be in managed (unified) memory of CUDA device 0: 1 or 0. NVFP4_diagnose() says why not. Also 0 if there is
 * a libtorch in the process that cannot take such memory.
 */
NVFP4_API
int32_t NVFP4_can_use_managed(void);

/** Whether a tensor is in managed memory: 1 or 0, 0 also for what is no tensor. */
NVFP4_API int32_t NVFP4_is_managed_tensor(void *tensor);

/**
 * A tensor with the values of `input` in managed memory, or NULL where that cannot be: a copy, or, if `input` is in managed
 * memory, another handle of it. It is a tensor of the CUDA device `prefetch_device`, or else of the input's, or of device 0.
 *
 * - `prefetch_device`: the CUDA device to bring it to, or -1.
 * - `read_mostly`: non-zero if it will be read far more than written.
 */
NVFP4_API
void *NVFP4_to_managed(void *input,
                       int32_t prefetch_device,
                       int32_t read_mostly);

/** Brings a tensor in managed memory to the CUDA device `device_index`, or with -1 to the host, ahead of its use there. */
NVFP4_API
void NVFP4_managed_prefetch(void *tensor,
                            int32_t device_index);

#ifdef __cplusplus
}  /* extern "C" */
#endif

#endif  /* NVFP4_H */
