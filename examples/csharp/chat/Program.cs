// Talk with a language model, in C#.
//
//     dotnet run --project examples/csharp/chat -- MODEL "Why is the sky blue?"     answers and ends
//     dotnet run --project examples/csharp/chat -- MODEL                            a conversation, one turn per line
//
// Ctrl+C ends an answer, and between answers the program. On Mono: mcs -r:LibNVFP4.dll Program.cs && mono Program.exe MODEL

using System;
using System.Threading;
using LibNVFP4;

static class Program
{
    static int Main(string[] args)
    {
        if (args.Length != 1 && args.Length != 2)
        {
            Console.Error.WriteLine("usage: chat MODEL [PROMPT]");
            return 2;
        }
        Console.OutputEncoding = new System.Text.UTF8Encoding(false);
        try
        {
            var sessionOptions = new SessionOptions { Eviction = Eviction.DropOldest };
            using (Model model = Model.Load(args[0]))
            using (var chat = new ChatSession(model, "You are a helpful assistant.", sessionOptions))
            {
                // The GPU with room for the model, or else the CPU.
                Console.Error.WriteLine("[{0}]", model.Info.DeviceChoice);
                if (args.Length == 2)
                    Answer(chat, args[1]);
                string line;
                while (args.Length == 1 && (line = Ask()) != null)
                    if (line.Length > 0)
                        Answer(chat, line);
            }
            return 0;
        }
        catch (Nvfp4Exception e)
        {
            // The message says what was wrong and what would be right.
            Console.Error.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }

    static string Ask()
    {
        Console.Error.Write("> ");
        return Console.ReadLine();
    }

    static void Answer(ChatSession chat, string text)
    {
        using (var stop = new CancellationTokenSource())
        {
            ConsoleCancelEventHandler handler = (sender, e) =>
            {
                e.Cancel = true;
                stop.Cancel();
            };
            Console.CancelKeyPress += handler;
            try
            {
                // Each piece is made when the loop asks for it, and is whole characters. Tokens are sampled as the model recommends,
                // where no GenerateOptions say otherwise.
                foreach (string piece in chat.Stream(text, null, stop.Token))
                    Console.Write(piece);
                Console.WriteLine();
                Generation result = chat.LastGeneration;
                Console.Error.WriteLine("[{0} tokens, the first after {1:F2} s]", result.GeneratedTokens, result.FirstToken.TotalSeconds);
            }
            catch (OperationCanceledException)
            {
                Console.WriteLine(" ...");
            }
            finally
            {
                Console.CancelKeyPress -= handler;
            }
        }
    }
}
