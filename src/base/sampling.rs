//! Sampling: the parameters of a request, and how a row of logits becomes a token. Everything is in token ids; there is
//! no text. All devices follow the rules of [`sampler`], and the CPU backend uses its code.

pub mod extra;
pub mod params;
pub mod sampler;
