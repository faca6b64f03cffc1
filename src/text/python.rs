//! The parts of Python's standard library that chat templates use: `json.dumps` and `strftime`.

use crate::chat_template::meter;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write as _;
use time::OffsetDateTime;

/// `json.dumps`'s layout.
struct JsonStyle {
    ensure_ascii: bool,
    /// White space of one level; `None` for a single line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    /// Maximum size of the text in bytes.
    most: u64,
}

/// Maximum number of characters of an indent or a separator.
const MAX_FILL: usize = 64;

/// The filter `tojson` of chat templates: `json.dumps(value, ensure_ascii=False)`, with the arguments `ensure_ascii`,
/// `indent`, `separators` and `sort_keys` by position or by name. (Jinja's own filter escapes HTML.)
pub fn tojson(args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (value, places, kwargs): (Value, &[Value], Kwargs) = from_args(&args)?;
    if places.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let argument = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(places.get(place).cloned().or(named).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = argument(1, "indent")?.map(|value| match value.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(value.as_i64().unwrap_or(0).clamp(0, 64) as usize),
    });
    let separators = match argument(2, "separators")? {
        Some(pair) => Some((pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())),
        None => None,
    };
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = separators.unwrap_or((default_item.to_owned(), ": ".to_owned()));
    let style = JsonStyle {
        ensure_ascii: argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        indent,
        item_separator,
        key_separator,
        sort_keys: argument(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        most: meter::room(),
    };
    kwargs.assert_all_used()?;
    let fills = [style.indent.as_deref().unwrap_or_default(), &style.item_separator, &style.key_separator];
    if let Some(fill) = fills.into_iter().find(|fill| fill.len() > MAX_FILL) {
        let message = format!("tojson: an indent or a separator of {} bytes is longer than {MAX_FILL}", fill.len());
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let mut out = String::new();
    write_json(&mut out, &value, &style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    if out.len() as u64 > style.most {
        meter::make(out.len() as u64)?;
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Map => {
            let mut entries = Vec::new();
            for key in value.try_iter()? {
                entries.push((json_key(&key)?, value.get_item(&key)?));
            }
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_items(out, style, depth, ['{', '}'], entries.iter(), |out, (key, item)| {
                write_string(out, key, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_json(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Seq | ValueKind::Iterable => {
            write_items(out, style, depth, ['[', ']'], value.try_iter()?, |out, item| {
                write_json(out, &item, style, depth + 1)
            })?;
        }
        kind => {
            return Err(Error::new(ErrorKind::BadSerialization, format!("a value of type {kind} is not JSON")));
        }
    }
    Ok(())
}

fn write_items<T>(
    out: &mut String,
    style: &JsonStyle,
    depth: usize,
    [open, close]: [char; 2],
    items: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut String, T) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    let mut empty = true;
    for item in items {
        if !empty {
            out.push_str(&style.item_separator);
        }
        empty = false;
        new_line(out, depth + 1);
        write(out, item)?;
    }
    if !empty {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn json_key(key: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match key.kind() {
        ValueKind::String => text.push_str(key.as_str().unwrap_or_default()),
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if key.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(&mut text, key)?,
        kind => return Err(Error::new(ErrorKind::BadSerialization, format!("a {kind} cannot be a key in JSON"))),
    }
    Ok(text)
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        // An integer is displayed without a decimal point, whatever its size.
        let _ = write!(out, "{value}");
    } else {
        out.push_str(&float_repr(f64::try_from(value.clone())?));
    }
    Ok(())
}

/// `repr(float)`: the shortest digits that read back as the same number, with an exponent below 1e-4 and from 1e16 on.
fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `datetime.strftime` in the C locale. Unknown directives stay as they are.
pub fn strftime(format: &str, at: OffsetDateTime) -> String {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let Some(directive) = chars.next() else {
            out.push('%');
            break;
        };
        match directive {
            '-' => match chars.next() {
                Some(directive) => match strftime_field(directive, at) {
                    Some(field) => {
                        let short = field.trim_start_matches('0');
                        // A zero stays if no digit follows it.
                        let has_digit = short.starts_with(|c: char| c.is_ascii_digit());
                        let num_zeros = field.len() - short.len();
                        out.push_str(&field[if has_digit { num_zeros } else { num_zeros.saturating_sub(1) }..]);
                    }
                    None => out.extend(['%', '-', directive]),
                },
                None => out.push_str("%-"),
            },
            directive => match strftime_field(directive, at) {
                Some(field) => out.push_str(&field),
                None => out.extend(['%', directive]),
            },
        }
    }
    out
}

fn strftime_field(directive: char, at: OffsetDateTime) -> Option<String> {
    let weekday = at.weekday().number_days_from_monday() as usize;
    let month = u8::from(at.month());
    let hour12 = (at.hour() + 11) % 12 + 1;
    Some(match directive {
        'a' => DAYS[weekday][..3].to_owned(),
        'A' => DAYS[weekday].to_owned(),
        'b' | 'h' => MONTHS[month as usize - 1][..3].to_owned(),
        'B' => MONTHS[month as usize - 1].to_owned(),
        'c' => strftime("%a %b %e %H:%M:%S %Y", at),
        'C' => format!("{:02}", at.year() / 100),
        'd' => format!("{:02}", at.day()),
        'D' | 'x' => strftime("%m/%d/%y", at),
        'e' => format!("{:2}", at.day()),
        'f' => format!("{:06}", at.microsecond()),
        'F' => strftime("%Y-%m-%d", at),
        'H' => format!("{:02}", at.hour()),
        'I' => format!("{hour12:02}"),
        'j' => format!("{:03}", at.ordinal()),
        'm' => format!("{month:02}"),
        'M' => format!("{:02}", at.minute()),
        'n' => "\n".to_owned(),
        'p' => if at.hour() < 12 { "AM" } else { "PM" }.to_owned(),
        'r' => strftime("%I:%M:%S %p", at),
        'R' => strftime("%H:%M", at),
        's' => at.unix_timestamp().to_string(),
        'S' => format!("{:02}", at.second()),
        't' => "\t".to_owned(),
        'T' | 'X' => strftime("%H:%M:%S", at),
        'u' => (weekday + 1).to_string(),
        'w' => at.weekday().number_days_from_sunday().to_string(),
        'y' => format!("{:02}", at.year().rem_euclid(100)),
        'Y' => at.year().to_string(),
        'z' | 'Z' => String::new(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn directives_without_padding_keep_a_last_zero() {
        let at = datetime!(2024-01-05 00:07:00 UTC);
        assert_eq!(strftime("%-d.%-m. %-H:%-M:%-S %-j %-p %-% %-", at), "5.1. 0:7:0 5 AM % %-");
    }
}
