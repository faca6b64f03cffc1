//! Where a model's files lie: in a directory, as published on the Hugging Face hub, or inside the binary (the demo).

use crate::config::DEMO_MODEL as DEMO;
use crate::error::StartError;
use crate::model::checkpoint::{Bytes, Checkpoint};
use serde_json::{Map, Value};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

macro_rules! demo_files {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/", $name)).as_slice())),+]
    };
}

/// Files of `models/demo` that travel in the binary: `(name, contents)`.
const DEMO_FILES: &[(&str, &[u8])] = &demo_files!(
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
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    Directory(PathBuf),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl ModelFiles {
    /// `model` is a directory or `demo`. Fails if there is no such directory or it holds no `config.json`.
    pub fn open(model: &str) -> Result<Self, StartError> {
        if model == DEMO {
            return Ok(Self { source: Source::Embedded(DEMO_FILES) });
        }
        let directory = Path::new(model);
        if !directory.is_dir() {
            return Err(StartError::new(format!(
                "model: '{model}' is not a directory. Give a directory with config.json, tokenizer.json and \
                 *.safetensors, or 'demo' for the built-in model; a model of the Hugging Face hub has to be downloaded \
                 first (hf download NAME --local-dir DIR)"
            )));
        }
        if !directory.join("config.json").is_file() {
            return Err(StartError::new(format!("model: the directory '{model}' holds no config.json")));
        }
        Ok(Self { source: Source::Directory(directory.to_path_buf()) })
    }

    /// What to call the model: the directory's own name, or `demo`.
    pub fn name(&self) -> String {
        match &self.source {
            Source::Embedded(_) => DEMO.to_string(),
            Source::Directory(path) => {
                // `.` and `dir/..` have no last name of their own.
                let full = path.canonicalize().unwrap_or_else(|_| path.clone());
                full.file_name().unwrap_or(full.as_os_str()).to_string_lossy().into_owned()
            }
        }
    }

    /// Where a file lies, for messages.
    pub fn path(&self, name: &str) -> String {
        match &self.source {
            Source::Directory(directory) => directory.join(name).display().to_string(),
            Source::Embedded(_) => format!("{DEMO}:{name}"),
        }
    }

    /// A text file's contents; `None` if there is no such file.
    pub fn read_text(&self, name: &str) -> Result<Option<String>, StartError> {
        let bytes = match &self.source {
            Source::Directory(directory) => match fs::read(directory.join(name)) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(self.error(name, error)),
            },
            Source::Embedded(files) => match embedded(files, name) {
                Some(bytes) => bytes.to_vec(),
                None => return Ok(None),
            },
        };
        String::from_utf8(bytes).map(Some).map_err(|_| self.error(name, "not UTF-8 text"))
    }

    /// A JSON object's members; `None` if there is no such file.
    pub fn read_json(&self, name: &str) -> Result<Option<Map<String, Value>>, StartError> {
        let Some(text) = self.read_text(name)? else { return Ok(None) };
        match serde_json::from_str(&text) {
            Ok(Value::Object(members)) => Ok(Some(members)),
            Ok(_) => Err(self.error(name, "not a JSON object")),
            Err(error) => Err(self.error(name, format!("not valid JSON: {error}"))),
        }
    }

    /// The weights, memory-mapped: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    pub fn checkpoint(&self) -> Result<Checkpoint, StartError> {
        if let Some(index) = self.read_json("model.safetensors.index.json")? {
            return Checkpoint::open_sharded(self, &index);
        }
        if let Some(bytes) = self.map("model.safetensors")? {
            return Checkpoint::open_single(self, "model.safetensors", bytes);
        }
        let pickled = self.exists("pytorch_model.bin") || self.exists("pytorch_model.bin.index.json");
        Err(StartError::new(format!(
            "model: there is no {} and no model.safetensors.index.json beside it{}",
            self.path("model.safetensors"),
            if pickled { "; pytorch_model.bin cannot be read: convert the checkpoint to safetensors" } else { "" }
        )))
    }

    fn exists(&self, name: &str) -> bool {
        match &self.source {
            Source::Directory(directory) => directory.join(name).exists(),
            Source::Embedded(files) => embedded(files, name).is_some(),
        }
    }

    /// A file's bytes without reading them; `None` if there is no such file.
    pub(super) fn map(&self, name: &str) -> Result<Option<Bytes>, StartError> {
        match &self.source {
            Source::Embedded(files) => Ok(embedded(files, name).map(Bytes::Embedded)),
            Source::Directory(directory) => match fs::File::open(directory.join(name)) {
                Ok(file) => Bytes::map(&file).map(Some).map_err(|error| self.error(name, error)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(self.error(name, error)),
            },
        }
    }

    pub(super) fn error(&self, name: &str, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("{}: {problem}", self.path(name)))
    }
}

fn embedded(files: &'static [(&'static str, &'static [u8])], name: &str) -> Option<&'static [u8]> {
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
        assert!(error(ModelFiles::open(path)).contains("holds no config.json"));

        fs::write(folder.path().join("config.json"), "{}").unwrap();
        let files = ModelFiles::open(path).unwrap();
        assert!(error(files.checkpoint()).contains("there is no"));
        fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
        assert!(error(files.checkpoint()).contains("convert the checkpoint to safetensors"));
        assert_eq!(files.read_text("chat_template.jinja").unwrap(), None);
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
    fn is_called_after_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("tiny-llama");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("config.json"), "{}").unwrap();
        assert_eq!(ModelFiles::open(directory.to_str().unwrap()).unwrap().name(), "tiny-llama");
    }
}
