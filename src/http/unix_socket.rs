//! Listening on a Unix socket (`server.unix_socket`).

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The file of a socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Its device and inode. Somebody else may have replaced it.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && self.identity == identity(&self.path) {
            // If this fails, the next start removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Makes the socket. The socket of a program that has ended is replaced.
///
/// # Errors
/// Another program listens there, or the path is another file.
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile)> {
    if let Ok(file) = fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(Error::new(ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path)?,
            Err(error) => return Err(error),
            Ok(_) => return Err(Error::new(ErrorKind::AddrInUse, "another program listens there")),
        }
    }
    let listener = UnixListener::bind(path)?;
    Ok((listener, SocketFile { path: path.to_owned(), identity: identity(path) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_made_once_and_removed_at_the_end() {
        let folder = std::env::temp_dir().join(format!("pagetide-socket-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("a.sock");
        let (listener, file) = listen(&path).unwrap();
        UnixStream::connect(&path).expect("it listens");
        assert_eq!(listen(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(file);
        assert!(!path.exists(), "it is removed");
        drop((listener, UnixListener::bind(&path).unwrap()));
        assert!(path.exists(), "nobody removed it");
        let (_listener, file) = listen(&path).expect("nobody listens there any more");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        drop(file);
        assert!(path.exists(), "the file is somebody else's");
        assert_eq!(listen(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        fs::remove_dir_all(&folder).unwrap();
    }
}
