//! Arguments from C, checked and converted to Rust: output pointers, slices, text, enumerated numbers, and structs that grow with the
//! library. The beginning of the header states the rules.

use std::ffi::{OsStr, c_char, c_void};
use std::fmt;
use std::mem::size_of;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::base::error::{Result, bail, err};
use crate::base::memory::{copied, with_room};
use crate::text::utf8;

/// An output pointer from C.
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `place`, unless NULL, must be writable for a `T`, at any alignment.
    pub(super) unsafe fn new(name: &str, place: *mut T) -> Result<Self> {
        match place.is_null() {
            true => bail!(
                InvalidArgument,
                "{name} is NULL; pass where the result goes"
            ),
            false => Ok(Out(place)),
        }
    }

    pub(super) fn set(self, value: T) {
        // SAFETY: promised at construction.
        unsafe { self.0.write_unaligned(value) }
    }
}

fn check_array<T>(name: &str, data: *const T, len: usize) -> Result<()> {
    if data.is_null() {
        bail!(InvalidArgument, "{name} is NULL, but its length is {len}");
    }
    if !data.is_aligned() {
        bail!(
            InvalidArgument,
            "{name} is not aligned to its elements of {} bytes",
            size_of::<T>()
        );
    }
    if len
        .checked_mul(size_of::<T>())
        .is_none_or(|n| n > isize::MAX as usize)
    {
        bail!(
            InvalidArgument,
            "{name} cannot have {len} elements of {} bytes",
            size_of::<T>()
        );
    }
    Ok(())
}

/// An array from C; NULL is an empty one when `len` is 0.
///
/// # Safety
/// `data`, unless NULL, must be readable for `len` elements during `'a`, and nobody may write them meanwhile.
pub(super) unsafe fn slice<'a, T>(name: &str, data: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_array(name, data, len)?;
    // SAFETY: not NULL, aligned, of a possible size, and readable by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// Pointers to the `count` items of an array from C, each with its length from another array.
///
/// # Safety
/// As for [`slice`], of both arrays.
pub(super) unsafe fn with_lengths<'a, T: 'a>(
    (name, data): (&str, *const *const T),
    (lengths_name, lengths): (&str, *const usize),
    count: usize,
) -> Result<impl Iterator<Item = (*const T, usize)> + use<'a, T>> {
    // SAFETY: promised by the caller.
    let (items, lengths): (&'a [*const T], &'a [usize]) = unsafe {
        (
            slice(name, data, count)?,
            slice(lengths_name, lengths, count)?,
        )
    };
    Ok(items.iter().copied().zip(lengths.iter().copied()))
}

/// A byte buffer from C to write; NULL is an empty one when `len` is 0.
///
/// # Safety
/// `data`, unless NULL, must be writable for `len` elements during `'a`, and nobody else may use them meanwhile.
pub(super) unsafe fn slice_mut<'a, T>(name: &str, data: *mut T, len: usize) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_array(name, data, len)?;
    // SAFETY: not NULL, aligned, of a possible size, and the caller's alone by its promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}

/// UTF-8 text from C.
///
/// # Safety
/// As for [`slice`].
pub(super) unsafe fn text<'a>(name: &str, data: *const c_char, len: usize) -> Result<&'a str> {
    // SAFETY: promised by the caller.
    utf8(name, unsafe { slice(name, data.cast::<u8>(), len) }?)
}

/// UTF-8 texts from C, each of them called `one`, and copied.
///
/// # Safety
/// As for [`slice`], of the arrays and of each text.
pub(super) unsafe fn texts(
    one: &str,
    texts: (&str, *const *const c_char),
    lengths: (&str, *const usize),
    count: usize,
) -> Result<Vec<String>> {
    // SAFETY: promised by the caller.
    let each = unsafe { with_lengths(texts, lengths, count) }?;
    // SAFETY: as above.
    each.map(|(data, length)| copied(unsafe { text(one, data, length) }?))
        .collect()
}

/// A path from C, as the system's bytes, which need not be UTF-8.
///
/// # Safety
/// As for [`slice`].
pub(super) unsafe fn path<'a>(name: &str, data: *const c_char, len: usize) -> Result<&'a Path> {
    // SAFETY: promised by the caller.
    let bytes = unsafe { slice(name, data.cast::<u8>(), len) }?;
    if let Some(at) = bytes.iter().position(|&byte| byte == 0) {
        bail!(
            InvalidArgument,
            "{name} has a NUL at byte {at} of {len}; a path ends before it"
        );
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Paths from C, each with its length in bytes.
///
/// # Safety
/// As for [`slice`], of the arrays and of each path.
pub(super) unsafe fn paths(
    name: &str,
    data: *const *const c_char,
    lengths: *const usize,
    count: usize,
) -> Result<Vec<PathBuf>> {
    let lengths_name = format!("the lengths of {name}");
    // SAFETY: promised by the caller.
    let each = unsafe { with_lengths((name, data), (&lengths_name, lengths), count) }?;
    each.enumerate()
        .map(|(i, (file, length))| {
            // SAFETY: as above.
            let path = unsafe { path(&format!("{name}[{i}]"), file, length) }?;
            Ok(path.to_owned())
        })
        .collect()
}

/// Copies text to C: writes the length in bytes, then the text if it fits, followed by a NUL if that fits too. A NULL buffer of capacity 0
/// asks only for the length.
///
/// # Safety
/// `buffer`, unless NULL, must be writable for `capacity` bytes, and `length`, unless NULL, for a `usize`.
pub(super) unsafe fn copy_text(
    value: &str,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe {
        copy_items(value.as_bytes(), buffer.cast::<u8>(), capacity, length)?;
        if !buffer.is_null() && capacity > value.len() {
            buffer.add(value.len()).write(0);
        }
    }
    Ok(())
}

/// Copies an array to C: writes the number of items, then the items if there is room. A NULL buffer of capacity 0 asks only for the number.
///
/// # Safety
/// `buffer`, unless NULL, must be writable for `capacity` items, and `count`, unless NULL, for a `usize`.
pub(super) unsafe fn copy_items<T: Copy>(
    items: &[T],
    buffer: *mut T,
    capacity: usize,
    count: *mut usize,
) -> Result<()> {
    // SAFETY: promised by the caller.
    let buffer = unsafe {
        Out::new("the place for the length", count)?.set(items.len());
        if buffer.is_null() && capacity == 0 {
            return Ok(());
        }
        slice_mut("buffer", buffer, capacity)?
    };
    match buffer.get_mut(..items.len()) {
        Some(buffer) => buffer.copy_from_slice(items),
        None => bail!(
            BufferTooSmall,
            "the buffer has room for {capacity}, and {} are needed",
            items.len()
        ),
    }
    Ok(())
}

/// The entry of `table` with the number `value`.
pub(super) fn choice<T: Copy>(name: &str, value: i32, table: &[(i32, &str, T)]) -> Result<T> {
    match table.iter().find(|(number, ..)| *number == value) {
        Some(&(.., choice)) => Ok(choice),
        None => {
            let known: Vec<_> = table.iter().map(|(n, s, _)| format!("{n} ({s})")).collect();
            bail!(
                InvalidArgument,
                "{name} is {value}; it takes {}",
                known.join(", ")
            )
        }
    }
}

/// A flag from C, 0 or 1.
pub(super) fn flag(name: &str, value: i32) -> Result<bool> {
    choice(name, value, &[(0, "no", false), (1, "yes", true)])
}

/// A count from C, which must not be negative.
pub(super) fn count(name: &str, value: i64) -> Result<usize> {
    usize::try_from(value)
        .map_err(|_| err!(InvalidArgument, "{name} is {value}; it cannot be negative"))
}

/// Sizes from C.
///
/// # Safety
/// As for [`slice`].
pub(super) unsafe fn sizes(name: &str, data: *const i64, len: i32) -> Result<Vec<usize>> {
    let len = count("rank", len.into())?;
    // SAFETY: promised by the caller.
    unsafe { slice(name, data, len) }?
        .iter()
        .map(|&n| count(name, n))
        .collect()
}

/// A struct that the caller fills or reads, and to which later versions may append fields. Its first field is its size as the caller knows
/// it.
///
/// # Safety
/// `repr(C)`, the first field `struct_size: u32`, valid for every bit pattern, and without padding.
pub(super) unsafe trait Growing: Copy {
    /// Its name in the header.
    const NAME: &'static str;
    /// Its sizes in earlier versions.
    const EARLIER: &'static [usize] = &[];
    /// The defaults. Their `struct_size` is that of this library.
    fn defaults() -> Self;
}

/// A larger struct_size was probably never set.
const LARGEST_STRUCT: usize = 4096;

/// Refuses a size that no version of the struct has. Valid sizes are this version's, earlier ones, and larger ones, which a later version
/// may have.
fn check_size<T>(
    name: &str,
    what: fmt::Arguments<'_>,
    size: usize,
    earlier: &[usize],
) -> Result<()> {
    let known = size == size_of::<T>() || earlier.contains(&size);
    let later = size > size_of::<T>() && size <= LARGEST_STRUCT;
    if !(known || later && size.is_multiple_of(align_of::<T>())) {
        bail!(
            AbiMismatch,
            "{what} is {size}, which no version of {name} has; pass sizeof({name}), which is {} in this version",
            size_of::<T>()
        );
    }
    Ok(())
}

/// Refuses a reserved field of `_options` that is not 0.
pub(super) fn reserved<T: Growing>(_options: &T, value: i32) -> Result<()> {
    if value != 0 {
        bail!(
            InvalidArgument,
            "a reserved field of {} is {value}; it must be 0",
            T::NAME
        );
    }
    Ok(())
}

fn check_struct_size<T: Growing>(size: usize) -> Result<()> {
    let what = format_args!("the struct_size of {}", T::NAME);
    check_size::<T>(T::NAME, what, size, T::EARLIER)
}

/// Copies the fields that this version knows from a struct of `size` bytes, and fails if any byte after them is not 0.
///
/// # Safety
/// `from` must be readable for `size` bytes, and T take any bits.
unsafe fn copy_known<T>(name: &str, from: *const u8, size: usize, to: &mut T) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe {
        let known = size.min(size_of::<T>());
        std::ptr::copy_nonoverlapping(from, (&raw mut *to).cast::<u8>(), known);
        let unknown = std::slice::from_raw_parts(from.add(known), size - known);
        if let Some(at) = unknown.iter().position(|&b| b != 0) {
            bail!(
                AbiMismatch,
                "{name} has a field at byte {} that this version does not know and that is not zero; update the library, or leave the field alone",
                known + at
            );
        }
    }
    Ok(())
}

/// Writes as much of `value` as fits to a struct of `size` bytes. Fields that this version does not know become zero.
///
/// # Safety
/// `to` must be writable for `size` bytes, and T have no padding.
unsafe fn write_known<T>(value: &T, to: *mut u8, size: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        let known = size.min(size_of::<T>());
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to, known);
        std::ptr::write_bytes(to.add(known), 0, size - known);
    }
}

/// An element of an array from C, to which later versions may append fields. The caller passes its size.
///
/// # Safety
/// `repr(C)`, valid for every bit pattern, and without padding.
pub(super) unsafe trait Element: Copy {
    /// Its name in the header.
    const NAME: &'static str;
    /// Its sizes in earlier versions.
    const EARLIER: &'static [usize] = &[];
    /// The values of fields that an older caller does not know.
    fn defaults() -> Self;
}

/// Refuses a size of an element that no version has.
fn check_element_size<T: Element>(name: &str, size: usize) -> Result<()> {
    let what = format_args!("the size of an element of {name}");
    check_size::<T>(T::NAME, what, size, T::EARLIER)
}

/// Refuses an array of structs whose elements have a size that no version has, and one that cannot be there.
pub(super) fn check_elements<T: Element>(
    name: &str,
    data: *const T,
    len: usize,
    size: usize,
) -> Result<()> {
    check_element_size::<T>(name, size)?;
    check_array(name, data, len)?;
    if len
        .checked_mul(size)
        .is_none_or(|n| n > isize::MAX as usize)
    {
        bail!(
            InvalidArgument,
            "{name} cannot have {len} elements of {size} bytes"
        );
    }
    Ok(())
}

/// An array of structs from C, each of `size` bytes.
///
/// # Safety
/// `data`, unless NULL, must be readable for `len` elements of that size.
pub(super) unsafe fn elements<T: Element>(
    name: &str,
    data: *const T,
    len: usize,
    size: usize,
) -> Result<Vec<T>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    check_elements(name, data, len, size)?;
    let mut out = with_room(len).map_err(|e| e.within(name))?;
    for i in 0..len {
        let mut element = T::defaults();
        // SAFETY: promised by the caller.
        unsafe { copy_known(T::NAME, data.cast::<u8>().add(i * size), size, &mut element) }
            .map_err(|e| e.within(format_args!("{name}[{i}]")))?;
        out.push(element);
    }
    Ok(out)
}

/// Returns a function that writes element `i` of an array in C, whose elements have `size` bytes. Fields that this version does not know become
/// zero.
///
/// # Safety
/// `data`, unless NULL, must be writable for `len` elements of that size.
pub(super) unsafe fn elements_out<T: Element>(
    name: &str,
    data: *mut T,
    len: usize,
    size: usize,
) -> Result<impl FnMut(usize, T)> {
    check_elements(name, data, len, size)?;
    Ok(move |i: usize, value: T| {
        assert!(i < len);
        // SAFETY: promised by the caller; element `i` is one of `len`.
        unsafe {
            let place = data.cast::<u8>().add(i * size);
            write_known(&value, place, size);
        }
    })
}

/// Copies an array of structs to C, whose elements have `size` bytes, as [`copy_items`] does.
///
/// # Safety
/// `data`, unless NULL, must be writable for `capacity` elements of that size, and `count`, unless NULL, for a `usize`.
pub(super) unsafe fn copy_elements<T: Element>(
    name: &str,
    items: &[T],
    data: *mut T,
    size: usize,
    capacity: usize,
    count: *mut usize,
) -> Result<()> {
    check_element_size::<T>(name, size)?;
    // SAFETY: promised by the caller.
    unsafe { Out::new("count", count) }?.set(items.len());
    if data.is_null() && capacity == 0 {
        return Ok(());
    }
    // SAFETY: as above.
    let mut put = unsafe { elements_out(name, data, capacity, size) }?;
    if items.len() > capacity {
        bail!(
            BufferTooSmall,
            "{name} has room for {capacity}, and {} are needed",
            items.len()
        );
    }
    items.iter().enumerate().for_each(|(i, &item)| put(i, item));
    Ok(())
}

/// Options from C. NULL means the defaults, fields beyond the caller's size have their defaults, and fields beyond ours must be zero.
///
/// # Safety
/// `options`, unless NULL, must be readable for a `u32` and then for as many bytes as that says.
pub(super) unsafe fn options<T: Growing>(options: *const T) -> Result<T> {
    let mut out = T::defaults();
    if options.is_null() {
        return Ok(out);
    }
    let bytes = options.cast::<u8>();
    // SAFETY: the first field is a u32.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    check_struct_size::<T>(size)?;
    // SAFETY: readable for `size` bytes; T takes any bits.
    unsafe { copy_known(T::NAME, bytes, size, &mut out) }?;
    Ok(out)
}

/// Fills a caller's struct of `struct_size` bytes with as much of `value` as fits. Fields that this version does not know become zero.
///
/// # Safety
/// `place`, unless NULL, must be writable for `struct_size` bytes.
pub(super) unsafe fn fill<T: Growing>(place: *mut T, struct_size: u32, value: T) -> Result<()> {
    let size = struct_size as usize;
    if place.is_null() {
        bail!(InvalidArgument, "the {} is NULL; pass where it is", T::NAME);
    }
    check_struct_size::<T>(size)?;
    let bytes = place.cast::<u8>();
    // SAFETY: writable for `size` bytes.
    unsafe {
        write_known(&value, bytes, size);
        bytes.cast::<u32>().write_unaligned(struct_size);
    }
    Ok(())
}

/// Returns a function that fills a struct for results, whose `struct_size` the caller has set; `None` for NULL, if the caller wants no
/// result.
///
/// # Safety
/// `place`, unless NULL, must be readable for a `u32` and then writable for as many bytes as that says.
pub(super) unsafe fn results<T: Growing>(place: *mut T) -> Result<Option<impl FnOnce(T)>> {
    if place.is_null() {
        return Ok(None);
    }
    // SAFETY: the first field is a u32.
    let size = unsafe { place.cast::<u32>().read_unaligned() };
    check_struct_size::<T>(size as usize)?;
    Ok(Some(move |value| {
        // SAFETY: writable for `size` bytes; the size was checked above, and the place is not NULL.
        let filled = unsafe { fill(place, size, value) };
        debug_assert!(filled.is_ok());
    }))
}

/// The host's user data pointer, passed to its callback.
#[derive(Clone, Copy)]
pub(super) struct User(pub(super) *mut c_void);
// SAFETY: the library never follows the pointer; the header says on which thread a callback runs.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        struct_size: u32,
        a: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        struct_size: u32,
        a: i32,
        b: u64,
    }
    // SAFETY: integers without padding, the first a u32 size.
    unsafe impl Growing for Old {
        const NAME: &'static str = "Options";
        fn defaults() -> Self {
            Old {
                struct_size: 8,
                a: 1,
            }
        }
    }
    // SAFETY: as above.
    unsafe impl Growing for New {
        const NAME: &'static str = "Options";
        const EARLIER: &'static [usize] = &[size_of::<Old>()];
        fn defaults() -> Self {
            New {
                struct_size: 16,
                a: 1,
                b: 2,
            }
        }
    }

    #[test]
    fn an_older_host_gets_defaults_for_what_it_does_not_know() {
        let host = Old {
            struct_size: 8,
            a: 5,
        };
        // SAFETY: 8 bytes are there, as the size says.
        let read = unsafe { options::<New>((&raw const host).cast()) }.unwrap();
        assert_eq!((read.a, read.b), (5, 2));
        let mut place = [host, host];
        // SAFETY: as above.
        unsafe { fill::<New>((&raw mut place[0]).cast(), 8, New::defaults()) }.unwrap();
        assert_eq!((place[0], place[1]), (Old::defaults(), host));
    }

    #[test]
    fn a_newer_host_may_leave_new_fields_zero() {
        let mut host = New {
            struct_size: 16,
            a: 5,
            b: 0,
        };
        // SAFETY: 16 bytes are there, as the size says.
        let read = |host: &New| unsafe { options::<Old>((&raw const *host).cast()) };
        assert_eq!(read(&host).unwrap().a, 5);
        host.b = 1 << 32;
        let e = read(&host).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::AbiMismatch);
        assert!(e.message().contains("byte 12"), "{e}");
        // SAFETY: as above.
        unsafe { fill::<Old>((&raw mut host).cast(), 16, Old::defaults()) }.unwrap();
        assert_eq!((host.struct_size, host.a, host.b), (16, 1, 0));
    }

    #[test]
    fn a_size_that_was_never_set_is_refused() {
        for size in [0, 4, 7, 12, 20, 4104, u32::MAX] {
            let host = New {
                struct_size: size,
                ..New::defaults()
            };
            // SAFETY: sizes that do not fit are refused before more is read.
            let e = unsafe { options::<New>(&host) }.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::AbiMismatch);
            assert!(e.message().contains("16 in this version"), "{e}");
        }
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Item {
        a: u64,
        b: u64,
    }
    // SAFETY: integers without padding.
    unsafe impl Element for Item {
        const NAME: &'static str = "Item";
        fn defaults() -> Self {
            Item { a: 1, b: 2 }
        }
    }

    #[test]
    fn elements_have_the_size_that_the_caller_says() {
        let item = |a, b| Item { a, b };
        let items = [item(1, 2), item(0, 0), item(5, 6), item(7, 8)];
        // SAFETY: all four, or two of twice the size, are there.
        let read = |len, size| unsafe { elements("items", items.as_ptr(), len, size) };
        assert_eq!(read(4, 16).unwrap(), items);
        assert_eq!(read(1, 32).unwrap(), [items[0]]);
        let e = read(2, 32).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::AbiMismatch);
        assert!(
            e.message()
                .contains("items[1]: Item has a field at byte 16"),
            "{e}"
        );
        for size in [0, 8, 15, 20, 4104] {
            let e = read(1, size).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::AbiMismatch);
            assert!(e.message().contains("16 in this version"), "{e}");
        }
        assert_eq!(read(0, 3).unwrap(), []);
    }

    #[test]
    fn text_is_copied_with_its_length() {
        let mut buffer = [b'x' as c_char; 8];
        let mut length = 0;
        let mut copy = |capacity: usize| {
            // SAFETY: the buffer is larger than any capacity passed.
            let r = unsafe { copy_text("abc", buffer.as_mut_ptr(), capacity, &mut length) };
            (r.map_err(|e| e.kind()), buffer[3], length)
        };
        let x = b'x' as c_char;
        assert_eq!(copy(2), (Err(ErrorKind::BufferTooSmall), x, 3));
        assert_eq!(copy(3), (Ok(()), x, 3));
        assert_eq!(copy(4), (Ok(()), 0, 3));
        // SAFETY: a NULL buffer is never written.
        unsafe {
            copy_text("abc", std::ptr::null_mut(), 0, &mut length).unwrap();
            expect_kind(
                copy_text("abc", std::ptr::null_mut(), 3, &mut length),
                ErrorKind::InvalidArgument,
                "buffer is NULL",
            );
            expect_kind(
                copy_text("abc", buffer.as_mut_ptr(), 8, std::ptr::null_mut()),
                ErrorKind::InvalidArgument,
                "the place for the length is NULL",
            );
        }
    }

    #[test]
    fn arrays_are_checked_before_they_are_read() {
        // SAFETY: all of these are refused before anything is read.
        unsafe {
            expect_kind(
                slice::<u32>("x", std::ptr::null(), 1),
                ErrorKind::InvalidArgument,
                "x is NULL, but its length is 1",
            );
            expect_kind(
                slice::<u32>("x", std::ptr::without_provenance(3), 1),
                ErrorKind::InvalidArgument,
                "x is not aligned",
            );
            expect_kind(
                slice::<u32>("x", std::ptr::without_provenance(4), usize::MAX),
                ErrorKind::InvalidArgument,
                "x cannot have 18446744073709551615 elements",
            );
            assert_eq!(slice::<u32>("x", std::ptr::null(), 0).unwrap(), [0u32; 0]);
            expect_kind(
                sizes("shape", std::ptr::null(), -1),
                ErrorKind::InvalidArgument,
                "rank is -1",
            );
        }
        assert!(
            flag("x", 2)
                .unwrap_err()
                .message()
                .contains("0 (no), 1 (yes)")
        );
    }
}
