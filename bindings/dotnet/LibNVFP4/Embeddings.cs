// Embeddings and hidden states of texts and of tokens.

using System;
using System.Collections.Generic;
using System.Threading;

namespace LibNVFP4
{
    /// <summary>How texts are embedded.</summary>
    public sealed unsafe class EmbedOptions
    {
        internal NativeEmbedOptions Raw;

        /// <summary>The defaults.</summary>
        public EmbedOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeEmbedOptions* raw = &Raw)
                    return Native.NVFP4_embed_options_init(raw, (uint)sizeof(NativeEmbedOptions));
            });
        }

        /// <summary>The rows that make an embedding. Default: those that the model asks for.</summary>
        public Pooling Pooling { get => (Pooling)Raw.Pooling; set => Raw.Pooling = (int)value; }

        /// <summary>Whether embeddings are divided by their length. Default: what the model says.</summary>
        public Normalize Normalize { get => (Normalize)Raw.Normalize; set => Raw.Normalize = (int)value; }

        /// <summary>Whether texts with more tokens than the model takes are cut, rather than refused. Default: no.</summary>
        public bool Truncate { get => Raw.Truncate != 0; set => Raw.Truncate = Interop.Flag(value); }

        /// <summary>The type of keys and values, which live while a text runs. Default: half precision.</summary>
        public KvType KvType { get => (KvType)Raw.KvType; set => Raw.KvType = (int)value; }

        /// <summary>Whether texts stay out of the prefix cache, which pooling by the last token uses. Default: no.</summary>
        public bool IsPrivate { get => Raw.IsPrivate != 0; set => Raw.IsPrivate = Interop.Flag(value); }

        /// <summary>The number of first elements that are kept, before they are normalized; 0 for all. Default: 0.</summary>
        public long Dimensions { get => Interop.Long(Raw.Dimensions); set => Raw.Dimensions = Interop.Size(value); }

        /// <summary>A text that goes before each text. Default: null, the prompt of <see cref="PromptName"/>.</summary>
        public string Prompt { get; set; }

        /// <summary>The name of one of the model's prompts, such as "query". Default: null, the model's default prompt, which most models have not.</summary>
        public string PromptName { get; set; }
    }

    /// A call of NVFP4_model_embed() or NVFP4_model_embed_texts().
    internal unsafe delegate int EmbedCall(NativeEmbedOptions* options, float* embeddings, UIntPtr capacity, UIntPtr* length, UIntPtr* rows);

    /// The rows of a call, and how they are divided among its texts.
    internal sealed unsafe class EmbeddedRows
    {
        readonly float[][] all;
        readonly UIntPtr[] counts;

        internal EmbeddedRows(EmbedOptions options, int count, EmbedCall embed, ProgressHandler progress, CancellationToken cancellation)
        {
            options = options ?? new EmbedOptions();
            byte[] prompt = Bytes(options.Prompt), name = Bytes(options.PromptName);
            float[] values = null;
            counts = new UIntPtr[count];
            using (var call = new Call(cancellation, progress))
                call.Finish(Interop.Try(() =>
                {
                    NativeEmbedOptions raw = options.Raw;
                    raw.Call = call.Options;
                    fixed (byte* atPrompt = prompt, atName = name)
                    fixed (UIntPtr* rows = counts)
                    {
                        raw.Prompt = atPrompt;
                        raw.PromptLength = Length(prompt);
                        raw.PromptName = atName;
                        raw.PromptNameLength = Length(name);
                        UIntPtr length;
                        int status = embed(&raw, null, UIntPtr.Zero, &length, rows);
                        if (status != (int)Status.Ok)
                            return status;
                        values = new float[checked((int)length.ToUInt64())];
                        fixed (float* at = values)
                            return embed(&raw, at, length, &length, rows);
                    }
                }));
            long total = 0;
            foreach (UIntPtr rows in counts)
                total += (long)rows.ToUInt64();
            all = new float[checked((int)total)][];
            for (int i = 0; i < all.Length; i++)
            {
                all[i] = new float[values.Length / all.Length];
                Array.Copy(values, i * all[i].Length, all[i], 0, all[i].Length);
            }
        }

        /// Text with a NUL after it, which pins an empty one to an address; null is no text.
        static byte[] Bytes(string text) => text == null ? null : Interop.Utf8(text + "\0", nameof(text));

        static UIntPtr Length(byte[] bytes) => bytes == null ? UIntPtr.Zero : Interop.Size(bytes.Length - 1);

        internal float[][] All => all;

        internal float[][][] Divided()
        {
            var texts = new float[counts.Length][][];
            int at = 0;
            for (int i = 0; i < texts.Length; i++)
            {
                texts[i] = new float[(int)counts[i].ToUInt64()][];
                Array.Copy(all, at, texts[i], 0, texts[i].Length);
                at += texts[i].Length;
            }
            return texts;
        }
    }

    public sealed unsafe partial class Model
    {
        /// <summary>Embeds texts, which run together: one row of numbers for each. From any thread at any time.</summary>
        /// <param name="texts">The texts.</param>
        /// <param name="options">How; null for what the model asks for.</param>
        /// <param name="progress">Is told how many tokens are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public float[][] Embed(IEnumerable<string> texts, EmbedOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) => Rows(texts, options, progress, cancellation).All;

        /// <summary>The same of lists of tokens as they are, without a prompt.</summary>
        /// <param name="tokens">The tokens of each.</param>
        /// <param name="options">How; null for what the model asks for.</param>
        /// <param name="progress">Is told how many tokens are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public float[][] Embed(IEnumerable<int[]> tokens, EmbedOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) => Rows(tokens, options, progress, cancellation).All;

        /// <summary>The hidden states of texts: for each a row for each of its tokens, which the final norm gives and the output head reads.</summary>
        /// <param name="texts">The texts.</param>
        /// <param name="options">How, but for the pooling; null for rows as they are.</param>
        /// <param name="progress">Is told how many tokens are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public float[][][] HiddenStates(IEnumerable<string> texts, EmbedOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) => Rows(texts, Unpooled(options), progress, cancellation).Divided();

        /// <summary>The same of lists of tokens as they are, without a prompt.</summary>
        /// <param name="tokens">The tokens of each.</param>
        /// <param name="options">How, but for the pooling; null for rows as they are.</param>
        /// <param name="progress">Is told how many tokens are run, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public float[][][] HiddenStates(IEnumerable<int[]> tokens, EmbedOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) => Rows(tokens, Unpooled(options), progress, cancellation).Divided();

        static EmbedOptions Unpooled(EmbedOptions options)
        {
            options = options ?? new EmbedOptions();
            return new EmbedOptions
            {
                Raw = options.Raw, Prompt = options.Prompt, PromptName = options.PromptName, Pooling = Pooling.None
            };
        }

        EmbeddedRows Rows(IEnumerable<string> texts, EmbedOptions options, ProgressHandler progress, CancellationToken cancellation)
        {
            if (texts == null)
                throw new ArgumentNullException(nameof(texts));
            using (var pinned = new PinnedStrings(texts))
                return new EmbeddedRows(options, pinned.Count, (raw, values, capacity, length, rows) =>
                    Native.NVFP4_model_embed_texts(Handle, pinned.Texts, pinned.Lengths, Interop.Size(pinned.Count), raw, values, capacity,
                        length, rows), progress, cancellation);
        }

        EmbeddedRows Rows(IEnumerable<int[]> tokens, EmbedOptions options, ProgressHandler progress, CancellationToken cancellation)
        {
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            using (var pinned = new PinnedTexts(tokens))
                return new EmbeddedRows(options, pinned.Count, (raw, values, capacity, length, rows) =>
                    Native.NVFP4_model_embed(Handle, pinned.Texts, pinned.Lengths, Interop.Size(pinned.Count), raw, values, capacity,
                        length, rows), progress, cancellation);
        }
    }
}
