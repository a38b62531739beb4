// Weights prepared for products, what multiplies with them, and which 4-bit weights a set of tensors holds.

using System;
using System.Collections.Generic;

namespace LibNVFP4
{
    /// <summary>What multiplies with a weight.</summary>
    public sealed class Backend
    {
        internal Backend(string json)
        {
            Json = json;
            Dictionary<string, object> members = LibNVFP4.Json.Object(json);
            Format = (string)members["format"];
            Name = (string)members["backend"];
            Path = Get(members, "path");
            Device = Get(members, "device");
            FallbackReason = Get(members, "fallback_reason");
        }

        /// <summary>"nvfp4", "nf4" or "dense".</summary>
        public string Format { get; }

        /// <summary>"nvfp4-kernel", "nf4-kernel", "dequant-matmul" or "dense-matmul".</summary>
        public string Name { get; }

        /// <summary>The compute path that was asked for, or null for a weight that was dense from the start.</summary>
        public string Path { get; }

        /// <summary>The device's name.</summary>
        public string Device { get; }

        /// <summary>Why it is not the kernel of the format, where that was wanted; or null.</summary>
        public string FallbackReason { get; }

        /// <summary>All that the library says, as JSON.</summary>
        public string Json { get; }

        /// <summary>The JSON.</summary>
        public override string ToString() => Json;

        static string Get(Dictionary<string, object> members, string name)
        {
            members.TryGetValue(name, out object value);
            return value as string;
        }
    }

    /// <summary>A weight [N, K] prepared for products. It is immutable, and may be used by several threads at once.</summary>
    public sealed unsafe class LinearWeight : IDisposable
    {
        readonly WeightHandle handle;

        LinearWeight(WeightHandle handle)
        {
            this.handle = handle;
            long n, k;
            ulong bytes;
            Interop.Check(Native.NVFP4_weight_size(handle, &n, &k, &bytes));
            OutFeatures = n;
            InFeatures = k;
            ByteCount = bytes;
            handle.Press(bytes);
        }

        /// <summary>Prepares an NVFP4 weight. The tensors may be disposed of afterwards.</summary>
        public static LinearWeight Create(QuantizedTensor weight, WeightOptions options = null)
        {
            if (weight == null)
                throw new ArgumentNullException(nameof(weight));
            options = options ?? new WeightOptions();
            byte[] backend = options.Backend == null ? null : Interop.Utf8(options.Backend, nameof(options));
            NativeWeightOptions raw = options.Raw;
            raw.ScaleLayout = (int)weight.ScaleLayout;
            WeightHandle handle;
            var retry = new Retry();
            int status;
            fixed (byte* name = backend)
            {
                raw.Backend = name;
                raw.BackendLength = Interop.Size(backend == null ? 0 : backend.Length);
                do
                    status = Native.NVFP4_weight_create_nvfp4(weight.Codes.Handle, weight.Scales.Handle, weight.GlobalScale, &raw,
                        out handle);
                while (retry.After(status));
            }
            Interop.Check(status);
            return new LinearWeight(handle);
        }

        /// <summary>Prepares an NF4 weight [outFeatures, inFeatures].</summary>
        public static LinearWeight Create(Nf4Tensor weight, long outFeatures, long inFeatures, Tensor quantMap = null,
            WeightOptions options = null)
        {
            if (weight == null)
                throw new ArgumentNullException(nameof(weight));
            options = options ?? new WeightOptions();
            byte[] backend = options.Backend == null ? null : Interop.Utf8(options.Backend, nameof(options));
            NativeWeightOptions raw = options.Raw;
            WeightHandle handle;
            var retry = new Retry();
            int status;
            fixed (byte* name = backend)
            {
                raw.Backend = name;
                raw.BackendLength = Interop.Size(backend == null ? 0 : backend.Length);
                do
                    status = Native.NVFP4_weight_create_nf4(weight.Codes.Handle, weight.Absmax.Handle,
                        quantMap?.Handle ?? TensorHandle.None, weight.Block, outFeatures, inFeatures, &raw, out handle);
                while (retry.After(status));
            }
            Interop.Check(status);
            return new LinearWeight(handle);
        }

        /// <summary>Prepares a dense weight [N, K] of a floating type.</summary>
        public static LinearWeight Create(Tensor weight)
        {
            if (weight == null)
                throw new ArgumentNullException(nameof(weight));
            WeightHandle handle = null;
            Interop.Call(() => Native.NVFP4_weight_create_dense(weight.Handle, out handle));
            return new LinearWeight(handle);
        }

        /// <summary>Says which backend a weight of a format would have with these options, or fails as its preparation would.</summary>
        public static Backend SelectBackend(Format format, WeightOptions options = null)
        {
            options = options ?? new WeightOptions();
            byte[] backend = options.Backend == null ? null : Interop.Utf8(options.Backend, nameof(options));
            return new Backend(Interop.Text((buffer, capacity, length) =>
            {
                NativeWeightOptions raw = options.Raw;
                fixed (byte* name = backend)
                {
                    raw.Backend = name;
                    raw.BackendLength = Interop.Size(backend == null ? 0 : backend.Length);
                    return Native.NVFP4_backend_select((int)format, &raw, buffer, capacity, length);
                }
            }));
        }

        /// <summary>N.</summary>
        public long OutFeatures { get; }

        /// <summary>K.</summary>
        public long InFeatures { get; }

        /// <summary>Bytes in memory.</summary>
        public ulong ByteCount { get; }

        /// <summary>What multiplies with it.</summary>
        public Backend Backend =>
            new Backend(Interop.Text((buffer, capacity, length) => Native.NVFP4_weight_report(handle, buffer, capacity, length)));

        /// <summary>Multiplies: input [.., K] times the weight transposed, as [.., N] of a floating type.</summary>
        public Tensor Linear(Tensor input, DType dtype = DType.Float32, Activations activations = Activations.Exact)
        {
            if (input == null)
                throw new ArgumentNullException(nameof(input));
            return Tensor.Make((out TensorHandle result) =>
                Native.NVFP4_linear(handle, input.Handle, (int)activations, (int)dtype, out result));
        }

        /// <summary>Gives up the weight.</summary>
        public void Dispose() => handle.Dispose();
    }

    /// <summary>A tensor as its host describes it.</summary>
    public sealed class NamedTensor
    {
        /// <summary>Describes a tensor.</summary>
        public NamedTensor(string name, DType dtype, params long[] shape)
        {
            Name = name ?? throw new ArgumentNullException(nameof(name));
            DType = dtype;
            Shape = shape ?? throw new ArgumentNullException(nameof(shape));
        }

        /// <summary>Its name.</summary>
        public string Name { get; }

        /// <summary>The type of its elements.</summary>
        public DType DType { get; }

        /// <summary>Sizes, outermost first.</summary>
        public long[] Shape { get; }
    }

    /// <summary>What a set of tensors holds, in short.</summary>
    public sealed class SchemaSummary
    {
        internal SchemaSummary(NativeSchemaResult result)
        {
            Format = (Format)result.Format;
            Tensors = Interop.Long(result.Tensors);
            Weights = Interop.Long(result.Weights);
            Problems = Interop.Long(result.Problems);
            OutFeatures = result.OutFeatures;
            InFeatures = result.InFeatures;
            Block = result.Block;
        }

        /// <summary>The format of its 4-bit weights.</summary>
        public Format Format { get; }

        /// <summary>Tensors looked at.</summary>
        public long Tensors { get; }

        /// <summary>4-bit weights among them.</summary>
        public long Weights { get; }

        /// <summary>What <see cref="WeightSchema.Validate"/> would complain of.</summary>
        public long Problems { get; }

        /// <summary>If there is exactly one weight, its output features; or 0 where the shapes do not tell.</summary>
        public long OutFeatures { get; }

        /// <summary>If there is exactly one weight, its input features; or 0 where the shapes do not tell.</summary>
        public long InFeatures { get; }

        /// <summary>If there is exactly one weight, the values that share a scale; or 0 where the shapes do not tell.</summary>
        public long Block { get; }
    }

    /// <summary>A 4-bit weight of a set of tensors.</summary>
    public sealed class WeightDescription
    {
        internal WeightDescription(Dictionary<string, object> members)
        {
            Name = (string)members["name"];
            Format = (string)members["format"] == "nf4" ? Format.Nf4 : Format.Nvfp4;
            Convention = members["convention"] as string;
            var keys = new Dictionary<string, string>();
            foreach (KeyValuePair<string, object> key in (Dictionary<string, object>)members["keys"])
                keys[key.Key] = (string)key.Value;
            Keys = keys;
            Missing = Strings(members["missing"]);
            Extra = Strings(members["extra"]);
            Faults = Strings(members["faults"]);
            OutFeatures = (long?)members["out_features"];
            InFeatures = (long?)members["in_features"];
            Block = (long?)members["block"];
        }

        /// <summary>Its name.</summary>
        public string Name { get; }

        /// <summary>Its format.</summary>
        public Format Format { get; }

        /// <summary>Whose names its tensors have, such as "dat" or "modelopt".</summary>
        public string Convention { get; }

        /// <summary>The names of its tensors by what they are for: "codes", "scales", "absmax", "quant_map" and others.</summary>
        public IDictionary<string, string> Keys { get; }

        /// <summary>Names of tensors that it lacks.</summary>
        public IList<string> Missing { get; }

        /// <summary>Names of other tensors of its module.</summary>
        public IList<string> Extra { get; }

        /// <summary>What is wrong with its types and shapes.</summary>
        public IList<string> Faults { get; }

        /// <summary>N, or null where the shapes do not tell.</summary>
        public long? OutFeatures { get; }

        /// <summary>K, or null where the shapes do not tell.</summary>
        public long? InFeatures { get; }

        /// <summary>The values that share a scale, or null where the shapes do not tell.</summary>
        public long? Block { get; }

        static IList<string> Strings(object list)
        {
            var strings = new List<string>();
            foreach (object item in (List<object>)list)
                strings.Add((string)item);
            return strings;
        }
    }

    /// <summary>Which 4-bit weights a set of named tensors holds, and what is wrong with them.</summary>
    public static unsafe class WeightSchema
    {
        /// <summary>Finds the 4-bit weights of a set.</summary>
        /// <param name="tensors">The set; no two of one name.</param>
        /// <param name="prefix">Looks at the tensor of this name and those whose names begin with it and a dot; null for all.</param>
        public static SchemaSummary Detect(IEnumerable<NamedTensor> tensors, string prefix = null)
        {
            NativeSchemaResult result = default(NativeSchemaResult);
            With(tensors, prefix, (set, count, name, length) =>
            {
                NativeSchemaResult found = default(NativeSchemaResult);
                found.StructSize = (uint)sizeof(NativeSchemaResult);
                int status = Native.NVFP4_schema_detect(set, count, TensorSize, name, length, &found);
                result = found;
                return status;
            });
            return new SchemaSummary(result);
        }

        /// <summary>Describes the 4-bit weights of a set, as JSON.</summary>
        public static string Report(IEnumerable<NamedTensor> tensors, string prefix = null)
        {
            string json = null;
            With(tensors, prefix, (set, count, name, length) =>
            {
                json = Interop.Text((buffer, capacity, written) =>
                    Native.NVFP4_schema_report(set, count, TensorSize, name, length, buffer, capacity, written));
                return (int)Status.Ok;
            });
            return json;
        }

        /// <summary>Describes the 4-bit weights of a set.</summary>
        public static IList<WeightDescription> Describe(IEnumerable<NamedTensor> tensors, string prefix = null)
        {
            var weights = new List<WeightDescription>();
            foreach (object weight in (List<object>)Json.Object(Report(tensors, prefix))["weights"])
                weights.Add(new WeightDescription((Dictionary<string, object>)weight));
            return weights;
        }

        /// <summary>Checks that no part of a 4-bit weight is missing, and that types and shapes fit together. All that is wrong is in the one exception.</summary>
        public static void Validate(IEnumerable<NamedTensor> tensors, string prefix = null) =>
            With(tensors, prefix, (set, count, name, length) => Native.NVFP4_schema_validate(set, count, TensorSize, name, length));

        static UIntPtr TensorSize => Interop.Size(sizeof(NativeNamedTensor));

        delegate int SetCall(NativeNamedTensor* set, UIntPtr count, byte* prefix, UIntPtr prefixLength);

        /// Lends the set to a call, with all names and sizes in two blocks of memory.
        static void With(IEnumerable<NamedTensor> tensors, string prefix, SetCall call)
        {
            if (tensors == null)
                throw new ArgumentNullException(nameof(tensors));
            Library.Load();
            var list = new List<NamedTensor>(tensors);
            var names = new List<byte>();
            var sizes = new List<long>();
            var nameAt = new List<int>();
            var sizesAt = new List<int>();
            foreach (NamedTensor tensor in list)
            {
                nameAt.Add(names.Count);
                sizesAt.Add(sizes.Count);
                names.AddRange(Interop.Utf8(tensor.Name, nameof(tensors)));
                sizes.AddRange(tensor.Shape);
            }
            nameAt.Add(names.Count);
            byte[] prefixBytes = prefix == null ? null : Interop.Utf8(prefix, nameof(prefix));
            NativeNamedTensor[] set = new NativeNamedTensor[list.Count];
            fixed (byte* name = names.ToArray(), start = prefixBytes)
            fixed (long* size = sizes.ToArray())
            fixed (NativeNamedTensor* at = set)
            {
                for (int i = 0; i < set.Length; i++)
                {
                    set[i].Name = name + nameAt[i];
                    set[i].NameLength = Interop.Size(nameAt[i + 1] - nameAt[i]);
                    set[i].Dtype = (int)list[i].DType;
                    set[i].Rank = list[i].Shape.Length;
                    set[i].Sizes = size + sizesAt[i];
                }
                Interop.Check(call(at, Interop.Size(set.Length), start, Interop.Size(prefixBytes == null ? 0 : prefixBytes.Length)));
            }
        }
    }
}
