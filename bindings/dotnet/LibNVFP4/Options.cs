// What can be chosen, with the library's own defaults: a new object has them, and properties change them.

using System;
using System.Collections.Generic;

namespace LibNVFP4
{
    /// <summary>Where memory is or work is done.</summary>
    public struct Device : IEquatable<Device>
    {
        /// <summary>A device of a kind.</summary>
        public Device(DeviceType type, int index = 0)
        {
            Type = type;
            Index = index;
        }

        /// <summary>The CPU.</summary>
        public static Device Cpu => new Device(DeviceType.Cpu);

        /// <summary>For a model the GPU with room for it, for a weight the first CUDA device, or else the CPU. Not for tensors.</summary>
        public static Device Auto => new Device(DeviceType.Auto);

        /// <summary>A CUDA device.</summary>
        public static Device Cuda(int index = 0) => new Device(DeviceType.Cuda, index);

        /// <summary>Its kind.</summary>
        public DeviceType Type { get; }

        /// <summary>Which one of that kind.</summary>
        public int Index { get; }

        /// <summary>Whether both are the same device.</summary>
        public bool Equals(Device other) => Type == other.Type && Index == other.Index;

        /// <summary>Whether both are the same device.</summary>
        public override bool Equals(object other) => other is Device && Equals((Device)other);

        /// <summary>A hash of kind and number.</summary>
        public override int GetHashCode() => ((int)Type * 397) ^ Index;

        /// <summary>"cpu", "cuda:0" or "auto".</summary>
        public override string ToString() =>
            Type == DeviceType.Cuda ? "cuda:" + Index : Type == DeviceType.Auto ? "auto" : "cpu";
    }

    /// <summary>How to quantize.</summary>
    public sealed unsafe class QuantizeOptions
    {
        internal NativeQuantizeOptions Raw;

        /// <summary>The defaults.</summary>
        public QuantizeOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeQuantizeOptions* raw = &Raw)
                    return Native.NVFP4_quantize_options_init(raw, (uint)sizeof(NativeQuantizeOptions));
            });
        }

        /// <summary>How many levels of scales. Default: two.</summary>
        public Levels Levels { get => (Levels)Raw.Levels; set => Raw.Levels = (int)value; }

        /// <summary>How block scales are chosen. Default: amax.</summary>
        public Recipe Recipe { get => (Recipe)Raw.Recipe; set => Raw.Recipe = (int)value; }

        /// <summary>How values are rounded. Default: to nearest even.</summary>
        public Rounding Rounding { get => (Rounding)Raw.Rounding; set => Raw.Rounding = (int)value; }

        /// <summary>What becomes of NaN and infinities. Default: an error.</summary>
        public Nonfinite Nonfinite { get => (Nonfinite)Raw.Nonfinite; set => Raw.Nonfinite = (int)value; }

        /// <summary>The order of the scales. Default: linear.</summary>
        public ScaleLayout ScaleLayout { get => (ScaleLayout)Raw.ScaleLayout; set => Raw.ScaleLayout = (int)value; }

        /// <summary>The seed of stochastic rounding. Default: 0.</summary>
        public ulong Seed { get => Raw.Seed; set => Raw.Seed = value; }
    }

    /// <summary>How to prepare a weight.</summary>
    public sealed unsafe class WeightOptions
    {
        internal NativeWeightOptions Raw;

        /// <summary>The defaults.</summary>
        public WeightOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeWeightOptions* raw = &Raw)
                    return Native.NVFP4_weight_options_init(raw, (uint)sizeof(NativeWeightOptions));
            });
        }

        /// <summary>Whether to multiply in 4 bits. Default: auto.</summary>
        public ComputePath ComputePath { get => (ComputePath)Raw.ComputePath; set => Raw.ComputePath = (int)value; }

        /// <summary>The device. Default: the CPU.</summary>
        public Device Device
        {
            get => new Device((DeviceType)Raw.DeviceType, Raw.DeviceIndex);
            set
            {
                Raw.DeviceType = (int)value.Type;
                Raw.DeviceIndex = value.Index;
            }
        }

        /// <summary>The order of an NVFP4 weight's scales. Default: linear. A <see cref="QuantizedTensor"/> brings its own.</summary>
        public ScaleLayout ScaleLayout { get => (ScaleLayout)Raw.ScaleLayout; set => Raw.ScaleLayout = (int)value; }

        /// <summary>The type that a decoded weight is stored in. Default: float32.</summary>
        public DType DenseDType { get => (DType)Raw.DenseDtype; set => Raw.DenseDtype = (int)value; }

        /// <summary>Whether to count only GPU kernels as kernels. Default: no.</summary>
        public bool ExcludeCpuKernels { get => Raw.ExcludeCpuKernels != 0; set => Raw.ExcludeCpuKernels = Interop.Flag(value); }

        /// <summary>The name of the backend to insist on. Default: null, any.</summary>
        public string Backend { get; set; }
    }

    /// <summary>How to load a model.</summary>
    public sealed unsafe class LoadOptions
    {
        internal NativeLoadOptions Raw;

        /// <summary>The defaults.</summary>
        public LoadOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeLoadOptions* raw = &Raw)
                    return Native.NVFP4_load_options_init(raw, (uint)sizeof(NativeLoadOptions));
            });
            Device = Device.Auto;
        }

        /// <summary>Where it runs. Default: the GPU with room for the model, or else the CPU. <see cref="ModelInfo.DeviceChoice"/> says why.</summary>
        public Device Device
        {
            get => new Device((DeviceType)Raw.DeviceType, Raw.DeviceIndex);
            set
            {
                Raw.DeviceType = (int)value.Type;
                Raw.DeviceIndex = value.Index;
            }
        }

        /// <summary>CPU threads of this model, or 0 for those that models share. Default: 0.</summary>
        public int Threads { get => Raw.Threads; set => Raw.Threads = value; }

        /// <summary>How activations are quantized. Default: not at all.</summary>
        public Activations Activations { get => (Activations)Raw.Activations; set => Raw.Activations = (int)value; }

        /// <summary>Whether to leave out the layers. Default: no.</summary>
        public bool SamplingOnly { get => Raw.SamplingOnly != 0; set => Raw.SamplingOnly = Interop.Flag(value); }

        /// <summary>Bytes for the keys and values of all sessions together, reserved when the model is loaded. 0 reserves nothing: memory is allocated as sessions grow. Default: 0.</summary>
        public ulong KvBytes { get => Raw.KvBytes; set => Raw.KvBytes = value; }

        /// <summary>Whether sessions that begin with the same tokens share the keys and values of these. Default: yes.</summary>
        public bool PrefixCache { get => Raw.PrefixCache != 0; set => Raw.PrefixCache = Interop.Flag(value); }

        /// <summary>Whether the logits of a session have the same bits whatever runs beside it and however its prompt is divided. Always so on the CPU; on a GPU this costs speed. Default: no.</summary>
        public bool Deterministic { get => Raw.Deterministic != 0; set => Raw.Deterministic = Interop.Flag(value); }

        /// <summary>Bytes of keys and values that are kept after the last session that used them, for later ones that begin with the same tokens. Default: 0.</summary>
        public ulong PrefixBytes { get => Raw.PrefixBytes; set => Raw.PrefixBytes = value; }

        /// <summary>Threads of the program that work for the model on the CPU, in place of the library's. Not together with <see cref="Threads"/>. Default: null.</summary>
        public Pool Pool
        {
            get => pool;
            set
            {
                pool = value;
                Raw.Pool = value == null ? IntPtr.Zero : value.Handle.DangerousGetHandle();
            }
        }

        /// <summary>Whether to lock the weights in host memory, so that the system never pages them out. An Nvfp4OutOfMemoryException says which limit is in the way. Without effect on a GPU. Default: no.</summary>
        public bool Mlock { get => Raw.Mlock != 0; set => Raw.Mlock = Interop.Flag(value); }

        /// <summary>Whether weights on the CPU are mapped from the file of packed weights that <c>nvfp4 quantize --packed</c> writes, which processes share. Default: if it is there.</summary>
        public PackedUse Packed { get => (PackedUse)Raw.Packed; set => Raw.Packed = (int)value; }

        /// <summary>The goal of passes with prompts while other sessions generate. Default: throughput.</summary>
        public Tuning Tuning { get => (Tuning)Raw.Tuning; set => Raw.Tuning = (int)value; }

        /// <summary>The most tokens of prompts in such a pass, or 0 for as many as <see cref="Tuning"/> allows by measured times. Default: 0.</summary>
        public int PromptTokens { get => (int)Raw.PromptTokens; set => Raw.PromptTokens = checked((uint)value); }

        Pool pool;
    }

    /// <summary>How to make a session.</summary>
    public sealed unsafe class SessionOptions
    {
        internal NativeSessionOptions Raw;

        /// <summary>The defaults.</summary>
        public SessionOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeSessionOptions* raw = &Raw)
                    return Native.NVFP4_session_options_init(raw, (uint)sizeof(NativeSessionOptions));
            });
        }

        /// <summary>The type of the KV cache. Default: half precision.</summary>
        public KvType KvType { get => (KvType)Raw.KvType; set => Raw.KvType = (int)value; }

        /// <summary>What happens to tokens that do not fit. Default: an error.</summary>
        public Eviction Eviction { get => (Eviction)Raw.Eviction; set => Raw.Eviction = (int)value; }

        /// <summary>The most tokens to hold. Memory is allocated as they are appended. 0, the default, is the context length of the model.</summary>
        public long Context { get => Interop.Long(Raw.Context); set => Raw.Context = Interop.Size(value); }

        /// <summary>Tokens at the beginning that eviction never drops. Default: 0, which is 4 for a sliding window.</summary>
        public long Keep { get => Interop.Long(Raw.Keep); set => Raw.Keep = Interop.Size(value); }

        /// <summary>Tokens that a sliding window drops at a time, or more if that is not enough. Default: 0, half of those that are not kept.</summary>
        public long Drop { get => Interop.Long(Raw.Drop); set => Raw.Drop = Interop.Size(value); }

        /// <summary>Keeps the session out of the prefix cache: it runs all of its tokens, and no other session begins with its blocks. For measurements, and where the time of a first token must not tell what others have asked. Default: false.</summary>
        public bool IsPrivate { get => Raw.IsPrivate != 0; set => Raw.IsPrivate = value ? 1 : 0; }

        /// <summary>The system prompt of chat turns. Default: null, none.</summary>
        public string System { get; set; }

        /// <summary>The adapter that the session's tokens run with, of the same model. Default: null, none.</summary>
        public Adapter Adapter { get; set; }

        internal SessionOptions With(string system)
        {
            var copy = (SessionOptions)MemberwiseClone();
            copy.System = system ?? System;
            return copy;
        }
    }

    /// <summary>How to generate. In a chat, what is not set of temperature, top-k, top-p, min-p and repetition penalty is as the model recommends.</summary>
    public sealed unsafe class GenerateOptions
    {
        const ulong NewSeed = ulong.MaxValue;

        internal NativeGenerateOptions Raw;

        /// The options of drawing that were set.
        bool temperature, topK, topP, minP, repetitionPenalty;

        Grammar grammar;
        Model draftModel;

        /// <summary>The defaults: greedy, as many tokens as fit in the context.</summary>
        public GenerateOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeGenerateOptions* raw = &Raw)
                    return Native.NVFP4_generate_options_init(raw, (uint)sizeof(NativeGenerateOptions));
            });
        }

        /// <summary>Options with the temperature, top-k, top-p, min-p and repetition penalty that the model recommends, and defaults for the rest. Without a recommendation they take the argmax.</summary>
        public static GenerateOptions From(Model model)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            var options = new GenerateOptions();
            fixed (NativeGenerateOptions* raw = &options.Raw)
                Interop.Check(Native.NVFP4_model_generate_options(model.Handle, raw, (uint)sizeof(NativeGenerateOptions)));
            options.temperature = options.topK = options.topP = options.minP = options.repetitionPenalty = true;
            return options;
        }

        /// A copy in which what was not set is as in other options.
        internal GenerateOptions Over(GenerateOptions others)
        {
            GenerateOptions copy = Clone();
            if (!temperature)
                copy.Raw.Temperature = others.Raw.Temperature;
            if (!topK)
                copy.Raw.TopK = others.Raw.TopK;
            if (!topP)
                copy.Raw.TopP = others.Raw.TopP;
            if (!minP)
                copy.Raw.MinP = others.Raw.MinP;
            if (!repetitionPenalty)
                copy.Raw.RepetitionPenalty = others.Raw.RepetitionPenalty;
            return copy;
        }

        /// <summary>Divides the logits before the softmax. 0, the default, takes the argmax.</summary>
        public float Temperature
        {
            get => Raw.Temperature;
            set
            {
                Raw.Temperature = value;
                temperature = true;
            }
        }

        /// <summary>Draws from this many of the most probable tokens. Default: 0, all.</summary>
        public int TopK
        {
            get => Raw.TopK;
            set
            {
                Raw.TopK = value;
                topK = true;
            }
        }

        /// <summary>Draws from the fewest of the most probable tokens whose probabilities reach this sum. 0 takes the argmax. Default: 1, all.</summary>
        public float TopP
        {
            get => Raw.TopP;
            set
            {
                Raw.TopP = value;
                topP = true;
            }
        }

        /// <summary>Leaves out tokens less probable than this fraction of the most probable one. Default: 0, none.</summary>
        public float MinP
        {
            get => Raw.MinP;
            set
            {
                Raw.MinP = value;
                minP = true;
            }
        }

        /// <summary>Makes tokens that have occurred less probable. Default: 1, no penalty.</summary>
        public float RepetitionPenalty
        {
            get => Raw.RepetitionPenalty;
            set
            {
                Raw.RepetitionPenalty = value;
                repetitionPenalty = true;
            }
        }

        /// <summary>Subtracted from the logits of tokens that the generation has at least once. Default: 0.</summary>
        public float PresencePenalty { get => Raw.PresencePenalty; set => Raw.PresencePenalty = value; }

        /// <summary>Subtracted from the logit of a token once for each time that the generation has it. Default: 0.</summary>
        public float FrequencyPenalty { get => Raw.FrequencyPenalty; set => Raw.FrequencyPenalty = value; }

        /// <summary>Tokens with a number that is added to their logits; negative infinity excludes a token. Default: null, none.</summary>
        public IEnumerable<KeyValuePair<int, float>> LogitBias { get; set; }

        /// <summary>Token sequences that are not completed: where all but the last token of one are the end of the session's tokens, its last token is excluded. Default: null, none.</summary>
        public IEnumerable<IEnumerable<int>> BadWords { get; set; }

        /// <summary>
        /// The program's own change of the logits before each choice: after penalties, biases and exclusions, and before filters and temperature.
        /// Tokens that a grammar excludes are negative infinity, and stay excluded. It runs on the thread that generates: the caller's, or in a
        /// <see cref="Queue"/> one of the library's. What it throws ends the generation and is thrown from its call. NaN, positive infinity, or no finite
        /// logit left are an <see cref="Nvfp4ArgumentException"/>; the session then keeps the tokens before that. Default: null, none.
        /// </summary>
        public LogitsHandler LogitsProcessor { get; set; }

        /// <summary>Whether to treat the model's own stop tokens like any other token. Default: no.</summary>
        public bool IgnoreModelStops { get => Raw.IgnoreModelStops != 0; set => Raw.IgnoreModelStops = Interop.Flag(value); }

        /// <summary>Whether to compute each token from the whole sequence, for comparison. Default: no.</summary>
        public bool Replay { get => Raw.Replay != 0; set => Raw.Replay = Interop.Flag(value); }

        /// <summary>Whether handlers get each token's log-probability, which copies the logits of each token to the host. Default: no.</summary>
        public bool LogProbabilities { get => Raw.LogProbabilities != 0; set => Raw.LogProbabilities = Interop.Flag(value); }

        /// <summary>How many of the most probable tokens handlers get with each token, with log-probabilities, up to 20; the token's own is told too. Default: 0.</summary>
        public int TopLogProbabilities { get => Raw.TopLogProbabilities; set => Raw.TopLogProbabilities = value; }

        /// <summary>The most tokens that the model's drafter guesses in a step, for one pass of the model to verify, up to 16; -1 drafts none. The generated tokens are the same, on a GPU but for rounding. Default: 0, which drafts if the model has a drafter, while that is faster.</summary>
        public int Drafts { get => Raw.Drafts; set => Raw.Drafts = value; }

        /// <summary>The most tokens that a step drafts by prompt lookup, up to 16: where the session's last tokens have occurred in it before, those that followed there. It pays where an answer quotes its prompt or itself. The generated tokens are the same, on a GPU but for rounding. Not together with a number of <see cref="Drafts"/>. Default: 0, which looks nothing up.</summary>
        public int PromptLookup { get => (int)Interop.Long(Raw.PromptLookup); set => Raw.PromptLookup = Interop.Size(value); }

        /// <summary>A smaller model with the same tokenizer, on any device, that guesses tokens for one pass of the session's model to verify: as many in a step as have been fastest, or the number of <see cref="Drafts"/>. The generated tokens are the same, on a GPU but for rounding. The session keeps its own keys and values in it until a generation without it. Not together with <see cref="PromptLookup"/>. Default: null, none.</summary>
        public Model DraftModel
        {
            get => draftModel;
            set
            {
                draftModel = value;
                Raw.DraftModel = value == null ? IntPtr.Zero : value.Handle.DangerousGetHandle();
            }
        }

        /// <summary>Tokens at the end of the session that <see cref="RepetitionPenalty"/> counts, such as 64; the prompt's are among them as far as they reach. Default: 0, all tokens of the session.</summary>
        public long RepetitionWindow { get => Interop.Long(Raw.RepetitionWindow); set => Raw.RepetitionWindow = Interop.Size(value); }

        /// <summary>New tokens before which those that end the text, the model's and <see cref="StopTokens"/>, are not chosen, and stop strings are not looked for; at most <see cref="MaxTokens"/>. A grammar that allows nothing else ends the text all the same. Default: 0.</summary>
        public long MinTokens { get => Interop.Long(Raw.MinTokens); set => Raw.MinTokens = Interop.Size(value); }

        /// <summary>Tokens that would complete a sequence of this many tokens that the session has already, prompt included, are excluded. Default: 0, none.</summary>
        public long NoRepeatNgramSize { get => Interop.Long(Raw.NoRepeatNgramSize); set => Raw.NoRepeatNgramSize = Interop.Size(value); }

        /// <summary>Strength of the DRY penalty, such as 0.8: where the session's last tokens have occurred before, the token that followed there loses <c>DryMultiplier * DryBase^(n - DryAllowedLength)</c>, with the length n of the longest such repetition in tokens. Default: 0, off.</summary>
        public float DryMultiplier { get => Raw.DryMultiplier; set => Raw.DryMultiplier = value; }

        /// <summary>Growth of the DRY penalty with each token of the repetition, at least 1. Default: 1.75.</summary>
        public float DryBase { get => Raw.DryBase; set => Raw.DryBase = value; }

        /// <summary>Length of the shortest repetition with a DRY penalty, at least 1. Default: 2.</summary>
        public long DryAllowedLength { get => Interop.Long(Raw.DryAllowedLength); set => Raw.DryAllowedLength = Interop.Size(value); }

        /// <summary>Tokens at the end of the session in which DRY finds repetitions. Default: 0, all tokens of the session.</summary>
        public long DryWindow { get => Interop.Long(Raw.DryWindow); set => Raw.DryWindow = Interop.Size(value); }

        /// <summary>Strings that no repetition of DRY contains: one begins after the last of them. A token whose own text contains one has no penalty. Default: null, which stands for newline, colon, quotation mark and asterisk.</summary>
        public IEnumerable<string> DrySequenceBreakers { get; set; }

        /// <summary>Excludes tokens whose logit is more than this many standard deviations below the largest. Default: 0, off.</summary>
        public float TopNSigma { get => Raw.TopNSigma; set => Raw.TopNSigma = value; }

        /// <summary>Keeps the tokens whose surprise is nearest to the entropy, as many as reach this probability together (locally typical sampling). Default: 1, all.</summary>
        public float TypicalP { get => Raw.TypicalP; set => Raw.TypicalP = value; }

        /// <summary>Probability with which a choice excludes the most probable tokens (XTC); <see cref="Seed"/> decides on it as on draws. Default: 0, never.</summary>
        public float XtcProbability { get => Raw.XtcProbability; set => Raw.XtcProbability = value; }

        /// <summary>Tokens with at least this probability are excluded by XTC, but for the least probable of them. Default: 0.1.</summary>
        public float XtcThreshold { get => Raw.XtcThreshold; set => Raw.XtcThreshold = value; }

        /// <summary>The most tokens to generate. With 0 a prompt is run and nothing is generated. Default: as many as fit in the context.</summary>
        public long MaxTokens { get => Interop.Long(Raw.MaxTokens); set => Raw.MaxTokens = Interop.Size(value); }

        /// <summary>The seed of the draws. Default: null, a new one for each generation, which <see cref="Generation.Seed"/> reports.</summary>
        public ulong? Seed { get => Raw.Seed == NewSeed ? (ulong?)null : Raw.Seed; set => Raw.Seed = value ?? NewSeed; }

        /// <summary>Tokens that end the text, besides the model's own stop tokens. Default: null, none.</summary>
        public IEnumerable<int> StopTokens { get; set; }

        /// <summary>Stop strings: each ends the text and is not part of it. Special tokens give no text, but a stop string may contain the name of one. Default: null, none.</summary>
        public IEnumerable<string> StopStrings { get; set; }

        /// <summary>The form that the text has, in a chat the content of the answer. Default: null, none.</summary>
        public Grammar Grammar
        {
            get => grammar;
            set
            {
                grammar = value;
                Raw.Grammar = value == null ? IntPtr.Zero : value.Handle.DangerousGetHandle();
            }
        }

        /// <summary>Whether tool calls of a chat without <see cref="Grammar"/> are held to the schemas of their tools. Default: they are free.</summary>
        public ToolCalls ToolCalls { get => (ToolCalls)Raw.ToolCalls; set => Raw.ToolCalls = (int)value; }

        /// <summary>Receives the number of tokens run: those of the prompt, and then those that are generated. Default: null.</summary>
        public ProgressHandler Progress { get; set; }

        /// <summary>A copy, to change something in.</summary>
        public GenerateOptions Clone() => (GenerateOptions)MemberwiseClone();
    }

    /// <summary>Limits of a <see cref="Queue"/>.</summary>
    public sealed unsafe class QueueOptions
    {
        internal NativeQueueOptions Raw;

        /// <summary>The defaults.</summary>
        public QueueOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeQueueOptions* raw = &Raw)
                    return Native.NVFP4_queue_options_init(raw, (uint)sizeof(NativeQueueOptions));
            });
        }

        /// <summary>The most generations that run at a time; others wait for one of them to end. Each has a thread of the library. Default: 256.</summary>
        public int Running { get => Raw.Running; set => Raw.Running = value; }

        /// <summary>The most submissions that have not ended, running ones included. A further one is an <see cref="Nvfp4BusyException"/>. Default: 4,096.</summary>
        public long Submissions { get => Interop.Long(Raw.Submissions); set => Raw.Submissions = Interop.Size(value); }

        /// <summary>The most events that wait for the queue's thread; with as many, generations pause. Default: 65,536.</summary>
        public long Events { get => Interop.Long(Raw.Events); set => Raw.Events = Interop.Size(value); }
    }

    /// <summary>How a <see cref="Queue"/> runs a generation.</summary>
    public sealed unsafe class SubmitOptions
    {
        internal NativeSubmitOptions Raw;
        TimeSpan? deadline;

        /// <summary>The defaults.</summary>
        public SubmitOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeSubmitOptions* raw = &Raw)
                    return Native.NVFP4_submit_options_init(raw, (uint)sizeof(NativeSubmitOptions));
            });
        }

        /// <summary>A waiting generation of a higher priority starts first; of equal ones, the one that was submitted first. Running generations are not interrupted. Default: 0.</summary>
        public int Priority { get => Raw.Priority; set => Raw.Priority = value; }

        /// <summary>The time after which the generation ends as <see cref="FinishReason.Deadline"/>, counted from its submission. It keeps the tokens that it has, and is no failure. Default: null, never.</summary>
        public TimeSpan? Deadline
        {
            get => deadline;
            set
            {
                if (value <= TimeSpan.Zero)
                    throw new ArgumentOutOfRangeException(nameof(value), value, "a deadline takes a positive time, or null for none");
                deadline = value;
                Raw.Deadline = value?.TotalSeconds ?? 0;
            }
        }

        /// <summary>A copy, to change something in.</summary>
        public SubmitOptions Clone() => (SubmitOptions)MemberwiseClone();
    }

    /// <summary>The sessions of <see cref="Model.Plan"/>.</summary>
    public sealed unsafe class PlanOptions
    {
        internal NativePlanOptions Raw;

        /// <summary>The defaults.</summary>
        public PlanOptions()
        {
            Library.Call(() =>
            {
                fixed (NativePlanOptions* raw = &Raw)
                    return Native.NVFP4_plan_options_init(raw, (uint)sizeof(NativePlanOptions));
            });
        }

        /// <summary>The type of the sessions' keys and values. Default: half precision.</summary>
        public KvType KvType { get => (KvType)Raw.KvType; set => Raw.KvType = (int)value; }

        /// <summary>Sessions that take steps together, at least 1. Default: 1.</summary>
        public long Sequences { get => Interop.Long(Raw.Sequences); set => Raw.Sequences = Interop.Size(value); }

        /// <summary>Tokens that each session comes to, at most those that the model was made for; 0 for these. Default: 0.</summary>
        public long Context { get => Interop.Long(Raw.Context); set => Raw.Context = Interop.Size(value); }

        /// <summary>Bytes of the device's memory in which model and sessions are to fit; 0 for what is free on the device. Default: 0.</summary>
        public ulong BudgetBytes { get => Raw.BudgetBytes; set => Raw.BudgetBytes = value; }
    }

    /// <summary>How to calibrate a model: see <see cref="Quantizer.ConvertModel"/>.</summary>
    public sealed class CalibrateOptions
    {
        /// <summary>Where the model reads the text; the search for codes runs on the CPU. Default: the CPU.</summary>
        public Device Device { get; set; } = Device.Cpu;

        /// <summary>Windows of the text, at most. Default: null, 32 on a CPU and 128 on a GPU.</summary>
        public int? Windows { get; set; }

        /// <summary>Tokens in a window. Default: null, 1024 on a CPU and 2048 on a GPU, or the model's context if that is less.</summary>
        public int? Window { get; set; }

        /// <summary>
        /// Files with text of the kinds that the model is used for, with rows as <see cref="TrainingData.Read"/> reads them. What they do not
        /// fill comes from a text that the library brings. Default: none.
        /// </summary>
        public string[] Files { get; set; } = new string[0];

        /// <summary>
        /// Bits that a weight of the model's blocks may have on average, scales included: from 4.5, those of NVFP4, to 8. The blocks that
        /// lose most by NVFP4 then have int8 rows. Default: null, NVFP4 in all.
        /// </summary>
        public double? Budget { get; set; }

        /// <summary>
        /// Steps of distillation after the calibration, in which the whole model, still in NVFP4, learns what the original predicts. It is
        /// for GPUs: a step takes a CPU minutes. Default: 0.
        /// </summary>
        public uint DistillSteps { get; set; }
    }
}
