//! A module: PTX text, parsed and decoded.

use crate::decoder::kernel;
use crate::error::{PtxError, PtxResult};
use crate::inline::inline;
use crate::parser;
use crate::program::KernelProgram;
use crate::source::SourceLines;
use crate::syntax::{Space, SyntaxTree, Variable};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A module, ready to run.
#[derive(Clone, Debug)]
pub struct Module {
    id: u64,
    tree: SyntaxTree,
    programs: Vec<KernelProgram>,
}

impl Module {
    /// Reads PTX text. Every instruction of every entry is decoded; one that is not known is an error that names it and
    /// its line.
    pub fn parse(text: &str) -> PtxResult<Self> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let mut tree = parser::parse(text)?;
        let mut names = HashMap::new();
        let in_memory = tree.variables.iter().filter(|variable| is_in_memory(variable));
        for (index, variable) in in_memory.enumerate() {
            names.insert(variable.name.clone(), index as u32);
        }
        let entries: Vec<_> = tree.functions.iter().filter(|function| function.is_entry).collect();
        let programs = entries
            .into_iter()
            .map(|entry| kernel::decode(&tree, &inline(&tree, entry)?, &names))
            .collect::<PtxResult<_>>()?;
        // Only the decoded programs are needed from here on.
        tree.functions.clear();
        Ok(Self { id: IDS.fetch_add(1, Ordering::Relaxed), tree, programs })
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// `sm_90a`
    pub fn target(&self) -> &str {
        &self.tree.target
    }

    pub fn lines(&self) -> &SourceLines {
        &self.tree.lines
    }

    /// Global and constant variables.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.tree.variables.iter().filter(|variable| is_in_memory(variable))
    }

    pub fn entries(&self) -> impl Iterator<Item = &KernelProgram> {
        self.programs.iter()
    }

    pub fn entry(&self, name: &str) -> PtxResult<&KernelProgram> {
        let found = self.programs.iter().find(|program| program.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.programs.iter().map(|program| program.name.as_str()).collect();
            PtxError::new(format!("there is no entry {name}; the module has {}", names.join(", ")))
        })
    }
}

fn is_in_memory(variable: &Variable) -> bool {
    matches!(variable.space, Space::Global | Space::Const)
}
