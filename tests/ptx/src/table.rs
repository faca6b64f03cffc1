//! The instructions that are executed: one row for each form. The decoder and the page `docs/ptx.md` are made of it.
//!
//! A pattern is the name, then its modifiers in their order. `a|b` is a choice, `?` at the end makes it optional, and
//! `$name` stands for one of [`SETS`].

mod rows;

use crate::decoder::InstructionDecoder;
use crate::error::PtxResult;
use crate::program::Op;
pub use rows::ROWS;
use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;

/// The unit of a multiprocessor that an instruction is issued to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Unit {
    Integer,
    Float,
    Double,
    Half,
    Convert,
    /// The multi-function unit: approximations of transcendental functions.
    Mufu,
    Move,
    Control,
    Warp,
    Barrier,
    Load,
    Store,
    Atomic,
    AsyncCopy,
    Tensor,
}

impl Unit {
    pub const ALL: [Self; 15] = [
        Self::Integer,
        Self::Float,
        Self::Double,
        Self::Half,
        Self::Convert,
        Self::Mufu,
        Self::Move,
        Self::Control,
        Self::Warp,
        Self::Barrier,
        Self::Load,
        Self::Store,
        Self::Atomic,
        Self::AsyncCopy,
        Self::Tensor,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Integer => "integer",
            Self::Float => "float32",
            Self::Double => "float64",
            Self::Half => "16-bit float",
            Self::Convert => "convert",
            Self::Mufu => "MUFU",
            Self::Move => "move",
            Self::Control => "control",
            Self::Warp => "warp",
            Self::Barrier => "barrier",
            Self::Load => "load",
            Self::Store => "store",
            Self::Atomic => "atomic",
            Self::AsyncCopy => "async copy",
            Self::Tensor => "tensor core",
        }
    }
}

/// One form of an instruction.
pub struct InstructionRow {
    pub pattern: &'static str,
    pub unit: Unit,
    pub decode: fn(&InstructionDecoder<'_>) -> PtxResult<Op>,
    /// What it does, for the page.
    pub meaning: &'static str,
}

impl InstructionRow {
    pub fn name(&self) -> &'static str {
        self.pattern.split(' ').next().expect("a pattern has a name")
    }
}

impl fmt::Debug for InstructionRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pattern)
    }
}

/// Lists of modifiers that several patterns use.
pub const SETS: &[(&str, &str)] = &[
    ("round", "rn|rz|rm|rp"),
    ("iround", "rni|rzi|rmi|rpi"),
    ("int", "u16|u32|u64|s16|s32|s64"),
    ("bits", "b16|b32|b64"),
    ("half", "f16|f16x2|bf16|bf16x2"),
    ("any", "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f16|f16x2|bf16|bf16x2|f32|f64"),
    ("scalar", "u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64"),
    ("order", "weak|volatile|relaxed|acquire|release|acq_rel|mmio"),
    ("scope", "cta|cluster|gpu|sys"),
    ("space", "global|shared|shared::cta|shared::cluster|local|param|param::entry|param::func|const"),
    ("cache", "ca|cg|cs|lu|cv|wb|wt"),
    (
        "level",
        "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate|L2::cache_hint|L2::64B\
         |L2::128B|L2::256B|L2::evict_last|L2::evict_first|L2::evict_normal",
    ),
    ("vector", "v2|v4|v8"),
    ("compare", "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"),
    ("cta", "shared|shared::cta|shared::cluster"),
    ("wgmma", "m64nNk8|m64nNk16|m64nNk32"),
];

fn choices(element: &'static str) -> Vec<&'static str> {
    let mut all = Vec::new();
    for choice in element.split('|') {
        match choice.strip_prefix('$') {
            Some(name) => {
                let set = SETS.iter().find(|(set, _)| *set == name);
                all.extend(set.expect("a test checks every pattern's sets").1.split('|'));
            }
            None => all.push(choice),
        }
    }
    all
}

/// A pattern's elements: the choices, and whether one is needed.
type Pattern = Vec<(Vec<&'static str>, bool)>;

static BY_NAME: LazyLock<HashMap<&'static str, Vec<(&'static InstructionRow, Pattern)>>> = LazyLock::new(|| {
    let mut by_name: HashMap<_, Vec<_>> = HashMap::new();
    for row in ROWS {
        let elements = row.pattern.split(' ').skip(1).map(|element| match element.strip_suffix('?') {
            Some(element) => (choices(element), false),
            None => (choices(element), true),
        });
        by_name.entry(row.name()).or_default().push((row, elements.collect()));
    }
    by_name
});

/// In a choice such as `m64nNk16`, `N` is any multiple of 8 up to 256.
fn is_choice(choice: &str, modifier: &str) -> bool {
    match choice.split_once('N') {
        Some((start, end)) if !end.is_empty() && choice.starts_with("m64") => modifier
            .strip_prefix(start)
            .and_then(|rest| rest.strip_suffix(end))
            .and_then(|n| n.parse::<u32>().ok())
            .is_some_and(|n| n > 0 && n <= 256 && n % 8 == 0),
        _ => choice == modifier,
    }
}

fn matches(modifiers: &[&str], pattern: &[(Vec<&'static str>, bool)]) -> bool {
    let Some(((choices, needed), pattern_rest)) = pattern.split_first() else { return modifiers.is_empty() };
    if let Some((modifier, rest)) = modifiers.split_first()
        && choices.iter().any(|choice| is_choice(choice, modifier))
        && matches(rest, pattern_rest)
    {
        return true;
    }
    !needed && matches(modifiers, pattern_rest)
}

/// The row of an opcode such as `ld.global.u32`, and the opcode's modifiers.
pub fn find(opcode: &str) -> Option<(&'static InstructionRow, Vec<&str>)> {
    let mut parts = opcode.split('.');
    let name = parts.next().expect("a split has a first part");
    let modifiers: Vec<&str> = parts.collect();
    let (row, _) = BY_NAME.get(name)?.iter().find(|(_, pattern)| matches(&modifiers, pattern))?;
    Some((row, modifiers))
}

/// Whether there is an instruction of this name, with whatever modifiers.
pub fn has_name(opcode: &str) -> bool {
    BY_NAME.contains_key(opcode.split('.').next().expect("a split has a first part"))
}

/// The table as Markdown, for `docs/ptx.md`.
pub fn markdown() -> String {
    let mut text = String::from("| instruction | unit | what it does |\n|---|---|---|\n");
    let mut rows: Vec<&InstructionRow> = ROWS.iter().collect();
    rows.sort_by_key(|row| (row.unit, row.name()));
    for row in rows {
        let (pattern, meaning) = (row.pattern.replace('|', "\\|"), row.meaning);
        text.push_str(&format!("| `{pattern}` | {} | {meaning} |\n", row.unit.name()));
    }
    text.push_str("\n| set | modifiers |\n|---|---|\n");
    for (name, modifiers) in SETS {
        let modifiers: Vec<String> = modifiers.split('|').map(|modifier| format!("`{modifier}`")).collect();
        text.push_str(&format!("| `${name}` | {} |\n", modifiers.join(" ")));
    }
    text
}
