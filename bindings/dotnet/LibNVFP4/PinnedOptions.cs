// Options of a generation with their arrays and texts held in place for a call.

using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    internal sealed unsafe class PinnedOptions : IDisposable
    {
        internal NativeGenerateOptions Raw;

        readonly List<GCHandle> pins = new List<GCHandle>();

        internal PinnedOptions(GenerateOptions options)
        {
            if (options == null)
                return;
            Raw = options.Raw;
            try
            {
                if (options.StopTokens != null)
                {
                    int[] tokens = new List<int>(options.StopTokens).ToArray();
                    Raw.StopTokens = (int*)Pin(tokens);
                    Raw.StopTokenCount = Interop.Size(tokens.Length);
                }
                if (options.StopStrings != null)
                {
                    var texts = new List<IntPtr>();
                    var lengths = new List<UIntPtr>();
                    foreach (string text in options.StopStrings)
                    {
                        byte[] bytes = Interop.Utf8(text, nameof(options.StopStrings));
                        texts.Add(Pin(bytes));
                        lengths.Add(Interop.Size(bytes.Length));
                    }
                    Raw.StopStrings = (byte**)Pin(texts.ToArray());
                    Raw.StopStringLengths = (UIntPtr*)Pin(lengths.ToArray());
                    Raw.StopStringCount = Interop.Size(texts.Count);
                }
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        public void Dispose()
        {
            foreach (GCHandle pin in pins)
                pin.Free();
            pins.Clear();
        }

        IntPtr Pin(object array)
        {
            GCHandle pin = GCHandle.Alloc(array, GCHandleType.Pinned);
            pins.Add(pin);
            return pin.AddrOfPinnedObject();
        }
    }
}
