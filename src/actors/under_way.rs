//! The requests under way by their ids. Every HTTP worker enters and reads them, on any thread, and none waits for
//! another: the map is sharded (dashmap).

use dashmap::{DashMap, Entry};
use pagetide_base::error::ApiError;
use pagetide_engine::bill::Tenant;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::oneshot;

/// The requests of all clients that are being answered. All clones are of the same requests.
#[derive(Clone, Default)]
pub struct RequestsUnderWay(Arc<DashMap<String, AbortHandle>>);

struct AbortHandle {
    tenant: Tenant,
    /// `None` once it has been used.
    abort: Option<oneshot::Sender<()>>,
}

/// A request's entry, which is taken out when this is dropped.
pub struct RequestUnderWay {
    id: String,
    requests: RequestsUnderWay,
    aborted: oneshot::Receiver<()>,
}

impl RequestsUnderWay {
    /// Enters a request.
    ///
    /// # Errors
    /// Another one of this id is under way.
    pub fn enter(&self, id: &str, tenant: Tenant) -> Result<RequestUnderWay, ApiError> {
        let (abort, aborted) = oneshot::channel();
        match self.0.entry(id.to_owned()) {
            Entry::Occupied(_) => {
                let message = format!("request_id: another request with the id {id:?} is under way");
                Err(ApiError::invalid("request_id", message))
            }
            Entry::Vacant(place) => {
                place.insert(AbortHandle { tenant, abort: Some(abort) });
                Ok(RequestUnderWay { id: id.to_owned(), requests: self.clone(), aborted })
            }
        }
    }

    /// Ends the request of this id, if it is the tenant's own. The id may have the prefix that it has in answers, as
    /// `chatcmpl-`. Returns whether there was such a request.
    pub fn abort(&self, id: &str, tenant: Tenant) -> bool {
        const PREFIXES: [&str; 6] = ["chatcmpl-", "cmpl-", "embd-", "pool-", "resp_", "msg_"];
        let bare = PREFIXES.iter().filter_map(|prefix| id.strip_prefix(prefix));
        std::iter::once(id).chain(bare).any(|id| self.abort_exactly(id, tenant))
    }

    fn abort_exactly(&self, id: &str, tenant: Tenant) -> bool {
        let Some(mut entry) = self.0.get_mut(id).filter(|entry| entry.tenant == tenant) else { return false };
        // Without a receiver the request has ended in this moment.
        entry.abort.take().is_some_and(|abort| abort.send(()).is_ok())
    }

    /// Ends every request of this tenant.
    pub fn abort_all(&self, tenant: Tenant) {
        for mut entry in self.0.iter_mut().filter(|entry| entry.tenant == tenant) {
            if let Some(abort) = entry.abort.take() {
                // As above.
                let _ = abort.send(());
            }
        }
    }

    /// How many there are, of all clients.
    pub fn num(&self) -> usize {
        self.0.len()
    }

    /// The ids of this tenant's requests.
    pub fn ids(&self, tenant: Tenant) -> Vec<String> {
        self.0.iter().filter(|entry| entry.tenant == tenant).map(|entry| entry.key().clone()).collect()
    }
}

impl RequestUnderWay {
    /// Completes when the request is aborted. Must not be called again after that.
    pub fn poll_aborted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The sender is in the map until the abort.
        Pin::new(&mut self.aborted).poll(cx).map(drop)
    }
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        self.requests.0.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::future::poll_fn;

    #[test]
    fn an_id_is_under_way_once_and_is_free_again_at_its_end() {
        let requests = RequestsUnderWay::default();
        let first = requests.enter("a", Tenant(1)).unwrap();
        assert_eq!(requests.enter("a", Tenant(2)).err().unwrap().param.as_deref(), Some("request_id"));
        assert_eq!((requests.num(), requests.ids(Tenant(1))), (1, vec!["a".to_owned()]));
        assert_eq!(requests.ids(Tenant(2)), Vec::<String>::new());
        drop(first);
        assert!(requests.enter("a", Tenant(2)).is_ok());
        assert_eq!(requests.num(), 0);
    }

    #[test]
    fn a_tenant_aborts_its_own_requests_alone() {
        let requests = RequestsUnderWay::default();
        let (mut own, mut other) = (requests.enter("a", Tenant(1)).unwrap(), requests.enter("b", Tenant(2)).unwrap());
        assert!(!requests.abort("b", Tenant(1)) && !requests.abort("c", Tenant(1)));
        assert!(requests.abort("chatcmpl-a", Tenant(1)));
        assert!(!requests.abort("a", Tenant(1)), "it has been aborted");
        assert!(poll_fn(|cx| own.poll_aborted(cx)).now_or_never().is_some());
        assert!(poll_fn(|cx| other.poll_aborted(cx)).now_or_never().is_none());
        requests.abort_all(Tenant(2));
        assert!(poll_fn(|cx| other.poll_aborted(cx)).now_or_never().is_some());
    }
}
