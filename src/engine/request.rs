//! A request as the scheduler reads it.

use crate::bill::{Tenant, Terms};
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::rules::ConstraintSource;
use pagetide_base::sampling::params::SamplingParams;
use std::sync::Arc;

/// The part of a request that the scheduler reads. An API request carries one from the start; the intake fills in what
/// it finds out: `id`, `prompt` and `constraint`, and the parameters that the client left open.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// Larger than the ids of all earlier requests.
    pub id: RequestId,
    pub prompt: Arc<Vec<TokenId>>,
    pub params: Arc<SamplingParams>,
    /// Number of samples, at least 1.
    pub n: u32,
    /// Lower goes first under the priority policy.
    pub priority: i32,
    /// Separates prefix caches: requests share cached blocks only with requests of the same salt.
    pub cache_salt: Option<String>,
    pub terms: Terms,
    pub tenant: Tenant,
    /// Rules that the output of every sample follows.
    pub constraint: Option<Arc<dyn ConstraintSource>>,
    /// Its owner wants to hear how far its prompt is computed.
    pub reports_progress: bool,
}

impl EngineRequest {
    /// A request for one sample, with nothing special about it. This is the only place that names all fields: others
    /// use struct update.
    pub fn new(prompt: impl Into<Arc<Vec<TokenId>>>, params: impl Into<Arc<SamplingParams>>) -> Self {
        Self {
            id: RequestId(0),
            prompt: prompt.into(),
            params: params.into(),
            n: 1,
            priority: 0,
            cache_salt: None,
            terms: Terms::default(),
            tenant: Tenant::default(),
            constraint: None,
            reports_progress: false,
        }
    }
}
