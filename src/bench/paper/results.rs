//! What the parts have found. A file keeps each finished piece, so that a run that was cut goes on where it was.

use super::ablations::{BlockSizeRow, LinkRow, SharingRow};
use super::curves::Curves;
use super::kernels::KernelRow;
use super::measured::{MeasuredRun, MeasuredSetup};
use super::shared::SharedResult;
use super::systems::System;
use super::transformers::GeneratedBatches;
use crate::memory::layout::MemoryLayout;
use crate::memory::swap::SwapRow;
use crate::memory::waste::Waste;
use pagetide_base::error::StartError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything that a report shows. What was not run is empty.
#[derive(Clone, Debug, Default)]
pub struct PaperResults {
    pub curves: Vec<Curves>,
    pub layouts: Vec<MemoryLayout>,
    /// Data set, and its systems.
    pub waste: Vec<(String, Vec<Waste>)>,
    /// Moments of a run on OPT-13B: see `LoadResult::over_time`.
    pub over_time: Vec<(System, Vec<[f64; 4]>)>,
    pub shared: Option<SharedResult>,
    pub block_sizes: Vec<BlockSizeRow>,
    pub links: Vec<LinkRow>,
    pub sharing: Vec<SharingRow>,
    pub measured: Option<MeasuredResults>,
}

/// The configured model on this machine.
#[derive(Clone, Debug)]
pub struct MeasuredResults {
    pub setup: MeasuredSetup,
    pub runs: Vec<MeasuredRun>,
    pub block_sizes: Vec<MeasuredRun>,
    pub kernels: Vec<KernelRow>,
    pub swap: Vec<SwapRow>,
    pub transformers: Vec<GeneratedBatches>,
}

impl MeasuredResults {
    /// Of the runs in which all requests are there from the start.
    pub fn at_once(&self, system: System) -> Option<&MeasuredRun> {
        self.runs.iter().find(|run| run.system == system && run.rate.is_none())
    }
}

impl PaperResults {
    pub fn curves_of(&self, scenario: &str) -> Option<&Curves> {
        self.curves.iter().find(|curves| curves.scenario == scenario)
    }
}

/// The file of finished pieces.
pub struct PieceFile {
    path: PathBuf,
    written: WrittenPieces,
}

#[derive(Serialize, Deserialize)]
struct WrittenPieces {
    version: String,
    /// By the piece's name, which says all that it depends on.
    pieces: BTreeMap<String, Value>,
}

impl PieceFile {
    /// Goes on with the pieces of `path`. Begins anew if `fresh`, if there are none, or if another version wrote them.
    pub fn open(path: &Path, fresh: bool) -> Result<Self, StartError> {
        let none = || WrittenPieces { version: env!("CARGO_PKG_VERSION").into(), pieces: BTreeMap::new() };
        let written = match std::fs::read_to_string(path) {
            Ok(text) if !fresh => serde_json::from_str(&text).map_err(|error| {
                StartError::new(format!(
                    "--out: {} is not a file of this command ({error}): remove it, or give --fresh",
                    path.display()
                ))
            })?,
            _ => none(),
        };
        let is_ours = written.version == env!("CARGO_PKG_VERSION");
        Ok(Self { path: path.to_owned(), written: if is_ours { written } else { none() } })
    }

    /// The piece of this name: as it was found before, or computed now and kept.
    pub fn piece<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        compute: impl FnOnce() -> Result<T, StartError>,
    ) -> Result<T, StartError> {
        let known = self.written.pieces.get(name).cloned();
        if let Some(piece) = known.and_then(|piece| serde_json::from_value(piece).ok()) {
            tracing::info!("paper: {name}: from an earlier run");
            return Ok(piece);
        }
        tracing::info!("paper: {name}");
        let piece = compute()?;
        let value = serde_json::to_value(&piece).expect("what is measured can be written");
        self.written.pieces.insert(name.to_owned(), value);
        let text = serde_json::to_string(&self.written).expect("a Value can be written") + "\n";
        // A run that is cut leaves the old file or the new one.
        let partial = self.path.with_extension("partial");
        let wrong = |error| StartError::new(format!("--out {}: {error}", self.path.display()));
        std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &self.path)).map_err(wrong)?;
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_piece_is_not_computed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pieces.json");
        let mut file = PieceFile::open(&path, false).unwrap();
        assert_eq!(file.piece("a", || Ok(vec![1.5, 2.0])).unwrap(), [1.5, 2.0]);
        let failed: Result<f64, _> = file.piece("b", || Err(StartError::new("cut")));
        assert!(failed.is_err());
        let mut again = PieceFile::open(&path, false).unwrap();
        assert_eq!(again.piece::<Vec<f64>>("a", || panic!("it is known")).unwrap(), [1.5, 2.0]);
        assert_eq!(again.piece("b", || Ok(3.0)).unwrap(), 3.0);
        let mut fresh = PieceFile::open(&path, true).unwrap();
        assert_eq!(fresh.piece("a", || Ok(vec![9.0])).unwrap(), [9.0]);
        std::fs::write(&path, "{}").unwrap();
        assert!(PieceFile::open(&path, false).is_err());
    }
}
