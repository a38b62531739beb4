// The thread that takes a queue's events, for all of its generations.

using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// Takes the events of a queue and gives each to the reply of its generation. The thread knows this and not the queue, so the garbage
    /// collector finds a forgotten queue.
    internal sealed unsafe class Dispatcher
    {
        /// Events that are taken at a time.
        const int Most = 64;

        internal readonly QueueHandle Handle;

        readonly object gate = new object();
        readonly Dictionary<IntPtr, Reply> replies = new Dictionary<IntPtr, Reply>();
        readonly TaskCompletionSource<bool> ended = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
        Exception fault;
        long last;
        bool isStarted, isOver;

        internal Dispatcher(QueueHandle handle)
        {
            Handle = handle;
        }

        /// Ends when no generation of the queue uses its session any more.
        internal Task Ended => ended.Task;

        /// Makes a submission, which is given the reply's number for its events. The reply gets them from the first one on.
        internal void Submit(Reply reply, Func<IntPtr, int> submission)
        {
            IntPtr number = Add(reply);
            try
            {
                Interop.Call(() => submission(number));
            }
            catch
            {
                Remove(number);
                throw;
            }
        }

        /// Ends the generations; the thread ends after the last of them. Does not wait for it.
        internal void End()
        {
            var left = new List<Reply>();
            lock (gate)
            {
                if (isOver)
                    return;
                isOver = true;
                left.AddRange(replies.Values);
                if (isStarted)
                    Native.NVFP4_queue_wake(Handle);
                else
                    Close();
            }
            foreach (Reply reply in left)
                reply.Abort();
        }

        IntPtr Add(Reply reply)
        {
            lock (gate)
            {
                if (isOver)
                    throw fault ?? new ObjectDisposedException(nameof(Queue));
                if (!isStarted)
                    Start();
                var number = new IntPtr(++last);
                replies.Add(number, reply);
                return number;
            }
        }

        void Remove(IntPtr number)
        {
            lock (gate)
                if (replies.Remove(number) && isOver)
                    Native.NVFP4_queue_wake(Handle);
        }

        void Start()
        {
            var thread = new Thread(Run) { IsBackground = true, Name = "NVFP4 queue" };
            try
            {
                // AsyncLocals of the first submission must not live as long as the queue.
                if (ExecutionContext.IsFlowSuppressed())
                    thread.Start();
                else
                    using (ExecutionContext.SuppressFlow())
                        thread.Start();
            }
            catch (Exception e)
            {
                throw new Nvfp4OutOfMemoryException(Status.OutOfMemory, "the system refused the thread that takes a queue's events; raise " +
                    "the limit of threads (ulimit -u, or a container's limit of pids), or end other threads", e);
            }
            isStarted = true;
        }

        void Run()
        {
            var left = new List<Reply>();
            try
            {
                while (Take())
                {
                }
            }
            catch (Exception e)
            {
                // The queue cannot go on without its events. Its release ends the generations.
                lock (gate)
                {
                    isOver = true;
                    fault = e;
                    left.AddRange(replies.Values);
                    replies.Clear();
                    Close();
                }
            }
            foreach (Reply reply in left)
                reply.Fail(fault);
        }

        /// Gives up the queue, which nobody uses any more.
        void Close()
        {
            Handle.Dispose();
            ended.TrySetResult(true);
        }

        /// Waits for events and gives them to their replies. False when the queue is over and every generation has ended.
        bool Take()
        {
            lock (gate)
                if (isOver && replies.Count == 0)
                {
                    Close();
                    return false;
                }
            NativeQueueEvent* events = stackalloc NativeQueueEvent[Most];
            UIntPtr count;
            var retry = new Retry();
            int status;
            do
                status = Native.NVFP4_queue_wait(Handle, events, Interop.Size(sizeof(NativeQueueEvent)), Interop.Size(Most), -1, &count);
            while (retry.After(status));
            Interop.Check(status);
            for (int i = 0; i < (int)count; i++)
                Give(events + i);
            ClearStack();
            return true;
        }

        /// Overwrites what the frames of a delivery have left on the stack. Mono's collector takes every word there for a reference, also within
        /// the native frames of the next wait, and would keep awaiting code and its queue.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void ClearStack()
        {
#if !NETCOREAPP
            byte* unused = stackalloc byte[1 << 14];
            unused[0] = 0;
#endif
        }

        void Give(NativeQueueEvent* happened)
        {
            Reply reply;
            lock (gate)
                reply = replies[happened->User];
            if (happened->Kind != (int)TokenEventKind.End)
            {
                reply.Add(new TokenEvent(happened));
                return;
            }
            reply.End((Status)happened->Status, (FinishReason)happened->Finish, Interop.Read(happened->Text, happened->TextLength));
            lock (gate)
                replies.Remove(happened->User);
        }
    }
}
