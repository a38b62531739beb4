// What every call needs: a failed status becomes an exception, text goes in and out as UTF-8, arrays come out by asking for
// their length first, and a long call has a thread of its own.

using System;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    internal unsafe delegate int TextCall(byte* buffer, UIntPtr capacity, UIntPtr* length);

    internal unsafe delegate int ArrayCall(void* buffer, UIntPtr capacity, UIntPtr* count);

    /// Whether to make a call a second time: one that was refused memory, which objects that nobody holds any more may have had.
    internal struct Retry
    {
        bool collected;

        internal bool After(int status)
        {
            if (collected || (status != (int)Status.OutOfMemory && status != (int)Status.OverBudget))
                return false;
            collected = true;
            GC.Collect();
            GC.WaitForPendingFinalizers();
            return true;
        }
    }

    internal static unsafe class Interop
    {
        static readonly UTF8Encoding Strict = new UTF8Encoding(false, true);

        /// Makes a call that may take memory, and checks its status.
        internal static void Call(Func<int> call) => Check(Try(call));

        /// Makes a call that may take memory, and returns its status.
        internal static int Try(Func<int> call)
        {
            var retry = new Retry();
            int status;
            do
                status = call();
            while (retry.After(status));
            return status;
        }

        /// Throws what the library says about a call that failed.
        internal static void Check(int status)
        {
            if (status != (int)Status.Ok)
                throw Nvfp4Exception.Create((Status)status, LastError());
        }

        /// Work on a thread of its own. StartNew with a token that is cancelled already may give a task that does not know it yet.
        internal static Task<T> OnThread<T>(Func<T> work, CancellationToken cancellation) =>
            cancellation.IsCancellationRequested
                ? Task.FromCanceled<T>(cancellation)
                : Task.Factory.StartNew(work, cancellation, TaskCreationOptions.LongRunning, TaskScheduler.Default);

        /// Mono looks for a native function when it thinks of inlining its caller, and here that may be before the library is loaded.
        [MethodImpl(MethodImplOptions.NoInlining)]
        internal static string LastError() => ReadZ(Native.NVFP4_last_error());

        /// The bytes of a text. One with half a surrogate pair is an ArgumentException, as it is no text.
        internal static byte[] Utf8(string text, string name)
        {
            if (text == null)
                throw new ArgumentNullException(name);
            return Strict.GetBytes(text);
        }

        internal static string Read(byte* text, UIntPtr length)
        {
            int count = checked((int)length.ToUInt64());
            return count == 0 ? "" : Strict.GetString(text, count);
        }

        /// Text of bytes that need not be UTF-8: invalid ones become U+FFFD.
        internal static string ReadAny(byte* text, UIntPtr length)
        {
            int count = checked((int)length.ToUInt64());
            return count == 0 ? "" : Encoding.UTF8.GetString(text, count);
        }

        internal static string ReadZ(IntPtr text)
        {
            byte* at = (byte*)text;
            int count = 0;
            while (at[count] != 0)
                count++;
            return count == 0 ? "" : Strict.GetString(at, count);
        }

        /// Text that `call` copies out. It is asked again if it grew in between.
        internal static string Text(TextCall call)
        {
            UIntPtr length = UIntPtr.Zero;
            var retry = new Retry();
            int status;
            do
                status = call(null, UIntPtr.Zero, &length);
            while (retry.After(status));
            for (;;)
            {
                if (status != (int)Status.BufferTooSmall)
                    Check(status);
                byte[] buffer = new byte[checked((int)length.ToUInt64())];
                if (buffer.Length == 0)
                    return "";
                fixed (byte* at = buffer)
                {
                    status = call(at, Size(buffer.Length), &length);
                    if (status == (int)Status.Ok)
                        return Read(at, length);
                }
            }
        }

        /// Elements that `call` copies out; what a long call came to is `watched`'s to say.
        internal static T[] Array<T>(ArrayCall call, Call watched = null) where T : struct
        {
            UIntPtr count = UIntPtr.Zero;
            var retry = new Retry();
            int status;
            do
                status = call(null, UIntPtr.Zero, &count);
            while (retry.After(status));
            for (;;)
            {
                if (status != (int)Status.BufferTooSmall)
                    if (watched != null)
                        watched.Finish(status);
                    else
                        Check(status);
                T[] items = new T[checked((int)count.ToUInt64())];
                if (items.Length == 0)
                    return items;
                GCHandle pin = GCHandle.Alloc(items, GCHandleType.Pinned);
                try
                {
                    status = call((void*)pin.AddrOfPinnedObject(), Size(items.Length), &count);
                }
                finally
                {
                    pin.Free();
                }
                if (status == (int)Status.Ok)
                {
                    System.Array.Resize(ref items, checked((int)count.ToUInt64()));
                    return items;
                }
            }
        }

        internal static UIntPtr Size(long value)
        {
            if (value < 0)
                throw new ArgumentOutOfRangeException(nameof(value), value, "a length is negative");
            return new UIntPtr((ulong)value);
        }

        /// SIZE_MAX, which stands for no limit, becomes the largest value.
        internal static long Long(UIntPtr value) => (long)Math.Min(value.ToUInt64(), long.MaxValue);

        internal static int Flag(bool value) => value ? 1 : 0;
    }
}
