// The named numbers of nvfp4.h. A test compares them with the header.

namespace LibNVFP4
{
    /// <summary>How severe a log message is.</summary>
    public enum LogLevel
    {
        /// <summary>Errors inside the library.</summary>
        Error = 1,
        /// <summary>Warnings.</summary>
        Warn = 2,
        /// <summary>Milestones.</summary>
        Info = 3,
        /// <summary>Details, every error returned among them.</summary>
        Debug = 4,
        /// <summary>Everything.</summary>
        Trace = 5,
    }

    /// <summary>What memory is used for.</summary>
    public enum MemoryTag
    {
        /// <summary>All tags together.</summary>
        Total = 0,
        /// <summary>Weights.</summary>
        Weights = 1,
        /// <summary>Cached keys and values of sessions.</summary>
        KvCache = 2,
        /// <summary>Activations and workspaces.</summary>
        Scratch = 3,
        /// <summary>Tensors.</summary>
        Tensor = 4,
        /// <summary>Weights on GPUs.</summary>
        DeviceWeights = 5,
        /// <summary>Cached keys and values on GPUs.</summary>
        DeviceKvCache = 6,
        /// <summary>Activations and workspaces on GPUs.</summary>
        DeviceScratch = 7,
        /// <summary>Tensors on GPUs.</summary>
        DeviceTensor = 8,
    }

    /// <summary>Whether managed (unified) memory is used where a host asks for it by policy.</summary>
    public enum ManagedPolicy
    {
        /// <summary>No managed memory.</summary>
        Disabled = 0,
        /// <summary>Managed memory where the device supports it, and other memory where it does not.</summary>
        Preferred = 1,
        /// <summary>Managed memory, or an error.</summary>
        Required = 2,
    }

    /// <summary>The type of a tensor's elements, by libtorch's numbers.</summary>
    public enum DType
    {
        /// <summary>Unsigned byte; also a pair of packed 4-bit codes.</summary>
        UInt8 = 0,
        /// <summary>Signed byte.</summary>
        Int8 = 1,
        /// <summary>16-bit integer.</summary>
        Int16 = 2,
        /// <summary>32-bit integer.</summary>
        Int32 = 3,
        /// <summary>64-bit integer.</summary>
        Int64 = 4,
        /// <summary>IEEE half precision.</summary>
        Float16 = 5,
        /// <summary>IEEE single precision.</summary>
        Float32 = 6,
        /// <summary>IEEE double precision.</summary>
        Float64 = 7,
        /// <summary>A byte that is 0 or 1.</summary>
        Bool = 11,
        /// <summary>bfloat16.</summary>
        BFloat16 = 15,
        /// <summary>E4M3 without infinities, the type of NVFP4 block scales.</summary>
        Float8E4M3Fn = 24,
        /// <summary>Two E2M1 codes in one byte.</summary>
        Float4E2M1FnX2 = 45,
    }

    /// <summary>What kind of device memory is on or work is done by, by libtorch's numbers.</summary>
    public enum DeviceType
    {
        /// <summary>The library's choice, where a device is chosen for work.</summary>
        Auto = -1,
        /// <summary>The CPU and its memory.</summary>
        Cpu = 0,
        /// <summary>A CUDA device.</summary>
        Cuda = 1,
    }

    /// <summary>How many levels of scales there are.</summary>
    public enum Levels
    {
        /// <summary>Two levels of scales: a global scale for the whole tensor, and the block scales.</summary>
        Two = 0,
        /// <summary>Block scales alone.</summary>
        Single = 1,
        /// <summary>The single-level rule of older hosts.</summary>
        Legacy = 2,
    }

    /// <summary>How block scales are chosen.</summary>
    public enum Recipe
    {
        /// <summary>The largest magnitude of a block becomes 6.</summary>
        Amax = 0,
        /// <summary>The largest magnitude of a block becomes 6 or 4, whichever is closer.</summary>
        FourOverSix = 1,
        /// <summary>The scale, of all there are, with the smallest squared error.</summary>
        Sweep = 2,
    }

    /// <summary>How values between two codes are rounded.</summary>
    public enum Rounding
    {
        /// <summary>To the nearer code; a tie goes to the even one.</summary>
        NearestEven = 0,
        /// <summary>To the nearer code; a tie goes away from zero.</summary>
        HalfAway = 1,
        /// <summary>Up or down by chance, so that the expected result is the value.</summary>
        Stochastic = 2,
    }

    /// <summary>What becomes of NaN and infinities.</summary>
    public enum Nonfinite
    {
        /// <summary>An error that names the first index.</summary>
        Error = 0,
        /// <summary>NaN counts as 0, an infinity as the largest value that fits.</summary>
        Saturate = 1,
    }

    /// <summary>The order of block scales.</summary>
    public enum ScaleLayout
    {
        /// <summary>Row-major.</summary>
        Linear = 0,
        /// <summary>In the 128 x 4 tiles that tensor cores read.</summary>
        Swizzled = 1,
    }

    /// <summary>What is done to activations before a product.</summary>
    public enum Activations
    {
        /// <summary>They stay as they are (W4A16).</summary>
        Exact = 0,
        /// <summary>They are rounded to 8 bits (W4A8), on the CPU only.</summary>
        Int8 = 1,
    }

    /// <summary>Whether a weight is multiplied in 4 bits or decoded.</summary>
    public enum ComputePath
    {
        /// <summary>A kernel for the weight's format, or else the decoded weight.</summary>
        Auto = 0,
        /// <summary>A kernel for the weight's format, or an error.</summary>
        KernelOnly = 1,
        /// <summary>A kernel for the weight's format if the device has one, or else the decoded weight.</summary>
        KernelOrFallback = 2,
        /// <summary>The decoded weight.</summary>
        DequantMatmulOnly = 3,
    }

    /// <summary>The 4-bit format of a weight.</summary>
    public enum Format
    {
        /// <summary>No weight in 4 bits.</summary>
        None = 0,
        /// <summary>Codes of E2M1 with a scale for each 16.</summary>
        Nvfp4 = 1,
        /// <summary>NF4 of bitsandbytes.</summary>
        Nf4 = 2,
        /// <summary>Weights of several formats.</summary>
        Mixed = 3,
    }

    /// <summary>What a converted model is written as.</summary>
    public enum Container
    {
        /// <summary>A directory of safetensors in ModelOpt's layout.</summary>
        ModelOpt = 0,
        /// <summary>TorchSharp's .dat with single-level scales.</summary>
        Dat = 1,
    }

    /// <summary>The precision of cached keys and values.</summary>
    public enum KvType
    {
        /// <summary>IEEE half precision.</summary>
        Float16 = 0,
        /// <summary>IEEE single precision.</summary>
        Float32 = 1,
    }

    /// <summary>What a session does with tokens that do not fit.</summary>
    public enum Eviction
    {
        /// <summary>Refuses them.</summary>
        Error = 0,
        /// <summary>Drop old tokens.</summary>
        DropOldest = 1,
    }

    /// <summary>Why a generation ended.</summary>
    public enum FinishReason
    {
        /// <summary>Nothing has ended it yet.</summary>
        None = -1,
        /// <summary>A stop token.</summary>
        Stop = 0,
        /// <summary>A stop string.</summary>
        StopString = 1,
        /// <summary>As many tokens were generated as were allowed.</summary>
        Length = 2,
        /// <summary>The context is full.</summary>
        Context = 3,
        /// <summary>A callback, a token or <see cref="Session.Cancel"/>. What was generated until then is kept.</summary>
        Cancelled = 4,
    }

    /// <summary>What a generation tells its handler.</summary>
    public enum TokenEventKind
    {
        /// <summary>A token, with the text that it completes.</summary>
        Token = 0,
        /// <summary>No token, but text: more that the token before completes, or what was held back in case it was the beginning of something else.</summary>
        Text = 1,
    }

    /// <summary>What a piece of an answer is.</summary>
    public enum Part
    {
        /// <summary>The answer itself, and all that is generated outside of a chat.</summary>
        Content = 0,
        /// <summary>What the model thinks before it answers.</summary>
        Reasoning = 1,
        /// <summary>A call of a tool, whole, as JSON, which <see cref="LibNVFP4.ToolCall.FromJson"/> reads.</summary>
        ToolCall = 2,
    }

    /// <summary>How the learning rate goes on after the warm-up.</summary>
    public enum Schedule
    {
        /// <summary>It stays.</summary>
        Constant = 0,
        /// <summary>It falls along half a cosine.</summary>
        Cosine = 1,
        /// <summary>It falls in a straight line.</summary>
        Linear = 2,
        /// <summary>It stays, and falls in a straight line at the end.</summary>
        Stable = 3,
    }

    /// <summary>How gradients are clipped.</summary>
    public enum Clip
    {
        /// <summary>Not at all.</summary>
        Never = 0,
        /// <summary>All together.</summary>
        Global = 1,
        /// <summary>All together, by the norm of the step before; for released gradients.</summary>
        Previous = 2,
        /// <summary>Those of each matrix; for released gradients.</summary>
        Tensor = 3,
    }

    /// <summary>Where the weights of a teacher are; all give the same bits.</summary>
    public enum Teacher
    {
        /// <summary>On the device if both models fit in its memory, else in its files.</summary>
        Auto = 0,
        /// <summary>On the device.</summary>
        Resident = 1,
        /// <summary>In its files, from which they are read in each pass.</summary>
        Streamed = 2,
    }

    /// <summary>How weights are held between steps.</summary>
    public enum WeightForm
    {
        /// <summary>An NVFP4 code and a residual of 4 bits.</summary>
        Residual4 = 0,
        /// <summary>An NVFP4 code and a residual of 8 bits.</summary>
        Residual8 = 1,
        /// <summary>Two E2M1 codes.</summary>
        TwoTerm = 2,
        /// <summary>One NVFP4 code.</summary>
        OneTerm = 3,
        /// <summary>bfloat16.</summary>
        BFloat16 = 4,
        /// <summary>float32.</summary>
        Float32 = 5,
    }

    /// <summary>How first moments are held.</summary>
    public enum FirstMoment
    {
        /// <summary>Integers of 4 bits with dither.</summary>
        Int4 = 0,
        /// <summary>NVFP4.</summary>
        Nvfp4 = 1,
        /// <summary>Integers of 8 bits.</summary>
        Int8 = 2,
        /// <summary>float32.</summary>
        Float32 = 3,
    }

    /// <summary>How the roots of second moments are held.</summary>
    public enum SecondMoment
    {
        /// <summary>Integers of 4 bits.</summary>
        UInt4 = 0,
        /// <summary>NVFP4.</summary>
        Nvfp4 = 1,
        /// <summary>Integers of 8 bits.</summary>
        Int8 = 2,
        /// <summary>float32, and not the root.</summary>
        Float32 = 3,
    }

    /// <summary>What a file of training data is made of.</summary>
    public enum DataFormat
    {
        /// <summary>What its name says: .tsv, .csv, .jsonl, .json or .txt, each also with .gz or .zst after it.</summary>
        ByName = -1,
        /// <summary>A line a row: a prompt, a tab and its answer.</summary>
        Tsv = 0,
        /// <summary>A line a row: a JSON object.</summary>
        Jsonl = 1,
        /// <summary>A text.</summary>
        Text = 2,
        /// <summary>A record a row, with commas between its fields and the names of columns in the first record.</summary>
        Csv = 3,
        /// <summary>An array of JSON objects.</summary>
        Json = 4,
    }

    /// <summary>What becomes of rows that are longer than a window.</summary>
    public enum LongRows
    {
        /// <summary>They are an error.</summary>
        Refuse = 0,
        /// <summary>Their ends are cut off.</summary>
        Truncate = 1,
        /// <summary>They are left out.</summary>
        Drop = 2,
    }

    /// <summary>What becomes of the empty reasoning that some templates write before an answer without reasoning.</summary>
    public enum EmptyThink
    {
        /// <summary>It is learned with the answer.</summary>
        Learn = 0,
        /// <summary>It is context.</summary>
        Given = 1,
        /// <summary>It is left out.</summary>
        None = 2,
    }

    /// <summary>What a step of training did.</summary>
    public enum StepOutcome
    {
        /// <summary>It updated parameters.</summary>
        Updated = 0,
        /// <summary>Nothing: the loss or a gradient was not finite.</summary>
        Skipped = 1,
    }

    /// <summary>What a model that is written holds embedding and head as.</summary>
    public enum Tables
    {
        /// <summary>
        /// int8 where the source has them in at most 8 bits and the container holds that, else 16 bits; NVFP4 stays NVFP4. Only for
        /// conversions.
        /// </summary>
        Auto = -1,
        /// <summary>bfloat16, which every reader knows.</summary>
        BFloat16 = 0,
        /// <summary>NVFP4, a little more than a quarter of the bytes.</summary>
        Nvfp4 = 1,
        /// <summary>int8 with a float32 scale a row, half of the bytes; .dat cannot hold it. Only for conversions.</summary>
        Int8 = 2,
    }
}
