// The work of a model, as Model.Statistics gives it.

namespace LibNVFP4
{
    /// <summary>What a model has run since it was loaded, and what it holds now: see <see cref="Model.Statistics"/>.</summary>
    public sealed class ModelStatistics
    {
        internal ModelStatistics(NativeModelStatistics raw)
        {
            Passes = (long)raw.Passes;
            Requests = (long)raw.Requests;
            PromptTokens = (long)raw.PromptTokens;
            PromptTokensFound = (long)raw.PromptTokensFound;
            StepTokens = (long)raw.StepTokens;
            Generating = (long)raw.Generating;
            Waiting = (long)raw.Waiting;
            BlocksUsed = (long)raw.BlocksUsed;
            UsedBytes = raw.UsedBytes;
            BlocksCached = (long)raw.BlocksCached;
            CachedBytes = raw.CachedBytes;
            BlocksEvicted = (long)raw.BlocksEvicted;
            ReservedBytes = raw.ReservedBytes;
            FreeBytes = raw.FreeBytes;
            Preemptions = (long)raw.Preemptions;
            RecomputedTokens = (long)raw.RecomputedTokens;
            EvictedTokens = (long)raw.EvictedTokens;
        }

        /// <summary>Passes over the weights.</summary>
        public long Passes { get; }

        /// <summary>Requests in them, counted once for each pass: on average Requests / Passes callers shared a pass.</summary>
        public long Requests { get; }

        /// <summary>Tokens of prompts, run or found.</summary>
        public long PromptTokens { get; }

        /// <summary>Prompt tokens that did not run, because the prefix cache had their keys and values.</summary>
        public long PromptTokensFound { get; }

        /// <summary>Tokens that ran one at a time, and drafted tokens that were right.</summary>
        public long StepTokens { get; }

        /// <summary>Sessions that generate now.</summary>
        public long Generating { get; }

        /// <summary>Calls that wait now for a pass to begin.</summary>
        public long Waiting { get; }

        /// <summary>Blocks of keys, values and recurrent states that sessions hold now, each counted once however many share it.</summary>
        public long BlocksUsed { get; }

        /// <summary>Bytes of the blocks that sessions hold now.</summary>
        public ulong UsedBytes { get; }

        /// <summary>Blocks that the prefix cache alone holds now.</summary>
        public long BlocksCached { get; }

        /// <summary>Bytes of the blocks that the prefix cache alone holds now.</summary>
        public ulong CachedBytes { get; }

        /// <summary>Blocks that the prefix cache gave up because memory was needed or its limit was reached.</summary>
        public long BlocksEvicted { get; }

        /// <summary>Bytes reserved by <see cref="LoadOptions.KvBytes"/>.</summary>
        public ulong ReservedBytes { get; }

        /// <summary>Reserved bytes that neither sessions nor the prefix cache take.</summary>
        public ulong FreeBytes { get; }

        /// <summary>Generations that found no block in what is reserved, gave theirs up to the others, waited and ran their tokens again.</summary>
        public long Preemptions { get; }

        /// <summary>Tokens of sessions that ran again, or were found, because a step of the trainer had changed the weights.</summary>
        public long RecomputedTokens { get; }

        /// <summary>Tokens that eviction has dropped, because the contexts of sessions were full; also in calls that have failed since and were undone.</summary>
        public long EvictedTokens { get; }
    }
}
