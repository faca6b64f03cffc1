//! What memory pressure costs the requests, for them to hear.

use super::Scheduler;
use crate::engine::bill::KvBill;
use crate::engine::plan::{Deliveries, Delivery};
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::RequestId;

impl Scheduler {
    /// It has yielded. Where its KV had not come back since it yielded before, it is the same pause that goes on.
    pub(super) fn pause(&mut self, seq: &mut Sequence) {
        self.bill(seq.rank.request).preemptions += 1;
        if std::mem::replace(&mut seq.paused, true) {
            return;
        }
        seq.paused_at = self.now;
        if seq.terms.max_pause.is_some() {
            self.limited.insert(seq.rank);
        }
        self.report.pauses.push((seq.rank.request, Delivery::Paused { sample: seq.sample }));
    }

    /// A running sequence has its KV, perhaps again.
    pub(super) fn resume(&mut self, rank: Rank) {
        let seq = self.running.get_mut(&rank).expect("it runs");
        if std::mem::take(&mut seq.paused) {
            self.limited.remove(&rank);
            self.report.pauses.push((rank.request, Delivery::Resumed { sample: seq.sample }));
        }
    }

    /// What memory pressure has cost a request, to add to.
    pub(super) fn bill(&mut self, request: RequestId) -> &mut KvBill {
        self.billed.push(request);
        self.bills.entry(request).or_default()
    }

    /// Tells the bills that have changed.
    pub(super) fn tell_bills(&mut self, deliveries: &mut Deliveries) {
        self.billed.sort_unstable();
        self.billed.dedup();
        let bills = self.billed.drain(..).filter_map(|request| Some((request, *self.bills.get(&request)?)));
        deliveries.extend(bills.map(|(request, bill)| (request, Delivery::Bill(Box::new(bill)))));
    }
}
