// A generation in a queue, as awaiting code sees it.

using System;
using System.Collections.Generic;
using System.Runtime.ExceptionServices;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// The pieces of a generation that its reader has not taken yet, and how it ended. The queue's thread adds them. The reader's code never runs
    /// on that thread.
    internal sealed class Reply
    {
        readonly Session session;
        readonly CancellationToken cancellation, more;
        readonly CancellationTokenRegistration registration;
        readonly object gate = new object();
        readonly List<TokenEvent> pieces = new List<TokenEvent>();
        readonly TaskCompletionSource<bool> ended = Signal();
        TaskCompletionSource<bool> changed;
        Generation generation;
        ExceptionDispatchInfo thrown, lost;
        int taken;
        bool isOver, isStopped, isDiscarding, isAborted;

        /// Takes over the call, which `cancellation` ends. Either token ends the generation.
        internal Reply(Session session, Call call, CancellationToken cancellation, CancellationToken more)
        {
            this.session = session;
            this.cancellation = cancellation;
            this.more = more;
            Call = call;
            try
            {
                more.ThrowIfCancellationRequested();
                if (more.CanBeCanceled)
                    registration = more.Register(call.Cancel);
            }
            catch
            {
                call.Dispose();
                throw;
            }
        }

        /// Ends the generation.
        internal Call Call { get; }

        /// The program's processor of logits, or null.
        internal LogitsCall Logits { get; set; }

        /// The last piece that NextAsync has taken.
        internal TokenEvent Piece { get; private set; }

        /// Ends when the session can be used again. Result says how the generation ended.
        internal Task Ended => ended.Task;

        /// Makes a submission, which reads Call: that is not disposed of before it returns.
        internal int Submit(Func<int> submission)
        {
            lock (gate)
            {
                thrown?.Throw();
                return submission();
            }
        }

        /// The result of a generation that has ended. Throws what it failed with.
        internal Generation Result()
        {
            thrown?.Throw();
            lost?.Throw();
            return generation;
        }

        /// Takes the next piece; false after the last one. Throws what the generation failed with.
        internal async Task<bool> NextAsync()
        {
            for (;;)
            {
                Task change;
                lock (gate)
                {
                    if (taken < pieces.Count && !IsLeft)
                    {
                        Take();
                        return true;
                    }
                    if (isOver)
                        break;
                    change = (changed ?? (changed = Signal())).Task;
                }
                await change.ConfigureAwait(false);
            }
            if (isStopped)
                return false;
            thrown?.Throw();
            // The reader was cancelled when the generation had ended, and some pieces were not taken.
            if (taken < pieces.Count)
                Cancelled.ThrowIfCancellationRequested();
            return false;
        }

        /// There is no reader: pieces are not kept.
        internal void Discard()
        {
            lock (gate)
            {
                isDiscarding = true;
                Clear();
            }
        }

        /// The reader wants no more: ends the generation, which is no failure.
        internal void Stop()
        {
            lock (gate)
            {
                isStopped = true;
                Clear();
                if (!isOver)
                    Call.Cancel();
            }
        }

        /// The queue is disposed of: ends the generation.
        internal void Abort()
        {
            lock (gate)
                if (!isOver)
                {
                    isAborted = true;
                    Call.Cancel();
                }
        }

        internal void Add(TokenEvent piece)
        {
            TaskCompletionSource<bool> waiting;
            lock (gate)
            {
                if (!isStopped && !isDiscarding)
                    pieces.Add(piece);
                waiting = changed;
                changed = null;
            }
            waiting?.TrySetResult(true);
        }

        /// The generation has ended; `message` is that of its error.
        internal void End(Status status, FinishReason finish, string message)
        {
            Exception fault = null;
            if (status != Status.Ok)
                fault = Nvfp4Exception.Create(status, message);
            else
                try
                {
                    generation = session.TakeResult();
                }
                catch (Nvfp4Exception e)
                {
                    // Another call may have taken the session since the last piece. The answer is whole without the counts and times.
                    lost = ExceptionDispatchInfo.Capture(e);
                }
                catch (ObjectDisposedException)
                {
                    fault = new ObjectDisposedException(session.GetType().Name);
                }
            Close(Logits?.Thrown ?? (finish == FinishReason.Cancelled ? WhyCancelled() ?? fault : fault));
        }

        /// Ends without the generation's end: it was not submitted, or its events are not taken any more.
        internal void Fail(Exception fault) => Close(fault);

        void Take()
        {
            Piece = pieces[taken++];
            if (taken == pieces.Count)
                Clear();
        }

        void Clear()
        {
            pieces.Clear();
            taken = 0;
        }

        void Close(Exception fault)
        {
            TaskCompletionSource<bool> waiting;
            lock (gate)
            {
                if (isOver)
                    return;
                isOver = true;
                if (fault != null)
                    thrown = ExceptionDispatchInfo.Capture(fault);
                waiting = changed;
                changed = null;
            }
            registration.Dispose();
            Call.Dispose();
            Logits?.Dispose();
            waiting?.TrySetResult(true);
            ended.TrySetResult(true);
        }

        /// The token that was cancelled, if one was.
        CancellationToken Cancelled => more.IsCancellationRequested ? more : cancellation;

        bool IsLeft => isStopped || Cancelled.IsCancellationRequested;

        /// The exception of a generation that was cancelled; null if that is no failure: its reader has left, or Session.Cancel was called.
        Exception WhyCancelled()
        {
            lock (gate)
            {
                if (isStopped)
                    return null;
                CancellationToken cancelled = Cancelled;
                if (cancelled.IsCancellationRequested)
                    return new OperationCanceledException(cancelled);
                if (session.Handle.IsGivenUp)
                    return new ObjectDisposedException(session.GetType().Name);
                return isAborted ? new OperationCanceledException("the queue was disposed of before the generation had ended") : null;
            }
        }

        static TaskCompletionSource<bool> Signal() => new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
    }
}
