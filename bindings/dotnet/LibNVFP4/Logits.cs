// The logits of a choice, for a program's own processor.

using System;

namespace LibNVFP4
{
    /// <summary>Changes the logits of a choice before the token is chosen. Returns false to end the generation. See <see cref="GenerateOptions.LogitsProcessor"/>.</summary>
    public delegate bool LogitsHandler(Logits logits);

    /// <summary>
    /// The logits of a choice, one for each token of the vocabulary, in the library's memory: what is set here is what the token is chosen from.
    /// Negative infinity excludes a token. Valid until the handler returns, and an <see cref="ObjectDisposedException"/> after that.
    /// </summary>
    public sealed unsafe class Logits
    {
        readonly int count, tokenCount;
        float* values;
        int* tokens;

        internal Logits(NativeLogitsEvent* raw)
        {
            values = raw->Logits;
            count = checked((int)raw->LogitCount.ToUInt64());
            tokens = raw->Tokens;
            tokenCount = checked((int)raw->TokenCount.ToUInt64());
            Index = raw->Index;
        }

        /// <summary>The index of the session in a step; 0 for a single session.</summary>
        public int Index { get; }

        /// <summary>The number of logits.</summary>
        public int Count => count;

        /// <summary>The logit of a token.</summary>
        public float this[int token]
        {
            get => Values[Checked(token)];
            set => Values[Checked(token)] = value;
        }

        /// <summary>The address of the logits, which are 32-bit numbers in a row.</summary>
        public IntPtr Address => (IntPtr)Values;

#if NETCOREAPP
        /// <summary>The logits, without a copy.</summary>
        public Span<float> Span => new Span<float>(Values, count);
#endif

        /// <summary>A copy of the logits.</summary>
        public float[] ToArray()
        {
            var copy = new float[count];
            fixed (float* to = copy)
                Buffer.MemoryCopy(Values, to, 4L * count, 4L * count);
            return copy;
        }

        /// <summary>Replaces all logits.</summary>
        public void Set(float[] logits)
        {
            if (logits == null)
                throw new ArgumentNullException(nameof(logits));
            if (logits.Length != count)
                throw new ArgumentException(logits.Length + " logits for a vocabulary of " + count, nameof(logits));
            fixed (float* from = logits)
                Buffer.MemoryCopy(from, Values, 4L * count, 4L * count);
        }

        /// <summary>The tokens that the generation has so far, as a copy. None in a step and in <see cref="Session.Sample"/>, whose choices are part of no generation.</summary>
        public int[] Tokens
        {
            get
            {
                if (Values == null || tokenCount == 0)
                    return new int[0];
                var copy = new int[tokenCount];
                fixed (int* to = copy)
                    Buffer.MemoryCopy(tokens, to, 4L * tokenCount, 4L * tokenCount);
                return copy;
            }
        }

        /// The handler has returned.
        internal void End()
        {
            values = null;
            tokens = null;
        }

        float* Values
        {
            get
            {
                if (values == null)
                    throw new ObjectDisposedException(nameof(Logits), "logits are valid until their handler returns");
                return values;
            }
        }

        int Checked(int token)
        {
            if ((uint)token >= (uint)count)
                throw new ArgumentOutOfRangeException(nameof(token), token, "the vocabulary has " + count + " tokens");
            return token;
        }
    }
}
