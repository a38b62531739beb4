// Queues, and what a model says of itself: the second part of Tests.cs.

using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Diagnostics;
using System.Linq;
using System.Reflection;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;
using System.Threading.Tasks;
using LibNVFP4;

static partial class Tests
{
    static void RunQueues()
    {
        Run("200 generations of a queue on one thread", () => OneThread.Run(() => Many(GenerateSome)));
        Run("answers of a queue", () => Answers().GetAwaiter().GetResult());
        Run("a session that is looked at while a queue uses it", () => LookedAt().GetAwaiter().GetResult());
        Run("what a queue refuses", () => Refusals().GetAwaiter().GetResult());
        Run("faults of generations in a queue", () => QueueFaults().GetAwaiter().GetResult());
        Run("cancelling in a queue", () => CancelledInQueue().GetAwaiter().GetResult());
        Run("deadlines and priorities", () => Deadlines().GetAwaiter().GetResult());
        Run("a queue that is disposed of in use", () => DisposedQueue().GetAwaiter().GetResult());
        Run("forgotten queues", ForgottenQueues);
#if NETCOREAPP
        Run("200 streams of a queue on one thread", () => OneThread.Run(() => Many(StreamSome)));
        Run("streams of a queue", () => QueueStreams().GetAwaiter().GetResult());
        Run("forgotten streams of a queue", ForgottenQueueStreams);
        Run("a queue of a plugin that is unloaded", () => UntilUnloaded(UnloadAfter(nameof(QueueInPlugin), out object _, reciterPath)));
#endif
        Run("statistics of a model", Statistics);
        Run("plans of a model", Plans);
    }

    /// A thread that runs all of the awaiting code that is begun on it, as a user interface does.
    sealed class OneThread : SynchronizationContext
    {
        readonly BlockingCollection<Action> work = new BlockingCollection<Action>();

        internal static void Run(Func<Task> begin)
        {
            SynchronizationContext before = Current;
            var one = new OneThread();
            SetSynchronizationContext(one);
            try
            {
                Task task = begin();
                task.ContinueWith(over => one.work.CompleteAdding(), TaskScheduler.Default);
                foreach (Action action in one.work.GetConsumingEnumerable())
                    action();
                task.GetAwaiter().GetResult();
            }
            finally
            {
                SetSynchronizationContext(before);
            }
        }

        public override void Post(SendOrPostCallback callback, object state) => work.Add(() => callback(state));
    }

    /// A generation and its result in a blocking call.
    sealed class Sample
    {
        internal int[] Prompt, Tokens;
        internal GenerateOptions Options;
        internal string Text;

        internal Sample(int number)
        {
            Prompt = Tests.Prompt.Take(1 + number % Tests.Prompt.Length).ToArray();
            Options = SomeTokens(5 + number * 37 % 200, (ulong)number);
            using (var session = new Session(model))
            {
                session.Prefill(Prompt);
                session.Generate(Options);
                Tokens = session.Tokens;
                Text = session.Text;
            }
        }

        internal int Count => Tokens.Length - Prompt.Length;

        /// Checks that a session holds the beginning of the sample, and that it goes on as the sample does.
        internal void Complete(Session session)
        {
            if (session.Length == 0)
                session.Prefill(Prompt);
            int[] held = session.Tokens;
            Check(held.SequenceEqual(Tokens.Take(held.Length)), "other tokens");
            if (held.Length < Tokens.Length)
                session.Generate(SomeTokens(Tokens.Length - held.Length, (ulong)Options.Seed));
            Check(session.Tokens.SequenceEqual(Tokens), "another end");
        }
    }

    static GenerateOptions SomeTokens(int count, ulong seed) =>
        new GenerateOptions { MaxTokens = count, IgnoreModelStops = true, Temperature = 0.8f, Seed = seed };

    /// How a reader of a sample leaves it.
    enum Leaving
    {
        Not, Early, ByToken, ByTimer,
    }

    delegate Task<string> Reading(Queue queue, Session session, Sample sample, Leaving leaving, int pieces);

    /// Two hundred awaiting readers on this thread, of which some leave at random, while the garbage collector runs. Each has what a blocking
    /// call has, or the beginning of that, and leaves its session ready for the rest.
    static async Task Many(Reading reading)
    {
        const int Count = 200, Running = 8;
        var random = new Random(11);
        Sample[] samples = Enumerable.Range(0, 20).Select(i => new Sample(i)).ToArray();
        int thread = Thread.CurrentThread.ManagedThreadId, threads = Threads(), most = 0, left = 0;
        bool done = false;
        var collector = new Thread(() =>
        {
            while (!Volatile.Read(ref done))
            {
                GC.Collect();
                most = Math.Max(most, Threads());
                Thread.Sleep(10);
            }
        });
        collector.Start();
        try
        {
            using (var queue = new Queue(model, new QueueOptions { Running = Running }))
                await Task.WhenAll(Enumerable.Range(0, Count).Select(async i =>
                {
                    Sample sample = samples[i % samples.Length];
                    var leaving = (Leaving)random.Next(4);
                    int pieces = 1 + random.Next(Math.Min(sample.Count, 20));
                    using (var session = new Session(model))
                    {
                        string text = await reading(queue, session, sample, leaving, pieces);
                        Same(thread, Thread.CurrentThread.ManagedThreadId);
                        if (leaving == Leaving.Not)
                            Same(sample.Text, text);
                        else
                            Check(sample.Text.StartsWith(text, StringComparison.Ordinal), text + " and not " + sample.Text);
                        if (session.Length < sample.Tokens.Length)
                            left++;
                        if (leaving == Leaving.Not)
                            Same(sample.Tokens.Length, (int)session.Length);
                        sample.Complete(session);
                    }
                }));
        }
        finally
        {
            Volatile.Write(ref done, true);
            collector.Join();
        }
        Check(left >= 10, left + " have left early");
        // The library's threads, the queue's, the collector's, and some of the pool.
        Check(most < threads + Running + 2 + 40, most + " threads after " + threads);
        Console.WriteLine("        {0} of {1} left early; {2} threads more at most", left, Count, most - threads);
    }

    static async Task<string> GenerateSome(Queue queue, Session session, Sample sample, Leaving leaving, int pieces)
    {
        string text = "";
        int seen = 0, thread = Thread.CurrentThread.ManagedThreadId;
        using (var source = new CancellationTokenSource())
        {
            TokenHandler handler = piece =>
            {
                Check(Thread.CurrentThread.IsThreadPoolThread && Thread.CurrentThread.ManagedThreadId != thread);
                text += piece.Text;
                if (++seen < pieces || leaving == Leaving.Not || leaving == Leaving.ByTimer)
                    return true;
                if (leaving == Leaving.ByToken)
                    source.Cancel();
                return leaving != Leaving.Early;
            };
            if (leaving == Leaving.ByTimer)
                source.CancelAfter(pieces);
            try
            {
                Generation generation = await queue.GenerateAsync(session, sample.Prompt, sample.Options, handler, source.Token);
                Same(session.Length - sample.Prompt.Length, generation.GeneratedTokens);
                Same(sample.Options.Seed, generation.Seed);
            }
            catch (OperationCanceledException e)
            {
                Same(source.Token, e.CancellationToken);
            }
            Check(leaving == Leaving.Not || leaving == Leaving.ByTimer || seen == pieces, seen + " pieces and not " + pieces);
        }
        return text;
    }

    static async Task<E> ThrowsAsync<E>(Func<Task> action, string says = "", [CallerLineNumber] int line = 0) where E : Exception
    {
        try
        {
            await action();
        }
        catch (E e)
        {
            Check(e.Message.Contains(says), "line " + line + ": the message is \"" + e.Message + "\", without \"" + says + "\"");
            return e;
        }
        throw new Exception("line " + line + ": no " + typeof(E).Name);
    }

    static async Task Answers()
    {
        using (var queue = new Queue(reciter))
        using (var chat = new ChatSession(reciter, "你是诗人。"))
        {
            Same(Sentence, await queue.AskAsync(chat, "你好 👋"));
            Same(Sentence, chat.Text);
            Check(chat.LastGeneration.Finish == FinishReason.Stop && chat.LastGeneration.GeneratedTokens == 12 && chat.LastGeneration.PromptTokens > 0);
            var pieces = new List<string>();
            Same(Sentence, await queue.AskAsync(chat, "再来", null, pieces.Add));
            Same("好|語|😀|é", string.Join("|", pieces));
            Same("system: 你是诗人。|user: 你好 👋|assistant: " + Sentence + "|user: 再来|assistant: " + Sentence,
                string.Join("|", chat.Messages.Select(m => m.ToString())));
            Same("好", await queue.AskAsync(chat, "!", new GenerateOptions { StopStrings = new[] { "nothing", "語😀" } }));
            Same(FinishReason.StopString, chat.LastGeneration.Finish);
            Same(Sentence, await queue.CompleteAsync(chat, new[] { ChatMessage.User("Hi") }));
            Same(2, chat.Messages.Count);

            Generation result = await queue.ChatAsync(chat, new[] { ChatMessage.User("Hi") }, piece =>
            {
                Check(float.IsNaN(piece.LogProbability) == (piece.Kind == TokenEventKind.Text));
                return true;
            }, new GenerateOptions { LogProbabilities = true });
            Check(result.Finish == FinishReason.Stop && result.GeneratedTokens == 12);
            result = await queue.ChatAsync(chat, "again");
            Same(12L, result.GeneratedTokens);
            // The exception of a handler comes out, and the session can be used then.
            var special = new Special();
            Check(ReferenceEquals(special, await ThrowsAsync<Special>(() => queue.ChatAsync(chat, "!", piece =>
            {
                ThrowSpecial(special);
                return true;
            }))));
            Same(Sentence, chat.Ask("Hi"));
            // One queue runs generations without a chat too.
            using (var session = new Session(reciter))
            {
                result = await queue.GenerateAsync(session, reciter.EncodeChat(new[] { ChatMessage.User("Hi") }));
                Check(session.Text == Sentence && result.GeneratedTokens == 12);
                session.Truncate(session.Length - 12);
                Same(12L, (await queue.GenerateAsync(session)).GeneratedTokens);
            }
            Check(queue.Counts.Waiting == 0 && queue.Counts.Running == 0);
        }
        using (var queue = new Queue(forever))
        using (var chat = new ChatSession(forever))
        {
            // A handler ends the turn when it has heard enough. The session may have more.
            int tokens = 0;
            Generation result = await queue.ChatAsync(chat, "Hi", piece => ++tokens < 3, Tokens(1000000));
            Check(result.Finish == FinishReason.Cancelled && tokens == 3 && result.GeneratedTokens >= 3);
            Check(ReferenceEquals(result, chat.LastGeneration) && chat.Messages.Count == 2);
        }
        using (var queue = new Queue(thinker))
        using (var chat = new ChatSession(thinker))
        {
            // The answer alone; a handler is given the reasoning as well. A chat draws as the model recommends.
            string answer = await queue.AskAsync(chat, "What?"), thought = "", said = "";
            Check(answer.Length > 0 && answer == chat.Text && chat.Reasoning.Length > 0);
            await queue.ChatAsync(chat, "Again?", piece =>
            {
                if (piece.Part == Part.Reasoning)
                    thought += piece.Text;
                else
                    said += piece.Text;
                return true;
            });
            Check(thought == chat.Reasoning && said == answer, thought + " | " + said);
            Same(answer, await queue.AskAsync(chat, "Hm?", turn: new ChatOptions { Thinking = false }));
            Same("", chat.Reasoning);
        }
    }

    /// An answer is whole even if another call takes the session when it has ended and before the queue's thread has seen that. The submission
    /// may be refused, and nothing else.
    static async Task LookedAt()
    {
        using (var queue = new Queue(reciter))
        using (var chat = new ChatSession(reciter))
        {
            bool done = false;
            var looking = new Thread(() =>
            {
                while (!Volatile.Read(ref done))
                    Busy(chat);
            });
            looking.Start();
            int answers = 0;
            try
            {
                for (int i = 0; i < 60; i++)
                {
                    long before = chat.Length;
                    try
                    {
                        Same(Sentence, await queue.AskAsync(chat, "Hi"));
                        answers++;
                    }
                    catch (Nvfp4BusyException)
                    {
                        Same(before, chat.Length);
                    }
                }
            }
            finally
            {
                Volatile.Write(ref done, true);
                looking.Join();
            }
            Check(answers > 0);
        }
    }

    static async Task Refusals()
    {
        using (var queue = new Queue(forever, new QueueOptions { Running = 1, Submissions = 2 }))
        using (var chat = new ChatSession(forever))
        using (var second = new ChatSession(forever))
        using (var third = new ChatSession(forever))
        using (var source = new CancellationTokenSource())
        {
            Task<string> one = queue.AskAsync(chat, "Hi", Tokens(100000), null, source.Token), two = queue.AskAsync(second, "Hi", Tokens(12));
            await ThrowsAsync<Nvfp4BusyException>(() => queue.AskAsync(chat, "Hi"), "session is in use");
            await ThrowsAsync<Nvfp4BusyException>(() => queue.GenerateAsync(chat), "session is in use");
            await ThrowsAsync<Nvfp4BusyException>(() => chat.AskAsync("Hi"));
            Same(0L, chat.Length);
            await ThrowsAsync<Nvfp4BusyException>(() => queue.AskAsync(third, "Hi"), "2 of 2");
            Until(() => queue.Counts.Waiting == 1 && queue.Counts.Running == 1, "one runs and one waits");
            source.Cancel();
            await ThrowsAsync<OperationCanceledException>(() => one);
            Same(Sentence, await two);
            Same(Sentence, await queue.AskAsync(third, "Hi", Tokens(12)));

            // Bad arguments are found before anything is submitted.
            using (var other = new ChatSession(reciter))
                await ThrowsAsync<Nvfp4ArgumentException>(() => queue.AskAsync(other, "Hi"), "another model");
            await ThrowsAsync<Nvfp4ArgumentException>(() => queue.AskAsync(third, "Hi", new GenerateOptions { Progress = (done, total) => { } }),
                "progress");
            await ThrowsAsync<Nvfp4ArgumentException>(() => queue.AskAsync(third, "Hi", new GenerateOptions { Temperature = -1 }), "temperature");
            await ThrowsAsync<ArgumentException>(() => queue.AskAsync(third, "\uDC00"));
            Throws<ArgumentNullException>(() => queue.AskAsync(third, null));
            Throws<ArgumentNullException>(() => queue.AskAsync(null, "Hi"));
            Throws<ArgumentNullException>(() => queue.CompleteAsync(third, null));
            Throws<ArgumentNullException>(() => queue.GenerateAsync(null));
            Throws<ArgumentOutOfRangeException>(() => new SubmitOptions { Deadline = TimeSpan.Zero }, "positive");
            Same(Sentence, await queue.AskAsync(third, "Hi", Tokens(12)));

            third.Dispose();
            await ThrowsAsync<ObjectDisposedException>(() => queue.AskAsync(third, "Hi"));
            queue.Dispose();
            queue.Dispose();
            await ThrowsAsync<ObjectDisposedException>(() => queue.AskAsync(second, "Hi"));
            Throws<ObjectDisposedException>(() => queue.Counts.ToString());
            Same(Sentence, second.Ask("Hi", Tokens(12)));
        }
        Throws<ArgumentNullException>(() => new Queue(null));
        Throws<Nvfp4ArgumentException>(() => new Queue(forever, new QueueOptions { Running = 0 }));
        Throws<Nvfp4ArgumentException>(() => new Queue(forever, new QueueOptions { Running = -1 }), "running is -1");
        // One without a submission has no thread to end.
        int threads = Threads();
        for (int i = 0; i < 100; i++)
            new Queue(forever).Dispose();
        Check(Threads() < threads + 50);
    }

    /// A generation that fails ends for its own awaiting code alone, and leaves its session as it was.
    static async Task QueueFaults()
    {
        using (var queue = new Queue(model))
        using (var good = new Session(model))
        using (var bad = new Session(model, new SessionOptions { Context = 16 }))
        {
            bad.Prefill(Prompt.Take(3).ToArray());
            Task<Generation> running = queue.GenerateAsync(good, Prompt, Tokens(50));
            var fault = await ThrowsAsync<Nvfp4ContextFullException>(() => queue.GenerateAsync(bad, Enumerable.Repeat(7, 50).ToArray(), Tokens(1)));
            Same(Status.ContextFull, fault.Status);
            await ThrowsAsync<Nvfp4ArgumentException>(() => queue.GenerateAsync(bad, new[] { 3, 100000000 }, Tokens(1)), "100000000");
            Check(bad.Length == 3 && (await running).GeneratedTokens == 50);
            Check((await queue.GenerateAsync(bad, new[] { 3 }, Tokens(2))).GeneratedTokens == 2 && bad.Length == 6);
            await ThrowsAsync<Nvfp4Exception>(() => queue.GenerateAsync(new Session(model)));

            // A budget that is used up.
            Settled();
            using (var large = new Session(model, new SessionOptions { KvType = KvType.Float32 }))
            {
                Memory.Budget = Memory.Stats().Current;
                try
                {
                    var refused = await ThrowsAsync<Nvfp4OutOfMemoryException>(() =>
                        queue.GenerateAsync(large, Enumerable.Repeat(7, 250).ToArray(), Tokens(5)), "budget");
                    Same(Status.OverBudget, refused.Status);
                }
                finally
                {
                    Memory.Budget = 0;
                }
                Same(5L, (await queue.GenerateAsync(large, Prompt, Tokens(5))).GeneratedTokens);
            }
        }
        using (var queue = new Queue(reciter))
        using (var chat = new ChatSession(reciter))
            await ThrowsAsync<Nvfp4ArgumentException>(() => queue.CompleteAsync(chat, new[] { new ChatMessage("robot", "?") }), "robot");
    }

    static async Task CancelledInQueue()
    {
        using (var queue = new Queue(forever, new QueueOptions { Running = 1 }))
        using (var chat = new ChatSession(forever))
        {
            // Before its submission nothing happens; after it the task knows that it was cancelled.
            await ThrowsAsync<OperationCanceledException>(() => queue.AskAsync(chat, "Hi", null, null, new CancellationToken(true)));
            Same(0L, chat.Length);
            using (var source = new CancellationTokenSource())
            {
                Task<string> task = queue.AskAsync(chat, "Hi", Tokens(1000000), piece => source.Cancel(), source.Token);
                Same(source.Token, (await ThrowsAsync<OperationCanceledException>(() => task)).CancellationToken);
                Check(task.IsCanceled && chat.LastGeneration.Finish == FinishReason.Cancelled && !Busy(chat));
            }
            // The session's Cancel is no failure, and ends a submission that waits for another, too.
            long length = chat.Length;
            using (var second = new ChatSession(forever))
            {
                Task<Generation> one = queue.ChatAsync(chat, "Hi", null, Tokens(1000000)), two = queue.ChatAsync(second, "Hi", null, Tokens(1000000));
                Until(() => queue.Counts.Running == 1, "the first one runs");
                second.Cancel();
                Generation waited = await two;
                Check(waited.Finish == FinishReason.Cancelled && waited.GeneratedTokens == 0 && second.Length == 0);
                chat.Cancel();
                Same(FinishReason.Cancelled, (await one).Finish);
                // The end of a session ends its generation, which is no whole answer.
                Task<string> cut = queue.AskAsync(second, "Hi", Tokens(1000000));
                second.Dispose();
                Same("ChatSession", (await ThrowsAsync<ObjectDisposedException>(() => cut)).ObjectName);
            }
            Same(Sentence, await queue.AskAsync(chat, "On", Tokens(12)));
            Check(queue.Counts.Waiting == 0 && queue.Counts.Running == 0);
        }

        // At any moment around the submission and the end.
        var random = new Random(7);
        using (var queue = new Queue(forever))
        using (var session = new Session(forever))
        {
            session.Prefill(new[] { 5 });
            int cancelled = 0;
            for (int i = 0; i < 300; i++)
                using (var source = new CancellationTokenSource())
                {
                    int spins = random.Next(20000);
                    Task canceller = Task.Run(() =>
                    {
                        Thread.SpinWait(spins);
                        source.Cancel();
                    });
                    session.Truncate(1);
                    try
                    {
                        Same(3L, (await queue.GenerateAsync(session, null, Tokens(3), null, source.Token)).GeneratedTokens);
                    }
                    catch (OperationCanceledException e)
                    {
                        Same(source.Token, e.CancellationToken);
                        cancelled++;
                    }
                    Check(!Busy(session));
                    await canceller;
                }
            Console.WriteLine("        {0} of 300 were cancelled in time", cancelled);
            Check(cancelled > 0);
        }
    }

    static async Task Deadlines()
    {
        using (var queue = new Queue(forever, new QueueOptions { Running = 1 }))
        using (var first = new ChatSession(forever))
        using (var second = new ChatSession(forever))
        using (var third = new ChatSession(forever))
        {
            var soon = new SubmitOptions { Deadline = TimeSpan.FromMilliseconds(60) };
            Same(TimeSpan.FromMilliseconds(60), soon.Deadline.Value);
            var watch = Stopwatch.StartNew();
            string answer = await queue.AskAsync(first, "Hi", Tokens(50000), submit: soon);
            Check(watch.ElapsedMilliseconds >= 60 && answer.Length > 0 && answer == first.Text);
            Check(first.LastGeneration.Finish == FinishReason.Deadline && first.LastGeneration.GeneratedTokens > 0);

            // One that has not begun ends in time as well. Of those that wait the more important comes first.
            second.Ask("one", Tokens(12));
            long length = second.Length;
            using (var source = new CancellationTokenSource())
            using (var last = new CancellationTokenSource())
            {
                Task<string> running = queue.AskAsync(first, "Hi", Tokens(200000), null, source.Token);
                Until(() => queue.Counts.Running == 1, "the first one runs");
                Task<string> late = queue.AskAsync(second, "Hi", Tokens(50000), null, last.Token, submit: new SubmitOptions { Priority = -1 });
                Task<string> early = queue.AskAsync(third, "Hi", Tokens(12), submit: new SubmitOptions { Priority = 1 });
                using (var fourth = new ChatSession(forever))
                {
                    fourth.Ask("one", Tokens(12));
                    Generation none = await queue.ChatAsync(fourth, "Hi", null, Tokens(12), submit: soon);
                    Check(none.Finish == FinishReason.Deadline && none.GeneratedTokens == 0 && fourth.Length == length);
                    Check(ReferenceEquals(none, fourth.LastGeneration));
                }
                source.Cancel();
                await ThrowsAsync<OperationCanceledException>(() => running);
                Same(Sentence, await early);
                Check(!late.IsCompleted, "the less important one was first");
                last.Cancel();
                await ThrowsAsync<OperationCanceledException>(() => late);
            }
        }
    }

    static async Task DisposedQueue()
    {
        for (int round = 0; round < 3; round++)
        {
            var queue = new Queue(forever, new QueueOptions { Running = 4 });
            ChatSession[] chats = Enumerable.Range(0, 20).Select(i => new ChatSession(forever)).ToArray();
            int pieces = 0;
            Task<string>[] answers = chats.Select(chat => queue.AskAsync(chat, "Hi", Tokens(1000000), piece => Interlocked.Increment(ref pieces))).ToArray();
            Until(() => Volatile.Read(ref pieces) > round * 20, "some pieces have come");
            // The sessions can be used when it returns.
            queue.Dispose();
            Check(chats.All(chat => !Busy(chat)), "a session is in use");
            foreach (Task<string> answer in answers)
            {
                await ThrowsAsync<OperationCanceledException>(() => answer, "queue was disposed of");
                Check(answer.IsCanceled);
            }
            Check(chats.Any(chat => chat.Length > 0) && chats.Any(chat => chat.Length == 0));
            foreach (ChatSession chat in chats)
            {
                Check(chat.Length > 0 || chat.Ask("Hi", Tokens(12)) == Sentence);
                chat.Dispose();
            }
        }

        // By its own handler, and at any moment of submissions of several threads.
        var own = new Queue(forever);
        using (var chat = new ChatSession(forever))
            await ThrowsAsync<OperationCanceledException>(() => queueOf(own).AskAsync(chat, "Hi", Tokens(1000000), piece => own.Dispose()));
        for (int round = 0; round < 20; round++)
        {
            var queue = new Queue(forever);
            Task[] askers = Enumerable.Range(0, 4).Select(i => Task.Run(async () =>
            {
                using (var chat = new ChatSession(forever))
                    try
                    {
                        for (;;)
                            Same(Sentence, await queue.AskAsync(chat, "Hi", Tokens(12)));
                    }
                    catch (Exception e) when (e is OperationCanceledException || e is ObjectDisposedException)
                    {
                        Check(!Busy(chat));
                    }
            })).ToArray();
            Thread.Sleep(round);
            queue.Dispose();
            await Task.WhenAll(askers);
        }
    }

    static Queue queueOf(Queue queue) => queue;

    [MethodImpl(MethodImplOptions.NoInlining)]
    static void ForgetQueues(List<Task<string>> kept)
    {
        for (int i = 0; i < 20; i++)
        {
            var queue = new Queue(forever);
            using (var chat = new ChatSession(forever))
                Same(Sentence, queue.AskAsync(chat, "Hi", Tokens(12)).Result);
            // The awaiting code of a task keeps its queue, and its session.
            kept.Add(new Queue(forever).AskAsync(new ChatSession(forever), "Hi", Tokens(1200)));
        }
    }

    /// The thread and the memory of a queue that nobody has any more go, and a task that was begun ends.
    static void ForgottenQueues()
    {
        ulong memory = Settled();
        int threads = Threads();
        var kept = new List<Task<string>>();
        OnThreads(1, i => ForgetQueues(kept));
        Settled();
        foreach (Task<string> answer in kept)
            Same(100 * Sentence.Length, answer.Result.Length);
        kept.Clear();
        Until(() => Settled() <= memory && Threads() < threads + 20, "threads and sessions have ended: " + Threads() + " after " + threads);
    }

#if NETCOREAPP
    static async Task<string> StreamSome(Queue queue, Session session, Sample sample, Leaving leaving, int pieces)
    {
        string text = "";
        int seen = 0, thread = Thread.CurrentThread.ManagedThreadId;
        using var source = new CancellationTokenSource();
        if (leaving == Leaving.ByTimer)
            source.CancelAfter(pieces);
        try
        {
            await foreach (TokenEvent piece in queue.PiecesAsync(session, sample.Prompt, sample.Options).WithCancellation(source.Token))
            {
                Same(thread, Thread.CurrentThread.ManagedThreadId);
                text += piece.Text;
                if (++seen < pieces || leaving == Leaving.Not || leaving == Leaving.ByTimer)
                    continue;
                if (leaving == Leaving.Early)
                    break;
                source.Cancel();
            }
            Check(leaving != Leaving.ByToken || session.Length == sample.Tokens.Length);
        }
        catch (OperationCanceledException e)
        {
            Same(source.Token, e.CancellationToken);
        }
        Check(leaving == Leaving.Not || leaving == Leaving.ByTimer || seen == pieces, seen + " pieces and not " + pieces);
        return text;
    }

    static async Task<string> Read(IAsyncEnumerable<string> stream)
    {
        var pieces = new List<string>();
        await foreach (string piece in stream)
            pieces.Add(piece);
        return string.Join("|", pieces);
    }

    static async Task QueueStreams()
    {
        await using (var queue = new Queue(reciter))
        using (var chat = new ChatSession(reciter))
        {
            Same("好|語|😀|é", await Read(queue.StreamAsync(chat, "Hi")));
            Check(chat.LastGeneration.Finish == FinishReason.Stop && chat.Messages.Count == 2);
            Same("好|語|😀|é", await Read(queue.StreamAsync(chat, new[] { ChatMessage.User("Hi") })));
            using var session = new Session(reciter);
            Same("好|語|😀|é", await Read(queue.StreamAsync(session, reciter.EncodeChat(new[] { ChatMessage.User("Hi") }))));
            // A stream of pieces has each token.
            int tokens = 0;
            await foreach (TokenEvent piece in queue.PiecesAsync(chat, "Hi"))
                tokens += piece.Kind == TokenEventKind.Token ? 1 : 0;
            Same(12, tokens);
            await foreach (TokenEvent piece in queue.PiecesAsync(chat, new[] { ChatMessage.User("Hi") }))
                tokens += piece.Kind == TokenEventKind.Token ? 1 : 0;
            Same(24, tokens);
            // Enumerated twice it says it twice, and never enumerated not at all.
            long messages = chat.Messages.Count;
            IAsyncEnumerable<string> twice = queue.StreamAsync(chat, "twice");
            await twice.GetAsyncEnumerator().DisposeAsync();
            Same(messages, chat.Messages.Count);
            await Read(twice);
            await Read(twice);
            Same(messages + 4, chat.Messages.Count);
        }
        using (var queue = new Queue(thinker))
        using (var chat = new ChatSession(thinker))
        {
            string answer = (await Read(queue.StreamAsync(chat, "What?"))).Replace("|", ""), thought = "";
            Check(answer == chat.Text && answer.Length > 0);
            await foreach (TokenEvent piece in queue.PiecesAsync(chat, "Again?"))
                if (piece.Part == Part.Reasoning)
                    thought += piece.Text;
            Check(thought == chat.Reasoning && thought.Length > 0);
        }

        using (var queue = new Queue(forever))
        using (var chat = new ChatSession(forever))
        {
            // Left early: the session can be used when the loop is over, and holds what was read and no less.
            string heard = "";
            await foreach (string piece in queue.StreamAsync(chat, "Hi", Tokens(50000)))
            {
                heard += piece;
                if (heard.Length >= 9)
                    break;
            }
            Check(chat.Text.StartsWith(heard, StringComparison.Ordinal) && chat.LastGeneration.Finish == FinishReason.Cancelled);
            Same(Sentence, chat.Ask("On", Tokens(12)));

            // A token, given in either way. No piece comes after it, though some may have been made.
            foreach (bool enumerator in new[] { false, true })
            {
                using var source = new CancellationTokenSource();
                int count = 0;
                IAsyncEnumerable<string> stream = enumerator
                    ? queue.StreamAsync(chat, "Hi", Tokens(50000))
                    : queue.StreamAsync(chat, "Hi", Tokens(50000), source.Token);
                var cancelled = await ThrowsAsync<OperationCanceledException>(async () =>
                {
                    await foreach (string piece in stream.WithCancellation(enumerator ? source.Token : default))
                        if (++count == 7)
                        {
                            Thread.Sleep(20);
                            source.Cancel();
                        }
                });
                Check(count == 7 && cancelled.CancellationToken == source.Token && !Busy(chat));
                Same(FinishReason.Cancelled, chat.LastGeneration.Finish);
            }

            // A session in use says so to the reader, and so does one that is given up; a queue that is disposed of ends its streams.
            IAsyncEnumerator<string> first = queue.StreamAsync(chat, "Hi", Tokens(50000)).GetAsyncEnumerator();
            Check(await first.MoveNextAsync());
            await ThrowsAsync<Nvfp4BusyException>(() => Read(queue.StreamAsync(chat, "Hi")), "session is in use");
            await ThrowsAsync<ArgumentException>(() => Read(queue.StreamAsync(new ChatSession(forever), "\uD800")));
            await first.DisposeAsync();
            await first.DisposeAsync();
            Check(!await first.MoveNextAsync() && !Busy(chat));
            first = queue.StreamAsync(chat, "Hi", Tokens(50000)).GetAsyncEnumerator();
            Check(await first.MoveNextAsync());
            ValueTask disposing = queue.DisposeAsync();
            await ThrowsAsync<OperationCanceledException>(async () =>
            {
                while (await first.MoveNextAsync())
                {
                }
            }, "queue was disposed of");
            await disposing;
            Check(!Busy(chat));
        }
    }

    [MethodImpl(MethodImplOptions.NoInlining)]
    static void BeginQueueStream(Queue queue, ChatSession chat)
    {
        IAsyncEnumerator<string> stream = (queue ?? new Queue(forever)).StreamAsync(chat ?? new ChatSession(forever), "Hi", Tokens(1000000))
            .GetAsyncEnumerator();
        Check(stream.MoveNextAsync().AsTask().Result);
    }

    /// Neither the queue nor its stream is disposed of. Its thread runs code of the plugin.
    static void QueueInPlugin(string path)
    {
        using (var own = Model.Load(path))
        {
            var queue = new Queue(own);
            Same(Sentence, queue.AskAsync(new ChatSession(own), "Hi").Result);
            Check(queue.StreamAsync(new ChatSession(own), "Hi").GetAsyncEnumerator().MoveNextAsync().AsTask().Result);
        }
    }

    /// Streams that were left half-way end, with and without their queues and sessions.
    static void ForgottenQueueStreams()
    {
        ulong memory = Settled();
        int threads = Threads();
        using (var queue = new Queue(forever))
        using (var chat = new ChatSession(forever))
        {
            OnThreads(1, i =>
            {
                for (int n = 0; n < 30; n++)
                    BeginQueueStream(queue, null);
                BeginQueueStream(queue, chat);
                for (int n = 0; n < 30; n++)
                    BeginQueueStream(null, null);
            });
            Check(Threads() > threads + 30);
            Until(() =>
            {
                Settled();
                return !Busy(chat) && queue.Counts.Running == 0;
            }, "the streams have ended");
            Same(Sentence, queue.AskAsync(chat, "Hi", Tokens(12)).Result);
        }
        // The library's threads end when they have been idle for a while.
        Until(() => Settled() <= memory && Threads() < threads + 60, "threads and sessions have ended: " + Threads() + " after " + threads);
    }
#endif

    [DllImport("libdl.so.2")]
    static extern IntPtr dlopen(string file, int flags);

    [DllImport("libdl.so.2")]
    static extern IntPtr dlsym(IntPtr handle, string name);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    delegate int StatisticsCall(IntPtr model, ulong[] result);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    delegate int PlanCall(byte[] path, UIntPtr length, IntPtr load, IntPtr quantize, IntPtr options, ulong[] result);

    static F Function<F>(string name) => Marshal.GetDelegateForFunctionPointer<F>(dlsym(dlopen(Library.Path, 2), name));

    /// All numbers are those that the library writes.
    static void Statistics()
    {
        using (Model own = Model.Load(modelPath, new LoadOptions { KvBytes = 1 << 22 }))
        using (var queue = new Queue(own))
        using (Session one = new Session(own), two = new Session(own))
        {
            int[] prompt = Enumerable.Range(3, 60).ToArray();
            ModelStatistics before = own.Statistics();
            Check(before.Passes == 0 && before.StepTokens == 0 && before.ReservedBytes > 0 && before.FreeBytes == before.ReservedBytes);
            Task.WaitAll(queue.GenerateAsync(one, prompt, Tokens(20)), queue.GenerateAsync(two, Prompt, Tokens(20)));
            two.Reset();
            queue.GenerateAsync(two, prompt, Tokens(20)).Wait();
            ModelStatistics now = own.Statistics();
            Check(now.Passes > 20 && now.Requests >= now.Passes && now.PromptTokens == 60 + Prompt.Length + 60 && now.PromptTokensFound > 0);
            Check(now.StepTokens >= 57 && now.Generating == 0 && now.Waiting == 0 && now.Preemptions == 0);
            Check(now.BlocksUsed > 0 && now.UsedBytes > 0 && now.FreeBytes < now.ReservedBytes && now.ReservedBytes == before.ReservedBytes);
            ulong[] raw = new ulong[16];
            raw[0] = (ulong)raw.Length * 8;
            object handle = typeof(Model).GetField("Handle", BindingFlags.Instance | BindingFlags.NonPublic).GetValue(own);
            Same(0, Function<StatisticsCall>("NVFP4_model_statistics")(((SafeHandle)handle).DangerousGetHandle(), raw));
            Same(string.Join(" ", raw.Skip(1)), string.Join(" ", new[]
            {
                now.Passes, now.Requests, now.PromptTokens, now.PromptTokensFound, now.StepTokens, now.Generating, now.Waiting, now.BlocksUsed,
                (long)now.UsedBytes, now.BlocksCached, (long)now.CachedBytes, now.BlocksEvicted, (long)now.ReservedBytes, (long)now.FreeBytes,
                now.Preemptions,
            }));
            own.Dispose();
            Throws<ObjectDisposedException>(() => own.Statistics());
        }
    }

    static void Plans()
    {
        var cpu = new LoadOptions { Device = Device.Cpu };
        ModelPlan plan = Model.Plan(modelPath, cpu);
        ulong weights = Memory.Stats(MemoryTag.Weights).Current;
        using (Model own = Model.Load(modelPath, cpu))
        {
            Same(Memory.Stats(MemoryTag.Weights).Current - weights, plan.WeightBytes);
            Same(0UL, plan.MappedBytes);
            Same((ulong)own.Info.KvBytesPerToken, plan.KvBytesPerToken);
        }
        byte[] path = System.Text.Encoding.UTF8.GetBytes(modelPath);
        ulong[] raw = new ulong[20];
        raw[0] = (ulong)raw.Length * 8;
        Same(0, Function<PlanCall>("NVFP4_model_plan")(path, (UIntPtr)(ulong)path.Length, IntPtr.Zero, IntPtr.Zero, IntPtr.Zero, raw));
        Check(plan.Device.Equals(Device.Cpu) && plan.Context == 256 && plan.PeakLoadBytes >= plan.WeightBytes);
        // The free memory changes all the time, and is left out.
        Same(string.Join(" ", raw.Skip(2).Take(16)), string.Join(" ", new[]
        {
            (ulong)plan.Context, plan.WeightBytes, plan.WeightHostBytes, plan.PeakLoadBytes, plan.PeakLoadHostBytes, plan.StepWorkspaceBytes,
            plan.WorkspaceBytes, plan.WorkspaceHostBytes, plan.GraphBytesBound, plan.KvBytesPerToken, plan.KvBlockBytes,
            (ulong)plan.KvBlockPositions, plan.StateBytes, plan.KvBytesPerSequence, plan.StateBytesPerSequence, plan.KvBytes,
        }));

        // For sessions in a budget: as many as fit, and one more does not.
        ulong budget = plan.WeightBytes + plan.WorkspaceBytes + 10 * plan.KvBytesPerSequence;
        var sessions = new PlanOptions { Sequences = 3, Context = 100, KvType = KvType.Float32, BudgetBytes = budget };
        ModelPlan small = Model.Plan(modelPath, cpu, null, sessions);
        Check(small.Context == 100 && small.FreeBytes == budget && small.KvBytes == 3 * small.KvBytesPerSequence && small.SequencesThatFit > 0);
        sessions.BudgetBytes = budget * 2;
        Check(Model.Plan(modelPath, cpu, null, sessions).SequencesThatFit > small.SequencesThatFit);
        Check(Model.Plan(reciterPath, cpu, new QuantizeOptions()).WeightBytes < Model.Plan(reciterPath, cpu).WeightBytes);
        Throws<Nvfp4ArgumentException>(() => Model.Plan(modelPath, cpu, null, new PlanOptions { Sequences = 0 }));
        Throws<Nvfp4NotFoundException>(() => Model.Plan("/nowhere"));
        Throws<ArgumentNullException>(() => Model.Plan(null));
    }
}
