// Sessions: sequences of tokens with their cached keys and values, and what a model generates from where they stand.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>Receives each token when it is generated, with the text that it completes, and text without a token. Returns false to end the generation, which keeps that token.</summary>
    public delegate bool TokenHandler(TokenEvent piece);

    /// <summary>A token with the natural logarithm of its probability by the model's own logits.</summary>
    public struct TokenProbability
    {
        internal TokenProbability(int token, float logProbability)
        {
            Token = token;
            LogProbability = logProbability;
        }

        /// <summary>The token.</summary>
        public int Token { get; }

        /// <summary>The natural logarithm of its probability.</summary>
        public float LogProbability { get; }

        internal static unsafe TokenProbability[] Read(int* tokens, float* values, UIntPtr count)
        {
            var all = new TokenProbability[checked((int)count.ToUInt64())];
            for (int i = 0; i < all.Length; i++)
                all[i] = new TokenProbability(tokens[i], values[i]);
            return all;
        }
    }

    /// <summary>A continuation, as a model predicts it: see <see cref="Session.Score"/>.</summary>
    public sealed class ContinuationScore
    {
        internal ContinuationScore(float[] logProbabilities, bool[] isArgmax)
        {
            LogProbabilities = logProbabilities;
            IsArgmax = isArgmax;
        }

        /// <summary>The natural logarithm of each token's probability after the tokens before it; NaN for a token that no other stands before.</summary>
        public IReadOnlyList<float> LogProbabilities { get; }

        /// <summary>Whether each token is the argmax.</summary>
        public IReadOnlyList<bool> IsArgmax { get; }
    }

    /// <summary>A token or a piece of text of a generation.</summary>
    public struct TokenEvent
    {
        internal unsafe TokenEvent(NativeTokenEvent* raw)
        {
            Kind = (TokenEventKind)raw->Kind;
            Token = raw->Token;
            Text = Interop.Read(raw->Text, raw->TextLength);
            LogProbability = raw->LogProbability;
            Part = (Part)raw->Part;
            Top = raw->TopCount == UIntPtr.Zero ? None : TokenProbability.Read(raw->TopTokens, raw->TopLogProbabilities, raw->TopCount);
        }

        internal unsafe TokenEvent(NativeQueueEvent* raw)
        {
            Kind = (TokenEventKind)raw->Kind;
            Token = raw->Token;
            Text = Interop.Read(raw->Text, raw->TextLength);
            LogProbability = raw->LogProbability;
            Part = (Part)raw->Part;
            Top = raw->TopCount == UIntPtr.Zero ? None : TokenProbability.Read(raw->TopTokens, raw->TopLogProbabilities, raw->TopCount);
        }

        static readonly TokenProbability[] None = new TokenProbability[0];

        /// <summary>Whether it is a token.</summary>
        public TokenEventKind Kind { get; }

        /// <summary>The token, or -1 if there is none.</summary>
        public int Token { get; }

        /// <summary>Whole characters; empty while a character, or a possible stop string or marker of the model, is incomplete.</summary>
        public string Text { get; }

        /// <summary>The kind of text that this is, or that is to come.</summary>
        public Part Part { get; }

        /// <summary>The natural logarithm of the token's probability by the model's own logits, before temperature, penalties and filters; NaN unless <see cref="GenerateOptions.LogProbabilities"/> asks for it.</summary>
        public float LogProbability { get; }

        /// <summary>The most probable tokens, in descending order, as many as <see cref="GenerateOptions.TopLogProbabilities"/> asks for.</summary>
        public IReadOnlyList<TokenProbability> Top { get; }
    }

    /// <summary>The result of a generation.</summary>
    public sealed class Generation
    {
        internal Generation(NativeGenerationResult result)
        {
            Finish = (FinishReason)result.Finish;
            PromptTokens = Interop.Long(result.PromptTokens);
            GeneratedTokens = Interop.Long(result.GeneratedTokens);
            Queued = Time(result.QueueSeconds);
            Prefill = Time(result.PrefillSeconds);
            FirstToken = Time(result.FirstTokenSeconds);
            Decode = Time(result.DecodeSeconds);
            LongestGap = Time(result.LongestGapSeconds);
            Seed = result.Seed;
            ToolCalls = checked((int)result.ToolCalls.ToUInt64());
            EvictedTokens = Interop.Long(result.EvictedTokens);
            CachedTokens = Interop.Long(result.CachedTokens);
            DraftedTokens = Interop.Long(result.DraftedTokens);
            AcceptedTokens = Interop.Long(result.AcceptedTokens);
            Preemptions = Interop.Long(result.Preemptions);
        }

        private static TimeSpan Time(double seconds)
        {
            return TimeSpan.FromTicks((long)(seconds * TimeSpan.TicksPerSecond));
        }

        /// <summary>Why it ended.</summary>
        public FinishReason Finish { get; }

        /// <summary>Tokens before the first generated one: all those in the session, or in a chat those that the turn added.</summary>
        public long PromptTokens { get; }

        /// <summary>Tokens generated.</summary>
        public long GeneratedTokens { get; }

        /// <summary>Time from the call, or from the submission to a queue, to the beginning of the first pass over the weights: for which it waited for its turn in the queue, for memory, and for passes of other generations.</summary>
        public TimeSpan Queued { get; }

        /// <summary>Time from the beginning of the first pass over the weights to the first token, which runs the part of the prompt that was not cached. Zero if no pass had to run for it.</summary>
        public TimeSpan Prefill { get; }

        /// <summary>Time from the call, or from the submission to a queue, to the first token.</summary>
        public TimeSpan FirstToken { get; }

        /// <summary>Time from the first token to the end. For a stream it includes the time that its reader took.</summary>
        public TimeSpan Decode { get; }

        /// <summary>The longest time from one token to the next, the reader's own time included; zero with fewer than two tokens.</summary>
        public TimeSpan LongestGap { get; }

        /// <summary>The seed of the draws; the same seed repeats them.</summary>
        public ulong Seed { get; }

        /// <summary>Number of tool calls in the answer, which <see cref="ChatSession.ToolCalls"/> has.</summary>
        public int ToolCalls { get; }

        /// <summary>Tokens that eviction has dropped for the generation and its prompt, because the context was full.</summary>
        public long EvictedTokens { get; }

        /// <summary>Tokens of <see cref="PromptTokens"/> that did not run, because the session held their keys and values already, or another prompt with the same prefix.</summary>
        public long CachedTokens { get; }

        /// <summary>Tokens that a drafter, a lookup or a draft model proposed: <see cref="GenerateOptions.Drafts"/>, <see cref="GenerateOptions.PromptLookup"/>, <see cref="GenerateOptions.DraftModel"/>.</summary>
        public long DraftedTokens { get; }

        /// <summary>Proposed tokens that the model itself chose, each of which saved a step.</summary>
        public long AcceptedTokens { get; }

        /// <summary>How often the generation gave its memory up to others, and ran its tokens again.</summary>
        public long Preemptions { get; }
    }

    /// <summary>
    /// A sequence of tokens that a model runs, with its cached keys and values. One call at a time may use it: another one
    /// meanwhile, from a handler too, is an <see cref="Nvfp4BusyException"/>. Length, memory and messages can be asked for at any
    /// time: during a call or a stream they are as they were before it. A call that fails leaves the session as it was.
    /// </summary>
    public unsafe class Session : IDisposable
    {
        internal readonly SessionHandle Handle;

        /// <summary>Creates an empty session of a model.</summary>
        public Session(Model model, SessionOptions options = null)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            options = options ?? new SessionOptions();
            byte[] system = options.System == null ? null : Interop.Utf8(options.System, nameof(options));
            NativeSessionOptions raw = options.Raw;
            AdapterHandle adapter = options.Adapter?.Handle;
            bool holdsAdapter = false;
            var retry = new Retry();
            int status;
            try
            {
                adapter?.DangerousAddRef(ref holdsAdapter);
                raw.Adapter = adapter == null ? IntPtr.Zero : adapter.DangerousGetHandle();
                fixed (byte* at = system)
                {
                    raw.System = at;
                    raw.SystemLength = Interop.Size(system == null ? 0 : system.Length);
                    do
                        status = Native.NVFP4_session_create(model.Handle, &raw, out Handle);
                    while (retry.After(status));
                }
            }
            finally
            {
                if (holdsAdapter)
                    adapter.DangerousRelease();
            }
            Interop.Check(status);
            Handle.Press();
        }

        internal Session(SessionHandle handle)
        {
            Handle = handle;
            Handle.Press();
        }

        /// <summary>Creates a session from a file of Save, in the state that was saved. The model must be the one that ran it, with the session's adapter, if it has one, loaded.</summary>
        /// <param name="model">The model.</param>
        /// <param name="path">The file.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static Session Restore(Model model, string path, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            new Session(RestoreHandle(model, path, progress, cancellation));

        /// <summary>Creates a session from what ToBytes gave, or from the bytes of a file of Save, in the state that was saved.</summary>
        /// <param name="model">The model that ran it.</param>
        /// <param name="state">The bytes.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static Session FromBytes(Model model, byte[] state, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            new Session(BytesHandle(model, state, progress, cancellation));

        /// <summary>The number of tokens in it.</summary>
        public long Length
        {
            get
            {
                UIntPtr length;
                Interop.Check(Native.NVFP4_session_length(Handle, &length));
                return Interop.Long(length);
            }
        }

        /// <summary>The most tokens that it can hold.</summary>
        public long Context
        {
            get
            {
                UIntPtr context;
                Interop.Check(Native.NVFP4_session_context(Handle, &context));
                return Interop.Long(context);
            }
        }

        /// <summary>The number of tokens that eviction has dropped, because the context was full; during a call, the number from before it.</summary>
        public long Evicted
        {
            get
            {
                UIntPtr count;
                Interop.Check(Native.NVFP4_session_evicted(Handle, &count));
                return Interop.Long(count);
            }
        }

        /// <summary>The bytes of its KV cache, including those it shares with forks.</summary>
        public ulong MemoryBytes => Handle.Memory();

        /// <summary>The tokens in it.</summary>
        public int[] Tokens =>
            Interop.Array<int>((buffer, capacity, count) => Native.NVFP4_session_tokens(Handle, (int*)buffer, capacity, count));

        /// <summary>The logits of the next token, one for each token id.</summary>
        public float[] Logits => GetLogits();

        /// <summary>The text of the last generation, of a chat the answer without its reasoning, which is empty before the first. A character that it left unfinished is not part of it, and comes with the text of the next one if that completes it.</summary>
        public string Text => Interop.Text((buffer, capacity, length) => Native.NVFP4_session_text(Handle, buffer, capacity, length));

        /// <summary>The result of the last generation, or null. Streams and queues set it at their end.</summary>
        public Generation LastGeneration { get; private set; }

        /// <summary>Appends tokens and runs them, many at a time: the prefill of a prompt.</summary>
        /// <param name="tokens">The tokens.</param>
        /// <param name="progress">Is told how many of them are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException. The session is as it was, then.</param>
        public void Prefill(int[] tokens, ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken))
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, false, progress, cancellation);
        }

        /// <summary>Appends tokens and runs them one after the other, which gives the same bits more slowly.</summary>
        /// <param name="tokens">The tokens.</param>
        /// <param name="progress">Is told how many of them are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException. The session is as it was, then.</param>
        public void PrefillTokenByToken(int[] tokens, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, true, progress, cancellation);
        }

#if NETCOREAPP
        /// <summary>Appends tokens and runs them, many at a time: the prefill of a prompt.</summary>
        public void Prefill(ReadOnlySpan<int> tokens, ProgressHandler progress = null, CancellationToken cancellation = default)
        {
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, false, progress, cancellation);
        }

        /// <summary>Appends tokens and runs them one after the other.</summary>
        public void PrefillTokenByToken(ReadOnlySpan<int> tokens, ProgressHandler progress = null, CancellationToken cancellation = default)
        {
            fixed (int* at = tokens)
                Prefill(at, tokens.Length, true, progress, cancellation);
        }

        /// <summary>Copies the logits of the next token, and gives their number.</summary>
        public int CopyLogits(Span<float> destination, CancellationToken cancellation = default)
        {
            UIntPtr count;
            using (var call = new Call(cancellation, null, Handle))
            {
                var retry = new Retry();
                int status;
                fixed (float* at = destination)
                    do
                        status = Native.NVFP4_session_logits(Handle, at, Interop.Size(destination.Length), &count, call.Options);
                    while (retry.After(status));
                call.Finish(status);
            }
            return checked((int)count.ToUInt64());
        }

        /// <summary>Generates after the tokens in the session, as a stream of text. See <see cref="Stream"/>.</summary>
        public IAsyncEnumerable<string> StreamAsync(GenerateOptions options = null, CancellationToken cancellation = default) =>
            new TextStream(this, (handler, token) => Generate(options, handler, token), cancellation);
#endif

        /// <summary>Appends one token and runs it: a decode step. Tokens before it that have not been run yet are run too: the last token of a generation, or those that remain after an eviction.</summary>
        public void Decode(int token, CancellationToken cancellation = default(CancellationToken))
        {
            using (var call = new Call(cancellation, null, Handle))
                call.Finish(Interop.Try(() => Native.NVFP4_session_decode(Handle, token, call.Options)));
            Handle.Press();
        }

        /// <summary>The logits of the next token, one for each token id. Runs tokens that have not been run yet, as <see cref="Decode"/> does.</summary>
        public float[] GetLogits(CancellationToken cancellation = default(CancellationToken))
        {
            using (var call = new Call(cancellation, null, Handle))
                return Interop.Array<float>((buffer, capacity, count) =>
                    Native.NVFP4_session_logits(Handle, (float*)buffer, capacity, count, call.Options), call);
        }

        /// <summary>Chooses the next token, without appending it. Without options it is the argmax.</summary>
        public int Sample(GenerateOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            int token = 0;
            using (var call = new Call(cancellation, options?.Progress, Handle))
            using (var pinned = new PinnedOptions(options ?? new GenerateOptions()))
            {
                NativeGenerateOptions raw = pinned.Raw;
                raw.Call = call.Options;
                var retry = new Retry();
                int status;
                do
                    status = Native.NVFP4_session_sample(Handle, &raw, &token);
                while (retry.After(status));
                pinned.Throw();
                call.Finish(status);
            }
            return token;
        }

        /// <summary>Gives the log-probabilities of continuations, each as if it stood alone after the tokens of the session, which keeps its tokens. With an empty session they are whole texts.</summary>
        /// <param name="continuations">Tokens of each.</param>
        /// <param name="progress">Is told how many of them are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public ContinuationScore[] Score(IEnumerable<int[]> continuations, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (continuations == null)
                throw new ArgumentNullException(nameof(continuations));
            using (var pinned = new PinnedTexts(continuations))
            {
                var values = new float[pinned.Total];
                var argmaxes = new int[pinned.Total];
                using (var call = new Call(cancellation, progress, Handle))
                    call.Finish(Interop.Try(() =>
                    {
                        fixed (float* value = values)
                        fixed (int* argmax = argmaxes)
                            return Native.NVFP4_session_score(Handle, pinned.Texts, pinned.Lengths, Interop.Size(pinned.Count), call.Options,
                                value, argmax);
                    }));
                Handle.Press();
                return pinned.Divide(values, argmaxes);
            }
        }

        /// <summary>The token that the last <see cref="Sample"/> or step chose for this session, and then the most probable ones; empty unless its options asked for log-probabilities.</summary>
        public TokenProbability[] TopLogProbabilities
        {
            get
            {
                int[] tokens = Interop.Array<int>((buffer, capacity, count) =>
                    Native.NVFP4_session_top_log_probabilities(Handle, (int*)buffer, null, capacity, count));
                float[] values = Interop.Array<float>((buffer, capacity, count) =>
                    Native.NVFP4_session_top_log_probabilities(Handle, null, (float*)buffer, capacity, count));
                fixed (int* ids = tokens)
                fixed (float* each = values)
                    return TokenProbability.Read(ids, each, Interop.Size(tokens.Length));
            }
        }

        /// <summary>Generates after the tokens in the session, which must not be empty: prefill a prompt first. <see cref="Text"/> has the text afterwards.</summary>
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

        /// <summary>Drops the tokens from a position on.</summary>
        public void Truncate(long length)
        {
            Interop.Check(Native.NVFP4_session_truncate(Handle, Interop.Size(length)));
            Handle.Press();
        }

        /// <summary>Drops all tokens and the conversation. The options stay.</summary>
        public void Reset()
        {
            Interop.Check(Native.NVFP4_session_reset(Handle));
            Handle.Press();
        }

        /// <summary>Creates a second session in the same state. The two share memory as far as neither writes to it. A session that generates goes on, and its fork has the tokens so far.</summary>
        public Session Fork() => new Session(ForkHandle());

        /// <summary>Writes the session to a file, including its KV cache and conversation. An existing file is replaced only when the new one is complete.</summary>
        /// <param name="path">The file.</param>
        /// <param name="progress">Is told how many bytes are written, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public void Save(string path, ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken))
        {
            byte[] bytes = Interop.Utf8(path, nameof(path));
            using (var call = new Call(cancellation, progress, Handle))
                fixed (byte* at = bytes)
                    call.Finish(Native.NVFP4_session_save(Handle, at, Interop.Size(bytes.Length), call.Options));
        }

        /// <summary>The bytes of a file of Save, as many as an array holds: under 2 GB.</summary>
        /// <param name="progress">Is told how many bytes are written, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public byte[] ToBytes(ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken))
        {
            for (;;)
            {
                UIntPtr length = UIntPtr.Zero;
                Interop.Check(Native.NVFP4_session_save_bytes(Handle, null, UIntPtr.Zero, &length, null));
                byte[] state = new byte[checked((int)length.ToUInt64())];
                using (var call = new Call(cancellation, progress, Handle))
                    fixed (byte* at = state)
                    {
                        int status = Native.NVFP4_session_save_bytes(Handle, at, Interop.Size(state.Length), &length, call.Options);
                        // It may have grown in between.
                        if (status == (int)Status.BufferTooSmall)
                            continue;
                        call.Finish(status);
                    }
                return state;
            }
        }

        /// <summary>
        /// Ends the call that uses the session, or its generation in a <see cref="Queue"/>, if there is one, soon: a generation with what it
        /// has, anything else with an <see cref="Nvfp4CancelledException"/>. From any thread, and from a handler. What begins later is not
        /// ended, nor is a step of several sessions, which its token ends.
        /// </summary>
        public void Cancel() => Handle.Cancel();

        /// <summary>Appends a token to each of several sessions of one model, and runs them in one pass over the weights. If it fails, all are unchanged.</summary>
        public static void Step(IList<Session> sessions, int[] tokens, CancellationToken cancellation = default(CancellationToken)) =>
            Step(sessions, tokens, null, cancellation);

        /// <summary>
        /// The same, where a session that cannot take its token does not keep the others from being run: it is disposed of or in use,
        /// its context is full, it is there twice, or the token is none of the model's. It stays as it is.
        /// </summary>
        /// <param name="sessions">The sessions.</param>
        /// <param name="tokens">A token for each.</param>
        /// <param name="statuses">Why each session was left out; <see cref="Status.Ok"/> for those that were run.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static void Step(IList<Session> sessions, int[] tokens, out Status[] statuses,
            CancellationToken cancellation = default(CancellationToken))
        {
            statuses = new Status[tokens == null ? 0 : tokens.Length];
            Step(sessions, tokens, statuses, cancellation);
        }

        static void Step(IList<Session> sessions, int[] tokens, Status[] statuses, CancellationToken cancellation) =>
            WithHandles(sessions, tokens, statuses, cancellation, (handles, call) =>
            {
                fixed (IntPtr* first = handles)
                fixed (int* at = tokens)
                fixed (Status* told = statuses)
                    return Native.NVFP4_session_step(first, at, Interop.Size(handles.Length), call, (int*)told);
            });

        /// <summary>
        /// The same, and returns the next token of each session, which is not appended: to generate, it is the token of the next
        /// step, until a <see cref="Detokenizer"/> says that the text has ended. On a GPU no logits come to the host. Without options
        /// it is the argmax.
        /// </summary>
        public static int[] StepSample(IList<Session> sessions, int[] tokens, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            StepSample(sessions, tokens, ForEach(options, tokens), null, cancellation);

        /// <summary>The same with options for each session; null takes the argmax.</summary>
        public static int[] StepSample(IList<Session> sessions, int[] tokens, IList<GenerateOptions> options,
            CancellationToken cancellation = default(CancellationToken)) => StepSample(sessions, tokens, options, null, cancellation);

        /// <summary>The same with a status for each session, as <see cref="Step(IList{Session}, int[], out Status[], CancellationToken)"/> gives it. The token of one that was not run is -1.</summary>
        public static int[] StepSample(IList<Session> sessions, int[] tokens, IList<GenerateOptions> options, out Status[] statuses,
            CancellationToken cancellation = default(CancellationToken))
        {
            statuses = new Status[tokens == null ? 0 : tokens.Length];
            return StepSample(sessions, tokens, options ?? ForEach(null, tokens), statuses, cancellation);
        }

        static GenerateOptions[] ForEach(GenerateOptions options, int[] tokens)
        {
            var each = new GenerateOptions[tokens == null ? 0 : tokens.Length];
            for (int i = 0; i < each.Length; i++)
                each[i] = options;
            return each;
        }

        static int[] StepSample(IList<Session> sessions, int[] tokens, IList<GenerateOptions> options, Status[] statuses,
            CancellationToken cancellation)
        {
            if (options == null)
                throw new ArgumentNullException(nameof(options));
            var next = new int[tokens == null ? 0 : tokens.Length];
            if (options.Count != next.Length)
                throw new ArgumentException(options.Count + " options for " + next.Length + " tokens", nameof(options));
            var raw = new NativeGenerateOptions[next.Length];
            var pinned = new List<PinnedOptions>();
            try
            {
                for (int i = 0; i < raw.Length; i++)
                {
                    pinned.Add(new PinnedOptions(options[i] ?? new GenerateOptions()));
                    raw[i] = pinned[i].Raw;
                    next[i] = -1;
                }
                try
                {
                    StepSample(sessions, tokens, raw, next, statuses, cancellation);
                }
                finally
                {
                    foreach (PinnedOptions one in pinned)
                        one.Throw();
                }
            }
            finally
            {
                foreach (PinnedOptions one in pinned)
                    one.Dispose();
            }
            return next;
        }

        static void StepSample(IList<Session> sessions, int[] tokens, NativeGenerateOptions[] raw, int[] next, Status[] statuses,
            CancellationToken cancellation)
        {
            WithHandles(sessions, tokens, statuses, cancellation, (handles, call) =>
            {
                var each = new IntPtr[raw.Length];
                fixed (NativeGenerateOptions* one = raw)
                fixed (IntPtr* all = each)
                fixed (IntPtr* first = handles)
                fixed (int* at = tokens, to = next)
                fixed (Status* told = statuses)
                {
                    for (int i = 0; i < raw.Length; i++)
                        each[i] = (IntPtr)(one + i);
                    return Native.NVFP4_session_step_sample(first, at, Interop.Size(handles.Length), (NativeGenerateOptions**)all, call,
                        to, (int*)told);
                }
            });
        }

        delegate int StepCall(IntPtr[] sessions, NativeCallOptions* call);

        /// Holds the sessions for a step. One that was disposed of is a NULL where there are statuses, which then say so.
        static void WithHandles(IList<Session> sessions, int[] tokens, Status[] statuses, CancellationToken cancellation, StepCall step)
        {
            if (sessions == null)
                throw new ArgumentNullException(nameof(sessions));
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            if (sessions.Count != tokens.Length)
                throw new ArgumentException(tokens.Length + " tokens for " + sessions.Count + " sessions", nameof(tokens));
            var handles = new IntPtr[sessions.Count];
            var held = new List<SessionHandle>();
            try
            {
                for (int i = 0; i < handles.Length; i++)
                {
                    SessionHandle handle = sessions[i].Handle;
                    bool added = false;
                    try
                    {
                        handle.DangerousAddRef(ref added);
                    }
                    catch (ObjectDisposedException) when (statuses != null)
                    {
                        continue;
                    }
                    held.Add(handle);
                    handles[i] = handle.DangerousGetHandle();
                }
                using (var call = new Call(cancellation))
                    call.Finish(Library.Try(() => step(handles, call.Options)));
                foreach (SessionHandle handle in held)
                    handle.Press();
            }
            finally
            {
                foreach (SessionHandle handle in held)
                    handle.DangerousRelease();
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

        internal static SessionHandle RestoreHandle(Model model, string path, ProgressHandler progress, CancellationToken cancellation) =>
            Restored(Native.NVFP4_session_restore, model, Interop.Utf8(path, nameof(path)), progress, cancellation);

        internal static SessionHandle BytesHandle(Model model, byte[] state, ProgressHandler progress, CancellationToken cancellation) =>
            Restored(Native.NVFP4_session_restore_bytes, model, state ?? throw new ArgumentNullException(nameof(state)), progress, cancellation);

        delegate int Restoring(ModelHandle model, byte* at, UIntPtr length, NativeCallOptions* call, out SessionHandle handle);

        /// A session from a path or from its state, by a function of the library that takes that.
        static SessionHandle Restored(Restoring restore, Model model, byte[] bytes, ProgressHandler progress, CancellationToken cancellation)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            SessionHandle handle = null;
            using (var call = new Call(cancellation, progress))
                call.Finish(Interop.Try(() =>
                {
                    fixed (byte* at = bytes)
                        return restore(model.Handle, at, Interop.Size(bytes.Length), call.Options, out handle);
                }));
            return handle;
        }

        /// Generates, the answer to a turn if there is one.
        internal Generation Run(Turn turn, GenerateOptions options, TokenHandler handler, CancellationToken cancellation)
        {
            NativeGenerationResult result = default(NativeGenerationResult);
            result.StructSize = (uint)sizeof(NativeGenerationResult);
            options = options ?? new GenerateOptions();
            using (var call = new TokenCall(Handle, handler, options.Progress, cancellation))
            using (var pinned = new PinnedOptions(options))
            {
                NativeGenerateOptions raw = pinned.Raw;
                raw.Call = call.Options;
                var retry = new Retry();
                int status;
                do
                {
                    call.Begin();
                    status = turn == null
                        ? Native.NVFP4_session_generate(Handle, &raw, TokenCall.Callback, call.User, &result)
                        : turn.Run(Handle, &raw, call.User, &result);
                }
                while (retry.After(status));
                if (status == (int)Status.Ok)
                {
                    Handle.Press();
                    LastGeneration = new Generation(result);
                }
                pinned.Throw();
                call.Finish(status, status == (int)Status.Ok && result.Finish == (int)FinishReason.Cancelled);
            }
            return LastGeneration;
        }

        /// The result of a generation that a queue has run, and that has ended.
        internal Generation TakeResult()
        {
            LastGeneration = null;
            var result = new NativeGenerationResult { StructSize = (uint)sizeof(NativeGenerationResult) };
            Interop.Check(Native.NVFP4_session_result(Handle, &result));
            Handle.Press();
            return LastGeneration = new Generation(result);
        }

        void Prefill(int* tokens, int count, bool single, ProgressHandler progress, CancellationToken cancellation)
        {
            using (var call = new Call(cancellation, progress, Handle))
                call.Finish(Interop.Try(() => single
                    ? Native.NVFP4_session_prefill_token_by_token(Handle, tokens, Interop.Size(count), call.Options)
                    : Native.NVFP4_session_prefill(Handle, tokens, Interop.Size(count), call.Options)));
            Handle.Press();
        }
    }
}
