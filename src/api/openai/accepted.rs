//! Fields of OpenAI's API that are read and change nothing here, or nothing yet: a wrong type is an error all the same.

use crate::body::body_fields;
use crate::chat::template::words;
use crate::checks::{check_metadata, one_of};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use utoipa::ToSchema;

body_fields! {
    /// Of both endpoints.
    pub struct AcceptedFields {
        /// An id of the client's user. Without effect.
        pub user: Option<String>,
        /// Notes of the client's own, a string for each name. Without effect.
        #[schema(value_type = Option<HashMap<String, String>>)]
        pub metadata: Option<Map<String, Value>>,
    }
}

body_fields! {
    /// Of chats alone.
    pub struct AcceptedChatFields {
        /// Whether OpenAI may keep the answer. Nothing is kept here.
        pub store: Option<bool>,
        /// Which of OpenAI's queues takes the request. Without effect; see priority.
        #[schema(value_type = Option<ServiceTier>)]
        pub service_tier: Option<String>,
        /// A stable name of the end user. Without effect.
        pub safety_identifier: Option<String>,
        /// Names requests with a common prefix. Without effect: equal prefixes are found by themselves.
        pub prompt_cache_key: Option<String>,
        /// How long a cached prefix is kept. Without effect: as long as there is room.
        #[schema(value_type = Option<CacheRetention>)]
        pub prompt_cache_retention: Option<String>,
        /// How long an answer should be. Without effect.
        #[schema(value_type = Option<Verbosity>)]
        pub verbosity: Option<String>,
        /// Text that much of the answer is expected to repeat. Without effect.
        #[schema(value_type = Option<Prediction>)]
        pub prediction: Option<Map<String, Value>>,
        /// Kinds of output; there is only text.
        #[schema(value_type = Option<Vec<Modality>>, min_items = 1)]
        pub modalities: Option<Vec<String>>,
    }
}

words! {
    /// OpenAI's queues.
    ServiceTier {
        Auto = "auto", Default = "default", Flex = "flex", Scale = "scale", Priority = "priority"
    }
    CacheRetention { InMemory = "in_memory", Day = "24h" }
    Verbosity { Low = "low", Medium = "medium", High = "high" }
    Modality { Text = "text" }
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct Prediction {
    #[schema(value_type = PredictionType)]
    r#type: (),
    /// A string, or text parts.
    #[schema(value_type = Option<Value>)]
    content: (),
}

words! {
    PredictionType { Content = "content" }
}

impl AcceptedFields {
    pub fn check(&self) -> Result<(), ApiError> {
        check_metadata(self.metadata.as_ref())
    }
}

impl AcceptedChatFields {
    pub fn check(&self) -> Result<(), ApiError> {
        one_of("service_tier", self.service_tier.as_deref(), ServiceTier::WORDS)?;
        one_of("prompt_cache_retention", self.prompt_cache_retention.as_deref(), CacheRetention::WORDS)?;
        one_of("verbosity", self.verbosity.as_deref(), Verbosity::WORDS)?;
        if let Some(prediction) = &self.prediction {
            let kind = prediction.get("type").and_then(Value::as_str).unwrap_or_default();
            one_of("prediction.type", Some(kind), PredictionType::WORDS)?;
        }
        let Some(modalities) = &self.modalities else { return Ok(()) };
        if modalities.is_empty() {
            return Err(ApiError::invalid("modalities", "modalities must have at least one, \"text\""));
        }
        for (i, modality) in modalities.iter().enumerate() {
            one_of(&format!("modalities[{i}]"), Some(modality), Modality::WORDS)?;
        }
        Ok(())
    }
}
