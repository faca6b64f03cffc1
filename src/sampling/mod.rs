//! What a client asks of the next token, and how a row of logits becomes one: token ids only. The engine carries the
//! parameters; devices follow [`sampler`], which is also what the CPU backend uses.

pub mod params;
pub mod sampler;
