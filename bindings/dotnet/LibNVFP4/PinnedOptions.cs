// Arrays held in place for a call, and options of a generation with theirs.

using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// Arrays held in place until it is disposed.
    internal abstract class Pinned : IDisposable
    {
        readonly List<GCHandle> pins = new List<GCHandle>();

        public virtual void Dispose()
        {
            foreach (GCHandle pin in pins)
                pin.Free();
            pins.Clear();
        }

        protected IntPtr Pin(object array)
        {
            GCHandle pin = GCHandle.Alloc(array, GCHandleType.Pinned);
            pins.Add(pin);
            return pin.AddrOfPinnedObject();
        }
    }

    /// Texts to be embedded.
    internal sealed unsafe class PinnedStrings : Pinned
    {
        internal readonly byte** Texts;
        internal readonly UIntPtr* Lengths;
        internal readonly int Count;

        internal PinnedStrings(IEnumerable<string> texts)
        {
            var places = new List<IntPtr>();
            var lengths = new List<UIntPtr>();
            try
            {
                foreach (string text in texts)
                {
                    byte[] bytes = Interop.Utf8(text, nameof(texts));
                    places.Add(Pin(bytes));
                    lengths.Add(Interop.Size(bytes.Length));
                }
                Texts = (byte**)Pin(places.ToArray());
                Lengths = (UIntPtr*)Pin(lengths.ToArray());
                Count = places.Count;
            }
            catch
            {
                Dispose();
                throw;
            }
        }
    }

    /// Lists of tokens: continuations to be scored, or texts to be embedded.
    internal sealed unsafe class PinnedTexts : Pinned
    {
        internal readonly int** Texts;
        internal readonly UIntPtr* Lengths;
        internal readonly int Count, Total;
        readonly UIntPtr[] lengths;

        internal PinnedTexts(IEnumerable<int[]> texts)
        {
            var places = new List<IntPtr>();
            var sizes = new List<UIntPtr>();
            try
            {
                foreach (int[] tokens in texts)
                {
                    if (tokens == null)
                        throw new ArgumentNullException(nameof(texts), "a list of tokens is null");
                    places.Add(Pin(tokens));
                    sizes.Add(Interop.Size(tokens.Length));
                    Total += tokens.Length;
                }
                lengths = sizes.ToArray();
                Texts = (int**)Pin(places.ToArray());
                Lengths = (UIntPtr*)Pin(lengths);
                Count = places.Count;
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        /// The scores of each, of those of all tokens.
        internal ContinuationScore[] Divide(float[] values, int[] argmaxes)
        {
            var scores = new ContinuationScore[Count];
            int at = 0;
            for (int i = 0; i < Count; i++)
            {
                int length = (int)lengths[i];
                float[] own = new float[length];
                int[] most = new int[length];
                Array.Copy(values, at, own, 0, length);
                Array.Copy(argmaxes, at, most, 0, length);
                scores[i] = new ContinuationScore(own, Array.ConvertAll(most, one => one != 0));
                at += length;
            }
            return scores;
        }
    }

    internal sealed unsafe class PinnedOptions : Pinned
    {
        internal NativeGenerateOptions Raw;

        readonly GrammarHandle grammar;
        bool holdsGrammar;
        LogitsCall logits;

        internal PinnedOptions(GenerateOptions options)
        {
            if (options == null)
                return;
            Raw = options.Raw;
            grammar = options.Grammar?.Handle;
            try
            {
                grammar?.DangerousAddRef(ref holdsGrammar);
                if (options.StopTokens != null)
                {
                    int[] tokens = new List<int>(options.StopTokens).ToArray();
                    Raw.StopTokens = (int*)Pin(tokens);
                    Raw.StopTokenCount = Interop.Size(tokens.Length);
                }
                if (options.StopStrings != null)
                {
                    Raw.StopStrings = (byte**)Pin(options.StopStrings, nameof(options.StopStrings), out IntPtr lengths, out Raw.StopStringCount);
                    Raw.StopStringLengths = (UIntPtr*)lengths;
                }
                if (options.DrySequenceBreakers != null)
                {
                    Raw.DrySequenceBreakers = (byte**)Pin(options.DrySequenceBreakers, nameof(options.DrySequenceBreakers),
                        out IntPtr lengths, out Raw.DrySequenceBreakerCount);
                    Raw.DrySequenceBreakerLengths = (UIntPtr*)lengths;
                }
                if (options.LogitBias != null)
                {
                    var tokens = new List<int>();
                    var biases = new List<float>();
                    foreach (KeyValuePair<int, float> bias in options.LogitBias)
                    {
                        tokens.Add(bias.Key);
                        biases.Add(bias.Value);
                    }
                    Raw.LogitBiasTokens = (int*)Pin(tokens.ToArray());
                    Raw.LogitBiases = (float*)Pin(biases.ToArray());
                    Raw.LogitBiasCount = Interop.Size(tokens.Count);
                }
                if (options.LogitsProcessor != null)
                {
                    logits = new LogitsCall(options.LogitsProcessor);
                    Raw.LogitsProcessor = LogitsCall.Address;
                    Raw.LogitsUser = logits.User;
                }
                if (options.BadWords != null)
                {
                    var words = new List<IntPtr>();
                    var lengths = new List<UIntPtr>();
                    foreach (IEnumerable<int> word in options.BadWords)
                    {
                        int[] tokens = new List<int>(word).ToArray();
                        words.Add(Pin(tokens));
                        lengths.Add(Interop.Size(tokens.Length));
                    }
                    Raw.BadWords = (int**)Pin(words.ToArray());
                    Raw.BadWordLengths = (UIntPtr*)Pin(lengths.ToArray());
                    Raw.BadWordCount = Interop.Size(words.Count);
                }
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        /// Texts in UTF-8, with the length of each.
        IntPtr Pin(IEnumerable<string> values, string name, out IntPtr lengths, out UIntPtr count)
        {
            var texts = new List<IntPtr>();
            var sizes = new List<UIntPtr>();
            foreach (string text in values)
            {
                byte[] bytes = Interop.Utf8(text, name);
                texts.Add(Pin(bytes));
                sizes.Add(Interop.Size(bytes.Length));
            }
            lengths = Pin(sizes.ToArray());
            count = Interop.Size(texts.Count);
            return Pin(texts.ToArray());
        }

        /// After the call: throws what its processor of logits threw.
        internal void Throw() => logits?.Throw();

        /// Gives the processor of logits to a caller that disposes of it, for a generation that goes on; null without one.
        internal LogitsCall TakeLogits()
        {
            LogitsCall taken = logits;
            logits = null;
            return taken;
        }

        public override void Dispose()
        {
            base.Dispose();
            logits?.Dispose();
            if (holdsGrammar)
                grammar.DangerousRelease();
            holdsGrammar = false;
        }
    }
}
