//! Literals of Lark, the grammar language of llguidance.

use serde_json::Value;

/// `text` as a literal of Lark.
pub fn lark_string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
