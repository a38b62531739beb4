//! The C function that a thread is in, for errors that surface after it has returned.

use std::cell::Cell;

thread_local! {
    static ENTERED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// While this value exists, its thread is in the function.
#[derive(Debug)]
pub struct Entered(Option<&'static str>);

/// Records that the calling thread is in `function`.
pub fn enter(function: &'static str) -> Entered {
    Entered(ENTERED.replace(Some(function)))
}

/// The function that the calling thread is in; `None` in a program that uses the Rust interface.
pub fn entered() -> Option<&'static str> {
    ENTERED.get()
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_entered_and_left() {
        assert_eq!(entered(), None);
        let outer = enter("outer");
        {
            // For example, from a callback.
            let _inner = enter("inner");
            assert_eq!(entered(), Some("inner"));
        }
        assert_eq!(entered(), Some("outer"));
        let other = std::thread::spawn(entered).join().unwrap();
        assert_eq!(other, None);
        drop(outer);
        assert_eq!(entered(), None);
    }
}
