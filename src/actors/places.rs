//! Counts the requests in the engine, in total and for each tenant.

use pagetide_base::ids::IdMap;
use pagetide_base::sync::{Mutex, MutexGuard, PoisonError};
use pagetide_engine::bill::Tenant;
use std::sync::Arc;

/// Counts requests from the intake to their end. All clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<TakenPlaces>>);

#[derive(Debug, Default)]
struct TakenPlaces {
    all: usize,
    /// For each tenant that holds places. Requests without a tenant are not counted.
    of: IdMap<Tenant, usize>,
}

/// Why a request gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// All are taken.
    Full,
    /// The tenant holds as many as it may.
    TenantFull,
}

impl Places {
    /// Takes a place, if fewer than `most` are taken, and fewer than `most_of_one` by this tenant. Both limits may
    /// differ between calls.
    ///
    /// # Errors
    /// No place is free.
    pub fn try_take(&self, tenant: Tenant, most: usize, most_of_one: usize) -> Result<Place, NoPlace> {
        let mut taken = self.taken();
        if taken.all >= most {
            return Err(NoPlace::Full);
        }
        if tenant != Tenant::default() {
            let of_one = taken.of.get(&tenant).copied().unwrap_or(0);
            if of_one >= most_of_one {
                return Err(NoPlace::TenantFull);
            }
            taken.of.insert(tenant, of_one + 1);
        }
        taken.all += 1;
        Ok(Place { places: self.clone(), tenant })
    }

    pub fn num_taken(&self) -> usize {
        self.taken().all
    }

    fn taken(&self) -> MutexGuard<'_, TakenPlaces> {
        // The lock guards only numbers, which are consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    tenant: Tenant,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        taken.all -= 1;
        if let Some(of_one) = taken.of.get_mut(&self.tenant) {
            *of_one -= 1;
            if *of_one == 0 {
                taken.of.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_and_their_number_may_change() {
        let places = Places::default();
        let take = |most| places.try_take(Tenant::default(), most, 1);
        let (first, second) = (take(2).unwrap(), take(2).unwrap());
        assert_eq!(take(2).unwrap_err(), NoPlace::Full);
        let third = take(3).unwrap();
        // The limit is now below the number of taken places. Those stay, and no request gets a place until there is
        // room.
        drop(first);
        assert!(take(2).is_err());
        drop((second, third));
        assert_eq!(places.num_taken(), 0);
        assert!(take(1).is_ok());
    }

    #[test]
    fn one_tenant_leaves_places_for_others() {
        let places = Places::default();
        let take = |tenant| places.try_take(Tenant(tenant), 4, 3);
        let held: Vec<_> = (0..3).map(|_| take(1).unwrap()).collect();
        assert_eq!(take(1).unwrap_err(), NoPlace::TenantFull);
        let other = take(2).unwrap();
        assert_eq!(take(2).unwrap_err(), NoPlace::Full);
        drop(other);
        assert_eq!(take(1).unwrap_err(), NoPlace::TenantFull);
        drop(held);
        assert!(places.taken().of.is_empty() && take(1).is_ok());
    }
}
