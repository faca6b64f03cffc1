//! From parsed instructions to decoded ones: what the rows of the instruction table share.

pub mod r#async;
pub mod control;
pub mod convert;
pub mod float;
pub mod integer;
pub mod kernel;
pub mod memory;
pub mod moves;
pub mod tensor;
pub mod warp;

use crate::error::{PtxError, PtxResult};
use crate::float::Rounding;
use crate::program::{Address, ArithmeticMode, Op, PredicateSource, ValueSource};
use crate::syntax::{Predicate, PtxOperand, RawInstruction, Register, Space};
use crate::types::{ScalarType, truncate};
use std::collections::HashMap;

/// What a symbol in an operand means.
#[derive(Clone, Copy, Debug)]
pub enum Meaning {
    /// An offset in shared, local or parameter memory.
    Offset(u64),
    /// A variable of the module, by its index.
    Variable(u32),
    /// An offset in local memory, which holds the arguments and results of calls.
    Argument(u32),
}

/// Decodes one instruction.
pub struct InstructionDecoder<'a> {
    pub raw: &'a RawInstruction,
    /// Modifiers that the row's pattern matched, without dots.
    pub modifiers: Vec<&'a str>,
    pub symbols: &'a HashMap<String, Meaning>,
    pub labels: &'a HashMap<&'a str, u32>,
    pub branch_targets: &'a HashMap<&'a str, &'a [String]>,
}

impl InstructionDecoder<'_> {
    pub fn name(&self) -> &str {
        self.raw.opcode.split('.').next().expect("a split has a first part")
    }

    pub fn error<T>(&self, message: impl AsRef<str>) -> PtxResult<T> {
        Err(PtxError::at(self.raw.text_line, format!("{}: {}", self.raw.opcode, message.as_ref())))
    }

    /// A combination that the table's pattern allows and that is not executed.
    pub fn unsupported<T>(&self) -> PtxResult<T> {
        self.error("this combination of modifiers is not supported")
    }

    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// The types among the modifiers, in order.
    pub fn types(&self) -> Vec<ScalarType> {
        self.modifiers.iter().filter_map(|modifier| ScalarType::parse(modifier)).collect()
    }

    pub fn scalar(&self, index: usize) -> PtxResult<ScalarType> {
        match self.types().get(index) {
            Some(scalar) => Ok(*scalar),
            None => self.error("a type is missing"),
        }
    }

    /// The first modifier among `choices`.
    pub fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(name, _)| self.has(name)).map(|(_, value)| *value)
    }

    pub fn rounding(&self) -> Option<Rounding> {
        self.choice(&[
            ("rn", Rounding::NearestEven),
            ("rni", Rounding::NearestEven),
            ("rna", Rounding::NearestAway),
            ("rz", Rounding::TowardZero),
            ("rzi", Rounding::TowardZero),
            ("rm", Rounding::Down),
            ("rmi", Rounding::Down),
            ("rp", Rounding::Up),
            ("rpi", Rounding::Up),
        ])
    }

    pub fn mode(&self) -> ArithmeticMode {
        ArithmeticMode {
            rounding: self.rounding().unwrap_or_default(),
            ftz: self.has("ftz"),
            saturate: self.has("sat") || self.has("satfinite"),
            relu: self.has("relu"),
            constant: 0,
        }
    }

    /// `v2`, `v4`, `v8`: elements of a vector.
    pub fn vector(&self) -> usize {
        self.choice(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
    }

    pub fn space(&self) -> Space {
        self.choice(&[
            ("global", Space::Global),
            ("shared::cluster", Space::SharedCluster),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("local", Space::Local),
            ("param", Space::Param),
            ("param::entry", Space::Param),
            ("param::func", Space::Param),
            ("const", Space::Const),
        ])
        .unwrap_or(Space::Generic)
    }

    fn argument(&self, operand: &PtxOperand) -> Option<u32> {
        match operand {
            PtxOperand::Symbol(name, 0) => match self.symbols.get(name)? {
                Meaning::Argument(at) => Some(*at),
                _ => None,
            },
            _ => None,
        }
    }

    /// The space that a load or a store accesses: arguments of calls are in local memory.
    pub fn accessed_space(&self, address: usize) -> PtxResult<Space> {
        Ok(match self.operand(address)? {
            PtxOperand::Address(base, _) if self.argument(base).is_some() => Space::Local,
            _ => self.space(),
        })
    }

    pub fn num_operands(&self) -> usize {
        self.raw.operands.len()
    }

    pub fn operand(&self, index: usize) -> PtxResult<&PtxOperand> {
        match self.raw.operands.get(index) {
            Some(operand) => Ok(operand),
            None => self.error(format!("operand {} is missing", index + 1)),
        }
    }

    fn wrong<T>(&self, index: usize, expected: &str) -> PtxResult<T> {
        self.error(format!("operand {} must be {expected}, not {:?}", index + 1, self.raw.operands.get(index)))
    }

    pub fn register(&self, index: usize) -> PtxResult<Register> {
        match self.operand(index)? {
            PtxOperand::Register(register, _) => Ok(*register),
            _ => self.wrong(index, "a register"),
        }
    }

    /// The declared bits of a register operand.
    pub fn register_bits(&self, index: usize) -> PtxResult<u32> {
        match self.operand(index)? {
            PtxOperand::Register(_, scalar) => Ok(scalar.bits()),
            _ => self.wrong(index, "a register"),
        }
    }

    pub fn predicate(&self, index: usize) -> PtxResult<Predicate> {
        match self.operand(index)? {
            PtxOperand::Predicate(predicate, false) => Ok(*predicate),
            _ => self.wrong(index, "a predicate"),
        }
    }

    pub fn predicate_source(&self, index: usize) -> PtxResult<PredicateSource> {
        match self.operand(index)? {
            PtxOperand::Predicate(predicate, negated) => Ok((*predicate, *negated)),
            _ => self.wrong(index, "a predicate"),
        }
    }

    pub fn source(&self, index: usize, scalar: ScalarType) -> PtxResult<ValueSource> {
        let operand = self.operand(index)?;
        match self.source_of(operand, scalar) {
            Some(source) => Ok(source),
            None => self.wrong(index, "a register or a constant"),
        }
    }

    /// Like `source`; 0 if there are fewer operands.
    pub fn source_or_zero(&self, index: usize, scalar: ScalarType) -> PtxResult<ValueSource> {
        if index < self.num_operands() { self.source(index, scalar) } else { Ok(ValueSource::Constant(0)) }
    }

    pub fn source_of(&self, operand: &PtxOperand, scalar: ScalarType) -> Option<ValueSource> {
        Some(match operand {
            PtxOperand::Register(register, _) => ValueSource::Register(*register),
            PtxOperand::Integer(number) if scalar == ScalarType::F64 => {
                ValueSource::Constant((*number as f64).to_bits())
            }
            PtxOperand::Integer(number) => ValueSource::Constant(truncate(*number as u64, scalar.bits().max(8))),
            PtxOperand::Single(bits) => ValueSource::Constant(u64::from(*bits)),
            PtxOperand::Double(number) if scalar.bits() == 32 => {
                ValueSource::Constant(u64::from((*number as f32).to_bits()))
            }
            PtxOperand::Double(number) => ValueSource::Constant(number.to_bits()),
            PtxOperand::Symbol(name, offset) => match self.symbols.get(name)? {
                Meaning::Offset(at) => ValueSource::Constant(at.wrapping_add_signed(*offset)),
                Meaning::Variable(index) => ValueSource::Variable(*index, *offset),
                // An address of it would be one of the kernel's parameters.
                Meaning::Argument(_) => return None,
            },
            PtxOperand::Special(name) if name == "WARP_SZ" => ValueSource::Constant(32),
            _ => return None,
        })
    }

    pub fn constant(&self, index: usize) -> PtxResult<u64> {
        match self.operand(index)? {
            PtxOperand::Integer(number) => Ok(*number as u64),
            _ => self.wrong(index, "a constant"),
        }
    }

    pub fn address(&self, index: usize) -> PtxResult<Address> {
        let operand = self.operand(index)?;
        match self.address_of(operand) {
            Some(address) => Ok(address),
            None => self.wrong(index, "an address"),
        }
    }

    pub fn address_of(&self, operand: &PtxOperand) -> Option<Address> {
        let (base, offset) = match operand {
            PtxOperand::Address(base, offset) => (&**base, *offset),
            PtxOperand::TensorAddress(base, _) => match &**base {
                PtxOperand::Address(base, offset) => (&**base, *offset),
                base => (base, 0),
            },
            _ => return None,
        };
        if let Some(at) = self.argument(base) {
            return Some(Address { base: ValueSource::Constant(at.into()), offset });
        }
        Some(Address { base: self.source_of(base, ScalarType::U64)?, offset })
    }

    /// The elements of `{a, b}`, or the operand itself.
    pub fn elements(&self, index: usize) -> PtxResult<&[PtxOperand]> {
        Ok(match self.operand(index)? {
            PtxOperand::Vector(all) => all,
            one => std::slice::from_ref(one),
        })
    }

    pub fn sources(&self, index: usize, scalar: ScalarType) -> PtxResult<Box<[ValueSource]>> {
        let sources: Option<Box<[ValueSource]>> =
            self.elements(index)?.iter().map(|element| self.source_of(element, scalar)).collect();
        sources.map_or_else(|| self.wrong(index, "registers or constants"), Ok)
    }

    /// Registers, or `_` for a result that is not wanted.
    pub fn registers_or_sinks(&self, index: usize) -> PtxResult<Box<[Option<Register>]>> {
        let one = |element: &PtxOperand| match element {
            PtxOperand::Register(register, _) => Some(Some(*register)),
            PtxOperand::Sink => Some(None),
            _ => None,
        };
        let all: Option<Box<_>> = self.elements(index)?.iter().map(one).collect();
        all.map_or_else(|| self.wrong(index, "registers"), Ok)
    }

    pub fn registers(&self, index: usize) -> PtxResult<Box<[Register]>> {
        let all: Option<Box<_>> = self.registers_or_sinks(index)?.iter().copied().collect();
        all.map_or_else(|| self.wrong(index, "registers"), Ok)
    }

    /// `r|p`: a register and, perhaps, a predicate.
    pub fn register_and_predicate(&self, index: usize) -> PtxResult<(Option<Register>, Option<Predicate>)> {
        match self.operand(index)? {
            PtxOperand::Register(register, _) => Ok((Some(*register), None)),
            PtxOperand::Vector(pair) => match pair[..] {
                [PtxOperand::Register(register, _), PtxOperand::PredicatePair(_, predicate)] => {
                    Ok((Some(register), predicate))
                }
                _ => self.wrong(index, "a register and a predicate"),
            },
            PtxOperand::PredicatePair(_, predicate) => Ok((None, *predicate)),
            _ => self.wrong(index, "a register and a predicate"),
        }
    }

    pub fn label(&self, index: usize) -> PtxResult<u32> {
        match self.operand(index)? {
            PtxOperand::Label(name) => match self.labels.get(name.as_str()) {
                Some(place) => Ok(*place),
                None => self.error(format!("unknown label {name}")),
            },
            _ => self.wrong(index, "a label"),
        }
    }

    /// The operation of a chosen computation.
    pub fn compute(
        &self,
        compute: Option<crate::program::Compute>,
        mode: ArithmeticMode,
        from: [ValueSource; 3],
    ) -> PtxResult<Op> {
        match compute {
            Some(compute) => Ok(Op::Compute { compute, mode, to: self.register(0)?, from }),
            None => self.unsupported(),
        }
    }

    /// Operands 2 to 4, as far as there are.
    pub fn three_sources(&self, scalar: ScalarType) -> PtxResult<[ValueSource; 3]> {
        Ok([self.source_or_zero(1, scalar)?, self.source_or_zero(2, scalar)?, self.source_or_zero(3, scalar)?])
    }
}
