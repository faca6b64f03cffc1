//! `wgmma`: products of a warp group's 64 rows, with operands in shared memory.
//!
//! Each warp computes its own 16 rows: warp w of the group has rows 16 w to 16 w + 15 of A and of the accumulator, so
//! the four warps need not run at the same time here.

use super::PendingProduct;
use super::access::AccessTarget;
use super::fragments::{number, product, read_a, read_accumulator, round, write_accumulator};
use super::step::Exec;
use crate::program::{MmaShape, Op, PredicateSourceOrConstant, ValueSource};
use crate::races::AccessKind;
use crate::syntax::Space;
use crate::tensor_map::Swizzle;
use crate::types::ScalarType;

/// What a product reads at a time.
const READ_BYTES: usize = 16;

/// A matrix in shared memory ("Matrix Descriptor Format" of the manual).
#[derive(Clone, Copy, Debug)]
struct MatrixDescriptor {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
}

impl MatrixDescriptor {
    fn decode(bits: u64) -> Self {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        let swizzle = match bits >> 62 {
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            3 => Swizzle::Bytes32,
            _ => Swizzle::None,
        };
        Self { start: field(0), leading: field(16), stride: field(32), swizzle }
    }

    /// Bytes of a row of the swizzle's pattern.
    fn width(self) -> u64 {
        match self.swizzle {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }

    /// The address of an element in row `row` (of M or N) and column `k`, of `bytes` bytes. Without `transposed` a
    /// row's elements are next to each other, with it a column's.
    fn address(self, row: u64, k: u64, bytes: u64, transposed: bool) -> u64 {
        let width = self.width();
        let offset = match (transposed, self.swizzle) {
            (false, Swizzle::None) => {
                (row / 8) * self.stride + (k * bytes / 16) * self.leading + (row % 8) * 16 + k * bytes % 16
            }
            (false, _) => (row / 8) * self.stride + (row % 8) * width + k * bytes,
            (true, Swizzle::None) => {
                (row * bytes / 16) * self.stride + (k / 8) * self.leading + (k % 8) * 16 + row * bytes % 16
            }
            (true, _) => {
                (row * bytes / width) * self.leading + (k / 8) * self.stride + (k % 8) * width + row * bytes % width
            }
        };
        self.swizzle.apply(self.start + offset)
    }
}

impl Exec<'_, '_> {
    /// `rows` x k elements from row `first` on that a descriptor describes, as `place` of their row and column orders
    /// them. 16 bytes of them, of a row or if `transposed` of a column, are next to each other in every layout. `reads`
    /// gets the offsets.
    fn described(
        &mut self,
        descriptor: ValueSource,
        (first, rows): (usize, usize),
        k: usize,
        (scalar, transposed): (ScalarType, bool),
        reads: &mut Vec<usize>,
        place: impl Fn(usize, usize) -> usize,
    ) -> Option<Vec<f64>> {
        let descriptor = MatrixDescriptor::decode(self.uniform(descriptor));
        let bytes = scalar.bytes() as usize;
        let together = READ_BYTES / bytes;
        let (row_step, column_step) = if transposed { (together, 1) } else { (1, together) };
        let mut matrix = vec![0.0; rows * k];
        for row in (0..rows).step_by(row_step) {
            for column in (0..k).step_by(column_step) {
                let address = descriptor.address((first + row) as u64, column as u64, bytes as u64, transposed);
                let target = self.target(0, Space::Shared, address, READ_BYTES)?;
                self.check_asynchronous_read(0, target, READ_BYTES, AccessKind::PendingRead);
                if let AccessTarget::Shared { offset, .. } = target {
                    reads.push(offset);
                }
                let mut contents = [0; READ_BYTES];
                self.fetch(target, &mut contents);
                for (i, element) in contents.chunks_exact(bytes).enumerate() {
                    let mut word = [0; 8];
                    word[..bytes].copy_from_slice(element);
                    let (row, column) = if transposed { (row + i, column) } else { (row, column + i) };
                    matrix[place(row, column)] = number(u64::from_le_bytes(word), scalar);
                }
            }
        }
        Some(matrix)
    }

    pub(super) fn wgmma(&mut self, op: &Op) {
        let Op::Wgmma { shape, to, a, b, accumulates, negate, transposed } = op else {
            unreachable!("only called for wgmma")
        };
        let MmaShape { n, k, .. } = *shape;
        let mut reads = Vec::new();
        let a = match a[..] {
            [descriptor] => {
                let first = 16 * (self.warp.index % 4);
                let of_a = (shape.a, transposed[0]);
                let Some(a) = self.described(descriptor, (first, 16), k, of_a, &mut reads, |row, i| row * k + i) else {
                    return;
                };
                a
            }
            _ => read_a(&self.get_all(a), k, shape.a),
        };
        let of_b = (shape.b, transposed[1]);
        let Some(b) = self.described(*b, (0, n), k, of_b, &mut reads, |column, i| i * n + column) else { return };
        let accumulates = match accumulates {
            PredicateSourceOrConstant::Predicate(by) => self.predicate(*by) & self.mask != 0,
            PredicateSourceOrConstant::Constant(value) => *value,
        };
        let registers: Vec<_> = to.iter().map(|register| self.warp.registers[register.0 as usize]).collect();
        let c = if accumulates { read_accumulator(&registers, n, shape.d) } else { vec![0.0; 16 * n] };
        let sign = if negate[0] != negate[1] { -1.0 } else { 1.0 };
        let sums = product(&a, &b, n, k);
        let d: Vec<u32> = sums.iter().zip(c).map(|(sum, c)| round(sign * sum + c, shape.d, shape.saturate)).collect();
        for (register, values) in to.iter().zip(write_accumulator(&d, n, shape.d, to.len())) {
            self.set(*register, &values);
        }
        let registers = to.iter().map(|register| register.0).collect();
        let stamp = self.stamp(0, AccessKind::PendingRead).unwrap_or_default();
        self.warp.products.push(PendingProduct { registers, group: None, reads, stamp });
        self.run.counters.tensor(self.pc, 2 * (16 * n * k) as u64);
    }

    /// `wgmma.fence`, `.commit_group` and `.wait_group`.
    pub(super) fn product_groups(&mut self, op: &Op) {
        match op {
            Op::WgmmaCommit => {
                self.warp.products_committed += 1;
                let group = self.warp.products_committed;
                for product in self.warp.products.iter_mut().filter(|product| product.group.is_none()) {
                    product.group = Some(group);
                }
            }
            Op::WgmmaWait { pending } => {
                let committed = self.warp.products_committed;
                let now = self.stamp(0, AccessKind::Ordinary);
                let shadow = &mut self.blocks[self.b].shared_shadow;
                self.warp.products.retain(|product| {
                    let is_pending = product.group.is_none_or(|group| group + pending > committed);
                    if let Some(now) = now.filter(|_| !is_pending) {
                        for offset in &product.reads {
                            shadow.finish_read(*offset, READ_BYTES, product.stamp, now);
                        }
                    }
                    is_pending
                });
            }
            _ => {}
        }
    }
}
