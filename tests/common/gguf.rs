//! Writes small GGUF files for tests.

// Each test program uses a part of it.
#![allow(dead_code)]

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A file of version 3.
pub struct GgufWriter {
    num_values: u64,
    values: Vec<u8>,
    /// Name, shape, ggml's number of the element type, data.
    tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
    alignment: usize,
}

impl GgufWriter {
    pub fn new() -> Self {
        Self { num_values: 0, values: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    /// A value of any type: the number of the type, and the bytes of the value.
    pub fn value(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.num_values += 1;
        self.values.extend(string(key));
        self.values.extend(kind.to_le_bytes());
        self.values.extend(bytes);
        self
    }

    /// A list of any type: the number of its values' type, their number, and their bytes.
    pub fn list(self, key: &str, kind: u32, len: usize, bytes: &[u8]) -> Self {
        let head = [kind.to_le_bytes().as_slice(), &(len as u64).to_le_bytes()].concat();
        self.value(key, ARRAY, &[&head, bytes].concat())
    }

    pub fn text(self, key: &str, text: &str) -> Self {
        self.value(key, STRING, &string(text))
    }

    pub fn integer(self, key: &str, integer: u32) -> Self {
        self.value(key, 4, &integer.to_le_bytes())
    }

    /// An integer of 16 bits.
    pub fn half(self, key: &str, integer: u16) -> Self {
        self.value(key, 2, &integer.to_le_bytes())
    }

    pub fn float(self, key: &str, float: f32) -> Self {
        self.value(key, 6, &float.to_le_bytes())
    }

    pub fn flag(self, key: &str, flag: bool) -> Self {
        self.value(key, 7, &[flag.into()])
    }

    pub fn texts(self, key: &str, texts: &[impl AsRef<str>]) -> Self {
        let bytes: Vec<u8> = texts.iter().flat_map(|text| string(text.as_ref())).collect();
        self.list(key, STRING, texts.len(), &bytes)
    }

    pub fn integers(self, key: &str, integers: &[i32]) -> Self {
        self.list(
            key,
            5,
            integers.len(),
            &integers.iter().flat_map(|integer| integer.to_le_bytes()).collect::<Vec<_>>(),
        )
    }

    pub fn floats(self, key: &str, floats: &[f32]) -> Self {
        self.list(key, 6, floats.len(), &floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Sets `general.alignment` and follows it.
    pub fn align(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.integer("general.alignment", alignment)
    }

    /// `shape` as in PyTorch.
    pub fn tensor(mut self, name: &str, shape: &[usize], kind: u32, data: &[u8]) -> Self {
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, data.to_vec()));
        self
    }

    pub fn finish(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend(self.num_values.to_le_bytes());
        file.extend(&self.values);
        let mut data = Vec::new();
        for (name, shape, kind, bytes) in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            file.extend(string(name));
            file.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|size| file.extend((*size as u64).to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(data);
        file
    }
}

fn string(text: &str) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat()
}
