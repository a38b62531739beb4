// Owners of native references. The runtime counts their use by calls, so one that is disposed of during a call is released
// after it; one that is forgotten is released by its finalizer, on whichever thread that runs.

using System;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// <summary>One reference to an object of the library.</summary>
    internal abstract class NativeHandle : SafeHandle
    {
        long pressure;

        internal NativeHandle() : base(IntPtr.Zero, true)
        {
        }

        /// <summary>Whether this holds nothing.</summary>
        public override bool IsInvalid => handle == IntPtr.Zero;

        /// Tells the garbage collector what the object takes outside its heap, which is how soon it looks for forgotten ones.
        internal void Press(ulong bytes)
        {
            if (bytes > 0 && bytes < long.MaxValue)
            {
                pressure = (long)bytes;
                GC.AddMemoryPressure(pressure);
            }
        }

        internal void Take(IntPtr value)
        {
            SetHandle(value);
        }

        internal abstract int Release();

        /// <summary>Gives up the reference.</summary>
        protected override bool ReleaseHandle()
        {
            if (pressure > 0)
                GC.RemoveMemoryPressure(pressure);
            return Release() == (int)Status.Ok;
        }
    }

    internal sealed class TensorHandle : NativeHandle
    {
        /// What C calls NULL, for tensors that may be left out.
        internal static readonly TensorHandle None = new TensorHandle();

        internal override int Release() => Native.NVFP4_tensor_release(handle);
    }

    internal sealed class WeightHandle : NativeHandle
    {
        internal override int Release() => Native.NVFP4_weight_release(handle);
    }

    internal sealed class ModelHandle : NativeHandle
    {
        internal override int Release() => Native.NVFP4_model_release(handle);
    }

    internal sealed class SessionHandle : NativeHandle
    {
        internal override int Release() => Native.NVFP4_session_release(handle);
    }
}
