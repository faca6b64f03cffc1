//! The writes of a store. Each is durable when it returns, and each is one step: after a crash it has happened or not.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct Disk {
    /// In tests: the number of steps after which the machine stops.
    #[cfg(test)]
    pub steps_left: AtomicUsize,
}

impl Disk {
    pub fn new() -> Self {
        Self {
            #[cfg(test)]
            steps_left: AtomicUsize::new(usize::MAX),
        }
    }

    /// In tests: an error if the machine has stopped.
    #[cfg(test)]
    fn step(&self) -> io::Result<()> {
        let left = self.steps_left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(io::Error::other("the machine has stopped"));
        }
        self.steps_left.store(left - 1, Ordering::Relaxed);
        Ok(())
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "only tests stop the machine")]
    fn step(&self) -> io::Result<()> {
        Ok(())
    }

    /// Replaces a small file as a whole.
    pub fn replace(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let temporary = path.with_extension("new");
        self.step()?;
        let mut file = private().create(true).write(true).truncate(true).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        self.rename(&temporary, path)
    }

    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        fs::rename(from, to)?;
        sync_folder(to)
    }

    /// The same content under another name, whatever becomes of the first.
    pub fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        match fs::hard_link(from, to) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error),
            // Not every file system has links.
            Err(_) => {
                fs::copy(from, to)?;
                File::open(to)?.sync_all()?;
            }
        }
        sync_folder(to)
    }

    /// Removes a file, which may be gone already.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Adds lines to a file. A crash may leave a part of them.
    pub fn append(&self, file: &mut File, lines: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        if let Err(error) = self.step() {
            file.write_all(&lines[..lines.len() / 2])?;
            return Err(error);
        }
        file.write_all(lines)?;
        file.sync_data()
    }
}

/// Prompts and answers are nobody else's business.
pub fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

pub fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// A rename is durable when its folder is.
fn sync_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// The names in a folder.
pub fn names_in(folder: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push((name, entry.path()));
        }
    }
    Ok(names)
}
