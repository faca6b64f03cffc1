//! Calls of functions. A call is replaced by the instructions of the function that it calls, before they are decoded:
//! its registers and labels get names of their own, its parameters are the caller's arguments, and its `ret` branches
//! behind the call.

use crate::error::{PtxError, PtxResult};
use crate::syntax::{Predicate, PtxFunction, PtxOperand, RawInstruction, Register, Space, SyntaxTree, Variable};
use std::collections::HashMap;

/// What a failing `assert` calls.
pub const ASSERTION: &str = "__assertfail";
/// Instructions of an entry with all that it calls, beyond which it is refused.
const MAX_INSTRUCTIONS: usize = 1 << 20;

/// An entry without calls.
pub fn inline(tree: &SyntaxTree, entry: &PtxFunction) -> PtxResult<PtxFunction> {
    let functions = tree.functions.iter().map(|function| (function.name.as_str(), function)).collect();
    let out = PtxFunction {
        variables: Vec::new(),
        num_registers: 0,
        num_predicates: 0,
        labels: Vec::new(),
        instructions: Vec::new(),
        branch_targets: Vec::new(),
        ..entry.clone()
    };
    let mut inliner = Inliner { functions, out, calls: Vec::new(), num_calls: 0 };
    inliner.body(entry, HashMap::new())?;
    Ok(inliner.out)
}

struct Inliner<'a> {
    functions: HashMap<&'a str, &'a PtxFunction>,
    out: PtxFunction,
    /// The functions that are being inlined, outermost first.
    calls: Vec<&'a str>,
    num_calls: usize,
}

/// How the names of one call become names of the entry.
struct CallNames {
    prefix: String,
    first_register: u32,
    first_predicate: u32,
    variables: HashMap<String, String>,
}

impl CallNames {
    fn operand(&self, operand: &PtxOperand) -> PtxOperand {
        let boxed = |operand: &PtxOperand| Box::new(self.operand(operand));
        let all = |operands: &[PtxOperand]| operands.iter().map(|operand| self.operand(operand)).collect();
        match operand {
            PtxOperand::Register(Register(index), scalar) => {
                PtxOperand::Register(Register(index + self.first_register), *scalar)
            }
            PtxOperand::Predicate(predicate, negated) => PtxOperand::Predicate(self.predicate(*predicate), *negated),
            PtxOperand::PredicatePair(a, b) => {
                PtxOperand::PredicatePair(a.map(|a| self.predicate(a)), b.map(|b| self.predicate(b)))
            }
            PtxOperand::Symbol(name, offset) => PtxOperand::Symbol(self.variable(name), *offset),
            PtxOperand::Address(base, offset) => PtxOperand::Address(boxed(base), *offset),
            PtxOperand::TensorAddress(base, at) => PtxOperand::TensorAddress(boxed(base), all(at)),
            PtxOperand::Vector(operands) => PtxOperand::Vector(all(operands)),
            PtxOperand::Label(label) => PtxOperand::Label(self.label(label)),
            PtxOperand::Special(_)
            | PtxOperand::Integer(_)
            | PtxOperand::Single(_)
            | PtxOperand::Double(_)
            | PtxOperand::Sink => operand.clone(),
        }
    }

    fn predicate(&self, Predicate(index): Predicate) -> Predicate {
        Predicate(index + self.first_predicate)
    }

    fn variable(&self, name: &str) -> String {
        self.variables.get(name).map_or(name, |known| known).to_string()
    }

    fn label(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl<'a> Inliner<'a> {
    /// Appends a function's instructions. `arguments` are the caller's variables by the names of its parameters.
    fn body(&mut self, function: &'a PtxFunction, arguments: HashMap<String, String>) -> PtxResult<()> {
        let is_entry = self.calls.is_empty();
        let prefix = if is_entry { String::new() } else { format!("{}:{}:", function.name, self.num_calls) };
        let mut names = CallNames {
            prefix,
            first_register: self.out.num_registers,
            first_predicate: self.out.num_predicates,
            variables: arguments,
        };
        self.out.num_registers += function.num_registers;
        self.out.num_predicates += function.num_predicates;
        for variable in &function.variables {
            let name = match variable.space {
                _ if is_entry => variable.name.clone(),
                Space::Local | Space::Param => format!("{}{}", names.prefix, variable.name),
                // One for all calls.
                _ => format!("{}:{}", function.name, variable.name),
            };
            if is_entry || !self.out.variables.iter().any(|known| known.name == name) {
                self.out.variables.push(Variable { name: name.clone(), ..variable.clone() });
            }
            names.variables.insert(variable.name.clone(), name);
        }
        self.calls.push(&function.name);
        let end = names.label("end of the call");
        let mut places = Vec::with_capacity(function.instructions.len() + 1);
        for raw in &function.instructions {
            places.push(self.out.instructions.len() as u32);
            self.instruction(raw, &names, if is_entry { None } else { Some(&end) })?;
        }
        places.push(self.out.instructions.len() as u32);
        self.calls.pop();
        let labels = function.labels.iter().map(|(name, place)| (names.label(name), places[*place as usize]));
        self.out.labels.extend(labels);
        self.out.labels.push((end, self.out.instructions.len() as u32));
        let lists = function
            .branch_targets
            .iter()
            .map(|(name, targets)| (names.label(name), targets.iter().map(|target| names.label(target)).collect()));
        self.out.branch_targets.extend(lists);
        Ok(())
    }

    /// Appends an instruction; `end`: where a call ends that is being inlined.
    fn instruction(&mut self, raw: &RawInstruction, names: &CallNames, end: Option<&str>) -> PtxResult<()> {
        let guard = raw.guard.map(|(predicate, negated)| (names.predicate(predicate), negated));
        let operands = raw.operands.iter().map(|operand| names.operand(operand)).collect();
        let raw = RawInstruction { guard, operands, ..raw.clone() };
        let name = raw.opcode.split('.').next().unwrap_or_default();
        match (name, end) {
            ("call", _) => self.call(&raw),
            ("ret", Some(end)) => {
                self.push(RawInstruction { opcode: "bra".into(), operands: vec![PtxOperand::Label(end.into())], ..raw })
            }
            _ => self.push(raw),
        }
    }

    fn push(&mut self, raw: RawInstruction) -> PtxResult<()> {
        if self.out.instructions.len() >= MAX_INSTRUCTIONS {
            return Err(PtxError::at(
                raw.text_line,
                format!("more than {MAX_INSTRUCTIONS} instructions with all calls"),
            ));
        }
        self.out.instructions.push(raw);
        Ok(())
    }

    /// `call (results), function, (arguments);`
    fn call(&mut self, raw: &RawInstruction) -> PtxResult<()> {
        let error = |message: String| Err(PtxError::at(raw.text_line, format!("{}: {message}", raw.opcode)));
        let (mut callee, mut given) = (None, Vec::new());
        for operand in &raw.operands {
            match operand {
                PtxOperand::Symbol(name, 0) if callee.is_none() => callee = Some(name.as_str()),
                PtxOperand::Vector(all) => given.extend(all),
                _ => return error("calls through a register are not supported".into()),
            }
        }
        let Some(name) = callee else { return error("calls through a register are not supported".into()) };
        if name == ASSERTION {
            let operands = vec![PtxOperand::Symbol(name.into(), 0)];
            return self.push(RawInstruction { opcode: "trap".into(), operands, ..raw.clone() });
        }
        let Some(function) = self.functions.get(name).copied() else {
            return error(format!("{name} is not defined in the module"));
        };
        if self.calls.contains(&name) {
            return error(format!("{name} calls itself, which is not supported"));
        }
        if given.len() != function.params.len() {
            return error(format!(
                "{} arguments and results of {name}, which has {}",
                given.len(),
                function.params.len()
            ));
        }
        let mut arguments = HashMap::new();
        for (param, argument) in function.params.iter().zip(given) {
            let PtxOperand::Symbol(variable, 0) = argument else {
                return error(format!("{}: an argument must be a variable", param.name));
            };
            arguments.insert(param.name.clone(), variable.clone());
        }
        self.num_calls += 1;
        let behind = format!("behind call {}", self.num_calls);
        if let Some((predicate, negated)) = raw.guard {
            let operands = vec![PtxOperand::Label(behind.clone())];
            let guard = Some((predicate, !negated));
            self.push(RawInstruction { guard, opcode: "bra".into(), operands, ..raw.clone() })?;
        }
        self.body(function, arguments)?;
        self.out.labels.push((behind, self.out.instructions.len() as u32));
        Ok(())
    }
}
