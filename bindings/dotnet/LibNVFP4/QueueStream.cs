// A generation in a queue as a sequence that its reader awaits.

#if NETCOREAPP
using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    internal sealed class QueueStream<T> : IAsyncEnumerable<T>
    {
        readonly Queue queue;
        readonly Func<CancellationToken, Reply> begin;
        readonly Func<TokenEvent, bool> wanted;
        readonly Func<TokenEvent, T> read;

        internal QueueStream(Queue queue, Func<CancellationToken, Reply> begin, Func<TokenEvent, bool> wanted, Func<TokenEvent, T> read)
        {
            this.queue = queue;
            this.begin = begin;
            this.wanted = wanted;
            this.read = read;
        }

        public IAsyncEnumerator<T> GetAsyncEnumerator(CancellationToken more = default) => new Reader(this, more);

        /// Written out and not an iterator: those have no finalizer, which ends what was left half-way without a DisposeAsync. It keeps the queue.
        sealed class Reader : IAsyncEnumerator<T>
        {
            readonly QueueStream<T> stream;
            readonly CancellationToken more;
            readonly object gate = new object();
            Reply reply;
            bool isLeft;

            internal Reader(QueueStream<T> stream, CancellationToken more)
            {
                this.stream = stream;
                this.more = more;
            }

            ~Reader()
            {
                reply?.Stop();
            }

            public T Current => stream.read(reply.Piece);

            public async ValueTask<bool> MoveNextAsync()
            {
                lock (gate)
                {
                    if (isLeft)
                        return false;
                    reply ??= stream.begin(more);
                }
                while (await reply.NextAsync().ConfigureAwait(false))
                    if (stream.wanted(reply.Piece))
                        return true;
                GC.KeepAlive(this);
                return false;
            }

            public async ValueTask DisposeAsync()
            {
                GC.SuppressFinalize(this);
                lock (gate)
                    isLeft = true;
                reply?.Stop();
                if (reply != null)
                    await reply.Ended.ConfigureAwait(false);
                GC.KeepAlive(stream.queue);
            }
        }
    }
}
#endif
