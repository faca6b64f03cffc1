//! Moves that need more than their operands: special registers, carries, windows of addresses.

use super::step::Exec;
use crate::decoder::moves::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::program::{LaneValues, Op, Special, WARP_SIZE};
use crate::syntax::Space;
use crate::types::truncate;

/// In a `shared::cluster` address, the block's rank plus 1 is above these bits; 0: the own block.
pub(super) const RANK_SHIFT: u32 = 24;

impl Exec<'_, '_> {
    pub(super) fn moves(&mut self, op: &Op) {
        match op {
            Op::Select { to, when_true, when_false, by } => {
                let (a, b) = (self.get(*when_true), self.get(*when_false));
                let read = self.undefined.take();
                let by = self.predicate(*by);
                if read.lanes != 0 {
                    let (of_a, of_b) = (self.undefined_of(*when_true).lanes, self.undefined_of(*when_false).lanes);
                    let of_by = self.undefined.get();
                    let chosen = by & of_a | !by & of_b | of_by.lanes;
                    let read = if of_by.lanes == 0 { read } else { read.computed() };
                    self.undefined.set(read.with_lanes(chosen));
                }
                let mut result = [0; WARP_SIZE];
                for lane in 0..WARP_SIZE {
                    result[lane] = if by >> lane & 1 == 1 { a[lane] } else { b[lane] };
                }
                self.set(*to, &result);
            }
            Op::Pack { to, from, bits } => {
                let mut result = [0; WARP_SIZE];
                for (i, source) in from.iter().enumerate() {
                    let values = self.get(*source);
                    for lane in 0..WARP_SIZE {
                        result[lane] |= truncate(values[lane], *bits) << (i as u32 * bits);
                    }
                }
                self.mix_undefined();
                self.set(*to, &result);
            }
            Op::Unpack { to, from, bits } => {
                let values = self.get(*from);
                self.mix_undefined();
                for (i, register) in to.iter().enumerate() {
                    if let Some(register) = register {
                        let parts = values.map(|value| truncate(value >> (i as u32 * bits), *bits));
                        self.set(*register, &parts);
                    }
                }
            }
            Op::ReadSpecial { to, special } => {
                let values = self.special(*special);
                self.set(*to, &values);
            }
            Op::Window { to, from, window, subtract } => {
                let window = if *subtract { window.wrapping_neg() } else { *window };
                let result = self.get(*from).map(|address| address.wrapping_add(window));
                self.set(*to, &result);
            }
            Op::IsSpace { to, from, space } => {
                let wanted = match space {
                    Space::Shared | Space::SharedCluster => SHARED_WINDOW,
                    Space::Local => LOCAL_WINDOW,
                    Space::Param => PARAM_WINDOW,
                    _ => 0,
                };
                let addresses = self.get(*from);
                let mut found = 0;
                for (lane, address) in addresses.iter().enumerate() {
                    let own = *space != Space::Shared || (address >> RANK_SHIFT) as u8 == 0;
                    found |= u32::from(address >> 56 == wanted >> 56 && own) << lane;
                }
                self.set_predicate(*to, found);
            }
            Op::MapShared { to, from, rank, generic: _ } => {
                let (addresses, ranks) = (self.get(*from), self.get(*rank));
                let mut result = [0; WARP_SIZE];
                for lane in 0..WARP_SIZE {
                    let own = addresses[lane] & !(0xff << RANK_SHIFT);
                    result[lane] = own | (ranks[lane] + 1) << RANK_SHIFT;
                }
                self.set(*to, &result);
            }
            Op::GetRank { to, from, generic: _ } => {
                let own = u64::from(self.blocks[self.b].rank);
                let result = self.get(*from).map(|address| match address >> RANK_SHIFT & 0xff {
                    0 => own,
                    rank => rank - 1,
                });
                self.set(*to, &result);
            }
            Op::Carry { subtract, bits, multiply, reads, writes, to, from } => {
                let [a, b, c] = from.map(|source| self.get(source));
                let mut result = [0; WARP_SIZE];
                let mut carry = 0_u32;
                for lane in 0..WARP_SIZE {
                    let old = u128::from(*reads && self.warp.carry >> lane & 1 == 1);
                    let [a, b, c] = [a[lane], b[lane], c[lane]].map(u128::from);
                    let (sum, carries) = match (multiply, subtract) {
                        (Some(high), _) => {
                            let product = a * b;
                            let part = if *high { product >> bits } else { product & ((1 << bits) - 1) };
                            let sum = part + c + old;
                            (sum, sum >> bits != 0)
                        }
                        (None, false) => (a + b + old, (a + b + old) >> bits != 0),
                        (None, true) => (a.wrapping_sub(b).wrapping_sub(old), a < b + old),
                    };
                    result[lane] = truncate(sum as u64, *bits);
                    carry |= u32::from(carries) << lane;
                }
                if *writes {
                    self.warp.carry = self.warp.carry & !self.mask | carry & self.mask;
                }
                self.set(*to, &result);
            }
            _ => unreachable!("only called for these"),
        }
    }

    fn special(&self, special: Special) -> LaneValues {
        let launch = &self.run.launch;
        let block = &self.blocks[self.b];
        let warp = self.warp.index as u32;
        let [x, y, _] = launch.block;
        let each = |value: fn(u32) -> u32| std::array::from_fn(|lane| u64::from(value(lane as u32)));
        let same = |value: u32| [u64::from(value); WARP_SIZE];
        match special {
            Special::Tid(axis) => std::array::from_fn(|lane| {
                let thread = warp * 32 + lane as u32;
                u64::from([thread % x, thread / x % y, thread / (x * y)][axis])
            }),
            Special::Ntid(axis) => same(launch.block[axis]),
            Special::Ctaid(axis) => same(block.id[axis]),
            Special::Nctaid(axis) => same(launch.grid[axis]),
            Special::ClusterId(axis) => same(block.id[axis] / launch.cluster[axis]),
            Special::NumClusters(axis) => same(launch.grid[axis] / launch.cluster[axis]),
            Special::ClusterCtaid(axis) => same(block.id[axis] % launch.cluster[axis]),
            Special::ClusterNctaid(axis) => same(launch.cluster[axis]),
            Special::ClusterCtarank => same(block.rank),
            Special::ClusterNctarank => same(launch.cluster.iter().product()),
            Special::LaneId => each(|lane| lane),
            Special::WarpId => same(warp),
            Special::NumWarpIds => same(64),
            Special::SmId => same(0),
            Special::NumSmIds => same(1),
            Special::GridId => same(0),
            Special::LanemaskEq => each(|lane| 1 << lane),
            Special::LanemaskLt => each(|lane| (1 << lane) - 1),
            Special::LanemaskLe => each(|lane| u32::MAX >> (31 - lane)),
            Special::LanemaskGt => each(|lane| !(u32::MAX >> (31 - lane))),
            Special::LanemaskGe => each(|lane| !((1 << lane) - 1)),
            // Instructions of all warps so far.
            Special::Clock => [self.run.counters.progress(); WARP_SIZE],
            Special::DynamicSharedBytes => same(launch.shared_bytes),
            Special::TotalSharedBytes => same(block.shared.len() as u32),
        }
    }
}
