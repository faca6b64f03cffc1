//! Parameters in the form that the draw's integer arithmetic needs.

use super::row;

/// The factor on logits. It is always finite, so that the best token's exponent is 0.
pub fn inverse_temperature(temperature: f32) -> f32 {
    (1.0 / temperature).min(f32::MAX)
}

/// The least weight that `min_p` keeps.
pub fn weight_of_min_p(min_p: f32) -> u64 {
    ((f64::from(min_p) * row::ONE as f64).ceil() as u64).clamp(1, row::ONE)
}

/// `top_p` in units of 2⁻³², so that the weight to reach is an integer product.
pub fn top_p_share(top_p: f32) -> u64 {
    (f64::from(top_p) * (1_u64 << 32) as f64).round() as u64
}

/// The weight that the tokens kept by `top_p` have to reach, of all that have `total`.
pub(super) fn top_p_target(top_p: f32, total: u64) -> u64 {
    ((u128::from(total) * u128::from(top_p_share(top_p))).div_ceil(1 << 32) as u64).clamp(1, total)
}
