//! The structure of a GGUF file: metadata and the table of tensors (ggml's `docs/gguf.md`, versions 2 and 3).
//!
//! Everything is checked against the file's size before memory is taken for it, so that a broken file is refused and
//! cannot exhaust memory.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// The first bytes of every file.
pub const MAGIC: &[u8; 4] = b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];
/// Alignment of the tensors' data where `general.alignment` does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 16;
/// llama.cpp's `GGML_MAX_DIMS`.
const MAX_DIMS: usize = 4;
/// Longest name of a value or a tensor in bytes, as in the specification.
const MAX_NAME_BYTES: usize = 65_535;
/// The fewest bytes that an entry takes: a value is the length of its key, its type and a byte; a tensor is the length
/// of its name, the number of its dimensions, one dimension, its type and its offset.
const MIN_VALUE_BYTES: usize = 8 + 4 + 1;
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufError(String);

impl GgufError {
    pub fn new(problem: impl Into<String>) -> Self {
        Self(problem.into())
    }

    /// The key is not in the metadata.
    pub fn missing(key: &str) -> Self {
        Self(format!("{key}: it is missing"))
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The types of values in metadata, by their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueKind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn of(number: u32) -> Result<Self, GgufError> {
        let kind = Self::ALL.get(number as usize);
        kind.copied().ok_or_else(|| GgufError(format!("{number} is not a type of values (0 to 12)")))
    }

    /// The fewest bytes of a value. That of a string is its length.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::String | Self::Array | Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }
}

/// A value of the metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GgufValue<'a> {
    /// Any of the integer types.
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    List(GgufList<'a>),
}

/// An array of the metadata. Its values are read when they are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufList<'a> {
    kind: ValueKind,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> GgufList<'a> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn values(&self) -> impl Iterator<Item = GgufValue<'a>> + use<'a> {
        let (kind, mut cursor) = (self.kind, Cursor { bytes: self.bytes, at: 0 });
        // The reader has read the values once, so that nothing is wrong with them.
        (0..self.len).map_while(move |_| cursor.value(kind).ok())
    }

    /// The values of a list of strings; `None` if it is a list of something else.
    pub fn texts(&self) -> Option<Vec<&'a str>> {
        let text = |value| if let GgufValue::Text(text) = value { Some(text) } else { None };
        self.values().map(text).collect()
    }

    /// The values of a list of numbers, as floats.
    pub fn floats(&self) -> Option<Vec<f64>> {
        self.values().map(|value| value.as_f64()).collect()
    }

    /// The values of a list of integers.
    pub fn integers(&self) -> Option<Vec<i64>> {
        let integer = |value| if let GgufValue::Integer(integer) = value { i64::try_from(integer).ok() } else { None };
        self.values().map(integer).collect()
    }
}

impl<'a> GgufValue<'a> {
    pub fn as_u64(self) -> Option<u64> {
        if let Self::Integer(integer) = self { u64::try_from(integer).ok() } else { None }
    }

    /// A float, or an integer as a float.
    pub fn as_f64(self) -> Option<f64> {
        match self {
            Self::Float(float) => Some(float),
            Self::Integer(integer) => Some(integer as f64),
            _ => None,
        }
    }

    pub fn as_bool(self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(value) } else { None }
    }

    pub fn as_str(self) -> Option<&'a str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub fn as_list(self) -> Option<GgufList<'a>> {
        if let Self::List(list) = self { Some(list) } else { None }
    }
}

/// The metadata of a file, or of the first of several.
#[derive(Clone, Debug, Default)]
pub struct GgufMetadata<'a> {
    values: HashMap<&'a str, GgufValue<'a>>,
}

impl<'a> GgufMetadata<'a> {
    pub fn get(&self, key: &str) -> Option<GgufValue<'a>> {
        self.values.get(key).copied()
    }

    /// A value of one type; `None` if there is no such key. An error names the key.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(GgufValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| GgufError(format!("{key}: not {expected}")))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        self.read(key, "a string", GgufValue::as_str)
    }

    pub fn integer(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.read(key, "an integer from 0", GgufValue::as_u64)
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.read(key, "a number", GgufValue::as_f64)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.read(key, "a boolean", GgufValue::as_bool)
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, GgufError> {
        self.read(key, "a list of strings", |value| value.as_list()?.texts())
    }

    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.read(key, "a list of integers", |value| value.as_list()?.integers())
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, GgufError> {
        self.read(key, "a list of numbers", |value| value.as_list()?.floats())
    }
}

/// An entry of the table of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor<'a> {
    pub name: &'a str,
    /// As in PyTorch: the dimension whose elements are neighbours comes last. (The file has it first.)
    pub shape: Vec<usize>,
    /// ggml's number of the element type.
    pub kind: u32,
    /// Where its data begin within the file. Where they end depends on the type.
    pub start: usize,
}

/// A file's metadata and tensors.
#[derive(Clone, Debug)]
pub struct GgufFile<'a> {
    pub metadata: GgufMetadata<'a>,
    pub tensors: Vec<GgufTensor<'a>>,
}

impl<'a> GgufFile<'a> {
    /// Reads the structure of a whole file. The tensors' data are not read.
    pub fn read(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(MAGIC.len())? != MAGIC {
            return Err(GgufError("not a GGUF file: it does not begin with GGUF".into()));
        }
        let version = cursor.u32()?;
        if !VERSIONS.contains(&version) {
            let big_endian = VERSIONS.contains(&version.swap_bytes());
            let why = if big_endian { "it is big-endian" } else { "versions 2 and 3 are supported" };
            return Err(GgufError(format!("GGUF version {version}: {why}")));
        }
        let num_tensors = cursor.count(MIN_TENSOR_BYTES, "tensors")?;
        let num_values = cursor.count(MIN_VALUE_BYTES, "metadata values")?;

        let mut values = HashMap::new();
        for index in 0..num_values {
            let key = cursor.name().map_err(|error| GgufError(format!("key {index} of the metadata: {error}")))?;
            let of_key = |error| GgufError(format!("{key}: {error}"));
            let kind = cursor.u32().and_then(ValueKind::of).map_err(of_key)?;
            let value = cursor.value(kind).map_err(of_key)?;
            if values.insert(key, value).is_some() {
                return Err(GgufError(format!("{key}: twice in the metadata")));
            }
        }
        let metadata = GgufMetadata { values };
        let alignment = match metadata.integer("general.alignment")? {
            None => DEFAULT_ALIGNMENT,
            Some(alignment) if alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment) => alignment,
            Some(other) => {
                let problem = format!("{other} is not a power of two from 8 to {MAX_ALIGNMENT}");
                return Err(GgufError(format!("general.alignment: {problem}")));
            }
        } as usize;

        let mut entries = Vec::new();
        for index in 0..num_tensors {
            let of_index = |error| GgufError(format!("tensor {index}: {error}"));
            let name = cursor.name().map_err(of_index)?;
            let entry = cursor.tensor(name, alignment).map_err(|error| GgufError(format!("tensor {name}: {error}")))?;
            entries.push(entry);
        }
        let mut names: Vec<&str> = entries.iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(GgufError(format!("tensor {}: twice in the file", pair[0])));
        }
        // The data begin behind the table.
        let data = cursor.at.next_multiple_of(alignment);
        for entry in &mut entries {
            let start = entry.start.checked_add(data).filter(|start| *start <= bytes.len());
            entry.start = start.ok_or_else(|| {
                GgufError(format!("tensor {}: its data begin behind the end of the file: it is truncated", entry.name))
            })?;
        }
        Ok(Self { metadata, tensors: entries })
    }
}

/// Where a tensor's data are, if it has `len` bytes.
pub fn data_range(tensor: &GgufTensor<'_>, len: usize, file_len: usize) -> Result<Range<usize>, GgufError> {
    let end = tensor.start.checked_add(len).filter(|end| *end <= file_len);
    let end = end.ok_or_else(|| {
        GgufError(format!("tensor {}: its data end behind the end of the file: it is truncated", tensor.name))
    })?;
    Ok(tensor.start..end)
}

/// Reads from the start of the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], GgufError> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| {
            GgufError(format!("{len} bytes are needed at byte {}, but the file ends: it is truncated", self.at))
        })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        Ok(self.take(N)?.try_into().expect("it is as long as was asked for"))
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of entries of at least `min_bytes` each, which must be in the rest of the file.
    fn count(&mut self, min_bytes: usize, what: &str) -> Result<usize, GgufError> {
        let count = self.u64()?;
        let most = (self.bytes.len() - self.at) / min_bytes;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= most)
            .ok_or_else(|| GgufError(format!("{count} {what}: the rest of the file has room for {most} at most")))
    }

    fn text(&mut self, longest: usize) -> Result<&'a str, GgufError> {
        let len = self.u64()?;
        let rest = self.bytes.len() - self.at;
        let len = usize::try_from(len).ok().filter(|len| *len <= rest.min(longest));
        let len =
            len.ok_or_else(|| GgufError("a string is longer than the rest of the file, or than a name".into()))?;
        std::str::from_utf8(self.take(len)?).map_err(|_| GgufError("a string is not UTF-8".into()))
    }

    fn name(&mut self) -> Result<&'a str, GgufError> {
        self.text(MAX_NAME_BYTES)
    }

    fn value(&mut self, kind: ValueKind) -> Result<GgufValue<'a>, GgufError> {
        Ok(match kind {
            ValueKind::U8 => GgufValue::Integer(u8::from_le_bytes(self.array()?).into()),
            ValueKind::I8 => GgufValue::Integer(i8::from_le_bytes(self.array()?).into()),
            ValueKind::U16 => GgufValue::Integer(u16::from_le_bytes(self.array()?).into()),
            ValueKind::I16 => GgufValue::Integer(i16::from_le_bytes(self.array()?).into()),
            ValueKind::U32 => GgufValue::Integer(self.u32()?.into()),
            ValueKind::I32 => GgufValue::Integer(i32::from_le_bytes(self.array()?).into()),
            ValueKind::U64 => GgufValue::Integer(self.u64()?.into()),
            ValueKind::I64 => GgufValue::Integer(i64::from_le_bytes(self.array()?).into()),
            ValueKind::F32 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            ValueKind::F64 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            ValueKind::Bool => GgufValue::Bool(self.take(1)?[0] != 0),
            ValueKind::String => GgufValue::Text(self.text(usize::MAX)?),
            ValueKind::Array => GgufValue::List(self.list()?),
        })
    }

    fn list(&mut self) -> Result<GgufList<'a>, GgufError> {
        let kind = self.u32().and_then(ValueKind::of)?;
        // llama.cpp has none, and they could be nested without end.
        if kind == ValueKind::Array {
            return Err(GgufError("a list of lists".into()));
        }
        let len = self.count(kind.min_bytes(), "values of a list")?;
        let start = self.at;
        if kind == ValueKind::String {
            for _ in 0..len {
                self.text(usize::MAX)?;
            }
        } else {
            self.take(len * kind.min_bytes())?;
        }
        Ok(GgufList { kind, len, bytes: &self.bytes[start..self.at] })
    }

    /// The entry behind a tensor's name. `start` is still counted from the first byte of all data.
    fn tensor(&mut self, name: &'a str, alignment: usize) -> Result<GgufTensor<'a>, GgufError> {
        let num_dims = self.u32()? as usize;
        if !(1..=MAX_DIMS).contains(&num_dims) {
            return Err(GgufError(format!("{num_dims} dimensions: 1 to {MAX_DIMS} are supported")));
        }
        let mut shape = Vec::with_capacity(num_dims);
        for _ in 0..num_dims {
            shape.push(usize::try_from(self.u64()?).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let elements = shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
        if elements.is_none_or(|elements| elements == 0 || elements > usize::MAX / 8) {
            return Err(GgufError(format!("the shape {shape:?} is empty, or too large for this machine")));
        }
        let kind = self.u32()?;
        let start = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
        if !start.is_multiple_of(alignment) {
            return Err(GgufError(format!("its data begin at {start}, which is no multiple of {alignment}")));
        }
        Ok(GgufTensor { name, shape, kind, start })
    }
}

#[cfg(test)]
mod tests;
