//! A checkpoint's tensors, memory-mapped from safetensors or GGUF files.

use crate::bytes::FileBytes;
use crate::files::ModelFiles;
use crate::gguf::{GGUF_ENDING, GgufModel};
use crate::names::TensorNaming;
use crate::quantizer::QuantizePlan;
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{DType, HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// All tensors of a checkpoint by name, from one file or several shards.
pub struct Checkpoint {
    naming: TensorNaming,
    files: Vec<(String, Arc<FileBytes>)>,
    tensors: HashMap<String, TensorEntry>,
    /// Only of plain weights.
    quantize_plan: Option<QuantizePlan>,
}

struct TensorEntry {
    file: usize,
    /// `None` for a type that cannot be read.
    format: Option<WeightFormat>,
    /// Its type in the words of the file.
    type_name: String,
    shape: Vec<usize>,
    /// Within the file.
    range: Range<usize>,
}

/// A tensor as it is in the file, of any type.
#[derive(Clone, Copy)]
pub(crate) struct StoredTensor<'c> {
    /// In the words of the file.
    pub type_name: &'c str,
    pub shape: &'c [usize],
    pub bytes: &'c [u8],
}

/// Maximum number of shards. Each is a memory mapping, and a process may have about 65,000. Published checkpoints have
/// a few hundred.
const MAX_SHARDS: usize = 10_000;

/// Bytes of each end of a tensor that [`Checkpoint::hash_ends`] reads.
const HASHED_BYTES: usize = 256;

impl Checkpoint {
    fn open_single(files: &ModelFiles, name: &str, bytes: FileBytes) -> Result<Self, StartError> {
        let mut checkpoint = Self::empty(TensorNaming::Transformers);
        checkpoint.add_file(files, name, bytes)?;
        Ok(checkpoint)
    }

    fn empty(naming: TensorNaming) -> Self {
        Self { naming, files: Vec::new(), tensors: HashMap::new(), quantize_plan: None }
    }

    fn open_gguf(model: &GgufModel) -> Result<Self, StartError> {
        let mut checkpoint = Self::empty(TensorNaming::Gguf);
        for (file, tensors) in model.tensors()? {
            for tensor in tensors {
                let entry = TensorEntry {
                    file: checkpoint.files.len(),
                    format: Some(tensor.format),
                    type_name: tensor.format.to_string(),
                    shape: tensor.shape,
                    range: tensor.range,
                };
                if checkpoint.tensors.insert(tensor.name.clone(), entry).is_some() {
                    let problem = format!("{}: the tensor {} is also in another file", file.name, tensor.name);
                    return Err(StartError::new(problem));
                }
            }
            checkpoint.files.push((file.name.clone(), file.bytes.clone()));
        }
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

        let mut checkpoint = Self::empty(TensorNaming::Transformers);
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
                format: element_type(info.dtype).map(WeightFormat::Plain),
                type_name: format!("{:?}", info.dtype),
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
        self.files.push((name.to_string(), Arc::new(bytes)));
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

    /// The element type of a tensor; `None` if there is no such tensor, or if it is quantised or of another type.
    pub fn dtype(&self, tensor: &str) -> Option<DType> {
        match self.tensors.get(tensor)?.format? {
            WeightFormat::Plain(dtype) => Some(dtype),
            WeightFormat::Quantized(_) | WeightFormat::Fp8 => None,
        }
    }

    pub(crate) fn naming(&self) -> TensorNaming {
        self.naming
    }

    /// The formats of quantised tensors, with the bytes in each, largest first.
    pub fn quantized(&self) -> Vec<(QuantFormat, u64)> {
        let mut bytes = HashMap::new();
        for entry in self.tensors.values() {
            if let Some(WeightFormat::Quantized(format)) = entry.format {
                *bytes.entry(format).or_insert(0) += entry.range.len() as u64;
            }
        }
        let mut formats: Vec<_> = bytes.into_iter().collect();
        formats.sort_unstable_by_key(|(format, bytes)| (std::cmp::Reverse(*bytes), format.name()));
        formats
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// Where the model's configuration is, for messages.
    pub fn configuration(&self) -> &'static str {
        let is_gguf = self.files.first().is_some_and(|(name, _)| name.ends_with(GGUF_ENDING));
        if is_gguf { "its metadata" } else { "config.json" }
    }

    /// The stored tensor, which must have this shape: `[rows, cols]`, or `[cols]` for a vector. All dimensions before
    /// the last one are rows.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor<'_>, StartError> {
        let entry = self.tensors.get(name).ok_or_else(|| {
            let (first, more) = (self.files.first().map_or("", |(name, _)| name), self.files.len().saturating_sub(1));
            let others = if more > 0 { format!(", with {more} other files,") } else { String::new() };
            StartError::new(format!("{first}{others} has no tensor {name} of shape {shape:?}"))
        })?;
        let (file, bytes) = &self.files[entry.file];
        if entry.shape != shape {
            return Err(StartError::new(format!(
                "{file}: the tensor {name} has shape {:?}, but {} asks for {shape:?}",
                entry.shape,
                self.configuration()
            )));
        }
        let format = entry.format.ok_or_else(|| {
            StartError::new(format!(
                "{file}: the tensor {name} is of type {}; supported are F32, F16 and BF16",
                entry.type_name
            ))
        })?;
        let (cols, rows) = shape.split_last().map_or((1, 1), |(cols, rest)| (*cols, rest.iter().product()));
        Ok(HostTensor { format, rows, cols, bytes: &bytes[entry.range.clone()] })
    }

    /// The tensor of this name, if there is one.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredTensor<'_>> {
        let TensorEntry { file, type_name, shape, range, .. } = self.tensors.get(name)?;
        Some(StoredTensor { type_name, shape, bytes: &self.files[*file].1[range.clone()] })
    }

    /// Adds to `hasher` what tells this checkpoint from others: the name, the type and the shape of each tensor, and
    /// the bytes at its ends. Training changes nearly every number, and reading all of them would take as long as
    /// loading.
    pub(crate) fn hash_ends(&self, hasher: &mut blake3::Hasher) {
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort_unstable();
        for name in names {
            let TensorEntry { file, format: _, type_name, shape, range } = &self.tensors[name];
            let bytes = &self.files[*file].1[range.clone()];
            hasher.update(format!("{name} {type_name} {shape:?}\n").as_bytes());
            hasher.update(&bytes[..bytes.len().min(HASHED_BYTES)]);
            hasher.update(&bytes[bytes.len().saturating_sub(HASHED_BYTES)..]);
        }
    }

    /// Adds to `hasher` what tells these files from others, and from what they were before somebody wrote to them.
    pub(crate) fn hash_version(&self, hasher: &mut blake3::Hasher) {
        self.hash_ends(hasher);
        for (name, bytes) in &self.files {
            hasher.update(format!("{name}\n").as_bytes());
            bytes.hash_version(hasher);
        }
    }

    /// A load quantises the matrices by this plan.
    pub fn quantize(&mut self, plan: QuantizePlan) {
        self.quantize_plan = Some(plan);
    }

    pub(crate) fn quantize_plan(&self) -> Option<&QuantizePlan> {
        self.quantize_plan.as_ref()
    }

    /// Releases the memory of a tensor that has been read. Reading it again works, from the disk.
    pub fn release(&self, tensor: &str) {
        if let Some(entry) = self.tensors.get(tensor) {
            self.files[entry.file].1.release(entry.range.clone());
        }
    }
}

impl ModelFiles {
    /// The memory-mapped weights: a GGUF file, `model.safetensors`, or the shards listed in
    /// `model.safetensors.index.json`. Missing
    /// files of a hub model are downloaded first.
    pub fn checkpoint(&self) -> Result<Checkpoint, StartError> {
        if let Some(model) = self.gguf() {
            return Checkpoint::open_gguf(model);
        }
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
