// Calls that may be long: what ends them early, and what they call back. What a handler throws is kept, ends the native call by
// its own rules, and is thrown again when that has returned, unchanged and with its own stack: nothing but a number crosses
// native frames.

using System;
using System.Collections.Generic;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace LibNVFP4
{
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

    /// Lends a call what ends it, and who hears how far it is. A token that is cancelled ends it at any time, also before the
    /// native call has begun; so does a session that is cancelled or disposed of, from here on.
    internal unsafe class Call : IDisposable
    {
        static readonly ProgressCallback OnProgressCallback = OnProgress;
        static readonly IntPtr OnProgressAddress = Marshal.GetFunctionPointerForDelegate(OnProgressCallback);

        readonly CancellationToken cancellation;
        readonly ProgressHandler progress;
        readonly SessionHandle session;
        readonly CancelHandle cancel;
        readonly CancellationTokenRegistration registration;
        readonly bool begun;
        GCHandle self;
        NativeCallOptions* options;
        ExceptionDispatchInfo thrown;

        internal Call(CancellationToken cancellation, ProgressHandler progress = null, SessionHandle session = null)
        {
            cancellation.ThrowIfCancellationRequested();
            this.cancellation = cancellation;
            this.progress = progress;
            this.session = session;
            if (progress == null && session == null && !cancellation.CanBeCanceled)
                return;
            try
            {
                options = (NativeCallOptions*)Marshal.AllocHGlobal(sizeof(NativeCallOptions));
                Library.Call(() => Native.NVFP4_call_options_init(options, (uint)sizeof(NativeCallOptions)));
                if (progress != null)
                {
                    options->Progress = OnProgressAddress;
                    options->User = User;
                }
                if (session == null && !cancellation.CanBeCanceled)
                    return;
                cancel = CancelHandle.Create();
                options->Cancel = cancel.DangerousGetHandle();
                session?.Begin(cancel);
                begun = true;
                if (cancellation.CanBeCanceled)
                    registration = cancellation.Register(cancel.Trigger);
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        /// The options of the native call; null for the defaults.
        internal NativeCallOptions* Options => options;

        /// The `user` pointer that native code passes to the callbacks below.
        internal IntPtr User
        {
            get
            {
                if (!self.IsAllocated)
                    self = GCHandle.Alloc(this);
                return GCHandle.ToIntPtr(self);
            }
        }

        /// Ends a call of a session. From any thread, before Dispose.
        internal void Cancel() => cancel.Trigger();

        public void Dispose()
        {
            // Waits until the token's thread is done with the handle.
            registration.Dispose();
            if (begun)
                session?.End(cancel);
            cancel?.Dispose();
            Marshal.FreeHGlobal((IntPtr)options);
            options = null;
            if (self.IsAllocated)
                self.Free();
        }

        /// Runs a handler, and returns the callback's result: 1 if the call is to end.
        internal int Stops(Func<bool> goesOn)
        {
            try
            {
                return goesOn() ? 0 : 1;
            }
            catch (Exception e)
            {
                thrown = ExceptionDispatchInfo.Capture(e);
                return 1;
            }
        }

        /// Throws what the handler threw, or that the call was cancelled, or what the library says.
        internal void Finish(int status, bool stopped = false)
        {
            if (thrown != null)
                thrown.Throw();
            if (stopped || status == (int)Status.Cancelled)
                cancellation.ThrowIfCancellationRequested();
            Interop.Check(status);
        }

        [MonoPInvokeCallback(typeof(ProgressCallback))]
        static int OnProgress(IntPtr user, ulong done, ulong total)
        {
            var call = (Call)GCHandle.FromIntPtr(user).Target;
            return call.Stops(() =>
            {
                call.progress((long)done, (long)total);
                return true;
            });
        }
    }

    internal sealed unsafe class TokenCall : Call
    {
        internal static readonly TokenCallback Callback = OnToken;

        readonly TokenHandler handler;
        long seen, given;

        internal TokenCall(SessionHandle session, TokenHandler handler, ProgressHandler progress, CancellationToken cancellation)
            : base(cancellation, progress, session)
        {
            this.handler = handler;
        }

        /// The native call is about to be made. Made a second time it gives the same pieces, of which the handler gets only new ones.
        internal void Begin() => seen = 0;

        bool Give(NativeTokenEvent* piece)
        {
            if (++seen <= given)
                return true;
            given = seen;
            return handler == null || handler(new TokenEvent(piece));
        }

        [MonoPInvokeCallback(typeof(TokenCallback))]
        static int OnToken(IntPtr user, NativeTokenEvent* piece)
        {
            var call = (TokenCall)GCHandle.FromIntPtr(user).Target;
            return call.Stops(() => call.Give(piece));
        }
    }

    /// Calls a handler of logits until it is disposed of. Native code has its number: a call that comes later finds nothing, and ends the
    /// generation.
    internal sealed unsafe class LogitsCall : IDisposable
    {
        internal static readonly IntPtr Address;

        static readonly LogitsProcessor Callback = OnLogits;
        static readonly Dictionary<long, LogitsCall> Calls = new Dictionary<long, LogitsCall>();
        static long last;

        readonly LogitsHandler handler;
        readonly long number;
        ExceptionDispatchInfo thrown;

        static LogitsCall()
        {
            Address = Marshal.GetFunctionPointerForDelegate(Callback);
        }

        internal LogitsCall(LogitsHandler handler)
        {
            this.handler = handler;
            lock (Calls)
                Calls.Add(number = ++last, this);
        }

        internal IntPtr User => new IntPtr(number);

        /// Throws the exception of the handler, if there is one.
        internal void Throw() => thrown?.Throw();

        /// The exception of the handler, or null.
        internal Exception Thrown => thrown?.SourceException;

        public void Dispose()
        {
            lock (Calls)
                Calls.Remove(number);
        }

        int Process(NativeLogitsEvent* raw)
        {
            var logits = new Logits(raw);
            try
            {
                return handler(logits) ? 0 : 1;
            }
            catch (Exception e)
            {
                thrown = ExceptionDispatchInfo.Capture(e);
                return 1;
            }
            finally
            {
                logits.End();
            }
        }

        [MonoPInvokeCallback(typeof(LogitsProcessor))]
        static int OnLogits(IntPtr user, NativeLogitsEvent* raw)
        {
            LogitsCall call;
            lock (Calls)
                if (!Calls.TryGetValue(user.ToInt64(), out call))
                    return 1;
            return call.Process(raw);
        }
    }
}
