//! Floating-point formats and exact rounding.
//!
//! Every operation here computes an exact result as a sum of two float64 numbers and rounds it once. So a fused
//! multiply-add, a conversion, or an operation with a directed rounding has the bits that the manual asks for.

/// How a result that the format cannot represent is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rounding {
    /// `.rn`: to nearest, ties to even.
    #[default]
    NearestEven,
    /// `.rna`: to nearest, ties away from zero.
    NearestAway,
    /// `.rz`
    TowardZero,
    /// `.rm`
    Down,
    /// `.rp`
    Up,
}

/// A binary floating-point format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Format {
    pub exponent_bits: u32,
    pub mantissa_bits: u32,
    /// The largest finite number's bits.
    pub largest: u32,
    /// The canonical NaN.
    pub nan: u32,
    /// Whether there is an infinity. E4M3 has none.
    pub has_infinity: bool,
}

pub const F32: Format =
    Format { exponent_bits: 8, mantissa_bits: 23, largest: 0x7f7f_ffff, nan: 0x7fff_ffff, has_infinity: true };
pub const F16: Format =
    Format { exponent_bits: 5, mantissa_bits: 10, largest: 0x7bff, nan: 0x7fff, has_infinity: true };
pub const BF16: Format =
    Format { exponent_bits: 8, mantissa_bits: 7, largest: 0x7f7f, nan: 0x7fff, has_infinity: true };
/// In the high 19 bits of a word once shifted: [`encode_tf32`].
const TF32: Format =
    Format { exponent_bits: 8, mantissa_bits: 10, largest: 0x3_fbff, nan: 0x3_ffff, has_infinity: true };
pub const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, largest: 0x7e, nan: 0x7f, has_infinity: false };
pub const E5M2: Format = Format { exponent_bits: 5, mantissa_bits: 2, largest: 0x7b, nan: 0x7f, has_infinity: true };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn sign_bit(self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// The number that `bits` mean. All numbers of these formats are float64 numbers.
    pub fn decode(self, bits: u32) -> f64 {
        let magnitude = bits & (self.sign_bit() - 1);
        let sign = if bits & self.sign_bit() != 0 { -1.0 } else { 1.0 };
        if magnitude > self.largest {
            return if self.has_infinity && magnitude == self.largest + 1 { sign * f64::INFINITY } else { f64::NAN };
        }
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        let (whole, exponent) =
            if exponent == 0 { (mantissa, 1) } else { (mantissa | 1 << self.mantissa_bits, exponent) };
        sign * f64::from(whole) * power_of_two(exponent - self.bias() - self.mantissa_bits as i32)
    }

    /// `x`, rounded. With `saturate` a number that is too large becomes the largest finite one (`.satfinite`).
    pub fn encode(self, x: f64, rounding: Rounding, saturate: bool) -> u32 {
        if x.is_nan() {
            return self.nan;
        }
        if self == F32 && rounding == Rounding::NearestEven && !saturate {
            return (x as f32).to_bits();
        }
        let negative = x.is_sign_negative();
        let sign = if negative { self.sign_bit() } else { 0 };
        if x == 0.0 {
            return sign;
        }
        let overflow = |infinite: bool| {
            let to_infinity = infinite
                || match rounding {
                    Rounding::NearestEven | Rounding::NearestAway => true,
                    Rounding::TowardZero => false,
                    Rounding::Down => negative,
                    Rounding::Up => !negative,
                };
            if saturate || !to_infinity {
                sign | self.largest
            } else if self.has_infinity {
                sign | (self.largest + 1)
            } else {
                sign | self.nan
            }
        };
        if x.is_infinite() {
            return overflow(true);
        }
        let bits = x.to_bits();
        let field = ((bits >> 52) & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (mantissa, exponent) = if field == 0 { (fraction, -1022) } else { (fraction | 1 << 52, field - 1023) };
        let smallest = 1 - self.bias();
        let scale = exponent.max(smallest);
        // The last place of the result, in places of the float64 mantissa.
        let shift = (scale - exponent) as u32 + 52 - self.mantissa_bits;
        let (kept, rest, half) = if shift > 62 {
            (0, 1, 2)
        } else {
            (mantissa >> shift, mantissa & ((1 << shift) - 1), 1_u64 << (shift - 1))
        };
        let up = match rounding {
            Rounding::NearestEven => rest > half || (rest == half && kept & 1 == 1),
            Rounding::NearestAway => rest >= half,
            Rounding::TowardZero => false,
            Rounding::Down => rest != 0 && negative,
            Rounding::Up => rest != 0 && !negative,
        };
        let kept = kept + u64::from(up);
        let magnitude = (((scale - smallest) as u64) << self.mantissa_bits) + kept;
        if magnitude > u64::from(self.largest) { overflow(false) } else { sign | magnitude as u32 }
    }
}

/// 2^`exponent` for exponents of normal float64 numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// A tf32 number, as a word whose low 13 bits are zero.
pub fn encode_tf32(x: f64, rounding: Rounding, saturate: bool) -> u32 {
    TF32.encode(x, rounding, saturate) << 13
}

/// `sum + error` rounded to odd: the last bit is set if the result is not exact. Rounding it again to a format of at
/// most 51 bits is then rounding once. `error` is below half a unit in the last place of `sum`.
pub fn to_odd(sum: f64, error: f64) -> f64 {
    if error == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    if sum == 0.0 {
        return error;
    }
    let grows = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if grows { sum.to_bits() | 1 } else { sum.to_bits() - 1 })
}

/// `a + b` and the rounding error, exactly (Knuth's TwoSum).
pub fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    if !sum.is_finite() {
        return (sum, 0.0);
    }
    let b_part = sum - a;
    (sum, (a - (sum - b_part)) + (b - b_part))
}

/// `a * b + c` for numbers whose product is exact in float64, as an odd-rounded float64.
pub fn fused(a: f64, b: f64, c: f64) -> f64 {
    let (sum, error) = two_sum(a * b, c);
    to_odd(sum, error)
}

/// A zero result of `a + b` has the sign that the rounding asks for: minus for `.rm` if the operands' signs differ.
fn signed_zero(x: f64, a: f64, b: f64, rounding: Rounding) -> f64 {
    if x == 0.0 && rounding == Rounding::Down && a.is_sign_negative() != b.is_sign_negative() { -0.0 } else { x }
}

/// `.ftz`: a subnormal number becomes a zero of its sign.
pub fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

/// NaN is 0x7fffffff, as NVIDIA's units make it.
pub fn canonical(x: f32) -> u32 {
    if x.is_nan() { F32.nan } else { x.to_bits() }
}

pub fn add_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    if rounding == Rounding::NearestEven {
        return a + b;
    }
    let (a, b) = (f64::from(a), f64::from(b));
    let (sum, error) = two_sum(a, b);
    f32::from_bits(F32.encode(signed_zero(to_odd(sum, error), a, b, rounding), rounding, false))
}

pub fn mul_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    if rounding == Rounding::NearestEven {
        return a * b;
    }
    f32::from_bits(F32.encode(f64::from(a) * f64::from(b), rounding, false))
}

pub fn fma_f32(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let (a, b, c) = (f64::from(a), f64::from(b), f64::from(c));
    let x = fused(a, b, c);
    if rounding == Rounding::NearestEven {
        // Odd rounding leaves more than twice the bits of a float32, so this rounds the exact result.
        return x as f32;
    }
    f32::from_bits(F32.encode(signed_zero(x, a * b, c, rounding), rounding, false))
}

/// The float64 quotient is rounded to odd by the sign of its remainder.
pub fn div_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    if rounding == Rounding::NearestEven {
        return a / b;
    }
    let (a, b) = (f64::from(a), f64::from(b));
    let quotient = a / b;
    let error = if quotient.is_finite() && quotient != 0.0 { -quotient.mul_add(b, -a) / b } else { 0.0 };
    f32::from_bits(F32.encode(to_odd(quotient, error), rounding, false))
}

pub fn sqrt_f32(a: f32, rounding: Rounding) -> f32 {
    if rounding == Rounding::NearestEven {
        return a.sqrt();
    }
    let a = f64::from(a);
    let root = a.sqrt();
    let error = if root.is_finite() && root != 0.0 { -root.mul_add(root, -a) } else { 0.0 };
    f32::from_bits(F32.encode(to_odd(root, error), rounding, false))
}

/// The float64 neighbour that a directed rounding gives, for a result `x` whose exact value is `x + error`.
fn direct_f64(x: f64, error: f64, rounding: Rounding) -> f64 {
    if error == 0.0 || !x.is_finite() {
        return x;
    }
    match rounding {
        Rounding::NearestEven | Rounding::NearestAway => x,
        Rounding::Down => {
            if error < 0.0 {
                x.next_down()
            } else {
                x
            }
        }
        Rounding::Up => {
            if error > 0.0 {
                x.next_up()
            } else {
                x
            }
        }
        Rounding::TowardZero => match (x > 0.0, error > 0.0) {
            (true, false) => x.next_down(),
            (false, true) => x.next_up(),
            _ => x,
        },
    }
}

pub fn add_f64(a: f64, b: f64, rounding: Rounding) -> f64 {
    let (sum, error) = two_sum(a, b);
    signed_zero(direct_f64(sum, error, rounding), a, b, rounding)
}

pub fn mul_f64(a: f64, b: f64, rounding: Rounding) -> f64 {
    let product = a * b;
    direct_f64(product, a.mul_add(b, -product), rounding)
}

/// Only `.rn` is exact for all operands; the directed roundings compare with the fused error, which is exact unless it
/// underflows.
pub fn fma_f64(a: f64, b: f64, c: f64, rounding: Rounding) -> f64 {
    let x = a.mul_add(b, c);
    if rounding == Rounding::NearestEven {
        return x;
    }
    let product = a * b;
    let (sum, low) = two_sum(product, c);
    direct_f64(x, (sum - x) + (low + a.mul_add(b, -product)), rounding)
}

/// An integer as float64, rounded as asked.
pub fn integer_to_f64(x: i128, rounding: Rounding) -> f64 {
    let nearest = x as f64;
    direct_f64(nearest, (x - nearest as i128) as f64, rounding)
}

/// An integer as float64, rounded to odd, to be rounded again to a smaller format.
pub fn integer_to_odd(x: i128) -> f64 {
    let nearest = x as f64;
    to_odd(nearest, (x - nearest as i128) as f64)
}

/// `x` rounded to an integer.
pub fn round_to_integer(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::NearestEven => x.round_ties_even(),
        Rounding::NearestAway => x.round(),
        Rounding::TowardZero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}
