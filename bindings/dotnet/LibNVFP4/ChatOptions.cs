// How a turn of a conversation is written and answered.

using System;

namespace LibNVFP4
{
    internal unsafe delegate int ChatOptionsCall(NativeChatOptions* options);

    /// <summary>How a turn is written and answered.</summary>
    public sealed unsafe class ChatOptions
    {
        /// <summary>Whether the model thinks before it answers, where it can do both: the variable enable_thinking of its template. Default: null, as the template has it.</summary>
        public bool? Thinking { get; set; }

        /// <summary>Other variables of the model's template, as a JSON object. One that the template never reads changes nothing, and is logged as a warning. Default: null, none.</summary>
        public string Variables { get; set; }

        /// <summary>The tools that the model may call, as a JSON array in the form that chat servers take. Default: null, none.</summary>
        public string Tools { get; set; }

        /// <summary>A Jinja template that renders the conversation in place of the model's own, by which reasoning, tool calls and the ends of answers are recognised too. Default: null, the model's.</summary>
        public string ChatTemplate { get; set; }

        /// <summary>Whether earlier answers stay in the session with their reasoning, whatever the template does about it: a turn then runs only what it adds, but the model sees what it was not trained on. Default: no.</summary>
        public bool KeepReasoning { get; set; }

        /// <summary>The most tokens of reasoning; then the answer follows. Default: null, any number.</summary>
        public int? ReasoningBudget { get; set; }

        /// <summary>A copy, to change something in.</summary>
        public ChatOptions Clone() => (ChatOptions)MemberwiseClone();

        /// Makes a call that takes options; null are the library's own.
        internal static int Use(ChatOptions options, ChatOptionsCall call)
        {
            if (options == null)
                return call(null);
            byte[] variables = Interop.Utf8(options.AllVariables(), nameof(Variables));
            byte[] tools = Interop.Utf8(options.Tools ?? "", nameof(Tools));
            byte[] template = Interop.Utf8(options.ChatTemplate ?? "", nameof(ChatTemplate));
            NativeChatOptions raw;
            Interop.Check(Native.NVFP4_chat_options_init(&raw, (uint)sizeof(NativeChatOptions)));
            raw.KeepReasoning = Interop.Flag(options.KeepReasoning);
            if (options.ReasoningBudget is int tokens)
                raw.ReasoningBudget = tokens;
            fixed (byte* atVariables = variables, atTools = tools, atTemplate = template)
            {
                raw.Variables = atVariables;
                raw.VariablesLength = Interop.Size(variables.Length);
                raw.Tools = atTools;
                raw.ToolsLength = Interop.Size(tools.Length);
                raw.ChatTemplate = atTemplate;
                raw.ChatTemplateLength = Interop.Size(template.Length);
                return call(&raw);
            }
        }

        /// The variables with that of thinking. What is no JSON object stays as it is, for the library to say so.
        string AllVariables()
        {
            string others = (Variables ?? "").Trim();
            if (!Thinking.HasValue)
                return others;
            string own = "\"enable_thinking\":" + (Thinking.Value ? "true" : "false");
            if (others.Length == 0)
                return "{" + own + "}";
            if (!others.StartsWith("{", StringComparison.Ordinal) || !others.EndsWith("}", StringComparison.Ordinal))
                return others;
            string members = others.Substring(1, others.Length - 2).Trim();
            return "{" + members + (members.Length == 0 ? "" : ",") + own + "}";
        }
    }
}
