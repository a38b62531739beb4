// Errors as exceptions: one base with the library's status and message, and a type for each kind that a host would catch by itself.

using System;

namespace LibNVFP4
{
    /// <summary>A call of the library failed. The message is the library's: what was wrong, and what would be right.</summary>
    public class Nvfp4Exception : Exception
    {
        internal Nvfp4Exception(Status status, string message) : base(message)
        {
            Status = status;
        }

        internal Nvfp4Exception(Status status, string message, Exception inner) : base(message, inner)
        {
            Status = status;
        }

        /// <summary>Which kind of failure it is.</summary>
        public Status Status { get; }

        internal static Nvfp4Exception Create(Status status, string message)
        {
            switch (status)
            {
                case Status.InvalidArgument: return new Nvfp4ArgumentException(message);
                case Status.Unsupported: return new Nvfp4UnsupportedException(message);
                case Status.OutOfMemory:
                case Status.OverBudget: return new Nvfp4OutOfMemoryException(status, message);
                case Status.Io: return new Nvfp4IOException(message);
                case Status.CorruptFile: return new Nvfp4CorruptFileException(message);
                case Status.NotFound: return new Nvfp4NotFoundException(message);
                case Status.ContextFull: return new Nvfp4ContextFullException(message);
                case Status.Busy: return new Nvfp4BusyException(message);
                case Status.Cancelled: return new Nvfp4CancelledException(message);
                case Status.DeviceUnavailable: return new Nvfp4DeviceUnavailableException(message);
                default: return new Nvfp4Exception(status, message);
            }
        }
    }

    /// <summary>The native library could not be loaded, or is not one that this assembly can work with. The message lists the files that were tried and why each failed.</summary>
    public sealed class Nvfp4LoadException : Nvfp4Exception
    {
        internal Nvfp4LoadException(Status status, string message) : base(status, message)
        {
        }
    }

    /// <summary>An argument is outside what the function accepts.</summary>
    public sealed class Nvfp4ArgumentException : Nvfp4Exception
    {
        internal Nvfp4ArgumentException(string message) : base(Status.InvalidArgument, message)
        {
        }
    }

    /// <summary>This build, device, format or architecture cannot do it.</summary>
    public sealed class Nvfp4UnsupportedException : Nvfp4Exception
    {
        internal Nvfp4UnsupportedException(string message) : base(Status.Unsupported, message)
        {
        }
    }

    /// <summary>
    /// The system refused memory or a thread, or an allocation would pass <see cref="Memory.Budget"/>;
    /// <see cref="Nvfp4Exception.Status"/> says which. Memory of objects that nobody holds any more was released first, and the
    /// call tried a second time.
    /// </summary>
    public sealed class Nvfp4OutOfMemoryException : Nvfp4Exception
    {
        internal Nvfp4OutOfMemoryException(Status status, string message, Exception inner = null) : base(status, message, inner)
        {
        }
    }

    /// <summary>Reading or writing a file failed.</summary>
    public sealed class Nvfp4IOException : Nvfp4Exception
    {
        internal Nvfp4IOException(string message) : base(Status.Io, message)
        {
        }
    }

    /// <summary>A file's content contradicts itself or its format.</summary>
    public sealed class Nvfp4CorruptFileException : Nvfp4Exception
    {
        internal Nvfp4CorruptFileException(string message) : base(Status.CorruptFile, message)
        {
        }
    }

    /// <summary>A named thing (file, tensor, key) is not there.</summary>
    public sealed class Nvfp4NotFoundException : Nvfp4Exception
    {
        internal Nvfp4NotFoundException(string message) : base(Status.NotFound, message)
        {
        }
    }

    /// <summary>The tokens would not fit in the session's context.</summary>
    public sealed class Nvfp4ContextFullException : Nvfp4Exception
    {
        internal Nvfp4ContextFullException(string message) : base(Status.ContextFull, message)
        {
        }
    }

    /// <summary>The object is in use by another call, of another thread or of the one whose callback this is.</summary>
    public sealed class Nvfp4BusyException : Nvfp4Exception
    {
        internal Nvfp4BusyException(string message) : base(Status.Busy, message)
        {
        }
    }

    /// <summary>Work other than a generation was stopped by <see cref="Session.Cancel"/>, by the session's Dispose, or by a callback. Where a CancellationToken stopped it, that is an OperationCanceledException instead.</summary>
    public sealed class Nvfp4CancelledException : Nvfp4Exception
    {
        internal Nvfp4CancelledException(string message) : base(Status.Cancelled, message)
        {
        }
    }

    /// <summary>No such device, or its driver is missing.</summary>
    public sealed class Nvfp4DeviceUnavailableException : Nvfp4Exception
    {
        internal Nvfp4DeviceUnavailableException(string message) : base(Status.DeviceUnavailable, message)
        {
        }
    }
}
