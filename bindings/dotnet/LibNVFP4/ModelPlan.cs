// The memory of a model and its sessions, as Model.Plan gives it.

namespace LibNVFP4
{
    /// <summary>
    /// The memory of a model and its sessions, before it is loaded: see <see cref="Model.Plan"/>. Properties with Host in their names count host
    /// memory that a model on a GPU takes besides that of the GPU, and are 0 on the CPU; the others count the memory of the device. Not counted
    /// are the driver and its libraries, compiled kernels, tokenizers, texts and logits.
    /// </summary>
    public sealed class ModelPlan
    {
        internal ModelPlan(NativePlan raw)
        {
            Device = new Device((DeviceType)raw.DeviceType, raw.DeviceIndex);
            Context = (long)raw.Context;
            WeightBytes = raw.WeightBytes;
            WeightHostBytes = raw.WeightHostBytes;
            PeakLoadBytes = raw.PeakLoadBytes;
            PeakLoadHostBytes = raw.PeakLoadHostBytes;
            StepWorkspaceBytes = raw.StepWorkspaceBytes;
            WorkspaceBytes = raw.WorkspaceBytes;
            WorkspaceHostBytes = raw.WorkspaceHostBytes;
            GraphBytesBound = raw.GraphBytesBound;
            KvBytesPerToken = raw.KvBytesPerToken;
            KvBlockBytes = raw.KvBlockBytes;
            KvBlockPositions = (long)raw.KvBlockPositions;
            StateBytes = raw.StateBytes;
            KvBytesPerSequence = raw.KvBytesPerSequence;
            StateBytesPerSequence = raw.StateBytesPerSequence;
            KvBytes = raw.KvBytes;
            FreeBytes = raw.FreeBytes == ulong.MaxValue ? (ulong?)null : raw.FreeBytes;
            SequencesThatFit = raw.SequencesThatFit == ulong.MaxValue ? (long?)null : (long)raw.SequencesThatFit;
            MappedBytes = raw.MappedBytes;
        }

        /// <summary>The device of the plan: the one that was named, or that <see cref="Model.Load"/> would choose now.</summary>
        public Device Device { get; }

        /// <summary>Tokens of a session.</summary>
        public long Context { get; }

        /// <summary>Weights as they are held: what <see cref="Memory.Stats"/> says of them once the model is loaded.</summary>
        public ulong WeightBytes { get; }

        /// <summary>Tables in page-locked memory, of which a token reads one row.</summary>
        public ulong WeightHostBytes { get; }

        /// <summary>Weights and working memory while the model is loaded, at most.</summary>
        public ulong PeakLoadBytes { get; }

        /// <summary>Weights and working memory in host memory while the model is loaded, at most.</summary>
        public ulong PeakLoadHostBytes { get; }

        /// <summary>Working memory of steps alone, without prompts.</summary>
        public ulong StepWorkspaceBytes { get; }

        /// <summary>Working memory of steps and of the longest passes of prompts. On the CPU each session that runs a prompt itself keeps its own.</summary>
        public ulong WorkspaceBytes { get; }

        /// <summary>Page-locked working memory, without the buffers through which the library copies.</summary>
        public ulong WorkspaceHostBytes { get; }

        /// <summary>Most bytes of recorded steps, on the GPU and on the host together; 0 on the CPU. Only the driver knows the exact number.</summary>
        public ulong GraphBytesBound { get; }

        /// <summary>Keys and values of a token.</summary>
        public ulong KvBytesPerToken { get; }

        /// <summary>A block of keys and values, of all groups of layers together.</summary>
        public ulong KvBlockBytes { get; }

        /// <summary>Tokens of a block.</summary>
        public long KvBlockPositions { get; }

        /// <summary>A recurrent state; 0 without recurrent layers.</summary>
        public ulong StateBytes { get; }

        /// <summary>Blocks of a session of <see cref="Context"/> tokens, its recurrent states included.</summary>
        public ulong KvBytesPerSequence { get; }

        /// <summary>The recurrent states among these blocks: that of the end, and those of earlier positions that a session keeps.</summary>
        public ulong StateBytesPerSequence { get; }

        /// <summary>Blocks of all sessions, for <see cref="LoadOptions.KvBytes"/>: room for each to come to <see cref="Context"/> tokens.</summary>
        public ulong KvBytes { get; }

        /// <summary>Bytes that are free on the device, or the budget of the options; null if the system does not say.</summary>
        public ulong? FreeBytes { get; }

        /// <summary>Sessions of <see cref="Context"/> tokens that fit there beside the model, and in <see cref="LoadOptions.KvBytes"/> and <see cref="Memory.Budget"/> where these are set; null if nothing limits them.</summary>
        public long? SequencesThatFit { get; }

        /// <summary>Weights beside <see cref="WeightBytes"/> that are mapped from a file of packed weights, which processes share.</summary>
        public ulong MappedBytes { get; }
    }
}
