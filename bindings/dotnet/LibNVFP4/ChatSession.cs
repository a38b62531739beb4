// Conversations: a session whose turns are spelled as the model's chat template says.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// The input of a turn: the user's text, or a whole conversation.
    internal sealed unsafe class Turn
    {
        readonly byte[] text;
        readonly bool isConversation;
        readonly ChatOptions options;

        internal Turn(string text, bool isConversation, ChatOptions options)
        {
            this.text = Interop.Utf8(text, isConversation ? "messages" : nameof(text));
            this.isConversation = isConversation;
            this.options = options;
        }

        internal int Run(SessionHandle session, NativeGenerateOptions* generate, IntPtr user, NativeGenerationResult* result) =>
            ChatOptions.Use(options, chat =>
            {
                fixed (byte* at = text)
                    return isConversation
                        ? Native.NVFP4_session_chat_messages(session, at, Interop.Size(text.Length), chat, generate, TokenCall.Callback,
                            user, result)
                        : Native.NVFP4_session_chat(session, at, Interop.Size(text.Length), chat, generate, TokenCall.Callback, user,
                            result);
            });

        internal int Submit(QueueHandle queue, SessionHandle session, NativeGenerateOptions* generate, NativeSubmitOptions* submit,
            ulong* generation) =>
            ChatOptions.Use(options, chat =>
            {
                fixed (byte* at = text)
                    return isConversation
                        ? Native.NVFP4_queue_chat_messages(queue, session, at, Interop.Size(text.Length), chat, generate, submit, generation)
                        : Native.NVFP4_queue_chat(queue, session, at, Interop.Size(text.Length), chat, generate, submit, generation);
            });
    }

    /// <summary>
    /// A conversation with a model. Only what a turn adds or changes is run. Tokens are drawn as the model recommends, as far as a
    /// turn's options do not say otherwise. Streams and texts are the answer alone; handlers are given its other parts too. What is
    /// said of <see cref="Session"/> holds here as well.
    /// </summary>
    public sealed unsafe class ChatSession : Session
    {
        readonly GenerateOptions drawn;

        /// <summary>Makes an empty conversation.</summary>
        /// <param name="model">Who answers.</param>
        /// <param name="system">What the model is told first about its role; null for what the options say.</param>
        /// <param name="options">Null for the defaults.</param>
        /// <param name="turns">What <see cref="Turns"/> begins with; null for the defaults.</param>
        public ChatSession(Model model, string system = null, SessionOptions options = null, ChatOptions turns = null)
            : base(model, (options ?? new SessionOptions()).With(system))
        {
            drawn = GenerateOptions.From(model);
            Turns = turns ?? new ChatOptions();
        }

        ChatSession(SessionHandle handle, GenerateOptions drawn, ChatOptions turns) : base(handle)
        {
            this.drawn = drawn;
            Turns = turns;
        }

        /// <summary>Makes a conversation as it was when it was written to a file. Its <see cref="Turns"/> is null.</summary>
        /// <param name="model">The model that ran it.</param>
        /// <param name="path">The file.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static new ChatSession Restore(Model model, string path, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            new ChatSession(RestoreHandle(model, path, progress, cancellation), GenerateOptions.From(model), null);

        /// <summary>Makes a conversation as it was when <see cref="Session.ToBytes"/> gave its bytes. Its <see cref="Turns"/> is null.</summary>
        /// <param name="model">The model that ran it.</param>
        /// <param name="state">The bytes, which may be those of a file.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static new ChatSession FromBytes(Model model, byte[] state, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            new ChatSession(BytesHandle(model, state, progress, cancellation), GenerateOptions.From(model), null);

        /// <summary>Makes a second conversation in the same state.</summary>
        public new ChatSession Fork() => new ChatSession(ForkHandle(), drawn, Turns?.Clone());

        /// <summary>How turns are written and answered that are not told otherwise; null for what held in the turn before.</summary>
        public ChatOptions Turns { get; set; }

        /// <summary>What was said until now; during a turn, what was said before it.</summary>
        public IList<ChatMessage> Messages => ChatMessage.List(MessagesJson);

        /// <summary>The same as JSON.</summary>
        public string MessagesJson =>
            Interop.Text((buffer, capacity, length) => Native.NVFP4_session_messages(Handle, buffer, capacity, length));

        /// <summary>The model's reasoning before the last answer; empty if there was none.</summary>
        public string Reasoning =>
            Interop.Text((buffer, capacity, length) => Native.NVFP4_session_reasoning(Handle, buffer, capacity, length));

        /// <summary>The tool calls in the last answer. Pass their results as <see cref="ChatMessage.ToolResult"/>.</summary>
        public IList<ToolCall> ToolCalls => ToolCall.List(Json.List(
            Interop.Text((buffer, capacity, length) => Native.NVFP4_session_tool_calls(Handle, buffer, capacity, length))));

        /// <summary>Says something and waits for the answer.</summary>
        /// <param name="text">What the user says.</param>
        /// <param name="options">How to generate; null for the defaults.</param>
        /// <param name="onText">Is given the answer as it comes, on this thread; or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        /// <param name="turn">How the turn is written and answered; null for <see cref="Turns"/>.</param>
        public string Ask(string text, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Answer(new Turn(text, false, turn ?? Turns), options, onText, cancellation);

        /// <summary>The same, on a thread of its own.</summary>
        public Task<string> AskAsync(string text, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Interop.OnThread(() => Ask(text, options, onText, cancellation, turn), cancellation);

        /// <summary>Answers a whole conversation: a JSON array of messages, as chat servers take them. Of what the session holds that with which the conversation begins stays.</summary>
        /// <param name="messages">Objects with role and content, and where they belong reasoning_content, tool_calls and tool_call_id.</param>
        /// <param name="options">How to generate; null for the defaults.</param>
        /// <param name="onText">Is given the answer as it comes, on this thread; or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        /// <param name="turn">How the turn is written and answered; null for <see cref="Turns"/>.</param>
        public string Complete(string messages, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Answer(new Turn(messages, true, turn ?? Turns), options, onText, cancellation);

        /// <summary>Answers a whole conversation.</summary>
        public string Complete(IEnumerable<ChatMessage> messages, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Complete(ChatMessage.ToJson(messages), options, onText, cancellation, turn);

        /// <summary>The same, on a thread of its own.</summary>
        public Task<string> CompleteAsync(IEnumerable<ChatMessage> messages, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Interop.OnThread(() => Complete(messages, options, onText, cancellation, turn), cancellation);

        /// <summary>Says something and gives each token of the answer to a handler, which may end it.</summary>
        public Generation Chat(string text, TokenHandler handler, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Run(new Turn(text, false, turn ?? Turns), Drawn(options), handler, cancellation);

        /// <summary>Gives each token of the answer to a whole conversation to a handler, which may end it.</summary>
        public Generation Chat(IEnumerable<ChatMessage> messages, TokenHandler handler, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null) =>
            Run(new Turn(ChatMessage.ToJson(messages), true, turn ?? Turns), Drawn(options), handler, cancellation);

        /// <summary>
        /// Says something and gives the answer as a stream: pieces of whole characters, each made when it is asked for. The turn
        /// begins with the enumeration, and ends with it: leave it early and the conversation holds what came.
        /// </summary>
        public IEnumerable<string> Stream(string text, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null)
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return Pieces(() => new Turn(text, false, turn ?? Turns), options, cancellation);
        }

        /// <summary>The answer to a whole conversation as such a stream.</summary>
        public IEnumerable<string> Stream(IEnumerable<ChatMessage> messages, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken), ChatOptions turn = null)
        {
            string json = ChatMessage.ToJson(messages);
            return Pieces(() => new Turn(json, true, turn ?? Turns), options, cancellation);
        }

#if NETCOREAPP
        /// <summary>The same stream, for await foreach. The token given here or by WithCancellation stops it, with an OperationCanceledException.</summary>
        public IAsyncEnumerable<string> StreamAsync(string text, GenerateOptions options = null, CancellationToken cancellation = default,
            ChatOptions turn = null)
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return Pieces(() => new Turn(text, false, turn ?? Turns), options, cancellation);
        }

        /// <summary>The answer to a whole conversation as such a stream.</summary>
        public IAsyncEnumerable<string> StreamAsync(IEnumerable<ChatMessage> messages, GenerateOptions options = null,
            CancellationToken cancellation = default, ChatOptions turn = null)
        {
            string json = ChatMessage.ToJson(messages);
            return Pieces(() => new Turn(json, true, turn ?? Turns), options, cancellation);
        }
#endif

        /// A text that is refused is an exception when the stream begins.
        TextStream Pieces(Func<Turn> turn, GenerateOptions options, CancellationToken cancellation) =>
            new TextStream(this, (handler, token) => Run(turn(), Drawn(options), handler, token), cancellation);

        string Answer(Turn turn, GenerateOptions options, Action<string> onText, CancellationToken cancellation)
        {
            TokenHandler handler = null;
            if (onText != null)
                handler = piece =>
                {
                    if (piece.Part == Part.Content && piece.Text.Length > 0)
                        onText(piece.Text);
                    return true;
                };
            Run(turn, Drawn(options), handler, cancellation);
            // A part of the answer must not look like the whole.
            return Handle.IsGivenUp ? throw new ObjectDisposedException(GetType().Name) : Text;
        }

        internal GenerateOptions Drawn(GenerateOptions options) => options == null ? drawn : options.Over(drawn);
    }
}
