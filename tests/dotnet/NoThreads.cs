// Streams and queues when the system refuses another thread, as a container with a limit of pids does: NoThreads RECITER.
//
// Prints their output. Has no effect for a user whose threads are not counted, such as root.

using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using LibNVFP4;

static class NoThreads
{
    struct Limit
    {
        internal UIntPtr Soft, Hard;
    }

    const int Threads = 6;

    [DllImport("libc")]
    static extern int getrlimit(int resource, out Limit limit);

    [DllImport("libc")]
    static extern int setrlimit(int resource, ref Limit limit);

    static int Main(string[] args)
    {
        using (Model model = Model.Load(args[0]))
        using (var chat = new ChatSession(model))
        using (var queue = new Queue(model))
        {
            // By now the runtime has started its own threads, the console's too.
            string said = string.Concat(chat.Stream("Hi"));
            Console.WriteLine("with threads: " + said);
            getrlimit(Threads, out Limit limit);
            Limit none = limit;
            none.Soft = new UIntPtr(1);
            setrlimit(Threads, ref none);
            long length = chat.Length;
            Refused(() => Count(chat.Stream("Hi")));
#if NETCOREAPP
            Refused(() => CountAsync(chat.StreamAsync("Hi")));
#endif
            Refused(() => queue.AskAsync(chat, "Hi").GetAwaiter().GetResult().Length);
            if (chat.Length != length)
                Console.WriteLine("the session has changed");
            setrlimit(Threads, ref limit);
            Console.WriteLine(said + " " + string.Concat(chat.Stream("Hi")) + " " + queue.AskAsync(chat, "Hi").GetAwaiter().GetResult());
        }
        return 0;
    }

    static int Count(IEnumerable<string> stream)
    {
        int pieces = 0;
        foreach (string piece in stream)
            pieces++;
        return pieces;
    }

#if NETCOREAPP
    static int CountAsync(IAsyncEnumerable<string> stream)
    {
        async System.Threading.Tasks.Task<int> Read()
        {
            int pieces = 0;
            await foreach (string piece in stream)
                pieces++;
            return pieces;
        }

        return Read().GetAwaiter().GetResult();
    }
#endif

    static void Refused(Func<int> read)
    {
        try
        {
            Console.WriteLine("not refused, but " + read() + " pieces");
        }
        catch (Exception e)
        {
            Console.WriteLine(e.GetType().Name + ": " + e.Message);
        }
    }
}
