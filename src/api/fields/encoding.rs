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
        one_of("embed_dtype", self.embed_dtype.as_deref(), &["float32", "float16", "bfloat16"])?;
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
