//! Batch-invariant products: a row of the result has the same bits whatever number of rows is computed.
//!
//! An algorithm that sums in one piece computes a row in the same way for any number of rows, as far as is known. That
//! is proven: when a product is first done, a few different rows are multiplied in batches of every size that steps
//! have, and the bits of the first, middle and last rows are compared. A size for which no algorithm has these bits is
//! computed in pieces of sizes that have them.

use super::super::device::{DeviceError, DevicePtr, DeviceResult, Matmul};
use super::super::graphs::buckets;
use super::matmul::{Matmuls, Operands, PlannedProduct};
use super::scratch::{self, PinnedScratch, ScratchMemory};
use crate::DType;
use cudarc::cublaslt::sys as lt;
use std::collections::BTreeSet;

/// Different rows of the operand. They are repeated if a batch has more.
const PATTERN_ROWS: usize = 64;
/// The number of rows that algorithms are asked for first.
const TYPICAL_ROWS: usize = 128;
/// Alignment of a product's operands, in bytes.
const ALIGNMENT: u64 = 16;

impl Matmuls {
    /// Enqueues a batch-invariant product. If `may_measure`, numbers of rows up to `m` that are new are tried first.
    ///
    /// # Safety
    /// As [`Matmuls::enqueue`].
    pub(super) unsafe fn enqueue_invariant(
        &self,
        product: &mut PlannedProduct,
        matmul: Matmul,
        operands: Operands,
        may_measure: bool,
    ) -> DeviceResult<()> {
        let Matmul { m, n, k, dtype, out, .. } = matmul;
        if may_measure && !product.invariant.tried.contains(&m) {
            // SAFETY: the caller's promise.
            unsafe { self.prove(product, matmul, operands)? };
        }
        let Some(pieces) = product.invariant.pieces(m) else {
            let why = format!(
                "no algorithm of cuBLASLt gives a row the same bits in every number of rows up to {m}: set \
                 device.batch_invariant = false"
            );
            return Err(DeviceError::Other(why));
        };
        let [mut x, w, bias, mut to] = operands;
        for rows in pieces {
            let algorithm = product.invariant.proven[&rows];
            if !x.0.is_multiple_of(ALIGNMENT) || !to.0.is_multiple_of(ALIGNMENT) {
                let why = format!("{m} rows cannot be computed in pieces: set device.batch_invariant = false");
                return Err(DeviceError::Other(why));
            }
            product.set_rows(self.context(), rows)?;
            // SAFETY: the caller's promise; these are rows of its operands.
            let status = unsafe { self.launch(product, [x, w, bias, to], &algorithm) };
            self.context().check_cublas(status, "cublasLtMatmul")?;
            (x, to) = (x + rows * k * dtype.size_bytes(), to + rows * n * out.size_bytes());
        }
        Ok(())
    }

    /// Tries every number of rows that steps of up to `m` rows have. Writes to the result's memory.
    ///
    /// # Safety
    /// As [`Matmuls::enqueue`].
    unsafe fn prove(&self, product: &mut PlannedProduct, matmul: Matmul, operands: Operands) -> DeviceResult<()> {
        let Matmul { m, n, k, dtype, out, .. } = matmul;
        let context = self.context();
        let row_bytes = k * dtype.size_bytes();
        let x = ScratchMemory::new(context, m.max(PATTERN_ROWS) * row_bytes)?;
        let one_row = ScratchMemory::new(context, row_bytes)?;
        let mut host = PinnedScratch::new(context, PATTERN_ROWS * row_bytes.max(n * out.size_bytes()))?;
        let pattern = pattern(k, dtype);
        host.bytes_mut()[..pattern.len()].copy_from_slice(&pattern);
        // SAFETY: the memory is ours, and the stream is waited for before the host's is written again.
        unsafe {
            scratch::copy(context, x.ptr(), host.ptr(), pattern.len())?;
            scratch::wait(context)?;
            for first in (PATTERN_ROWS..m).step_by(PATTERN_ROWS) {
                let bytes = (m - first).min(PATTERN_ROWS) * row_bytes;
                scratch::copy(context, x.ptr() + first * row_bytes, x.ptr(), bytes)?;
            }
        }
        let rows_tried = buckets(m);
        let rows_tried: Vec<usize> =
            rows_tried.into_iter().filter(|rows| !product.invariant.tried.contains(rows)).collect();
        let operands = [x.ptr(), operands[1], operands[2], operands[3]];
        let mut trial = Trial { matmuls: self, product, operands, host, out_row_bytes: n * out.size_bytes() };

        let reference = match trial.product.invariant.reference {
            Some(reference) => reference,
            None => trial.choose_reference(&rows_tried)?,
        };
        // The bits of each row of the pattern, alone: a step's smallest number of rows.
        let mut expected = Vec::new();
        for row in 0..PATTERN_ROWS {
            // In a place of its own, because a row may begin at an address that is not aligned.
            // SAFETY: the caller's promise; the pattern's rows are there.
            unsafe {
                scratch::copy(context, one_row.ptr(), x.ptr() + row * row_bytes, row_bytes)?;
                expected.push(trial.one_row(&reference, one_row.ptr())?);
            }
        }
        let mut in_pieces = Vec::new();
        for rows in rows_tried {
            trial.product.set_rows(context, rows)?;
            let others = self.candidates(trial.product).unwrap_or_default();
            let mut proven = None;
            for algorithm in std::iter::once(reference).chain(others) {
                // SAFETY: the caller's promise.
                if proven.is_none() && unsafe { trial.is_equal(&algorithm, rows, &expected)? } {
                    proven = Some(algorithm);
                }
            }
            trial.product.invariant.tried.insert(rows);
            match proven {
                Some(algorithm) => drop(trial.product.invariant.proven.insert(rows, algorithm)),
                None => in_pieces.push(rows),
            }
        }
        trial.product.invariant.reference = Some(reference);
        if !in_pieces.is_empty() {
            tracing::warn!(
                "a batch-invariant product [{n}, {k}] of {in_pieces:?} rows is computed in pieces, because no algorithm \
                 of cuBLASLt gives its rows the bits that they have in other numbers of rows"
            );
        }
        Ok(())
    }
}

/// Products of the pattern.
struct Trial<'a> {
    matmuls: &'a Matmuls,
    product: &'a mut PlannedProduct,
    operands: Operands,
    /// For rows of the result.
    host: PinnedScratch<'a>,
    out_row_bytes: usize,
}

impl Trial<'_> {
    /// The candidate that supports the most of these numbers of rows, the heuristic's first of equals.
    fn choose_reference(&mut self, all_rows: &[usize]) -> DeviceResult<lt::cublasLtMatmulAlgo_t> {
        let context = self.matmuls.context();
        self.product.set_rows(context, TYPICAL_ROWS)?;
        let mut best: Option<(usize, lt::cublasLtMatmulAlgo_t)> = None;
        for algorithm in self.matmuls.candidates(self.product)? {
            let mut supported = 0;
            for rows in all_rows {
                self.product.set_rows(context, *rows)?;
                supported += usize::from(self.matmuls.can_run(self.product, &algorithm));
            }
            // A row's bits are known from the row alone.
            self.product.set_rows(context, 1)?;
            let is_better = best.is_none_or(|(most, _)| supported > most);
            if is_better && self.matmuls.can_run(self.product, &algorithm) {
                best = Some((supported, algorithm));
            }
        }
        let why = "no algorithm of cuBLASLt that sums in one piece takes one row: set device.batch_invariant = false";
        best.map(|(_, algorithm)| algorithm).ok_or_else(|| DeviceError::Other(why.into()))
    }

    /// The bits of a row that is computed alone.
    ///
    /// # Safety
    /// As [`Matmuls::enqueue`].
    unsafe fn one_row(&mut self, algorithm: &lt::cublasLtMatmulAlgo_t, x: DevicePtr) -> DeviceResult<Vec<u8>> {
        let [_, w, bias, out] = self.operands;
        self.product.set_rows(self.matmuls.context(), 1)?;
        // SAFETY: the caller's promise.
        if unsafe { !self.run([x, w, bias, out], algorithm)? } {
            return Err(DeviceError::Other("cuBLASLt does not do one row: set device.batch_invariant = false".into()));
        }
        // SAFETY: the result has a row.
        unsafe { self.download(0, 1) }.map(<[u8]>::to_vec)
    }

    /// Whether an algorithm gives the expected bits in a batch of so many rows.
    ///
    /// # Safety
    /// As [`Matmuls::enqueue`].
    unsafe fn is_equal(
        &mut self,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        rows: usize,
        expected: &[Vec<u8>],
    ) -> DeviceResult<bool> {
        self.product.set_rows(self.matmuls.context(), rows)?;
        // SAFETY: the caller's promise.
        if !self.matmuls.can_run(self.product, algorithm) || unsafe { !self.run(self.operands, algorithm)? } {
            return Ok(false);
        }
        let len = rows.min(PATTERN_ROWS);
        let parts = BTreeSet::from([0, (rows - len) / 2, rows - len]);
        for first in parts {
            // SAFETY: the result has these rows.
            let row_bytes = self.out_row_bytes;
            let mut found = unsafe { self.download(first, len)? }.chunks_exact(row_bytes).enumerate();
            if !found.all(|(i, bits)| bits == expected[(first + i) % PATTERN_ROWS]) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enqueues a product for the current number of rows. Returns false if the algorithm refuses it.
    ///
    /// # Safety
    /// As [`Matmuls::enqueue`].
    unsafe fn run(&self, operands: Operands, algorithm: &lt::cublasLtMatmulAlgo_t) -> DeviceResult<bool> {
        // SAFETY: the caller's promise.
        let status = unsafe { self.matmuls.launch(self.product, operands, algorithm) };
        match self.matmuls.context().check_cublas(status, "cublasLtMatmul") {
            Ok(()) => Ok(true),
            Err(DeviceError::Lost(why)) => Err(DeviceError::Lost(why)),
            Err(_) => Ok(false),
        }
    }

    /// The bits of rows of the result.
    ///
    /// # Safety
    /// The result has these rows.
    unsafe fn download(&mut self, first: usize, len: usize) -> DeviceResult<&[u8]> {
        let context = self.matmuls.context();
        let (from, bytes) = (self.operands[3] + first * self.out_row_bytes, len * self.out_row_bytes);
        // SAFETY: the copy is done before the memory is read.
        unsafe { scratch::copy(context, self.host.ptr(), from, bytes)? };
        scratch::wait(context)?;
        Ok(&self.host.bytes_mut()[..bytes])
    }
}

/// `[PATTERN_ROWS, k]` numbers between -1 and 1 that are sums of many powers of two, so that the order of adding shows.
fn pattern(k: usize, dtype: DType) -> Vec<u8> {
    let number = |i: usize| {
        // The finalizer of SplitMix64.
        let mut z = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let numbers: Vec<f32> = (1..=PATTERN_ROWS * k).map(number).collect();
    dtype.encode(&numbers)
}
