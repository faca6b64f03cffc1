//! PTX text to a [`SyntaxTree`].

mod body;

use crate::error::{PtxError, PtxResult};
use crate::lexer::{Token, tokens};
use crate::source::SourceLine;
use crate::syntax::{PtxFunction, Space, SyntaxTree, Variable};
use crate::types::ScalarType;

pub fn parse(text: &str) -> PtxResult<SyntaxTree> {
    let mut parser = PtxParser { tokens: tokens(text)?, at: 0, tree: SyntaxTree::default(), source: SourceLine::NONE };
    parser.module()?;
    Ok(parser.tree)
}

struct PtxParser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    tree: SyntaxTree,
    /// The last `.loc`.
    source: SourceLine,
}

impl PtxParser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        if token != Token::End {
            self.at += 1;
        }
        token
    }

    fn error<T>(&self, message: impl Into<String>) -> PtxResult<T> {
        Err(PtxError::at(self.line(), message))
    }

    fn takes(&mut self, mark: char) -> bool {
        let found = *self.peek() == Token::Mark(mark);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect(&mut self, mark: char) -> PtxResult<()> {
        if self.takes(mark) { Ok(()) } else { self.error(format!("expected {mark:?}, found {:?}", self.peek())) }
    }

    fn takes_word(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Token::Word(found) if found == word);
        if found {
            self.at += 1;
        }
        found
    }

    fn word(&mut self) -> PtxResult<String> {
        match self.next() {
            Token::Word(word) => Ok(word),
            other => self.error(format!("expected a name, found {other:?}")),
        }
    }

    fn integer(&mut self) -> PtxResult<u64> {
        match self.next() {
            Token::Integer(number) => Ok(number),
            other => self.error(format!("expected a number, found {other:?}")),
        }
    }

    fn small(&mut self) -> PtxResult<u32> {
        let number = self.integer()?;
        number.try_into().or_else(|_| self.error(format!("{number} is too large here")))
    }

    fn module(&mut self) -> PtxResult<()> {
        loop {
            match self.next() {
                Token::End => return Ok(()),
                Token::Mark(';') => {}
                Token::Word(word) => match word.as_str() {
                    ".version" => {
                        self.tree.version = match self.next() {
                            Token::Double(version) => format!("{version:.1}"),
                            other => return self.error(format!("expected a version, found {other:?}")),
                        }
                    }
                    ".target" => {
                        self.tree.target = self.word()?;
                        while self.takes(',') {
                            self.word()?;
                        }
                    }
                    ".address_size" => {
                        if self.integer()? != 64 {
                            return self.error(".address_size: only 64 is supported");
                        }
                    }
                    ".visible" | ".weak" | ".extern" | ".common" => {
                        let is_extern = word == ".extern";
                        self.declaration(is_extern)?;
                    }
                    ".entry" | ".func" | ".global" | ".const" | ".shared" => {
                        self.at -= 1;
                        self.declaration(false)?;
                    }
                    ".file" => self.file()?,
                    ".loc" => self.loc()?,
                    ".section" => self.skip_section()?,
                    ".alias" | ".pragma" => self.skip_statement(),
                    other => return self.error(format!("unknown directive {other}")),
                },
                other => return self.error(format!("expected a directive, found {other:?}")),
            }
        }
    }

    fn skip_statement(&mut self) {
        while !matches!(self.peek(), Token::Mark(';') | Token::End) {
            self.at += 1;
        }
        self.takes(';');
    }

    /// `.section .debug_str { … }`: data for debuggers.
    fn skip_section(&mut self) -> PtxResult<()> {
        while !matches!(self.peek(), Token::Mark('{') | Token::End) {
            self.at += 1;
        }
        self.expect('{')?;
        while !matches!(self.peek(), Token::Mark('}') | Token::End) {
            self.at += 1;
        }
        self.expect('}')
    }

    /// `.file 1 "attention.cu", 1700000000, 1234`
    fn file(&mut self) -> PtxResult<()> {
        let number = self.small()?;
        let Token::Text(path) = self.next() else { return self.error("expected a path") };
        self.tree.lines.add_file(number, &path);
        while self.takes(',') {
            self.integer()?;
        }
        Ok(())
    }

    /// `.loc 2 54 5, function_name $L__info_string1, inlined_at 1 31 5`
    fn loc(&mut self) -> PtxResult<()> {
        let place = self.place()?;
        let mut inlined_at = None;
        while self.takes(',') {
            if self.takes_word("inlined_at") {
                inlined_at = Some(self.place()?);
            } else {
                // The name of the inlined function, in a table of strings.
                self.word()?;
                self.word()?;
                while self.takes('+') {
                    self.integer()?;
                }
            }
        }
        self.source = self.tree.lines.add(place, inlined_at);
        Ok(())
    }

    fn place(&mut self) -> PtxResult<(u32, u32, u32)> {
        Ok((self.small()?, self.small()?, self.small()?))
    }

    fn declaration(&mut self, is_extern: bool) -> PtxResult<()> {
        match self.word()?.as_str() {
            ".entry" => self.function(true),
            ".func" => self.function(false),
            space => {
                let space = Self::space(space).map_or_else(|| self.error(format!("unknown directive {space}")), Ok)?;
                let variables = self.variables(space, is_extern)?;
                self.expect(';')?;
                self.tree.variables.extend(variables);
                Ok(())
            }
        }
    }

    fn space(name: &str) -> Option<Space> {
        Some(match name {
            ".global" => Space::Global,
            ".const" => Space::Const,
            ".shared" => Space::Shared,
            ".local" => Space::Local,
            ".param" => Space::Param,
            _ => return None,
        })
    }

    /// `.align 8 .b8 name[16] = {1, 2}, other`, after the state space.
    fn variables(&mut self, space: Space, is_extern: bool) -> PtxResult<Vec<Variable>> {
        let mut align = 0;
        let mut lanes = 1;
        let scalar = loop {
            match self.word()?.as_str() {
                ".align" => align = self.small()?,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                // How a pointer parameter is used.
                ".ptr" | ".global" | ".shared" | ".const" | ".local" | ".attribute" | ".managed" | ".unified" => {}
                name => match ScalarType::parse(name.trim_start_matches('.')) {
                    Some(scalar) if name.starts_with('.') => break scalar,
                    _ => return self.error(format!("unknown type {name}")),
                },
            }
        };
        let mut all = Vec::new();
        loop {
            // `.param .u64 .ptr .align 1 name`
            let mut name = self.word()?;
            while name.starts_with('.') {
                if name == ".align" {
                    align = self.small()?;
                }
                name = self.word()?;
            }
            let element = scalar.bytes() * lanes;
            let mut bytes = element;
            let mut is_dynamic = false;
            while self.takes('[') {
                if self.takes(']') {
                    is_dynamic = is_extern && space == Space::Shared;
                    bytes = 0;
                } else {
                    bytes *= self.small()?;
                    self.expect(']')?;
                }
            }
            let mut initial = Vec::new();
            if self.takes('=') {
                self.initial(scalar, &mut initial)?;
                bytes = bytes.max(initial.len() as u32);
            }
            let align = align.max(if align == 0 { element } else { 1 });
            all.push(Variable { name, space, align, bytes, initial, is_dynamic });
            if !self.takes(',') {
                return Ok(all);
            }
        }
    }

    fn initial(&mut self, scalar: ScalarType, to: &mut Vec<u8>) -> PtxResult<()> {
        if self.takes('{') {
            loop {
                self.initial(scalar, to)?;
                if !self.takes(',') {
                    return self.expect('}');
                }
            }
        }
        let negative = self.takes('-');
        let bits = match self.next() {
            Token::Integer(number) if negative => number.wrapping_neg(),
            Token::Integer(number) => number,
            Token::Single(bits) => u64::from(bits),
            Token::Double(number) if scalar == ScalarType::F32 => u64::from((number as f32).to_bits()),
            Token::Double(number) => number.to_bits(),
            other => return self.error(format!("an initial value must be a number, not {other:?}")),
        };
        to.extend_from_slice(&bits.to_le_bytes()[..scalar.bytes() as usize]);
        Ok(())
    }

    fn function(&mut self, is_entry: bool) -> PtxResult<()> {
        let mut results = Vec::new();
        if !is_entry && self.takes('(') {
            results = self.parameters()?;
        }
        let name = self.word()?;
        let mut params = if self.takes('(') { self.parameters()? } else { Vec::new() };
        if !is_entry {
            params.splice(0..0, results);
        }
        let mut function = PtxFunction {
            name,
            is_entry,
            params,
            variables: Vec::new(),
            num_registers: 0,
            num_predicates: 0,
            labels: Vec::new(),
            instructions: Vec::new(),
            max_threads: None,
            cluster: None,
            branch_targets: Vec::new(),
        };
        loop {
            match self.next() {
                Token::Mark(';') => return Ok(()),
                Token::Mark('{') => break,
                Token::Word(word) => match word.as_str() {
                    ".maxntid" | ".reqntid" => function.max_threads = Some(self.extent()?.iter().product()),
                    ".reqnctapercluster" => function.cluster = Some(self.extent()?),
                    ".maxclusterrank" | ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                        self.extent()?;
                    }
                    ".explicitcluster" | ".noreturn" | ".blocksareclusters" => {}
                    ".pragma" => self.skip_statement(),
                    other => return self.error(format!("unknown directive {other} of a function")),
                },
                other => return self.error(format!("expected a function's body, found {other:?}")),
            }
        }
        self.source = SourceLine::NONE;
        let function = body::parse(self, function)?;
        self.tree.functions.push(function);
        Ok(())
    }

    /// `128, 1, 1`
    fn extent(&mut self) -> PtxResult<[u32; 3]> {
        let mut extent = [1; 3];
        for place in &mut extent {
            *place = self.small()?;
            if !self.takes(',') {
                break;
            }
        }
        Ok(extent)
    }

    fn parameters(&mut self) -> PtxResult<Vec<Variable>> {
        let mut all = Vec::new();
        while !self.takes(')') {
            match self.word()?.as_str() {
                ".param" | ".reg" => all.extend(self.one_parameter()?),
                other => return self.error(format!("unknown parameter {other}")),
            }
            self.takes(',');
        }
        Ok(all)
    }

    /// A parameter; a comma ends it.
    fn one_parameter(&mut self) -> PtxResult<Vec<Variable>> {
        let mut align = 0;
        let mut scalar = None;
        loop {
            let word = self.word()?;
            match word.as_str() {
                ".align" => align = self.small()?,
                ".ptr" | ".global" | ".shared" | ".const" | ".local" => {}
                name if name.starts_with('.') => match ScalarType::parse(&name[1..]) {
                    Some(found) => scalar = Some(found),
                    None => return self.error(format!("unknown type {name}")),
                },
                _ => {
                    let Some(scalar) = scalar else { return self.error(format!("parameter {word} has no type")) };
                    let mut bytes = scalar.bytes();
                    while self.takes('[') {
                        bytes *= self.small()?;
                        self.expect(']')?;
                    }
                    // `.ptr .align` is the alignment of what the pointer points to.
                    let align = if bytes == scalar.bytes() { scalar.bytes() } else { align.max(scalar.bytes()) };
                    let space = Space::Param;
                    return Ok(vec![Variable {
                        name: word,
                        space,
                        align,
                        bytes,
                        initial: Vec::new(),
                        is_dynamic: false,
                    }]);
                }
            }
        }
    }
}
