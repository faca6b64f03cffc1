//! An entry's instructions, with the layout of its memory.

use super::{InstructionDecoder, Meaning};
use crate::error::{PtxError, PtxResult};
use crate::program::{Instruction, KernelProgram, SHARED_GUARD_BYTES, SharedVariable};
use crate::registers;
use crate::syntax::{PtxFunction, PtxOperand, RawInstruction, Space, SyntaxTree, Variable};
use crate::table;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Decodes an entry. `variables` are the module's global and constant variables by name.
pub fn decode(tree: &SyntaxTree, function: &PtxFunction, variables: &HashMap<String, u32>) -> PtxResult<KernelProgram> {
    let mut symbols: HashMap<String, Meaning> =
        variables.iter().map(|(name, index)| (name.clone(), Meaning::Variable(*index))).collect();
    let mut param_bytes = 0;
    let mut params = Vec::new();
    for param in &function.params {
        let at = place(&mut param_bytes, param);
        symbols.insert(param.name.clone(), Meaning::Offset(at.into()));
        params.push((param.name.clone(), at, param.bytes));
    }
    // Only the shared variables that the entry names take memory.
    let named: HashSet<&str> =
        function.instructions.iter().flat_map(|raw| &raw.operands).flat_map(symbols_of).collect();
    let (mut static_shared, mut local_bytes, mut dynamic_align) = (0, 0, 16);
    let mut shared_variables = Vec::new();
    for variable in tree.variables.iter().chain(&function.variables) {
        match variable.space {
            Space::Shared if variable.is_dynamic => dynamic_align = dynamic_align.max(variable.align),
            Space::Shared if named.contains(variable.name.as_str()) => {
                let (name, bytes) = (variable.name.clone(), variable.bytes);
                // Guards are multiples of every alignment.
                let offset = place(&mut static_shared, variable) + shared_variables.len() as u32 * SHARED_GUARD_BYTES;
                symbols.insert(name.clone(), Meaning::Offset(offset.into()));
                shared_variables.push(SharedVariable { name, offset, bytes });
            }
            Space::Local => {
                let at = place(&mut local_bytes, variable);
                symbols.insert(variable.name.clone(), Meaning::Offset(at.into()));
            }
            _ => {}
        }
    }
    // Arguments of calls. Calls use the same names again, and with other sizes.
    let mut arguments: BTreeMap<&str, Variable> = BTreeMap::new();
    for variable in function.variables.iter().filter(|variable| variable.space == Space::Param) {
        let known = arguments.entry(&variable.name).or_insert_with(|| variable.clone());
        (known.bytes, known.align) = (known.bytes.max(variable.bytes), known.align.max(variable.align));
    }
    for (name, variable) in &arguments {
        symbols.insert((*name).into(), Meaning::Argument(place(&mut local_bytes, variable)));
    }
    let static_shared = static_shared.next_multiple_of(dynamic_align);
    let dynamic_shared = static_shared + shared_variables.len() as u32 * SHARED_GUARD_BYTES;
    for variable in tree.variables.iter().chain(&function.variables).filter(|variable| variable.is_dynamic) {
        symbols.insert(variable.name.clone(), Meaning::Offset(dynamic_shared.into()));
    }
    let labels: HashMap<&str, u32> = function.labels.iter().map(|(name, place)| (name.as_str(), *place)).collect();
    let branch_targets: HashMap<&str, &[String]> =
        function.branch_targets.iter().map(|(name, targets)| (name.as_str(), &targets[..])).collect();
    let mut code = Vec::with_capacity(function.instructions.len() + 1);
    for raw in &function.instructions {
        code.push(instruction(raw, &symbols, &labels, &branch_targets)?);
    }
    // A body may end without `ret`.
    let end = RawInstruction {
        guard: None,
        opcode: "ret".into(),
        operands: Vec::new(),
        source: function.instructions.last().map_or_else(Default::default, |last| last.source),
        text_line: function.instructions.last().map_or(0, |last| last.text_line),
    };
    code.push(instruction(&end, &symbols, &labels, &branch_targets)?);
    let num_registers = registers::allocate(&mut code, function.num_registers);
    Ok(KernelProgram {
        name: function.name.clone(),
        code,
        num_registers,
        num_predicates: function.num_predicates,
        param_bytes,
        params,
        shared_variables,
        dynamic_shared,
        static_shared,
        local_bytes,
        max_threads: function.max_threads,
        cluster: function.cluster,
    })
}

fn place(bytes: &mut u32, variable: &Variable) -> u32 {
    let at = bytes.next_multiple_of(variable.align.max(1));
    *bytes = at + variable.bytes;
    at
}

fn symbols_of(operand: &PtxOperand) -> Vec<&str> {
    match operand {
        PtxOperand::Symbol(name, _) => vec![name],
        PtxOperand::Address(base, _) => symbols_of(base),
        PtxOperand::TensorAddress(base, _) => symbols_of(base),
        PtxOperand::Vector(all) => all.iter().flat_map(symbols_of).collect(),
        _ => Vec::new(),
    }
}

fn instruction(
    raw: &RawInstruction,
    symbols: &HashMap<String, Meaning>,
    labels: &HashMap<&str, u32>,
    branch_targets: &HashMap<&str, &[String]>,
) -> PtxResult<Instruction> {
    let Some((row, modifiers)) = table::find(&raw.opcode) else {
        let known = table::has_name(&raw.opcode);
        let what = if known { "these modifiers are not supported" } else { "the instruction is not supported" };
        return Err(PtxError::at(raw.text_line, format!("{}: {what}", raw.opcode)));
    };
    let decoder = InstructionDecoder { raw, modifiers, symbols, labels, branch_targets };
    let op = (row.decode)(&decoder)?;
    Ok(Instruction { op, guard: raw.guard, row, source: raw.source, text_line: raw.text_line })
}
