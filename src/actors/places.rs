//! How many requests the engine holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the requests from the intake to their end; all clones count the same.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<AtomicUsize>);

impl Places {
    /// A place, if fewer than `most` are taken. `most` may be another each time.
    pub fn try_take(&self, most: usize) -> Option<Place> {
        let one_more = |taken| (taken < most).then_some(taken + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Place(self.0.clone()))
    }

    pub fn num_taken(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// A request's place, given back when it is dropped.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_and_their_number_may_change() {
        let places = Places::default();
        let (first, second) = (places.try_take(2).unwrap(), places.try_take(2).unwrap());
        assert!(places.try_take(2).is_none());
        let third = places.try_take(3).unwrap();
        // Fewer than are taken: those stay, and nobody comes until there is room again.
        drop(first);
        assert!(places.try_take(2).is_none());
        drop((second, third));
        assert_eq!(places.num_taken(), 0);
        assert!(places.try_take(1).is_some());
    }
}
