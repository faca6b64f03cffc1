//! The operations of the CPU backend.

use super::{CpuBackend, norm_params};
use crate::cpu::attention::AttentionCall;
use crate::cpu::copier::Copier;
use crate::cpu::elementwise::CpuRopeTable;
use crate::cpu::experts::CpuExpertsWorkspace;
use crate::cpu::gemm::{Linear, Operand, Sink};
use crate::cpu::heads::NormHeads;
use crate::cpu::memory::{CpuKvPools, Shared};
use crate::cpu::pack::{ColumnOrder, CpuMatrix};
use crate::cpu::rows::for_rows;
use crate::cpu::sampling::CpuSampling;
use crate::cpu::tensors::{CpuTensor, CpuVector, Values};
use crate::cpu::{attention, elementwise, experts, gemm, heads, simd};
use crate::{
    Activation, AttentionShape, Backend, Batch, DType, Experts, ExpertsShape, FinishedCopy, Heads, HostTensor,
    KvLayout, LogitsRequest, LogitsResult, NO_SOURCE, Norm, Rope, TensorRole,
};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use std::ops::Range;

impl Backend for CpuBackend {
    type Matrix = CpuMatrix;
    type Vector = CpuVector;
    type Tensor = CpuTensor;
    type RopeTable = CpuRopeTable;
    type Matrices = Vec<CpuMatrix>;
    type ExpertsWorkspace = CpuExpertsWorkspace;

    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<CpuMatrix, StartError> {
        Ok(self.pack(1, parts, dtype, ColumnOrder::Plain)?.remove(0))
    }

    fn gate_up_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<CpuMatrix, StartError> {
        Ok(self.pack(1, parts, dtype, ColumnOrder::GateUp)?.remove(0))
    }

    fn random_gate_up_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<CpuMatrix, StartError> {
        let mut matrices = CpuMatrix::random((1, n, k), dtype, ColumnOrder::GateUp, seed, self.on())?;
        Ok(matrices.remove(0))
    }

    fn random_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<CpuMatrix, StartError> {
        let mut matrices = self.random_matrices(1, n, k, dtype, seed)?;
        Ok(matrices.remove(0))
    }

    fn matrices(&self, count: usize, parts: &[HostTensor<'_>], dtype: DType) -> Result<Vec<CpuMatrix>, StartError> {
        self.pack(count, parts, dtype, ColumnOrder::Plain)
    }

    fn random_matrices(
        &self,
        count: usize,
        n: usize,
        k: usize,
        dtype: DType,
        seed: u64,
    ) -> Result<Vec<CpuMatrix>, StartError> {
        CpuMatrix::random((count, n, k), dtype, ColumnOrder::Plain, seed, self.on())
    }

    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<CpuVector, StartError> {
        parts.iter().try_for_each(HostTensor::check_size)?;
        Ok(CpuVector(parts.iter().flat_map(HostTensor::to_f32).collect()))
    }

    fn tensor(&self, max_rows: usize, cols: usize, role: TensorRole) -> Result<CpuTensor, StartError> {
        let numbers = |rows: usize| self.arena.zeroed(rows.saturating_mul(cols), "activations");
        let (data, max_rows) = match role {
            TensorRole::Residual | TensorRole::Activation => (Values::F32(numbers(max_rows)?), max_rows),
            TensorRole::Operand(dtype) => {
                (Values::Operand(Operand::new(&self.arena, self.isa, max_rows, cols, dtype)?), max_rows)
            }
            TensorRole::Unfused => (Values::F32(numbers(0)?), 0),
        };
        Ok(CpuTensor { data, max_rows, cols })
    }

    fn rope_table(&self, rope: &Rope) -> Result<CpuRopeTable, StartError> {
        CpuRopeTable::new(rope, &self.team)
    }

    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<CpuExpertsWorkspace, StartError> {
        CpuExpertsWorkspace::new(max_rows, shape)
    }

    fn allocate_kv(
        &mut self,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<(), StartError> {
        // The old pools are freed first: there may not be room for both.
        self.copier = None;
        self.kv = None;
        // The batch was checked against the old pools.
        self.batch = Batch::default();
        self.sampling = CpuSampling::new(self.team.num_members());
        let grouped = attention::is_grouped(&layout);
        self.kv = Some(CpuKvPools::new(layout, grouped, num_device_blocks, num_swap_blocks)?);
        self.copier = Some(Copier::start(num_device_blocks)?);
        Ok(())
    }

    fn begin(&mut self, batch: &Batch) {
        // Field by field, to reuse the memory.
        self.batch.tokens.clone_from(&batch.tokens);
        self.batch.token_sources.clone_from(&batch.token_sources);
        self.batch.positions.clone_from(&batch.positions);
        self.batch.slots.clone_from(&batch.slots);
        self.batch.seqs.clone_from(&batch.seqs);
        self.batch.block_tables.clone_from(&batch.block_tables);
        self.batch.logit_rows.clone_from(&batch.logit_rows);
        let Batch { tokens, token_sources, positions, slots, seqs, block_tables, logit_rows, hidden_rows: _ } = batch;
        let rows = tokens.len();
        let lengths = [token_sources.len(), positions.len(), slots.len()];
        assert!(lengths.iter().all(|len| *len == rows), "a batch's vectors differ in length");
        assert!(
            logit_rows.iter().all(|row| (*row as usize) < rows),
            "logits are wanted of a row that is not in the batch"
        );
        for (token, source) in self.batch.tokens.iter_mut().zip(token_sources) {
            if *source != NO_SOURCE {
                *token = self.sampling.token(*source);
            }
        }
        let Some(kv) = &self.kv else { return };
        let num_blocks = kv.num_device_blocks;
        let num_slots = num_blocks * kv.layout.block_size;
        assert!(slots.iter().all(|slot| (*slot as usize) < num_slots), "a slot is not in the pool of {num_slots}");
        assert!(block_tables.iter().all(|block| (*block as usize) < num_blocks), "a block is not in the pool");
        for seq in seqs {
            let num_tokens = seq.num_computed + seq.num_rows;
            assert!(seq.first_row + seq.num_rows <= rows, "a sequence's rows are not in the batch: {seq:?}");
            assert!(seq.first_block + seq.num_blocks <= block_tables.len(), "a block table is cut off: {seq:?}");
            assert!(seq.num_blocks * kv.layout.block_size >= num_tokens, "a block table is too short: {seq:?}");
        }
        let block_size = kv.layout.block_size;
        let copier = self.copier();
        copier.wait_to_read(block_tables.iter().map(|block| *block as usize));
        copier.wait_to_write(slots.iter().map(|slot| *slot as usize / block_size));
    }

    fn embed(&mut self, table: &CpuMatrix, scale: f32, out: &mut CpuTensor) {
        assert_eq!(table.k, out.cols, "the embedding's width");
        self.for_rows(out, |row, out| table.read_row(self.batch.tokens[row] as usize, |i, x| out[i] = x * scale));
    }

    fn add_position_embedding(&mut self, table: &CpuMatrix, offset: usize, out: &mut CpuTensor) {
        assert_eq!(table.k, out.cols, "the position embedding's width");
        self.for_rows(out, |row, out| {
            table.read_row(self.batch.positions[row] as usize + offset, |i, x| out[i] += x);
        });
    }

    fn norm(&mut self, x: &CpuTensor, norm: &Norm<CpuVector>, out: &mut CpuTensor) {
        assert_eq!(x.cols, out.cols, "a norm's output width");
        let (norm, x, cols) = (norm_params(norm, x.cols), x.rows(self.num_rows()), x.cols);
        let isa = self.isa;
        self.for_new_rows(out, |row, out| norm.apply(isa, &x[row * cols..][..cols], out));
    }

    fn add_norm(&mut self, x: &mut CpuTensor, delta: &CpuTensor, norm: &Norm<CpuVector>, out: &mut CpuTensor) {
        assert!(x.cols == out.cols && x.cols == delta.cols, "a residual's width");
        let (norm, rows, cols) = (norm_params(norm, x.cols), self.num_rows(), x.cols);
        let delta = delta.rows(rows);
        let x = Shared::new(x.rows_mut(rows).as_mut_ptr());
        let isa = self.isa;
        self.for_new_rows(out, |row, out| {
            // SAFETY: `x` has this row, and only this task touches it.
            let x = unsafe { std::slice::from_raw_parts_mut(x.get().add(row * cols), cols) };
            elementwise::add(isa, x, &delta[row * cols..][..cols]);
            norm.apply(isa, x, out);
        });
    }

    fn add(&mut self, x: &mut CpuTensor, delta: &CpuTensor) {
        assert_eq!(x.cols, delta.cols, "a residual's width");
        let (delta, cols) = (delta.rows(self.num_rows()), x.cols);
        self.for_rows(x, |row, x| elementwise::add(self.isa, x, &delta[row * cols..][..cols]));
    }

    fn linear(&mut self, x: &CpuTensor, w: &CpuMatrix, bias: Option<&CpuVector>, out: &mut CpuTensor) {
        assert!(x.cols == w.k && out.cols == w.n(), "a linear layer's widths");
        let rows = self.num_rows();
        self.product(x, w, bias, Sink::Store(out.rows_mut(rows)));
    }

    fn qkv_linear(
        &mut self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&CpuVector>,
        heads: &Heads<'_, Self>,
        qkv: &mut CpuTensor,
    ) {
        let Heads { shape, norms, rope, layer } = *heads;
        let head_dim = shape.head_dim;
        if !head_dim.is_multiple_of(simd::LANES) {
            // A head ends within a panel.
            self.linear(x, w, bias, qkv);
            if let Some([q, k]) = norms {
                self.qk_norm(qkv, shape, q, k);
            }
            return self.rope_and_write_kv(qkv, shape, rope, layer);
        }
        assert!(x.cols == w.k && qkv.cols == w.n(), "a linear layer's widths");
        let (isa, rows, cols) = (self.isa, self.num_rows(), qkv.cols);
        let norms = norms.map(|norms| norms.map(|norm| norm_params(norm, head_dim)));
        let kv = self.kv.as_mut().expect("the KV pools are allocated before they are used");
        let heads = heads::HeadFinish::new(&self.batch, kv, shape, norms, rope, layer, cols);
        let out = qkv.rows_mut(rows);
        let at = Shared::new(out.as_mut_ptr());
        let finish = |rows: Range<usize>, columns: Range<usize>| {
            // SAFETY: the product passes each element to one call of this, in whole heads, and does not write it again.
            unsafe { heads.finish(isa, at.get(), rows, columns) };
        };
        let layer = Linear { x: x.source(rows), rows, w, bias: bias.map(CpuVector::as_slice) };
        let sink = Sink::Finish { out, per_call: head_dim, finish: &finish };
        gemm::linear(isa, &self.team, &mut self.products, layer, sink);
    }

    fn gated_linear(
        &mut self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&CpuVector>,
        kind: Activation,
        _: &mut CpuTensor,
        out: &mut CpuTensor,
    ) {
        assert!(x.cols == w.k && 2 * out.cols == w.n(), "a gated layer's widths");
        let Values::Operand(out) = &mut out.data else { panic!("a gated product's output is an operand") };
        self.product(x, w, bias, Sink::Gated { kind, out });
    }

    fn residual_linear(
        &mut self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&CpuVector>,
        stream: &mut CpuTensor,
        _: &mut CpuTensor,
    ) -> bool {
        assert!(x.cols == w.k && stream.cols == w.n(), "a linear layer's widths");
        let rows = self.num_rows();
        self.product(x, w, bias, Sink::Add(stream.rows_mut(rows)));
        false
    }

    fn qk_norm(&mut self, qkv: &mut CpuTensor, shape: &AttentionShape, q: &Norm<CpuVector>, k: &Norm<CpuVector>) {
        assert_eq!(qkv.cols, shape.qkv_cols(), "the QKV width");
        let norms = [q, k].map(|norm| norm_params(norm, shape.head_dim));
        let isa = self.isa;
        self.for_rows(qkv, |_, row| isa.run(NormHeads { row, shape, norms }));
    }

    fn rope_and_write_kv(
        &mut self,
        qkv: &mut CpuTensor,
        shape: &AttentionShape,
        rope: Option<&CpuRopeTable>,
        layer: usize,
    ) {
        let (isa, cols) = (self.isa, qkv.cols);
        let kv = self.kv.as_mut().expect("the KV pools are allocated before they are used");
        let heads = heads::HeadFinish::new(&self.batch, kv, shape, None, rope, layer, cols);
        let qkv = qkv.rows_mut(self.batch.num_rows());
        let at = Shared::new(qkv.as_mut_ptr());
        for_rows(&self.team, cols, qkv, |row, _| {
            // SAFETY: each row belongs to one task.
            unsafe { heads.finish(isa, at.get(), row..row + 1, 0..cols) };
        });
    }

    fn attention(&mut self, qkv: &CpuTensor, shape: &AttentionShape, layer: usize, out: &mut CpuTensor) {
        let rows = self.num_rows();
        let kv = self.kv.as_ref().expect("the KV pools are allocated before they are used");
        kv.check_shape(shape, layer, qkv.cols);
        assert_eq!(out.cols, shape.num_heads * shape.head_dim, "the attention output's width");
        assert!(shape.window != Some(0), "an attention window of 0 tokens");
        let call = AttentionCall {
            batch: &self.batch,
            kv,
            layer,
            shape: *shape,
            qkv: qkv.rows(rows),
            out: Shared::new(out.rows_mut(rows).as_mut_ptr()),
        };
        self.attention.run(self.isa, &self.team, &call);
    }

    fn gated_activation(&mut self, gate_up: &CpuTensor, kind: Activation, out: &mut CpuTensor) {
        assert_eq!(gate_up.cols, 2 * out.cols, "a gated activation's width");
        let (gate_up, cols) = (gate_up.rows(self.num_rows()), gate_up.cols);
        self.for_rows(out, |row, out| {
            elementwise::gated_activation(self.isa, kind, &gate_up[row * cols..][..cols], out);
        });
    }

    fn activation(&mut self, x: &mut CpuTensor, kind: Activation) {
        self.for_rows(x, |_, x| elementwise::activation(self.isa, kind, x));
    }

    fn mix_experts(
        &mut self,
        x: &CpuTensor,
        experts: &Experts<CpuMatrix, Vec<CpuMatrix>>,
        shape: &ExpertsShape,
        work: &mut CpuExpertsWorkspace,
        out: &mut CpuTensor,
    ) {
        assert!(x.cols == shape.hidden_size && out.cols == x.cols, "the experts' width");
        let rows = self.num_rows();
        let mut runner = experts::Runner { isa: self.isa, team: &self.team, products: &mut self.products };
        runner.mix(x.rows(rows), experts, shape, work, out.rows_mut(rows));
    }

    fn add_gated(&mut self, x: &CpuTensor, gate: &CpuVector, from: &CpuTensor, out: &mut CpuTensor) {
        assert_eq!(from.cols, out.cols, "a shared expert's width");
        let (rows, width, cols) = (self.num_rows(), x.cols, from.cols);
        let (x, from) = (x.rows(rows), from.rows(rows));
        self.for_rows(out, |row, out| {
            let (x, from) = (&x[row * width..][..width], &from[row * cols..][..cols]);
            elementwise::add_gated(self.isa, x, gate.as_slice(), from, out);
        });
    }

    fn gather_rows(&mut self, x: &CpuTensor, first: usize, num_rows: usize, out: &mut CpuTensor) {
        assert_eq!(x.cols, out.cols, "the gathered rows' width");
        let (from, cols) = (x.rows(self.num_rows()), x.cols);
        let rows = &self.batch.logit_rows[first..first + num_rows];
        for (row, out) in rows.iter().zip(out.rows_mut(num_rows).chunks_exact_mut(cols.max(1))) {
            out.copy_from_slice(&from[*row as usize * cols..][..cols]);
        }
    }

    fn logits(&mut self, x: &CpuTensor, num_rows: usize, w: &CpuMatrix, bias: Option<&CpuVector>) {
        assert_eq!(x.cols, w.k, "the vocabulary product's width");
        self.vocab_size = w.n();
        self.logits.resize(num_rows * w.n(), 0.0);
        let layer = Linear { x: x.source(num_rows), rows: num_rows, w, bias: bias.map(CpuVector::as_slice) };
        gemm::linear(self.isa, &self.team, &mut self.products, layer, Sink::Store(&mut self.logits));
    }

    fn cap_logits(&mut self, cap: f32) {
        for_rows(&self.team, self.vocab_size, &mut self.logits, |_, row| elementwise::cap(self.isa, row, cap));
    }

    fn fetch_rows(&mut self, x: &CpuTensor, rows: Range<usize>) {
        let all = x.rows(self.num_rows());
        self.sampling.add_rows(all[rows.start * x.cols..rows.end * x.cols].to_vec());
    }

    fn read_logits(&mut self) -> Vec<f32> {
        self.logits.clone()
    }

    fn sample(&mut self, requests: &[LogitsRequest<'_>]) {
        self.sampling.sample(&self.team, &mut self.logits, self.vocab_size, requests);
    }

    fn end_step(&mut self) {
        self.sampling.end_step();
    }

    fn is_step_done(&mut self) -> bool {
        true
    }

    fn finish_step(&mut self) -> Vec<LogitsResult> {
        self.sampling.finish_step()
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        let copier = self.copier();
        copier.wait_to_read(pairs.iter().map(|(from, _)| from.index()));
        copier.wait_to_write(pairs.iter().map(|(_, to)| to.index()));
        let kv = self.kv.as_mut().expect("the KV pools are allocated before they are used");
        let (pool, num_blocks) = (Shared::new(kv.device.as_mut_ptr()), kv.num_device_blocks);
        let chained = pairs.iter().any(|(from, _)| pairs.iter().any(|(_, to)| from == to));
        if chained {
            // A block is both read and written: the order of the pairs matters.
            pairs.iter().for_each(|pair| {
                if pair.0 != pair.1 {
                    self.copy_pool_blocks(&[*pair], (pool.get(), num_blocks), (pool, num_blocks));
                }
            });
        } else {
            self.copy_pool_blocks(pairs, (pool.get(), num_blocks), (pool, num_blocks));
        }
    }

    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        self.start_copies(pairs, false);
        true
    }

    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        self.start_copies(pairs, true);
        true
    }

    fn discard_swap_blocks(&mut self, blocks: &[BlockId]) {
        let kv = self.kv.as_mut().expect("the KV pools are allocated before they are used");
        let ranges = kv.swap_ranges(blocks);
        let copier = self.copier.as_mut().expect("it is there when the pools are");
        // SAFETY: the pools are dropped after the copier. These blocks are used again only by copies that are started
        // after this.
        unsafe { copier.discard(ranges) };
    }

    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) {
        self.copier().wait_for_all();
        let kv = self.kv();
        for (place, bytes) in places.iter().zip(into.chunks_exact_mut(kv.layout.block_bytes())) {
            bytes.copy_from_slice(kv.block(*place));
        }
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        self.copier().wait_for_all();
        let kv = self.kv.as_mut().expect("the KV pools are allocated before they are used");
        for (block, bytes) in blocks.iter().zip(from.chunks_exact(kv.layout.block_bytes())) {
            kv.device_block_mut(*block).copy_from_slice(bytes);
        }
    }

    fn finished_copies(&mut self) -> Vec<FinishedCopy> {
        self.copier().take_finished()
    }

    fn waited_for_copies(&mut self) -> f64 {
        self.copier().take_waited().as_secs_f64()
    }
}
