//! Instruction sets: which ones this processor has, and how a kernel runs on each.

use super::processor::Processor;
use super::register_loops::are_dots_slow;
use super::simd::{Portable, SimdKernel};
use crate::DType;
use pagetide_base::error::StartError;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The instruction set of all kernels of a backend. Results of two instruction sets may differ in rounding. Results of
/// the same instruction set never differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, which every processor of the target can run.
    Portable,
    /// NEON of aarch64.
    Neon,
    /// NEON with dot products of bytes.
    NeonDotprod,
    /// NEON as above, with matrix products of bytes (FEAT_I8MM).
    NeonI8mm,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 as above, with dot products of bytes (AVX-VNNI).
    AvxVnni,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512Base,
    /// AVX-512 as above, with dot products of bytes (VNNI).
    Avx512Vnni,
    /// AVX-512 as below, for processors whose dot products of bfloat16 are slow: products with weights in bfloat16 are
    /// those of [`Isa::Avx512Vnni`]. Attention is that of [`Isa::Avx512`].
    Avx512Widened,
    /// AVX-512 as [`Isa::Avx512Vnni`], with dot products of bfloat16 (BF16).
    Avx512,
    /// AVX-512 as above, and matrix products of bfloat16 and of bytes on AMX tiles.
    Amx,
}

impl Isa {
    pub const ALL: [Isa; 11] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Base,
        Isa::Avx512Vnni,
        Isa::Avx512Widened,
        Isa::Avx512,
        Isa::Amx,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Base => "avx512-base",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Avx512Widened => "avx512-widened",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Whether this processor and its operating system support it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => Isa::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Isa::NeonDotprod.is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Base => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512Base.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Widened | Isa::Avx512 => {
                Isa::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.is_available() && super::tile_registers::is_available(),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => false,
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The best one available: not AMX if it is emulated, and [`Isa::Avx512Widened`] instead of [`Isa::Avx512`] where
    /// dot products of bfloat16 are slow. On a processor of which that is not known, the first call of the process
    /// measures it, in about a millisecond.
    pub fn detect() -> Self {
        static ARE_DOTS_SLOW: OnceLock<bool> = OnceLock::new();
        #[cfg(target_arch = "x86_64")]
        let is_emulated = |isa| isa == Isa::Amx && super::tile_registers::are_emulated();
        #[cfg(not(target_arch = "x86_64"))]
        let is_emulated = |_| false;
        let run_both = || are_dots_slow(|kernel| Isa::Avx512.run(kernel), |kernel| Isa::Avx512.run(kernel));
        let are_dots_slow = || {
            *ARE_DOTS_SLOW.get_or_init(|| Processor::this().and_then(Processor::has_slow_dots).unwrap_or_else(run_both))
        };
        Self::best(|isa| isa.is_available() && !is_emulated(isa), are_dots_slow)
    }

    /// The best one that can be used. `are_dots_slow` is asked where AVX-512's dot products of bfloat16 would be used.
    fn best(is_usable: impl Fn(Isa) -> bool, are_dots_slow: impl Fn() -> bool) -> Self {
        match Self::ALL.into_iter().rev().find(|isa| is_usable(*isa)).unwrap_or(Isa::Portable) {
            Isa::Avx512 if are_dots_slow() => Isa::Avx512Widened,
            best => best,
        }
    }

    /// The given one, or the best one if none is given.
    pub fn choose(wanted: Option<Isa>) -> Result<Self, StartError> {
        match wanted {
            None => Ok(Self::detect()),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => {
                let available: Vec<_> = Self::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
                Err(StartError::new(format!(
                    "this processor lacks the instruction set '{isa}'; it has: {}",
                    available.join(", ")
                )))
            }
        }
    }

    /// Whether products with weights of this type run on tile registers.
    #[inline]
    pub(super) fn has_tiles_for(self, dtype: DType) -> bool {
        self == Isa::Amx && dtype == DType::BF16
    }

    /// Whether attention multiplies this type in dot products of pairs, by one instruction or on tile registers.
    /// Products with weights do too, but not with [`Isa::Avx512Widened`].
    #[inline]
    pub(super) fn has_dot_products_for(self, dtype: DType) -> bool {
        matches!(self, Isa::Avx512Widened | Isa::Avx512 | Isa::Amx) && dtype == DType::BF16
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(super) fn run<K: SimdKernel>(self, kernel: K) -> K::Output {
        debug_assert!(self.is_available());
        match self {
            Isa::Portable => kernel.run(Portable),
            // SAFETY: an `Isa` other than `Portable` comes only from `choose`, which checked the processor.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { super::simd::run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni if const { K::HAS_INTEGER_PRODUCTS } => unsafe { super::simd::run_avx_vnni(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => unsafe { super::simd::run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx if const { K::HAS_BF16_PRODUCTS } => unsafe { super::simd::run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Widened | Isa::Avx512 | Isa::Amx if const { K::HAS_INTEGER_PRODUCTS } => unsafe {
                super::simd::run_avx512_vnni(kernel)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Base | Isa::Avx512Vnni | Isa::Avx512Widened | Isa::Avx512 | Isa::Amx => unsafe {
                super::simd::run_avx512_base(kernel)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { super::simd::run_neon(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod if const { K::HAS_INTEGER_PRODUCTS } => unsafe { super::simd::run_neon_dotprod(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm if const { K::HAS_INTEGER_PRODUCTS } => unsafe { super::simd::run_neon_i8mm(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod | Isa::NeonI8mm => unsafe { super::simd::run_neon(kernel) },
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => {
                unreachable!("{self} is never available on this architecture")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => {
                unreachable!("{self} is never available on this architecture")
            }
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.into_iter().map(Isa::name).collect();
            format!("'{text}' is not an instruction set; choose from {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_dot_products_of_bfloat16_are_not_chosen() {
        let up_to = |last: Isa| move |isa: Isa| isa <= last;
        assert_eq!(Isa::best(up_to(Isa::Avx512), || true), Isa::Avx512Widened);
        assert_eq!(Isa::best(up_to(Isa::Avx512), || false), Isa::Avx512);
        for other in Isa::ALL.into_iter().filter(|isa| *isa != Isa::Avx512) {
            assert_eq!(Isa::best(up_to(other), || unreachable!("{other} uses no such products")), other);
        }
    }
}
