// The C interface as .NET sees it: nvfp4.h line by line and nothing else. A test compares names and parameters with the header.
//
// Everything that crosses is a number or a pointer, so no text or array is marshalled behind our back; SafeHandles are counted
// by the runtime for the time of a call. Callbacks are delegates that live as long as the process, with a GCHandle as the user's
// word, which is what AOT compilers can do too.

using System;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    internal unsafe delegate int LogCallback(IntPtr user, int level, byte* message, UIntPtr length);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    internal delegate void LogRelease(IntPtr user);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    internal delegate void Deleter(IntPtr data, IntPtr user);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    internal delegate int ProgressCallback(IntPtr user, ulong done, ulong total);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    internal unsafe delegate int TokenCallback(IntPtr user, NativeTokenEvent* piece);

    /// Unity's AOT compiler looks for an attribute of this name on methods that native code calls.
    [AttributeUsage(AttributeTargets.Method)]
    internal sealed class MonoPInvokeCallbackAttribute : Attribute
    {
        public MonoPInvokeCallbackAttribute(Type type)
        {
            Type = type;
        }

        public Type Type { get; }
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeCallOptions
    {
        internal uint StructSize;
        internal int Reserved;
        internal IntPtr Cancel;
        internal int* CancelFlag;
        internal IntPtr Progress;
        internal IntPtr User;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeQuantizeOptions
    {
        internal uint StructSize;
        internal int Levels;
        internal int Recipe;
        internal int Rounding;
        internal int Nonfinite;
        internal int ScaleLayout;
        internal ulong Seed;
        internal NativeCallOptions* Call;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeWeightOptions
    {
        internal uint StructSize;
        internal int ComputePath;
        internal int DeviceType;
        internal int DeviceIndex;
        internal int ScaleLayout;
        internal int DenseDtype;
        internal int ExcludeCpuKernels;
        internal int Reserved;
        internal byte* Backend;
        internal UIntPtr BackendLength;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeNamedTensor
    {
        internal byte* Name;
        internal UIntPtr NameLength;
        internal int Dtype;
        internal int Rank;
        internal long* Sizes;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeSchemaResult
    {
        internal uint StructSize;
        internal int Format;
        internal UIntPtr Tensors;
        internal UIntPtr Weights;
        internal UIntPtr Problems;
        internal long OutFeatures;
        internal long InFeatures;
        internal long Block;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeLoadOptions
    {
        internal uint StructSize;
        internal int DeviceType;
        internal int DeviceIndex;
        internal int Threads;
        internal int Activations;
        internal int SamplingOnly;
        internal NativeCallOptions* Call;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeConvertOptions
    {
        internal uint StructSize;
        internal int Container;
        internal int Replace;
        internal int KeepHead;
        internal NativeCallOptions* Call;
        internal int Tables;
        internal int Reserved;
        internal NativeCalibrateOptions* Calibrate;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeCalibrateOptions
    {
        internal uint StructSize;
        internal int DeviceType;
        internal int DeviceIndex;
        internal int Windows;
        internal UIntPtr Window;
        internal byte** Files;
        internal UIntPtr* FileLengths;
        internal UIntPtr FileCount;
        internal double Budget;
        internal ulong DistillSteps;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeMessage
    {
        internal byte* Role;
        internal UIntPtr RoleLength;
        internal byte* Content;
        internal UIntPtr ContentLength;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeSessionOptions
    {
        internal uint StructSize;
        internal int KvType;
        internal int Eviction;
        internal int Reserved;
        internal UIntPtr Context;
        internal UIntPtr Keep;
        internal byte* System;
        internal UIntPtr SystemLength;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeGenerateOptions
    {
        internal uint StructSize;
        internal float Temperature;
        internal int TopK;
        internal float TopP;
        internal float MinP;
        internal float RepetitionPenalty;
        internal int IgnoreModelStops;
        internal int Replay;
        internal int LogProbabilities;
        internal int Reserved;
        internal UIntPtr MaxTokens;
        internal ulong Seed;
        internal int* StopTokens;
        internal UIntPtr StopTokenCount;
        internal byte** StopStrings;
        internal UIntPtr* StopStringLengths;
        internal UIntPtr StopStringCount;
        internal NativeCallOptions* Call;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeTokenEvent
    {
        internal uint StructSize;
        internal int Kind;
        internal int Token;
        internal int Index;
        internal byte* Text;
        internal UIntPtr TextLength;
        internal float LogProbability;
        internal int Part;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeGenerationResult
    {
        internal uint StructSize;
        internal int Finish;
        internal UIntPtr PromptTokens;
        internal UIntPtr GeneratedTokens;
        internal double PrefillSeconds;
        internal double FirstTokenSeconds;
        internal double DecodeSeconds;
        internal ulong Seed;
        internal UIntPtr ToolCalls;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeChatOptions
    {
        internal uint StructSize;
        internal int KeepReasoning;
        internal long ReasoningBudget;
        internal byte* Variables;
        internal UIntPtr VariablesLength;
        internal byte* Tools;
        internal UIntPtr ToolsLength;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeTrainerOptions
    {
        internal uint StructSize;
        internal int DeviceType;
        internal int DeviceIndex;
        internal int Threads;
        internal int Schedule;
        internal int Clip;
        internal int Weights;
        internal int FirstMoments;
        internal int SecondMoments;
        internal int Release;
        internal int Recompute;
        internal int LastBlocks;
        internal ulong Steps;
        internal ulong Warmup;
        internal ulong Seed;
        internal double Rate;
        internal double Floor;
        internal double DecayShare;
        internal double WeightDecay;
        internal double Beta1;
        internal double Beta2;
        internal double Eps;
        internal double ClipNorm;
        internal double DeliveredShare;
        internal byte* Config;
        internal UIntPtr ConfigLength;
        internal int Tables;
        internal int WeightScales;
        internal byte* Teacher;
        internal UIntPtr TeacherLength;
        internal double TeacherTemperature;
        internal double LabelShare;
        internal int TeacherMemory;
        internal int Reserved;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeMicroBatch
    {
        internal int* Tokens;
        internal int* Labels;
        internal UIntPtr TokenCount;
        internal UIntPtr* DocumentLengths;
        internal UIntPtr DocumentCount;
        internal float* Weights;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeDataOptions
    {
        internal uint StructSize;
        internal int Format;
        internal int LongRows;
        internal int EmptyThink;
        internal int TrainOnAll;
        internal int SkipBadRows;
        internal UIntPtr Window;
        internal byte* Separator;
        internal UIntPtr SeparatorLength;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeStepReport
    {
        internal uint StructSize;
        internal int Outcome;
        internal ulong Step;
        internal ulong Targets;
        internal double Loss;
        internal double Rate;
        internal double GradientNorm;
        internal double Changed;
        internal double ChangedDelivered;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeOptimizerOptions
    {
        internal uint StructSize;
        internal int Weights;
        internal int FirstMoments;
        internal int SecondMoments;
        internal int FreshScales;
        internal int Reserved;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeStepOptions
    {
        internal uint StructSize;
        internal float GradientScale;
        internal double Rate;
        internal double Beta1;
        internal double Beta2;
        internal double Eps;
        internal double WeightDecay;
        internal ulong Seed;
        internal ulong Tensor;
    }

    internal static unsafe class Native
    {
        /// What the runtime looks for: libNVFP4.so, libNVFP4.dylib or NVFP4.dll.
        internal const string Name = "NVFP4";

        // Status numbers and the last error.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_status_name(int status);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_last_error();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_last_status();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_last_error_copy(byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_take_error(IntPtr* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_error_status(IntPtr error);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_error_message(IntPtr error);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_error_retain(IntPtr error);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_error_release(IntPtr error);

        // The library itself.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_version();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_abi_version();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_version_number();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_check_version(int abiVersion, int versionNumber);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_log_add(LogCallback callback, IntPtr user, int level, LogRelease release, ulong* token);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_log_remove(ulong token);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_set_threads(int threads);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_diagnose(byte* buffer, UIntPtr capacity, UIntPtr* length);

        // Long calls.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_call_options_init(NativeCallOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_create(out CancelHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_trigger(CancelHandle cancel);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_reset(CancelHandle cancel);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_is_triggered(CancelHandle cancel, int* triggered);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_retain(IntPtr cancel);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_cancel_release(IntPtr cancel);

        // Memory.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_stats(int tag, ulong* current, ulong* peak);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_reset_peak();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_set_budget(ulong bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_get_budget(ulong* bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_set_managed_policy(int policy);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_get_managed_policy(int* policy);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_memory_can_be_managed(int deviceIndex, int* can);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_by_managed_policy(TensorHandle tensor, int deviceIndex, int readMostly,
            out TensorHandle result);

        // Tensors.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_from_host(IntPtr data, long* shape, int rank, long* strides, int dtype,
            Deleter deleter, IntPtr user, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_from_host_read_only(IntPtr data, long* shape, int rank, long* strides, int dtype,
            Deleter deleter, IntPtr user, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_from_device(IntPtr data, long* shape, int rank, long* strides, int dtype,
            int deviceIndex, Deleter deleter, IntPtr user, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_empty(long* shape, int rank, int dtype, int deviceType, int deviceIndex,
            out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_copy_to_device(TensorHandle tensor, int deviceType, int deviceIndex,
            out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_device_synchronize(int deviceType, int deviceIndex);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_view(TensorHandle tensor, long* shape, int rank, long* strides, long offset,
            out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_retain(IntPtr tensor);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_release(IntPtr tensor);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_dtype(TensorHandle tensor, int* dtype);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_device(TensorHandle tensor, int* deviceType, int* deviceIndex);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_shape(TensorHandle tensor, long* shape, UIntPtr capacity, UIntPtr* rank);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_strides(TensorHandle tensor, long* strides, UIntPtr capacity, UIntPtr* rank);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_data(TensorHandle tensor, out IntPtr data);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_is_read_only(TensorHandle tensor, int* readOnly);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_bytes(TensorHandle tensor, ulong* bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_copy_to_host(TensorHandle tensor, IntPtr destination, UIntPtr bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_copy_as_float(TensorHandle tensor, float* destination, UIntPtr elements);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_from_dlpack(IntPtr managed, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_to_dlpack(TensorHandle tensor, out IntPtr result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_from_dlpack_versioned(IntPtr managed, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_to_dlpack_versioned(TensorHandle tensor, out IntPtr result);

        // Number formats.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_quantize_options_init(NativeQuantizeOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_quantize(TensorHandle input, NativeQuantizeOptions* options,
            out TensorHandle codes, out TensorHandle scales, float* globalScale);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_dequantize(TensorHandle codes, TensorHandle scales, float globalScale,
            int scaleLayout, int dtype, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_quantize_nf4(TensorHandle input, long block, out TensorHandle codes,
            out TensorHandle absmax);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_tensor_dequantize_nf4(TensorHandle codes, TensorHandle absmax, TensorHandle quantMap,
            long block, long* shape, int rank, int dtype, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_scales_swizzle(TensorHandle scales, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_scales_unswizzle(TensorHandle scales, long rows, long kBlocks, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_quantize_packed(TensorHandle weight, out TensorHandle qdata, out TensorHandle scale);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_dequantize_packed(TensorHandle qdata, TensorHandle scale, int dtype, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_ste_weight(TensorHandle weight, int keep, out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_ste_clear();

        // Products.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_options_init(NativeWeightOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_backend_select(int format, NativeWeightOptions* options, byte* buffer,
            UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_create(TensorHandle codes, TensorHandle scales, float globalScale,
            int scaleLayout, out WeightHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_create_nvfp4(TensorHandle codes, TensorHandle scales, float globalScale,
            NativeWeightOptions* options, out WeightHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_create_nf4(TensorHandle codes, TensorHandle absmax, TensorHandle quantMap,
            long block, long n, long k, NativeWeightOptions* options, out WeightHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_create_dense(TensorHandle weight, out WeightHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_report(WeightHandle weight, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_retain(IntPtr weight);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_release(IntPtr weight);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_weight_size(WeightHandle weight, long* n, long* k, ulong* bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_linear(WeightHandle weight, TensorHandle input, int activations, int dtype,
            out TensorHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_matmul(TensorHandle aCodes, TensorHandle aScales, float aGlobalScale,
            TensorHandle bCodes, TensorHandle bScales, float bGlobalScale, int scaleLayout, int dtype, out TensorHandle result);

        // Schemas.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_schema_detect(NativeNamedTensor* tensors, UIntPtr count, UIntPtr tensorSize,
            byte* prefix, UIntPtr prefixLength, NativeSchemaResult* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_schema_report(NativeNamedTensor* tensors, UIntPtr count, UIntPtr tensorSize,
            byte* prefix, UIntPtr prefixLength, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_schema_validate(NativeNamedTensor* tensors, UIntPtr count, UIntPtr tensorSize,
            byte* prefix, UIntPtr prefixLength);

        // Models.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_load_options_init(NativeLoadOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_load(byte* path, UIntPtr pathLength, NativeLoadOptions* options,
            NativeQuantizeOptions* quantize, out ModelHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_retain(IntPtr model);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_release(IntPtr model);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_info(ModelHandle model, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_vocab_size(ModelHandle model, UIntPtr* size);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_tokenize(ModelHandle model, byte* text, UIntPtr textLength, int addSpecial,
            int* tokens, UIntPtr capacity, UIntPtr* count);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_tokenize_plain(ModelHandle model, byte* text, UIntPtr textLength, int addSpecial,
            int* tokens, UIntPtr capacity, UIntPtr* count);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_detokenize(ModelHandle model, int* tokens, UIntPtr count, int skipSpecial,
            byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_render_chat(ModelHandle model, NativeMessage* messages, UIntPtr count,
            UIntPtr messageSize, int addGenerationPrompt, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_convert_options_init(NativeConvertOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_calibrate_options_init(NativeCalibrateOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_convert(byte* source, UIntPtr sourceLength, byte* destination,
            UIntPtr destinationLength, NativeConvertOptions* options, NativeQuantizeOptions* quantize);

        // Sessions.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_options_init(NativeSessionOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_generate_options_init(NativeGenerateOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_generate_options(ModelHandle model, NativeGenerateOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_create(ModelHandle model, NativeSessionOptions* options,
            out SessionHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_retain(IntPtr session);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_release(IntPtr session);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_prefill(SessionHandle session, int* tokens, UIntPtr count,
            NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_prefill_token_by_token(SessionHandle session, int* tokens, UIntPtr count,
            NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_decode(SessionHandle session, int token, NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_logits(SessionHandle session, float* logits, UIntPtr capacity, UIntPtr* count,
            NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_sample(SessionHandle session, NativeGenerateOptions* options, int* token);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_generate(SessionHandle session, NativeGenerateOptions* options,
            TokenCallback callback, IntPtr user, NativeGenerationResult* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_text(SessionHandle session, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_length(SessionHandle session, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_context(SessionHandle session, UIntPtr* context);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_memory(SessionHandle session, ulong* bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_tokens(SessionHandle session, int* tokens, UIntPtr capacity, UIntPtr* count);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_truncate(SessionHandle session, UIntPtr length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_reset(SessionHandle session);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_fork(SessionHandle session, out SessionHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_save(SessionHandle session, byte* path, UIntPtr pathLength,
            NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_restore(ModelHandle model, byte* path, UIntPtr pathLength,
            NativeCallOptions* call, out SessionHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_step(IntPtr* sessions, int* tokens, UIntPtr count, NativeCallOptions* call,
            int* statuses);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_step_sample(IntPtr* sessions, int* tokens, UIntPtr count,
            NativeGenerateOptions** options, NativeCallOptions* call, int* next, int* statuses);

        // Conversations.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_chat_options_init(NativeChatOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_chat(SessionHandle session, byte* text, UIntPtr textLength, NativeChatOptions* chat,
            NativeGenerateOptions* options, TokenCallback callback, IntPtr user, NativeGenerationResult* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_chat_messages(SessionHandle session, byte* messages, UIntPtr messagesLength,
            NativeChatOptions* chat, NativeGenerateOptions* options, TokenCallback callback, IntPtr user,
            NativeGenerationResult* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_messages(SessionHandle session, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_reasoning(SessionHandle session, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_session_tool_calls(SessionHandle session, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_render_messages(ModelHandle model, byte* messages, UIntPtr messagesLength,
            NativeChatOptions* chat, int addGenerationPrompt, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_model_tokenize_messages(ModelHandle model, byte* messages, UIntPtr messagesLength,
            NativeChatOptions* chat, int addGenerationPrompt, int* tokens, UIntPtr capacity, UIntPtr* count);

        // Detokenizers.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_detokenizer_create(ModelHandle model, int* tokens, UIntPtr count,
            NativeGenerateOptions* options, out DetokenizerHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_detokenizer_push(DetokenizerHandle detokenizer, int token, byte** text,
            UIntPtr* length, int* finish);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_detokenizer_finish(DetokenizerHandle detokenizer, byte** text, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_detokenizer_retain(IntPtr detokenizer);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_detokenizer_release(IntPtr detokenizer);

        // Training.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_options_init(NativeTrainerOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_create(byte* path, UIntPtr pathLength, NativeTrainerOptions* options,
            NativeCallOptions* call, out TrainerHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_resume(byte* path, UIntPtr pathLength, byte* directory,
            UIntPtr directoryLength, NativeTrainerOptions* options, NativeCallOptions* call, out TrainerHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_retain(IntPtr trainer);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_release(IntPtr trainer);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_step(TrainerHandle trainer, NativeMicroBatch* batches, UIntPtr batchCount,
            UIntPtr batchSize, NativeCallOptions* call, NativeStepReport* report);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_evaluate(TrainerHandle trainer, NativeMicroBatch* batches, UIntPtr batchCount,
            UIntPtr batchSize, int delivered, NativeCallOptions* call, double* loss);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_compare(TrainerHandle trainer, NativeMicroBatch* batches, UIntPtr batchCount,
            UIntPtr batchSize, int delivered, NativeCallOptions* call, double* loss, double* divergence);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_info(TrainerHandle trainer, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_save(TrainerHandle trainer, byte* directory, UIntPtr directoryLength, byte* data,
            UIntPtr dataLength, UIntPtr keep, NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_data(TrainerHandle trainer, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_export_directory(TrainerHandle trainer, byte* path, UIntPtr pathLength,
            int tables, int replace, NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_export_dat(TrainerHandle trainer, byte* path, UIntPtr pathLength,
            NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_export_adapter(TrainerHandle trainer, byte* path, UIntPtr pathLength,
            byte* baseModel, UIntPtr baseLength, int replace, NativeCallOptions* call);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_trainer_model(TrainerHandle trainer, NativeCallOptions* call, out ModelHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_options_init(NativeDataOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_read(byte* model, UIntPtr modelLength, byte** files, UIntPtr* fileLengths,
            UIntPtr fileCount, NativeDataOptions* options, NativeCallOptions* call, out DataHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_retain(IntPtr data);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_release(IntPtr data);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_count(DataHandle data, UIntPtr* count);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_document(DataHandle data, UIntPtr index, int* tokens, int* labels, float* weights,
            UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_mask(DataHandle data, UIntPtr index, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_data_report(DataHandle data, byte* buffer, UIntPtr capacity, UIntPtr* length);

        // Training by the host's own passes.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_options_init(NativeOptimizerOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_step_options_init(NativeStepOptions* options, uint structSize);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_create(IntPtr weight, NativeOptimizerOptions* options,
            out OptimizerStateHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_restore(byte* bytes, UIntPtr length, int deviceType, int deviceIndex,
            int libtorch, out OptimizerStateHandle result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_retain(IntPtr state);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_release(IntPtr state);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_step(OptimizerStateHandle state, IntPtr gradient, NativeStepOptions* options,
            ulong* changed, ulong* changedDelivered);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_size(OptimizerStateHandle state, ulong* steps, ulong* bytes);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_weight(OptimizerStateHandle state, int delivered, int dtype, out IntPtr result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_delivered(OptimizerStateHandle state, out TensorHandle codes,
            out TensorHandle scales, float* globalScale);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_optimizer_save(OptimizerStateHandle state, byte* buffer, UIntPtr capacity, UIntPtr* length);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_rounding_seed(ulong seed, ulong tensor, ulong step, ulong* result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_ste_linear(IntPtr x, IntPtr weight, out IntPtr result);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_ste_linear_backward(IntPtr x, IntPtr weight, IntPtr gradient, out IntPtr dx,
            out IntPtr dweight);

        // Drop-in functions.

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern void NVFP4_quantize(IntPtr input, out IntPtr qdata, out IntPtr scale);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_scaled_mm(IntPtr mat1, IntPtr mat2, IntPtr scaleA, IntPtr scaleB, sbyte outDtype);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern void NVFP4_empty_cache();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_can_use_managed();

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern int NVFP4_is_managed_tensor(IntPtr tensor);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern IntPtr NVFP4_to_managed(IntPtr input, int prefetchDevice, int readMostly);

        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]
        internal static extern void NVFP4_managed_prefetch(IntPtr tensor, int deviceIndex);
    }
}
