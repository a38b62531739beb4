// Calls that call back. What a handler throws is kept, ends the native call by its own rules, and is thrown again when that has
// returned, unchanged and with its own stack: nothing but a number crosses native frames.

using System;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace LibNVFP4
{
    /// Holds a handler for the time of a call.
    internal abstract class Call : IDisposable
    {
        protected readonly CancellationToken cancellation;
        readonly GCHandle self;
        ExceptionDispatchInfo thrown;

        internal Call(CancellationToken cancellation)
        {
            cancellation.ThrowIfCancellationRequested();
            this.cancellation = cancellation;
            self = GCHandle.Alloc(this);
        }

        internal IntPtr User => GCHandle.ToIntPtr(self);

        public void Dispose() => self.Free();

        /// What a callback returns after this: 1 if the call is to end.
        internal int Stops(Func<bool> goesOn)
        {
            try
            {
                return !cancellation.IsCancellationRequested && goesOn() && !cancellation.IsCancellationRequested ? 0 : 1;
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
    }

    internal sealed class ProgressCall : Call
    {
        static readonly ProgressCallback OnProgressCallback = OnProgress;

        readonly ProgressHandler handler;
        readonly bool needed;

        internal ProgressCall(ProgressHandler handler, CancellationToken cancellation) : base(cancellation)
        {
            this.handler = handler;
            needed = handler != null || cancellation.CanBeCanceled;
        }

        internal ProgressCallback Callback => needed ? OnProgressCallback : null;

        [MonoPInvokeCallback(typeof(ProgressCallback))]
        static int OnProgress(IntPtr user, ulong done, ulong total)
        {
            var call = (ProgressCall)GCHandle.FromIntPtr(user).Target;
            return call.Stops(() =>
            {
                call.handler?.Invoke((long)done, (long)total);
                return true;
            });
        }
    }

    internal sealed unsafe class TokenCall : Call
    {
        internal static readonly TokenCallback Callback = OnToken;

        readonly SessionHandle session;
        readonly TokenHandler handler;
        long seen, given;

        internal TokenCall(SessionHandle session, TokenHandler handler, CancellationToken cancellation) : base(cancellation)
        {
            this.session = session;
            this.handler = handler;
        }

        /// The native call is about to be made. Made a second time it gives the same pieces, of which the handler gets only new ones.
        internal void Begin()
        {
            cancellation.ThrowIfCancellationRequested();
            seen = 0;
        }

        bool Give(int token, byte* text, UIntPtr length)
        {
            if (++seen <= given)
                return true;
            given = seen;
            // A session that was given up has been cancelled, which the native call overlooks if it had not quite begun.
            return !session.IsGivenUp && (handler == null || handler(token, Interop.Read(text, length))) && !session.IsGivenUp;
        }

        [MonoPInvokeCallback(typeof(TokenCallback))]
        static int OnToken(IntPtr user, int token, byte* text, UIntPtr length)
        {
            var call = (TokenCall)GCHandle.FromIntPtr(user).Target;
            return call.Stops(() => call.Give(token, text, length));
        }
    }
}
