// Pools: threads of the program that work for models.

using System;
using System.Runtime.InteropServices;
using System.Threading;

namespace LibNVFP4
{
    /// <summary>
    /// Threads of the program that work for models on the CPU, in place of threads of the library: <see cref="LoadOptions.Pool"/>. Any number
    /// of models may share it; it may be disposed of while they run.
    /// </summary>
    public sealed class Pool : IDisposable
    {
        static readonly PoolSubmit SubmitCallback = OnSubmit;
        static readonly PoolRelease ReleaseCallback = OnRelease;

        internal readonly PoolHandle Handle;

        /// <summary>Work on threads that a function gives.</summary>
        /// <param name="schedule">Has another thread call an action once, and returns at once. If it throws, the threads that call the model do the work. It is called by one thread at a time, and must not use the library.</param>
        /// <param name="threads">The most threads that work at a time for a call, the calling one included; 0 for as many as the library would use.</param>
        public Pool(Action<Action> schedule, int threads = 0)
        {
            if (schedule == null)
                throw new ArgumentNullException(nameof(schedule));
            PoolHandle handle = null;
            Library.Call(() =>
            {
                GCHandle user = GCHandle.Alloc(schedule);
                int made = Native.NVFP4_pool_create(threads, SubmitCallback, GCHandle.ToIntPtr(user), ReleaseCallback, out handle);
                if (made != (int)Status.Ok)
                    user.Free();
                return made;
            });
            Handle = handle;
        }

        /// <summary>Work on threads of <see cref="ThreadPool"/>.</summary>
        /// <param name="threads">The most threads that work at a time for a call, the calling one included; 0 for as many as the library would use.</param>
        public static Pool OfThreadPool(int threads = 0) =>
            new Pool(work => ThreadPool.UnsafeQueueUserWorkItem(_ => work(), null), threads);

        /// <summary>Frees it once no model has it.</summary>
        public void Dispose() => Handle.Dispose();

        [MonoPInvokeCallback(typeof(PoolSubmit))]
        static int OnSubmit(IntPtr user, IntPtr run, IntPtr task)
        {
            try
            {
                var schedule = (Action<Action>)GCHandle.FromIntPtr(user).Target;
                var work = Marshal.GetDelegateForFunctionPointer<PoolTask>(run);
                schedule(() => work(task));
                return 0;
            }
            catch (Exception)
            {
                return 1;
            }
        }

        [MonoPInvokeCallback(typeof(PoolRelease))]
        static void OnRelease(IntPtr user) => GCHandle.FromIntPtr(user).Free();
    }
}
