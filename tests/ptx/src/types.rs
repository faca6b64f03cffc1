//! The scalar types of PTX ("Fundamental Types" of the manual, and the packed and alternate floating-point types).

use std::fmt;

macro_rules! types {
    ($($variant:ident $name:literal $bits:literal,)+) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum ScalarType {
            $($variant,)+
        }

        impl ScalarType {
            /// All types; `ALL[t as usize]` is `t`.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The type of a modifier's name, without its dot.
            pub fn parse(name: &str) -> Option<Self> {
                Some(match name {
                    $($name => Self::$variant,)+
                    _ => return None,
                })
            }

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Bits of a value. A predicate has 1.
            pub fn bits(self) -> u32 {
                match self {
                    $(Self::$variant => $bits,)+
                }
            }
        }
    };
}

types! {
    Pred "pred" 1,
    B8 "b8" 8, B16 "b16" 16, B32 "b32" 32, B64 "b64" 64, B128 "b128" 128,
    U8 "u8" 8, U16 "u16" 16, U32 "u32" 32, U64 "u64" 64,
    S8 "s8" 8, S16 "s16" 16, S32 "s32" 32, S64 "s64" 64,
    U16x2 "u16x2" 32, S16x2 "s16x2" 32,
    F16 "f16" 16, F16x2 "f16x2" 32, F32 "f32" 32, F64 "f64" 64,
    Bf16 "bf16" 16, Bf16x2 "bf16x2" 32, Tf32 "tf32" 32,
    E4m3 "e4m3" 8, E5m2 "e5m2" 8, E4m3x2 "e4m3x2" 16, E5m2x2 "e5m2x2" 16,
    S4 "s4" 4, U4 "u4" 4, B1 "b1" 1,
}

impl ScalarType {
    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64 | Self::S4 | Self::S16x2)
    }

    pub fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16
                | Self::F16x2
                | Self::F32
                | Self::F64
                | Self::Bf16
                | Self::Bf16x2
                | Self::Tf32
                | Self::E4m3
                | Self::E5m2
                | Self::E4m3x2
                | Self::E5m2x2
        )
    }

    /// Bytes in memory.
    pub fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }
}

impl fmt::Display for ScalarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `value` with only its low `bits` bits.
pub fn truncate(value: u64, bits: u32) -> u64 {
    if bits >= 64 { value } else { value & ((1 << bits) - 1) }
}

/// The low `bits` bits of `value` as a signed number.
pub fn sign_extend(value: u64, bits: u32) -> i64 {
    let shift = 64 - bits.min(64);
    ((value << shift) as i64) >> shift
}
