//! A checkpoint's tensors, memory-mapped from safetensors files.

use crate::bytes::FileBytes;
use crate::files::ModelFiles;
use pagetide_backend::{DType, HostTensor};
use pagetide_base::error::StartError;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// All tensors of a checkpoint by name, from one file or several shards.
pub struct Checkpoint {
    files: Vec<(String, FileBytes)>,
    tensors: HashMap<String, TensorEntry>,
}

struct TensorEntry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Within the file.
    range: Range<usize>,
}

/// Maximum number of shards. Each is a memory mapping, and a process may have about 65,000. Published checkpoints have
/// a few hundred.
const MAX_SHARDS: usize = 10_000;

/// Bytes of each end of a tensor that [`Checkpoint::hash_ends`] reads.
const HASHED_BYTES: usize = 256;

impl Checkpoint {
    fn open_single(files: &ModelFiles, name: &str, bytes: FileBytes) -> Result<Self, StartError> {
        let mut checkpoint = Self { files: Vec::new(), tensors: HashMap::new() };
        checkpoint.add_file(files, name, bytes)?;
        Ok(checkpoint)
    }

    /// `index` is `model.safetensors.index.json`: its `weight_map` gives the file of each tensor.
    fn open_sharded(files: &ModelFiles, index: &Map<String, Value>) -> Result<Self, StartError> {
        const INDEX: &str = "model.safetensors.index.json";
        let wrong = |problem: String| files.error(INDEX, problem);
        let weight_map = index
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| wrong("weight_map: missing, or not an object".into()))?;

        let mut checkpoint = Self { files: Vec::new(), tensors: HashMap::new() };
        let mut opened = HashSet::new();
        for (tensor, file) in weight_map {
            let file = file.as_str().ok_or_else(|| wrong(format!("weight_map.{tensor}: not a file name")))?;
            if file.contains(['/', '\\']) || file.is_empty() {
                return Err(wrong(format!("weight_map.{tensor}: '{file}' lies outside the model's directory")));
            }
            if opened.insert(file) {
                if opened.len() > MAX_SHARDS {
                    return Err(wrong(format!("weight_map: names more than {MAX_SHARDS} files")));
                }
                let bytes = files.map(file)?.ok_or_else(|| wrong(format!("the shard {file} is missing")))?;
                checkpoint.add_file(files, file, bytes)?;
            }
        }
        if let Some((tensor, file)) = weight_map.iter().find(|(tensor, _)| !checkpoint.tensors.contains_key(*tensor)) {
            let file = file.as_str().unwrap_or_default();
            return Err(wrong(format!("the tensor {tensor} is not in {file}, nor in any other shard")));
        }
        Ok(checkpoint)
    }

    fn add_file(&mut self, files: &ModelFiles, name: &str, bytes: FileBytes) -> Result<(), StartError> {
        let (header_bytes, header) = SafeTensors::read_metadata(&bytes).map_err(|error| {
            files.error(name, format!("not a whole safetensors file ({} bytes): {error}", bytes.len()))
        })?;
        // The file begins with the header's length, a u64.
        let data_start = 8 + header_bytes;
        for (tensor, info) in header.tensors() {
            let (start, end) = info.data_offsets;
            let entry = TensorEntry {
                file: self.files.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: data_start + start..data_start + end,
            };
            if let Some(other) = self.tensors.insert(tensor.clone(), entry)
                && other.file != self.files.len()
            {
                let other = &self.files[other.file].0;
                return Err(files.error(name, format!("the tensor {tensor} is also in {other}")));
            }
        }
        self.files.push((name.to_string(), bytes));
        Ok(())
    }

    pub fn contains(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The size of a tensor in the file; 0 if there is no such tensor.
    pub fn size_bytes(&self, tensor: &str) -> usize {
        self.tensors.get(tensor).map_or(0, |entry| entry.range.len())
    }

    /// The element type of a tensor; `None` if there is no such tensor, or if its type is not supported.
    pub fn dtype(&self, tensor: &str) -> Option<DType> {
        self.tensors.get(tensor).and_then(|entry| element_type(entry.dtype))
    }

    /// The stored tensor, which must have this shape: `[rows, cols]`, or `[cols]` for a vector.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor<'_>, StartError> {
        let entry = self
            .tensors
            .get(name)
            .ok_or_else(|| StartError::new(format!("the checkpoint has no tensor {name} of shape {shape:?}")))?;
        let (file, bytes) = &self.files[entry.file];
        if entry.shape != shape {
            return Err(StartError::new(format!(
                "{file}: the tensor {name} has shape {:?}, but config.json asks for {shape:?}",
                entry.shape
            )));
        }
        let dtype = element_type(entry.dtype).ok_or_else(|| {
            StartError::new(format!(
                "{file}: the tensor {name} is of type {:?}; supported are F32, F16 and BF16",
                entry.dtype
            ))
        })?;
        let (cols, rows) = shape.split_last().map_or((1, 1), |(cols, rest)| (*cols, rest.iter().product()));
        Ok(HostTensor { format: dtype.into(), rows, cols, bytes: &bytes[entry.range.clone()] })
    }

    /// Adds to `hasher` what tells this checkpoint from others: the name, the type and the shape of each tensor, and
    /// the bytes at its ends. Training changes nearly every number, and reading all of them would take as long as
    /// loading.
    pub(crate) fn hash_ends(&self, hasher: &mut blake3::Hasher) {
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort_unstable();
        for name in names {
            let TensorEntry { file, dtype, shape, range } = &self.tensors[name];
            let bytes = &self.files[*file].1[range.clone()];
            hasher.update(format!("{name} {dtype:?} {shape:?}\n").as_bytes());
            hasher.update(&bytes[..bytes.len().min(HASHED_BYTES)]);
            hasher.update(&bytes[bytes.len().saturating_sub(HASHED_BYTES)..]);
        }
    }

    /// Releases the memory of a tensor that has been read. Reading it again works, from the disk.
    pub fn release(&self, tensor: &str) {
        if let Some(entry) = self.tensors.get(tensor) {
            self.files[entry.file].1.release(entry.range.clone());
        }
    }
}

impl ModelFiles {
    /// The memory-mapped weights: `model.safetensors`, or the shards listed in `model.safetensors.index.json`. Missing
    /// files of a hub model are downloaded first.
    pub fn checkpoint(&self) -> Result<Checkpoint, StartError> {
        self.fetch_weights()?;
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
}

fn element_type(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}
