// The native library itself: where it is looked for, what it says when it cannot be loaded, and its functions for the whole
// process.
//
// It is loaded by its full path before the first call, and the runtime's own search is led to it: .NET Core asks the resolver below,
// Mono has a map of names, and .NET Framework finds a library of that name in the process. Mono searches when it compiles
// a method that has the native call in it, so what may be the first call stands in a method or lambda of its own, which is
// compiled after Load(): that is what Call() and After() are for.

using System;
using System.Collections.Generic;
using System.IO;
using System.Reflection;
using System.Runtime.InteropServices;
#if NETCOREAPP
using System.Runtime.Loader;
#endif

namespace LibNVFP4
{
    /// <summary>Takes a log message. It may come on any thread, on several at once too. It may set another handler, but should do no more with the library.</summary>
    /// <param name="level">How severe it is.</param>
    /// <param name="message">One line.</param>
    public delegate void LogHandler(LogLevel level, string message);

    /// <summary>The native library: loading, versions, logging, threads, and what this machine offers.</summary>
    /// <remarks>
    /// It is the file that NVFP4_LIB_PATH names, or that in the folder it names. Without it: what <see cref="Use"/> was told;
    /// beside the program or this assembly; in <c>runtimes/RID/native</c> there; where the runtime and the system look. The first
    /// file that is there is taken or refused: one for another processor or of another version is not passed over in silence.
    /// </remarks>
    public static unsafe class Library
    {
        /// <summary>The version of the binary interface that this assembly is made for.</summary>
        public const int AbiVersion = Native.AbiVersion;

        const string Variable = "NVFP4_LIB_PATH";

        static readonly object Gate = new object(), LogGate = new object();
        static readonly LogCallback OnLogCallback = OnLog;
        static volatile bool loaded;
        static string used;
        static string path;
        static volatile Log log;
        static long logs;

        /// <summary>The file that was loaded, or null if none is yet. A name without a folder was found by the runtime or the system.</summary>
        public static string Path => loaded ? path : null;

        /// <summary>The version of the library that runs, as "major.minor.patch".</summary>
        public static string Version
        {
            get { return After(() => Interop.ReadZ(Native.NVFP4_version())); }
        }

        /// <summary>Names the library's file, or its folder, in the place of NVFP4_LIB_PATH. Null takes that back. Once the library is loaded this changes nothing but what <see cref="Probe"/> tries.</summary>
        public static void Use(string fileOrFolder)
        {
            lock (Gate)
                used = string.IsNullOrEmpty(fileOrFolder) ? null : fileOrFolder;
        }

        /// <summary>Loads the library if it is not loaded yet, which the first call does otherwise.</summary>
        /// <exception cref="Nvfp4LoadException">
        /// No file was found, or the one that was does not fit: the message says which were tried and why each failed, or both versions,
        /// and what this assembly needs.
        /// </exception>
        public static void Load()
        {
            if (loaded)
                return;
            lock (Gate)
            {
                if (loaded)
                    return;
                path = Find(out IntPtr handle);
                Resolver.Install(path, handle);
                CheckBound(handle);
                loaded = true;
            }
        }

        /// The runtime's calls must go to the file that was loaded.
        static void CheckBound(IntPtr handle)
        {
            // The text is static, so two copies of the library have it in two places.
            IntPtr expected = Function<PointerFunction>(handle, "NVFP4_version")();
            Func<IntPtr> ask = () => Native.NVFP4_version();
            IntPtr bound = IntPtr.Zero;
            try
            {
                bound = ask();
            }
            catch (Exception e) when (e is DllNotFoundException || e is EntryPointNotFoundException)
            {
                // The runtime looks at other places before those that are loaded.
            }
            if (bound != expected)
                throw new Nvfp4LoadException(Status.NotLoaded, "the runtime does not take " + path + " but another " + Loader.FileName +
                    ", one beside the assembly or of the program's own resolver; remove that one, or load it instead");
        }

        /// The versions of the library that fit this assembly.
        static string Needed => "LibNVFP4 " + Dotted + " needs libNVFP4 " + Dotted + " or later";

        static string Dotted => Native.VersionNumber / 10000 + "." + Native.VersionNumber / 100 % 100 + "." + Native.VersionNumber % 100;

        /// Refuses a library that this assembly is not made for. It is asked by its handle, as what the runtime has once bound to a
        /// file, it keeps.
        static void CheckVersions(string file, IntPtr handle)
        {
            string needed = Needed + " with binary interface " + AbiVersion;
            foreach (string name in new[] { "NVFP4_version", "NVFP4_version_number", "NVFP4_abi_version" })
                if (Loader.Symbol(handle, name) == IntPtr.Zero)
                    throw new Nvfp4LoadException(Status.AbiMismatch, file + " is no libNVFP4, or one from before its versions (it has no function " +
                        name + "); " + needed);
            string version = Interop.ReadZ(Function<PointerFunction>(handle, "NVFP4_version")());
            int number = Function<NumberFunction>(handle, "NVFP4_version_number")(), binary = Function<NumberFunction>(handle, "NVFP4_abi_version")();
            if (binary != AbiVersion || number < Native.VersionNumber)
                throw new Nvfp4LoadException(Status.AbiMismatch, file + " is libNVFP4 " + version + " with binary interface " + binary + "; " + needed +
                    (binary <= AbiVersion ? ": install libNVFP4 " + Dotted + " or later" :
                        ": install the LibNVFP4 package of version " + version + ", which is for that library"));
            foreach (MethodInfo function in typeof(Native).GetMethods(BindingFlags.Static | BindingFlags.NonPublic | BindingFlags.DeclaredOnly))
                if ((function.Attributes & MethodAttributes.PinvokeImpl) != 0 && Loader.Symbol(handle, function.Name) == IntPtr.Zero)
                    throw new Nvfp4LoadException(Status.AbiMismatch, file + " has no " + function.Name + ", though it says that it is libNVFP4 " + version +
                        "; " + needed + ", and a whole one");
        }

        static T Function<T>(IntPtr handle, string name) => Marshal.GetDelegateForFunctionPointer<T>(Loader.Symbol(handle, name));

        /// <summary>Whether the library can be loaded with the current search path.</summary>
        /// <param name="file">The file that can be loaded, or the one that was asked for, or null.</param>
        /// <param name="error">Why not, or null.</param>
        public static bool Probe(out string file, out string error)
        {
            lock (Gate)
            {
                try
                {
                    file = loaded && Asked() == null ? path : Find(out IntPtr _);
                    error = null;
                    return true;
                }
                catch (Nvfp4LoadException e)
                {
                    file = Asked();
                    error = e.Message;
                    return false;
                }
            }
        }

        /// <summary>What the library can do on this machine and why something is missing, as JSON.</summary>
        public static string Diagnose()
        {
            Load();
            return Interop.Text((buffer, capacity, length) => Native.NVFP4_diagnose(buffer, capacity, length));
        }

        /// <summary>Sets how many CPU threads calls and objects made from now on use. 0 leaves it to NVFP4_THREADS, or one per core.</summary>
        public static void SetThreads(int threads) => Call(() => Native.NVFP4_set_threads(threads));

        /// <summary>
        /// Sends log messages of a level and more severe ones to a handler, for the whole process, in the place of the one
        /// before; null stops that. When the call returns, the handler before it is not running, unless it is what calls this.
        /// Exceptions of a handler are lost. Each copy of this assembly has a handler of its own; that of a collectible
        /// AssemblyLoadContext is taken back when the context begins to unload.
        /// </summary>
        public static void SetLog(LogHandler handler, LogLevel level = LogLevel.Info)
        {
            Log next = null, before;
            if (handler != null)
                Load();
            lock (LogGate)
            {
                before = log;
                if (handler != null)
                {
                    Unloading.Watch(() => SetLog(null));
                    next = new Log(++logs, handler);
                    Interop.Call(() => next.Add(OnLogCallback, level));
                }
                // From here on the one before gets nothing more.
                log = next;
            }
            // This waits for handlers that run, which may be setting another one, so it holds no lock.
            before?.Remove();
        }

        /// A handler that is known to the library.
        sealed class Log
        {
            readonly IntPtr user;
            readonly LogHandler handler;
            ulong token;

            internal Log(long number, LogHandler handler)
            {
                user = new IntPtr(number);
                this.handler = handler;
            }

            internal int Add(LogCallback callback, LogLevel level)
            {
                fixed (ulong* at = &token)
                    return Native.NVFP4_log_add(callback, user, (int)level, null, at);
            }

            internal void Remove() => Interop.Call(() => Native.NVFP4_log_remove(token));

            internal void Give(IntPtr to, int level, string message)
            {
                if (to == user)
                    handler((LogLevel)level, message);
            }
        }

        /// <summary>Waits until everything that calls have enqueued on a device has run. What the device has found wrong in one of them is the exception.</summary>
        public static void Synchronize(Device device) =>
            Call(() => Native.NVFP4_device_synchronize((int)device.Type, device.Index));

        /// <summary>Frees what the library keeps for reuse. Objects that are in use keep what they need.</summary>
        public static void EmptyCache() =>
            Call(() =>
            {
                Native.NVFP4_empty_cache();
                return (int)Status.Ok;
            });

        /// Makes what may be the process's first call, and checks its status.
        internal static void Call(Func<int> call) => Interop.Check(Try(call));

        /// Makes what may be the process's first call, and returns its status.
        internal static int Try(Func<int> call)
        {
            Load();
            return Interop.Try(call);
        }

        /// Makes what may be the process's first call.
        internal static T After<T>(Func<T> call)
        {
            Load();
            return call();
        }

        [MonoPInvokeCallback(typeof(LogCallback))]
        static int OnLog(IntPtr user, int level, byte* message, UIntPtr length)
        {
            try
            {
                log?.Give(user, level, Interop.Read(message, length));
            }
            catch (Exception)
            {
                // There is no call that it could come out of: a message may be about another thread's work.
            }
            return 0;
        }

        /// The one place that is to be taken, if there is one.
        static string Asked()
        {
            string place = used ?? Environment.GetEnvironmentVariable(Variable);
            return string.IsNullOrEmpty(place) ? null : System.IO.Path.GetFullPath(place);
        }

        /// Loads the library, and gives its path. The first file that is there is the one, or the reason for a failure.
        static string Find(out IntPtr handle)
        {
            string asked = Asked();
            string where = asked == null ? "; name the file in " + Variable :
                used != null ? " (named by Library.Use)" : " (named by " + Variable + ")";
            string needed = Needed + " for " + Loader.Processor;
            var tried = new List<string>();
            foreach (string file in asked != null ? new[] { InFolder(asked) } : Files())
            {
                bool there = File.Exists(file);
                string error = "not there";
                // A place that was asked for need not be a file: the loader has words for that.
                handle = there || asked != null ? Loader.Open(file, out error) : IntPtr.Zero;
                if (handle != IntPtr.Zero)
                {
                    CheckVersions(file, handle);
                    return file;
                }
                if (there)
                    throw new Nvfp4LoadException(Status.NotLoaded, file + " cannot be loaded: " + Loader.Unfit(file, error) + "; " + needed + where);
                tried.Add(error.StartsWith(file, StringComparison.Ordinal) ? error : file + ": " + error);
            }
            if (asked == null)
            {
                handle = Search(out string error);
                if (handle != IntPtr.Zero)
                {
                    CheckVersions(Loader.FileName, handle);
                    return Loader.FileName;
                }
                tried.Add(error);
            }
            throw new Nvfp4LoadException(Status.NotLoaded, "the native library " + Loader.FileName + " could not be loaded: " +
                string.Join("; ", tried.ToArray()) + "; " + needed + where);
        }

        static string InFolder(string place) => Directory.Exists(place) ? System.IO.Path.Combine(place, Loader.FileName) : place;

        /// Where the library may be, beside the program and this assembly.
        static IEnumerable<string> Files()
        {
            var seen = new HashSet<string>();
            foreach (string folder in Folders())
            {
                string native = System.IO.Path.Combine("runtimes", Loader.Rid, "native");
                // The last is where NuGet unpacks a package: the assembly is in lib/FRAMEWORK.
                foreach (string place in new[] { "", native, System.IO.Path.Combine("..", "..", native) })
                {
                    string file = System.IO.Path.GetFullPath(System.IO.Path.Combine(folder, place, Loader.FileName));
                    if (seen.Add(file))
                        yield return file;
                }
            }
        }

#if NETCOREAPP
        /// An assembly's own folder is not known in a program that is a single file or was compiled ahead of time.
        static IEnumerable<string> Folders()
        {
            yield return AppContext.BaseDirectory;
            // Where the host has found the native files of packages, or has unpacked those of a single file.
            string found = AppContext.GetData("NATIVE_DLL_SEARCH_DIRECTORIES") as string ?? "";
            foreach (string folder in found.Split(System.IO.Path.PathSeparator))
                if (folder.Length > 0)
                    yield return folder;
        }

        /// Asks the runtime, which looks beside an assembly that is not the program's, such as a plugin's or a script's, in what its
        /// AssemblyLoadContext knows of, and in the system's places.
        static IntPtr Search(out string error)
        {
            error = null;
            return NativeLibrary.TryLoad(Loader.FileName, typeof(Library).Assembly, DllImportSearchPath.AssemblyDirectory, out IntPtr handle)
                ? handle : Loader.Open(Loader.FileName, out error);
        }
#else
        static IEnumerable<string> Folders()
        {
            string assembly = typeof(Library).Assembly.Location;
            if (!string.IsNullOrEmpty(assembly))
                yield return System.IO.Path.GetDirectoryName(assembly);
            string program = AppDomain.CurrentDomain.BaseDirectory;
            if (!string.IsNullOrEmpty(program))
                yield return program;
        }

        static IntPtr Search(out string error) => Loader.Open(Loader.FileName, out error);
#endif
    }

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    delegate IntPtr PointerFunction();

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    delegate int NumberFunction();

    /// The system's loader, whose own words say what is missing.
    static class Loader
    {
        static readonly bool Windows = System.IO.Path.DirectorySeparatorChar == '\\';
        static readonly bool MacOS = !Windows && RuntimeInformation.IsOSPlatform(OSPlatform.OSX);

        internal static string FileName => Windows ? "NVFP4.dll" : MacOS ? "libNVFP4.dylib" : "libNVFP4.so";

        internal static string Rid => (Windows ? "win-" : MacOS ? "osx-" : "linux-") + Processor;

        internal static string Processor => RuntimeInformation.ProcessArchitecture.ToString().ToLowerInvariant();

        /// The machine numbers of ELF files, with .NET's names of the processors.
        static readonly Dictionary<int, string> Processors = new Dictionary<int, string>
        {
            { 3, "x86" }, { 40, "arm" }, { 62, "x64" }, { 183, "arm64" }, { 243, "riscv64" },
        };

        /// Why a file that is there cannot be loaded. Of one for another processor the system says that it is not there.
        internal static string Unfit(string file, string error)
        {
            if (error.StartsWith(file + ": ", StringComparison.Ordinal))
                error = error.Substring(file.Length + 2);
            if (Windows || MacOS)
                return error;
            var header = new byte[20];
            int length;
            try
            {
                using (FileStream stream = File.OpenRead(file))
                    length = stream.Read(header, 0, header.Length);
            }
            catch (Exception e) when (e is IOException || e is UnauthorizedAccessException)
            {
                return error;
            }
            if (length < 4 || header[0] != 0x7f || header[1] != 'E' || header[2] != 'L' || header[3] != 'F')
                return "it is no shared library";
            // Byte 5 says in which order those of a number are.
            int number = header[5] == 1 ? header[18] | header[19] << 8 : header[18] << 8 | header[19];
            string processor = Processors.TryGetValue(number, out string known) ? known : "machine " + number + " of ELF";
            return length < header.Length || processor == Processor ? error : "it is for " + processor + ", and this process is " + Processor;
        }

        /// Loads a library for the rest of the process.
        internal static IntPtr Open(string file, out string error)
        {
            if (Windows)
            {
                // The library's own folder is searched for what it needs.
                IntPtr module = LoadLibraryEx(file, IntPtr.Zero, file.IndexOf('\\') >= 0 ? 8u : 0u);
                error = module != IntPtr.Zero ? null :
                    new System.ComponentModel.Win32Exception(Marshal.GetLastWin32Error()).Message;
                return module;
            }
            const int now = 2;
            // A runtime may look for dlerror, by dlopen and dlsym, the first time that it is called: that must be past.
            Posix.Error();
            IntPtr handle = Posix.Open(file, now);
            error = handle != IntPtr.Zero ? null : Marshal.PtrToStringAnsi(Posix.Error()) ?? "the system gives no reason";
            return handle;
        }

        internal static IntPtr Symbol(IntPtr handle, string name) =>
            Windows ? GetProcAddress(handle, name) : Posix.Symbol(handle, name);

        [DllImport("kernel32", CharSet = CharSet.Unicode, SetLastError = true, EntryPoint = "LoadLibraryExW")]
        static extern IntPtr LoadLibraryEx(string file, IntPtr reserved, uint flags);

        [DllImport("kernel32", CharSet = CharSet.Ansi, ExactSpelling = true)]
        static extern IntPtr GetProcAddress(IntPtr module, string name);

        /// dlopen is in libdl where that is a library of its own, and else in libc.
        static class Posix
        {
            static readonly bool InLibdl = Has();

            internal static IntPtr Open(string file, int flags)
            {
                byte[] name = System.Text.Encoding.UTF8.GetBytes(file + "\0");
                return InLibdl ? dlopen(name, flags) : dlopen_libc(name, flags);
            }

            internal static IntPtr Error() => InLibdl ? dlerror() : dlerror_libc();

            internal static IntPtr Symbol(IntPtr handle, string name)
            {
                byte[] bytes = System.Text.Encoding.UTF8.GetBytes(name + "\0");
                return InLibdl ? dlsym(handle, bytes) : dlsym_libc(handle, bytes);
            }

            static bool Has()
            {
                try
                {
                    dlerror();
                    return true;
                }
                catch (Exception e) when (e is DllNotFoundException || e is EntryPointNotFoundException)
                {
                    return false;
                }
            }

            [DllImport("libdl.so.2")]
            static extern IntPtr dlopen(byte[] file, int flags);

            [DllImport("libdl.so.2")]
            static extern IntPtr dlerror();

            [DllImport("libdl.so.2")]
            static extern IntPtr dlsym(IntPtr handle, byte[] name);

            [DllImport("libc", EntryPoint = "dlopen")]
            static extern IntPtr dlopen_libc(byte[] file, int flags);

            [DllImport("libc", EntryPoint = "dlerror")]
            static extern IntPtr dlerror_libc();

            [DllImport("libc", EntryPoint = "dlsym")]
            static extern IntPtr dlsym_libc(IntPtr handle, byte[] name);
        }
    }

    /// Tells that the code of this assembly is about to go, where that can happen: in a collectible AssemblyLoadContext.
    static class Unloading
    {
#if NETCOREAPP
        static readonly AssemblyLoadContext Context = AssemblyLoadContext.GetLoadContext(typeof(Unloading).Assembly);
        static bool watched;
        static volatile bool begun;

        /// Has the action, which is always the same, done when unloading begins. Fails if it has begun.
        internal static void Watch(Action action)
        {
            if (begun)
                throw new InvalidOperationException("the AssemblyLoadContext " + Context.Name +
                    " is being unloaded, and the code of a log handler with it; none can be set any more");
            if (watched || !Context.IsCollectible)
                return;
            watched = true;
            Context.Unloading += context =>
            {
                begun = true;
                action();
            };
        }
#else
        internal static void Watch(Action action)
        {
        }
#endif
    }

    /// Leads the runtime's own search to the file that was loaded.
    static class Resolver
    {
        static bool installed;
        static IntPtr library;

#if NETCOREAPP
        internal static void Install(string file, IntPtr handle)
        {
            library = handle;
            if (installed)
                return;
            installed = true;
            try
            {
                NativeLibrary.SetDllImportResolver(typeof(Resolver).Assembly, Resolve);
            }
            catch (InvalidOperationException)
            {
                // The program has set a resolver for this assembly, whose word counts.
            }
        }
#else
        internal static void Install(string file, IntPtr handle)
        {
            library = handle;
            if (!Map(file) && !installed)
                installed = Set();
        }

        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        delegate void MapFunction(IntPtr assembly, byte[] name, IntPtr function, byte[] newName, IntPtr newFunction);

        /// Mono's map, which is a function of the process, and only of Mono's.
        static bool Map(string file)
        {
            IntPtr function = Type.GetType("Mono.Runtime") == null ? IntPtr.Zero : Loader.Symbol(IntPtr.Zero, "mono_dllmap_insert");
            if (function == IntPtr.Zero)
                return false;
            byte[] from = System.Text.Encoding.UTF8.GetBytes(Native.Name + "\0"), to = System.Text.Encoding.UTF8.GetBytes(file + "\0");
            Marshal.GetDelegateForFunctionPointer<MapFunction>(function)(IntPtr.Zero, from, IntPtr.Zero, to, IntPtr.Zero);
            return true;
        }

        /// The resolver of .NET Core, which .NET Standard has no name for.
        static bool Set()
        {
            Type resolver = Type.GetType("System.Runtime.InteropServices.DllImportResolver, System.Runtime.InteropServices");
            MethodInfo set = Type.GetType("System.Runtime.InteropServices.NativeLibrary, System.Runtime.InteropServices")
                ?.GetMethod("SetDllImportResolver");
            if (resolver == null || set == null)
                return false;
            Func<string, Assembly, DllImportSearchPath?, IntPtr> resolve = Resolve;
            try
            {
                set.Invoke(null, new object[] { typeof(Resolver).Assembly, Delegate.CreateDelegate(resolver, resolve.Method) });
            }
            catch (TargetInvocationException e) when (e.InnerException is InvalidOperationException)
            {
                // The program has set a resolver for this assembly, whose word counts.
            }
            return true;
        }

#endif

        static IntPtr Resolve(string name, Assembly assembly, DllImportSearchPath? search) => name == Native.Name ? library : IntPtr.Zero;
    }
}
