//! Locks memory (mlock), so that the system keeps it in memory and never waits for it. The system locks pages: the first and the last page of
//! an allocation may hold others that are locked too, so locks of these pages are counted.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Result;
use super::error::{Error, err};

/// Number of locks of each first or last page, by its address.
pub(crate) static EDGES: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn edges() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    EDGES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn page_size() -> usize {
    // SAFETY: sysconf only reads a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096).max(1)
}

/// Memory that is locked while this exists. It must be dropped before the memory is freed.
#[derive(Debug)]
pub struct Locked {
    page: usize,
    /// The pages of each allocation, by their addresses.
    parts: Vec<Range<usize>>,
}

impl Locked {
    /// Locks all `parts`, or none: if the system refuses, the error has the bytes wanted and the limit of the process.
    pub fn new(parts: &[&[u8]]) -> Result<Locked> {
        let mut locked = Locked {
            page: page_size(),
            parts: Vec::new(),
        };
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let start = part.as_ptr().addr();
            let (start, end) = (
                start / locked.page * locked.page,
                (start + part.len()).next_multiple_of(locked.page),
            );
            // Counted first: another thread that unlocks the same page must see it.
            locked.count(start..end);
            // SAFETY: the pages hold `part`, which is readable. Locking changes no content.
            if unsafe { libc::mlock(part.as_ptr().cast(), part.len()) } != 0 {
                let refusal = io::Error::last_os_error();
                let bytes = parts.iter().map(|part| part.len()).sum();
                return Err(refused(bytes, &refusal));
            }
        }
        Ok(locked)
    }

    /// Counts the first and the last page of `part`, whose lock is dropped with this.
    fn count(&mut self, part: Range<usize>) {
        let mut edges = edges();
        for page in self.edges_of(&part) {
            *edges.entry(page).or_default() += 1;
        }
        self.parts.push(part);
    }

    fn edges_of(&self, part: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let (first, last) = (part.start, part.end - self.page);
        [first].into_iter().chain((last > first).then_some(last))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let mut edges = edges();
        for part in &self.parts {
            for page in self.edges_of(part) {
                let locks = edges.entry(page).or_default();
                *locks = locks.saturating_sub(1);
                if *locks == 0 {
                    edges.remove(&page);
                    unlock(page..page + self.page);
                }
            }
            unlock(part.start + self.page..part.end.saturating_sub(self.page));
        }
    }
}

/// Unlocks whole pages.
fn unlock(pages: Range<usize>) {
    if !pages.is_empty() {
        // SAFETY: the pages are mapped as long as the allocation lives, and unlocking changes no content.
        unsafe { libc::munlock(std::ptr::without_provenance(pages.start), pages.len()) };
    }
}

fn refused(bytes: usize, refusal: &io::Error) -> Error {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call fills the struct, which is this frame's.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    let limit = match known {
        true if limit.rlim_cur == libc::RLIM_INFINITY => "not limited".to_owned(),
        true => format!("limited to {} bytes", limit.rlim_cur),
        false => "limited".to_owned(),
    };
    err!(
        OutOfMemory,
        "{bytes} bytes of weights cannot be locked in memory ({refusal}): locked memory of this process is {limit}; raise that to {} kB or more (ulimit -l {}), or load the model without locking",
        bytes.div_ceil(1024),
        bytes.div_ceil(1024),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// kB of locked memory of this process, by the system.
    fn locked_kb() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.unwrap().parse().unwrap()
    }

    /// Tests of locked memory share the number of the process.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_stay_locked_until_their_last_lock_is_gone() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let page = page_size();
        let bytes = vec![1u8; 8 * page];
        let start = bytes.as_ptr().align_offset(page);
        let pages = &bytes[start..start + 6 * page];
        let kb = page / 1024;
        let before = locked_kb();
        // Both hold a part of the third page.
        let first = Locked::new(&[&pages[10..2 * page + 10]]).unwrap();
        assert_eq!(locked_kb(), before + 3 * kb);
        let second = Locked::new(&[&pages[2 * page + 10..5 * page], &[]]).unwrap();
        assert_eq!(locked_kb(), before + 5 * kb);
        drop(first);
        assert_eq!(locked_kb(), before + 3 * kb);
        drop(second);
        assert_eq!(locked_kb(), before);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_cannot_be_locked_leaves_nothing_locked() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = vec![1u8; 4 * page_size()];
        let before = locked_kb();
        // No memory is mapped at the second address.
        // SAFETY: never read; the system refuses the address.
        let nowhere =
            unsafe { std::slice::from_raw_parts(std::ptr::without_provenance(page_size()), 1) };
        let refused = Locked::new(&[&bytes[..], nowhere]).unwrap_err();
        let said = refused.message();
        assert!(
            said.starts_with(&format!(
                "{} bytes of weights cannot be locked",
                bytes.len() + 1
            )),
            "{said}"
        );
        assert!(said.contains("ulimit -l"), "{said}");
        assert_eq!(locked_kb(), before);
        assert!(edges().is_empty());
    }
}
