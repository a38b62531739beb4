// Training by the program's own passes: the optimizer of one weight, and linear layers with a weight in 4 bits.

using System;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// <summary>The settings of a step of AdamW.</summary>
    public sealed unsafe class StepOptions
    {
        internal NativeStepOptions Raw;

        /// <summary>The defaults.</summary>
        public StepOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeStepOptions* raw = &Raw)
                    return Native.NVFP4_step_options_init(raw, (uint)sizeof(NativeStepOptions));
            });
        }

        /// <summary>What the gradient is multiplied by. Default: 1.</summary>
        public float GradientScale { get => Raw.GradientScale; set => Raw.GradientScale = value; }

        /// <summary>The learning rate. Default: 0.001.</summary>
        public double Rate { get => Raw.Rate; set => Raw.Rate = value; }

        /// <summary>The decay of the first moment. Default: 0.9.</summary>
        public double Beta1 { get => Raw.Beta1; set => Raw.Beta1 = value; }

        /// <summary>The decay of the second moment. Default: 0.95.</summary>
        public double Beta2 { get => Raw.Beta2; set => Raw.Beta2 = value; }

        /// <summary>Added to the root of the second moment. Default: 1e-8.</summary>
        public double Eps { get => Raw.Eps; set => Raw.Eps = value; }

        /// <summary>Decoupled weight decay. Default: 0.1.</summary>
        public double WeightDecay { get => Raw.WeightDecay; set => Raw.WeightDecay = value; }

        /// <summary>Chooses the random bits of rounding, with <see cref="Tensor"/> and the number of the step. Default: 0.</summary>
        public ulong Seed { get => Raw.Seed; set => Raw.Seed = value; }

        /// <summary>The number of this weight among those of one seed. Default: 0.</summary>
        public ulong Tensor { get => Raw.Tensor; set => Raw.Tensor = value; }
    }

    /// A handle whose number is lent to a call that takes handles of several kinds.
    internal struct Lent : IDisposable
    {
        readonly SafeHandle handle;
        readonly bool added;

        internal Lent(Tensor tensor, string name)
        {
            handle = (tensor ?? throw new ArgumentNullException(name)).Handle;
            added = false;
            handle.DangerousAddRef(ref added);
        }

        internal IntPtr Value => handle.DangerousGetHandle();

        public void Dispose()
        {
            if (added)
                handle.DangerousRelease();
        }
    }

    /// <summary>A weight [.., K] with the moments of its AdamW, in 4 bits by default. One call at a time may use it.</summary>
    public sealed unsafe class TensorOptimizer : IDisposable
    {
        internal readonly OptimizerStateHandle Handle;

        TensorOptimizer(OptimizerStateHandle handle)
        {
            Handle = handle;
            handle.Press((ulong)Bytes);
        }

        /// <summary>The optimizer of a weight, whose values are copied and rounded to nearest; its moments are zero.</summary>
        /// <param name="weight">The weight, [.., K], K a multiple of 16.</param>
        /// <param name="weights">How the weight is held.</param>
        /// <param name="firstMoments">How first moments are held.</param>
        /// <param name="secondMoments">How second moments are held.</param>
        /// <param name="freshScales">Whether each step makes block scales anew.</param>
        public static TensorOptimizer Create(Tensor weight, WeightForm weights = WeightForm.Residual4,
            FirstMoment firstMoments = FirstMoment.Int4, SecondMoment secondMoments = SecondMoment.UInt4, bool freshScales = false)
        {
            OptimizerStateHandle handle = null;
            using (var lent = new Lent(weight, nameof(weight)))
            {
                IntPtr value = lent.Value;
                Interop.Call(() =>
                {
                    NativeOptimizerOptions raw;
                    int status = Native.NVFP4_optimizer_options_init(&raw, (uint)sizeof(NativeOptimizerOptions));
                    if (status != (int)Status.Ok)
                        return status;
                    raw.Weights = (int)weights;
                    raw.FirstMoments = (int)firstMoments;
                    raw.SecondMoments = (int)secondMoments;
                    raw.FreshScales = Interop.Flag(freshScales);
                    return Native.NVFP4_optimizer_create(value, &raw, out handle);
                });
            }
            return new TensorOptimizer(handle);
        }

        /// <summary>An optimizer from what <see cref="Save"/> gave, which goes on to the same bits.</summary>
        public static TensorOptimizer Restore(byte[] state, Device device = default(Device))
        {
            if (state == null)
                throw new ArgumentNullException(nameof(state));
            OptimizerStateHandle handle = null;
            Interop.Check(Library.Try(() =>
            {
                fixed (byte* at = state)
                    return Native.NVFP4_optimizer_restore(at, Interop.Size(state.Length), (int)device.Type, device.Index, 0, out handle);
            }));
            return new TensorOptimizer(handle);
        }

        /// <summary>A step by a gradient of the weight's shape.</summary>
        /// <param name="gradient">Finite; else nothing is changed.</param>
        /// <param name="options">Null for the defaults.</param>
        /// <returns>The number of weights that changed as they are held.</returns>
        public long Step(Tensor gradient, StepOptions options = null)
        {
            ulong changed = 0;
            using (var lent = new Lent(gradient, nameof(gradient)))
            {
                NativeStepOptions raw = (options ?? new StepOptions()).Raw;
                Interop.Check(Native.NVFP4_optimizer_step(Handle, lent.Value, &raw, &changed, null));
            }
            return (long)changed;
        }

        /// <summary>Steps made.</summary>
        public long Steps
        {
            get
            {
                ulong steps;
                Interop.Check(Native.NVFP4_optimizer_size(Handle, &steps, null));
                return (long)steps;
            }
        }

        /// <summary>Bytes held.</summary>
        public long Bytes
        {
            get
            {
                ulong bytes;
                Interop.Check(Native.NVFP4_optimizer_size(Handle, null, &bytes));
                return (long)bytes;
            }
        }

        /// <summary>The weight: all that is held, or the NVFP4 codes alone.</summary>
        public Tensor Weight(bool delivered = false, DType dtype = DType.Float32)
        {
            IntPtr result = IntPtr.Zero;
            Interop.Call(() => Native.NVFP4_optimizer_weight(Handle, Interop.Flag(delivered), (int)dtype, out result));
            return Own(result);
        }

        /// <summary>The weight as NVFP4, in host memory.</summary>
        public QuantizedTensor Delivered()
        {
            TensorHandle codes = null, scales = null;
            float scale = 0;
            Interop.Call(() =>
            {
                float made;
                int status = Native.NVFP4_optimizer_delivered(Handle, out codes, out scales, &made);
                scale = made;
                return status;
            });
            return new QuantizedTensor(new Tensor(codes), new Tensor(scales), scale);
        }

        /// <summary>Everything that steps go on from.</summary>
        public byte[] Save() =>
            Interop.Array<byte>((buffer, capacity, length) => Native.NVFP4_optimizer_save(Handle, (byte*)buffer, capacity, length));

        /// <summary>Gives up the optimizer.</summary>
        public void Dispose() => Handle.Dispose();

        /// <summary>A seed of stochastic rounding, so that every tensor and step has random bits of its own.</summary>
        public static ulong RoundingSeed(ulong seed, ulong tensor, ulong step)
        {
            ulong result = 0;
            Library.Call(() =>
            {
                ulong made;
                int status = Native.NVFP4_rounding_seed(seed, tensor, step, &made);
                result = made;
                return status;
            });
            return result;
        }

        /// <summary>x [.., K] times weight [N, K] transposed, whose values are rounded to 4 bits as by <see cref="Quantizer.SteWeight"/>.</summary>
        public static Tensor SteLinear(Tensor x, Tensor weight)
        {
            IntPtr result = IntPtr.Zero;
            using (var a = new Lent(x, nameof(x)))
            using (var b = new Lent(weight, nameof(weight)))
            {
                IntPtr first = a.Value, second = b.Value;
                Interop.Call(() => Native.NVFP4_ste_linear(first, second, out result));
            }
            return Own(result);
        }

        /// <summary>The gradients of x and of weight, from those of the product.</summary>
        public static (Tensor X, Tensor Weight) SteLinearBackward(Tensor x, Tensor weight, Tensor gradient)
        {
            IntPtr dx = IntPtr.Zero, dweight = IntPtr.Zero;
            using (var a = new Lent(x, nameof(x)))
            using (var b = new Lent(weight, nameof(weight)))
            using (var c = new Lent(gradient, nameof(gradient)))
            {
                IntPtr first = a.Value, second = b.Value, third = c.Value;
                Interop.Call(() => Native.NVFP4_ste_linear_backward(first, second, third, out dx, out dweight));
            }
            return (Own(dx), Own(dweight));
        }

        static Tensor Own(IntPtr value)
        {
            var handle = new TensorHandle();
            handle.Take(value);
            return new Tensor(handle);
        }
    }
}
