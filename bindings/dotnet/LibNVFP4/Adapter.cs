// Adapters: low-rank changes of a model that sessions name.

using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>What an adapter is, and how many sessions use it.</summary>
    public sealed class AdapterInfo
    {
        internal AdapterInfo(string json)
        {
            Dictionary<string, object> members = Json.Object(json);
            Name = (string)members["name"];
            Rank = checked((int)(long)members["rank"]);
            Projections = checked((int)(long)members["projections"]);
            Bytes = (long)members["bytes"];
            Identity = (string)members["identity"];
            Sessions = (long)members["sessions"];
        }

        /// <summary>The name of its directory.</summary>
        public string Name { get; }

        /// <summary>The largest rank of its factors.</summary>
        public int Rank { get; }

        /// <summary>The number of adapted linear maps.</summary>
        public int Projections { get; }

        /// <summary>Bytes in memory.</summary>
        public long Bytes { get; }

        /// <summary>16 hexadecimal digits, the same for the same content.</summary>
        public string Identity { get; }

        /// <summary>The number of sessions that use it now, forks included.</summary>
        public long Sessions { get; }
    }

    /// <summary>
    /// A LoRA adapter of a model, from a directory that nvfp4 train --adapter or peft wrote. Sessions and chats whose
    /// <see cref="SessionOptions.Adapter"/> it is run with it, any number of them, beside others with other adapters and without one. It may be
    /// disposed of while sessions use it: its memory goes with the last of them.
    /// </summary>
    public sealed unsafe class Adapter : IDisposable
    {
        internal readonly AdapterHandle Handle;

        Adapter(AdapterHandle handle)
        {
            Handle = handle;
        }

        /// <summary>Loads an adapter. One of another base, or of another kind than LoRA beside linear maps, is an error that names what differs.</summary>
        /// <param name="model">The model, on the CPU.</param>
        /// <param name="path">The directory.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static Adapter Load(Model model, string path, CancellationToken cancellation = default(CancellationToken))
        {
            if (model == null)
                throw new ArgumentNullException(nameof(model));
            byte[] bytes = Interop.Utf8(path, nameof(path));
            AdapterHandle handle = null;
            using (var call = new Call(cancellation, null))
                call.Finish(Interop.Try(() =>
                {
                    fixed (byte* at = bytes)
                        return Native.NVFP4_adapter_load(model.Handle, at, Interop.Size(bytes.Length), call.Options, out handle);
                }));
            return new Adapter(handle);
        }

        /// <summary>What it is, and how many sessions use it now.</summary>
        public AdapterInfo Info =>
            new AdapterInfo(Interop.Text((buffer, capacity, length) => Native.NVFP4_adapter_info(Handle, buffer, capacity, length)));

        /// <summary>Waits until no session uses it, so that Dispose frees its memory at once.</summary>
        /// <param name="cancellation">Stops waiting, with an OperationCanceledException.</param>
        public void Wait(CancellationToken cancellation = default(CancellationToken))
        {
            using (var call = new Call(cancellation, null))
                call.Finish(Interop.Try(() => Native.NVFP4_adapter_wait(Handle, call.Options)));
        }

        /// <summary>The same, on a thread of its own.</summary>
        /// <param name="cancellation">Stops waiting.</param>
        public Task WaitAsync(CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() =>
            {
                Wait(cancellation);
                return true;
            }, cancellation);

        /// <summary>Frees it once no session uses it.</summary>
        public void Dispose() => Handle.Dispose();
    }
}
