//! Takes recordings from the engine and writes them to files: on request, and after a failure of the executor.

use crate::messages::TakeRecording;
use actix::Recipient;
use pagetide_base::error::{ApiError, StartError};
use pagetide_config::RecorderConfig;
use pagetide_metrics as metrics;
use pagetide_recorder::{Cause, RawRecording, RecorderLimits};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use time::OffsetDateTime;
use time::macros::format_description;

/// The file name extension of recordings.
const EXTENSION: &str = "recording";

/// A handle that writes what an engine has recorded. Cloning is cheap.
#[derive(Clone)]
pub struct Recordings {
    take: Recipient<TakeRecording>,
    config: RecorderConfig,
}

/// A recording in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenRecording {
    /// Absolute.
    pub file: PathBuf,
    pub bytes: u64,
    /// The length of the recording.
    pub seconds: f64,
    pub steps: u64,
    pub requests: u64,
    /// Why it ends early, if it does.
    pub ends_early: Option<String>,
}

impl Recordings {
    pub fn new(take: Recipient<TakeRecording>, config: RecorderConfig) -> Self {
        Self { take, config }
    }

    /// Writes what has been recorded so far. Fails if nothing is recorded, or if the file cannot be written.
    pub async fn write(&self) -> Result<WrittenRecording, ApiError> {
        let raw = self.take.send(TakeRecording).await.map_err(|_| ApiError::engine("the engine has stopped"))?;
        let raw = raw.ok_or_else(ApiError::not_recording)?;
        let (sender, written) = tokio::sync::oneshot::channel();
        let config = self.config.clone();
        let write = move || drop(sender.send(write(raw, Cause::Asked, &config)));
        let thread = std::thread::Builder::new().name("pagetide-recording".into()).spawn(write);
        thread.map_err(|error| ApiError::recording_failed(&error.to_string()))?;
        let written = written.await.map_err(|_| ApiError::recording_failed("its thread panicked; see the log"))?;
        written.map_err(|StartError(why)| ApiError::recording_failed(&why))
    }
}

/// The limits of an engine's recorder. `None` if it records nothing.
pub fn limits(config: &RecorderConfig) -> Option<RecorderLimits> {
    let length = Duration::from_secs(60 * config.minutes);
    (config.minutes > 0).then_some(RecorderLimits { length, max_bytes: config.max_mib << 20 })
}

/// Writes a recording into `recorder.dir`, and says so in the log.
pub fn write(raw: RawRecording, cause: Cause, config: &RecorderConfig) -> Result<WrittenRecording, StartError> {
    let recording = raw.redacted(cause, config.tokens)?;
    let folder = std::path::absolute(&config.dir)?;
    let failed = |error: io::Error| {
        StartError::new(format!("{}: {error}; recorder.dir says where recordings go", folder.display()))
    };
    fs::create_dir_all(&folder).map_err(failed)?;
    // The file gets its name only when it is complete, and two recordings at once get two files.
    let (unfinished, to) = create_unfinished(&folder).map_err(failed)?;
    let file = finish(to, |to| recording.write(to)).and_then(|()| give_name(&unfinished, &folder, hard_link));
    let file = file.map_err(|error| {
        // Cleans up. The first error is the one that is reported.
        drop(fs::remove_file(&unfinished));
        failed(error)
    })?;
    let header = recording.header();
    let written = WrittenRecording {
        bytes: fs::metadata(&file).map_err(failed)?.len(),
        file,
        seconds: header.seconds,
        steps: header.num_plans,
        requests: header.num_requests,
        ends_early: header.ends_early.clone(),
    };
    metrics::recording_written(cause == Cause::Failure);
    tracing::info!(
        steps = written.steps,
        requests = written.requests,
        bytes = written.bytes,
        "the last {:.0} s were written to {}: see them with 'pagetide replay'",
        written.seconds,
        written.file.display()
    );
    if let Some(why) = &written.ends_early {
        tracing::warn!("the recording ends early: {why}");
    }
    Ok(written)
}

/// Creates a file with an unpredictable name, because other servers may write into the same folder and have the same
/// process id in their containers.
fn create_unfinished(folder: &Path) -> io::Result<(PathBuf, File)> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let file = folder.join(format!(".{:016x}.part", u64::from_le_bytes(random)));
    let created = create(&file)?;
    Ok((file, created))
}

/// Creates a file that must not exist yet, and that only its owner may read.
fn create(file: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(file)
}

fn finish(to: File, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut to = BufWriter::new(to);
    write(&mut to)?;
    to.flush()
}

type MakeLink = fn(&Path, &Path) -> io::Result<()>;

fn hard_link(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to)
}

/// Gives the file a name with the time; two files in one second get numbers. `link` makes a hard link, which fails if
/// the name is taken.
fn give_name(unfinished: &Path, folder: &Path, link: MakeLink) -> io::Result<PathBuf> {
    let format = format_description!("[year][month][day]-[hour][minute][second]");
    let now = OffsetDateTime::now_utc().format(format).map_err(io::Error::other)?;
    for number in 1u32.. {
        let more = if number > 1 { format!("-{number}") } else { String::new() };
        let file = folder.join(format!("pagetide-{now}{more}.{EXTENSION}"));
        match link(unfinished, &file) {
            Ok(()) => {
                fs::remove_file(unfinished)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // The file system has no hard links. Renaming replaces an existing file, so the name is checked first.
            Err(_) if file.symlink_metadata().is_ok() => {}
            Err(_) => return fs::rename(unfinished, &file).map(|()| file),
        }
    }
    unreachable!("a second has fewer recordings than there are numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (create_unfinished(folder.path()).unwrap(), create_unfinished(folder.path()).unwrap());
        assert_ne!(first.0, second.0);
        assert_eq!(create(&first.0).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        #[cfg(unix)]
        {
            let (link, elsewhere) = (folder.path().join("link"), folder.path().join("elsewhere"));
            std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
            assert!(create(&link).is_err() && !elsewhere.exists(), "a link is not followed");
        }
    }

    #[test]
    fn recordings_of_one_second_have_names_of_their_own_with_links_and_without() {
        let none = |_: &Path, _: &Path| Err(io::Error::from(io::ErrorKind::Unsupported));
        for link in [hard_link as MakeLink, none] {
            let folder = tempfile::tempdir().unwrap();
            let write = |text: String| {
                let (unfinished, to) = create_unfinished(folder.path()).unwrap();
                finish(to, |to| to.write_all(text.as_bytes())).unwrap();
                give_name(&unfinished, folder.path(), link).unwrap()
            };
            let files: Vec<PathBuf> = (0..5).map(|number| write(number.to_string())).collect();
            for (number, file) in files.iter().enumerate() {
                assert_eq!(fs::read_to_string(file).unwrap(), number.to_string());
            }
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5, "nothing half done is left");
        }
    }
}
