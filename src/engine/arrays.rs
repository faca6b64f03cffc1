//! Arrays of any length as serde has those of up to 32 entries: `#[serde(with = "arrays")]`.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub fn serialize<T: Serialize, S: Serializer, const N: usize>(array: &[T; N], to: S) -> Result<S::Ok, S::Error> {
    array.as_slice().serialize(to)
}

pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>, const N: usize>(
    from: D,
) -> Result<[T; N], D::Error> {
    let entries = Vec::<T>::deserialize(from)?;
    let len = entries.len();
    entries.try_into().map_err(|_| D::Error::custom(format!("{len} entries where there are {N}")))
}
