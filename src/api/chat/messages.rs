//! Parts of messages that all APIs write the same way for the chat template.

use crate::body::value::{Bounds, EmbeddedJson};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};

/// JSON values in the arguments of all calls of a conversation.
pub const MAX_ARGUMENT_VALUES: usize = 100_000;

/// The arguments of a conversation's calls. Clients send them as JSON in a string; templates write them out as JSON, so
/// they want the object.
pub struct CallArguments(EmbeddedJson);

impl Default for CallArguments {
    fn default() -> Self {
        Self(EmbeddedJson::new(Bounds { max_values: MAX_ARGUMENT_VALUES, max_prompts: 0 }))
    }
}

impl CallArguments {
    /// The object that `text` is. As in vLLM, what is no object becomes an empty one: a model's slip must not end the
    /// conversation. `param`: the field of the arguments.
    pub fn read(&self, param: &str, text: &str) -> Result<Map<String, Value>, ApiError> {
        match self.0.read(text).map_err(|_| too_many_values(param))? {
            Some(Value::Object(arguments)) => Ok(arguments),
            _ => Ok(Map::new()),
        }
    }

    /// Counts arguments that are an object already.
    pub fn count(&self, param: &str, arguments: &Map<String, Value>) -> Result<(), ApiError> {
        self.0.count(1 + arguments.values().map(num_values).sum::<usize>()).map_err(|_| too_many_values(param))
    }
}

fn num_values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(num_values).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(num_values).sum::<usize>(),
        _ => 1,
    }
}

fn too_many_values(param: &str) -> ApiError {
    let message =
        format!("{param}: the arguments of all calls may have {MAX_ARGUMENT_VALUES} JSON values, and have more");
    ApiError::too_complex(param, message)
}
