// Loads the library, and says which version and file it is or why it cannot be loaded.

using System;
using LibNVFP4;

static class Load
{
    static int Main()
    {
        try
        {
            Console.WriteLine(Library.Version + " " + Library.Path);
            return 0;
        }
        catch (Nvfp4LoadException e)
        {
            Console.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }
}
