//! Threads that nobody waits for, but for the program's end.

use super::Result;
use super::sync;

pub fn detached(_name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    sync::started(shuttle::thread::spawn(body));
    Ok(())
}
