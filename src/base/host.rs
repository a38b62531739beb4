//! The name of this machine, for messages and file names.

/// The name of this machine, reduced to letters, digits, dots and dashes; `localhost` if nothing is left.
pub fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the call fills at most as many bytes as the array has.
    let named = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) } == 0;
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-');
    let name: String = name
        .iter()
        .take_while(|&&b| b != 0)
        .filter(|b| is_plain(b))
        .map(|&b| char::from(b))
        .collect();
    match named && !name.is_empty() {
        true => name,
        false => "localhost".to_owned(),
    }
}
