using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// Paths as the library takes them, while this is not disposed.
    internal sealed unsafe class PinnedPaths : IDisposable
    {
        readonly List<GCHandle> pins = new List<GCHandle>();

        internal PinnedPaths(string[] files)
        {
            var paths = new IntPtr[files.Length];
            var lengths = new UIntPtr[files.Length];
            for (int i = 0; i < files.Length; i++)
            {
                byte[] file = Interop.Utf8(files[i], nameof(files));
                paths[i] = Pin(file);
                lengths[i] = Interop.Size(file.Length);
            }
            Paths = (byte**)Pin(paths);
            Lengths = (UIntPtr*)Pin(lengths);
            Count = Interop.Size(files.Length);
        }

        internal byte** Paths { get; }

        internal UIntPtr* Lengths { get; }

        internal UIntPtr Count { get; }

        IntPtr Pin(Array array)
        {
            GCHandle pin = GCHandle.Alloc(array, GCHandleType.Pinned);
            pins.Add(pin);
            return pin.AddrOfPinnedObject();
        }

        public void Dispose()
        {
            pins.ForEach(pin => pin.Free());
            pins.Clear();
        }
    }
}
