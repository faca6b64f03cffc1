//! What memory pressure costs the requests, for their owners to hear.

use crate::bill::KvBill;
use crate::plan::{Deliveries, Delivery};
use pagetide_base::ids::{IdMap, RequestId};
use serde::{Deserialize, Serialize};

/// The bills of all requests.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Ledger {
    /// The bills of requests that memory pressure has cost something.
    bills: IdMap<RequestId, KvBill>,
    /// Requests whose bill has changed since it was last delivered.
    changed: Vec<RequestId>,
}

impl Ledger {
    /// The bill of a request, to add to it.
    pub fn bill(&mut self, request: RequestId) -> &mut KvBill {
        self.changed.push(request);
        self.bills.entry(request).or_default()
    }

    /// Delivers the bills that have changed.
    pub fn deliver(&mut self, deliveries: &mut Deliveries) {
        self.changed.sort_unstable();
        self.changed.dedup();
        let bills = self.changed.drain(..).filter_map(|request| Some((request, *self.bills.get(&request)?)));
        deliveries.extend(bills.map(|(request, bill)| (request, Delivery::Bill(Box::new(bill)))));
    }

    /// A request has ended.
    pub fn end(&mut self, request: RequestId) {
        self.bills.remove(&request);
    }
}
