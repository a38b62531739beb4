// A generation as a sequence that its reader pulls.
//
// The native call runs on a thread of its own, which makes one piece of text each time it is asked and waits otherwise: so the
// session never runs ahead of its reader, and leaving early keeps exactly what came. The thread knows the generation and not
// the enumerator, so that a forgotten enumerator is found by the garbage collector, and ends it.

using System;
using System.Collections;
using System.Collections.Generic;
using System.Runtime.ExceptionServices;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    internal delegate Generation Generator(TokenHandler handler, CancellationToken cancellation);

    internal sealed class TextStream : IEnumerable<string>
#if NETCOREAPP
        , IAsyncEnumerable<string>
#endif
    {
        readonly Session session;
        readonly Generator generator;
        readonly CancellationToken cancellation;

        internal TextStream(Session session, Generator generator, CancellationToken cancellation)
        {
            this.session = session;
            this.generator = generator;
            this.cancellation = cancellation;
        }

        public IEnumerator<string> GetEnumerator() => new Reader(new Producer(session, generator, cancellation, default(CancellationToken)));

        IEnumerator IEnumerable.GetEnumerator() => GetEnumerator();

#if NETCOREAPP
        public IAsyncEnumerator<string> GetAsyncEnumerator(CancellationToken more = default) =>
            new AsyncReader(new Producer(session, generator, cancellation, more));

        /// Written out and not an iterator: those have no finalizer, which ends what was left half-way without a Dispose.
        sealed class AsyncReader : IAsyncEnumerator<string>
        {
            readonly Producer producer;

            internal AsyncReader(Producer producer)
            {
                this.producer = producer;
            }

            ~AsyncReader()
            {
                producer.Stop();
            }

            public string Current => producer.Piece;

            public async ValueTask<bool> MoveNextAsync()
            {
                bool more = await producer.NextAsync().ConfigureAwait(false);
                GC.KeepAlive(this);
                return more;
            }

            public async ValueTask DisposeAsync()
            {
                GC.SuppressFinalize(this);
                producer.Stop();
                await producer.Ended.ConfigureAwait(false);
            }
        }
#endif

        sealed class Reader : IEnumerator<string>
        {
            readonly Producer producer;

            internal Reader(Producer producer)
            {
                this.producer = producer;
            }

            ~Reader()
            {
                producer.Stop();
            }

            public string Current => producer.Piece;

            object IEnumerator.Current => Current;

            public bool MoveNext()
            {
                bool more = producer.Next();
                GC.KeepAlive(this);
                return more;
            }

            public void Reset() => throw new NotSupportedException("a generation cannot be had again; start another one");

            public void Dispose()
            {
                GC.SuppressFinalize(this);
                producer.Stop();
                producer.Ended.Wait();
            }
        }

        /// The thread of the native call, and what it has made.
        sealed class Producer
        {
            readonly Session session;
            readonly Generator generator;
            readonly CancellationToken cancellation, more;
            readonly SemaphoreSlim wanted = new SemaphoreSlim(0), made = new SemaphoreSlim(0);
            readonly TaskCompletionSource<bool> ended = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            readonly object gate = new object();
            ExceptionDispatchInfo thrown;
            CancellationTokenSource ends;
            bool started, over, left;
            volatile bool stopped;

            /// Either token ends it.
            internal Producer(Session session, Generator generator, CancellationToken cancellation, CancellationToken more)
            {
                this.session = session;
                this.generator = generator;
                this.cancellation = cancellation;
                this.more = more;
            }

            internal string Piece { get; private set; }

            /// Ends when the native call has.
            internal Task Ended => ended.Task;

            /// Makes the next piece, if there is one.
            internal bool Next()
            {
                if (!Ask())
                    return false;
                made.Wait();
                return Answer();
            }

#if NETCOREAPP
            internal async Task<bool> NextAsync()
            {
                if (!Ask())
                    return false;
                await made.WaitAsync().ConfigureAwait(false);
                return Answer();
            }
#endif

            /// Ends the native call, where it is: in a prompt, in a token, or between two.
            internal void Stop()
            {
                lock (gate)
                {
                    stopped = true;
                    if (!started)
                        ended.TrySetResult(true);
                    ends?.Cancel();
                    wanted.Release();
                }
            }

            bool Ask()
            {
                lock (gate)
                {
                    if (stopped || left)
                        return false;
                    if (!started)
                    {
                        ThrowIfCancelled();
                        Start();
                        started = true;
                    }
                    else
                        wanted.Release();
                    return true;
                }
            }

            void Start()
            {
                try
                {
                    new Thread(Produce) { IsBackground = true, Name = "NVFP4 generation" }.Start();
                }
                catch (Exception e)
                {
                    throw new Nvfp4OutOfMemoryException(Status.OutOfMemory, "the system refused the thread on which a stream " +
                        "generates; raise the limit of threads (ulimit -u, or a container's limit of pids), or end other streams", e);
                }
            }

            bool Answer()
            {
                if (!over)
                    return true;
                left = true;
                // In the words of the token that the reader knows. One that was disposed of meanwhile has ended.
                if (thrown?.SourceException is OperationCanceledException)
                {
                    ThrowIfCancelled();
                    if (stopped)
                        return false;
                }
                thrown?.Throw();
                return false;
            }

            void ThrowIfCancelled()
            {
                more.ThrowIfCancellationRequested();
                cancellation.ThrowIfCancellationRequested();
            }

            void Produce()
            {
                try
                {
                    Generation generation = generator(Take, Begin());
                    // An answer that was cut off because the session was disposed of must not look whole.
                    if (generation.Finish == FinishReason.Cancelled && !stopped && session.Handle.IsGivenUp)
                        throw new ObjectDisposedException(session.GetType().Name);
                }
                catch (Exception e)
                {
                    thrown = ExceptionDispatchInfo.Capture(e);
                }
                End();
                over = true;
                made.Release();
                ended.TrySetResult(true);
                GC.KeepAlive(session);
            }

            /// The token that ends the generation: by either token of the caller, or by Stop(), which may have been called already.
            CancellationToken Begin()
            {
                lock (gate)
                {
                    ends = CancellationTokenSource.CreateLinkedTokenSource(cancellation, more);
                    if (stopped)
                        ends.Cancel();
                    return ends.Token;
                }
            }

            void End()
            {
                lock (gate)
                {
                    ends?.Dispose();
                    ends = null;
                }
            }

            bool Take(TokenEvent piece)
            {
                if (piece.Part == Part.Content && piece.Text.Length > 0 && !stopped)
                {
                    Piece = piece.Text;
                    made.Release();
                    // A token that is cancelled here is seen at the next piece, which its reader has to ask for.
                    wanted.Wait();
                }
                return !stopped;
            }
        }
    }
}
