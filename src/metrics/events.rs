//! Events that metrics count, and the labels that they are counted under.

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Outcome {
    /// An end token, a stop token or a stop string.
    #[default]
    Stop,
    Length,
    Cancelled,
    Failed,
}

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rejection {
    QueueFull,
    TooLong,
    Invalid,
    Draining,
    /// Too many requests per minute.
    RequestLimit,
    /// Too many tokens per minute.
    TokenLimit,
    /// Too many requests at once.
    ConcurrencyLimit,
    /// Too many connections at once.
    ConnectionLimit,
    /// Too many bytes of large bodies at once.
    ParsingFull,
}

/// Label values in the order of [`Outcome`].
pub const OUTCOMES: [&str; 4] = ["stop", "length", "cancelled", "failed"];
/// Label values in the order of [`Rejection`].
pub const REJECTIONS: [&str; 9] = [
    "queue_full",
    "too_long",
    "invalid",
    "draining",
    "request_limit",
    "token_limit",
    "concurrency_limit",
    "connection_limit",
    "parsing_full",
];

/// What happened to the blocks of a preempted sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Preemption {
    Swap,
    Recompute,
}

/// Label values in the order of [`Preemption`].
pub const PREEMPTIONS: [&str; 2] = ["swap", "recompute"];

/// What the arbiter chose for the blocks of a victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArbiterChoice {
    Swap,
    /// Only full blocks are swapped.
    SwapFull,
    Recompute,
}

/// Label values in the order of [`ArbiterChoice`].
pub const ARBITER_CHOICES: [&str; 3] = ["swap", "swap_full", "recompute"];

/// Why a preemption copied more blocks than `swap.max_tail_blocks` and the partly filled one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TailReason {
    /// The last steps of the victim filled blocks.
    Filled,
    Unforeseen,
    /// Copies of others were in the way.
    QueueFull,
    /// The swap pool had no room for copies ahead.
    NoRoom,
    /// Nothing is copied ahead.
    Off,
}

/// Label values in the order of [`TailReason`].
pub const TAIL_REASONS: [&str; 5] = ["filled", "unforeseen", "queue_full", "no_room", "off"];

/// The tier that a quota is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuotaOf {
    Device,
    Swap,
}
