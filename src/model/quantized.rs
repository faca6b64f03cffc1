//! Quantised safetensors checkpoints: compressed-tensors, GPTQ, AWQ and FP8.
//!
//! A *module* of such a checkpoint has several tensors in place of its `weight`: packed codes, scales, and perhaps zero
//! points and the group of each column. [`QuantModule::find`] reads them as one matrix, which a load converts, row by
//! row, to the nearest format that backends have. A module without them is plain. So the tensors say which modules
//! are quantised, and the lists of names in the configuration are not needed.

mod awq;
mod compressed;
mod fp8;
mod gptq;
mod module;
mod pieces;
pub mod scheme;

use crate::checkpoint::Checkpoint;
pub use module::QuantModule;
use pagetide_backend::{DType, WeightFormat};
use pagetide_base::error::StartError;
use pieces::ModulePieces;
use scheme::QuantScheme;
use std::collections::BTreeMap;
use std::fmt;

impl<'c> QuantModule<'c> {
    /// The matrix `[rows, cols]` of the module `name`; `None` if the module is plain. What no format can hold becomes
    /// `dtype`.
    ///
    /// Fails if a tensor of the module is missing, or does not fit the shape and the scheme.
    pub fn find(
        checkpoint: &'c Checkpoint,
        scheme: &QuantScheme,
        name: &str,
        [rows, cols]: [usize; 2],
        dtype: DType,
    ) -> Result<Option<Self>, StartError> {
        let pieces = ModulePieces { checkpoint, name, rows, cols };
        let module = match scheme {
            QuantScheme::Gptq(gptq) => gptq::find(&pieces, gptq)?,
            QuantScheme::Awq { group_size } => awq::find(&pieces, *group_size)?,
            QuantScheme::Fp8 { block } => fp8::find(&pieces, *block)?,
            QuantScheme::CompressedTensors(groups) => compressed::find(&pieces, groups)?,
        };
        Ok(module.map(|module| module.held_in(dtype)))
    }
}

/// Whether a tensor beside a quantised weight does not change what is computed. These are scales of activations and of
/// KV, which are not quantised as the checkpoint says, and biases of zeros, which AutoGPTQ writes where there are none.
pub(crate) fn changes_nothing(checkpoint: &Checkpoint, name: &str) -> bool {
    const OF_ACTIVATIONS: [&str; 6] =
        [".input_scale", ".input_zero_point", ".output_scale", ".q_scale", ".k_scale", ".v_scale"];
    OF_ACTIVATIONS.iter().any(|ending| name.ends_with(ending))
        || (name.ends_with(".bias")
            && checkpoint.stored(name).is_some_and(|bias| bias.bytes.iter().all(|byte| *byte == 0)))
}

/// What a load converts, for logs and reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversions {
    /// The number of matrices, by what they were and what they are.
    counts: BTreeMap<(String, &'static str), usize>,
    num_weights: u64,
    bytes: u64,
}

impl Conversions {
    /// Counts a matrix `[rows, cols]` that was stored as `from`, for people, and is held in `to`.
    pub(crate) fn add(&mut self, from: String, to: WeightFormat, [rows, cols]: [usize; 2]) {
        *self.counts.entry((from, to.name())).or_insert(0) += 1;
        self.num_weights += (rows * cols) as u64;
        self.bytes += to.row_bytes(cols).map_or(0, |row_bytes| row_bytes * rows) as u64;
    }

    /// Whether nothing is converted.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Bytes of a model whose other weights have type `dtype`. All weights would take `plain_bytes` in that type.
    pub fn weights_bytes(&self, plain_bytes: u64, dtype: DType) -> u64 {
        plain_bytes.saturating_sub(self.num_weights * dtype.size_bytes() as u64) + self.bytes
    }
}

impl fmt::Display for Conversions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, ((from, to), count)) in self.counts.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{from} to {to} ({count} {})", if *count == 1 { "matrix" } else { "matrices" })?;
        }
        Ok(())
    }
}
