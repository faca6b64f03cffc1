//! Settings that are one of a few words.

use super::value;
use std::fmt;
use std::str::FromStr;

/// An enum written as one of a few words.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// The words, in the order of the variants.
            pub const NAMES: &'static [&'static str] = &[$($word),+];

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl value::Field for $name {
            fn store(&mut self, value: value::Value) {
                match value {
                    value::Value::Text(word) => *self = word.parse().expect("the kind admits only NAMES"),
                    other => unreachable!("a choice is text, not {other:?}"),
                }
            }

            fn load(&self) -> value::Value {
                value::Value::Text(self.name().into())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> Result<Self, String> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(format!("'{word}' is not one of {}", Self::NAMES.join(", "))),
                }
            }
        }
    };
}

choice!(
    /// Type of weights and KV cache.
    DtypeChoice {
        /// The checkpoint's own.
        Auto = "auto",
        Float32 = "float32",
        Float16 = "float16",
        Bfloat16 = "bfloat16",
    }
);
choice!(
    /// Where the weights come from.
    LoadFormat {
        /// The checkpoint's safetensors files.
        Auto = "auto",
        /// Random numbers.
        Dummy = "dummy",
        /// Nowhere: there is no model.
        Null = "null",
    }
);
choice!(
    /// In which words the model calls tools.
    ToolCallParser {
        /// As its chat template shows it.
        Auto = "auto",
        None = "none",
        Hermes = "hermes",
        Llama3Json = "llama3_json",
        Mistral = "mistral",
    }
);
choice!(
    /// How the model marks its reasoning.
    ReasoningParser {
        /// As its chat template shows it.
        Auto = "auto",
        None = "none",
        DeepseekR1 = "deepseek_r1",
        Qwen3 = "qwen3",
        Mistral = "mistral",
    }
);
choice!(DeviceKind {
    /// The GPU if there is one, else the CPU.
    Auto = "auto",
    Cpu = "cpu",
    Cuda = "cuda",
});
choice!(
    /// Instruction set of the CPU kernels.
    Isa {
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
