//! The limits of a rendering: bytes that it makes, work on existing values, and steps of the engine.
//!
//! The functions here wrap every operation of a template (see [`super::rewrite`]) and replace the engine's filters,
//! tests and methods (see [`super::builtins`]). Each computes the cost of its operation before running it. Costs are
//! counted and not timed, so that the same template and messages always give the same result.

use super::rewrite;
use minijinja::tests::is_sameas;
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use std::cell::Cell;
use std::fmt::{self, Write};

/// Maximum number of steps of the engine: hundreds for each of ten thousand messages, and less than a second.
pub const MAX_STEPS: u64 = 5_000_000;
/// Maximum number of steps when a template is only tried, with one message.
pub const MAX_PROBE_STEPS: u64 = 500_000;
/// Bytes of strings and lists that a rendering may make in total, including dropped ones.
const MADE_BYTES: u64 = 256 << 20;
/// Additional bytes for each byte of the conversation.
const MADE_PER_BYTE: u64 = 64;
/// Bytes and items that a rendering may read, in total and for each byte of the conversation.
const WORK: u64 = 256 << 20;
const WORK_PER_BYTE: u64 = 256;
/// Maximum size of the rendered prompt in bytes.
const TEXT_BYTES: u64 = 1 << 20;
const TEXT_PER_BYTE: u64 = 16;
/// Size of a value in a list.
const ITEM_BYTES: u64 = 16;
/// Maximum number of items of a list that is made or iterated at once.
pub const MAX_ITEMS: usize = 1 << 20;
/// Maximum nesting of lists and maps. Reading them recurses.
const MAX_NESTING: usize = 64;

thread_local! {
    /// The remaining budget of the rendering on this thread.
    static LEFT: Left = const { Left { made: Cell::new(0), work: Cell::new(0) } };
}

struct Left {
    made: Cell<u64>,
    work: Cell<u64>,
}

/// The error of an exceeded limit.
#[derive(Debug)]
pub struct Exceeded(String);

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Exceeded {}

pub fn exceeded(what: impl Into<String>) -> Error {
    let what = what.into();
    Error::new(ErrorKind::InvalidOperation, what.clone()).with_source(Exceeded(what))
}

pub type Fallible<T> = Result<T, Error>;

/// Runs a rendering of a conversation of `input` bytes and returns its text. A template that is only tried may make and
/// read a tenth, as it has a tenth of the steps.
pub fn run(input: u64, is_probe: bool, render: impl FnOnce() -> Fallible<String>) -> Fallible<String> {
    LEFT.with(|left| {
        let share = if is_probe { MAX_STEPS / MAX_PROBE_STEPS } else { 1 };
        left.made.set(MADE_BYTES.saturating_add(input.saturating_mul(MADE_PER_BYTE)) / share);
        left.work.set(WORK.saturating_add(input.saturating_mul(WORK_PER_BYTE)) / share);
    });
    let text = render()?;
    let most = TEXT_BYTES.saturating_add(input.saturating_mul(TEXT_PER_BYTE));
    if text.len() as u64 > most {
        return Err(exceeded(format!(
            "it renders {} bytes: at most {most} are supported for this conversation (1 MiB, and {TEXT_PER_BYTE} for \
             each byte of it)",
            text.len()
        )));
    }
    Ok(text)
}

/// Counts bytes before they are made.
pub fn make(bytes: u64) -> Fallible<()> {
    take(|left| &left.made, bytes).map_err(|()| {
        exceeded(format!(
            "it makes text and lists of more than {} MiB plus {MADE_PER_BYTE} bytes per byte of the conversation",
            MADE_BYTES >> 20
        ))
    })?;
    spend(bytes)
}

/// Counts bytes or items before they are read.
pub fn spend(units: u64) -> Fallible<()> {
    take(|left| &left.work, units)
        .map_err(|()| exceeded(format!("it reads more than {} MiB of text and lists", WORK >> 20)))
}

fn take(which: impl Fn(&Left) -> &Cell<u64>, amount: u64) -> Result<(), ()> {
    LEFT.with(|left| {
        let left = which(left);
        left.set(left.get().checked_sub(amount).ok_or(())?);
        Ok(())
    })
}

/// The remaining bytes.
pub fn room() -> u64 {
    LEFT.with(|left| left.made.get())
}

fn too_many_items() -> Error {
    exceeded(format!("it makes a list of more than {MAX_ITEMS} items"))
}

/// The number of list items, characters or keys, as far as it is known.
pub fn num_items(value: &Value) -> u64 {
    value.len().map_or(1, |len| len as u64)
}

/// The cost of reading a value once: bytes of a string, items of anything else.
pub fn flat_size(value: &Value) -> u64 {
    value.as_str().map_or_else(|| num_items(value).saturating_mul(ITEM_BYTES), |text| text.len() as u64)
}

pub fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

/// The cost of printing or comparing a value with all its contents. It counts as work.
pub fn weigh(value: &Value) -> Fallible<u64> {
    weigh_at(value, 0)
}

fn weigh_at(value: &Value, depth: usize) -> Fallible<u64> {
    if depth > MAX_NESTING {
        return Err(exceeded(format!("it nests lists or maps deeper than {MAX_NESTING}")));
    }
    let own = 1 + flat_size(value);
    spend(own)?;
    let mut weight = own;
    if !is_container(value) {
        return Ok(weight);
    }
    let is_map = value.kind() == ValueKind::Map;
    // Lists of one list many times, in each other, look like billions of values. The list is weighed once, and counted
    // as often as it is there.
    let mut last: Option<(Value, u64)> = None;
    for item in value.try_iter()? {
        let added = match &last {
            Some((same, weight)) if is_sameas(&item, same) => {
                spend(*weight)?;
                *weight
            }
            _ if is_map => weigh_at(&item, depth + 1)?.saturating_add(weigh_at(&value.get_item(&item)?, depth + 1)?),
            _ => weigh_at(&item, depth + 1)?,
        };
        weight = weight.saturating_add(added);
        if !is_map && is_container(&item) {
            last = Some((item, added));
        }
    }
    Ok(weight)
}

/// Converts a lazy iterable to a list. Lazy iterables can contain each other to any depth.
pub fn flatten(value: Value) -> Fallible<Value> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        if items.len() == MAX_ITEMS {
            return Err(too_many_items());
        }
        make(ITEM_BYTES)?;
        items.push(item);
    }
    Ok(Value::from(items))
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Counts a new list, tuple or map.
pub fn made(value: Value) -> Fallible<Value> {
    make(num_items(&value).saturating_mul(ITEM_BYTES))?;
    holds_no_namespace(&value)?;
    weigh(&value)?;
    Ok(value)
}

fn holds_no_namespace(value: &Value) -> Fallible<()> {
    if !is_container(value) {
        return Ok(());
    }
    for item in value.try_iter()? {
        held(item.clone())?;
        if value.kind() == ValueKind::Map {
            held(value.get_item(&item)?)?;
        }
    }
    Ok(())
}

/// Checks a value before a namespace or a list stores it. It must not contain a namespace, which could contain itself
/// and would never be freed.
pub fn held(value: Value) -> Fallible<Value> {
    if is_namespace(&value) {
        return Err(Error::new(ErrorKind::InvalidOperation, "a list, a map or a namespace cannot contain a namespace"));
    }
    Ok(value)
}

/// An operand of `+`.
fn term(value: Value) -> Fallible<Value> {
    match value.kind() {
        ValueKind::String => make(flat_size(&value))?,
        ValueKind::Seq | ValueKind::Iterable => {
            if value.len().is_none_or(|len| len > MAX_ITEMS) {
                return Err(too_many_items());
            }
            make(flat_size(&value))?;
        }
        _ => {}
    }
    Ok(value)
}

/// An operand of `~`.
fn text(value: Value) -> Fallible<Value> {
    match value.kind() {
        ValueKind::String => make(flat_size(&value))?,
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            weigh(&value)?;
            let mut text = Limited { text: String::new() };
            write!(text, "{value}").map_err(|_| make(u64::MAX).err().unwrap_or_else(too_many_items))?;
            return Ok(Value::from(text.text));
        }
        _ => make(ITEM_BYTES)?,
    }
    Ok(value)
}

/// A string that counts its own growth.
struct Limited {
    text: String,
}

impl Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        make(text.len() as u64).map_err(|_| fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}

/// `left * right`: of numbers, or a string or list repeated.
fn times(left: &Value, right: &Value) -> Fallible<Value> {
    let is_repeated = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable);
    let (what, count) = if is_repeated(left) { (left, right) } else { (right, left) };
    if is_repeated(what) {
        let count = count.as_usize().ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, "texts and lists can only be multiplied with integers from 0")
        })?;
        make(flat_size(what).saturating_mul(count as u64))?;
        if let Some(text) = what.as_str() {
            return Ok(Value::from(text.repeat(count)));
        }
        if num_items(what).saturating_mul(count as u64) > MAX_ITEMS as u64 {
            return Err(too_many_items());
        }
        let items: Vec<Value> = what.try_iter()?.collect();
        let repeated: Vec<Value> = std::iter::repeat_n(&items, count).flatten().cloned().collect();
        return Ok(if what.is_tuple() { Value::from(Tuple::from(repeated)) } else { Value::from(repeated) });
    }
    let impossible = || {
        let kinds = format!("tried to use * operator on unsupported types {} and {}", left.kind(), right.kind());
        Error::new(ErrorKind::InvalidOperation, kinds)
    };
    let is_whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    if is_whole(left) && is_whole(right) {
        let [left, right] = [left, right].map(|value| i128::try_from(value.clone()));
        let product = left?.checked_mul(right?).ok_or_else(impossible)?;
        return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
    }
    match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
        (Ok(left), Ok(right)) => Ok(Value::from(left * right)),
        _ => Err(impossible()),
    }
}

/// `a < b`, or a chain of comparisons.
fn compare(state: &mut State, args: Rest<Value>) -> Fallible<bool> {
    let (mut left, mut rest) = args.split_first().ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    while let [op, right, following @ ..] = rest {
        if !compared(state, left, op.as_str().unwrap_or_default(), right)? {
            return Ok(false);
        }
        (left, rest) = (right, following);
    }
    Ok(true)
}

fn compared(state: &mut State, left: &Value, op: &str, right: &Value) -> Fallible<bool> {
    if is_container(left) && is_container(right) {
        weigh(left)?;
        weigh(right)?;
    } else {
        spend(flat_size(left).min(flat_size(right)))?;
    }
    Ok(match op {
        "==" => left == right,
        "!=" => left != right,
        "<" => left < right,
        "<=" => left <= right,
        ">" => left > right,
        ">=" => left >= right,
        "in" | "not in" => {
            let right = searched(right.clone())?;
            minijinja::tests::is_in(state, left, &right)? == (op == "in")
        }
        other => return Err(Error::new(ErrorKind::InvalidOperation, format!("there is no comparison {other}"))),
    })
}

/// The container of an `in`.
fn searched(value: Value) -> Fallible<Value> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => drop(weigh(&value)?),
        ValueKind::String => spend(flat_size(&value))?,
        _ => {}
    }
    Ok(value)
}

/// A value that is indexed. A lazy iterable has no positions, and a string has none for characters.
fn indexed(value: Value) -> Fallible<Value> {
    if matches!(value.kind(), ValueKind::Iterable | ValueKind::String) {
        spend(flat_size(&value))?;
    }
    Ok(value)
}

/// The iterable of a loop. That of a string is its characters.
fn iterated(value: Value) -> Fallible<Value> {
    if value.kind() == ValueKind::String {
        make(flat_size(&value).saturating_mul(ITEM_BYTES))?;
    }
    Ok(value)
}

/// A slice, or a value that is spread over arguments.
fn sliced(value: Value) -> Fallible<Value> {
    match value.kind() {
        ValueKind::Seq | ValueKind::String => make(flat_size(&value))?,
        _ => {}
    }
    flatten(value)
}

/// Writes a value and counts its bytes.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Fallible<()> {
    if !matches!(state.auto_escape(), AutoEscape::None) {
        // The longest escape of a byte.
        make(weigh(value)?.saturating_mul(6))?;
        return escape_formatter(out, state, value);
    }
    if value.as_str().is_none() && is_container(value) {
        weigh(value)?;
    }
    let text = text(value.clone())?;
    match text.as_str() {
        Some(text) => out.write_str(text)?,
        None => write!(out, "{text}")?,
    }
    Ok(())
}

/// Installs the functions of [`rewrite`], the limit of steps, and the counting of output.
pub fn install(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_formatter(write);
    environment.add_function(rewrite::TIMES, |left: &Value, right: &Value| times(left, right));
    environment.add_function(rewrite::COMPARE, compare);
    environment.add_function(rewrite::TERM, term);
    environment.add_function(rewrite::TEXT, text);
    environment.add_function(rewrite::CONTAINER, searched);
    environment.add_function(rewrite::MADE, made);
    environment.add_function(rewrite::INDEXED, indexed);
    environment.add_function(rewrite::ITERATED, iterated);
    environment.add_function(rewrite::SLICED, sliced);
    environment.add_function(rewrite::HELD, held);
    environment.add_function(rewrite::WEIGHED, |value: Value| weigh(&value).map(|_| value));
    environment.add_function(rewrite::NO_TEMPLATES, || -> Fallible<Value> {
        Err(Error::new(ErrorKind::TemplateNotFound, "a chat template cannot include, import or extend another one"))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weight of a value, and what weighing it took of the budget.
    fn weighed(value: &Value) -> (u64, u64) {
        LEFT.with(|left| left.work.set(WORK));
        (weigh(value).expect("it is small"), WORK - LEFT.with(|left| left.work.get()))
    }

    #[test]
    fn a_repeated_list_costs_as_much_as_equal_lists() {
        let list = || Value::from(vec![Value::from("text"), Value::from(vec![1, 2, 3])]);
        let (first, second) = (list(), list());
        let repeated = Value::from(vec![first.clone(), first.clone(), first.clone(), second.clone(), first.clone()]);
        let equal = Value::from((0..5).map(|_| list()).collect::<Vec<_>>());
        assert_eq!(weighed(&repeated), weighed(&equal));
        let repeated = Value::from(vec![repeated; 3]);
        let equal = Value::from((0..3).map(|_| equal.try_iter().unwrap().collect::<Value>()).collect::<Vec<_>>());
        assert_eq!(weighed(&repeated), weighed(&equal));
    }

    /// Visiting each would take centuries.
    #[test]
    fn lists_of_one_list_are_weighed_at_once() {
        let value = (0..10).fold(Value::from(vec![1]), |inner, _| Value::from(vec![inner; 1000]));
        LEFT.with(|left| left.work.set(u64::MAX));
        let error = weigh(&value).expect_err("it is more than any budget");
        assert!(error.to_string().contains("it reads more than"), "{error}");
    }
}
