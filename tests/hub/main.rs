//! `nvfp4 pull`, and every command that takes a model's name, against a stand-in that behaves as the real hub does (`hub.py`): fetched and
//! skipped files, temporary and permanent failures, other programs' caches, and messages for people.

mod standin;

mod cache;
mod environment;
mod failures;
mod files;
mod words;
