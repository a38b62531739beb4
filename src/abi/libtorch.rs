//! Access to libtorch tensors behind the handles that TorchSharp passes: pointers to `at::Tensor` objects on the heap. Uses libtorch's C
//! functions, which are looked up in the process when a call first needs them, so that this library does not depend on libtorch. Knows
//! nothing of the operations on the tensors.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

use crate::base::error::{Result, bail, err};
use crate::ops::transfer::{self, HostStream};
use crate::tensor::{DLManagedTensor, DType, Place, Shape, Tensor};

/// A pointer to an `at::Tensor`.
type Handle = *mut c_void;

/// libtorch's numbers of device types.
const CPU: i32 = 0;
const CUDA: i32 = 1;
/// libtorch's number of the strided layout, which ordinary tensors have.
const STRIDED: i32 = 0;

/// A C++ value returned through the caller's memory, because it is too large for registers.
#[repr(C)]
struct Returned([usize; 3]);

/// Declares the libtorch functions that this file calls, with their types and their symbols. The required ones exist in every libtorch
/// since 2.10.
macro_rules! functions {
    (needed { $($name:ident = $symbol:literal: fn($($argument:ty),*);)+ } optional { $($option:ident = $other:literal: $type:ty;)+ }) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> i32,)+
            $($option: Option<$type>,)+
            /// The first word of every dense tensor's implementation object (its virtual table pointer), if known.
            dense: Option<usize>,
        }

        impl Functions {
            fn find(library: &Library) -> Option<Functions> {
                // SAFETY: the library stays loaded, and libtorch's functions of these names have these types.
                unsafe {
                    Some(Functions {
                        $($name: symbol(library, $symbol)?,)+
                        $($option: symbol::<$type>(library, $other),)+
                        // Objects point past the first two words of a virtual table.
                        dense: symbol::<*const c_void>(library, c"_ZTVN3c1010TensorImplE").map(|table| table.addr() + 2 * size_of::<usize>()),
                    })
                }
            }
        }
    };
}

functions! {
    needed {
        data = c"aoti_torch_get_data_ptr": fn(Handle, *mut *mut c_void);
        rank = c"aoti_torch_get_dim": fn(Handle, *mut i64);
        sizes = c"aoti_torch_get_sizes": fn(Handle, *mut *mut i64);
        strides = c"aoti_torch_get_strides": fn(Handle, *mut *mut i64);
        dtype = c"aoti_torch_get_dtype": fn(Handle, *mut i32);
        device_type = c"aoti_torch_get_device_type": fn(Handle, *mut i32);
        device_index = c"aoti_torch_get_device_index": fn(Handle, *mut i32);
        empty = c"aoti_torch_empty_strided": fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle);
        undefined = c"aoti_torch_new_uninitialized_tensor": fn(*mut Handle);
        alias = c"aoti_torch_new_tensor_handle": fn(Handle, *mut Handle);
        delete = c"aoti_torch_delete_tensor_object": fn(Handle);
    }
    optional {
        // Since 2.11.
        from_blob = c"torch_from_blob": FromBlob;
        // at::fromDLPack(DLManagedTensor*, std::function<void (void*)>), whose second argument comes by address.
        from_dlpack = c"_ZN2at10fromDLPackEP15DLManagedTensorSt8functionIFvPvEE": FromDlpack;
    }
}

/// The library `lib<name>.so` that is already in the process, or else one whose file name begins like that.
fn loaded(name: &str) -> Option<Library> {
    // SAFETY: nothing is loaded by this, so no code of a library runs.
    let open =
        |path: &Path| unsafe { Library::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD).ok() };
    let name = format!("lib{name}");
    open(format!("{name}.so").as_ref()).or_else(|| paths(&name).iter().find_map(|path| open(path)))
}

/// Looks up a symbol of a library, or of one that it depends on.
///
/// # Safety
/// The symbol must be of the type `T`, which has the size of a pointer, and must not be used after the library is unloaded.
unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
}

/// The paths of loaded libraries whose file name begins with `name`.
fn paths(name: &str) -> Vec<PathBuf> {
    struct Search<'a> {
        name: &'a str,
        found: Vec<PathBuf>,
    }
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: `paths` passes its search, and the loader a description with a name that may be NULL.
        let (search, path) = unsafe {
            let path = (*info).dlpi_name;
            if path.is_null() {
                return 0;
            }
            (&mut *search.cast::<Search<'_>>(), CStr::from_ptr(path))
        };
        let file = path.to_bytes().rsplit(|&b| b == b'/').next();
        if file.is_some_and(|file| file.starts_with(search.name.as_bytes())) {
            search.found.push(OsStr::from_bytes(path.to_bytes()).into());
        }
        0
    }
    let mut search = Search {
        name,
        found: Vec::new(),
    };
    // SAFETY: the callback is called during this call only, with the search.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// The result of `find` for a loaded library, which then stays in the process. A library that is missing now may be loaded later.
fn once<T>(
    cell: &'static OnceLock<T>,
    name: &str,
    find: impl FnOnce(&Library) -> Option<T>,
) -> Option<&'static T> {
    if cell.get().is_none() {
        let library = loaded(name)?;
        let found = find(&library)?;
        // Another thread was first, and has kept the library.
        if cell.set(found).is_ok() {
            std::mem::forget(library);
        }
    }
    cell.get()
}

fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    once(&FUNCTIONS, "torch_cpu", Functions::find)
}

fn need(name: &str) -> Result<&'static Functions> {
    functions().ok_or_else(|| {
        err!(
            InvalidHandle,
            "{name} is not a handle of this library, nor a tensor of TorchSharp: there is no libtorch 2.10 or later in this process"
        )
    })
}

/// Converts the status of a libtorch function to an error; libtorch has written the reason to standard error.
fn check(code: i32, name: &str, asked: &str) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => bail!(Internal, "libtorch does not give {asked} of {name}"),
    }
}

/// Whether the 8 bytes at a multiple of 8 are readable: the kernel reads the signal set of this system call before it rejects the call.
fn is_readable(address: usize) -> bool {
    if address == 0 || !address.is_multiple_of(8) {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        let nothing: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call takes no address that it may write to.
        let done = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, -1, address, nothing, 8usize) };
        done == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    }
    #[cfg(not(target_os = "linux"))]
    true
}

/// The word at an address, if readable.
fn word(address: usize) -> Option<usize> {
    // SAFETY: it was readable just now. A caller that frees it meanwhile violates the header's rules.
    is_readable(address)
        .then(|| unsafe { std::ptr::with_exposed_provenance::<usize>(address).read_volatile() })
}

/// Refuses a handle that is not a live dense tensor, as far as that can be detected: freed memory holds another word, which does not point
/// to an object that begins like a tensor's.
fn check_alive(torch: &Functions, name: &str, handle: Handle) -> Result<()> {
    let begins = word(handle.expose_provenance()).and_then(word);
    match (begins, torch.dense) {
        (Some(_), None) => Ok(()),
        (Some(begins), Some(dense)) if begins == dense => Ok(()),
        _ => bail!(
            InvalidHandle,
            "{name} is {}; pass a live dense tensor of libtorch, or an NVFP4_Tensor",
            match handle.is_null() {
                true => "NULL",
                false => "no live tensor, or a sparse or quantized one",
            }
        ),
    }
}

/// The sizes or strides of a tensor.
fn dimensions(name: &str, values: *const i64, rank: i64) -> Result<Vec<usize>> {
    (0..rank as usize)
        .map(|i| {
            // SAFETY: libtorch gave `rank` values at `values`.
            let value = unsafe { values.add(i).read() };
            usize::try_from(value).map_err(|_| {
                err!(
                    InvalidArgument,
                    "{name} has the size or stride {value}; it cannot be negative"
                )
            })
        })
        .collect()
}

/// A view of the tensor behind a handle, for a call during which the handle stays alive.
pub(super) fn view(name: &str, handle: Handle) -> Result<Tensor> {
    let torch = need(name)?;
    check_alive(torch, name, handle)?;
    let (mut dtype, mut device, mut index) = (0, 0, 0);
    let (mut rank, mut sizes, mut strides) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the handle was checked, and each place has the type that the function writes.
    unsafe {
        check((torch.dtype)(handle, &mut dtype), name, "the dtype")?;
        check((torch.device_type)(handle, &mut device), name, "the device")?;
        check((torch.device_index)(handle, &mut index), name, "the device")?;
        check((torch.rank)(handle, &mut rank), name, "the rank")?;
        check((torch.sizes)(handle, &mut sizes), name, "the sizes")?;
        check((torch.strides)(handle, &mut strides), name, "the strides")?;
    }
    let dtype = DType::from_code(dtype).map_err(|e| e.within(name))?;
    let shape = Shape::strided(
        &dimensions(name, sizes, rank)?,
        &dimensions(name, strides, rank)?,
    )
    .map_err(|e| e.within(name))?;
    let mut data = std::ptr::null_mut();
    if device != CPU && device != CUDA {
        bail!(
            Unsupported,
            "{name} is on libtorch's device type {device}; it must be 0 (CPU) or 1 (CUDA)"
        );
    }
    // SAFETY: as above.
    check(unsafe { (torch.data)(handle, &mut data) }, name, "the data")?;
    // SAFETY: the tensor keeps its memory for the call.
    unsafe { over(data, shape, dtype, (device == CUDA).then_some(index), false) }
        .map_err(|e| e.within(name))
}

/// A tensor over host memory or memory of a CUDA device.
///
/// # Safety
/// As for [`Tensor::lent`], [`Tensor::lent_for_result`] or [`transfer::lent`].
unsafe fn over(
    data: *mut c_void,
    shape: Shape,
    dtype: DType,
    cuda: Option<i32>,
    result: bool,
) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    unsafe {
        match cuda.map(usize::try_from) {
            None if result => Tensor::lent_for_result(data.cast(), shape, dtype),
            None => Tensor::lent(data.cast(), shape, dtype, None),
            Some(Ok(ordinal)) => transfer::lent(ordinal, data.addr() as u64, shape, dtype, None),
            Some(Err(_)) => bail!(InvalidArgument, "libtorch names no CUDA device"),
        }
    }
}

/// A tensor that libtorch has created for a result. Deleted on drop unless given away.
pub(super) struct Made(Handle);

impl Made {
    /// Gives the handle to the caller.
    pub(super) fn give(self) -> Handle {
        let handle = self.0;
        std::mem::forget(self);
        handle
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Some(torch) = functions() {
            // SAFETY: made by libtorch for this library, and given to nobody.
            unsafe { (torch.delete)(self.0) };
        }
    }
}

/// libtorch's type and index of the device that works with memory.
fn device_numbers(place: Place) -> (i32, i32) {
    match place.cuda() {
        None => (CPU, -1),
        Some(ordinal) => (CUDA, ordinal as i32),
    }
}

fn to_i64(values: &[usize]) -> Vec<i64> {
    // A shape fits in the address space.
    values.iter().map(|&n| n as i64).collect()
}

/// Creates a contiguous libtorch tensor of the shape `sizes` for a result, in the place `like`. Also returns a tensor over its memory, of
/// the shape `written` with the same number of elements, to write the result to.
pub(super) fn make(
    sizes: &[usize],
    written: &[usize],
    dtype: DType,
    like: Place,
) -> Result<(Made, Tensor)> {
    let torch = need("the result")?;
    let shape = Shape::contiguous(sizes)?;
    let (device, index) = device_numbers(like);
    let (rank, values) = (sizes.len() as i64, to_i64(sizes));
    let strides = to_i64(shape.strides());
    let (mut handle, mut data) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the arrays have `rank` values, and the places are of a pointer's size.
    let made = unsafe {
        let (sizes, strides) = (values.as_ptr(), strides.as_ptr());
        (torch.empty)(
            rank,
            sizes,
            strides,
            dtype.code(),
            device,
            index,
            &mut handle,
        )
    };
    if made != 0 || handle.is_null() {
        bail!(
            OutOfMemory,
            "libtorch made no {} tensor of shape {sizes:?} in {like}; its own message is on standard error",
            dtype.name()
        );
    }
    let made = Made(handle);
    check(
        // SAFETY: as above.
        unsafe { (torch.data)(handle, &mut data) },
        "the result",
        "the data",
    )?;
    let cuda = like.cuda().map(|_| index);
    // SAFETY: nobody else has the tensor, and `Made` is given away when this one is gone.
    let tensor = unsafe { over(data, Shape::contiguous(written)?, dtype, cuda, true) }?;
    Ok((made, tensor))
}

/// Another handle of the same tensor.
pub(super) fn alias(name: &str, handle: Handle) -> Result<Handle> {
    let torch = need(name)?;
    check_alive(torch, name, handle)?;
    let mut other = std::ptr::null_mut();
    check(
        // SAFETY: the handle was checked.
        unsafe { (torch.alias)(handle, &mut other) },
        name,
        "another handle",
    )?;
    Ok(other)
}

/// Whether [`wrap`] works with the libtorch in the process, if any.
pub(super) fn can_wrap() -> bool {
    functions().is_none_or(|torch| torch.from_blob.is_some() || torch.from_dlpack.is_some())
}

type FromBlob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    i32,
    i32,
    i32,
    *mut Handle,
    i32,
    *const u8,
    i64,
    Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    *mut c_void,
) -> i32;

type FromDlpack = unsafe extern "C" fn(*mut DLManagedTensor, *const [usize; 4]) -> Returned;

/// A libtorch tensor over the memory of `tensor`, which stays alive as long as it is needed.
pub(super) fn wrap(tensor: Tensor) -> Result<Handle> {
    let torch = need("the result")?;
    match (torch.from_blob, torch.from_dlpack) {
        (Some(from_blob), _) => wrap_blob(from_blob, tensor),
        (None, Some(from_dlpack)) => wrap_dlpack(torch, from_dlpack, tensor),
        (None, None) => bail!(
            Unsupported,
            "this libtorch cannot take memory with a way to give it back; libtorch 2.10 and later can"
        ),
    }
}

fn wrap_blob(from_blob: FromBlob, tensor: Tensor) -> Result<Handle> {
    unsafe extern "C" fn release(_data: *mut c_void, tensor: *mut c_void) {
        // SAFETY: the box made below, which libtorch gives back once.
        drop(unsafe { Box::from_raw(tensor.cast::<Tensor>()) });
    }
    let (device, index) = device_numbers(tensor.place());
    let sizes = to_i64(tensor.shape().sizes());
    let strides = to_i64(tensor.shape().strides());
    let (dtype, data) = (tensor.dtype().code(), tensor.data().cast());
    let kept = Box::into_raw(Box::new(tensor)).cast();
    let mut handle = std::ptr::null_mut();
    // SAFETY: the arrays have as many values as the tensor dimensions, and its memory lives until `release`.
    let code = unsafe {
        from_blob(
            data,
            sizes.len() as i64,
            sizes.as_ptr(),
            strides.as_ptr(),
            0,
            dtype,
            device,
            index,
            &mut handle,
            STRIDED,
            std::ptr::null(),
            0,
            Some(release),
            kept,
        )
    };
    // After an error it is unknown whether libtorch has released it, so it is leaked.
    check(code, "the result", "a tensor over the memory")?;
    Ok(handle)
}

fn wrap_dlpack(torch: &Functions, from_dlpack: FromDlpack, tensor: Tensor) -> Result<Handle> {
    let mut handle = std::ptr::null_mut();
    check(
        // SAFETY: the place is of a pointer's size.
        unsafe { (torch.undefined)(&mut handle) },
        "the result",
        "a tensor",
    )?;
    // An empty std::function: the tensor's own deleter is called.
    let deleter = [0usize; 4];
    let managed = Box::into_raw(tensor.into_dlpack()?);
    // SAFETY: the DLPack tensor is valid and given away. An at::Tensor is one word, which replaces that of an undefined tensor in the new
    // object; undefined tensors count no references.
    unsafe {
        let Returned([word, ..]) = from_dlpack(managed, &deleter);
        handle.cast::<usize>().write(word);
    }
    Ok(handle)
}

/// Orders the calling thread's use of a device's memory with libtorch's current stream of that device.
pub(super) fn on_current_stream(place: Place) -> Option<HostStream> {
    type Current = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;
    static CURRENT: OnceLock<Current> = OnceLock::new();
    let ordinal = place.cuda()?;
    let current = once(&CURRENT, "torch_cuda", |library| {
        // SAFETY: libtorch's function of this name has this type.
        unsafe { symbol(library, c"aoti_torch_get_current_cuda_stream") }
    })?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: the place is of a pointer's size.
    match unsafe { current(ordinal as i32, &mut stream) } {
        // SAFETY: libtorch's streams belong to the device's primary context and live as long as the process.
        0 => Some(unsafe { HostStream::new(ordinal, stream) }),
        _ => None,
    }
}

/// Makes TorchSharp throw `text` when it next checks for an error on this thread. The only way to pass TorchSharp a text is the name of a
/// file that it cannot open.
pub(super) fn throw(text: &str) {
    type FromFile = unsafe extern "C" fn(*const c_char, i8, i64, i8, i32, i32, bool) -> Handle;
    static FROM_FILE: OnceLock<FromFile> = OnceLock::new();
    let from_file = once(&FROM_FILE, "LibTorchSharp", |library| {
        // SAFETY: TorchSharp's function of this name has this type.
        unsafe { symbol(library, c"THSTensor_from_file") }
    });
    if let (Some(from_file), Ok(text)) = (from_file, CString::new(text)) {
        // SAFETY: the name has its end. One byte of a file of that name, on the CPU, without a gradient.
        let opened = unsafe { from_file(text.as_ptr(), 0, 1, 0, CPU, -1, false) };
        if !opened.is_null() {
            drop(Made(opened));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn only_what_can_be_read_is_read() {
        let value = 7usize;
        assert_eq!(word((&raw const value).expose_provenance()), Some(7));
        for nowhere in [0, 1, 8, 4096, usize::MAX - 7, 0x4e46 << 48] {
            assert_eq!(word(nowhere), None, "{nowhere:#x}");
        }
        assert_eq!(word((&raw const value).expose_provenance() + 1), None);
        // SAFETY: a mapping of its own, which nobody else uses.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            assert_eq!(word(page.expose_provenance()), None);
            libc::munmap(page, 4096);
        }
    }

    #[test]
    #[ignore = "needs libtorch in the process: tests/torchsharp/run.sh preloads it"]
    fn memory_of_the_library_becomes_a_tensor_and_comes_back() {
        let torch = functions().expect("libtorch is preloaded");
        let from_dlpack = torch
            .from_dlpack
            .expect("every libtorch that is known has it");
        let by_dlpack = |tensor| wrap_dlpack(torch, from_dlpack, tensor);
        let ways: [&dyn Fn(Tensor) -> Result<Handle>; 2] = [&wrap, &by_dlpack];
        for (way, dtype) in ways.into_iter().zip([DType::F16, DType::F8E4M3]) {
            let mut memory = [1u16, 2, 3, 4, 5, 6];
            let released = Arc::new(AtomicBool::new(false));
            let flag = released.clone();
            let shape = Shape::strided(&[3, 2], &[1, 3]).unwrap();
            // SAFETY: `memory` outlives the tensor.
            let tensor = unsafe {
                let release = Box::new(move || flag.store(true, Ordering::Relaxed));
                Tensor::lent(memory.as_mut_ptr().cast(), shape, dtype, Some(release))
            }
            .unwrap();
            let data = tensor.data();
            let handle = way(tensor).unwrap();
            let seen = view("t", handle).unwrap();
            assert_eq!((seen.data(), seen.dtype()), (data, dtype));
            assert_eq!(seen.shape().sizes(), [3, 2]);
            assert_eq!(seen.shape().strides(), [1, 3]);
            let other = alias("t", handle).unwrap();
            assert_ne!(other, handle);
            drop(Made(handle));
            assert!(!released.load(Ordering::Relaxed));
            drop(Made(other));
            assert!(released.load(Ordering::Relaxed));
        }
    }
}
