//! The tensors of a quantised module.

use super::scheme::ScaleSpan;
use crate::checkpoint::{Checkpoint, StoredTensor};
use pagetide_backend::HostTensor;
use pagetide_base::error::StartError;

/// The tensors of a module whose matrix is `[rows, cols]`.
pub(super) struct ModulePieces<'c, 'n> {
    pub checkpoint: &'c Checkpoint,
    pub name: &'n str,
    pub rows: usize,
    pub cols: usize,
}

impl<'c> ModulePieces<'c, '_> {
    pub fn name(&self, piece: &str) -> String {
        format!("{}.{piece}", self.name)
    }

    pub fn get(&self, piece: &str) -> Option<StoredTensor<'c>> {
        self.checkpoint.stored(&self.name(piece))
    }

    /// The shape of the matrix.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    pub fn error(&self, piece: &str, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("the tensor {}: {problem}", self.name(piece)))
    }

    /// A piece of this type and shape.
    pub fn need(&self, piece: &str, type_name: &str, shape: &[usize]) -> Result<StoredTensor<'c>, StartError> {
        let stored = self.get(piece).ok_or_else(|| self.error(piece, format!("missing, of shape {shape:?}")))?;
        if stored.type_name != type_name {
            return Err(self.error(piece, format!("is of type {}, not {type_name}", stored.type_name)));
        }
        if stored.shape != shape {
            let [rows, cols] = self.shape();
            return Err(self.error(
                piece,
                format!(
                    "has shape {:?}, but a matrix [{rows}, {cols}] with this quantization_config needs {shape:?}",
                    stored.shape
                ),
            ));
        }
        Ok(stored)
    }

    /// The bytes of [`ModulePieces::need`]; `None` if there is no such piece.
    pub fn optional(&self, piece: &str, type_name: &str, shape: &[usize]) -> Result<Option<&'c [u8]>, StartError> {
        if self.get(piece).is_none() {
            return Ok(None);
        }
        self.need(piece, type_name, shape).map(|stored| Some(stored.bytes))
    }

    /// Words of 32 bits: `[outer, inner]`, where `inner` numbers of `bits` are packed.
    pub fn packed(
        &self,
        piece: &str,
        bits: u32,
        [outer, inner]: [usize; 2],
        packs_first: bool,
    ) -> Result<&'c [u8], StartError> {
        let words = inner.div_ceil(32 / bits as usize);
        let shape = if packs_first { [words, outer] } else { [outer, words] };
        Ok(self.need(piece, "I32", &shape)?.bytes)
    }

    /// The scales, as they are stored: a number for each span of a matrix, perhaps without dimensions that are 1.
    pub fn scales(&self, piece: &str, span: ScaleSpan) -> Result<HostTensor<'c>, StartError> {
        let [span_rows, span_cols] = span.sizes(self.shape());
        let (lines, groups) = (self.rows.div_ceil(span_rows), self.cols.div_ceil(span_cols));
        let stored =
            self.get(piece).ok_or_else(|| self.error(piece, format!("missing, of shape [{lines}, {groups}]")))?;
        let is_short = match (lines, groups) {
            (1, 1) => stored.shape.is_empty() || stored.shape == [1],
            (_, 1) => stored.shape == [lines],
            _ => false,
        };
        let shape = if is_short { stored.shape.to_vec() } else { vec![lines, groups] };
        self.checkpoint.tensor(&self.name(piece), &shape)
    }
}
