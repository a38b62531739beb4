// The library's account of its large allocations, and the budget that bounds them.

namespace LibNVFP4
{
    /// <summary>Bytes in use now, and at most since the start or the last <see cref="Memory.ResetPeak"/>.</summary>
    public struct MemoryStats
    {
        internal MemoryStats(ulong current, ulong peak)
        {
            Current = current;
            Peak = peak;
        }

        /// <summary>Bytes in use.</summary>
        public ulong Current { get; }

        /// <summary>The most bytes that were in use.</summary>
        public ulong Peak { get; }
    }

    /// <summary>Memory of the library in this process: what is in use and for what, a limit, and managed memory.</summary>
    public static unsafe class Memory
    {
        /// <summary>What is in use under a tag.</summary>
        public static MemoryStats Stats(MemoryTag tag = MemoryTag.Total) =>
            Library.After(() =>
            {
                ulong current, peak;
                Interop.Check(Native.NVFP4_memory_stats((int)tag, &current, &peak));
                return new MemoryStats(current, peak);
            });

        /// <summary>Starts the peaks again from what is in use now.</summary>
        public static void ResetPeak() => Library.Call(() => Native.NVFP4_memory_reset_peak());

        /// <summary>The most bytes all tags together may use; 0 for no limit. An allocation that would pass it is an <see cref="Nvfp4OutOfMemoryException"/>.</summary>
        public static ulong Budget
        {
            get
            {
                return Library.After(() =>
                {
                    ulong bytes;
                    Interop.Check(Native.NVFP4_memory_get_budget(&bytes));
                    return bytes;
                });
            }
            set { Library.Call(() => Native.NVFP4_memory_set_budget(value)); }
        }

        /// <summary>The policy of the process on managed memory. Where TS_Q4_DISABLE_UM says so it stays disabled.</summary>
        public static ManagedPolicy ManagedPolicy
        {
            get
            {
                return Library.After(() =>
                {
                    int policy;
                    Interop.Check(Native.NVFP4_memory_get_managed_policy(&policy));
                    return (ManagedPolicy)policy;
                });
            }
            set { Library.Call(() => Native.NVFP4_memory_set_managed_policy((int)value)); }
        }

        /// <summary>Whether tensors can be in managed memory of a CUDA device. <see cref="Library.Diagnose"/> says why not.</summary>
        public static bool CanBeManaged(int deviceIndex = 0) =>
            Library.After(() =>
            {
                int can;
                Interop.Check(Native.NVFP4_memory_can_be_managed(deviceIndex, &can));
                return can != 0;
            });
    }
}
