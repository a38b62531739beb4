// Load [MODEL]: loads the library, and prints its version and file, or why it cannot be loaded. With a model, the first call is loading it.

using System;
using System.Threading;
using LibNVFP4;

static class Load
{
    static int Main(string[] args)
    {
        try
        {
            using (var source = new CancellationTokenSource())
                if (args.Length > 0)
                    Model.Load(args[0], cancellation: source.Token).Dispose();
            Console.WriteLine(Library.Version + " " + Library.Path);
            return 0;
        }
        catch (Nvfp4Exception e)
        {
            Console.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }
}
