//! GGUF checkpoints: one file holds the weights, the configuration, the tokenizer and the chat template.
//!
//! To the rest of the program a GGUF file looks like a folder of a Hugging Face model: [`GgufModel::text`] makes the
//! files of such a folder from the metadata. Only the weights stay as they are (`Checkpoint`).

mod config;
pub mod reader;
pub mod tokenizer;
pub mod weights;

#[cfg(test)]
#[path = "../../tests/common/gguf.rs"]
mod test_files;

use crate::bytes::FileBytes;
use config::config;
use pagetide_backend::HostTensor;
use pagetide_backend::quant::QuantFormat;
use pagetide_base::error::StartError;
use reader::{GgufFile, GgufTensor};
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weights::{GgufWeights, type_name, weight_format};

/// The ending of a file's name.
pub const GGUF_ENDING: &str = ".gguf";
/// The most files that a model is split into.
const MAX_SPLITS: u64 = 10_000;

/// A model in a GGUF file, or in several that it was split into.
pub struct GgufModel {
    path: PathBuf,
    /// The first has the metadata.
    files: Vec<MappedGguf>,
}

/// A memory-mapped file.
pub struct MappedGguf {
    /// For messages.
    pub name: String,
    pub bytes: Arc<FileBytes>,
}

impl std::fmt::Debug for GgufModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} files)", self.path.display(), self.files.len())
    }
}

/// What the name of a split file begins with, and the number of the files: `NAME-00001-of-00003.gguf`.
pub fn split_of(path: &Path) -> Option<(&str, usize)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(GGUF_ENDING)?;
    let (front, count) = stem.rsplit_once("-of-")?;
    let (name, number) = front.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(count)).then(|| count.parse().map(|count| (name, count)).ok())?
}

/// The file with which a split model begins, for any of its files; every other file is itself.
pub fn first_split(path: &Path) -> PathBuf {
    match split_of(path) {
        Some((name, count)) => path.with_file_name(format!("{name}-00001-of-{count:05}{GGUF_ENDING}")),
        None => path.to_path_buf(),
    }
}

impl GgufModel {
    /// Opens a file, and the others if the model is split.
    pub fn open(path: &Path) -> Result<Self, StartError> {
        let path = first_split(path);
        let first = MappedGguf::open(&path)?;
        let num_splits = first.read()?.metadata.integer("split.count").map_err(|error| first.error(error))?;
        let num_splits = num_splits.unwrap_or(0);
        if num_splits > MAX_SPLITS {
            return Err(first.error(format!("split.count: {num_splits} files; at most {MAX_SPLITS} are supported")));
        }
        let mut files = vec![first];
        for number in 2..=num_splits {
            let Some((name, count)) = split_of(&path).filter(|(_, count)| *count as u64 == num_splits) else {
                let problem = format!(
                    "split.count is {num_splits}, so its name should end with -00001-of-{num_splits:05}{GGUF_ENDING}"
                );
                return Err(files[0].error(problem));
            };
            let path = path.with_file_name(format!("{name}-{number:05}-of-{count:05}{GGUF_ENDING}"));
            let file = MappedGguf::open(&path)?;
            let split = file.read()?.metadata.integer("split.no").map_err(|error| file.error(error))?;
            let split = split.ok_or_else(|| file.error("split.no: it is missing"))?;
            if split != number - 1 {
                return Err(file.error(format!("split.no: is {split}, not {}", number - 1)));
            }
            files.push(file);
        }
        Ok(Self { path, files })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of the file, without what numbers the splits and without its ending.
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let name = split_of(&self.path).map_or(name.trim_end_matches(GGUF_ENDING), |(name, _)| name);
        name.to_string()
    }

    /// The contents of a file of a Hugging Face model; `None` if this model has nothing like it.
    pub fn text(&self, name: &str) -> Result<Option<String>, StartError> {
        let file = &self.files[0];
        let wrong = |error| file.error(error);
        let metadata = &file.read()?.metadata;
        let json = |value: Value| Some(value.to_string());
        Ok(match name {
            "config.json" => {
                let tensors = self.tensors()?;
                let all = || tensors.iter().flat_map(|(_, tensors)| tensors);
                let factors = |name: &str| self.vector(name);
                json(Value::Object(config(metadata, &all, &factors)?.map_err(wrong)?))
            }
            "generation_config.json" => {
                json(json!({ "eos_token_id": tokenizer::end_token_ids(metadata).map_err(wrong)? }))
            }
            "tokenizer.json" => tokenizer::tokenizer_json(metadata).map_err(wrong)?,
            "tokenizer_config.json" => json(Value::Object(tokenizer::tokenizer_config(metadata).map_err(wrong)?)),
            _ => None,
        })
    }

    /// The tensors of each file.
    pub fn tensors(&self) -> Result<Vec<(&MappedGguf, Vec<GgufWeights>)>, StartError> {
        self.files.iter().map(|file| Ok((file, file.tensors()?))).collect()
    }

    /// The elements of a vector in float32; `None` if there is no such tensor.
    fn vector(&self, name: &str) -> Result<Option<Vec<f32>>, StartError> {
        for (file, tensors) in self.tensors()? {
            let Some(tensor) = tensors.into_iter().find(|tensor| tensor.name == name) else { continue };
            let [len] = tensor.shape[..] else {
                return Err(file.error(format!("the tensor {name} has shape {:?}, but it is a vector", tensor.shape)));
            };
            let bytes = &file.bytes[tensor.range];
            let values = HostTensor { format: tensor.format, rows: 1, cols: len, bytes };
            return Ok(Some(values.to_f32()));
        }
        Ok(None)
    }
}

impl MappedGguf {
    fn open(path: &Path) -> Result<Self, StartError> {
        let name = path.display().to_string();
        let failed = |error| StartError::new(format!("{name}: {error}"));
        let file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(StartError::new(format!("{name}: not a regular file")));
        }
        let bytes = FileBytes::map(&file).map_err(failed)?;
        Ok(Self { name, bytes: Arc::new(bytes) })
    }

    fn error(&self, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("{}: {problem}", self.name))
    }

    fn read(&self) -> Result<GgufFile<'_>, StartError> {
        GgufFile::read(&self.bytes).map_err(|error| self.error(error))
    }

    fn tensors(&self) -> Result<Vec<GgufWeights>, StartError> {
        let file = self.read()?;
        file.tensors.iter().map(|tensor| self.weights(tensor)).collect()
    }

    fn weights(&self, tensor: &GgufTensor<'_>) -> Result<GgufWeights, StartError> {
        let GgufTensor { name, shape, kind, .. } = tensor;
        let wrong = |problem: String| self.error(format!("tensor {name}: {problem}"));
        let format = weight_format(*kind).ok_or_else(|| {
            let supported: Vec<_> = QuantFormat::ALL.iter().map(|format| format.name()).collect();
            wrong(format!("its type is {}; supported are F32, F16, BF16, {}", type_name(*kind), supported.join(", ")))
        })?;
        let (cols, rows) = shape.split_last().expect("a tensor has a dimension");
        let row_bytes = format.row_bytes(*cols).ok_or_else(|| {
            wrong(format!("rows of {cols} elements of type {format}, whose blocks have {}", format.block().0))
        })?;
        let bytes = rows.iter().try_fold(row_bytes, |bytes, size| bytes.checked_mul(*size));
        let range = reader::data_range(tensor, bytes.unwrap_or(usize::MAX), self.bytes.len());
        let range = range.map_err(|error| self.error(error))?;
        Ok(GgufWeights { name: name.to_string(), format, shape: shape.clone(), range })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_file_leads_to_the_first() {
        let first = |name: &str| first_split(Path::new(name)).display().to_string();
        assert_eq!(first("/a/m-Q4_K_M-00002-of-00003.gguf"), "/a/m-Q4_K_M-00001-of-00003.gguf");
        for other in ["/a/m.gguf", "/a/m-2-of-3.gguf", "m-00001-of-00002.bin", "-of-.gguf", "x-of-00003.gguf"] {
            assert_eq!(first(other), other);
        }
    }
}
