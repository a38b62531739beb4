// Sessions: sequences of tokens with their cached keys and values, and what a model generates from where they stand.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>Is given each token as it comes, and the text that it completes: whole characters, none while one is incomplete. A token may come a second time, at the end, with text that was held back. Returns false to end the generation.</summary>
    public delegate bool TokenHandler(int token, string text);

    /// <summary>What a generation came to.</summary>
    public sealed class Generation
    {
        internal Generation(NativeGenerationResult result)
        {
            Finish = (FinishReason)result.Finish;
            PromptTokens = Interop.Long(result.PromptTokens);
            GeneratedTokens = Interop.Long(result.GeneratedTokens);
            Prefill = TimeSpan.FromTicks((long)(result.PrefillSeconds * TimeSpan.TicksPerSecond));
            FirstToken = TimeSpan.FromTicks((long)(result.FirstTokenSeconds * TimeSpan.TicksPerSecond));
            Decode = TimeSpan.FromTicks((long)(result.DecodeSeconds * TimeSpan.TicksPerSecond));
        }

        /// <summary>Why it ended.</summary>
        public FinishReason Finish { get; }

        /// <summary>Tokens before the first generated one: all that the session held, or those that a chat turn added.</summary>
        public long PromptTokens { get; }

        /// <summary>Tokens generated.</summary>
        public long GeneratedTokens { get; }

        /// <summary>Time for the prompt, as far as it had not been run.</summary>
        public TimeSpan Prefill { get; }

        /// <summary>Time from the call to the first token.</summary>
        public TimeSpan FirstToken { get; }

        /// <summary>Time from the first token to the end. A stream's has the time in it that its reader took.</summary>
        public TimeSpan Decode { get; }
    }

    /// <summary>
    /// A sequence of tokens that a model runs, with its cached keys and values. One call at a time may use it: another one
    /// meanwhile, from a handler too, is an <see cref="Nvfp4BusyException"/>. Length, memory and messages can be asked for at any
    /// time: during a call or a stream they are as they were before it. A call that fails leaves the session as it was.
    /// </summary>
    public unsafe class Session : IDisposable
    {
        internal readonly SessionHandle Handle;

        /// <summary>Makes an empty session of a model.</summary>
        public Session(Model model, SessionOptions options = null)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            options = options ?? new SessionOptions();
            byte[] system = options.System == null ? null : Interop.Utf8(options.System, nameof(options));
            NativeSessionOptions raw = options.Raw;
            var retry = new Retry();
            int status;
            fixed (byte* at = system)
            {
                raw.System = at;
                raw.SystemLength = Interop.Size(system == null ? 0 : system.Length);
                do
                    status = Native.NVFP4_session_create(model.Handle, &raw, out Handle);
                while (retry.After(status));
            }
            Interop.Check(status);
            Handle.Press();
        }

        internal Session(SessionHandle handle)
        {
            Handle = handle;
            Handle.Press();
        }

        /// <summary>Makes a session as it was when it was written to a file. The model must be the one that ran it.</summary>
        public static Session Restore(Model model, string path) => new Session(RestoreHandle(model, path));

        /// <summary>How many tokens it holds.</summary>
        public long Length
        {
            get
            {
                UIntPtr length;
                Interop.Check(Native.NVFP4_session_length(Handle, &length));
                return Interop.Long(length);
            }
        }

        /// <summary>How many tokens it can hold.</summary>
        public long Context
        {
            get
            {
                UIntPtr context;
                Interop.Check(Native.NVFP4_session_context(Handle, &context));
                return Interop.Long(context);
            }
        }

        /// <summary>The bytes of its cached keys and values, those it shares with forks included.</summary>
        public ulong MemoryBytes => Handle.Memory();

        /// <summary>The tokens that it holds.</summary>
        public int[] Tokens =>
            Interop.Array<int>((buffer, capacity, count) => Native.NVFP4_session_tokens(Handle, (int*)buffer, capacity, count));

        /// <summary>The logits of the token to come, one for each token id.</summary>
        public float[] Logits =>
            Interop.Array<float>((buffer, capacity, count) => Native.NVFP4_session_logits(Handle, (float*)buffer, capacity, count));

        /// <summary>The text of the last generation, which is empty before the first. A character that it left unfinished is not part of it, and comes with the text of the next one if that completes it.</summary>
        public string Text => Interop.Text((buffer, capacity, length) => Native.NVFP4_session_text(Handle, buffer, capacity, length));

        /// <summary>What the last generation came to, or null. Streams set it at their end.</summary>
        public Generation LastGeneration { get; private set; }

        /// <summary>Appends tokens and runs them, a whole prompt in blocks.</summary>
        public void Prefill(int[] tokens, CancellationToken cancellation = default(CancellationToken))
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, false, cancellation);
        }

        /// <summary>Appends tokens and runs them one after the other, which gives the same bits more slowly.</summary>
        public void PrefillTokenByToken(int[] tokens, CancellationToken cancellation = default(CancellationToken))
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, true, cancellation);
        }

#if NETCOREAPP
        /// <summary>Appends tokens and runs them, a whole prompt in blocks.</summary>
        public void Prefill(ReadOnlySpan<int> tokens, CancellationToken cancellation = default)
        {
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, false, cancellation);
        }

        /// <summary>Appends tokens and runs them one after the other.</summary>
        public void PrefillTokenByToken(ReadOnlySpan<int> tokens, CancellationToken cancellation = default)
        {
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, true, cancellation);
        }

        /// <summary>Copies the logits of the token to come, and gives their number.</summary>
        public int CopyLogits(Span<float> destination)
        {
            UIntPtr count;
            var retry = new Retry();
            int status;
            fixed (float* at = destination)
                do
                    status = Native.NVFP4_session_logits(Handle, at, Interop.Size(destination.Length), &count);
                while (retry.After(status));
            Interop.Check(status);
            return checked((int)count.ToUInt64());
        }

        /// <summary>Generates from where the session stands, as a stream of text. See <see cref="Stream"/>.</summary>
        public IAsyncEnumerable<string> StreamAsync(GenerateOptions options = null, CancellationToken cancellation = default) =>
            new TextStream(this, (handler, token) => Generate(options, handler, token), cancellation);
#endif

        /// <summary>Appends one token and runs it.</summary>
        public void Decode(int token)
        {
            Interop.Call(() => Native.NVFP4_session_decode(Handle, token));
            Handle.Press();
        }

        /// <summary>Chooses the token to come, and does not append it. Without options it is the likeliest one.</summary>
        public int Sample(GenerateOptions options = null)
        {
            int token = 0;
            var retry = new Retry();
            int status;
            using (var pinned = new PinnedOptions(options))
            {
                NativeGenerateOptions raw = pinned.Raw;
                do
                    status = Native.NVFP4_session_sample(Handle, options == null ? null : &raw, &token);
                while (retry.After(status));
            }
            Interop.Check(status);
            return token;
        }

        /// <summary>Generates from where the session stands, which takes a prefilled prompt. <see cref="Text"/> has the text afterwards.</summary>
        /// <param name="options">Null for the defaults.</param>
        /// <param name="handler">Is given each token as it comes, on this thread; or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException. What was generated until then is kept.</param>
        public Generation Generate(GenerateOptions options = null, TokenHandler handler = null,
            CancellationToken cancellation = default(CancellationToken)) => Run(null, options, handler, cancellation);

        /// <summary>The same, on a thread of its own.</summary>
        public Task<Generation> GenerateAsync(GenerateOptions options = null, TokenHandler handler = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() => Generate(options, handler, cancellation), cancellation);

        /// <summary>
        /// Generates from where the session stands, as a stream of text: pieces of whole characters, each made when it is asked
        /// for. The generation begins with the enumeration, and ends with it: leave it early and the session holds what came.
        /// </summary>
        public IEnumerable<string> Stream(GenerateOptions options = null, CancellationToken cancellation = default(CancellationToken)) =>
            new TextStream(this, (handler, token) => Generate(options, handler, token), cancellation);

        /// <summary>Forgets the tokens from a length on.</summary>
        public void Truncate(long length)
        {
            Interop.Check(Native.NVFP4_session_truncate(Handle, Interop.Size(length)));
            Handle.Press();
        }

        /// <summary>Forgets all tokens and the conversation. The options stay.</summary>
        public void Reset()
        {
            Interop.Check(Native.NVFP4_session_reset(Handle));
            Handle.Press();
        }

        /// <summary>Makes a second session in the same state. The two share memory as far as neither writes to it.</summary>
        public Session Fork() => new Session(ForkHandle());

        /// <summary>Writes the session to a file, cache and conversation included.</summary>
        public void Save(string path)
        {
            byte[] bytes = Interop.Utf8(path, nameof(path));
            fixed (byte* at = bytes)
                Interop.Check(Native.NVFP4_session_save(Handle, at, Interop.Size(bytes.Length)));
        }

        /// <summary>Ends the call that uses the session, if there is one, soon. From any thread, and from a handler.</summary>
        public void Cancel() => Interop.Check(Native.NVFP4_session_cancel(Handle));

        /// <summary>Appends a token to each of several sessions of one model, and runs them in one pass over the weights.</summary>
        public static void Step(IList<Session> sessions, int[] tokens)
        {
            WithHandles(sessions, tokens, handles => Library.Call(() =>
            {
                fixed (IntPtr* first = handles)
                fixed (int* at = tokens)
                    return Native.NVFP4_session_step(first, at, Interop.Size(handles.Length));
            }));
        }

        /// <summary>
        /// The same, and returns the token to come of each session, which is not appended: to generate, it is the token of the next
        /// step. On a GPU no logits come to the host. Without options it is the likeliest one.
        /// </summary>
        public static int[] StepSample(IList<Session> sessions, int[] tokens, GenerateOptions options = null)
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            var each = new GenerateOptions[tokens.Length];
            for (int i = 0; i < each.Length; i++)
                each[i] = options;
            return StepSample(sessions, tokens, each);
        }

        /// <summary>The same with options for each session; one that is null takes the likeliest token.</summary>
        public static int[] StepSample(IList<Session> sessions, int[] tokens, IList<GenerateOptions> options)
        {
            if (options == null)
                throw new ArgumentNullException(nameof(options));
            var next = new int[tokens == null ? 0 : tokens.Length];
            if (options.Count != next.Length)
                throw new ArgumentException(options.Count + " options for " + next.Length + " tokens", nameof(options));
            // What concerns stops has no part in it, so there is nothing to pin but the numbers.
            var raw = new NativeGenerateOptions[next.Length];
            for (int i = 0; i < raw.Length; i++)
                raw[i] = (options[i] ?? new GenerateOptions()).Raw;
            WithHandles(sessions, tokens, handles => Library.Call(() =>
            {
                var each = new IntPtr[raw.Length];
                fixed (NativeGenerateOptions* one = raw)
                fixed (IntPtr* all = each)
                fixed (IntPtr* first = handles)
                fixed (int* at = tokens)
                fixed (int* to = next)
                {
                    for (int i = 0; i < raw.Length; i++)
                        each[i] = (IntPtr)(one + i);
                    return Native.NVFP4_session_step_sample(first, at, Interop.Size(handles.Length), (NativeGenerateOptions**)all, to);
                }
            }));
            return next;
        }

        static void WithHandles(IList<Session> sessions, int[] tokens, Action<IntPtr[]> call)
        {
            if (sessions == null)
                throw new ArgumentNullException(nameof(sessions));
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            if (sessions.Count != tokens.Length)
                throw new ArgumentException(tokens.Length + " tokens for " + sessions.Count + " sessions", nameof(tokens));
            IntPtr[] handles = new IntPtr[sessions.Count];
            int added = 0;
            try
            {
                for (; added < handles.Length; added++)
                {
                    bool done = false;
                    sessions[added].Handle.DangerousAddRef(ref done);
                    handles[added] = sessions[added].Handle.DangerousGetHandle();
                }
                call(handles);
                foreach (Session session in sessions)
                    session.Handle.Press();
            }
            finally
            {
                while (added > 0)
                    sessions[--added].Handle.DangerousRelease();
            }
        }

        /// <summary>
        /// Gives up the session, and cancels a call that is using it as <see cref="Cancel"/> does. What needs the session after that,
        /// as a stream does for its next piece and <see cref="ChatSession.Ask"/> for its text, is an ObjectDisposedException.
        /// </summary>
        public void Dispose()
        {
            Handle.Dispose();
            GC.SuppressFinalize(this);
        }

        internal SessionHandle ForkHandle()
        {
            SessionHandle handle = null;
            Interop.Call(() => Native.NVFP4_session_fork(Handle, out handle));
            return handle;
        }

        internal static SessionHandle RestoreHandle(Model model, string path)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            byte[] bytes = Interop.Utf8(path, nameof(path));
            SessionHandle handle = null;
            Interop.Call(() =>
            {
                fixed (byte* at = bytes)
                    return Native.NVFP4_session_restore(model.Handle, at, Interop.Size(bytes.Length), out handle);
            });
            return handle;
        }

        /// Generates, after a turn of the user's if there is one.
        internal Generation Run(string turn, GenerateOptions options, TokenHandler handler, CancellationToken cancellation)
        {
            byte[] text = turn == null ? null : Interop.Utf8(turn, nameof(turn));
            NativeGenerationResult result = default(NativeGenerationResult);
            result.StructSize = (uint)sizeof(NativeGenerationResult);
            using (var call = new TokenCall(Handle, handler, cancellation))
            using (var pinned = new PinnedOptions(options))
            {
                NativeGenerateOptions raw = pinned.Raw;
                NativeGenerateOptions* chosen = options == null ? null : &raw;
                var retry = new Retry();
                int status;
                using (CancelWith(cancellation))
                fixed (byte* at = text)
                    do
                    {
                        call.Begin();
                        status = text == null
                            ? Native.NVFP4_session_generate(Handle, chosen, TokenCall.Callback, call.User, &result)
                            : Native.NVFP4_session_chat(Handle, at, Interop.Size(text.Length), chosen, TokenCall.Callback, call.User, &result);
                    }
                    while (retry.After(status));
                if (status == (int)Status.Ok)
                {
                    Handle.Press();
                    LastGeneration = new Generation(result);
                }
                call.Finish(status, status == (int)Status.Ok && result.Finish == (int)FinishReason.Cancelled);
            }
            return LastGeneration;
        }

        void Prefill(int* tokens, int count, bool single, CancellationToken cancellation)
        {
            var retry = new Retry();
            int status;
            using (CancelWith(cancellation))
                do
                {
                    cancellation.ThrowIfCancellationRequested();
                    status = single
                        ? Native.NVFP4_session_prefill_token_by_token(Handle, tokens, Interop.Size(count))
                        : Native.NVFP4_session_prefill(Handle, tokens, Interop.Size(count));
                }
                while (retry.After(status));
            if (status == (int)Status.Cancelled)
                cancellation.ThrowIfCancellationRequested();
            Interop.Check(status);
            Handle.Press();
        }

        /// Disposing of it waits until the token's thread is done with the session, so that it cannot end a later call.
        CancellationTokenRegistration CancelWith(CancellationToken cancellation) =>
            cancellation.CanBeCanceled ? cancellation.Register(Handle.Cancel) : default(CancellationTokenRegistration);
    }
}
