//! Turns scalar expressions into computations over a warp.

use crate::float::canonical;

/// A register's contents as a number, and back.
pub trait Word: Copy {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! words {
    ($($integer:ty as $unsigned:ty),+) => {
        $(impl Word for $integer {
            fn of(bits: u64) -> Self {
                bits as Self
            }

            fn bits(self) -> u64 {
                self as $unsigned as u64
            }
        })+
    };
}

words!(u8 as u8, u16 as u16, u32 as u32, u64 as u64, i8 as u8, i16 as u16, i32 as u32, i64 as u64);

/// NaN becomes the canonical NaN.
impl Word for f32 {
    fn of(bits: u64) -> Self {
        Self::from_bits(bits as u32)
    }

    fn bits(self) -> u64 {
        u64::from(canonical(self))
    }
}

impl Word for f64 {
    fn of(bits: u64) -> Self {
        Self::from_bits(bits)
    }

    fn bits(self) -> u64 {
        if self.is_nan() { 0xfff8_0000_0000_0000 } else { self.to_bits() }
    }
}

/// `lanes!(f32, |a, b, c, mode| expression)`: a `Compute` of operands and a result of one type, or of
/// `lanes!(u32 => u64, …)`.
macro_rules! lanes {
    ($from:ty => $to:ty, |$a:ident, $b:ident, $c:ident, $mode:ident| $result:expr) => {{
        #[allow(unused_variables, reason = "most expressions need fewer operands")]
        let compute: $crate::program::Compute = |from, $mode, to| {
            for lane in 0..$crate::program::WARP_SIZE {
                let $a = <$from as $crate::lanes::Word>::of(from[0][lane]);
                let $b = <$from as $crate::lanes::Word>::of(from[1][lane]);
                let $c = <$from as $crate::lanes::Word>::of(from[2][lane]);
                let result: $to = $result;
                to[lane] = $crate::lanes::Word::bits(result);
            }
        };
        compute
    }};
    ($of:ty, |$a:ident, $b:ident, $c:ident, $mode:ident| $result:expr) => {
        $crate::lanes::lanes!($of => $of, |$a, $b, $c, $mode| $result)
    };
}

/// The same expression for an integer type known when decoding; `T` names it.
macro_rules! integers {
    ($scalar:expr, |$a:ident, $b:ident, $c:ident, $mode:ident| $result:expr) => {{
        use $crate::types::ScalarType as Type;
        macro_rules! with {
            ($of:ty) => {{
                #[allow(dead_code, reason = "not every expression names its type")]
                type T = $of;
                Some($crate::lanes::lanes!($of, |$a, $b, $c, $mode| $result))
            }};
        }
        match $scalar {
            Type::U8 | Type::B8 => with!(u8),
            Type::S8 => with!(i8),
            Type::U16 | Type::B16 => with!(u16),
            Type::S16 => with!(i16),
            Type::U32 | Type::B32 => with!(u32),
            Type::S32 => with!(i32),
            Type::U64 | Type::B64 => with!(u64),
            Type::S64 => with!(i64),
            _ => None,
        }
    }};
}

pub(crate) use {integers, lanes};
