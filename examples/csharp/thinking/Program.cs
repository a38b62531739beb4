// A model that thinks before it answers, in C#.
//
//     dotnet run --project examples/csharp/thinking -- MODEL "How many primes are there below 100?"
//
// Its reasoning goes to stderr, its answer to stdout: once after as much reasoning as it likes, once after 200 tokens of it at
// most, and once without any. On Mono: mcs -r:LibNVFP4.dll Program.cs && mono Program.exe MODEL PROMPT

using System;
using System.Collections.Generic;
using System.IO;
using LibNVFP4;

static class Program
{
    static int Main(string[] args)
    {
        if (args.Length != 2)
        {
            Console.Error.WriteLine("usage: thinking MODEL PROMPT");
            return 2;
        }
        Console.OutputEncoding = new System.Text.UTF8Encoding(false);
        try
        {
            using (Model model = Model.Load(args[0]))
            using (var chat = new ChatSession(model))
                Think(chat, args[1]);
            return 0;
        }
        catch (Nvfp4Exception e)
        {
            Console.Error.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }

    static void Think(ChatSession chat, string text)
    {
        // A handler receives every part of an answer; Ask and Stream give only the answer.
        chat.Chat(text, piece =>
        {
            TextWriter to = piece.Part == Part.Reasoning ? Console.Error : Console.Out;
            to.Write(piece.Text);
            return true;
        });
        Console.WriteLine();
        // The same question again: the tokens in the session are not run again.
        IList<ChatMessage> question = chat.Messages;
        question.RemoveAt(question.Count - 1);
        foreach (var turn in new[] { new ChatOptions { ReasoningBudget = 200 }, new ChatOptions { Thinking = false } })
        {
            string answer = chat.Complete(question, turn: turn);
            Console.Error.WriteLine("[{0} tokens, {1} characters of reasoning]", chat.LastGeneration.GeneratedTokens, chat.Reasoning.Length);
            Console.WriteLine(answer);
        }
    }
}
