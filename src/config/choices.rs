//! Settings whose value is one of a few words. Those of the layers below are defined there.

use super::field::ConfigField;
use super::value::Value;
use crate::choice::choice;
pub use crate::model::options::{DeviceKind, DtypeChoice, LoadFormat};
pub use crate::text::chat_output::format::{ReasoningParser, ToolCallParser};

choice!(
    /// Instruction set of the CPU kernels.
    IsaChoice {
        /// The best this machine has.
        Auto = "auto",
        Amx = "amx",
        Avx512 = "avx512",
        Avx2 = "avx2",
        Neon = "neon",
        Portable = "portable",
    }
);
choice!(
    /// What happens to a sequence that must give its device blocks away.
    PreemptionMode {
        /// Chosen for each victim.
        Auto = "auto",
        Swap = "swap",
        Recompute = "recompute",
    }
);
choice!(
    /// What a sequence has to find room for before it runs, beside those that do.
    AdmissionPolicy {
        /// What all of them are expected to need.
        Expected = "expected",
        /// What all of them may need.
        MaxTokens = "max_tokens",
        /// The tokens that it has.
        Prompt = "prompt",
    }
);
choice!(
    /// Which cached block is given away first.
    Eviction {
        /// By what blocks of its kind have been worth.
        Adaptive = "adaptive",
        /// The least recently used.
        Lru = "lru",
    }
);
choice!(SchedulingPolicy {
    /// First come, first served.
    Fcfs = "fcfs",
    /// By the request's `priority`, lower first, then by arrival.
    Priority = "priority",
});
choice!(
    /// Whether a step is planned while the one before it runs.
    Overlap {
        /// On for a GPU.
        Auto = "auto",
        On = "on",
        Off = "off",
    }
);
choice!(
    /// What follows when the device has failed, and the requests that ran with it.
    OnFailure {
        /// The executor starts over.
        Restart = "restart",
        /// The process ends.
        Exit = "exit",
    }
);
choice!(
    /// Who shares cached prefixes.
    CacheIsolation {
        /// All requests.
        Shared = "shared",
        /// Requests of one API key.
        PerKey = "per_key",
    }
);
choice!(LogFormat { Human = "human", Json = "json" });

macro_rules! choice_fields {
    ($($name:ident),+ $(,)?) => {$(
        impl ConfigField for $name {
            fn store(&mut self, value: Value) {
                match value {
                    Value::Text(word) => *self = word.parse().expect("the kind admits only NAMES"),
                    other => unreachable!("a choice is text, not {other:?}"),
                }
            }

            fn load(&self) -> Value {
                Value::Text(self.name().into())
            }
        }
    )+};
}

choice_fields!(
    IsaChoice,
    PreemptionMode,
    AdmissionPolicy,
    Eviction,
    SchedulingPolicy,
    Overlap,
    OnFailure,
    CacheIsolation,
    LogFormat,
    DeviceKind,
    DtypeChoice,
    LoadFormat,
    ReasoningParser,
    ToolCallParser,
);
