// Models: weights on disk and in memory, with tokenizer and chat template.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>What a model is.</summary>
    public sealed class ModelInfo
    {
        internal ModelInfo(string json)
        {
            Json = json;
            Dictionary<string, object> members = LibNVFP4.Json.Object(json);
            Architecture = (string)members["architecture"];
            Device = (string)members["device"];
            DeviceChoice = (string)members["device_choice"];
            Parameters = (long)members["parameters"];
            WeightBytes = (long)members["weight_bytes"];
            KvBytesPerToken = (long)members["kv_bytes_per_token"];
            var stops = (List<object>)members["stop_tokens"];
            int[] tokens = new int[stops.Count];
            for (int i = 0; i < tokens.Length; i++)
                tokens[i] = checked((int)(long)stops[i]);
            StopTokens = tokens;
        }

        /// <summary>Its architecture, such as "qwen3".</summary>
        public string Architecture { get; }

        /// <summary>What it runs on.</summary>
        public string Device { get; }

        /// <summary>Why it runs there, as one line, or null where the device was named.</summary>
        public string DeviceChoice { get; }

        /// <summary>The number of its parameters.</summary>
        public long Parameters { get; }

        /// <summary>The bytes of its weights in memory.</summary>
        public long WeightBytes { get; }

        /// <summary>The bytes of a session's keys and values for each token.</summary>
        public long KvBytesPerToken { get; }

        /// <summary>The tokens that end its texts.</summary>
        public IList<int> StopTokens { get; }

        /// <summary>All that the library says, as JSON.</summary>
        public string Json { get; }

        /// <summary>The JSON.</summary>
        public override string ToString() => Json;
    }

    /// <summary>A loaded model. It is immutable: any number of sessions, on any threads, may run it at once. A session keeps it alive, so it may be disposed of before its sessions.</summary>
    public sealed unsafe partial class Model : IDisposable
    {
        internal readonly ModelHandle Handle;

        internal Model(ModelHandle handle)
        {
            Handle = handle;
            Info = new ModelInfo(Interop.Text((buffer, capacity, length) => Native.NVFP4_model_info(handle, buffer, capacity, length)));
            handle.Press((ulong)Info.WeightBytes);
            Tokenizer = new Tokenizer(this);
        }

        /// <summary>Loads a model: a directory, or a .safetensors, .dat or .gguf file.</summary>
        /// <param name="path">Where it is.</param>
        /// <param name="options">Null for the defaults: the GPU with room for the model, or else the CPU.</param>
        /// <param name="quantize">How to quantize dense weights to NVFP4 while loading; null holds weights as they are stored.</param>
        /// <param name="progress">Is told how many bytes are read, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static Model Load(string path, LoadOptions options = null, QuantizeOptions quantize = null,
            ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken))
        {
            byte[] bytes = Interop.Utf8(path, nameof(path));
            ModelHandle handle = null;
            using (var call = new Call(cancellation, progress))
            {
                call.Finish(Library.Try(() =>
                {
                    NativeLoadOptions raw = (options ?? new LoadOptions()).Raw;
                    raw.Call = call.Options;
                    NativeQuantizeOptions rawQuantize = quantize == null ? default(NativeQuantizeOptions) : quantize.Raw;
                    fixed (byte* at = bytes)
                        return Native.NVFP4_model_load(at, Interop.Size(bytes.Length), &raw,
                            quantize == null ? null : &rawQuantize, out handle);
                }));
            }
            return new Model(handle);
        }

        /// <summary>The same, on a thread of its own.</summary>
        public static Task<Model> LoadAsync(string path, LoadOptions options = null, QuantizeOptions quantize = null,
            ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() => Load(path, options, quantize, progress, cancellation), cancellation);

        /// <summary>Loads a model from files that the host gives: those of a model's directory, by their names.</summary>
        /// <param name="files">The files, such as config.json, tokenizer.json and model.safetensors.</param>
        /// <param name="options">As for <see cref="Load"/>.</param>
        /// <param name="quantize">As for <see cref="Load"/>.</param>
        /// <param name="progress">As for <see cref="Load"/>.</param>
        /// <param name="cancellation">As for <see cref="Load"/>.</param>
        public static Model LoadFiles(IEnumerable<ModelFile> files, LoadOptions options = null, QuantizeOptions quantize = null,
            ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken))
        {
            var given = new GivenFiles(files);
            ModelHandle handle = null;
            using (var call = new Call(cancellation, progress))
            {
                // Made once: the call releases the files whatever comes of it.
                int status = Library.After(() =>
                {
                    NativeLoadOptions raw = (options ?? new LoadOptions()).Raw;
                    raw.Call = call.Options;
                    NativeQuantizeOptions rawQuantize = quantize == null ? default(NativeQuantizeOptions) : quantize.Raw;
                    return given.Give((at, count, size) =>
                    {
                        NativeLoadOptions how = raw;
                        NativeQuantizeOptions form = rawQuantize;
                        return Native.NVFP4_model_load_files(at, count, size, &how, quantize == null ? null : &form, out handle);
                    });
                });
                if (status != (int)Status.Ok)
                    given.Rethrow();
                call.Finish(status);
            }
            return new Model(handle);
        }

        /// <summary>The same, on a thread of its own.</summary>
        public static Task<Model> LoadFilesAsync(IEnumerable<ModelFile> files, LoadOptions options = null, QuantizeOptions quantize = null,
            ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() => LoadFiles(files, options, quantize, progress, cancellation), cancellation);

        /// <summary>Says what a model and its sessions take of memory, without loading it: reads the headers of its files, in milliseconds.</summary>
        /// <param name="path">Where it is, as for <see cref="Load"/>.</param>
        /// <param name="options">How it will be loaded; null for the defaults of <see cref="Load"/>.</param>
        /// <param name="quantize">How dense weights will be quantized; null for weights as they are stored.</param>
        /// <param name="sessions">The sessions to plan for; null for one of the model's whole context.</param>
        public static ModelPlan Plan(string path, LoadOptions options = null, QuantizeOptions quantize = null, PlanOptions sessions = null)
        {
            byte[] bytes = Interop.Utf8(path, nameof(path));
            return Library.After(() =>
            {
                NativeLoadOptions raw = (options ?? new LoadOptions()).Raw;
                NativeQuantizeOptions rawQuantize = quantize == null ? default(NativeQuantizeOptions) : quantize.Raw;
                NativePlanOptions rawSessions = (sessions ?? new PlanOptions()).Raw;
                var plan = new NativePlan { StructSize = (uint)sizeof(NativePlan) };
                fixed (byte* at = bytes)
                    Interop.Check(Native.NVFP4_model_plan(at, Interop.Size(bytes.Length), &raw, quantize == null ? null : &rawQuantize,
                        &rawSessions, &plan));
                return new ModelPlan(plan);
            });
        }

        /// <summary>What was loaded.</summary>
        public ModelInfo Info { get; }

        /// <summary>What the model has run since it was loaded, and what it holds now. From any thread at any time, in handlers too.</summary>
        public ModelStatistics Statistics()
        {
            var now = new NativeModelStatistics { StructSize = (uint)sizeof(NativeModelStatistics) };
            Interop.Check(Native.NVFP4_model_statistics(Handle, &now));
            return new ModelStatistics(now);
        }

        /// <summary>Its tokenizer.</summary>
        public Tokenizer Tokenizer { get; }

        /// <summary>The sampling settings that the model recommends. Chats use them unless a turn sets others.</summary>
        public GenerateOptions GenerateOptions() => LibNVFP4.GenerateOptions.From(this);

        /// <summary>Renders a conversation with the model's chat template. Names of special tokens within messages look like the template's own in it: messages of strangers go to a chat, or to <see cref="EncodeChat(IEnumerable{ChatMessage}, bool, ChatOptions)"/>.</summary>
        /// <param name="messages">The conversation.</param>
        /// <param name="addGenerationPrompt">Whether to open the assistant's next turn.</param>
        /// <param name="chat">How it is written; null for the defaults.</param>
        public string RenderChat(IEnumerable<ChatMessage> messages, bool addGenerationPrompt = true, ChatOptions chat = null) =>
            RenderChat(ChatMessage.ToJson(messages), addGenerationPrompt, chat);

        /// <summary>The same of JSON, as <see cref="ChatSession.Complete(string, LibNVFP4.GenerateOptions, Action{string}, CancellationToken, ChatOptions)"/> takes it.</summary>
        public string RenderChat(string messages, bool addGenerationPrompt = true, ChatOptions chat = null)
        {
            byte[] json = Interop.Utf8(messages, nameof(messages));
            return Interop.Text((buffer, capacity, length) => ChatOptions.Use(chat, raw =>
            {
                fixed (byte* at = json)
                    return Native.NVFP4_model_render_messages(Handle, at, Interop.Size(json.Length), raw,
                        Interop.Flag(addGenerationPrompt), buffer, capacity, length);
            }));
        }

        /// <summary>The tokens that a session runs for a conversation, in which names of special tokens are text.</summary>
        /// <param name="messages">The conversation.</param>
        /// <param name="addGenerationPrompt">Whether to open the assistant's next turn.</param>
        /// <param name="chat">How it is written; null for the defaults.</param>
        public int[] EncodeChat(IEnumerable<ChatMessage> messages, bool addGenerationPrompt = true, ChatOptions chat = null) =>
            EncodeChat(ChatMessage.ToJson(messages), addGenerationPrompt, chat);

        /// <summary>The same of JSON.</summary>
        public int[] EncodeChat(string messages, bool addGenerationPrompt = true, ChatOptions chat = null)
        {
            byte[] json = Interop.Utf8(messages, nameof(messages));
            return Interop.Array<int>((buffer, capacity, count) => ChatOptions.Use(chat, raw =>
            {
                fixed (byte* at = json)
                    return Native.NVFP4_model_tokenize_messages(Handle, at, Interop.Size(json.Length), raw,
                        Interop.Flag(addGenerationPrompt), (int*)buffer, capacity, count);
            }));
        }

        /// <summary>Gives up the model. Its sessions keep the weights.</summary>
        public void Dispose() => Handle.Dispose();
    }

    /// <summary>A special token, or another one with a role.</summary>
    public sealed class SpecialToken
    {
        internal unsafe SpecialToken(NativeSpecialToken token)
        {
            Token = token.Token;
            Roles = (TokenRoles)token.Roles;
            Name = Interop.ReadAny(token.Name, token.NameLength);
        }

        /// <summary>Its id.</summary>
        public int Token { get; }

        /// <summary>Its roles.</summary>
        public TokenRoles Roles { get; }

        /// <summary>Its name, such as "&lt;|im_end|&gt;".</summary>
        public string Name { get; }

        /// <summary>The name with id and roles.</summary>
        public override string ToString() => $"{Name} ({Token}: {Roles})";
    }

    /// <summary>Text to tokens and back, as a model wants it. Lives as long as its model.</summary>
    public sealed unsafe class Tokenizer
    {
        readonly Model model;

        internal Tokenizer(Model model)
        {
            this.model = model;
        }

        /// <summary>The number of token ids, which is the number of logits.</summary>
        public int VocabularySize
        {
            get
            {
                UIntPtr size;
                Interop.Check(Native.NVFP4_model_vocab_size(model.Handle, &size));
                return checked((int)size.ToUInt64());
            }
        }

        /// <summary>Text to tokens. Names of special tokens in the text become those tokens: text of users goes to <see cref="EncodePlain"/>.</summary>
        /// <param name="text">The text.</param>
        /// <param name="addSpecial">Whether to add what the model wants around a text. A rendered chat has it already.</param>
        public int[] Encode(string text, bool addSpecial = false)
        {
            byte[] bytes = Interop.Utf8(text, nameof(text));
            return Interop.Array<int>((buffer, capacity, count) =>
            {
                fixed (byte* at = bytes)
                    return Native.NVFP4_model_tokenize(model.Handle, at, Interop.Size(bytes.Length), Interop.Flag(addSpecial),
                        (int*)buffer, capacity, count);
            });
        }

        /// <summary>Plain text, such as a user's, to tokens: names of special tokens in it are text.</summary>
        /// <param name="text">The text.</param>
        /// <param name="addSpecial">Whether to add what the model wants around a text.</param>
        public int[] EncodePlain(string text, bool addSpecial = false)
        {
            byte[] bytes = Interop.Utf8(text, nameof(text));
            return Interop.Array<int>((buffer, capacity, count) =>
            {
                fixed (byte* at = bytes)
                    return Native.NVFP4_model_tokenize_plain(model.Handle, at, Interop.Size(bytes.Length), Interop.Flag(addSpecial),
                        (int*)buffer, capacity, count);
            });
        }

        /// <summary>Tokens to text. Ids that the model knows and its tokenizer does not give none. Bytes that are no character become U+FFFD: for a stream of tokens use the text that generation gives.</summary>
        /// <param name="tokens">The tokens.</param>
        /// <param name="skipSpecial">Whether to leave out tokens such as the end of a turn.</param>
        public string Decode(int[] tokens, bool skipSpecial = true)
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            return Interop.Text((buffer, capacity, length) =>
            {
                fixed (int* at = tokens)
                    return Native.NVFP4_model_detokenize(model.Handle, at, Interop.Size(tokens.Length), Interop.Flag(skipSpecial),
                        buffer, capacity, length);
            });
        }

        /// <summary>The bytes that a token adds to a text, which may be a part of a character; the name of a special token. Those of all tokens of a text, one after the other, are that text, after a space if it is a sentencepiece tokenizer.</summary>
        /// <param name="token">The token.</param>
        public byte[] TokenBytes(int token) =>
            Interop.Array<byte>((buffer, capacity, length) =>
                Native.NVFP4_model_token_bytes(model.Handle, token, (byte*)buffer, capacity, length, null));

        /// <summary>Whether a token is special, so that its bytes are a name and no text.</summary>
        /// <param name="token">The token.</param>
        public bool IsSpecial(int token)
        {
            UIntPtr length;
            int special;
            Interop.Check(Native.NVFP4_model_token_bytes(model.Handle, token, null, UIntPtr.Zero, &length, &special));
            return special != 0;
        }

        /// <summary>The special tokens, and others with a role, in order of their ids.</summary>
        public IList<SpecialToken> SpecialTokens()
        {
            NativeSpecialToken[] found = Interop.Array<NativeSpecialToken>((buffer, capacity, count) =>
                Native.NVFP4_model_special_tokens(model.Handle, (NativeSpecialToken*)buffer, Interop.Size(sizeof(NativeSpecialToken)),
                    capacity, count));
            SpecialToken[] tokens = Array.ConvertAll(found, token => new SpecialToken(token));
            GC.KeepAlive(model);
            return tokens;
        }

#if NETCOREAPP
        /// <summary>Tokens to text.</summary>
        public string Decode(ReadOnlySpan<int> tokens, bool skipSpecial = true)
        {
            fixed (int* at = tokens)
            {
                int* first = at;
                UIntPtr count = Interop.Size(tokens.Length);
                return Interop.Text((buffer, capacity, length) =>
                    Native.NVFP4_model_detokenize(model.Handle, first, count, Interop.Flag(skipSpecial), buffer, capacity, length));
            }
        }
#endif
    }
}
