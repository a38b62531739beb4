// Files of a model that the host gives: bytes in memory, and streams. What a stream throws is kept while the model is loaded, and thrown
// again when the native call has returned.

using System;
using System.Collections.Generic;
using System.IO;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// <summary>A file of a model for <see cref="Model.LoadFiles"/>: its name in the model's directory, such as config.json, and its content. The content must not change, and is used until the library needs it no more: at the latest until the model and its sessions are gone.</summary>
    public sealed class ModelFile
    {
        /// <summary>Bytes in memory. They are pinned, and not copied.</summary>
        public ModelFile(string name, byte[] content) : this(name)
        {
            if (content == null)
                throw new ArgumentNullException(nameof(content));
            Lend = () => new LentBytes(content);
        }

#if NETCOREAPP
        /// <summary>Bytes in memory. They are pinned, and not copied.</summary>
        public ModelFile(string name, ReadOnlyMemory<byte> content) : this(name)
        {
            Lend = () => new LentMemory(content);
        }
#endif

        /// <summary>A stream that can seek. It is read by several threads, one after the other, and only by the library.</summary>
        /// <param name="name">The name in the model's directory.</param>
        /// <param name="content">The stream.</param>
        /// <param name="leaveOpen">Whether it stays open when the library needs it no more.</param>
        public ModelFile(string name, Stream content, bool leaveOpen = false) : this(name)
        {
            if (content == null)
                throw new ArgumentNullException(nameof(content));
            if (!content.CanRead || !content.CanSeek)
                throw new ArgumentException(name + " is a stream that cannot be read or cannot seek; copy it to a MemoryStream", nameof(content));
            Lend = () => new LentStream(content, leaveOpen);
        }

        ModelFile(string name)
        {
            Name = name ?? throw new ArgumentNullException(nameof(name));
        }

        /// <summary>The name in the model's directory.</summary>
        public string Name { get; }

        internal Func<LentFile> Lend { get; }
    }

    /// A file that the library uses until it releases it.
    internal abstract unsafe class LentFile : IDisposable
    {
        internal abstract ulong Size { get; }

        /// Where the bytes are, or null for what is read.
        internal virtual IntPtr Data => IntPtr.Zero;

        /// The first exception of a read.
        internal ExceptionDispatchInfo Thrown { get; set; }

        internal virtual long Read(ulong offset, byte* to, ulong size) => throw new NotSupportedException();

        public abstract void Dispose();
    }

    internal sealed unsafe class LentBytes : LentFile
    {
        readonly int size;
        GCHandle pin;

        internal LentBytes(byte[] content)
        {
            size = content.Length;
            pin = GCHandle.Alloc(content, GCHandleType.Pinned);
            Data = pin.AddrOfPinnedObject();
        }

        internal override ulong Size => (ulong)size;

        internal override IntPtr Data { get; }

        public override void Dispose() => pin.Free();
    }

#if NETCOREAPP
    internal sealed unsafe class LentMemory : LentFile
    {
        readonly int size;
        System.Buffers.MemoryHandle pin;

        internal LentMemory(ReadOnlyMemory<byte> content)
        {
            size = content.Length;
            pin = content.Pin();
        }

        internal override ulong Size => (ulong)size;

        internal override IntPtr Data => (IntPtr)pin.Pointer;

        public override void Dispose() => pin.Dispose();
    }
#endif

    internal sealed unsafe class LentStream : LentFile
    {
        const int Piece = 1 << 16;

        readonly Stream stream;
        readonly bool leaveOpen;
        readonly byte[] piece = new byte[Piece];

        internal LentStream(Stream stream, bool leaveOpen)
        {
            this.stream = stream;
            this.leaveOpen = leaveOpen;
            Size = (ulong)stream.Length;
        }

        internal override ulong Size { get; }

        /// Reads until the stream ends.
        internal override long Read(ulong offset, byte* to, ulong size)
        {
            lock (piece)
            {
                stream.Position = (long)offset;
                long done = 0;
                while (done < (long)size)
                {
                    int count = stream.Read(piece, 0, (int)Math.Min(Piece, (long)size - done));
                    if (count <= 0)
                        break;
                    Marshal.Copy(piece, 0, (IntPtr)(to + done), count);
                    done += count;
                }
                return done;
            }
        }

        public override void Dispose()
        {
            if (!leaveOpen)
                stream.Dispose();
        }
    }

    /// Files for one native call, which takes them all, whatever comes of it.
    internal sealed unsafe class GivenFiles
    {
        static readonly FileRead OnReadCallback = OnRead;
        static readonly FileRelease OnReleaseCallback = OnRelease;
        static readonly IntPtr OnReadAddress = Marshal.GetFunctionPointerForDelegate(OnReadCallback);
        static readonly IntPtr OnReleaseAddress = Marshal.GetFunctionPointerForDelegate(OnReleaseCallback);

        readonly List<byte[]> names = new List<byte[]>();
        readonly List<ModelFile> files = new List<ModelFile>();
        readonly List<LentFile> lent = new List<LentFile>();

        internal GivenFiles(IEnumerable<ModelFile> files)
        {
            if (files == null)
                throw new ArgumentNullException(nameof(files));
            foreach (ModelFile file in files)
            {
                if (file == null)
                    throw new ArgumentException("one of the files is null", nameof(files));
                this.files.Add(file);
                names.Add(Interop.Utf8(file.Name, nameof(files)));
            }
        }

        /// Gives the files to a native call. Before it begins they are lent all, or none.
        internal int Give(NativeCall call)
        {
            try
            {
                foreach (ModelFile file in files)
                    lent.Add(file.Lend());
            }
            catch
            {
                lent.ForEach(file => file.Dispose());
                throw;
            }
            var pins = new List<GCHandle>();
            try
            {
                var array = new NativeModelFile[files.Count];
                for (int i = 0; i < array.Length; i++)
                {
                    GCHandle name = GCHandle.Alloc(names[i], GCHandleType.Pinned);
                    pins.Add(name);
                    array[i].Name = (byte*)name.AddrOfPinnedObject();
                    array[i].NameLength = Interop.Size(names[i].Length);
                    array[i].Size = lent[i].Size;
                    array[i].Data = lent[i].Data;
                    if (lent[i] is LentStream)
                        array[i].Read = OnReadAddress;
                    array[i].Release = OnReleaseAddress;
                    array[i].User = GCHandle.ToIntPtr(GCHandle.Alloc(lent[i]));
                }
                fixed (NativeModelFile* at = array)
                    return call(at, Interop.Size(array.Length), Interop.Size(sizeof(NativeModelFile)));
            }
            finally
            {
                pins.ForEach(pin => pin.Free());
            }
        }

        /// Throws again what a stream threw, if one did.
        internal void Rethrow()
        {
            foreach (LentFile file in lent)
                file.Thrown?.Throw();
        }

        internal delegate int NativeCall(NativeModelFile* files, UIntPtr count, UIntPtr size);

        [MonoPInvokeCallback(typeof(FileRead))]
        static long OnRead(IntPtr user, ulong offset, IntPtr to, UIntPtr size)
        {
            var file = (LentFile)GCHandle.FromIntPtr(user).Target;
            try
            {
                return file.Read(offset, (byte*)to, (ulong)size);
            }
            catch (Exception e)
            {
                file.Thrown = file.Thrown ?? ExceptionDispatchInfo.Capture(e);
                return -1;
            }
        }

        [MonoPInvokeCallback(typeof(FileRelease))]
        static void OnRelease(IntPtr user)
        {
            GCHandle handle = GCHandle.FromIntPtr(user);
            try
            {
                ((LentFile)handle.Target).Dispose();
            }
            catch (Exception)
            {
                // There is no call that it could come out of: the model may go on any thread.
            }
            handle.Free();
        }
    }
}
