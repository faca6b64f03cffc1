//! What a commit told the requests' owners, in few bytes: enough to compare two commits, and to say how they differ.

use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::FinishReason;
use pagetide_engine::bill::KvBill;
use pagetide_engine::plan::{Deliveries, Delivery};
use pagetide_engine::scheduler::summary::{Digest, differ};
use serde::{Deserialize, Serialize};

/// The deliveries of a step: the samples that ended, and a digest of everything but tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeliverySummary {
    pub num: usize,
    /// Samples that ended.
    pub finished: Vec<(RequestId, u32)>,
    digest: Digest,
}

impl DeliverySummary {
    pub fn new(deliveries: &Deliveries) -> Self {
        let mut summary = Self { num: deliveries.len(), ..Self::default() };
        for (request, delivery) in deliveries {
            let (kind, number) = match delivery {
                Delivery::Bill(bill) => (0, summary.add_bill(bill)),
                Delivery::Paused { sample } => (1, *sample as usize),
                Delivery::Resumed { sample } => (2, *sample as usize),
                Delivery::Started { cached_tokens } => (3, *cached_tokens),
                Delivery::PromptLogprobs(logprobs) => (4, logprobs.len()),
                Delivery::Embedding(_) => (5, 0),
                Delivery::Token { sample, .. } => (6, *sample as usize),
                Delivery::Finished { sample, reason } => {
                    summary.finished.push((*request, *sample));
                    let kind = match reason {
                        FinishReason::Eos => 7,
                        FinishReason::StopToken(_) => 8,
                        FinishReason::Length => 9,
                    };
                    (kind, *sample as usize)
                }
                Delivery::Failed { .. } => (10, 0),
            };
            summary.digest.add(request.0);
            summary.digest.add_all([kind, number]);
        }
        summary
    }

    fn add_bill(&mut self, bill: &KvBill) -> usize {
        let KvBill { cached_device_tokens, cached_swap_tokens, preemptions, swapped_out_blocks, .. } = *bill;
        self.digest.add_all([cached_device_tokens, cached_swap_tokens, preemptions, swapped_out_blocks]);
        self.digest.add_all([bill.swapped_in_blocks, bill.recomputed_tokens]);
        0
    }

    /// How `other` differs. `None` if it does not.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let ends = |summary: &Self| {
            let ends: Vec<String> =
                summary.finished.iter().map(|(request, sample)| format!("{request}.{sample}")).collect();
            if ends.is_empty() { "none".to_owned() } else { ends.join(", ") }
        };
        (self != other).then(|| match differ("samples that end", &ends(self), &ends(other)) {
            Some(difference) => difference,
            None => format!("what requests are told: {} things in the recording, {} now", self.num, other.num),
        })
    }
}
