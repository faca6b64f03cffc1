//! The engine's filters, tests and methods. Each counts its cost before it runs.

use super::meter::{
    self, Fallible, MAX_ITEMS, exceeded, flat_size, flatten, is_container, make, num_items, spend, weigh,
};
use crate::python;
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, State, Value, filters, functions, tests};
use minijinja_contrib::pycompat;

/// The part of its arguments that a filter reads.
#[derive(Clone, Copy)]
enum Reads {
    /// Only the first level.
    Items,
    /// Everything inside, because it prints, compares or wraps it.
    All,
}

const VALUE_BYTES: u64 = 24;
/// Maximum width of a formatted field.
const MAX_WIDTH: u64 = 10_000;

pub fn install(environment: &mut Environment<'_>) {
    install_filters(environment);
    install_tests(environment);
    environment.set_unknown_method_callback(method);
    // It shows all variables, which no prompt needs.
    environment.remove_global("debug");
    for (name, function) in
        [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
    {
        environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| -> Fallible<Value> {
            let args = args.into_values();
            for arg in &args {
                meter::made(arg.clone())?;
            }
            function.call(state, &args)
        });
    }
}

fn install_filters(environment: &mut Environment<'_>) {
    macro_rules! filters {
        ($($reads:ident: $($name:literal $filter:path),+;)+) => {
            [$($(($name, Reads::$reads, Value::from_function($filter))),+),+]
        };
    }
    let all = filters![
        All: "escape" filters::escape, "e" filters::escape, "lower" filters::lower, "upper" filters::upper,
            "title" filters::title, "capitalize" filters::capitalize, "replace" filters::replace,
            "dictsort" filters::dictsort, "items" filters::items, "trim" filters::trim, "join" filters::join,
            "min" filters::min, "max" filters::max, "sort" filters::sort, "string" filters::string,
            "batch" filters::batch, "slice" filters::slice, "sum" filters::sum, "indent" filters::indent,
            "groupby" filters::groupby, "unique" filters::unique, "zip" filters::zip, "pprint" filters::pprint,
            "format" filters::format, "split" filters::split, "lines" filters::lines, "chain" filters::chain,
            "safe" filters::safe, "int" filters::int, "float" filters::float, "tojson" python::tojson;
        Items: "reverse" filters::reverse, "list" filters::list, "first" filters::first, "last" filters::last,
            "select" filters::select, "reject" filters::reject, "selectattr" filters::selectattr,
            "rejectattr" filters::rejectattr, "map" filters::map;
    ];
    for (name, reads, filter) in all {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| -> Fallible<Value> {
            let args = args.into_values();
            count_arguments(name, reads, &args)?;
            let result = filter.call(state, &args)?;
            counted(result)
        });
    }
}

/// Counts the result of a filter or a method.
fn counted(result: Value) -> Fallible<Value> {
    let result = flatten(result)?;
    make(flat_size(&result))?;
    Ok(result)
}

fn count_arguments(name: &str, reads: Reads, args: &[Value]) -> Fallible<()> {
    let mut weight: u64 = 0;
    for arg in args {
        let own = match reads {
            Reads::All => weigh(arg)?,
            Reads::Items => flat_size(arg),
        };
        weight = weight.saturating_add(own);
    }
    spend(weight)?;
    // The argument at position `index` after the value, or with this name.
    let argument = |index: usize, name: &str| {
        let place = args.get(index).filter(|value| !value.is_kwargs());
        let named = || args.iter().find(|value| value.is_kwargs()).and_then(|kwargs| kwargs.get_attr(name).ok());
        place.cloned().or_else(named).filter(|value| !value.is_undefined() && !value.is_none())
    };
    let Some(value) = args.first() else { return Ok(()) };
    match name {
        "replace" => count_replacement(value, args.get(1), args.get(2)),
        "join" => {
            let separator = argument(1, "d").map_or(0, |separator| flat_size(&separator));
            make(weight.saturating_add(num_items(value).saturating_mul(separator)))
        }
        "indent" => {
            let width = argument(1, "width").and_then(|width| width.as_usize()).unwrap_or(4) as u64;
            let lines = value.as_str().map_or(1, |text| text.lines().count() as u64 + 1);
            make(weight.saturating_add(lines.saturating_mul(width)))
        }
        "batch" | "slice" => match argument(1, "count").and_then(|count| count.as_usize()) {
            Some(count) if count > MAX_ITEMS => Err(exceeded(format!("{name}: {count} is more than {MAX_ITEMS}"))),
            count => make(32 * (count.unwrap_or(0) as u64 + num_items(value))),
        },
        // Strings and lists are appended one by one to the sum so far.
        "sum" => make(if is_sum_of_numbers(value) { 0 } else { weight.saturating_mul(num_items(value)) }),
        "sort" | "unique" | "groupby" | "dictsort" => spend(weight.saturating_mul(32)),
        "format" => count_format(value, &args[1..]),
        "string" | "pprint" | "escape" | "e" | "title" | "upper" | "lower" | "capitalize" => {
            make(weight.saturating_mul(3))
        }
        "safe" | "trim" | "int" | "float" | "tojson" | "first" | "last" => make(flat_size(value)),
        // A list of the items; those of a string are its characters.
        _ => make(num_items(value).saturating_mul(VALUE_BYTES)),
    }
}

fn is_sum_of_numbers(value: &Value) -> bool {
    value.try_iter().is_ok_and(|mut items| items.all(|item| item.is_number()))
}

fn count_replacement(text: &Value, from: Option<&Value>, to: Option<&Value>) -> Fallible<()> {
    let (Some(from), Some(to)) = (from, to) else { return Ok(()) };
    let matches = match (text.as_str(), from.as_str()) {
        (Some(text), Some(from)) => text.matches(from).count() as u64,
        _ => weigh(text)?,
    };
    make(flat_size(text).saturating_add(matches.saturating_mul(weigh(to)?)))
}

/// Counts the fields of a format and their maximum width.
fn count_format(format: &Value, args: &[Value]) -> Fallible<()> {
    let Some(format) = format.as_str() else { return Ok(()) };
    let fields = format.matches(['%', '{']).count() as u64;
    let widths = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widest = widths.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0);
    // `%*d` and `{:{}}` take the width from an argument.
    let takes_widths = format.contains('*') || format.contains(":{") || format.contains(".{");
    let given = args.iter().filter(|_| takes_widths).filter_map(|arg| arg.as_usize()).max().unwrap_or(0) as u64;
    let widest = widest.max(given);
    if widest > MAX_WIDTH {
        return Err(exceeded(format!("a format's width of {widest} is more than {MAX_WIDTH}")));
    }
    let mut longest: u64 = 0;
    for arg in args {
        longest = longest.saturating_add(weigh(arg)?);
    }
    make((format.len() as u64).saturating_add(fields.saturating_mul(widest.saturating_add(longest))))
}

fn install_tests(environment: &mut Environment<'_>) {
    macro_rules! tests {
        ($($name:literal $test:path),+ $(,)?) => { [$(($name, Value::from_function($test))),+] };
    }
    let all = tests![
        "eq" tests::is_eq, "equalto" tests::is_eq, "==" tests::is_eq, "ne" tests::is_ne, "!=" tests::is_ne,
        "lt" tests::is_lt, "lessthan" tests::is_lt, "<" tests::is_lt, "le" tests::is_le, "<=" tests::is_le,
        "gt" tests::is_gt, "greaterthan" tests::is_gt, ">" tests::is_gt, "ge" tests::is_ge, ">=" tests::is_ge,
        "in" tests::is_in, "sameas" tests::is_sameas, "startingwith" tests::is_startingwith,
        "endingwith" tests::is_endingwith, "lower" tests::is_lower, "upper" tests::is_upper,
    ];
    for (name, test) in all {
        environment.add_test(name, move |state: &mut State, args: Rest<Value>| -> Fallible<bool> {
            match args.iter().filter(|arg| is_container(arg)).count() {
                // A comparison stops at the shorter side.
                0 | 1 if name != "in" => spend(args.iter().map(flat_size).min().unwrap_or(0))?,
                _ => {
                    for arg in args.iter() {
                        weigh(arg)?;
                    }
                }
            }
            Ok(test.call(state, &args)?.is_true())
        });
    }
}

/// Python's methods of strings, lists and maps.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Fallible<Value> {
    spend(flat_size(value))?;
    match method {
        "get" | "keys" => {}
        // These put the contents into tuples, count them or print them.
        "items" | "values" | "count" | "index" | "join" | "format" => {
            for arg in args {
                weigh(arg)?;
            }
            weigh(value)?;
        }
        _ => {
            for arg in args {
                weigh(arg)?;
            }
        }
    }
    match method {
        "replace" => count_replacement(value, args.first(), args.get(1))?,
        "join" => {
            if let Some(list) = args.first() {
                let separators = num_items(list).saturating_mul(flat_size(value));
                make(weigh(list)?.saturating_add(separators))?;
            }
        }
        "format" => count_format(value, args)?,
        "upper" | "lower" | "title" | "capitalize" => make(flat_size(value).saturating_mul(3))?,
        _ => make(flat_size(value))?,
    }
    counted(pycompat::unknown_method_callback(state, value, method, args)?)
}
