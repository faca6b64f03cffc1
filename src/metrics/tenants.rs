//! Series for each API key.
//!
//! A tenant's label is the one given to [`register`], never its key. The first [`MAX_LABELS`] labels have their own
//! series. All later ones share [`OTHERS`], so that the number of series is bounded. Requests without a key
//! ([`Tenant::default`]) are not counted here.

use super::events::{OUTCOMES, Outcome, QuotaOf, REJECTIONS, Rejection};
use super::registry::{REGISTRY, Registry};
use super::table;
use metrics::{Counter, Gauge, Label};
use pagetide_base::ids::Tenant;
use std::sync::{Arc, PoisonError, RwLock};

/// Maximum number of labels in the life of a process, besides [`OTHERS`].
pub const MAX_LABELS: usize = 32;
/// The label of all later tenants.
pub const OTHERS: &str = "other";

/// The metrics of one label. They can be recorded from any thread.
pub struct TenantMetrics {
    outcomes: [Counter; 4],
    rejections: [Counter; REJECTIONS.len()],
    prompt_tokens: Counter,
    generated_tokens: Counter,
    /// Waiting, running, swapped.
    sequences: [Gauge; 3],
    /// On the device, in the swap pool.
    blocks: [Gauge; 2],
    /// In the order of [`QuotaOf`].
    quota: [Counter; 2],
}

impl TenantMetrics {
    pub fn prompt_tokens(&self, tokens: usize) {
        self.prompt_tokens.increment(tokens as u64);
    }

    pub fn generated_token(&self) {
        self.generated_tokens.increment(1);
    }

    pub(super) fn ended(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].increment(1);
    }

    fn set_held(&self, held: &TenantHeld) {
        self.sequences.iter().zip(held.sequences).for_each(|(gauge, count)| gauge.set(count as f64));
        self.blocks.iter().zip(held.blocks).for_each(|(gauge, count)| gauge.set(count as f64));
    }
}

/// Gives a tenant its label, before its first request. Calling it again does nothing.
pub fn register(tenant: Tenant, label: &str) {
    if let Some(registry) = REGISTRY.get() {
        let mut tenants = TENANTS.write().unwrap_or_else(PoisonError::into_inner);
        tenants.register(tenant, label, |label| TenantMetrics::new(registry, label));
    }
}

/// The metrics of a tenant. `None` for requests without a key, or if metrics are disabled.
pub fn of(tenant: Tenant) -> Option<Arc<TenantMetrics>> {
    TENANTS.read().unwrap_or_else(PoisonError::into_inner).of(tenant).cloned()
}

/// Whether any tenant has a label, so that [`set_held`] has something to do.
pub fn any() -> bool {
    !TENANTS.read().unwrap_or_else(PoisonError::into_inner).labels.is_empty()
}

/// What a tenant's requests hold in the engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct TenantHeld {
    /// Waiting, running, swapped.
    pub sequences: [usize; 3],
    /// On the device, in the swap pool.
    pub blocks: [usize; 2],
}

/// Sets what each tenant holds now. A tenant that is not in `held` holds nothing.
pub fn set_held(held: impl Iterator<Item = (Tenant, TenantHeld)>) {
    let tenants = TENANTS.read().unwrap_or_else(PoisonError::into_inner);
    for (metrics, held) in tenants.sums(held) {
        metrics.set_held(&held);
    }
}

/// A quota took effect on one of a tenant's sequences.
pub fn quota_refused(tenant: Tenant, tier: QuotaOf) {
    if let Some(metrics) = of(tenant) {
        metrics.quota[tier as usize].increment(1);
    }
}

pub(super) fn rejected(tenant: Tenant, reason: Rejection) {
    if let Some(metrics) = of(tenant) {
        metrics.rejections[reason as usize].increment(1);
    }
}

static TENANTS: RwLock<Tenants<Arc<TenantMetrics>>> = RwLock::new(Tenants { labels: Vec::new(), places: Vec::new() });

/// The label of each tenant.
struct Tenants<M> {
    labels: Vec<(String, M)>,
    /// The place of each tenant in `labels`.
    places: Vec<(Tenant, usize)>,
}

impl Tenants<Arc<TenantMetrics>> {
    fn of(&self, tenant: Tenant) -> Option<&Arc<TenantMetrics>> {
        self.place(tenant).map(|place| &self.labels[place].1)
    }

    /// For each label, the sum over its tenants.
    fn sums(
        &self,
        held: impl Iterator<Item = (Tenant, TenantHeld)>,
    ) -> impl Iterator<Item = (&TenantMetrics, TenantHeld)> {
        let mut sums = vec![TenantHeld::default(); self.labels.len()];
        for (tenant, held) in held {
            if let Some(place) = self.place(tenant) {
                let sum = &mut sums[place];
                sum.sequences.iter_mut().zip(held.sequences).for_each(|(sum, count)| *sum += count);
                sum.blocks.iter_mut().zip(held.blocks).for_each(|(sum, count)| *sum += count);
            }
        }
        self.labels.iter().map(|(_, metrics)| &**metrics).zip(sums)
    }

    fn register(&mut self, tenant: Tenant, label: &str, make: impl Fn(&str) -> TenantMetrics) {
        self.place_or_insert(tenant, label, |label| Arc::new(make(label)));
    }
}

impl<M> Tenants<M> {
    fn place(&self, tenant: Tenant) -> Option<usize> {
        self.places.iter().find(|(known, _)| *known == tenant).map(|(_, place)| *place)
    }

    fn place_or_insert(&mut self, tenant: Tenant, label: &str, make: impl Fn(&str) -> M) -> usize {
        if let Some(place) = self.place(tenant) {
            return place;
        }
        let find = |labels: &[(String, M)], label: &str| labels.iter().position(|(known, _)| known == label);
        let label = match find(&self.labels, label) {
            None if self.labels.len() >= MAX_LABELS => OTHERS,
            _ => label,
        };
        let place = find(&self.labels, label).unwrap_or_else(|| {
            self.labels.push((label.to_owned(), make(label)));
            self.labels.len() - 1
        });
        self.places.push((tenant, place));
        place
    }
}

impl TenantMetrics {
    fn new(registry: &Registry, tenant: &str) -> Self {
        let labels = |metric: &'static table::Metric, value: &'static str| {
            let (name, _) = metric.labels[1];
            vec![Label::new("tenant", tenant.to_owned()), Label::from_static_parts(name, value)]
        };
        let counter = |metric, value| registry.counter(metric, labels(metric, value));
        let gauge = |metric, value| registry.gauge(metric, labels(metric, value));
        Self {
            outcomes: OUTCOMES.map(|value| counter(&table::TENANT_REQUESTS_TOTAL, value)),
            rejections: REJECTIONS.map(|value| counter(&table::TENANT_REJECTED, value)),
            prompt_tokens: counter(&table::TENANT_TOKENS, "prompt"),
            generated_tokens: counter(&table::TENANT_TOKENS, "generated"),
            sequences: ["waiting", "running", "swapped"].map(|value| gauge(&table::TENANT_REQUESTS, value)),
            blocks: ["device", "swap"].map(|value| gauge(&table::TENANT_BLOCKS, value)),
            quota: ["device", "swap"].map(|value| counter(&table::TENANT_QUOTA, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_labels_is_bounded() {
        let mut tenants = Tenants { labels: Vec::new(), places: Vec::new() };
        let mut place = |id: u32, label: &str| tenants.place_or_insert(Tenant(id), label, |_| ());
        for id in 1..=MAX_LABELS as u32 {
            assert_eq!(place(id, &format!("key-{id}")), id as usize - 1);
        }
        assert_eq!([place(3, "another name"), place(90, "key-7")], [2, 6], "known by number, or by label");
        assert_eq!([place(100, "a"), place(101, "b"), place(100, "c")], [MAX_LABELS; 3]);
        assert_eq!((tenants.labels.len(), tenants.labels[MAX_LABELS].0.as_str()), (MAX_LABELS + 1, OTHERS));
    }
}
