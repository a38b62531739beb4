//! `nvfp4 pull`, and every command that takes a model's name, against a stand-in that behaves as the real hub does
//! (`hub.py`): what is fetched and what is not, failures that pass and failures that do not, other programs' caches, and the
//! words for people.

mod standin;

mod cache;
mod environment;
mod failures;
mod files;
mod words;
