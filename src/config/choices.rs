//! Settings whose value is one of a few words. Those of the layers below are defined there.

use super::field::ConfigField;
use super::value::Value;
pub use pagetide_backend::cuda::driver::CopyBatches;
use pagetide_base::choice;
pub use pagetide_model::options::{CacheDtype, DeviceKind, DtypeChoice, LoadFormat, Quantization};
pub use pagetide_text::chat_output::format::{ReasoningParser, ToolCallParser};

choice!(
    /// An API over HTTP.
    Surface {
        OpenAi = "openai",
        Anthropic = "anthropic",
        Vllm = "vllm",
        LlamaCpp = "llama.cpp",
        Sglang = "sglang",
        Ollama = "ollama",
        Cohere = "cohere",
    }
);

choice!(
    /// Whose answers OpenAI's paths give, where OpenAI and a server with the same paths differ.
    Dialect {
        OpenAi = "openai",
        Vllm = "vllm",
        LlamaCpp = "llama.cpp",
    }
);

choice!(
    /// Whether models think whose templates can be told so.
    ThinkingDefault {
        /// As the template has it.
        Auto = "auto",
        On = "on",
        Off = "off",
    }
);

choice!(
    /// Instruction set of the CPU kernels.
    IsaChoice {
        /// The best this machine has.
        Auto = "auto",
        Amx = "amx",
        Avx512 = "avx512",
        Avx512Widened = "avx512-widened",
        Avx512Vnni = "avx512-vnni",
        Avx512Base = "avx512-base",
        AvxVnni = "avx-vnni",
        Avx2 = "avx2",
        NeonI8mm = "neon-i8mm",
        NeonDotprod = "neon-dotprod",
        Neon = "neon",
        Portable = "portable",
    }
);
choice!(
    /// What happens to the blocks of a preempted sequence.
    PreemptionMode {
        /// The cheaper way for each victim.
        Auto = "auto",
        Swap = "swap",
        Recompute = "recompute",
    }
);
choice!(
    /// How many device blocks must be free before a sequence starts.
    AdmissionPolicy {
        /// Enough for what all running sequences are likely to need.
        Expected = "expected",
        /// Enough for all that the running sequences may need.
        MaxTokens = "max_tokens",
        /// Enough for the sequence's own tokens.
        Prompt = "prompt",
    }
);
choice!(
    /// Which cached blocks are evicted first.
    Eviction {
        /// Those whose kind has been used least, by number of uses and age.
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
    /// Whether a step is planned while the step before it runs.
    Overlap {
        /// On for a GPU.
        Auto = "auto",
        On = "on",
        Off = "off",
    }
);
choice!(
    /// What the server does after a device failure.
    OnFailure {
        /// Restart the executor.
        Restart = "restart",
        /// Exit the process.
        Exit = "exit",
    }
);
choice!(
    /// Which requests share cached prefixes.
    CacheIsolation {
        /// All requests.
        Shared = "shared",
        /// Requests with the same API key.
        PerKey = "per_key",
    }
);
choice!(
    /// Whether objects of a JSON schema may have properties that it does not name.
    SchemaObjects {
        /// Only where the schema says so (`additionalProperties`).
        Closed = "closed",
        /// Unless the schema forbids it, as JSON Schema has it.
        Open = "open",
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
    Dialect,
    ThinkingDefault,
    IsaChoice,
    PreemptionMode,
    AdmissionPolicy,
    Eviction,
    SchedulingPolicy,
    Overlap,
    OnFailure,
    CacheIsolation,
    CopyBatches,
    SchemaObjects,
    LogFormat,
    DeviceKind,
    DtypeChoice,
    CacheDtype,
    LoadFormat,
    Quantization,
    ReasoningParser,
    ToolCallParser,
);
