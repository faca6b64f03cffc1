//! Source lines of instructions, from `.file` and `.loc`.

use std::collections::HashMap;

/// A line of the CUDA source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
struct SourceLocation {
    file: u32,
    line: u32,
    column: u32,
    /// The call into which it was inlined: an index.
    caller: Option<u32>,
}

/// All source lines of a module.
#[derive(Clone, Debug, Default)]
pub struct SourceLines {
    files: HashMap<u32, String>,
    locations: Vec<SourceLocation>,
    /// The last location of each place, so that a place that is inlined somewhere leads to its caller.
    last: HashMap<(u32, u32, u32), u32>,
}

/// An index into [`SourceLines`]; `NONE`: unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct SourceLine(u32);

impl SourceLine {
    pub const NONE: Self = Self(0);
}

impl SourceLines {
    pub fn add_file(&mut self, number: u32, path: &str) {
        self.files.insert(number, path.into());
    }

    /// A `.loc`; `inlined_at` is the file, line and column of the call.
    pub fn add(&mut self, place: (u32, u32, u32), inlined_at: Option<(u32, u32, u32)>) -> SourceLine {
        let caller = inlined_at.map(|call| match self.last.get(&call) {
            Some(known) => *known,
            None => self.push(call, None),
        });
        let index = self.push(place, caller);
        SourceLine(index + 1)
    }

    fn push(&mut self, place: (u32, u32, u32), caller: Option<u32>) -> u32 {
        let (file, line, column) = place;
        let location = SourceLocation { file, line, column, caller };
        if let Some(last) = self.last.get(&place)
            && self.locations[*last as usize] == location
        {
            return *last;
        }
        self.locations.push(location);
        let index = (self.locations.len() - 1) as u32;
        self.last.insert(place, index);
        index
    }

    /// `attention.cu:67, called from attention.cu:203`, innermost first. `None` if the line is unknown.
    pub fn describe(&self, line: SourceLine) -> Option<String> {
        let mut index = Some(line.0.checked_sub(1)?);
        let mut parts = Vec::new();
        while let Some(at) = index {
            let location = &self.locations[at as usize];
            let file = self.files.get(&location.file).map_or("?", String::as_str);
            parts.push(format!("{file}:{}", location.line));
            // A recursive chain cannot be: callers come before what they call. A loop would be a bug of the compiler.
            index = location.caller.filter(|caller| *caller < at);
        }
        Some(parts.join(", called from "))
    }

    /// The innermost file and line.
    pub fn innermost(&self, line: SourceLine) -> Option<(&str, u32)> {
        let location = &self.locations[line.0.checked_sub(1)? as usize];
        Some((self.files.get(&location.file)?, location.line))
    }
}
