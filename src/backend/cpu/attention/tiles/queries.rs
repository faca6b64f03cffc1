//! Products on vector registers, for a few queries at a time.

use super::products::{GROUPS_AT_ONCE, Scored, StepProducts, Weighed};
use std::marker::PhantomData;
use std::ops::Range;

/// Queries that are computed at once: each vector of K or V is loaded once for all of them.
const QUERIES_AT_ONCE: usize = 4;

/// How the products of up to [`QUERIES_AT_ONCE`] queries are computed.
pub(super) trait QueryProducts {
    /// How many parts their weighted sums have.
    fn num_weighed(weighed: &Weighed, head_dim: usize) -> usize;

    /// The scores of queries `first .. first + R` for up to [`GROUPS_AT_ONCE`] groups.
    ///
    /// # Safety
    /// [`StepProducts::new`]'s contract. There are so many queries.
    unsafe fn score<const R: usize>(scored: &Scored, first: usize, groups: Range<usize>, head_dim: usize);

    /// Part `part` of the weighted sums of queries `first .. first + R`. Parts are computed in order.
    ///
    /// # Safety
    /// As for [`Self::score`].
    unsafe fn weigh<const R: usize>(weighed: &Weighed, first: usize, part: usize, head_dim: usize);
}

/// Scores come first. Each [`StepProducts::advance`] is for up to [`QUERIES_AT_ONCE`] queries and one batch of groups,
/// or one part of the weighted sums.
pub(super) struct VectorProducts<Q> {
    weighed: Option<Weighed>,
    scored: Option<Scored>,
    head_dim: usize,
    /// Calls of `advance` so far.
    done: usize,
    kind: PhantomData<Q>,
}

impl<Q: QueryProducts> StepProducts for VectorProducts<Q> {
    const PREFETCHES: bool = true;

    unsafe fn new(weighed: Option<Weighed>, scored: Option<Scored>, head_dim: usize) -> Self {
        Self { weighed, scored, head_dim, done: 0, kind: PhantomData }
    }

    fn len(&self) -> usize {
        let quads = |num_queries: usize| num_queries.div_ceil(QUERIES_AT_ONCE);
        let scored = self.scored.as_ref().map_or(0, |s| quads(s.num_queries) * batches(&s.groups).len());
        scored + self.weighed.as_ref().map_or(0, |w| quads(w.num_queries) * Q::num_weighed(w, self.head_dim))
    }

    fn advance(&mut self) {
        let (mut part, dim) = (self.done, self.head_dim);
        self.done += 1;
        if let Some(scored) = &self.scored {
            let per_quad = batches(&scored.groups).len();
            let first = part / per_quad * QUERIES_AT_ONCE;
            if first < scored.num_queries {
                let groups = nth_batch(part % per_quad, &scored.groups);
                // SAFETY (all): `new`'s contract; so many queries are left.
                return unsafe {
                    match scored.num_queries - first {
                        1 => Q::score::<1>(scored, first, groups, dim),
                        2 => Q::score::<2>(scored, first, groups, dim),
                        3 => Q::score::<3>(scored, first, groups, dim),
                        _ => Q::score::<QUERIES_AT_ONCE>(scored, first, groups, dim),
                    }
                };
            }
            part -= scored.num_queries.div_ceil(QUERIES_AT_ONCE) * per_quad;
        }
        if let Some(weighed) = &self.weighed {
            let per_quad = Q::num_weighed(weighed, dim);
            let (first, part) = (part / per_quad * QUERIES_AT_ONCE, part % per_quad);
            if first < weighed.num_queries {
                unsafe {
                    match weighed.num_queries - first {
                        1 => Q::weigh::<1>(weighed, first, part, dim),
                        2 => Q::weigh::<2>(weighed, first, part, dim),
                        3 => Q::weigh::<3>(weighed, first, part, dim),
                        _ => Q::weigh::<QUERIES_AT_ONCE>(weighed, first, part, dim),
                    }
                }
            }
        }
    }
}

/// The batches of groups that have a part of `groups`. They begin at multiples of [`GROUPS_AT_ONCE`], so that the order
/// of a sum does not depend on where `groups` begins.
pub(super) fn batches(groups: &Range<usize>) -> Range<usize> {
    groups.start / GROUPS_AT_ONCE..groups.end.div_ceil(GROUPS_AT_ONCE)
}

/// What batch `index` has of `groups`.
pub(super) fn nth_batch(index: usize, groups: &Range<usize>) -> Range<usize> {
    let first = (batches(groups).start + index) * GROUPS_AT_ONCE;
    groups.start.max(first)..groups.end.min(first + GROUPS_AT_ONCE)
}

/// Prefetches a line to the second level: the first one can wait for fewer lines at once.
#[inline]
pub(super) fn prefetch(line: *const u8) {
    // SAFETY: any address may be prefetched.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast()) };
}
