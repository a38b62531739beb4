//! Models from memory: files that the host gives under their names, as bytes or behind a function that reads them.
//!
//! The library uses a file until it calls `release`, once for each file that a call was given, whatever comes of the call. It calls it as soon
//! as it can: when loading ends, for all files of a model on a GPU and of one whose output head is its embedding. Other models on the CPU read
//! rows of their embedding from its file while tokens run: what they use is released after the last reference to the model and its sessions.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::arguments::{Element, Out, check_elements, elements, options, text};
use super::call::watched;
use super::guard::{calling, enter, release, unwinding};
use super::handle;
use super::model::{NVFP4_LoadOptions, NVFP4_Model, Wanted, quantizing};
use super::quantize::NVFP4_QuantizeOptions;
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail};
use crate::base::files::{FileContent, GivenFiles, copy_from};
use crate::engine::Served;
use crate::model::{KvType, open_given};

/// Reads `size` bytes of a file from `offset` on into `out`, all of which are in the file. Returns the number of bytes read: fewer than `size`
/// are an error, and so is a negative number, which the message of the error has. Called from several threads at the same time, threads of
/// the library among them. It must return, and must not call the library.
pub type NVFP4_FileRead = Option<
    unsafe extern "C" fn(user: *mut c_void, offset: u64, out: *mut c_void, size: usize) -> i64,
>;

/// Tells the host that the library does not use a file any more. Called on any thread, also during NVFP4_model_load_files() and the release
/// of a model or a session. It must return, and must not call the library.
pub type NVFP4_FileRelease = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A file of a model that the host gives: its bytes in `data`, or a function that reads them. Later versions may add fields at the end:
/// NVFP4_model_load_files() also takes the size of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_ModelFile {
    /// Its name in the model's directory, in UTF-8, such as config.json. Copied.
    pub name: *const c_char,
    /// Bytes of `name`.
    pub name_length: usize,
    /// The content, which must stay and not change until `release` is called; NULL if `read` gives it.
    pub data: *const c_void,
    /// Bytes of the content.
    pub size: u64,
    /// Reads the content; NULL if `data` is it. May be called until `release` is.
    pub read: NVFP4_FileRead,
    /// Called once when the library does not use the file any more; NULL for no call.
    pub release: NVFP4_FileRelease,
    /// The first argument of `read` and `release`.
    pub user: *mut c_void,
}

// SAFETY: pointers and integers without padding. The callbacks are the host's, or NULL.
unsafe impl Element for NVFP4_ModelFile {
    const NAME: &'static str = "NVFP4_ModelFile";
    fn defaults() -> Self {
        NVFP4_ModelFile {
            name: std::ptr::null(),
            name_length: 0,
            data: std::ptr::null(),
            size: 0,
            read: None,
            release: None,
            user: std::ptr::null_mut(),
        }
    }
}

/// A file that the host gave and that is released when this is dropped.
#[repr(transparent)]
struct HostFile(NVFP4_ModelFile);

// SAFETY: the host keeps the bytes unchanged until the release, and its functions may be called from any thread, by the header.
unsafe impl Send for HostFile {}
// SAFETY: as above.
unsafe impl Sync for HostFile {}

impl Drop for HostFile {
    fn drop(&mut self) {
        release(self.0.release, self.0.user);
    }
}

impl HostFile {
    /// The name, if the file is whole.
    fn checked(&self) -> Result<String> {
        let file = &self.0;
        // SAFETY: the host gives names that are readable during the call.
        let name = unsafe { text("name", file.name, file.name_length) }?;
        match (file.data.is_null(), file.read) {
            (true, None) if file.size > 0 => bail!(
                InvalidArgument,
                "{name} has neither data nor read; give its {} bytes by one of them",
                file.size
            ),
            (false, Some(_)) => bail!(
                InvalidArgument,
                "{name} has both data and read; give its content by one of them"
            ),
            (false, None) if file.size > isize::MAX as u64 => bail!(
                InvalidArgument,
                "{name} cannot have {} bytes in memory",
                file.size
            ),
            _ => Ok(name.to_owned()),
        }
    }
}

impl FileContent for HostFile {
    fn size(&self) -> u64 {
        self.0.size
    }

    fn in_memory(&self) -> Option<&[u8]> {
        // SAFETY: `checked` bounds the size, and the host keeps the bytes until the release.
        let bytes = || unsafe {
            std::slice::from_raw_parts(self.0.data.cast::<u8>(), self.0.size as usize)
        };
        match self.0.read {
            None if self.0.data.is_null() => Some(&[]),
            None => Some(bytes()),
            Some(_) => None,
        }
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let Some(read) = self.0.read else {
            return copy_from(self.in_memory().unwrap_or_default(), at, out);
        };
        let read = unwinding!(fn(*mut c_void, u64, *mut c_void, usize) -> i64, read);
        let (to, size) = (out.as_mut_ptr().cast::<c_void>(), out.len());
        // SAFETY: the host's callback, which writes `size` bytes at most; it is not released yet.
        let count = calling(|| unsafe { read(self.0.user, at, to, size) });
        match usize::try_from(count) {
            Ok(count) if count == size => Ok(()),
            Ok(count) if count < size => bail!(Io, "its read gave {count} bytes"),
            _ => bail!(Io, "its read returned {count}"),
        }
    }
}

/// Loads a model from files that the host gives: those of a model's directory by their names - config.json, tokenizer.json and others of
/// text, the weights as `.safetensors` with or without an index, as `.gguf` or as `.dat` - as NVFP4_model_load() loads a directory. Nothing
/// is written, and bytes in memory are not copied as a whole. Sessions that were saved with a model from disk are restored with the same
/// model from memory, and the other way round.
///
/// - `files`, `count`: the files, at least one, each of `file_size` bytes, which is sizeof(NVFP4_ModelFile).
/// - `options`: NULL for the defaults.
/// - `quantize`: how to quantize dense weights to NVFP4 while loading; NULL keeps weights as they are stored.
///
/// `release` of every file is called once, also if the call fails; only if `files` is no array of elements of `file_size` bytes, the library
/// cannot know the functions and calls none. A `read` that fails, or reads less, ends the call with #NVFP4_IO and a message with the file, the
/// offset and the bytes. A later call whose tokens need the file fails the same way.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_load_files(
    files: *const NVFP4_ModelFile,
    count: usize,
    file_size: usize,
    options: *const NVFP4_LoadOptions,
    quantize: *const NVFP4_QuantizeOptions,
    out: *mut *mut NVFP4_Model,
) -> NVFP4_Status {
    let taken = Cell::new(false);
    let status = enter("NVFP4_model_load_files", || {
        // SAFETY: the pointers are as the header asks.
        let files = unsafe { elements("files", files, count, file_size) }?;
        let files: Vec<HostFile> = files.into_iter().map(HostFile).collect();
        taken.set(true);
        // SAFETY: as above.
        let (out, options, quantize) = unsafe {
            (
                Out::new("out", out)?,
                self::options(options)?,
                quantizing(quantize)?,
            )
        };
        let wanted = Wanted::read(&options, quantize)?;
        let files = given(files)?;
        let open = || open_given(&files);
        let load = || wanted.on_device(open, KvType::F16, |to| Served::load_given(&files, to));
        // SAFETY: as above.
        let model = unsafe { watched(options.call, load) }?;
        tracing::debug!(?files, "loaded {model:?}");
        out.set(handle::insert(model));
        Ok(())
    });
    if !taken.get() {
        // SAFETY: as above.
        unsafe { release_all(files, count, file_size) };
    }
    status
}

/// The files by their names.
fn given(files: Vec<HostFile>) -> Result<GivenFiles> {
    let named = files.into_iter().enumerate().map(|(i, file)| {
        let name = file.checked();
        let name = name.map_err(|e| e.within(format_args!("files[{i}]")))?;
        let content: Arc<dyn FileContent> = Arc::new(file);
        Ok((name, content))
    });
    GivenFiles::new(named.collect::<Result<Vec<_>>>()?)
}

/// Releases files that the call has not taken: it failed before, for example for lack of memory.
///
/// # Safety
/// `files`, unless NULL, must be readable for `count` elements of `file_size` bytes.
unsafe fn release_all(files: *const NVFP4_ModelFile, count: usize, file_size: usize) {
    if check_elements("files", files, count, file_size).is_err() {
        return;
    }
    for i in 0..count {
        // SAFETY: promised by the caller; every version has these fields.
        let file = unsafe { files.byte_add(i * file_size).read() };
        release(file.release, file.user);
    }
}
