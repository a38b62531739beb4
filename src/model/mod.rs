//! (floor being built)

pub mod convert;
