//! Floor 6: what is served, and its sequences. Sessions and training both stand on it; the runner of many sequences comes here.

mod pool;
mod run;
mod sequence;
mod served;

pub use run::NewTokens;
pub use sequence::{REWIND, Sequence};
pub use served::{Served, ServedInfo};
