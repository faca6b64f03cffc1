//! How an answer writes embeddings: as JSON numbers, or as bytes.

use crate::body::body_fields;
use crate::checks::{in_range, one_of};
use crate::model_info::ModelInfo;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use half::{bf16, f16};
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

body_fields! {
    pub struct EncodingFields {
        /// float: JSON numbers. base64: the bytes of the numbers. bytes: the bytes of all embeddings are the answer's
        /// body, and its header metadata says where each one is; bytes_only: without that header.
        #[schema(value_type = Option<EncodingName>, default = "float")]
        pub encoding_format: Option<String>,
        /// The type of the numbers in bytes. Without effect on float.
        #[schema(value_type = Option<EmbedDtypeName>, default = "float32")]
        pub embed_dtype: Option<String>,
        /// The order of a number's bytes; native is the server's.
        #[schema(value_type = Option<EndiannessName>, default = "native")]
        pub endianness: Option<String>,
        /// Numbers of an embedding: the model's own, no other is available.
        pub dimensions: Option<i64>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum EncodingName {
    Float,
    Base64,
    Bytes,
    BytesOnly,
}

#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[allow(dead_code, reason = "only described")]
enum EmbedDtypeName {
    Float32,
    Float16,
    Bfloat16,
    #[schema(rename = "fp8_e4m3")]
    Fp8E4m3,
    #[schema(rename = "fp8_e5m2")]
    Fp8E5m2,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum EndiannessName {
    Native,
    Big,
    Little,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmbedDtype {
    Float32,
    Float16,
    Bfloat16,
    Fp8(Fp8),
}

/// A float of 8 bits: a sign, an exponent and a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fp8 {
    /// Without infinities: what is too large is not a number.
    E4m3,
    E5m2,
}

impl Fp8 {
    /// The nearest float, of two as near as each other the even one.
    fn encode(self, value: f32) -> u8 {
        const NAN: u8 = 0x7f;
        let (mantissa_bits, bias, too_large) = match self {
            Fp8::E4m3 => (3, 7, NAN),
            Fp8::E5m2 => (2, 15, 0x7c),
        };
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if value.is_nan() {
            return sign | NAN;
        }
        let size = f64::from(value.abs());
        let least = 1 - bias;
        let exponent = if size > 0.0 { (size.log2().floor() as i32).clamp(least, bias + 2) } else { least };
        let steps = (size / f64::from(exponent - mantissa_bits).exp2()).round_ties_even();
        // A mantissa that is rounded up to the next power of two adds one to the exponent.
        let code = f64::from((exponent - least) << mantissa_bits) + steps;
        sign | if code >= f64::from(too_large) { too_large } else { code as u8 }
    }
}

/// What an answer's embeddings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodingForm {
    Float,
    Base64,
    /// The body is the bytes of all. `with_metadata`: a header says where each one is.
    Bytes {
        with_metadata: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    pub form: EncodingForm,
    dtype: EmbedDtype,
    is_big_endian: bool,
}

/// An embedding in a JSON answer.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum EncodedNumbers {
    Float(Vec<f32>),
    Base64(String),
}

impl EncodingFields {
    pub fn check(&self, model: &ModelInfo) -> Result<Encoding, ApiError> {
        one_of("encoding_format", self.encoding_format.as_deref(), &["float", "base64", "bytes", "bytes_only"])?;
        one_of(
            "embed_dtype",
            self.embed_dtype.as_deref(),
            &["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"],
        )?;
        one_of("endianness", self.endianness.as_deref(), &["native", "big", "little"])?;
        if let Some(dimensions) = self.dimensions {
            let size = i64::from(model.embedding_size);
            in_range("dimensions", dimensions, size..=size)?;
        }
        Ok(Encoding {
            form: match self.encoding_format.as_deref() {
                Some("base64") => EncodingForm::Base64,
                Some("bytes") => EncodingForm::Bytes { with_metadata: true },
                Some("bytes_only") => EncodingForm::Bytes { with_metadata: false },
                _ => EncodingForm::Float,
            },
            dtype: match self.embed_dtype.as_deref() {
                Some("float16") => EmbedDtype::Float16,
                Some("bfloat16") => EmbedDtype::Bfloat16,
                Some("fp8_e4m3") => EmbedDtype::Fp8(Fp8::E4m3),
                Some("fp8_e5m2") => EmbedDtype::Fp8(Fp8::E5m2),
                _ => EmbedDtype::Float32,
            },
            is_big_endian: match self.endianness.as_deref() {
                Some("big") => true,
                Some("little") => false,
                _ => cfg!(target_endian = "big"),
            },
        })
    }
}

impl Encoding {
    /// The embedding in a JSON answer.
    pub fn json(self, values: Vec<f32>) -> EncodedNumbers {
        match self.form {
            EncodingForm::Float => EncodedNumbers::Float(values),
            EncodingForm::Base64 | EncodingForm::Bytes { .. } => {
                EncodedNumbers::Base64(STANDARD.encode(self.bytes(&values)))
            }
        }
    }

    /// The numbers' bytes, one after the other.
    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self.dtype {
            EmbedDtype::Float32 => self.in_order(values.iter().map(|x| x.to_le_bytes())),
            EmbedDtype::Float16 => self.in_order(values.iter().map(|x| f16::from_f32(*x).to_le_bytes())),
            EmbedDtype::Bfloat16 => self.in_order(values.iter().map(|x| bf16::from_f32(*x).to_le_bytes())),
            EmbedDtype::Fp8(kind) => values.iter().map(|x| kind.encode(*x)).collect(),
        }
    }

    fn in_order<const N: usize>(self, numbers: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
        let ordered = numbers.map(|mut bytes| {
            if self.is_big_endian {
                bytes.reverse();
            }
            bytes
        });
        ordered.flatten().collect()
    }

    /// As `embed_dtype` has it.
    pub fn dtype_name(self) -> &'static str {
        match self.dtype {
            EmbedDtype::Float32 => "float32",
            EmbedDtype::Float16 => "float16",
            EmbedDtype::Bfloat16 => "bfloat16",
            EmbedDtype::Fp8(Fp8::E4m3) => "fp8_e4m3",
            EmbedDtype::Fp8(Fp8::E5m2) => "fp8_e5m2",
        }
    }

    /// As `endianness` has it, but for `native`.
    pub fn endianness_name(self) -> &'static str {
        if self.is_big_endian { "big" } else { "little" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code, straight from the definition.
    fn value(kind: Fp8, code: u8) -> f32 {
        let (mantissa_bits, bias) = if kind == Fp8::E4m3 { (3, 7) } else { (2, 15) };
        let (exponent, mantissa) = (i32::from(code >> mantissa_bits), f32::from(code & ((1 << mantissa_bits) - 1)));
        let part = mantissa / (1 << mantissa_bits) as f32;
        if exponent == 0 { part * ((1 - bias) as f32).exp2() } else { (1.0 + part) * ((exponent - bias) as f32).exp2() }
    }

    #[test]
    fn floats_of_8_bits_are_the_nearest_ones() {
        for (kind, largest) in [(Fp8::E4m3, 0x7e), (Fp8::E5m2, 0x7b)] {
            for code in 0..=largest {
                let exact = value(kind, code);
                assert_eq!((kind.encode(exact), kind.encode(-exact)), (code, code | 0x80), "{kind:?} {exact}");
                if code < largest {
                    let middle = (exact + value(kind, code + 1)) / 2.0;
                    let even = code + (code & 1);
                    assert_eq!(kind.encode(middle), even, "{kind:?} {middle}");
                    assert_eq!(kind.encode(middle * 0.999), code, "{kind:?} below {middle}");
                    assert_eq!(kind.encode(middle * 1.001), code + 1, "{kind:?} above {middle}");
                }
            }
        }
        assert_eq!((value(Fp8::E4m3, 0x7e), value(Fp8::E5m2, 0x7b)), (448.0, 57344.0));
        assert_eq!([463.0, 465.0, 1e30, f32::INFINITY].map(|x| Fp8::E4m3.encode(x)), [0x7e, 0x7f, 0x7f, 0x7f]);
        assert_eq!([61439.0, 61440.0, f32::INFINITY].map(|x| Fp8::E5m2.encode(-x)), [0xfb, 0xfc, 0xfc]);
        assert_eq!([Fp8::E4m3, Fp8::E5m2].map(|kind| kind.encode(f32::NAN) & 0x7f), [0x7f, 0x7f]);
        assert_eq!(Fp8::E5m2.encode(1e-30), 0);
    }

    #[test]
    fn bytes_have_the_type_and_the_order_that_were_asked_for() {
        let bytes =
            |dtype, is_big_endian| Encoding { form: EncodingForm::Base64, dtype, is_big_endian }.bytes(&[1.0, -2.5]);
        assert_eq!(bytes(EmbedDtype::Float32, false), [0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0]);
        assert_eq!(bytes(EmbedDtype::Float32, true), [0x3F, 0x80, 0, 0, 0xC0, 0x20, 0, 0]);
        assert_eq!(bytes(EmbedDtype::Float16, false), [0, 0x3C, 0, 0xC1]);
        assert_eq!(bytes(EmbedDtype::Bfloat16, true), [0x3F, 0x80, 0xC0, 0x20]);
    }
}
