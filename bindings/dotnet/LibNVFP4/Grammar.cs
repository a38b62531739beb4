// Grammars: the form that the text of a generation has.

using System;
using System.Collections.Generic;
using System.Text;

namespace LibNVFP4
{
    /// <summary>
    /// The form of a text: a JSON schema, a regular expression, a Lark or GBNF grammar or a list of choices. It is compiled once for a model, and
    /// <see cref="GenerateOptions.Grammar"/> of any number of generations names it, on any threads. It may be disposed of while they follow it.
    /// A source that is wrong, that no text fits, or that takes more than 100 ms or 64 MB to compile is an <see cref="Nvfp4ArgumentException"/>
    /// that names the place.
    /// </summary>
    public sealed unsafe class Grammar : IDisposable
    {
        internal readonly GrammarHandle Handle;

        Grammar(Model model, GrammarKind kind, string text, string name)
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            byte[] bytes = Interop.Utf8(text, name);
            NativeGrammarOptions options;
            Interop.Check(Native.NVFP4_grammar_options_init(&options, (uint)sizeof(NativeGrammarOptions)));
            options.Kind = (int)kind;
            GrammarHandle handle = null;
            var retry = new Retry();
            int status;
            fixed (byte* at = bytes)
                do
                    status = Native.NVFP4_grammar_create(model.Handle, &options, at, Interop.Size(bytes.Length), out handle);
                while (retry.After(status));
            Interop.Check(status);
            Handle = handle;
        }

        /// <summary>Texts that are JSON and fit a schema, of draft 2020-12 or an earlier one that it names.</summary>
        /// <param name="model">The model whose generations follow it.</param>
        /// <param name="schema">The schema as JSON.</param>
        public static Grammar JsonSchema(Model model, string schema) => new Grammar(model, GrammarKind.JsonSchema, schema, nameof(schema));

        /// <summary>Texts that a regular expression fits as a whole, in the syntax of Rust's crate regex.</summary>
        /// <param name="model">The model whose generations follow it.</param>
        /// <param name="pattern">The expression.</param>
        public static Grammar Regex(Model model, string pattern) => new Grammar(model, GrammarKind.Regex, pattern, nameof(pattern));

        /// <summary>Texts of a context-free grammar, in the dialect of Lark that llguidance reads.</summary>
        /// <param name="model">The model whose generations follow it.</param>
        /// <param name="grammar">The grammar, whose first rule is start.</param>
        public static Grammar Lark(Model model, string grammar) => new Grammar(model, GrammarKind.Lark, grammar, nameof(grammar));

        /// <summary>Texts of a context-free grammar in GBNF, as llama.cpp reads it.</summary>
        /// <param name="model">The model whose generations follow it.</param>
        /// <param name="grammar">The grammar, whose rule root is the whole text.</param>
        public static Grammar Gbnf(Model model, string grammar) => new Grammar(model, GrammarKind.Gbnf, grammar, nameof(grammar));

        /// <summary>One of several texts.</summary>
        /// <param name="model">The model whose generations follow it.</param>
        /// <param name="choices">The texts.</param>
        public static Grammar Choices(Model model, IEnumerable<string> choices)
        {
            if (choices == null)
                throw new ArgumentNullException(nameof(choices));
            var json = new StringBuilder("[");
            foreach (string choice in choices)
            {
                if (json.Length > 1)
                    json.Append(',');
                Json.Write(json, choice ?? throw new ArgumentNullException(nameof(choices)));
            }
            return new Grammar(model, GrammarKind.Choices, json.Append(']').ToString(), nameof(choices));
        }

        /// <summary>Frees it once no generation follows it.</summary>
        public void Dispose() => Handle.Dispose();
    }
}
