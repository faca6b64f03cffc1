//! Instruction sets: which ones this processor has, and how a kernel runs on each.

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
    /// AVX-512 as above, with dot products of bfloat16 (BF16).
    Avx512,
    /// AVX-512 as above, and matrix products of bfloat16 and of bytes on AMX tiles.
    Amx,
}

impl Isa {
    pub const ALL: [Isa; 10] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Base,
        Isa::Avx512Vnni,
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
            Isa::Avx512 => Isa::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.is_available() && super::tile_registers::is_available(),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => false,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Base | Isa::Avx512Vnni | Isa::Avx512 | Isa::Amx => false,
        }
    }

    /// The best one available: not AMX if it is emulated, and not [`Isa::Avx512`] if its dot products are slow
    /// ([`Isa::has_slow_dot_products`]).
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let is_emulated = |isa| isa == Isa::Amx && super::tile_registers::are_emulated();
        #[cfg(not(target_arch = "x86_64"))]
        let is_emulated = |_| false;
        let is_good = |isa: &Isa| isa.is_available() && !is_emulated(*isa) && !isa.has_slow_dot_products();
        Self::ALL.into_iter().rev().find(is_good).unwrap_or(Isa::Portable)
    }

    /// Whether this is [`Isa::Avx512`], the processor has it, and multiply-adds in float32 multiply bfloat16 faster
    /// there than dot products do. The first call of the process measures that, in about a millisecond.
    pub fn has_slow_dot_products(self) -> bool {
        static ARE_SLOW: OnceLock<bool> = OnceLock::new();
        self == Isa::Avx512
            && self.is_available()
            && *ARE_SLOW.get_or_init(|| are_dots_slow(|kernel| self.run(kernel), |kernel| self.run(kernel)))
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

    /// Whether products of this type can be computed as dot products of pairs, by one instruction or on tile registers.
    #[inline]
    pub(super) fn has_dot_products_for(self, dtype: DType) -> bool {
        matches!(self, Isa::Avx512 | Isa::Amx) && dtype == DType::BF16
    }

    /// Runs `kernel` compiled for this instruction set.
    #[cfg(not(test))]
    #[inline]
    pub(super) fn run<K: SimdKernel>(self, kernel: K) -> K::Output {
        self.run_compiled(kernel)
    }

    /// Kernels take a minute to compile for all instruction sets. Unit tests need none of them; `tests/kernels` runs
    /// them all.
    #[cfg(test)]
    pub(super) fn run<K: SimdKernel>(self, kernel: K) -> K::Output {
        assert_eq!(self, Isa::Portable, "unit tests have kernels in plain Rust only");
        kernel.run(Portable)
    }

    #[inline]
    pub(super) fn run_compiled<K: SimdKernel>(self, kernel: K) -> K::Output {
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
            Isa::Avx512Vnni | Isa::Avx512 | Isa::Amx if const { K::HAS_INTEGER_PRODUCTS } => unsafe {
                super::simd::run_avx512_vnni(kernel)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Base | Isa::Avx512Vnni | Isa::Avx512 | Isa::Amx => unsafe {
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
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Base | Isa::Avx512Vnni | Isa::Avx512 | Isa::Amx => {
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
