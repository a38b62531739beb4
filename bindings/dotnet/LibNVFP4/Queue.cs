// Queues: many generations of a model at once, without a thread of the program for each.

using System;
using System.Collections.Generic;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>Numbers of a queue's submissions.</summary>
    public struct QueueCounts
    {
        internal QueueCounts(UIntPtr waiting, UIntPtr running)
        {
            Waiting = Interop.Long(waiting);
            Running = Interop.Long(running);
        }

        /// <summary>Submissions that wait to begin.</summary>
        public long Waiting { get; }

        /// <summary>Generations that run.</summary>
        public long Running { get; }
    }

    /// Submits a generation to a queue, and writes its number.
    internal unsafe delegate int Submission(QueueHandle queue, SessionHandle session, NativeGenerateOptions* generate,
        NativeSubmitOptions* submit, ulong* generation);

    /// <summary>
    /// Runs generations of a model for awaiting code, without a thread for each. One background thread takes the events of all of them, from the
    /// first submission until the queue is disposed of. Awaiting code and handlers never run on it. Any thread may use a queue. A session is in
    /// use from its submission until its task or stream has ended: other calls are refused meanwhile with an <see cref="Nvfp4BusyException"/>.
    /// </summary>
    public sealed class Queue : IDisposable
#if NETCOREAPP
        , IAsyncDisposable
#endif
    {
        readonly Dispatcher dispatcher;

        /// <summary>Creates a queue of a model, which it keeps alive.</summary>
        /// <param name="model">The model whose sessions it runs.</param>
        /// <param name="options">Null for the defaults.</param>
        public unsafe Queue(Model model, QueueOptions options = null)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            QueueHandle handle = null;
            Interop.Call(() =>
            {
                NativeQueueOptions raw = (options ?? new QueueOptions()).Raw;
                return Native.NVFP4_queue_create(model.Handle, &raw, out handle);
            });
            dispatcher = new Dispatcher(handle);
        }

        /// <summary>Ends the generations of a queue that is forgotten. Awaiting code keeps its queue.</summary>
        ~Queue()
        {
            // At the end of a process .NET Framework runs the finalizers of all objects while other threads stand still, with their locks.
            if (!Environment.HasShutdownStarted)
                dispatcher?.End();
        }

        /// <summary>How many submissions wait and run now.</summary>
        public unsafe QueueCounts Counts
        {
            get
            {
                UIntPtr waiting, running;
                Interop.Check(Native.NVFP4_queue_counts(dispatcher.Handle, &waiting, &running, null));
                return new QueueCounts(waiting, running);
            }
        }

        /// <summary>Appends tokens to a session and generates after them.</summary>
        /// <param name="session">A session of the queue's model.</param>
        /// <param name="tokens">The prompt; null to generate after the tokens in the session.</param>
        /// <param name="options">How to generate; null for the defaults. A progress handler is refused: the pieces tell the progress.</param>
        /// <param name="handler">Is given each token as it comes, one at a time on the thread pool; or null. What it throws ends the generation and the task.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException. Tokens generated until then are kept.</param>
        /// <param name="submit">Priority and deadline; null for neither.</param>
        public Task<Generation> GenerateAsync(Session session, int[] tokens = null, GenerateOptions options = null, TokenHandler handler = null,
            CancellationToken cancellation = default(CancellationToken), SubmitOptions submit = null) =>
            RunAsync(Begin(session, tokens, options, submit, cancellation), handler);

        /// <summary>Says something in a conversation and gives the answer.</summary>
        /// <param name="chat">A conversation of the queue's model.</param>
        /// <param name="text">What the user says.</param>
        /// <param name="options">How to generate; null for the defaults. A progress handler is refused.</param>
        /// <param name="onText">Is given the answer as it comes, one piece at a time on the thread pool; or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException. The conversation keeps what was answered until then.</param>
        /// <param name="turn">How the turn is written and answered; null for <see cref="ChatSession.Turns"/>.</param>
        /// <param name="submit">Priority and deadline; null for neither.</param>
        public Task<string> AskAsync(ChatSession chat, string text, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null, SubmitOptions submit = null) =>
            AnswerAsync(Begin(chat, text, options, turn, submit, cancellation), onText);

        /// <summary>Answers a whole conversation, as <see cref="ChatSession.Complete(IEnumerable{ChatMessage}, GenerateOptions, Action{string}, CancellationToken, ChatOptions)"/> does. The rest is as for <see cref="AskAsync"/>.</summary>
        public Task<string> CompleteAsync(ChatSession chat, IEnumerable<ChatMessage> messages, GenerateOptions options = null,
            Action<string> onText = null, CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null,
            SubmitOptions submit = null) =>
            AnswerAsync(Begin(chat, messages, options, turn, submit, cancellation), onText);

        /// <summary>Says something in a conversation and gives each token of the answer to a handler, as <see cref="GenerateAsync"/> does.</summary>
        public Task<Generation> ChatAsync(ChatSession chat, string text, TokenHandler handler = null, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null, SubmitOptions submit = null) =>
            RunAsync(Begin(chat, text, options, turn, submit, cancellation), handler);

        /// <summary>Gives each token of the answer to a whole conversation to a handler.</summary>
        public Task<Generation> ChatAsync(ChatSession chat, IEnumerable<ChatMessage> messages, TokenHandler handler = null,
            GenerateOptions options = null, CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null,
            SubmitOptions submit = null) =>
            RunAsync(Begin(chat, messages, options, turn, submit, cancellation), handler);

#if NETCOREAPP
        /// <summary>
        /// Appends tokens to a session and gives the text that is generated after them, for await foreach: pieces of whole characters. The
        /// generation is submitted with the enumeration and does not wait for its reader. Leaving early ends it; the session then holds what was
        /// generated, which may be more than was read. The token given here or by WithCancellation ends it with an OperationCanceledException.
        /// </summary>
        /// <param name="session">A session of the queue's model.</param>
        /// <param name="tokens">The prompt; null to generate after the tokens in the session.</param>
        /// <param name="options">How to generate; null for the defaults. A progress handler is refused.</param>
        /// <param name="cancellation">Stops it.</param>
        /// <param name="submit">Priority and deadline; null for neither.</param>
        public IAsyncEnumerable<string> StreamAsync(Session session, int[] tokens = null, GenerateOptions options = null,
            CancellationToken cancellation = default, SubmitOptions submit = null) =>
            Texts(Begin(session, tokens, options, submit, cancellation));

        /// <summary>Says something in a conversation and gives the answer as such a stream.</summary>
        public IAsyncEnumerable<string> StreamAsync(ChatSession chat, string text, GenerateOptions options = null,
            CancellationToken cancellation = default, ChatOptions turn = null, SubmitOptions submit = null) =>
            Texts(Begin(chat, text, options, turn, submit, cancellation));

        /// <summary>The answer to a whole conversation as such a stream.</summary>
        public IAsyncEnumerable<string> StreamAsync(ChatSession chat, IEnumerable<ChatMessage> messages, GenerateOptions options = null,
            CancellationToken cancellation = default, ChatOptions turn = null, SubmitOptions submit = null) =>
            Texts(Begin(chat, messages, options, turn, submit, cancellation));

        /// <summary>Appends tokens to a session and gives each token and piece of text after them. The rest is as for <see cref="StreamAsync(Session, int[], GenerateOptions, CancellationToken, SubmitOptions)"/>.</summary>
        public IAsyncEnumerable<TokenEvent> PiecesAsync(Session session, int[] tokens = null, GenerateOptions options = null,
            CancellationToken cancellation = default, SubmitOptions submit = null) =>
            Pieces(Begin(session, tokens, options, submit, cancellation));

        /// <summary>Says something in a conversation and gives each piece of the answer, with its reasoning and tool calls.</summary>
        public IAsyncEnumerable<TokenEvent> PiecesAsync(ChatSession chat, string text, GenerateOptions options = null,
            CancellationToken cancellation = default, ChatOptions turn = null, SubmitOptions submit = null) =>
            Pieces(Begin(chat, text, options, turn, submit, cancellation));

        /// <summary>Gives each piece of the answer to a whole conversation.</summary>
        public IAsyncEnumerable<TokenEvent> PiecesAsync(ChatSession chat, IEnumerable<ChatMessage> messages, GenerateOptions options = null,
            CancellationToken cancellation = default, ChatOptions turn = null, SubmitOptions submit = null) =>
            Pieces(Begin(chat, messages, options, turn, submit, cancellation));

        IAsyncEnumerable<TokenEvent> Pieces(Func<CancellationToken, Reply> begin) =>
            new QueueStream<TokenEvent>(this, begin, piece => true, piece => piece);

        IAsyncEnumerable<string> Texts(Func<CancellationToken, Reply> begin) =>
            new QueueStream<string>(this, begin, IsAnswer, piece => piece.Text);

        /// <summary>Does what <see cref="Dispose"/> does, and does not block.</summary>
        public ValueTask DisposeAsync()
        {
            GC.SuppressFinalize(this);
            dispatcher.End();
            return new ValueTask(dispatcher.Ended);
        }
#endif

        /// <summary>
        /// Ends the queue's generations, which keep the tokens that they have, and waits until their sessions can be used again, which takes a
        /// pass. Awaiting code gets an OperationCanceledException. Submissions throw an ObjectDisposedException from now on.
        /// </summary>
        public void Dispose()
        {
            GC.SuppressFinalize(this);
            dispatcher.End();
            dispatcher.Ended.Wait();
        }

        /// Begins a generation after tokens, each time that it is called. The token that it takes ends it too.
        unsafe Func<CancellationToken, Reply> Begin(Session session, int[] tokens, GenerateOptions options, SubmitOptions submit,
            CancellationToken cancellation)
        {
            if (session == null)
                throw new ArgumentNullException(nameof(session));
            return more => Submit(session, options, submit, cancellation, more, (queue, handle, generate, how, generation) =>
            {
                fixed (int* at = tokens)
                    return Native.NVFP4_queue_generate(queue, handle, at, Interop.Size(tokens == null ? 0 : tokens.Length), generate, how,
                        generation);
            });
        }

        Func<CancellationToken, Reply> Begin(ChatSession chat, string text, GenerateOptions options, ChatOptions turn, SubmitOptions submit,
            CancellationToken cancellation)
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return Begin(chat, text, false, options, turn, submit, cancellation);
        }

        Func<CancellationToken, Reply> Begin(ChatSession chat, IEnumerable<ChatMessage> messages, GenerateOptions options, ChatOptions turn,
            SubmitOptions submit, CancellationToken cancellation) =>
            Begin(chat, ChatMessage.ToJson(messages), true, options, turn, submit, cancellation);

        unsafe Func<CancellationToken, Reply> Begin(ChatSession chat, string text, bool isConversation, GenerateOptions options, ChatOptions turn,
            SubmitOptions submit, CancellationToken cancellation)
        {
            if (chat == null)
                throw new ArgumentNullException(nameof(chat));
            return more => Submit(chat, chat.Drawn(options), submit, cancellation, more,
                new Turn(text, isConversation, turn ?? chat.Turns).Submit);
        }

        unsafe Reply Submit(Session session, GenerateOptions options, SubmitOptions submit, CancellationToken cancellation, CancellationToken more,
            Submission submission)
        {
            options = options ?? new GenerateOptions();
            submit = submit ?? new SubmitOptions();
            // The library itself refuses a progress handler.
            var reply = new Reply(session, new Call(cancellation, options.Progress, session.Handle), cancellation, more);
            try
            {
                using (var pinned = new PinnedOptions(options))
                {
                    reply.Logits = pinned.TakeLogits();
                    dispatcher.Submit(reply, number => reply.Submit(() =>
                    {
                        NativeGenerateOptions generate = pinned.Raw;
                        generate.Call = reply.Call.Options;
                        NativeSubmitOptions how = submit.Raw;
                        how.User = number;
                        ulong generation;
                        return submission(dispatcher.Handle, session.Handle, &generate, &how, &generation);
                    }));
                }
            }
            catch (Exception e)
            {
                reply.Fail(e);
                throw;
            }
            return reply;
        }

        async Task<Generation> RunAsync(Func<CancellationToken, Reply> begin, TokenHandler handler)
        {
            Reply reply = begin(default(CancellationToken));
            if (handler != null)
                await Task.Run(() => GiveAsync(reply, handler)).ConfigureAwait(false);
            else
                reply.Discard();
            await reply.Ended.ConfigureAwait(false);
            GC.KeepAlive(this);
            return reply.Result();
        }

        async Task<string> AnswerAsync(Func<CancellationToken, Reply> begin, Action<string> onText)
        {
            Reply reply = begin(default(CancellationToken));
            var answer = new StringBuilder();
            TokenHandler handler = piece =>
            {
                if (IsAnswer(piece))
                {
                    answer.Append(piece.Text);
                    onText?.Invoke(piece.Text);
                }
                return true;
            };
            // Without a handler of the caller's, the pieces are taken together at the end: nothing is woken for each.
            if (onText == null)
                await reply.Ended.ConfigureAwait(false);
            await Task.Run(() => GiveAsync(reply, handler)).ConfigureAwait(false);
            GC.KeepAlive(this);
            return answer.ToString();
        }

        /// Gives a handler the pieces until it wants no more. What it throws comes out when the session can be used again.
        static async Task GiveAsync(Reply reply, TokenHandler handler)
        {
            try
            {
                while (await reply.NextAsync().ConfigureAwait(false))
                    if (!handler(reply.Piece))
                        reply.Stop();
            }
            finally
            {
                reply.Stop();
                await reply.Ended.ConfigureAwait(false);
            }
        }

        static bool IsAnswer(TokenEvent piece) => piece.Part == Part.Content && piece.Text.Length > 0;
    }
}
