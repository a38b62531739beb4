//! Floor 6: what is served. Sessions and training both stand on it; the runner of many sequences comes here.

mod served;

pub use served::{Served, ServedInfo};
