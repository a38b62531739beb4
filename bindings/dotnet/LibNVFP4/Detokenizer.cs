// The text of tokens as they come, for hosts that choose or step them on their own.

using System;
using System.Collections.Generic;
using System.Threading;

namespace LibNVFP4
{
    /// <summary>
    /// Follows one sequence of tokens: gives the text that each completes, in whole characters, and says what ends the sequence,
    /// as <see cref="Session.Generate"/> would: a stop token, a stop string, or its length. What may be the beginning of a stop
    /// string waits until that is decided.
    /// </summary>
    public sealed unsafe class Detokenizer : IDisposable
    {
        readonly DetokenizerHandle handle;
        // The native text lives until the next call, so what reads it must not be overtaken by another one.
        readonly object gate = new object();
        // Calls with several take their gates in this order, so that none waits for another one for ever.
        readonly long order = Interlocked.Increment(ref made);
        static long made;

        /// <summary>Begins with a sequence.</summary>
        /// <param name="model">Whose tokens they are.</param>
        /// <param name="options">What ends the sequence: its stop tokens and strings, whether the model's own stop tokens count, and how many tokens there may be. Null for the defaults.</param>
        /// <param name="tokens">What the sequence holds already: its text is not given again, but may end within a character, which the next token goes on with. Null at the start of a text, as an answer is.</param>
        public Detokenizer(Model model, GenerateOptions options = null, int[] tokens = null)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            var retry = new Retry();
            int status;
            using (var pinned = new PinnedOptions(options))
            {
                NativeGenerateOptions raw = pinned.Raw;
                fixed (int* at = tokens)
                    do
                        status = Native.NVFP4_detokenizer_create(model.Handle, at, Interop.Size(tokens == null ? 0 : tokens.Length),
                            options == null ? null : &raw, out handle);
                    while (retry.After(status));
            }
            Interop.Check(status);
        }

        /// <summary>Adds the next token, and gives the text that it completes.</summary>
        /// <param name="token">The token.</param>
        /// <param name="finish">
        /// What ends the sequence with this token, or <see cref="FinishReason.None"/>. A stop token then is not part of the
        /// sequence, and gives no text. No token is taken after the end.
        /// </param>
        public string Push(int token, out FinishReason finish)
        {
            lock (gate)
            {
                byte* text;
                UIntPtr length;
                int reason;
                Interop.Check(Native.NVFP4_detokenizer_push(handle, token, &text, &length, &reason));
                finish = (FinishReason)reason;
                return Read(text, length);
            }
        }

        /// <summary>Adds the next token to each of several detokenizers, in one call, and gives the texts that they complete, as <see cref="Push(int, out FinishReason)"/> does. If it fails, none has changed.</summary>
        /// <param name="detokenizers">The detokenizers, each once.</param>
        /// <param name="tokens">A token for each.</param>
        /// <param name="finishes">What ends each sequence with its token, or <see cref="FinishReason.None"/>.</param>
        public static string[] Push(IList<Detokenizer> detokenizers, int[] tokens, out FinishReason[] finishes)
        {
            if (detokenizers == null)
                throw new ArgumentNullException(nameof(detokenizers));
            if (tokens == null)
                throw new ArgumentNullException(nameof(tokens));
            var all = new Detokenizer[detokenizers.Count];
            detokenizers.CopyTo(all, 0);
            if (all.Length != tokens.Length)
                throw new ArgumentException(tokens.Length + " tokens for " + all.Length + " detokenizers", nameof(tokens));
            foreach (Detokenizer one in all)
                if (one == null)
                    throw new ArgumentNullException(nameof(detokenizers), "a detokenizer is null");
            var inOrder = (Detokenizer[])all.Clone();
            Array.Sort(inOrder, (a, b) => a.order.CompareTo(b.order));
            int entered = 0;
            try
            {
                for (; entered < inOrder.Length; entered++)
                    Monitor.Enter(inOrder[entered].gate);
                return PushHeld(all, tokens, out finishes);
            }
            finally
            {
                while (entered > 0)
                    Monitor.Exit(inOrder[--entered].gate);
            }
        }

        static string[] PushHeld(Detokenizer[] all, int[] tokens, out FinishReason[] finishes)
        {
            var handles = new IntPtr[all.Length];
            var texts = new IntPtr[all.Length];
            var lengths = new UIntPtr[all.Length];
            var reasons = new int[all.Length];
            int held = 0;
            try
            {
                for (; held < all.Length; held++)
                {
                    bool added = false;
                    all[held].handle.DangerousAddRef(ref added);
                    handles[held] = all[held].handle.DangerousGetHandle();
                }
                fixed (IntPtr* atHandles = handles, atTexts = texts)
                fixed (UIntPtr* atLengths = lengths)
                fixed (int* atTokens = tokens, atReasons = reasons)
                    Interop.Check(Native.NVFP4_detokenizers_push(atHandles, atTokens, Interop.Size(all.Length), (byte**)atTexts, atLengths,
                        atReasons));
                var read = new string[all.Length];
                for (int i = 0; i < read.Length; i++)
                    read[i] = Interop.Read((byte*)texts[i], lengths[i]);
                finishes = Array.ConvertAll(reasons, reason => (FinishReason)reason);
                return read;
            }
            finally
            {
                while (held > 0)
                    all[--held].handle.DangerousRelease();
            }
        }

        /// <summary>
        /// Ends the sequence, where no token has, and gives the text that was held back in case it was the beginning of a stop
        /// string. There is none after a stop string. A character that is unfinished gives none.
        /// </summary>
        public string Finish()
        {
            lock (gate)
            {
                byte* text;
                UIntPtr length;
                Interop.Check(Native.NVFP4_detokenizer_finish(handle, &text, &length));
                return Read(text, length);
            }
        }

        /// <summary>Gives up the detokenizer.</summary>
        public void Dispose()
        {
            lock (gate)
                handle.Dispose();
        }

        string Read(byte* text, UIntPtr length)
        {
            string read = Interop.Read(text, length);
            GC.KeepAlive(this);
            return read;
        }
    }
}
