//! The folder of files and batches, and what is in it.
//!
//! ```text
//! lock                     held by the server that uses the folder
//! files/ID, files/ID.json  a file's content and its record
//! batches/ID.json          a batch's record
//! batches/ID.input         its requests: another name of its input file, which the client may delete meanwhile
//! batches/ID.output        its answers, and in ID.errors what else became of its requests
//! uploads/                 files that are still being received
//! ```
//!
//! Calls write to the disk and wait for it, so they do not belong on a thread that must not block.

use crate::batch::{BatchApi, BatchCounts, BatchOutcome, BatchRecord, BatchState, InputProblem};
use crate::disk::{Disk, create_folder, names_in, private};
use crate::file::{FileRecord, Purpose};
use crate::journal::Journal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a store may hold.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    pub max_file_bytes: u64,
    /// All files together, with results that have been filed.
    pub max_folder_bytes: u64,
    /// Files that one owner has uploaded.
    pub max_files: usize,
    /// Batches of one owner.
    pub max_batches: usize,
    /// How long files and ended batches are kept.
    pub keep_s: u64,
}

#[derive(Debug)]
pub enum StoreError {
    /// There is none of this id, or it is somebody else's.
    NotFound,
    FileTooLarge,
    FolderFull,
    TooManyFiles,
    TooManyBatches,
    /// The batch has ended, or it has not and the call is for batches that have.
    WrongState(BatchState),
    Disk(io::Error),
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> Self {
        Self::Disk(error)
    }
}

/// A batch to be made.
pub struct NewBatch {
    pub id: String,
    pub owner: String,
    pub api: BatchApi,
    pub endpoint: String,
    pub input: InputSource,
    pub metadata: Option<BTreeMap<String, String>>,
    pub output_expires_after_s: Option<u64>,
    /// Seconds until requests without an answer are given up.
    pub window_s: u64,
}

pub enum InputSource {
    /// A file of the same owner.
    File(String),
    /// Lines that came with the batch.
    Lines(Vec<u8>),
}

pub struct BatchStore {
    folder: PathBuf,
    limits: StoreLimits,
    disk: Arc<Disk>,
    /// Bytes of all files, also of those that are being received.
    used: Arc<AtomicU64>,
    next_upload: AtomicU64,
    books: Mutex<Books>,
    /// Held as long as the store is open.
    _lock: File,
}

/// All records, by their ids.
#[derive(Default)]
struct Books {
    files: BTreeMap<String, FileRecord>,
    batches: BTreeMap<String, BatchRecord>,
    next_number: u64,
}

impl Books {
    fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }
}

impl BatchStore {
    /// Opens a folder, which is made if it is not there. Ends what a crash has interrupted.
    pub fn open(folder: &Path, limits: StoreLimits, now: u64) -> io::Result<Self> {
        Self::open_on(Disk::new(), folder, limits, now)
    }

    fn open_on(disk: Disk, folder: &Path, limits: StoreLimits, now: u64) -> io::Result<Self> {
        for name in ["", "files", "batches", "uploads"] {
            create_folder(&folder.join(name))?;
        }
        let lock = private().create(true).write(true).truncate(false).open(folder.join("lock"))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another server uses this folder"),
            TryLockError::Error(error) => error,
        })?;
        let mut books = Books {
            files: records(&folder.join("files"), |file: &FileRecord| &file.id)?,
            batches: records(&folder.join("batches"), |batch: &BatchRecord| &batch.id)?,
            next_number: 0,
        };
        books.files.retain(|id, _| folder.join("files").join(id).is_file());
        let numbers = books.files.values().map(|file| file.number);
        let numbers = numbers.chain(books.batches.values().map(|batch| batch.number));
        books.next_number = numbers.max().map_or(0, |number| number + 1);
        let used = books.files.values().map(|file| file.bytes).sum();
        let store = Self {
            folder: folder.to_owned(),
            limits,
            disk: Arc::new(disk),
            used: Arc::new(AtomicU64::new(used)),
            next_upload: AtomicU64::new(0),
            books: Mutex::new(books),
            _lock: lock,
        };
        store.recover(now)?;
        Ok(store)
    }

    /// Files the results of batches that were about to end, and removes what belongs to no record.
    fn recover(&self, now: u64) -> io::Result<()> {
        let mut books = self.books();
        let ending = |batch: &&BatchRecord| matches!(batch.state, BatchState::Finalizing(_));
        let ids: Vec<String> = books.batches.values().filter(ending).map(|batch| batch.id.clone()).collect();
        for id in ids {
            self.file_results(&mut books, &id, now)?;
        }
        for (name, path) in names_in(&self.folder.join("files"))? {
            let id = name.strip_suffix(".json").unwrap_or(&name);
            if !books.files.contains_key(id) {
                self.disk.remove(&path)?;
            }
        }
        for (name, path) in names_in(&self.folder.join("batches"))? {
            let batch = name.split('.').next().and_then(|id| books.batches.get(id));
            let is_used = batch.is_some_and(|batch| match name.rsplit('.').next() {
                Some("json") => true,
                Some("input") => !batch.state.has_ended(),
                Some("output" | "errors") => batch.api == BatchApi::Anthropic || !batch.state.has_ended(),
                _ => false,
            });
            if !is_used {
                self.disk.remove(&path)?;
            }
        }
        for (_, path) in names_in(&self.folder.join("uploads"))? {
            self.disk.remove(&path)?;
        }
        Ok(())
    }

    pub fn limits(&self) -> StoreLimits {
        self.limits
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // A record is in the books once it is on the disk, so a panic leaves no half of one.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn content_path(&self, id: &str) -> PathBuf {
        self.folder.join("files").join(id)
    }

    fn batch_path(&self, id: &str, part: &str) -> PathBuf {
        self.folder.join("batches").join(format!("{id}.{part}"))
    }

    fn save_file(&self, file: &FileRecord) -> io::Result<()> {
        self.disk.replace(&self.folder.join("files").join(format!("{}.json", file.id)), &json(file)?)
    }

    fn save_batch(&self, batch: &BatchRecord) -> io::Result<()> {
        self.disk.replace(&self.batch_path(&batch.id, "json"), &json(batch)?)
    }
}

/// Files.
impl BatchStore {
    /// Begins to receive a file of `owner`.
    pub fn begin_upload(&self, owner: &str) -> Result<Upload, StoreError> {
        self.check_num_files(&self.books(), owner)?;
        let number = self.next_upload.fetch_add(1, Ordering::Relaxed);
        let path = self.folder.join("uploads").join(number.to_string());
        let file = private().create(true).write(true).truncate(true).open(&path)?;
        Ok(Upload { file, path, bytes: 0, limits: self.limits, used: self.used.clone(), is_kept: false })
    }

    /// The file has been received. `expires_after_s`: as the client wishes, but not longer than files are kept.
    pub fn finish_upload(
        &self,
        mut upload: Upload,
        (id, owner, filename): (String, &str, String),
        expires_after_s: Option<u64>,
        now: u64,
    ) -> Result<FileRecord, StoreError> {
        upload.file.sync_all()?;
        let mut books = self.books();
        self.check_num_files(&books, owner)?;
        let keep_s = expires_after_s.map_or(self.limits.keep_s, |wish| wish.min(self.limits.keep_s));
        let file = FileRecord {
            id,
            owner: owner.to_owned(),
            number: books.take_number(),
            filename,
            purpose: Purpose::Batch,
            bytes: upload.bytes,
            created_at: now,
            expires_at: now + keep_s,
        };
        self.disk.rename(&upload.path, &self.content_path(&file.id))?;
        self.save_file(&file)?;
        upload.is_kept = true;
        books.files.insert(file.id.clone(), file.clone());
        Ok(file)
    }

    fn check_num_files(&self, books: &Books, owner: &str) -> Result<(), StoreError> {
        let uploaded = books.files.values().filter(|file| file.owner == owner && file.purpose == Purpose::Batch);
        if uploaded.count() < self.limits.max_files { Ok(()) } else { Err(StoreError::TooManyFiles) }
    }

    pub fn file(&self, owner: &str, id: &str, now: u64) -> Result<FileRecord, StoreError> {
        let books = self.books();
        let file = books.files.get(id).filter(|file| file.owner == owner && file.expires_at > now);
        file.cloned().ok_or(StoreError::NotFound)
    }

    /// The files of an owner in the order in which they were made.
    pub fn files(&self, owner: &str, now: u64) -> Vec<FileRecord> {
        let books = self.books();
        let files = books.files.values().filter(|file| file.owner == owner && file.expires_at > now);
        let mut files: Vec<FileRecord> = files.cloned().collect();
        files.sort_by_key(|file| file.number);
        files
    }

    pub fn content(&self, owner: &str, id: &str, now: u64) -> Result<(FileRecord, File), StoreError> {
        let file = self.file(owner, id, now)?;
        let content = File::open(self.content_path(id))?;
        Ok((file, content))
    }

    pub fn delete_file(&self, owner: &str, id: &str, now: u64) -> Result<(), StoreError> {
        self.file(owner, id, now)?;
        self.forget_file(&mut self.books(), id)?;
        Ok(())
    }

    fn forget_file(&self, books: &mut Books, id: &str) -> io::Result<()> {
        // Without its record the content is removed at the next start.
        self.disk.remove(&self.folder.join("files").join(format!("{id}.json")))?;
        if let Some(file) = books.files.remove(id) {
            self.used.fetch_sub(file.bytes, Ordering::Relaxed);
        }
        self.disk.remove(&self.content_path(id))
    }
}

/// Batches, as clients see them.
impl BatchStore {
    pub fn create_batch(&self, new: NewBatch, now: u64) -> Result<BatchRecord, StoreError> {
        let NewBatch { id, owner, api, endpoint, input, metadata, output_expires_after_s, window_s } = new;
        let mut books = self.books();
        self.make_room(&mut books, &owner)?;
        let path = self.batch_path(&id, "input");
        let input_file_id = match input {
            InputSource::File(file) => {
                let known = books.files.get(&file);
                known.filter(|file| file.owner == owner && file.expires_at > now).ok_or(StoreError::NotFound)?;
                self.disk.link(&self.content_path(&file), &path)?;
                Some(file)
            }
            InputSource::Lines(lines) => {
                self.disk.replace(&path, &lines)?;
                None
            }
        };
        let batch = BatchRecord {
            id,
            owner,
            number: books.take_number(),
            api,
            endpoint,
            input_file_id,
            metadata,
            output_expires_after_s,
            state: BatchState::Validating,
            counts: BatchCounts::default(),
            problems: Vec::new(),
            output_file_id: None,
            error_file_id: None,
            created_at: now,
            expires_at: now + window_s,
            in_progress_at: None,
            finalizing_at: None,
            cancelling_at: None,
            ended_at: None,
        };
        self.save_batch(&batch)?;
        books.batches.insert(batch.id.clone(), batch.clone());
        Ok(batch)
    }

    /// Where an owner has as many batches as it may, the oldest that has ended is forgotten.
    fn make_room(&self, books: &mut Books, owner: &str) -> Result<(), StoreError> {
        let of_owner = || books.batches.values().filter(|batch| batch.owner == owner);
        if of_owner().count() < self.limits.max_batches {
            return Ok(());
        }
        let oldest = of_owner().filter(|batch| batch.state.has_ended()).min_by_key(|batch| batch.number);
        let oldest = oldest.ok_or(StoreError::TooManyBatches)?.id.clone();
        Ok(self.forget_batch(books, &oldest)?)
    }

    fn forget_batch(&self, books: &mut Books, id: &str) -> io::Result<()> {
        self.disk.remove(&self.batch_path(id, "json"))?;
        books.batches.remove(id);
        ["input", "output", "errors"].iter().try_for_each(|part| self.disk.remove(&self.batch_path(id, part)))
    }

    pub fn batch(&self, owner: &str, api: BatchApi, id: &str) -> Result<BatchRecord, StoreError> {
        let books = self.books();
        let batch = books.batches.get(id).filter(|batch| batch.owner == owner && batch.api == api);
        batch.cloned().ok_or(StoreError::NotFound)
    }

    /// The batches of an owner in the order in which they were made.
    pub fn batches(&self, owner: &str, api: BatchApi) -> Vec<BatchRecord> {
        let books = self.books();
        let batches = books.batches.values().filter(|batch| batch.owner == owner && batch.api == api);
        let mut batches: Vec<BatchRecord> = batches.cloned().collect();
        batches.sort_by_key(|batch| batch.number);
        batches
    }

    pub fn cancel(&self, owner: &str, api: BatchApi, id: &str, now: u64) -> Result<BatchRecord, StoreError> {
        let mut batch = self.batch(owner, api, id)?;
        let mut may = true;
        if let Some(changed) = self.update(id, |batch| may = batch.cancel(now))? {
            batch = changed;
        }
        if may { Ok(batch) } else { Err(StoreError::WrongState(batch.state)) }
    }

    /// Forgets a batch that has ended.
    pub fn delete_batch(&self, owner: &str, api: BatchApi, id: &str) -> Result<(), StoreError> {
        let batch = self.batch(owner, api, id)?;
        if !batch.state.has_ended() {
            return Err(StoreError::WrongState(batch.state));
        }
        Ok(self.forget_batch(&mut self.books(), id)?)
    }

    /// The results of an ended batch that have not become files.
    pub fn results(&self, owner: &str, api: BatchApi, id: &str) -> Result<Vec<File>, StoreError> {
        let batch = self.batch(owner, api, id)?;
        if !batch.state.has_ended() {
            return Err(StoreError::WrongState(batch.state));
        }
        let mut files = Vec::new();
        for part in ["output", "errors"] {
            match File::open(self.batch_path(id, part)) {
                Ok(file) => files.push(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(files)
    }
}

/// Batches, as they are worked on.
impl BatchStore {
    /// The batches that have not ended, in the order in which they were made.
    pub fn unended(&self) -> Vec<BatchRecord> {
        let books = self.books();
        let mut batches: Vec<BatchRecord> =
            books.batches.values().filter(|batch| !batch.state.has_ended()).cloned().collect();
        batches.sort_by_key(|batch| batch.number);
        batches
    }

    /// A batch as it is now; `None`: it is gone.
    pub fn now(&self, id: &str) -> Option<BatchRecord> {
        self.books().batches.get(id).cloned()
    }

    pub fn input(&self, id: &str) -> io::Result<File> {
        File::open(self.batch_path(id, "input"))
    }

    /// The results so far. One call at a time may have it.
    pub fn journal(&self, id: &str) -> io::Result<Journal> {
        let (output, errors) = (self.batch_path(id, "output"), self.batch_path(id, "errors"));
        Journal::open(self.disk.clone(), &output, &errors)
    }

    /// The input has been read, see [`BatchRecord::validated`].
    pub fn validated(
        &self,
        id: &str,
        total: u64,
        problems: Vec<InputProblem>,
        is_usable: bool,
        now: u64,
    ) -> io::Result<Option<BatchRecord>> {
        self.update(id, |batch| batch.validated(total, problems, is_usable, now))
    }

    /// Shows these counts. They are not written, because the journal has them.
    pub fn show_counts(&self, id: &str, counts: BatchCounts) {
        if let Some(batch) = self.books().batches.get_mut(id) {
            batch.counts = BatchCounts { total: batch.counts.total, ..counts };
        }
    }

    /// Every request has its result in the journal. They become files with ids of `new_id`, or stay with the batch.
    pub fn finish(
        &self,
        id: &str,
        outcome: BatchOutcome,
        counts: BatchCounts,
        mut new_id: impl FnMut() -> String,
        now: u64,
    ) -> io::Result<()> {
        let has = |part: &str| fs::metadata(self.batch_path(id, part)).is_ok_and(|file| file.len() > 0);
        let (has_output, has_errors) = (has("output"), has("errors"));
        self.update(id, |batch| {
            let files = batch.api == BatchApi::OpenAi;
            let output = (files && has_output).then(&mut new_id);
            let errors = (files && has_errors).then(&mut new_id);
            // A batch may be cancelled before its requests have been counted.
            batch.counts = BatchCounts { total: batch.counts.total.max(counts.num_done()), ..counts };
            batch.finalize(outcome, output, errors, now);
        })?;
        self.end(id, now)
    }

    /// Goes on with [`BatchStore::finish`] where that was interrupted.
    pub fn end(&self, id: &str, now: u64) -> io::Result<()> {
        self.file_results(&mut self.books(), id, now)
    }

    /// The last steps of a batch. Each may have been done already.
    fn file_results(&self, books: &mut Books, id: &str, now: u64) -> io::Result<()> {
        let Some(mut batch) = books.batches.get(id).cloned() else { return Ok(()) };
        let parts = [("output", &batch.output_file_id), ("errors", &batch.error_file_id)];
        for (part, file_id) in parts {
            let Some(file_id) = file_id.clone().filter(|file_id| !books.files.contains_key(file_id)) else { continue };
            let (from, to) = (self.batch_path(id, part), self.content_path(&file_id));
            if from.exists() {
                self.disk.rename(&from, &to)?;
            }
            let keep_s = batch.output_expires_after_s.map_or(self.limits.keep_s, |wish| wish.min(self.limits.keep_s));
            let file = FileRecord {
                filename: format!("{id}_{part}.jsonl"),
                owner: batch.owner.clone(),
                number: books.take_number(),
                purpose: Purpose::BatchOutput,
                bytes: fs::metadata(&to)?.len(),
                created_at: now,
                expires_at: now + keep_s,
                id: file_id,
            };
            self.save_file(&file)?;
            self.used.fetch_add(file.bytes, Ordering::Relaxed);
            books.files.insert(file.id.clone(), file);
        }
        batch.end(now);
        self.save_batch(&batch)?;
        let api = batch.api;
        books.batches.insert(id.to_owned(), batch);
        // What is left is removed at the next start too.
        self.disk.remove(&self.batch_path(id, "input"))?;
        if api == BatchApi::OpenAi {
            self.disk.remove(&self.batch_path(id, "output"))?;
            self.disk.remove(&self.batch_path(id, "errors"))?;
        }
        Ok(())
    }

    /// Changes a record on the disk, and then here.
    fn update(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> io::Result<Option<BatchRecord>> {
        let mut books = self.books();
        let Some(mut batch) = books.batches.get(id).cloned() else { return Ok(None) };
        change(&mut batch);
        self.save_batch(&batch)?;
        books.batches.insert(id.to_owned(), batch.clone());
        Ok(Some(batch))
    }

    /// Removes files and ended batches that have been kept for long enough.
    pub fn sweep(&self, now: u64) -> io::Result<()> {
        let mut books = self.books();
        let files = books.files.values().filter(|file| file.expires_at <= now);
        let files: Vec<String> = files.map(|file| file.id.clone()).collect();
        for id in files {
            self.forget_file(&mut books, &id)?;
        }
        let is_old = |batch: &&BatchRecord| batch.ended_at.is_some_and(|ended| ended + self.limits.keep_s <= now);
        let batches: Vec<String> = books.batches.values().filter(is_old).map(|batch| batch.id.clone()).collect();
        for id in batches {
            self.forget_batch(&mut books, &id)?;
        }
        Ok(())
    }
}

/// A file that is being received. It is removed when this is dropped.
pub struct Upload {
    file: File,
    path: PathBuf,
    bytes: u64,
    limits: StoreLimits,
    used: Arc<AtomicU64>,
    is_kept: bool,
}

impl Upload {
    pub fn write(&mut self, part: &[u8]) -> Result<(), StoreError> {
        let length = part.len() as u64;
        if self.bytes + length > self.limits.max_file_bytes {
            return Err(StoreError::FileTooLarge);
        }
        let add = |used: u64| Some(used + length).filter(|used| *used <= self.limits.max_folder_bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map_err(|_| StoreError::FolderFull)?;
        self.bytes += length;
        Ok(self.file.write_all(part)?)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
        // What cannot be removed now is removed at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

fn json(record: &impl Serialize) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(record)?)
}

/// The records of a folder by their ids. A file that is no record is an error: nothing is removed on a guess.
fn records<R: DeserializeOwned>(folder: &Path, id_of: fn(&R) -> &String) -> io::Result<BTreeMap<String, R>> {
    let mut records = BTreeMap::new();
    for (name, path) in names_in(folder)? {
        let Some(id) = name.strip_suffix(".json") else { continue };
        match serde_json::from_slice::<R>(&fs::read(&path)?) {
            Ok(record) if id_of(&record) == id => drop(records.insert(id.to_owned(), record)),
            Ok(_) => return Err(io::Error::other(format!("{}: its id is not its name", path.display()))),
            Err(error) => return Err(io::Error::other(format!("{}: {error}", path.display()))),
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests;
