//! (floor being built)
