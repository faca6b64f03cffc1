//! The backend itself: its parts, and the helpers of its operations.

mod operations;

use super::attention::AttentionWorkspace;
use super::copier::Copier;
use super::elementwise::CpuNorm;
use super::gemm;
use super::gemm::{Linear, ManyRows, Sink};
use super::isa::Isa;
use super::memory::{Arena, CpuKvPools, Shared};
use super::pack::{ColumnOrder, CpuMatrix, On};
use super::row_switch::many_rows;
use super::rows::{ALONE_BELOW, for_rows, for_runs};
use super::sampling::CpuSampling;
use super::team::{MAX_MEMBERS, Team};
use super::tensors::{CpuTensor, CpuVector, Values};
use crate::{Batch, DType, HostTensor, Norm, WeightFormat};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};

/// Options of the CPU backend. It chooses itself where an option is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, including the caller's, from 1 to 1,024. Default: as many as the process may use.
    pub threads: Option<usize>,
    /// Default: the best one that the processor has.
    pub isa: Option<Isa>,
}

/// The CPU backend.
pub struct CpuBackend {
    pub(super) isa: Isa,
    pub(super) team: Team,
    pub(super) arena: Arena,
    pub(super) batch: Batch,
    /// Declared before the pools, so that it is dropped before them.
    pub(super) copier: Option<Copier>,
    pub(super) kv: Option<CpuKvPools>,
    pub(super) products: gemm::ProductWorkspace,
    pub(super) attention: AttentionWorkspace,
    /// `[num_rows, vocab_size]`
    pub(super) logits: Vec<f32>,
    pub(super) vocab_size: usize,
    pub(super) sampling: CpuSampling,
}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, StartError> {
        let isa = Isa::choose(options.isa)?;
        let threads = options.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, |threads| threads.get().min(MAX_MEMBERS))
        });
        if !(1..=MAX_MEMBERS).contains(&threads) {
            return Err(StartError::new(format!("{threads} threads: must be from 1 to {MAX_MEMBERS}")));
        }
        let team =
            Team::new(threads).map_err(|error| StartError::new(format!("cannot start {threads} threads: {error}")))?;
        Ok(Self {
            isa,
            arena: Arena::default(),
            batch: Batch::default(),
            copier: None,
            kv: None,
            products: gemm::ProductWorkspace::new(team.num_members())?,
            attention: AttentionWorkspace::new(team.num_members())?,
            logits: Vec::new(),
            vocab_size: 0,
            sampling: CpuSampling::new(team.num_members()),
            team,
        })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn num_threads(&self) -> usize {
        self.team.num_members()
    }

    /// How products of many rows with quantised weights are computed. `None` is what this process measured when it
    /// packed the first weights of a format. Results are the same.
    pub fn set_many_rows(&mut self, many_rows: Option<ManyRows>) {
        self.products.set_many_rows(many_rows);
    }

    /// Bytes of a block of the device pool, as attention reads them.
    pub fn device_block(&mut self, block: BlockId) -> &[u8] {
        self.copier().wait_to_read(std::iter::once(block.index()));
        self.kv().block(KvPlace::Device(block))
    }

    fn kv(&self) -> &CpuKvPools {
        self.kv.as_ref().expect("the KV pools are allocated before they are used")
    }

    fn copier(&mut self) -> &mut Copier {
        self.copier.as_mut().expect("the KV pools are allocated before they are used")
    }

    /// Starts copies `(block of one pool, block of the other)`.
    fn start_copies(&mut self, pairs: &[(BlockId, BlockId)], to_device: bool) {
        let Self { kv, copier, .. } = self;
        let kv = kv.as_mut().expect("the KV pools are allocated before they are used");
        let device = (Shared::new(kv.device.as_mut_ptr()), kv.num_device_blocks);
        let swap = (Shared::new(kv.swap.as_mut_ptr()), kv.num_swap_blocks);
        let block = |(pool, num_blocks): (Shared<u8>, usize), block: BlockId| {
            // SAFETY: the offset is within the pool.
            Shared::new(unsafe { pool.get().add(kv.block_offset(block, num_blocks)) })
        };
        let copies = pairs.iter().map(|(from, to)| match to_device {
            true => (to.index(), block(swap, *from), block(device, *to)),
            false => (from.index(), block(device, *from), block(swap, *to)),
        });
        let copier = copier.as_mut().expect("it is there when the pools are");
        // SAFETY: the pools are dropped after the copier. Steps and copies within the device pool wait before they
        // touch a block. Whoever else touches a pool has waited for all copies.
        unsafe { copier.copy(copies, kv.layout.block_bytes(), to_device) };
    }

    /// Packs `count` matrices. What has to be measured for their formats is measured.
    fn pack(
        &self,
        count: usize,
        parts: &[HostTensor<'_>],
        dtype: DType,
        order: ColumnOrder,
    ) -> Result<Vec<CpuMatrix>, StartError> {
        for part in parts {
            match part.format {
                WeightFormat::Quantized(format) if !gemm::heights_of_many_rows(self.isa, format).is_empty() => {
                    many_rows(self.isa, format)?;
                }
                _ => (),
            }
        }
        CpuMatrix::pack_several(count, parts, dtype, order, self.on())
    }

    fn on(&self) -> On<'_> {
        On { arena: &self.arena, team: &self.team, isa: self.isa }
    }

    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    /// Calls `row(index, its part of out)` for each row of the batch, on the whole team if there are many.
    fn for_rows(&self, out: &mut CpuTensor, row: impl Fn(usize, &mut [f32]) + Sync) {
        for_rows(&self.team, out.cols, out.rows_mut(self.batch.num_rows()), row);
    }

    /// As [`CpuBackend::for_rows`], for functions that write every element of a row. The tensor may be an operand.
    fn for_new_rows(&mut self, out: &mut CpuTensor, row: impl Fn(usize, &mut [f32]) + Sync) {
        let (isa, rows, cols) = (self.isa, self.num_rows(), out.cols);
        let operand = match &mut out.data {
            Values::F32(_) => return self.for_rows(out, row),
            Values::Operand(operand) => &*operand,
        };
        assert!(cols <= gemm::ROW_LEN, "a row of {cols}: at most {} are supported", gemm::ROW_LEN);
        let scratch = self.products.scratch();
        let write = |member: usize, index: usize| {
            // SAFETY: the scratch memory is the member's own and is long enough. Each row belongs to one task.
            unsafe {
                let values = std::slice::from_raw_parts_mut(scratch.of(member), cols);
                row(index, values);
                operand.write(isa, rows, index, 0, values);
            }
        };
        if rows * cols < ALONE_BELOW {
            (0..rows).for_each(|index| write(0, index));
        } else {
            for_runs(&self.team, rows, |member, rows| rows.for_each(|index| write(member, index)));
        }
    }

    /// A product of the batch's rows.
    fn product(&mut self, x: &CpuTensor, w: &CpuMatrix, bias: Option<&CpuVector>, sink: Sink<'_>) {
        let rows = self.num_rows();
        let layer = Linear { x: x.source(rows), rows, w, bias: bias.map(CpuVector::as_slice) };
        gemm::linear(self.isa, &self.team, &mut self.products, layer, sink);
    }

    /// Copies the blocks `from[pair.0]` to `to[pair.1]`. `from` and `to` are the address of a pool and its number of
    /// blocks.
    fn copy_pool_blocks(&self, pairs: &[(BlockId, BlockId)], from: (*const u8, usize), to: (Shared<u8>, usize)) {
        let kv = self.kv();
        let bytes = kv.layout.block_bytes();
        let from_address = Shared::new(from.0.cast_mut());
        let copy = |pair: usize| {
            let (source, target) = pairs[pair];
            let (source, target) = (kv.block_offset(source, from.1), kv.block_offset(target, to.1));
            // SAFETY: both blocks are within their pools. The callers check that no block is both read and written in
            // one call, which would be a race.
            unsafe { std::ptr::copy_nonoverlapping(from_address.get().add(source), to.0.get().add(target), bytes) };
        };
        if pairs.len() * bytes < 4 * ALONE_BELOW {
            (0..pairs.len()).for_each(copy);
        } else {
            self.team.for_each(pairs.len(), copy);
        }
    }
}

fn norm_params<'a>(norm: &'a Norm<CpuVector>, cols: usize) -> CpuNorm<'a> {
    let (weight, bias) = (norm.weight.as_slice(), norm.bias.as_ref().map(CpuVector::as_slice));
    assert!(weight.len() == cols && bias.is_none_or(|bias| bias.len() == cols), "a norm does not fit {cols} columns");
    CpuNorm { kind: norm.kind, weight, bias }
}
