//! The bytes of a model file, memory-mapped or embedded in the program.

use memmap2::Mmap;
use std::fs::{File, Metadata};
use std::ops::{Deref, Range};
#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

/// The bytes of a file.
pub enum FileBytes {
    Mapped { map: Mmap, stamp: FileStamp },
    Embedded(&'static [u8]),
}

/// What changes when somebody writes to a file: its length, and when its contents and its inode last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    len: u64,
    modified: Option<SystemTime>,
    #[cfg(unix)]
    changed: (i64, i64),
}

impl FileStamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            len: metadata.len(),
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl FileBytes {
    pub fn map(file: &File) -> std::io::Result<Self> {
        let stamp = FileStamp::of(&file.metadata()?);
        // SAFETY: the map is read-only and private. Another process that truncates or rewrites the file while it is
        // being loaded can crash us or change the weights; no program that maps files can prevent that.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Self::Mapped { map, stamp })
    }

    /// Adds to `hasher` what tells these contents from others that the same file had or will have. This reads nothing
    /// of a file.
    pub fn hash_version(&self, hasher: &mut blake3::Hasher) {
        match self {
            Self::Mapped { stamp, .. } => hasher.update(format!("{stamp:?}\n").as_bytes()),
            Self::Embedded(bytes) => hasher.update(bytes),
        };
    }

    /// Tells the system that `range` will not be read again soon, so that its pages do not count as memory of this
    /// process.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let FileBytes::Mapped { map, .. } = self {
            // Neighbouring tensors may share the first and last page, so only whole pages are released.
            const PAGE: usize = 64 * 1024;
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end / PAGE * PAGE;
            if start < end {
                // SAFETY: dropping pages of a read-only file mapping loses nothing, because they are read from the file
                // again. If the advice fails on an unusual file system, the pages merely stay.
                let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped { map, .. } => map,
            FileBytes::Embedded(bytes) => bytes,
        }
    }
}
