//! Files that clients upload, and batches of requests that are made of them, on disk.
//!
//! A [`BatchStore`](store::BatchStore) owns a folder. What a batch is and how it goes on is in [`batch`]; a [`Journal`]
//! keeps what its requests were answered. Whatever is written survives a crash at any point: records are replaced by
//! renaming, and a journal's last line counts only if it is whole. The content of lines is the business of the callers.

pub mod batch;
mod disk;
pub mod file;
pub mod journal;
pub mod lines;
pub mod store;

pub use journal::Journal;
