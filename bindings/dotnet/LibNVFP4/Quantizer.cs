// Number formats, NVFP4 and NF4, both ways; products of two NVFP4 matrices; whole models on disk.

using System;
using System.Threading;

namespace LibNVFP4
{
    /// <summary>A tensor in NVFP4: codes, block scales and a global scale. It owns its two tensors.</summary>
    public sealed class QuantizedTensor : IDisposable
    {
        /// <summary>Puts the parts together, which are disposed of with the whole.</summary>
        public QuantizedTensor(Tensor codes, Tensor scales, float globalScale = 1, ScaleLayout scaleLayout = ScaleLayout.Linear)
        {
            Codes = codes ?? throw new ArgumentNullException(nameof(codes));
            Scales = scales ?? throw new ArgumentNullException(nameof(scales));
            GlobalScale = globalScale;
            ScaleLayout = scaleLayout;
        }

        /// <summary>Two codes to a byte, [.., K / 2].</summary>
        public Tensor Codes { get; }

        /// <summary>A scale for each 16 along K, [.., K / 16], or one dimension if swizzled.</summary>
        public Tensor Scales { get; }

        /// <summary>Multiplies every value.</summary>
        public float GlobalScale { get; }

        /// <summary>The order of the scales.</summary>
        public ScaleLayout ScaleLayout { get; }

        /// <summary>The values, [.., K].</summary>
        public Tensor Dequantize(DType dtype = DType.Float32) => Quantizer.Dequantize(this, dtype);

        /// <summary>Gives up both tensors.</summary>
        public void Dispose()
        {
            Codes.Dispose();
            Scales.Dispose();
        }
    }

    /// <summary>A tensor in NF4: codes and the largest magnitude of each block. It owns its two tensors.</summary>
    public sealed class Nf4Tensor : IDisposable
    {
        /// <summary>Puts the parts together, which are disposed of with the whole.</summary>
        public Nf4Tensor(Tensor codes, Tensor absmax, long block, params long[] shape)
        {
            Codes = codes ?? throw new ArgumentNullException(nameof(codes));
            Absmax = absmax ?? throw new ArgumentNullException(nameof(absmax));
            Block = block;
            Shape = shape;
        }

        /// <summary>Two codes to a byte, the first in the high nibble.</summary>
        public Tensor Codes { get; }

        /// <summary>The largest magnitude of each block.</summary>
        public Tensor Absmax { get; }

        /// <summary>Values to a block.</summary>
        public long Block { get; }

        /// <summary>The shape of the values.</summary>
        public long[] Shape { get; }

        /// <summary>Gives up both tensors.</summary>
        public void Dispose()
        {
            Codes.Dispose();
            Absmax.Dispose();
        }
    }

    /// <summary>
    /// Is told how far a long call is, now and then and at its end, on the thread that made it: in bytes of a file, or in tokens
    /// of a prompt. It should be quick, as the call waits for it, and must not use the model that is being run: that is an
    /// <see cref="Nvfp4BusyException"/>. At the end it may be too late to cancel.
    /// </summary>
    public delegate void ProgressHandler(long done, long total);

    /// <summary>Number formats, both ways, and models on disk.</summary>
    public static unsafe class Quantizer
    {
        /// <summary>Quantizes a tensor along its last dimension, a multiple of 16, to NVFP4.</summary>
        /// <param name="input">Of a floating type, with any strides.</param>
        /// <param name="options">Null for the defaults.</param>
        /// <param name="progress">Is told how many values are done, and of how many.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        public static QuantizedTensor Quantize(Tensor input, QuantizeOptions options = null, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (input == null)
                throw new ArgumentNullException(nameof(input));
            options = options ?? new QuantizeOptions();
            float global = 0;
            TensorHandle codes = null, scales = null;
            using (var call = new Call(cancellation, progress))
            {
                call.Finish(Library.Try(() =>
                {
                    NativeQuantizeOptions raw = options.Raw;
                    raw.Call = call.Options;
                    float factor;
                    int status = Native.NVFP4_tensor_quantize(input.Handle, &raw, out codes, out scales, &factor);
                    global = factor;
                    return status;
                }));
            }
            return new QuantizedTensor(new Tensor(codes), new Tensor(scales), global, options.ScaleLayout);
        }

        /// <summary>Quantizes the values of an array, row-major in a shape.</summary>
        public static QuantizedTensor Quantize(float[] values, long[] shape, QuantizeOptions options = null)
        {
            using (Tensor input = Tensor.FromArray(values, shape))
                return Quantize(input, options);
        }

        /// <summary>The values of an NVFP4 tensor.</summary>
        public static Tensor Dequantize(QuantizedTensor tensor, DType dtype = DType.Float32)
        {
            if (tensor == null)
                throw new ArgumentNullException(nameof(tensor));
            return Tensor.Make((out TensorHandle handle) => Native.NVFP4_tensor_dequantize(tensor.Codes.Handle, tensor.Scales.Handle,
                tensor.GlobalScale, (int)tensor.ScaleLayout, (int)dtype, out handle));
        }

        /// <summary>Quantizes a tensor, flattened, to NF4 in the layout of bitsandbytes.</summary>
        public static Nf4Tensor QuantizeNf4(Tensor input, long block = 64)
        {
            if (input == null)
                throw new ArgumentNullException(nameof(input));
            TensorHandle codes = null, absmax = null;
            Interop.Call(() => Native.NVFP4_tensor_quantize_nf4(input.Handle, block, out codes, out absmax));
            return new Nf4Tensor(new Tensor(codes), new Tensor(absmax), block, input.Shape);
        }

        /// <summary>The values of an NF4 tensor.</summary>
        /// <param name="tensor">What to expand.</param>
        /// <param name="dtype">The type of the result.</param>
        /// <param name="quantMap">The 16 values of the codes, or null for the usual ones.</param>
        public static Tensor DequantizeNf4(Nf4Tensor tensor, DType dtype = DType.Float32, Tensor quantMap = null)
        {
            if (tensor == null)
                throw new ArgumentNullException(nameof(tensor));
            return Tensor.Make((out TensorHandle handle) =>
            {
                fixed (long* shape = tensor.Shape)
                    return Native.NVFP4_tensor_dequantize_nf4(tensor.Codes.Handle, tensor.Absmax.Handle,
                        quantMap?.Handle ?? TensorHandle.None, tensor.Block, shape, tensor.Shape.Length, (int)dtype, out handle);
            });
        }

        /// <summary>Reorders row-major block scales [rows, K / 16] to <see cref="ScaleLayout.Swizzled"/>.</summary>
        public static Tensor Swizzle(Tensor scales)
        {
            if (scales == null)
                throw new ArgumentNullException(nameof(scales));
            return Tensor.Make((out TensorHandle handle) => Native.NVFP4_scales_swizzle(scales.Handle, out handle));
        }

        /// <summary>Reorders swizzled block scales to row-major [rows, kBlocks], where kBlocks is K / 16.</summary>
        public static Tensor Unswizzle(Tensor scales, long rows, long kBlocks)
        {
            if (scales == null)
                throw new ArgumentNullException(nameof(scales));
            return Tensor.Make((out TensorHandle handle) =>
                Native.NVFP4_scales_unswizzle(scales.Handle, rows, kBlocks, out handle));
        }

        /// <summary>Multiplies a [M, K] by b [N, K] transposed, both in NVFP4 (W4A4), to [M, N].</summary>
        public static Tensor Multiply(QuantizedTensor a, QuantizedTensor b, DType dtype = DType.Float32)
        {
            if (a == null)
                throw new ArgumentNullException(nameof(a));
            if (b == null)
                throw new ArgumentNullException(nameof(b));
            if (a.ScaleLayout != b.ScaleLayout)
                throw new ArgumentException("the scales of a are " + a.ScaleLayout + " and those of b are " + b.ScaleLayout +
                    "; both must be the same", nameof(b));
            return Tensor.Make((out TensorHandle handle) => Native.NVFP4_matmul(a.Codes.Handle, a.Scales.Handle, a.GlobalScale,
                b.Codes.Handle, b.Scales.Handle, b.GlobalScale, (int)a.ScaleLayout, (int)dtype, out handle));
        }

        /// <summary>The quantizer of older hosts: block scales alone, by their rule.</summary>
        public static QuantizedTensor QuantizeLegacy(Tensor input)
        {
            if (input == null)
                throw new ArgumentNullException(nameof(input));
            IntPtr codes = IntPtr.Zero, scales = IntPtr.Zero;
            Interop.Call(() => input.Legacy(native =>
            {
                Native.NVFP4_quantize(native, out codes, out scales);
                return Native.NVFP4_last_status();
            }));
            return new QuantizedTensor(Tensor.FromHandle(codes, true), Tensor.FromHandle(scales, true));
        }

        /// <summary>The product of older hosts: a uint8 [M, K / 2], the transposed view [K / 2, N] of b, both scales swizzled.</summary>
        public static Tensor ScaledMultiply(Tensor a, Tensor bTransposed, Tensor scaleA, Tensor scaleB, DType dtype = DType.Float16)
        {
            if (a == null)
                throw new ArgumentNullException(nameof(a));
            if (bTransposed == null)
                throw new ArgumentNullException(nameof(bTransposed));
            if (scaleA == null)
                throw new ArgumentNullException(nameof(scaleA));
            if (scaleB == null)
                throw new ArgumentNullException(nameof(scaleB));
            IntPtr product = IntPtr.Zero;
            Interop.Call(() => a.Legacy(x => bTransposed.Legacy(y => scaleA.Legacy(u => scaleB.Legacy(v =>
            {
                product = Native.NVFP4_scaled_mm(x, y, u, v, (sbyte)dtype);
                return Native.NVFP4_last_status();
            })))));
            return Tensor.FromHandle(product, true);
        }

        /// <summary>Quantizes a weight by the rule of <see cref="QuantizeLegacy"/>, for training in 4 bits.</summary>
        public static QuantizedTensor QuantizePacked(Tensor weight)
        {
            if (weight == null)
                throw new ArgumentNullException(nameof(weight));
            TensorHandle codes = null, scales = null;
            Interop.Call(() => Native.NVFP4_quantize_packed(weight.Handle, out codes, out scales));
            return new QuantizedTensor(new Tensor(codes), new Tensor(scales));
        }

        /// <summary>The values of what <see cref="QuantizePacked"/> gives.</summary>
        public static Tensor DequantizePacked(Tensor qdata, Tensor scale, DType dtype = DType.Float32)
        {
            if (qdata == null)
                throw new ArgumentNullException(nameof(qdata));
            if (scale == null)
                throw new ArgumentNullException(nameof(scale));
            return Tensor.Make((out TensorHandle handle) =>
                Native.NVFP4_dequantize_packed(qdata.Handle, scale.Handle, (int)dtype, out handle));
        }

        /// <summary>
        /// What NVFP4 leaves of a weight, in its own type, for the forward pass of training in 4 bits. The gradient of the weight is
        /// that of these values as it is: the straight-through estimator.
        /// </summary>
        /// <param name="weight">The weight, [.., K].</param>
        /// <param name="keep">
        /// For a weight that does not change: its values are computed once, kept as long as it lives or until
        /// <see cref="ClearSteWeights"/>, and only read.
        /// </param>
        public static Tensor SteWeight(Tensor weight, bool keep = false)
        {
            if (weight == null)
                throw new ArgumentNullException(nameof(weight));
            return Tensor.Make((out TensorHandle handle) => Native.NVFP4_ste_weight(weight.Handle, Interop.Flag(keep), out handle));
        }

        /// <summary>Gives up the values that <see cref="SteWeight"/> keeps: call it when weights have changed.</summary>
        public static void ClearSteWeights() => Interop.Check(Native.NVFP4_ste_clear());

        /// <summary>
        /// Converts a model on disk to NVFP4 on disk. What was there is replaced as a whole, when the new one is whole.
        /// </summary>
        /// <param name="source">What <see cref="Model.Load"/> takes.</param>
        /// <param name="destination">The directory or file to write.</param>
        /// <param name="container">Which of them.</param>
        /// <param name="options">Null for the defaults of the container.</param>
        /// <param name="progress">Is told how many bytes of the source are done, or null.</param>
        /// <param name="cancellation">Stops it, with an OperationCanceledException.</param>
        /// <param name="replace">
        /// Replaces a directory that holds a model, with all that is in it; without it one that is not empty is refused.
        /// </param>
        /// <param name="keepHead">
        /// Leaves the output head, or the table that it shares with the embedding, in the precision that it has, whatever
        /// <paramref name="tables"/> says.
        /// </param>
        /// <param name="tables">
        /// Format of the embedding and the output head. A tied head stays tied: the table is written once.
        /// </param>
        /// <param name="calibrate">
        /// How to calibrate: codes and scales are then those for which products with what the model makes of text differ least, and tables
        /// are written in int8 unless told. A call that was stopped goes on after the blocks of the model that it had finished, which it
        /// keeps beside the destination, with <c>.calibration</c> after its name. Null for weights that are quantized by themselves.
        /// </param>
        /// <param name="packed">
        /// Also writes packed.nvfp4 into the directory: the weights as the CPU's kernels read them, which processes that load the model on the
        /// CPU share. The directory appears with it or not at all. If the destination is the source itself, nothing is quantized and that
        /// file alone is written.
        /// </param>
        public static void ConvertModel(string source, string destination, Container container = Container.ModelOpt,
            QuantizeOptions options = null, ProgressHandler progress = null, CancellationToken cancellation = default(CancellationToken),
            bool replace = false, bool keepHead = false, Tables tables = Tables.Auto, CalibrateOptions calibrate = null, bool packed = false)
        {
            byte[] from = Interop.Utf8(source, nameof(source)), to = Interop.Utf8(destination, nameof(destination));
            using (var files = new PinnedPaths(calibrate?.Files ?? new string[0]))
            using (var call = new Call(cancellation, progress))
            {
                call.Finish(Library.Try(() =>
                {
                    NativeQuantizeOptions raw = options == null ? default(NativeQuantizeOptions) : options.Raw;
                    NativeConvertOptions how;
                    int status = Native.NVFP4_convert_options_init(&how, (uint)sizeof(NativeConvertOptions));
                    if (status != 0)
                        return status;
                    how.Container = (int)container;
                    how.Replace = replace ? 1 : 0;
                    how.KeepHead = keepHead ? 1 : 0;
                    how.Tables = (int)tables;
                    how.Packed = packed ? 1 : 0;
                    how.Call = call.Options;
                    NativeCalibrateOptions text;
                    if (calibrate != null)
                    {
                        status = Native.NVFP4_calibrate_options_init(&text, (uint)sizeof(NativeCalibrateOptions));
                        if (status != 0)
                            return status;
                        text.DeviceType = (int)calibrate.Device.Type;
                        text.DeviceIndex = calibrate.Device.Index;
                        text.Windows = calibrate.Windows ?? 0;
                        text.Window = Interop.Size(calibrate.Window ?? 0);
                        text.Files = files.Paths;
                        text.FileLengths = files.Lengths;
                        text.FileCount = files.Count;
                        text.Budget = calibrate.Budget ?? 0;
                        text.DistillSteps = (ulong)calibrate.DistillSteps;
                        how.Calibrate = &text;
                    }
                    fixed (byte* a = from, b = to)
                        return Native.NVFP4_model_convert(a, Interop.Size(from.Length), b, Interop.Size(to.Length), &how,
                            options == null ? null : &raw);
                }));
            }
        }
    }
}
