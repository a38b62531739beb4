// Files of rows as tokens, of which some are learned.

using System;
using System.Runtime.InteropServices;
using System.Threading;

namespace LibNVFP4
{
    /// <summary>How training data is read.</summary>
    public sealed class DataOptions
    {
        /// <summary>What all files are made of. Default: what their names say.</summary>
        public DataFormat Format { get; set; } = DataFormat.ByName;

        /// <summary>What becomes of rows longer than a window. Texts are cut into several documents. Default: they are an error.</summary>
        public LongRows LongRows { get; set; } = LongRows.Refuse;

        /// <summary>What becomes of empty reasoning before an answer. Default: it is learned.</summary>
        public EmptyThink EmptyThink { get; set; } = EmptyThink.Learn;

        /// <summary>Whether all tokens are learned, and not only answers. Default: no.</summary>
        public bool TrainOnAll { get; set; }

        /// <summary>Whether rows that cannot be used are left out, rather than an error. Default: no.</summary>
        public bool SkipBadRows { get; set; }

        /// <summary>The most tokens of a document. Default: null, 2048 or the model's context if that is less.</summary>
        public int? Window { get; set; }

        /// <summary>What stands between the documents of a text; its line ends match those of the file. Default: null, for none.</summary>
        public string Separator { get; set; }
    }

    /// <summary>The documents of files for a model, as nvfp4 train reads them. Any thread may use it.</summary>
    public sealed unsafe class TrainingData : IDisposable
    {
        readonly DataHandle handle;

        TrainingData(DataHandle handle)
        {
            this.handle = handle;
        }

        /// <summary>Reads files.</summary>
        /// <param name="model">The model that is to learn them: a directory or file, of which no weights are read.</param>
        /// <param name="files">The files.</param>
        /// <param name="options">Null for the defaults.</param>
        /// <param name="progress">Takes the rows that are read and those of the file.</param>
        /// <param name="cancellation">Stops it.</param>
        public static TrainingData Read(string model, string[] files, DataOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            return Open(Defaults(), model, files, options ?? new DataOptions(), progress, cancellation);
        }

        // Apart from Read(), as Mono looks for the library when it compiles what calls it, and Defaults() loads it.
        static TrainingData Open(NativeDataOptions raw, string model, string[] files, DataOptions options, ProgressHandler progress,
            CancellationToken cancellation)
        {
            byte[] path = Interop.Utf8(model, nameof(model));
            byte[] separator = options.Separator == null ? null : Interop.Utf8(options.Separator, nameof(options.Separator));
            raw.Format = (int)options.Format;
            raw.LongRows = (int)options.LongRows;
            raw.EmptyThink = (int)options.EmptyThink;
            raw.TrainOnAll = Interop.Flag(options.TrainOnAll);
            raw.SkipBadRows = Interop.Flag(options.SkipBadRows);
            raw.Window = Interop.Size(options.Window ?? 0);
            DataHandle handle;
            using (var paths = new PinnedPaths(files ?? throw new ArgumentNullException(nameof(files))))
            using (var call = new Call(cancellation, progress))
                fixed (byte* at = path, between = separator)
                {
                    raw.Separator = between;
                    raw.SeparatorLength = Interop.Size(separator == null ? 0 : separator.Length);
                    call.Finish(Native.NVFP4_data_read(at, Interop.Size(path.Length), paths.Paths, paths.Lengths, paths.Count, &raw,
                        call.Options, out handle));
                }
            return new TrainingData(handle);
        }

        static NativeDataOptions Defaults()
        {
            var raw = new NativeDataOptions[1];
            Library.Call(() =>
            {
                fixed (NativeDataOptions* at = raw)
                    return Native.NVFP4_data_options_init(at, (uint)sizeof(NativeDataOptions));
            });
            return raw[0];
        }

        /// <summary>The number of documents.</summary>
        public int Count
        {
            get
            {
                UIntPtr count;
                Interop.Check(Native.NVFP4_data_count(handle, &count));
                return checked((int)count.ToUInt64());
            }
        }

        /// <summary>A document as a batch of its own.</summary>
        public MicroBatch this[int index]
        {
            get
            {
                UIntPtr length;
                Interop.Check(Native.NVFP4_data_document(handle, Interop.Size(index), null, null, null, UIntPtr.Zero, &length));
                int count = checked((int)length.ToUInt64());
                int[] tokens = new int[count], labels = new int[count];
                var weights = new float[count];
                fixed (int* ids = tokens, next = labels)
                fixed (float* counts = weights)
                    Interop.Check(Native.NVFP4_data_document(handle, Interop.Size(index), ids, next, counts, length, &length));
                return new MicroBatch(tokens, labels, new[] { count }, weights);
            }
        }

        /// <summary>A document as JSON: file, line, tokens, pieces (the text that each completes), special, learned, weights.</summary>
        public string Mask(int index) => Interop.Text((buffer, capacity, length) =>
            Native.NVFP4_data_mask(handle, Interop.Size(index), buffer, capacity, length));

        /// <summary>What was read, as JSON: files, rows, bad_rows, truncated, dropped.</summary>
        public string Report => Interop.Text((buffer, capacity, length) => Native.NVFP4_data_report(handle, buffer, capacity, length));

        /// <summary>Gives up the documents.</summary>
        public void Dispose() => handle.Dispose();
    }
}
