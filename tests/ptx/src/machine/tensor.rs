//! `mma.sync`, and the instructions that move 8x8 matrices.

use super::access::AccessTarget;
use super::definedness::{UndefinedLanes, quads};
use super::fragments::{product, read_a, read_accumulator, read_b, round, write_accumulator};
use super::step::Exec;
use crate::program::{Address, LaneValues, MmaShape, Op, ValueSource, WARP_SIZE};
use crate::races::AccessKind;
use crate::syntax::{Register, Space};

impl Exec<'_, '_> {
    pub(super) fn tensor_operation(&mut self, op: &Op) {
        match op {
            Op::Mma { shape, to, a, b, c } => self.mma(*shape, to, a, b, c),
            Op::LoadMatrix { to, address, transposed, space } => self.load_matrix(to, *address, *transposed, *space),
            Op::StoreMatrix { from, address, transposed, space } => {
                self.store_matrix(from, *address, *transposed, *space);
            }
            Op::MoveMatrix { to, from } => {
                let rows = matrix_rows(&self.get(*from));
                let undefined = self.undefined.get();
                self.undefined.set(undefined.whole().with_lanes(if undefined.lanes == 0 { 0 } else { u32::MAX }));
                let mut result = [0; WARP_SIZE];
                for (lane, word) in result.iter_mut().enumerate() {
                    let (g, t) = (lane / 4, lane % 4);
                    *word = u64::from(rows[2 * t][g]) | u64::from(rows[2 * t + 1][g]) << 16;
                }
                self.set(*to, &result);
            }
            _ => self.wgmma(op),
        }
    }

    pub(super) fn get_all(&self, sources: &[ValueSource]) -> Vec<LaneValues> {
        sources.iter().map(|source| self.get(*source)).collect()
    }

    fn mma(
        &mut self,
        shape: MmaShape,
        to: &[Option<Register>],
        a: &[ValueSource],
        b: &[ValueSource],
        c: &[ValueSource],
    ) {
        let MmaShape { n, k, .. } = shape;
        let sources = [a, b, c];
        let a = read_a(&self.get_all(a), k, shape.a);
        let b = read_b(&self.get_all(b), k, shape.b);
        let c = read_accumulator(&self.get_all(c), n, shape.c);
        let sums = product(&a, &b, n, k);
        let d: Vec<u32> = sums.iter().zip(c).map(|(sum, c)| round(sum + c, shape.d, shape.saturate)).collect();
        let undefined = match self.undefined.get().lanes {
            0 => Vec::new(),
            _ => self.undefined_products(sources, to.len(), shape.d.bits()),
        };
        for (i, values) in write_accumulator(&d, n, shape.d, to.len()).into_iter().enumerate() {
            if let Some(register) = to[i] {
                self.set_with(register, &values, undefined.get(i).copied().unwrap_or_default());
            }
        }
        self.run.counters.tensor(self.pc, 2 * (16 * n * k) as u64);
    }

    /// The rows of shared memory that lanes address, eight of each matrix.
    fn matrix_targets(
        &mut self,
        count: usize,
        addresses: &LaneValues,
        space: Space,
    ) -> Option<Vec<(usize, AccessTarget)>> {
        let mut targets = Vec::with_capacity(8 * count);
        for (lane, address) in addresses.iter().enumerate().take(8 * count) {
            targets.push((lane, self.target(lane, space, *address, 16)?));
        }
        let accesses: Vec<_> = targets.iter().map(|(lane, target)| (*lane, *target, addresses[*lane])).collect();
        self.count(&accesses, 16);
        Some(targets)
    }

    fn load_matrix(&mut self, to: &[Register], address: Address, transposed: bool, space: Space) {
        let addresses = self.addresses(address);
        let lanes = u32::MAX >> (32 - 8 * to.len());
        if self.run.trace.is_none()
            && let Some(request) = self.defined_request(space, &addresses, lanes, 16)
        {
            self.check_reads(&request);
            self.count_request(&request);
            for (i, register) in to.iter().enumerate() {
                let contents = self.contents(&request);
                let rows = std::array::from_fn(|row| matrix_row(&contents[request.offsets[8 * i + row]..][..16]));
                let words = fragment_words(&rows, transposed);
                self.set(*register, &words);
            }
            return;
        }
        let Some(targets) = self.matrix_targets(to.len(), &addresses, space) else { return };
        for (register, targets) in to.iter().zip(targets.chunks_exact(8)) {
            let mut rows = [[0_u16; 8]; 8];
            let mut undefined = [0; 8];
            let mut is_computed = false;
            for ((row, undefined), (address_lane, target)) in rows.iter_mut().zip(&mut undefined).zip(targets) {
                *undefined = self.undefined_bytes(*target, 16);
                self.trace_access(*target, &[]);
                is_computed |= *undefined != 0 && self.holds_computed(*target);
                let mut contents = [0; 16];
                self.fetch(*target, &mut contents);
                *row = matrix_row(&contents);
                self.check_read(*address_lane, *target, 16, AccessKind::Ordinary);
            }
            let is_undefined = |lane: &usize| {
                let places = fragment_places(*lane, transposed);
                places.iter().any(|(row, i)| undefined[*row] >> (2 * i) & 3 != 0)
            };
            let lanes = (0..WARP_SIZE).filter(is_undefined).fold(0, |mask, lane| mask | 1 << lane);
            self.set_with(
                *register,
                &fragment_words(&rows, transposed),
                UndefinedLanes { lanes, bytes: [0xff; WARP_SIZE], origin: self.pc, is_computed },
            );
        }
    }

    fn store_matrix(&mut self, from: &[ValueSource], address: Address, transposed: bool, space: Space) {
        let addresses = self.addresses(address);
        let Some(targets) = self.matrix_targets(from.len(), &addresses, space) else { return };
        for (source, targets) in from.iter().zip(targets.chunks_exact(8)) {
            let rows = matrix_rows(&self.get(*source));
            let undefined = self.undefined_of(*source);
            for (i, (lane, target)) in targets.iter().enumerate() {
                let mut contents = [0; 16];
                for j in 0..8 {
                    let element = if transposed { rows[j][i] } else { rows[i][j] };
                    contents[2 * j..][..2].copy_from_slice(&element.to_le_bytes());
                }
                self.check_write(*lane, *target, 16, AccessKind::Ordinary, false);
                self.put(*target, &contents);
                self.trace_access(*target, &contents);
                if undefined.lanes != 0 && (transposed || quads(undefined.lanes) >> (4 * i) & 1 == 1) {
                    self.put_undefined(*target, 0..16, undefined.is_computed);
                }
            }
        }
        self.warp.has_generic_writes = true;
    }
}

/// A row of a matrix in memory.
fn matrix_row(contents: &[u8]) -> [u16; 8] {
    std::array::from_fn(|i| u16::from_le_bytes([contents[2 * i], contents[2 * i + 1]]))
}

/// Row and column of the two elements that a lane has of an 8x8 matrix.
fn fragment_places(lane: usize, transposed: bool) -> [(usize, usize); 2] {
    let (g, t) = (lane / 4, lane % 4);
    [2 * t, 2 * t + 1].map(|i| if transposed { (i, g) } else { (g, i) })
}

/// The register of a matrix with these rows.
fn fragment_words(rows: &[[u16; 8]; 8], transposed: bool) -> LaneValues {
    std::array::from_fn(|lane| {
        let [low, high] = fragment_places(lane, transposed).map(|(row, i)| rows[row][i]);
        u64::from(low) | u64::from(high) << 16
    })
}

/// An 8x8 matrix that a register holds: lane 4 g + t has the elements 2 t and 2 t + 1 of row g.
fn matrix_rows(values: &LaneValues) -> [[u16; 8]; 8] {
    let mut rows = [[0; 8]; 8];
    for (lane, word) in values.iter().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        rows[g][2 * t] = *word as u16;
        rows[g][2 * t + 1] = (*word >> 16) as u16;
    }
    rows
}
