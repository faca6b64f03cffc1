//! The requests under way by their ids. Every HTTP worker enters and reads them, on any thread, and none waits for
//! another: the map is sharded (dashmap).

use dashmap::{DashMap, Entry};
use pagetide_base::error::ApiError;
use pagetide_engine::bill::Tenant;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// The requests of all clients that are being answered. All clones are of the same requests.
#[derive(Clone, Default)]
pub struct RequestsUnderWay(Arc<DashMap<String, AbortHandle>>);

struct AbortHandle {
    tenant: Tenant,
    /// What the id stands for.
    what: Aborted,
    /// `None` once it has been used.
    abort: Option<mpsc::UnboundedSender<Aborted>>,
}

/// What is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aborted {
    Request,
    /// One of its prompts.
    Prompt(usize),
}

/// A request's entries, which are taken out when this is dropped.
pub struct RequestUnderWay {
    /// That of the request, then those of its prompts.
    ids: Vec<String>,
    tenant: Tenant,
    requests: RequestsUnderWay,
    /// Each entry sends once at most.
    send: mpsc::UnboundedSender<Aborted>,
    aborted: mpsc::UnboundedReceiver<Aborted>,
}

impl RequestsUnderWay {
    /// Enters a request.
    ///
    /// # Errors
    /// Another one of this id is under way.
    pub fn enter(&self, id: &str, tenant: Tenant) -> Result<RequestUnderWay, ApiError> {
        let (send, aborted) = mpsc::unbounded_channel();
        let mut entered = RequestUnderWay { ids: Vec::new(), tenant, requests: self.clone(), send, aborted };
        entered.enter("request_id", id, Aborted::Request)?;
        Ok(entered)
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
        let what = entry.what;
        // Without a receiver the request has ended in this moment.
        entry.abort.take().is_some_and(|abort| abort.send(what).is_ok())
    }

    /// Ends every request of this tenant; of all tenants for `None`.
    pub fn abort_all(&self, tenant: Option<Tenant>) {
        let is_meant = |entry: &AbortHandle| tenant.is_none_or(|tenant| entry.tenant == tenant);
        for mut entry in self.0.iter_mut().filter(|entry| entry.what == Aborted::Request && is_meant(entry)) {
            if let Some(abort) = entry.abort.take() {
                // As above.
                let _ = abort.send(Aborted::Request);
            }
        }
    }

    /// How many there are, of all clients.
    pub fn num(&self) -> usize {
        self.0.iter().filter(|entry| entry.what == Aborted::Request).count()
    }

    /// The ids of this tenant's requests.
    pub fn ids(&self, tenant: Tenant) -> Vec<String> {
        let is_own = |entry: &AbortHandle| entry.what == Aborted::Request && entry.tenant == tenant;
        self.0.iter().filter(|entry| is_own(entry)).map(|entry| entry.key().clone()).collect()
    }
}

impl RequestUnderWay {
    /// Enters the id of one of the request's prompts, which may then be aborted alone.
    ///
    /// # Errors
    /// Another one of this id is under way.
    pub fn enter_prompt(&mut self, id: &str, prompt: usize) -> Result<(), ApiError> {
        self.enter("rid", id, Aborted::Prompt(prompt))
    }

    fn enter(&mut self, param: &str, id: &str, what: Aborted) -> Result<(), ApiError> {
        match self.requests.0.entry(id.to_owned()) {
            Entry::Occupied(_) => {
                let message = format!("{param}: another request with the id {id:?} is under way");
                Err(ApiError::invalid(param, message))
            }
            Entry::Vacant(place) => {
                place.insert(AbortHandle { tenant: self.tenant, what, abort: Some(self.send.clone()) });
                self.ids.push(id.to_owned());
                Ok(())
            }
        }
    }

    /// The next that is aborted.
    pub fn poll_aborted(&mut self, cx: &mut Context<'_>) -> Poll<Aborted> {
        match self.aborted.poll_recv(cx) {
            Poll::Ready(Some(aborted)) => Poll::Ready(aborted),
            // It does not end: a sender is beside it.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        for id in &self.ids {
            self.requests.0.remove(id);
        }
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
        requests.abort_all(Some(Tenant(2)));
        assert_eq!(poll_fn(|cx| other.poll_aborted(cx)).now_or_never(), Some(Aborted::Request));
    }

    #[test]
    fn a_prompt_is_aborted_by_its_own_id() {
        let requests = RequestsUnderWay::default();
        let mut request = requests.enter("a", Tenant(1)).unwrap();
        request.enter_prompt("a_0", 0).unwrap();
        request.enter_prompt("a_1", 1).unwrap();
        assert_eq!(request.enter_prompt("a_1", 2).unwrap_err().param.as_deref(), Some("rid"));
        assert_eq!((requests.num(), requests.ids(Tenant(1))), (1, vec!["a".to_owned()]));
        assert!(requests.abort("a_1", Tenant(1)) && !requests.abort("a_1", Tenant(1)));
        assert_eq!(poll_fn(|cx| request.poll_aborted(cx)).now_or_never(), Some(Aborted::Prompt(1)));
        assert_eq!(poll_fn(|cx| request.poll_aborted(cx)).now_or_never(), None);
        requests.abort_all(None);
        assert_eq!(poll_fn(|cx| request.poll_aborted(cx)).now_or_never(), Some(Aborted::Request));
        drop(request);
        assert!(requests.0.is_empty());
    }
}
