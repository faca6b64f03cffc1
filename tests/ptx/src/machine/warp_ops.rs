//! Shuffles, votes, matches and reductions of a warp.

use super::lanes_of;
use super::step::Exec;
use crate::findings::FindingKind;
use crate::program::{Op, Shuffle, Vote, WARP_SIZE};
use crate::types::truncate;

impl Exec<'_, '_> {
    pub(super) fn warp_operation(&mut self, op: &Op) {
        match op {
            Op::Shuffle { kind, to, in_range, from, lane, clamp, mask } => {
                let (values, lanes, clamps, masks) =
                    (self.get(*from), self.get(*lane), self.get(*clamp), self.get(*mask));
                let undefined = self.undefined_of(*from);
                self.undefined.take();
                let mut undefined_lanes = 0;
                let (mut result, mut in_ranges) = (values, 0);
                for own in lanes_of(self.mask) {
                    let (b, c) = (lanes[own] as usize & 31, clamps[own] as usize);
                    let segment = c >> 8 & 31;
                    let last = own & segment | c & 31 & !segment;
                    let first = own & segment;
                    let (source, fits) = match kind {
                        Shuffle::Up => (own as isize - b as isize, own as isize - b as isize >= last as isize),
                        Shuffle::Down => ((own + b) as isize, own + b <= last),
                        Shuffle::Butterfly => ((own ^ b) as isize, own ^ b <= last),
                        Shuffle::Index => ((first | b & !segment) as isize, first | b & !segment <= last),
                    };
                    let source = if fits { source as usize } else { own };
                    in_ranges |= u32::from(fits) << own;
                    result[own] = values[source];
                    undefined_lanes |= (undefined.lanes >> source & 1) << own;
                    let is_there = self.mask >> source & 1 == 1 && masks[own] >> source & 1 == 1;
                    if !is_there {
                        self.report(FindingKind::WarpMask, own, None, || {
                            format!("a shuffle reads lane {source}, which does not take part")
                        });
                    }
                }
                self.set_with(*to, &result, undefined.whole().with_lanes(undefined_lanes));
                self.undefined.take();
                if let Some(in_range) = in_range {
                    self.set_predicate(*in_range, in_ranges);
                }
            }
            Op::Vote { kind, to, to_predicate, from, mask } => {
                let (votes, masks) = (self.predicate(*from), self.get(*mask));
                self.require_defined("a vote");
                let (mut result, mut agrees) = ([0; WARP_SIZE], 0);
                for lane in lanes_of(self.mask) {
                    let members = masks[lane] as u32 & self.mask;
                    let yes = votes & members;
                    let value = match kind {
                        Vote::All => yes == members,
                        Vote::Any | Vote::Ballot => yes != 0,
                        Vote::Uniform => yes == members || yes == 0,
                    };
                    result[lane] = u64::from(yes);
                    agrees |= u32::from(value) << lane;
                }
                if let Some(to) = to {
                    self.set(*to, &result);
                }
                if let Some(to) = to_predicate {
                    self.set_predicate(*to, agrees);
                }
            }
            Op::Match { all, to, agrees, from, mask, bits } => {
                let values = self.get(*from).map(|value| truncate(value, *bits));
                let masks = self.get(*mask);
                self.require_defined("a comparison of lanes");
                let (mut result, mut all_agree) = ([0; WARP_SIZE], 0);
                for lane in lanes_of(self.mask) {
                    let members = masks[lane] as u32 & self.mask;
                    let same = lanes_of(members)
                        .filter(|other| values[*other] == values[lane])
                        .fold(0, |mask, l| mask | 1 << l);
                    let agree = same == members;
                    result[lane] = if *all && !agree { 0 } else { u64::from(same) };
                    all_agree |= u32::from(agree) << lane;
                }
                self.set(*to, &result);
                if let Some(agrees) = agrees {
                    self.set_predicate(*agrees, all_agree);
                }
            }
            Op::Reduce { update, to, from, mask } => {
                let (values, masks) = (self.get(*from), self.get(*mask));
                let undefined = self.undefined.get();
                if undefined.lanes & self.mask != 0 {
                    self.undefined.set(undefined.computed().with_lanes(u32::MAX));
                }
                let mut result = [0; WARP_SIZE];
                for lane in lanes_of(self.mask) {
                    let members = lanes_of(masks[lane] as u32 & self.mask).map(|other| values[other]);
                    result[lane] = members.reduce(|a, b| update(a, b, 0)).unwrap_or(0);
                }
                self.set(*to, &result);
            }
            Op::Elect { to, is_elected, mask } => {
                let members = self.uniform(*mask) as u32 & self.mask;
                let leader = members.trailing_zeros();
                if let Some(to) = to {
                    self.set(*to, &[u64::from(leader); WARP_SIZE]);
                }
                if let Some(is_elected) = is_elected {
                    self.set_predicate(*is_elected, 1_u32.checked_shl(leader).unwrap_or(0));
                }
            }
            _ => unreachable!("only called for these"),
        }
    }
}
