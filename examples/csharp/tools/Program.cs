// A model that calls functions of this program, in C#.
//
//     dotnet run --project examples/csharp/tools -- MODEL "Do I need an umbrella in Paris?"
//
// On Mono: mcs -r:LibNVFP4.dll Program.cs && mono Program.exe MODEL PROMPT

using System;
using System.Collections.Generic;
using LibNVFP4;

static class Program
{
    const string Tools = @"[{""type"": ""function"", ""function"": {
        ""name"": ""weather"", ""description"": ""The weather in a city, now."",
        ""parameters"": {""type"": ""object"", ""properties"": {""city"": {""type"": ""string""}}, ""required"": [""city""]}}}]";

    static int Main(string[] args)
    {
        if (args.Length != 2)
        {
            Console.Error.WriteLine("usage: tools MODEL PROMPT");
            return 2;
        }
        Console.OutputEncoding = new System.Text.UTF8Encoding(false);
        try
        {
            using (Model model = Model.Load(args[0]))
            using (var chat = new ChatSession(model, turns: new ChatOptions { Tools = Tools }))
                Console.WriteLine(Answer(chat, args[1]));
            return 0;
        }
        catch (Nvfp4Exception e)
        {
            Console.Error.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }

    static string Answer(ChatSession chat, string text)
    {
        string answer = chat.Ask(text);
        // As long as the answer has calls, their results are passed back. The limit is for models that never stop calling.
        for (int turn = 0; chat.ToolCalls.Count > 0 && turn < 5; turn++)
        {
            IList<ChatMessage> messages = chat.Messages;
            foreach (ToolCall call in chat.ToolCalls)
            {
                Console.Error.WriteLine("[{0}]", call);
                messages.Add(ChatMessage.ToolResult(call, call.Name == "weather" ? Weather(call.Arguments) : "There is no such tool."));
            }
            answer = chat.Complete(messages);
        }
        return answer;
    }

    // Arguments are a JSON object, which a real program parses.
    static string Weather(string arguments) => "Rain, 12 degrees, as asked for " + arguments;
}
