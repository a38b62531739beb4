//! A file descriptor that poll(), epoll and the like see as readable while something waits to be taken.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::error::{Result, err};

/// A descriptor whose readability the library controls. Nobody else reads or writes it.
#[derive(Debug)]
pub struct ReadyFd(OwnedFd);

impl ReadyFd {
    /// A descriptor that is not readable.
    #[cfg(target_os = "linux")]
    pub fn new() -> Result<ReadyFd> {
        // SAFETY: the call takes numbers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            let e = std::io::Error::last_os_error();
            return Err(err!(OutOfMemory, "no file descriptor for events: {e}"));
        }
        // SAFETY: the call gave this descriptor to its caller.
        Ok(ReadyFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Other systems have no eventfd.
    #[cfg(not(target_os = "linux"))]
    pub fn new() -> Result<ReadyFd> {
        Err(err!(
            Unsupported,
            "a file descriptor for events exists on Linux alone"
        ))
    }

    /// Makes it readable.
    pub fn set(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. It fails only if the counter is full, and then it is readable.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Makes it not readable.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // SAFETY: eight writable bytes. It fails only if the counter is 0, and then it is not readable.
        unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// The descriptor, which closes with this.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn poll_sees_what_was_set_until_it_is_cleared() {
        let ready = ReadyFd::new().unwrap();
        let is_set = || {
            let mut poll = libc::pollfd {
                fd: ready.fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry.
            unsafe { libc::poll(&mut poll, 1, 0) == 1 }
        };
        assert!(!is_set());
        ready.clear();
        for _ in 0..3 {
            ready.set();
            ready.set();
            assert!(is_set());
            ready.clear();
            assert!(!is_set());
        }
    }
}
