// What is said in conversations, and the JSON of it that the library takes and gives.

using System;
using System.Collections.Generic;
using System.Text;

namespace LibNVFP4
{
    /// <summary>A call of a tool that a model makes.</summary>
    public sealed class ToolCall
    {
        /// <summary>A call.</summary>
        /// <param name="id">What the message with its result names it by.</param>
        /// <param name="name">The tool.</param>
        /// <param name="arguments">A JSON object.</param>
        public ToolCall(string id, string name, string arguments)
        {
            Id = id ?? throw new ArgumentNullException(nameof(id));
            Name = name ?? throw new ArgumentNullException(nameof(name));
            Arguments = arguments ?? throw new ArgumentNullException(nameof(arguments));
        }

        /// <summary>What the message with its result names it by: see <see cref="ChatMessage.ToolResult"/>.</summary>
        public string Id { get; }

        /// <summary>The tool.</summary>
        public string Name { get; }

        /// <summary>A JSON object.</summary>
        public string Arguments { get; }

        /// <summary>The call that the text of a <see cref="Part.ToolCall"/> is.</summary>
        public static ToolCall FromJson(string json)
        {
            if (json == null)
                throw new ArgumentNullException(nameof(json));
            return From(Json.Object(json));
        }

        internal static ToolCall From(Dictionary<string, object> call)
        {
            var function = (Dictionary<string, object>)call["function"];
            return new ToolCall(Json.Text(call, "id") ?? "", (string)function["name"], (string)function["arguments"]);
        }

        internal static IList<ToolCall> List(List<object> calls)
        {
            var list = new List<ToolCall>();
            foreach (object call in calls)
                list.Add(From((Dictionary<string, object>)call));
            return list;
        }

        internal void Write(StringBuilder to)
        {
            to.Append('{');
            if (Id.Length > 0)
            {
                to.Append("\"id\":");
                Json.Write(to, Id);
                to.Append(',');
            }
            to.Append("\"type\":\"function\",\"function\":{\"name\":");
            Json.Write(to, Name);
            to.Append(",\"arguments\":");
            Json.Write(to, Arguments);
            to.Append("}}");
        }

        /// <summary>"weather({"city":"Paris"})".</summary>
        public override string ToString() => Name + "(" + Arguments + ")";
    }

    /// <summary>A message of a conversation.</summary>
    public sealed class ChatMessage
    {
        /// <summary>A message.</summary>
        public ChatMessage(string role, string content)
        {
            Role = role ?? throw new ArgumentNullException(nameof(role));
            Content = content;
        }

        /// <summary>Who speaks: "system", "developer", "user", "assistant", "tool".</summary>
        public string Role { get; }

        /// <summary>What is said; null where an assistant only calls tools.</summary>
        public string Content { get; }

        /// <summary>The assistant's reasoning before its answer, or null.</summary>
        public string ReasoningContent { get; set; }

        /// <summary>The calls that an assistant makes, or null.</summary>
        public IList<ToolCall> ToolCalls { get; set; }

        /// <summary>The call whose result a tool's message is, or null.</summary>
        public string ToolCallId { get; set; }

        /// <summary>Who speaks, or the tool that a tool's message is from, or null.</summary>
        public string Name { get; set; }

        /// <summary>What the user says.</summary>
        public static ChatMessage User(string content) => new ChatMessage("user", content);

        /// <summary>What the model is told about its role.</summary>
        public static ChatMessage System(string content) => new ChatMessage("system", content);

        /// <summary>The result of a call.</summary>
        public static ChatMessage ToolResult(ToolCall call, string content)
        {
            if (call == null)
                throw new ArgumentNullException(nameof(call));
            return new ChatMessage("tool", content) { ToolCallId = call.Id.Length > 0 ? call.Id : null };
        }

        /// <summary>A conversation as the JSON that chat servers take.</summary>
        public static string ToJson(IEnumerable<ChatMessage> messages)
        {
            if (messages == null)
                throw new ArgumentNullException(nameof(messages));
            var json = new StringBuilder("[");
            foreach (ChatMessage message in messages)
            {
                if (json.Length > 1)
                    json.Append(',');
                message.Write(json);
            }
            return json.Append(']').ToString();
        }

        /// The messages in the library's JSON.
        internal static IList<ChatMessage> List(string json)
        {
            var messages = new List<ChatMessage>();
            foreach (object item in Json.List(json))
            {
                var members = (Dictionary<string, object>)item;
                messages.Add(new ChatMessage((string)members["role"], Lines(members["content"]))
                {
                    ReasoningContent = Json.Text(members, "reasoning_content"),
                    ToolCalls = members.TryGetValue("tool_calls", out object calls) ? ToolCall.List((List<object>)calls) : null,
                    ToolCallId = Json.Text(members, "tool_call_id"),
                    Name = Json.Text(members, "name"),
                });
            }
            return messages;
        }

        /// A content, whose parts become lines.
        static string Lines(object content)
        {
            if (!(content is List<object> parts))
                return (string)content;
            var lines = new List<string>();
            foreach (object part in parts)
                lines.Add((string)((Dictionary<string, object>)part)["text"]);
            return string.Join("\n", lines);
        }

        void Write(StringBuilder to)
        {
            to.Append("{\"role\":");
            Json.Write(to, Role);
            Write(to, "content", Content);
            Write(to, "reasoning_content", ReasoningContent);
            Write(to, "tool_call_id", ToolCallId);
            Write(to, "name", Name);
            if (ToolCalls != null)
            {
                to.Append(",\"tool_calls\":[");
                for (int i = 0; i < ToolCalls.Count; i++)
                {
                    if (i > 0)
                        to.Append(',');
                    ToolCalls[i].Write(to);
                }
                to.Append(']');
            }
            to.Append('}');
        }

        static void Write(StringBuilder to, string name, string text)
        {
            if (text == null)
                return;
            to.Append(",\"").Append(name).Append("\":");
            Json.Write(to, text);
        }

        /// <summary>"user: Hello".</summary>
        public override string ToString() => Role + ": " + Content;
    }
}
