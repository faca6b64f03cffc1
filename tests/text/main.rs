//! Tokenizers, detokenizing and chat templates against transformers. The data is made by `scripts/make_*_goldens.py`.

#[path = "../common/gguf.rs"]
mod gguf_files;

mod bounds;
mod gguf;
mod sandbox;
mod templates;
mod tokenizers;

use std::path::{Path, PathBuf};

fn data(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(folder)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
