// Tensors: typed, shaped views of memory of the host, of a GPU, or of a .NET array.

using System;
using System.Runtime.InteropServices;

namespace LibNVFP4
{
    /// <summary>A typed, shaped view of memory. It is immutable in type and shape, and may be used by several threads at once.</summary>
    public sealed unsafe class Tensor : IDisposable
    {
        static readonly Deleter UnpinCallback = Unpin;

        internal readonly TensorHandle Handle;

        internal Tensor(TensorHandle handle)
        {
            Handle = handle;
            try
            {
                handle.Press(ByteCount);
            }
            catch
            {
                handle.Dispose();
                throw;
            }
        }

        /// <summary>
        /// A tensor over an array, without a copy. The array stays where it is in memory until the last use of the tensor ends,
        /// and must not change while a call uses it. Arrays of byte, sbyte, bool, short, int, long, float and double have their
        /// own type, and ushort arrays hold the bits of <see cref="DType.Float16"/>; others take a <see cref="DType"/>.
        /// </summary>
        /// <param name="data">The elements, row-major.</param>
        /// <param name="shape">Sizes, outermost first; without any, one dimension.</param>
        public static Tensor FromArray<T>(T[] data, params long[] shape) where T : struct =>
            FromArray(data, TypeOf(typeof(T)), shape);

        /// <summary>The same, of elements whose bits are of a type that .NET does not have, such as bfloat16 in ushort.</summary>
        public static Tensor FromArray<T>(T[] data, DType dtype, params long[] shape) where T : struct
        {
            if (data == null)
                throw new ArgumentNullException(nameof(data));
            long[] sizes = shape == null || shape.Length == 0 ? new[] { data.LongLength } : shape;
            long count = Count(sizes);
            if (count != data.LongLength)
                throw new ArgumentException("a shape of " + string.Join(" x ", sizes) + " has " + count +
                    " elements, and the array " + data.LongLength, nameof(shape));
            return Make((out TensorHandle handle) =>
            {
                var pin = new Pin(data);
                bool lent = false;
                try
                {
                    long size = pin.ElementSize;
                    if (size != SizeOf(dtype))
                        throw new ArgumentException("elements of " + typeof(T).Name + " have " + size + " bytes, and those of " +
                            dtype + " have " + SizeOf(dtype), nameof(dtype));
                    int status;
                    fixed (long* at = sizes)
                        status = Native.NVFP4_tensor_from_host(pin.Address, at, sizes.Length, null, (int)dtype, UnpinCallback,
                            pin.User, out handle);
                    lent = status == (int)Status.Ok;
                    return status;
                }
                finally
                {
                    if (!lent)
                        pin.Free();
                }
            });
        }

#if NETCOREAPP
        /// <summary>A tensor with a copy of elements, row-major.</summary>
        public static Tensor FromSpan<T>(ReadOnlySpan<T> data, params long[] shape) where T : unmanaged
        {
            long[] sizes = shape == null || shape.Length == 0 ? new long[] { data.Length } : shape;
            long count = Count(sizes);
            if (count != data.Length)
                throw new ArgumentException("a shape of " + string.Join(" x ", sizes) + " has " + count + " elements, and the span " +
                    data.Length, nameof(shape));
            Tensor tensor = Empty(TypeOf(typeof(T)), sizes);
            if (data.Length > 0)
                data.CopyTo(new Span<T>((void*)tensor.Data, data.Length));
            return tensor;
        }

        /// <summary>Copies the elements as float, whatever their type, row-major.</summary>
        public void CopyTo(Span<float> destination)
        {
            fixed (float* at = destination)
                Interop.Check(Native.NVFP4_tensor_copy_as_float(Handle, at, Interop.Size(destination.Length)));
        }
#endif

        /// <summary>
        /// A tensor over memory of someone else on the host, without a copy. The memory must outlive every use: other objects may
        /// share it after the tensor is disposed of.
        /// </summary>
        public static Tensor FromPointer(IntPtr data, DType dtype, long[] shape, long[] strides = null)
        {
            CheckStrides(shape, strides);
            return Make((out TensorHandle handle) =>
            {
                fixed (long* sizes = shape, steps = strides)
                    return Native.NVFP4_tensor_from_host(data, sizes, shape.Length, steps, (int)dtype, null, IntPtr.Zero, out handle);
            });
        }

        /// <summary>The same over memory that nobody may write to, which makes the tensor and its views read-only.</summary>
        public static Tensor FromReadOnlyPointer(IntPtr data, DType dtype, long[] shape, long[] strides = null)
        {
            CheckStrides(shape, strides);
            return Make((out TensorHandle handle) =>
            {
                fixed (long* sizes = shape, steps = strides)
                    return Native.NVFP4_tensor_from_host_read_only(data, sizes, shape.Length, steps, (int)dtype, null, IntPtr.Zero,
                        out handle);
            });
        }

        /// <summary>As FromPointer, over memory of a CUDA device, or managed memory for it.</summary>
        public static Tensor FromDevicePointer(IntPtr data, int deviceIndex, DType dtype, long[] shape, long[] strides = null)
        {
            CheckStrides(shape, strides);
            return Make((out TensorHandle handle) =>
            {
                fixed (long* sizes = shape, steps = strides)
                    return Native.NVFP4_tensor_from_device(data, sizes, shape.Length, steps, (int)dtype, deviceIndex, null,
                        IntPtr.Zero, out handle);
            });
        }

        /// <summary>A tensor of zeros in memory of the library, on the host.</summary>
        public static Tensor Empty(DType dtype, params long[] shape) => Empty(Device.Cpu, dtype, shape);

        /// <summary>A tensor of zeros in memory of the library, on a device.</summary>
        public static Tensor Empty(Device device, DType dtype, params long[] shape)
        {
            CheckStrides(shape, null);
            return Make((out TensorHandle handle) =>
            {
                fixed (long* sizes = shape)
                    return Native.NVFP4_tensor_empty(sizes, shape.Length, (int)dtype, (int)device.Type, device.Index, out handle);
            });
        }

        /// <summary>Takes over a DLManagedTensor, without a copy. If that fails, it stays the caller's.</summary>
        public static Tensor FromDLPack(IntPtr managed) =>
            Make((out TensorHandle handle) => Native.NVFP4_tensor_from_dlpack(managed, out handle));

        /// <summary>A DLManagedTensor over the tensor's memory, without a copy, whose deleter its consumer calls.</summary>
        public IntPtr ToDLPack()
        {
            Interop.Check(Native.NVFP4_tensor_to_dlpack(Handle, out IntPtr managed));
            return managed;
        }

        /// <summary>Takes over a DLManagedTensorVersioned, without a copy. If that fails, it stays the caller's.</summary>
        public static Tensor FromVersionedDLPack(IntPtr managed) =>
            Make((out TensorHandle handle) => Native.NVFP4_tensor_from_dlpack_versioned(managed, out handle));

        /// <summary>A DLManagedTensorVersioned over the tensor's memory, without a copy, whose deleter its consumer calls. It says whether the tensor is read-only, which the form without a version cannot.</summary>
        public IntPtr ToVersionedDLPack()
        {
            Interop.Check(Native.NVFP4_tensor_to_dlpack_versioned(Handle, out IntPtr managed));
            return managed;
        }

        /// <summary>A tensor for a handle of the C interface. With <paramref name="owned"/> its reference is taken over, and else one is added.</summary>
        public static Tensor FromHandle(IntPtr native, bool owned)
        {
            if (!owned)
                Library.Call(() => Native.NVFP4_tensor_retain(native));
            var handle = new TensorHandle();
            handle.Take(native);
            return new Tensor(handle);
        }

        /// <summary>The handle of the C interface, lent: it is good for as long as this object is neither disposed of nor forgotten. Keep it alive with GC.KeepAlive.</summary>
        public IntPtr DangerousHandle => Handle.IsClosed ? throw new ObjectDisposedException(nameof(Tensor)) : Handle.DangerousGetHandle();

        /// <summary>Sizes, outermost first.</summary>
        public long[] Shape =>
            Interop.Array<long>((buffer, capacity, count) => Native.NVFP4_tensor_shape(Handle, (long*)buffer, capacity, count));

        /// <summary>Strides in elements.</summary>
        public long[] Strides =>
            Interop.Array<long>((buffer, capacity, count) => Native.NVFP4_tensor_strides(Handle, (long*)buffer, capacity, count));

        /// <summary>The number of elements.</summary>
        public long Length => Count(Shape);

        /// <summary>The type of the elements.</summary>
        public DType DType
        {
            get
            {
                int dtype;
                Interop.Check(Native.NVFP4_tensor_dtype(Handle, &dtype));
                return (DType)dtype;
            }
        }

        /// <summary>Where the memory is.</summary>
        public Device Device
        {
            get
            {
                int type, index;
                Interop.Check(Native.NVFP4_tensor_device(Handle, &type, &index));
                return new Device((DeviceType)type, index);
            }
        }

        /// <summary>Whether it is in managed memory.</summary>
        public bool IsManaged => Legacy(native => Native.NVFP4_is_managed_tensor(native)) != 0;

        /// <summary>The address of the first element, on the device if the memory is there. Good for as long as this object is neither disposed of nor forgotten.</summary>
        public IntPtr Data
        {
            get
            {
                Interop.Check(Native.NVFP4_tensor_data(Handle, out IntPtr data));
                return data;
            }
        }

        /// <summary>Whether nobody may write to the memory, as whoever lent it has said.</summary>
        public bool IsReadOnly
        {
            get
            {
                int readOnly;
                Interop.Check(Native.NVFP4_tensor_is_read_only(Handle, &readOnly));
                return readOnly != 0;
            }
        }

        /// <summary>The bytes that the elements take without gaps.</summary>
        public ulong ByteCount
        {
            get
            {
                ulong bytes;
                Interop.Check(Native.NVFP4_tensor_bytes(Handle, &bytes));
                return bytes;
            }
        }

        /// <summary>Another view of the memory, which it keeps alive. The offset and the strides count elements.</summary>
        public Tensor View(long[] shape, long[] strides = null, long offset = 0)
        {
            CheckStrides(shape, strides);
            return Make((out TensorHandle handle) =>
            {
                fixed (long* sizes = shape, steps = strides)
                    return Native.NVFP4_tensor_view(Handle, sizes, shape.Length, steps, offset, out handle);
            });
        }

        /// <summary>The view with the last two dimensions exchanged.</summary>
        public Tensor Transpose()
        {
            long[] shape = Shape, strides = Strides;
            int n = shape.Length;
            if (n < 2)
                throw new InvalidOperationException("a tensor of " + n + " dimensions has no transpose; it takes two or more");
            Array.Reverse(shape, n - 2, 2);
            Array.Reverse(strides, n - 2, 2);
            return View(shape, strides);
        }

        /// <summary>A copy in the memory of a device, or of the host, row-major.</summary>
        public Tensor CopyTo(Device device)
        {
            return Make((out TensorHandle handle) =>
                Native.NVFP4_tensor_copy_to_device(Handle, (int)device.Type, device.Index, out handle));
        }

        /// <summary>What <see cref="Memory.ManagedPolicy"/> makes of a tensor that a CUDA device will use: a copy in managed memory, or another handle of this one.</summary>
        public Tensor ByManagedPolicy(int deviceIndex = 0, bool readMostly = false)
        {
            return Make((out TensorHandle handle) =>
                Native.NVFP4_tensor_by_managed_policy(Handle, deviceIndex, Interop.Flag(readMostly), out handle));
        }

        /// <summary>A tensor with the same values in managed memory.</summary>
        /// <param name="prefetchDevice">The CUDA device to bring it to, or null.</param>
        /// <param name="readMostly">Whether it will be read far more than written.</param>
        public Tensor ToManaged(int? prefetchDevice = null, bool readMostly = false)
        {
            IntPtr managed = IntPtr.Zero;
            Interop.Call(() =>
            {
                managed = Legacy(native => Native.NVFP4_to_managed(native, prefetchDevice ?? -1, Interop.Flag(readMostly)));
                return Native.NVFP4_last_status();
            });
            return FromHandle(managed, true);
        }

        /// <summary>Brings a tensor in managed memory to a CUDA device, or with -1 to the host.</summary>
        public void PrefetchManaged(int deviceIndex)
        {
            Legacy(native =>
            {
                Native.NVFP4_managed_prefetch(native, deviceIndex);
                return 0;
            });
            Interop.Check(Native.NVFP4_last_status());
        }

        /// <summary>The elements as float, whatever their type, row-major.</summary>
        public float[] ToFloats()
        {
            float[] values = new float[Length];
            fixed (float* at = values)
                Interop.Check(Native.NVFP4_tensor_copy_as_float(Handle, at, Interop.Size(values.LongLength)));
            return values;
        }

        /// <summary>The bytes of the elements, row-major.</summary>
        public byte[] ToBytes()
        {
            byte[] bytes = new byte[checked((long)ByteCount)];
            fixed (byte* at = bytes)
                Interop.Check(Native.NVFP4_tensor_copy_to_host(Handle, (IntPtr)at, Interop.Size(bytes.LongLength)));
            return bytes;
        }

        /// <summary>"float32 [2, 3] on cpu".</summary>
        public override string ToString() =>
            Handle.IsClosed ? "a disposed tensor" : DType.ToString().ToLowerInvariant() + " [" + string.Join(", ", Shape) + "] on " + Device;

        /// <summary>Gives up the memory, as far as nothing else uses it.</summary>
        public void Dispose() => Handle.Dispose();

        /// Calls a function that takes a bare handle.
        internal T Legacy<T>(Func<IntPtr, T> call)
        {
            bool added = false;
            try
            {
                Handle.DangerousAddRef(ref added);
                return call(Handle.DangerousGetHandle());
            }
            finally
            {
                if (added)
                    Handle.DangerousRelease();
            }
        }

        internal delegate int Maker(out TensorHandle handle);

        /// Makes a tensor by a call, which may be the process's first.
        internal static Tensor Make(Maker maker)
        {
            TensorHandle handle = null;
            Library.Call(() => maker(out handle));
            return new Tensor(handle);
        }

        static void CheckStrides(long[] shape, long[] strides)
        {
            if (shape == null)
                throw new ArgumentNullException(nameof(shape));
            if (strides != null && strides.Length != shape.Length)
                throw new ArgumentException(strides.Length + " strides for " + shape.Length + " dimensions", nameof(strides));
        }

        static long Count(long[] shape)
        {
            long count = 1;
            foreach (long size in shape)
                count = checked(count * size);
            return count;
        }

        static DType TypeOf(Type type)
        {
            if (type == typeof(float)) return DType.Float32;
            if (type == typeof(double)) return DType.Float64;
            if (type == typeof(byte)) return DType.UInt8;
            if (type == typeof(sbyte)) return DType.Int8;
            if (type == typeof(bool)) return DType.Bool;
            if (type == typeof(short)) return DType.Int16;
            if (type == typeof(ushort)) return DType.Float16;
            if (type == typeof(int)) return DType.Int32;
            if (type == typeof(long)) return DType.Int64;
            throw new ArgumentException("no tensor has elements of " + type.Name + "; name a DType of the same size");
        }

        static int SizeOf(DType dtype)
        {
            switch (dtype)
            {
                case DType.Int64:
                case DType.Float64: return 8;
                case DType.Int32:
                case DType.Float32: return 4;
                case DType.Int16:
                case DType.Float16:
                case DType.BFloat16: return 2;
                default: return 1;
            }
        }

        [MonoPInvokeCallback(typeof(Deleter))]
        static void Unpin(IntPtr data, IntPtr user) => ((Pin)GCHandle.FromIntPtr(user).Target).Free();

        /// An array held in place for native memory. The library holds this object and not the array alone: it keeps the code that
        /// frees it loaded, in an AssemblyLoadContext that is being unloaded too.
        sealed class Pin
        {
            readonly GCHandle array, self;
            readonly Array pinned;

            internal Pin(Array pinned)
            {
                this.pinned = pinned;
                array = GCHandle.Alloc(pinned, GCHandleType.Pinned);
                self = GCHandle.Alloc(this);
            }

            internal IntPtr Address => array.AddrOfPinnedObject();

            internal IntPtr User => GCHandle.ToIntPtr(self);

            /// Bytes of an element in the array. For the marshaller a bool has 4 bytes and a char 1, and AOT compilers leave the
            /// marshaller's sizes out.
            internal long ElementSize =>
                (long)Marshal.UnsafeAddrOfPinnedArrayElement(pinned, 1) - (long)Marshal.UnsafeAddrOfPinnedArrayElement(pinned, 0);

            internal void Free()
            {
                array.Free();
                self.Free();
            }
        }
    }
}
