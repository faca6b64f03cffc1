//! The files of a model: in a directory, in the cache of the Hugging Face hub, or inside the program (the demo model).

use crate::bytes::FileBytes;
use crate::gguf::{GGUF_ENDING, GgufModel, first_split};
use crate::hub::{self, CachedFiles, DEFAULT_REVISION, DownloadProgress, HubAccess, HubFiles, HubModel};
use crate::options::ModelSource;
use pagetide_base::error::StartError;
use serde_json::{Map, Value};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The path that stands for the model inside the program.
pub const DEMO_MODEL: &str = "demo";

macro_rules! demo_files {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_bytes!(concat!("../../models/demo/", $name)).as_slice())),+]
    };
}

/// Files of `models/demo` inside the program: `(name, contents)`.
const DEMO_FILES: EmbeddedFiles = &demo_files!(
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
);

/// A model's files.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    source: FileSource,
}

type EmbeddedFiles = &'static [(&'static str, &'static [u8])];

#[derive(Clone, Debug)]
enum FileSource {
    Directory(PathBuf),
    Hub(Arc<HubModel>),
    Embedded(EmbeddedFiles),
    Gguf { model: Arc<GgufModel>, name: String },
}

impl FileSource {
    /// A GGUF file. A model of the hub has a name of its own.
    fn gguf(file: &Path, name: Option<&str>) -> Result<Self, StartError> {
        let model = GgufModel::open(file)?;
        let name = name.map_or_else(|| model.name(), str::to_owned);
        Ok(Self::Gguf { model: Arc::new(model), name })
    }
}

/// The place of a file.
enum FilePlace<'f> {
    Directory(PathBuf),
    Embedded(EmbeddedFiles),
    /// Made from a GGUF file.
    Gguf(&'f GgufModel),
}

/// The kind of place that `model.path` names.
enum Location<'m> {
    Program,
    /// A directory with a `config.json`.
    Directory(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// The path has the form of a hub name, perhaps with a quantisation.
    Hub {
        name: &'m str,
        quant: Option<&'m str>,
    },
}

impl<'m> Location<'m> {
    fn of(source: &'m ModelSource) -> Result<Self, StartError> {
        let ModelSource { path: model, revision } = source;
        let directory = Path::new(model);
        let location = if model == DEMO_MODEL {
            Self::Program
        } else if directory.is_dir() {
            match directory.join("config.json").is_file() {
                true => Self::Directory(directory.to_path_buf()),
                false => Self::Gguf(only_gguf(directory)?),
            }
        } else if model.ends_with(GGUF_ENDING) {
            if !directory.is_file() {
                return Err(StartError::new(format!("model: there is no file '{model}'")));
            }
            Self::Gguf(directory.to_path_buf())
        } else if let Some((name, quant)) = hub::split_quant(model) {
            return Ok(Self::Hub { name, quant });
        } else {
            return Err(StartError::new(format!(
                "model: '{model}' is not a directory. Give a directory with config.json, tokenizer.json and \
                 *.safetensors, a GGUF file or a directory with one, a name of the Hugging Face hub (OWNER/NAME, or \
                 OWNER/NAME:QUANT for GGUF files), or 'demo' for the built-in model"
            )));
        };
        match revision {
            Some(revision) => Err(StartError::new(format!(
                "model.revision: '{model}' is not a model on the hub, so it has no revision '{revision}'"
            ))),
            None => Ok(location),
        }
    }
}

/// The GGUF file of a directory. Files of parts of models that read images do not count.
fn only_gguf(directory: &Path) -> Result<PathBuf, StartError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(GGUF_ENDING) && !name.starts_with("mmproj") {
            found.push(first_split(&path));
        }
    }
    found.sort_unstable();
    found.dedup();
    let directory = directory.display();
    match &found[..] {
        [one] => Ok(one.clone()),
        [] => Err(StartError::new(format!("model: the directory '{directory}' holds no config.json and no GGUF file"))),
        several => {
            let names: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
            Err(StartError::new(format!("model: '{directory}' holds several models; give one: {}", names.join(", "))))
        }
    }
}

/// Describes where a model would be loaded from; `Err` if it is nowhere. This does not contact the hub.
pub fn whereabouts(source: &ModelSource) -> Result<String, StartError> {
    let ModelSource { path: model, revision } = source;
    Ok(match Location::of(source)? {
        Location::Program => format!("{model}, in the program"),
        Location::Directory(directory) => format!("{model}, in {}", directory.canonicalize()?.display()),
        Location::Gguf(file) => format!("{model}, in {}", file.canonicalize()?.display()),
        Location::Hub { name, quant } => {
            let revision = revision.as_deref().unwrap_or(DEFAULT_REVISION);
            let access = HubAccess::from_env();
            match hub::cached(&access, name, quant, revision) {
                Some(files) => format!("{model} at {revision}, in {}", files.path().display()),
                None if access.offline => {
                    return Err(StartError::new(format!(
                        "model: '{model}' at {revision} is missing or incomplete in the cache {}, and \
                         HF_HUB_OFFLINE is set",
                        access.cache.display()
                    )));
                }
                None => format!(
                    "{model} at {revision}, missing or incomplete in the cache {}: a start would download it from {}",
                    access.cache.display(),
                    access.endpoint
                ),
            }
        }
    })
}

impl ModelFiles {
    /// Opens `demo`, a directory, or a model on the hub, whose small files are downloaded if they are missing. Fails if
    /// there is no such model or it has no `config.json`.
    pub fn open(model: &str) -> Result<Self, StartError> {
        Self::find(&ModelSource { path: model.into(), revision: None }, Arc::new(|_, _| {}))
    }

    /// Opens a model whose files are on this machine; `None` for a model on the hub that would have to be downloaded.
    /// This does not contact the hub.
    pub fn find_here(model: &ModelSource) -> Result<Option<Self>, StartError> {
        let source = match Location::of(model)? {
            Location::Program => FileSource::Embedded(DEMO_FILES),
            Location::Directory(directory) => FileSource::Directory(directory),
            Location::Gguf(file) => FileSource::gguf(&file, None)?,
            Location::Hub { name, quant } => {
                let revision = model.revision.as_deref().unwrap_or(DEFAULT_REVISION);
                match hub::cached(&HubAccess::from_env(), name, quant, revision) {
                    Some(CachedFiles::Transformers(snapshot)) => FileSource::Directory(snapshot),
                    Some(CachedFiles::Gguf(file)) => FileSource::gguf(&file, Some(&model.path))?,
                    None => return Ok(None),
                }
            }
        };
        Ok(Some(Self { source }))
    }

    /// Opens a model. `progress` is told about downloads from the hub: of small files now, of the weights when
    /// [`ModelFiles::checkpoint`] is called.
    pub fn find(model: &ModelSource, progress: DownloadProgress) -> Result<Self, StartError> {
        let source = match Location::of(model)? {
            Location::Program => FileSource::Embedded(DEMO_FILES),
            Location::Directory(directory) => FileSource::Directory(directory),
            Location::Gguf(file) => FileSource::gguf(&file, None)?,
            Location::Hub { name, quant } => {
                let revision = model.revision.as_deref().unwrap_or(DEFAULT_REVISION);
                match hub::find(HubAccess::from_env(), name, quant, revision, progress)? {
                    HubFiles::Transformers(model) => FileSource::Hub(Arc::new(model)),
                    HubFiles::Gguf(file) => FileSource::gguf(&file, Some(&model.path))?,
                }
            }
        };
        Ok(Self { source })
    }

    /// The model's name: the directory's or the GGUF file's own name, the hub's name, or `demo`.
    pub fn name(&self) -> String {
        match &self.source {
            FileSource::Embedded(_) => DEMO_MODEL.to_string(),
            FileSource::Hub(model) => model.name().to_string(),
            FileSource::Gguf { name, .. } => name.clone(),
            FileSource::Directory(path) => {
                // `.` and `dir/..` have no last name of their own.
                let full = path.canonicalize().unwrap_or_else(|_| path.clone());
                full.file_name().unwrap_or(full.as_os_str()).to_string_lossy().into_owned()
            }
        }
    }

    /// The path of a file, for messages.
    pub fn path(&self, name: &str) -> String {
        match self.place() {
            FilePlace::Directory(directory) => directory.join(name).display().to_string(),
            FilePlace::Embedded(_) => format!("{DEMO_MODEL}:{name}"),
            FilePlace::Gguf(model) => format!("{} (as {name})", model.path().display()),
        }
    }

    /// The model's GGUF file, if it is in one.
    pub(super) fn gguf(&self) -> Option<&GgufModel> {
        match &self.source {
            FileSource::Gguf { model, .. } => Some(model),
            _ => None,
        }
    }

    fn place(&self) -> FilePlace<'_> {
        match &self.source {
            FileSource::Directory(directory) => FilePlace::Directory(directory.clone()),
            FileSource::Hub(model) => FilePlace::Directory(model.directory()),
            FileSource::Embedded(files) => FilePlace::Embedded(files),
            FileSource::Gguf { model, .. } => FilePlace::Gguf(model),
        }
    }

    /// The contents of a text file; `None` if there is no such file. A file that is too large for its kind, or not a
    /// regular file, is rejected before it is read.
    pub fn read_text(&self, name: &str) -> Result<Option<String>, StartError> {
        let bytes = match self.place() {
            FilePlace::Directory(_) => match self.open_file(name)? {
                Some(file) => self.read_up_to(name, file, largest_text(name))?,
                None => return Ok(None),
            },
            FilePlace::Embedded(files) => match embedded(files, name) {
                Some(bytes) => bytes.to_vec(),
                None => return Ok(None),
            },
            FilePlace::Gguf(model) => return model.text(name),
        };
        String::from_utf8(bytes).map(Some).map_err(|_| self.error(name, "not UTF-8 text"))
    }

    /// The members of a JSON object; `None` if there is no such file.
    pub fn read_json(&self, name: &str) -> Result<Option<Map<String, Value>>, StartError> {
        let Some(text) = self.read_text(name)? else { return Ok(None) };
        match serde_json::from_str(&text) {
            Ok(Value::Object(members)) => Ok(Some(members)),
            Ok(_) => Err(self.error(name, "not a JSON object")),
            Err(error) => Err(self.error(name, format!("not valid JSON: {error}"))),
        }
    }

    /// Downloads the weights of a hub model, unless they are in the cache.
    pub(super) fn fetch_weights(&self) -> Result<(), StartError> {
        match &self.source {
            FileSource::Hub(model) => model.fetch_weights(),
            FileSource::Directory(_) | FileSource::Embedded(_) | FileSource::Gguf { .. } => Ok(()),
        }
    }

    pub(super) fn exists(&self, name: &str) -> bool {
        match self.place() {
            FilePlace::Directory(directory) => directory.join(name).exists(),
            FilePlace::Embedded(files) => embedded(files, name).is_some(),
            FilePlace::Gguf(_) => false,
        }
    }

    /// The bytes of a file, memory-mapped; `None` if there is no such file.
    pub(super) fn map(&self, name: &str) -> Result<Option<FileBytes>, StartError> {
        match self.place() {
            FilePlace::Embedded(files) => Ok(embedded(files, name).map(FileBytes::Embedded)),
            FilePlace::Gguf(_) => Ok(None),
            FilePlace::Directory(_) => match self.open_file(name)? {
                Some(file) => FileBytes::map(&file).map(Some).map_err(|error| self.error(name, error)),
                None => Ok(None),
            },
        }
    }

    /// A file in the model's directory; `None` if there is no such file. Only a regular file is opened, or a link to
    /// one as in the hub's cache: opening a pipe could block forever, and a device has no end.
    fn open_file(&self, name: &str) -> Result<Option<fs::File>, StartError> {
        let path = match self.place() {
            FilePlace::Directory(directory) => directory.join(name),
            FilePlace::Embedded(_) | FilePlace::Gguf(_) => return Ok(None),
        };
        let mut options = fs::OpenOptions::new();
        options.read(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
        let file = match options.open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.error(name, error)),
        };
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(Some(file)),
            Ok(metadata) if metadata.is_dir() => Err(self.error(name, "a directory, where a file is expected")),
            Ok(_) => Err(self.error(name, "not a regular file")),
            Err(error) => Err(self.error(name, error)),
        }
    }

    fn read_up_to(&self, name: &str, file: fs::File, largest: u64) -> Result<Vec<u8>, StartError> {
        let mut bytes = Vec::new();
        // One byte more than allowed shows that the file is too large, even if it grows meanwhile.
        file.take(largest + 1).read_to_end(&mut bytes).map_err(|error| self.error(name, error))?;
        if bytes.len() as u64 > largest {
            return Err(self.error(name, format!("larger than {} MiB, the maximum for this file", largest >> 20)));
        }
        Ok(bytes)
    }

    pub(super) fn error(&self, name: &str, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("{}: {problem}", self.path(name)))
    }
}

/// Maximum size of a text file in bytes. Those of published models have a tenth of this or less.
fn largest_text(name: &str) -> u64 {
    const MIB: u64 = 1 << 20;
    match name {
        "tokenizer.json" => 512 * MIB,
        "model.safetensors.index.json" => 64 * MIB,
        "tokenizer_config.json" => 32 * MIB,
        _ => 8 * MIB,
    }
}

fn embedded(files: EmbeddedFiles, name: &str) -> Option<&'static [u8]> {
    files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(result: Result<impl Sized, StartError>) -> String {
        result.err().expect("must fail").to_string()
    }

    #[test]
    fn says_what_is_missing() {
        let message = error(ModelFiles::open("/no/such/place"));
        assert!(message.contains("'/no/such/place' is not a directory"), "{message}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        assert!(error(ModelFiles::open(path)).contains("holds no config.json and no GGUF file"));

        fs::write(folder.path().join("config.json"), "{}").unwrap();
        let files = ModelFiles::open(path).unwrap();
        assert!(error(files.checkpoint()).contains("there is no"));
        fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
        assert!(error(files.checkpoint()).contains("convert the checkpoint to safetensors"));
        assert_eq!(files.read_text("chat_template.jinja").unwrap(), None);
    }

    #[test]
    fn only_a_hub_model_has_a_revision() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        for model in ["demo", folder.path().to_str().unwrap()] {
            let source = ModelSource { path: model.into(), revision: Some("v2".into()) };
            let message = error(ModelFiles::find(&source, Arc::new(|_, _| {})));
            assert!(message.starts_with("model.revision: ") && message.contains("'v2'"), "{message}");
            assert!(whereabouts(&ModelSource { revision: None, ..source }).is_ok());
        }
    }

    #[test]
    fn refuses_what_is_not_json_text() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), "[1]").unwrap();
        let files = ModelFiles::open(folder.path().to_str().unwrap()).unwrap();
        assert!(error(files.read_json("config.json")).contains("not a JSON object"));
        fs::write(folder.path().join("config.json"), "{").unwrap();
        assert!(error(files.read_json("config.json")).contains("not valid JSON"));
        fs::write(folder.path().join("config.json"), b"\xff").unwrap();
        assert!(error(files.read_text("config.json")).contains("not UTF-8"));
    }

    #[test]
    fn reads_regular_files_of_a_sane_size() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file("config.json"), "{}").unwrap();
        let files = ModelFiles::open(folder.path().to_str().unwrap()).unwrap();

        fs::create_dir(file("generation_config.json")).unwrap();
        assert!(error(files.read_text("generation_config.json")).contains("a directory, where a file is expected"));
        fs::create_dir(file("model.safetensors")).unwrap();
        assert!(error(files.checkpoint()).contains("a directory, where a file is expected"));

        // Nothing ever writes into the pipe, so opening it must not block.
        let pipe = std::ffi::CString::new(file("tokenizer.json").to_str().unwrap()).unwrap();
        // SAFETY: the path ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        assert!(error(files.read_text("tokenizer.json")).contains("not a regular file"));
        std::os::unix::fs::symlink("/dev/zero", file("tokenizer_config.json")).unwrap();
        assert!(error(files.read_text("tokenizer_config.json")).contains("not a regular file"));
        std::os::unix::fs::symlink("config.json", file("link.json")).unwrap();
        assert_eq!(files.read_text("link.json").unwrap().as_deref(), Some("{}"));

        // Takes no room on the disk.
        fs::File::create(file("config.json")).unwrap().set_len((8 << 20) + 1).unwrap();
        assert!(error(files.read_text("config.json")).contains("larger than 8 MiB"));
    }

    #[test]
    fn is_called_after_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("tiny-llama");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("config.json"), "{}").unwrap();
        assert_eq!(ModelFiles::open(directory.to_str().unwrap()).unwrap().name(), "tiny-llama");
    }
}
