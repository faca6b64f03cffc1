//! Kinds of processors, and what was measured on them once. A measurement at every start could say otherwise beside a
//! busy neighbour.

use super::simd::PrefetchDistances;
use std::sync::OnceLock;

/// A kind of processor: who makes it, its family and its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processor {
    vendor: [u8; 12],
    family: u32,
    model: u32,
}

impl Processor {
    /// This processor's kind (Intel's manual, volume 2A, `CPUID`; AMD numbers in the same way).
    #[cfg(target_arch = "x86_64")]
    pub fn this() -> Option<Self> {
        use std::arch::x86_64::__cpuid;
        let (name, kind) = (__cpuid(0), __cpuid(1).eax);
        let mut vendor = [0; 12];
        for (to, word) in vendor.chunks_exact_mut(4).zip([name.ebx, name.edx, name.ecx]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let (base_family, more_family) = (kind >> 8 & 15, kind >> 20 & 255);
        let family = base_family + if base_family == 15 { more_family } else { 0 };
        Some(Self { vendor, family, model: kind >> 4 & 15 | kind >> 12 & 0xf0 })
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn this() -> Option<Self> {
        None
    }

    /// Whether dot products of bfloat16 are slow, where that is known. The sets with and without them do not give the
    /// same bits.
    pub fn has_slow_dots(self) -> Option<bool> {
        match (&self.vendor, self.family, self.model) {
            // Sapphire Rapids and Emerald Rapids, where a machine has no AMX.
            (b"GenuineIntel", 6, 143 | 207) => Some(true),
            // Zen 4 and Zen 5.
            (b"AuthenticAMD", 25 | 26, _) => Some(false),
            _ => None,
        }
    }

    fn weight_prefetch(self) -> WeightPrefetch {
        match (&self.vendor, self.family) {
            // Zen 5.
            (b"AuthenticAMD", 26) => {
                WeightPrefetch { plain: PrefetchDistances::FIRST_LEVEL, quantized: PrefetchDistances::SECOND_LEVEL }
            }
            _ => WeightPrefetch::DEFAULT,
        }
    }
}

/// How far ahead weights that come from memory are prefetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WeightPrefetch {
    pub plain: PrefetchDistances,
    pub quantized: PrefetchDistances,
}

impl WeightPrefetch {
    const DEFAULT: Self = Self { plain: PrefetchDistances::TWO_LEVELS, quantized: PrefetchDistances::TWO_LEVELS };

    /// What is best on this processor.
    pub fn best() -> Self {
        static BEST: OnceLock<WeightPrefetch> = OnceLock::new();
        *BEST.get_or_init(|| Processor::this().map_or(Self::DEFAULT, Processor::weight_prefetch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processor(vendor: &[u8; 12], family: u32, model: u32) -> Processor {
        Processor { vendor: *vendor, family, model }
    }

    #[test]
    fn known_processors_are_not_measured() {
        let has_slow_dots = |vendor, family, model| processor(vendor, family, model).has_slow_dots();
        assert_eq!(has_slow_dots(b"GenuineIntel", 6, 207), Some(true));
        assert_eq!(has_slow_dots(b"AuthenticAMD", 26, 2), Some(false));
        let why = "Cascade Lake has none, and Cooper Lake was never measured";
        assert_eq!(has_slow_dots(b"GenuineIntel", 6, 85), None, "{why}");
        let quantized = |vendor, family, model| processor(vendor, family, model).weight_prefetch().quantized;
        assert_eq!(quantized(b"AuthenticAMD", 26, 2), PrefetchDistances::SECOND_LEVEL);
        assert_eq!(quantized(b"AuthenticAMD", 25, 17), PrefetchDistances::TWO_LEVELS);
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn this_processor_is_what_the_kernel_says() {
        let Processor { vendor, family, model } = Processor::this().unwrap();
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.split('\t').next() == Some(name)).unwrap();
            line.split(": ").nth(1).unwrap().to_string()
        };
        assert_eq!(field("vendor_id").as_bytes(), vendor);
        assert_eq!((field("cpu family"), field("model")), (family.to_string(), model.to_string()));
    }
}
