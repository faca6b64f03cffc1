//! Conversion between the fields of [`Config`](super::Config) and the [`Value`]s of settings.

use super::choices::Surface;
use super::keys::ApiKeyConfig;
use super::value::Value;

/// A field of [`Config`](super::Config). The table of settings gives each field a kind whose values fit it; a test
/// checks them all.
pub trait ConfigField {
    /// Sets the field to `value`.
    fn store(&mut self, value: Value);
    /// The field as a [`Value`].
    fn load(&self) -> Value;
}

fn unfit(value: &Value) -> ! {
    panic!("the table of settings gives a field a kind that does not fit it: {value:?}")
}

impl ConfigField for String {
    fn store(&mut self, value: Value) {
        match value {
            Value::Text(text) => *self = text,
            other => unfit(&other),
        }
    }

    fn load(&self) -> Value {
        Value::Text(self.clone())
    }
}

impl ConfigField for Vec<String> {
    fn store(&mut self, value: Value) {
        match value {
            Value::List(texts) => *self = texts,
            other => unfit(&other),
        }
    }

    fn load(&self) -> Value {
        Value::List(self.clone())
    }
}

impl ConfigField for Vec<Surface> {
    fn store(&mut self, value: Value) {
        *self = match &value {
            Value::List(words) => words.iter().map(|word| word.parse().unwrap_or_else(|_| unfit(&value))).collect(),
            other => unfit(other),
        };
    }

    fn load(&self) -> Value {
        Value::List(self.iter().map(|surface| surface.name().to_owned()).collect())
    }
}

impl ConfigField for Vec<ApiKeyConfig> {
    fn store(&mut self, value: Value) {
        match value {
            Value::Keys(keys) => *self = keys,
            other => unfit(&other),
        }
    }

    fn load(&self) -> Value {
        Value::Keys(self.clone())
    }
}

impl ConfigField for bool {
    fn store(&mut self, value: Value) {
        match value {
            Value::Bool(value) => *self = value,
            other => unfit(&other),
        }
    }

    fn load(&self) -> Value {
        Value::Bool(*self)
    }
}

impl ConfigField for f64 {
    fn store(&mut self, value: Value) {
        match value {
            Value::Float(value) => *self = value,
            other => unfit(&other),
        }
    }

    fn load(&self) -> Value {
        Value::Float(*self)
    }
}

macro_rules! int_field {
    ($($int:ty),+) => {$(
        impl ConfigField for $int {
            fn store(&mut self, value: Value) {
                *self = match value {
                    Value::Int(number) => <$int>::try_from(number).unwrap_or_else(|_| unfit(&value)),
                    other => unfit(&other),
                }
            }

            fn load(&self) -> Value {
                Value::Int(*self as u64)
            }
        }
    )+};
}
int_field!(u16, u32, u64, usize);

impl<T: ConfigField + Default> ConfigField for Option<T> {
    fn store(&mut self, value: Value) {
        *self = match value {
            Value::Auto => None,
            value => {
                let mut field = T::default();
                field.store(value);
                Some(field)
            }
        };
    }

    fn load(&self) -> Value {
        self.as_ref().map_or(Value::Auto, ConfigField::load)
    }
}
