// Conversations: a session whose turns are spelled as the model's chat template says.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>A conversation with a model. Only what a turn adds is run. What is said of <see cref="Session"/> holds here too.</summary>
    public sealed unsafe class ChatSession : Session
    {
        /// <summary>Makes an empty conversation.</summary>
        /// <param name="model">Who answers.</param>
        /// <param name="system">What the model is told first about its role; null for what the options say.</param>
        /// <param name="options">Null for the defaults.</param>
        public ChatSession(Model model, string system = null, SessionOptions options = null)
            : base(model, (options ?? new SessionOptions()).With(system))
        {
        }

        ChatSession(SessionHandle handle) : base(handle)
        {
        }

        /// <summary>Makes a conversation as it was when it was written to a file.</summary>
        /// <param name="model">The model that ran it.</param>
        /// <param name="path">The file.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static new ChatSession Restore(Model model, string path, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            new ChatSession(RestoreHandle(model, path, progress, cancellation));

        /// <summary>Makes a second conversation in the same state.</summary>
        public new ChatSession Fork() => new ChatSession(ForkHandle());

        /// <summary>What was said until now; during a turn, what was said before it.</summary>
        public IList<ChatMessage> Messages
        {
            get
            {
                string json = Interop.Text((buffer, capacity, length) => Native.NVFP4_session_messages(Handle, buffer, capacity, length));
                var messages = new List<ChatMessage>();
                foreach (object item in Json.List(json))
                {
                    var members = (Dictionary<string, object>)item;
                    messages.Add(new ChatMessage((string)members["role"], (string)members["content"]));
                }
                return messages;
            }
        }

        /// <summary>Says something and waits for the answer.</summary>
        /// <param name="text">What the user says.</param>
        /// <param name="options">How to generate; null for the defaults.</param>
        /// <param name="onText">Is given the answer as it comes, on this thread; or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public string Ask(string text, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            TokenHandler handler = null;
            if (onText != null)
                handler = piece =>
                {
                    if (piece.Text.Length > 0)
                        onText(piece.Text);
                    return true;
                };
            Run(text, options, handler, cancellation);
            // What came until then must not look like the whole answer.
            return Handle.IsGivenUp ? throw new ObjectDisposedException(GetType().Name) : Text;
        }

        /// <summary>The same, on a thread of its own.</summary>
        public Task<string> AskAsync(string text, GenerateOptions options = null, Action<string> onText = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() => Ask(text, options, onText, cancellation), cancellation);

        /// <summary>Says something and gives each token of the answer to a handler, which may end it.</summary>
        public Generation Chat(string text, TokenHandler handler, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return Run(text, options, handler, cancellation);
        }

        /// <summary>
        /// Says something and gives the answer as a stream: pieces of whole characters, each made when it is asked for. The turn
        /// begins with the enumeration, and ends with it: leave it early and the conversation holds what came.
        /// </summary>
        public IEnumerable<string> Stream(string text, GenerateOptions options = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return new TextStream(this, (handler, token) => Run(text, options, handler, token), cancellation);
        }

#if NETCOREAPP
        /// <summary>The same stream, for await foreach. The token given here or by WithCancellation stops it, with an OperationCanceledException.</summary>
        public IAsyncEnumerable<string> StreamAsync(string text, GenerateOptions options = null, CancellationToken cancellation = default)
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            return new TextStream(this, (handler, token) => Run(text, options, handler, token), cancellation);
        }
#endif
    }
}
