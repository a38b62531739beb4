// Owners of native references. The runtime counts their use by calls, so one that is disposed of during a call is released
// after it; one that is forgotten is released by its finalizer, on whichever thread that runs.

using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using System.Threading;

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

        /// Tells the garbage collector what the object takes outside its heap now, which is how soon it looks for forgotten ones.
        internal void Press(ulong bytes)
        {
            long now = (long)Math.Min(bytes, long.MaxValue);
            long before = Interlocked.Exchange(ref pressure, now);
            if (now > before)
                GC.AddMemoryPressure(now - before);
            else if (now < before)
                GC.RemoveMemoryPressure(before - now);
        }

        internal void Take(IntPtr value)
        {
            SetHandle(value);
        }

        internal abstract int Release();

        /// <summary>Gives up the reference.</summary>
        protected override bool ReleaseHandle()
        {
            Press(0);
            return Release() == (int)Status.Ok;
        }
    }

    internal sealed partial class TensorHandle
    {
        /// C's NULL, for tensors that may be left out.
        internal static readonly TensorHandle None = new TensorHandle();
    }

    internal sealed partial class SessionHandle
    {
        /// The cancel handles of calls that use the session or are about to.
        readonly List<CancelHandle> calls = new List<CancelHandle>();
        volatile bool givenUp;

        /// Whether it was disposed of. IsClosed says so only when the last call that uses it has ended.
        internal bool IsGivenUp => givenUp;

        /// A call is about to begin, which the session's end is to end.
        internal void Begin(CancelHandle call)
        {
            lock (calls)
            {
                if (givenUp)
                    throw new ObjectDisposedException(nameof(Session));
                calls.Add(call);
            }
        }

        /// The call has returned.
        internal void End(CancelHandle call)
        {
            lock (calls)
                calls.Remove(call);
        }

        /// Ends the calls that have begun; it cannot come too early for them. Triggering takes no lock.
        internal void Cancel()
        {
            lock (calls)
                foreach (CancelHandle call in calls)
                    call.Trigger();
        }

        /// <summary>Gives up the reference, and ends the call that uses the session.</summary>
        protected override void Dispose(bool disposing)
        {
            if (disposing && !IsClosed)
            {
                givenUp = true;
                Cancel();
            }
            base.Dispose(disposing);
        }

        /// Presses with the memory of the session, after a call that may have changed it.
        internal void Press()
        {
            bool added = false;
            try
            {
                // Held, so that it is not released between the question and the answer.
                DangerousAddRef(ref added);
                Press(Memory());
            }
            catch (ObjectDisposedException)
            {
                // Disposed of during the call: it is about to be released, or was.
            }
            finally
            {
                if (added)
                    DangerousRelease();
            }
        }

        /// The bytes of its cached keys and values.
        internal unsafe ulong Memory()
        {
            ulong bytes;
            Interop.Check(Native.NVFP4_session_memory(this, &bytes));
            return bytes;
        }
    }

    /// Cancels a call from any thread, whether it has begun or not.
    internal sealed partial class CancelHandle
    {
        internal static CancelHandle Create()
        {
            CancelHandle handle = null;
            Library.Call(() => Native.NVFP4_cancel_create(out handle));
            return handle;
        }

        internal void Trigger() => Native.NVFP4_cancel_trigger(this);
    }
}
