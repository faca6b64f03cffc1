//! llama.cpp's slots: what the last completion of each has left in the prefix caches, which goes to files and comes
//! back.
//!
//! A slot is a number that a request gives, and it holds no memory of the device: sequences share the pools as ever.
//! What is kept of it are the tokens of its last completion, by which the blocks are found. Each caller with a prefix
//! cache of its own has its own slots and its own folder. HTTP workers enter and read slots on any thread (dashmap).

pub mod file;

use crate::messages::{Caller, CountPrefix, ErasePrefix, NamePrefix, PutBackPrefix, ReadPrefix};
use crate::scheduler::SchedulerActor;
use actix::dev::ToEnvelope;
use actix::{Addr, Handler, Message};
use dashmap::DashMap;
use file::{KvFormat, SlotFile, SlotFileError, SlotWriter};
use pagetide_api::id::random_hex;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_engine::prefix_cache::BlockHash;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// About as much is read or written between two steps.
const CHUNK_BYTES: usize = 16 << 20;
/// The longest name of a file.
const MAX_NAME_BYTES: usize = 255;
/// A file that is not written to for so long is not being written.
const LEFT_OVER_AFTER: Duration = Duration::from_secs(3600);
/// The purpose that folders' names are derived for, so that they tell nothing of the salts.
const FOLDER_CONTEXT: &str = "Pagetide: folder of an API key's slots";

/// What slots are kept by.
#[derive(Clone, Debug)]
pub struct SlotSettings {
    /// It is there.
    pub folder: PathBuf,
    pub format: KvFormat,
    /// The numbers of the slots are below it.
    pub num_slots: usize,
    /// The model's context.
    pub max_tokens: usize,
    /// Of the device pool.
    pub num_blocks: usize,
    /// Whether there is a prefix cache.
    pub has_cache: bool,
}

/// The slots of all callers, and their files.
pub struct SlotKeeper {
    settings: SlotSettings,
    scheduler: Addr<SchedulerActor>,
    slots: DashMap<SlotKey, SlotContent>,
    /// Held by who reads or writes a file: one at a time, so that all together take the memory of one chunk.
    working: Mutex<()>,
}

type SlotKey = (Option<Arc<str>>, u32);

#[derive(Default)]
struct SlotContent {
    /// Requests that use it now.
    in_use: usize,
    /// The client's own salt.
    salt: Option<String>,
    tokens: Arc<Vec<TokenId>>,
}

/// What was written to a file, or read from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedPrefix {
    pub num_tokens: usize,
    /// Of the file.
    pub num_bytes: usize,
}

impl SlotKeeper {
    pub fn new(settings: SlotSettings, scheduler: Addr<SchedulerActor>) -> Self {
        Self { settings, scheduler, slots: DashMap::new(), working: Mutex::new(()) }
    }

    /// The slot of this number.
    ///
    /// # Errors
    /// There are fewer.
    pub fn check(&self, param: &str, slot: u64) -> Result<u32, ApiError> {
        let most = self.settings.num_slots;
        let known = u32::try_from(slot).ok().filter(|slot| (*slot as usize) < most);
        known.ok_or_else(|| {
            let message =
                format!("Invalid slot ID: {param} must be less than {most} (scheduler.max_num_seqs), got {slot}");
            ApiError::invalid(param, message)
        })
    }

    /// The first slot of this caller that no request uses.
    pub fn first_idle(&self, caller: &Caller) -> Option<u32> {
        let in_use = |slot| self.slots.get(&(caller.salt.clone(), slot)).is_some_and(|content| content.in_use > 0);
        (0..self.settings.num_slots as u32).find(|slot| !in_use(*slot))
    }

    /// A request of this caller begins. `salt`: the client's own.
    pub fn enter(
        self: &Arc<Self>,
        caller: &Caller,
        slot: u32,
        salt: Option<String>,
        prompt: Arc<Vec<TokenId>>,
    ) -> SlotInUse {
        let key = (caller.salt.clone(), slot);
        self.slots.entry(key.clone()).or_default().in_use += 1;
        SlotInUse { keeper: self.clone(), key, salt, prompt, output: Vec::new() }
    }

    /// Writes what the caches hold of a slot to a file, which is replaced as a whole.
    pub async fn save(&self, caller: &Caller, slot: u32, name: &str) -> Result<SavedPrefix, ApiError> {
        let path = self.path(caller, name)?;
        self.check_cache()?;
        let _working = self.working.lock().await;
        let (salt, tokens) = self.content(caller, slot);
        let names = self.names(caller, salt.clone(), tokens.clone()).await?;
        let format = self.settings.format;
        let mut writing = blocking(move || {
            let file = NewFile::create(path)?;
            let to = BufWriter::new(file.handle.try_clone()?);
            Ok((file, SlotWriter::new(to, format, salt.as_deref().unwrap_or_default())?))
        })
        .await?;
        let mut num_tokens = 0;
        for names in names.chunks(self.blocks_at_once()) {
            let content = self.ask(ReadPrefix(names.to_vec())).await??;
            let num_read = content.len() / format.block_bytes;
            let next = num_tokens + num_read * format.block_size;
            let tokens = tokens[num_tokens..next].to_vec();
            writing = blocking(move || {
                writing.1.add(&tokens, &content)?;
                Ok(writing)
            })
            .await?;
            num_tokens = next;
            if num_read < names.len() {
                break;
            }
        }
        let num_bytes = blocking(move || {
            let (file, writer) = writing;
            let (_, num_bytes) = writer.finish()?;
            file.put_in_place()?;
            Ok(num_bytes)
        })
        .await?;
        Ok(SavedPrefix { num_tokens, num_bytes })
    }

    /// Puts what a file holds into the device's prefix cache, from the head of the prefix, as far as it fits. The slot
    /// then holds that. Nothing changes if the file is not one of this server.
    pub async fn restore(&self, caller: &Caller, slot: u32, name: &str) -> Result<SavedPrefix, ApiError> {
        let path = self.path(caller, name)?;
        self.check_cache()?;
        let _working = self.working.lock().await;
        let (format, max_tokens, shown) = (self.settings.format, self.settings.max_tokens, name.to_owned());
        let mut file = on_thread(move || open(&path, format, max_tokens)).await.map_err(|e| refused(&shown, e))?;
        let salt = Some(file.salt().to_owned()).filter(|salt| !salt.is_empty());
        let most_tokens = self.settings.num_blocks * format.block_size;
        let mut tokens = file.tokens()[..file.tokens().len().min(most_tokens)].to_vec();
        let names = self.names(caller, salt.clone(), Arc::new(tokens.clone())).await?;
        // From the tail: what comes last is evicted last, so the head stays where not all of it fits.
        let mut end = names.len();
        while end > 0 {
            let start = end.saturating_sub(self.blocks_at_once());
            let (read, content) = on_thread(move || {
                let content = file.read(start..end)?;
                Ok((file, content))
            })
            .await
            .map_err(|error| refused(&shown, error))?;
            file = read;
            self.ask(PutBackPrefix { names: names[start..end].to_vec(), content }).await??;
            end = start;
        }
        tokens.truncate(self.ask(CountPrefix(names)).await?? * format.block_size);
        let restored = SavedPrefix { num_tokens: tokens.len(), num_bytes: file.num_bytes() as usize };
        self.set((caller.salt.clone(), slot), salt, tokens);
        Ok(restored)
    }

    /// Forgets what the caches hold of a slot, but for what sequences use now. Returns the tokens that were forgotten.
    pub async fn erase(&self, caller: &Caller, slot: u32) -> Result<usize, ApiError> {
        let (salt, tokens) = self.content(caller, slot);
        let names = self.names(caller, salt, tokens).await?;
        let num_erased = self.ask(ErasePrefix(names)).await??;
        self.set((caller.salt.clone(), slot), None, Vec::new());
        Ok(num_erased * self.settings.format.block_size)
    }

    fn content(&self, caller: &Caller, slot: u32) -> (Option<String>, Arc<Vec<TokenId>>) {
        let content = self.slots.get(&(caller.salt.clone(), slot));
        content.map(|content| (content.salt.clone(), content.tokens.clone())).unwrap_or_default()
    }

    fn set(&self, key: SlotKey, salt: Option<String>, tokens: Vec<TokenId>) {
        let mut content = self.slots.entry(key).or_default();
        (content.salt, content.tokens) = (salt, Arc::new(tokens));
    }

    async fn names(
        &self,
        caller: &Caller,
        salt: Option<String>,
        tokens: Arc<Vec<TokenId>>,
    ) -> Result<Vec<BlockHash>, ApiError> {
        self.ask(NamePrefix { salt: caller.cache_salt(salt), tokens }).await
    }

    async fn ask<M>(&self, message: M) -> Result<M::Result, ApiError>
    where
        M: Message + Send + 'static,
        M::Result: Send,
        SchedulerActor: Handler<M>,
        actix::Context<SchedulerActor>: ToEnvelope<SchedulerActor, M>,
    {
        self.scheduler.send(message).await.map_err(|_| ApiError::engine("the engine has stopped"))
    }

    /// Blocks of a chunk.
    fn blocks_at_once(&self) -> usize {
        (CHUNK_BYTES / self.settings.format.block_bytes).max(1)
    }

    fn check_cache(&self) -> Result<(), ApiError> {
        let message = "slots are not kept: there is no prefix cache (cache.enable_prefix_caching is false)";
        if self.settings.has_cache { Ok(()) } else { Err(ApiError::not_implemented(None, message)) }
    }

    /// Where a caller's file of this name is.
    fn path(&self, caller: &Caller, name: &str) -> Result<PathBuf, ApiError> {
        check_name(name)?;
        let of_caller = |salt: &Arc<str>| blake3::Hash::from(blake3::derive_key(FOLDER_CONTEXT, salt.as_bytes()));
        Ok(match &caller.salt {
            Some(salt) => self.settings.folder.join(of_caller(salt).to_hex().as_str()).join(name),
            None => self.settings.folder.join(name),
        })
    }
}

/// A request that uses a slot. When this is dropped, the slot holds its tokens.
pub struct SlotInUse {
    keeper: Arc<SlotKeeper>,
    key: SlotKey,
    salt: Option<String>,
    prompt: Arc<Vec<TokenId>>,
    output: Vec<TokenId>,
}

impl SlotInUse {
    pub fn push(&mut self, token: TokenId) {
        self.output.push(token);
    }
}

impl Drop for SlotInUse {
    fn drop(&mut self) {
        let mut content = self.keeper.slots.entry(self.key.clone()).or_default();
        content.in_use = content.in_use.saturating_sub(1);
        content.salt = self.salt.take();
        content.tokens = Arc::new([&self.prompt[..], &self.output].concat());
    }
}

/// A file that has another name until it is whole. It is removed if it never is.
struct NewFile {
    handle: File,
    /// `None` once the file has its name.
    temporary: Option<PathBuf>,
    path: PathBuf,
}

impl NewFile {
    fn create(path: PathBuf) -> io::Result<Self> {
        let folder = path.parent().unwrap_or(Path::new(""));
        create_folder(folder)?;
        // No file of a client has such a name: see `check_name`.
        let temporary = folder.join(format!("{}.", random_hex()));
        let mut options = OpenOptions::new();
        // Prompts and answers are nobody else's business.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let handle = options.write(true).create_new(true).open(&temporary)?;
        Ok(Self { handle, temporary: Some(temporary), path })
    }

    /// Gives it its name, durably.
    fn put_in_place(mut self) -> io::Result<()> {
        self.handle.sync_all()?;
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.path)?;
        }
        self.temporary = None;
        self.path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = fs::remove_file(temporary)
        {
            tracing::warn!("{} is left over: {error}", temporary.display());
        }
    }
}

/// Opens the folder of slots. Removes what a process that was killed has left in it and in the folders of its callers.
pub(super) fn open_folder(path: &Path) -> io::Result<()> {
    create_folder(path)?;
    let is_hex = |name: &str, len: usize| name.len() == len && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let is_of_caller = entry.file_type()?.is_dir() && is_hex(&entry.file_name().to_string_lossy(), 64);
        let entries = if is_of_caller { fs::read_dir(entry.path())?.collect::<Result<_, _>>()? } else { vec![entry] };
        for entry in entries {
            let name = entry.file_name();
            let is_temporary = name.to_string_lossy().strip_suffix('.').is_some_and(|name| is_hex(name, 32));
            // Another process may be writing a younger one.
            let is_old = || -> io::Result<bool> {
                let age = entry.metadata()?.modified()?.elapsed();
                Ok(age.is_ok_and(|age| age > LEFT_OVER_AFTER))
            };
            if is_temporary && is_old().unwrap_or(false) {
                fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(())
}

fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

fn open(path: &Path, format: KvFormat, max_tokens: usize) -> Result<SlotFile<BufReader<File>>, SlotFileError> {
    let not_there = || SlotFileError::Unusable("there is no such file".into());
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => not_there(),
        _ => SlotFileError::Io(error),
    })?;
    if !metadata.is_file() {
        return Err(not_there());
    }
    SlotFile::open(BufReader::new(File::open(path)?), format, max_tokens)
}

fn refused(name: &str, error: SlotFileError) -> ApiError {
    match error {
        SlotFileError::Unusable(why) => {
            let message = format!(
                "Unable to restore slot. No available space in KV cache or invalid slot save file {name:?}: {why}"
            );
            ApiError::invalid("filename", message)
        }
        SlotFileError::Io(error) => ApiError::storage_failed(&error.to_string()),
    }
}

/// Runs `work` on a thread that may wait for the disk.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SlotFileError> + Send + 'static,
) -> Result<T, SlotFileError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(SlotFileError::Io(io::Error::other(error))))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(|error| ApiError::storage_failed(&error.to_string()))
}

/// Whether a client may give a file this name. The rules are llama.cpp's.
fn check_name(name: &str) -> Result<(), ApiError> {
    let is_refused = |c: char| c.is_control() || "/\\:*?\"<>|\u{feff}\u{ff0e}\u{2215}\u{2216}\u{fffd}".contains(c);
    let why = if name.is_empty() || name.len() > MAX_NAME_BYTES {
        format!("it must have 1 to {MAX_NAME_BYTES} bytes, got {}", name.len())
    } else if let Some(c) = name.chars().find(|c| is_refused(*c)) {
        format!("it must not contain {c:?}")
    } else if name.starts_with(' ') || name.ends_with([' ', '.']) || name.contains("..") {
        "it must not begin or end with a space, end with a dot, or contain \"..\"".into()
    } else {
        return Ok(());
    };
    Err(ApiError::invalid("filename", format!("Invalid filename: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn names_are_plain_names() {
        for name in ["a.bin", "slot 1", "ä.kv", ".a", "a-b_c.1", &"x".repeat(255)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a..b",
            "a/b",
            "/a",
            "a\\b",
            "a\n",
            "a\0",
            " a",
            "a ",
            "a.",
            "c:",
            "\u{ff0e}",
            &"x".repeat(256),
        ] {
            let error = check_name(name).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (400, Some("filename")), "{name:?}");
        }
    }

    #[test]
    fn a_file_that_never_gets_its_name_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("a.bin");
        let names = || fs::read_dir(folder.path().join("new")).unwrap().count();
        let file = NewFile::create(path.clone()).unwrap();
        assert_eq!(names(), 1);
        drop(file);
        assert_eq!(names(), 0);
        NewFile::create(path.clone()).unwrap().put_in_place().unwrap();
        assert!(path.is_file() && names() == 1);
    }

    #[test]
    fn what_a_killed_process_left_is_removed_at_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let of_caller = folder.path().join("ab".repeat(32));
        fs::create_dir(&of_caller).unwrap();
        let temporary = format!("{}.", random_hex());
        for folder in [folder.path(), &of_caller] {
            for (name, age_s) in [(&*temporary, 7200), ("saved.bin", 7200), (&*format!("{}.", random_hex()), 60)] {
                let file = File::create(folder.join(name)).unwrap();
                file.set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
            }
        }
        open_folder(folder.path()).unwrap();
        for folder in [folder.path(), &of_caller] {
            assert!(!folder.join(&temporary).exists());
            assert_eq!(
                fs::read_dir(folder).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_file()).count(),
                2
            );
        }
    }
}
