//! The body of a function: declarations of registers and variables, labels, instructions.

use super::PtxParser;
use crate::error::PtxResult;
use crate::lexer::Token;
use crate::syntax::{Predicate, PtxFunction, PtxOperand, RawInstruction, Register};
use crate::types::ScalarType;
use std::collections::HashMap;

/// What a name means within braces. Inline assembly declares registers and labels in braces of its own.
#[derive(Default)]
struct Scope {
    id: usize,
    registers: HashMap<String, (Register, ScalarType)>,
    predicates: HashMap<String, Predicate>,
    /// `.reg .b32 %r<10>;` declares %r0 to %r9.
    ranges: Vec<(String, ScalarType, u32, u32)>,
    labels: HashMap<String, String>,
}

struct BodyParser<'a> {
    parser: &'a mut PtxParser,
    function: PtxFunction,
    scopes: Vec<Scope>,
    num_scopes: usize,
}

pub fn parse(parser: &mut PtxParser, function: PtxFunction) -> PtxResult<PtxFunction> {
    let mut body = BodyParser { parser, function, scopes: Vec::new(), num_scopes: 0 };
    body.open();
    while !body.scopes.is_empty() {
        body.statement()?;
    }
    Ok(body.function)
}

impl BodyParser<'_> {
    /// Opens a scope. Its labels are found ahead, because branches may come before them.
    fn open(&mut self) {
        let id = self.num_scopes;
        self.num_scopes += 1;
        let mut labels = HashMap::new();
        let mut depth = 0;
        let tokens = &self.parser.tokens[self.parser.at..];
        for (i, (token, _)) in tokens.iter().enumerate() {
            match token {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') if depth == 0 => break,
                Token::Mark('}') => depth -= 1,
                Token::Word(name) if depth == 0 && matches!(tokens.get(i + 1), Some((Token::Mark(':'), _))) => {
                    labels.insert(name.clone(), format!("{name}#{id}"));
                }
                Token::End => break,
                _ => {}
            }
        }
        self.scopes.push(Scope { id, labels, ..Scope::default() });
    }

    fn scope(&mut self) -> &mut Scope {
        self.scopes.last_mut().expect("a body has a scope until it ends")
    }

    fn statement(&mut self) -> PtxResult<()> {
        match self.parser.next() {
            Token::Mark(';') => Ok(()),
            Token::Mark('{') => {
                self.open();
                Ok(())
            }
            Token::Mark('}') => {
                self.scopes.pop();
                Ok(())
            }
            Token::Mark('@') => {
                let negated = self.parser.takes('!');
                let name = self.parser.word()?;
                let Some(predicate) = self.predicate(&name) else {
                    return self.parser.error(format!("unknown predicate {name}"));
                };
                let opcode = self.parser.word()?;
                self.instruction(Some((predicate, negated)), opcode)
            }
            Token::Word(word) => self.named_statement(word),
            other => self.parser.error(format!("expected a statement, found {other:?}")),
        }
    }

    fn named_statement(&mut self, word: String) -> PtxResult<()> {
        match word.as_str() {
            ".reg" => self.registers(),
            ".loc" => self.parser.loc(),
            ".pragma" => {
                self.parser.skip_statement();
                Ok(())
            }
            ".shared" | ".local" | ".param" | ".const" | ".global" => {
                let space = PtxParser::space(&word).expect("these five are spaces");
                let variables = self.parser.variables(space, false)?;
                self.parser.expect(';')?;
                self.function.variables.extend(variables);
                Ok(())
            }
            _ if word.starts_with('.') => self.parser.error(format!("unknown directive {word} in a function")),
            _ if self.parser.takes(':') => {
                if self.parser.takes_word(".branchtargets") {
                    let mut targets = Vec::new();
                    loop {
                        let label = self.parser.word()?;
                        targets.push(self.label(&label).unwrap_or(label));
                        if !self.parser.takes(',') {
                            break;
                        }
                    }
                    let name = format!("{word}#{}", self.scope().id);
                    self.function.branch_targets.push((name, targets));
                    return self.parser.expect(';');
                }
                let place = self.function.instructions.len() as u32;
                let name = format!("{word}#{}", self.scope().id);
                self.function.labels.push((name, place));
                Ok(())
            }
            _ => self.instruction(None, word),
        }
    }

    fn registers(&mut self) -> PtxResult<()> {
        let name = self.parser.word()?;
        let Some(scalar) = ScalarType::parse(name.trim_start_matches('.')) else {
            return self.parser.error(format!("unknown type {name} of a register"));
        };
        loop {
            let name = self.parser.word()?;
            let count = if self.parser.takes('<') {
                let count = self.parser.small()?;
                self.parser.expect('>')?;
                Some(count)
            } else {
                None
            };
            let next = if scalar == ScalarType::Pred {
                &mut self.function.num_predicates
            } else {
                &mut self.function.num_registers
            };
            let first = *next;
            *next += count.unwrap_or(1);
            let scope = self.scopes.last_mut().expect("a body has a scope until it ends");
            match count {
                Some(count) => scope.ranges.push((name, scalar, first, count)),
                None if scalar == ScalarType::Pred => {
                    scope.predicates.insert(name, Predicate(first));
                }
                None => {
                    scope.registers.insert(name, (Register(first), scalar));
                }
            }
            if !self.parser.takes(',') {
                return self.parser.expect(';');
            }
        }
    }

    fn in_range(scope: &Scope, name: &str) -> Option<(ScalarType, u32)> {
        let prefix = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let number: u32 = name[prefix.len()..].parse().ok()?;
        let found = scope.ranges.iter().rev().find(|(range, _, _, count)| range == prefix && number < *count);
        found.map(|(_, scalar, first, _)| (*scalar, first + number))
    }

    fn predicate(&self, name: &str) -> Option<Predicate> {
        self.scopes.iter().rev().find_map(|scope| {
            let ranged = || match Self::in_range(scope, name) {
                Some((ScalarType::Pred, number)) => Some(Predicate(number)),
                _ => None,
            };
            scope.predicates.get(name).copied().or_else(ranged)
        })
    }

    fn register(&self, name: &str) -> Option<(Register, ScalarType)> {
        self.scopes.iter().rev().find_map(|scope| {
            let ranged = || match Self::in_range(scope, name) {
                Some((scalar, number)) if scalar != ScalarType::Pred => Some((Register(number), scalar)),
                _ => None,
            };
            scope.registers.get(name).copied().or_else(ranged)
        })
    }

    fn label(&self, name: &str) -> Option<String> {
        self.scopes.iter().rev().find_map(|scope| scope.labels.get(name).cloned())
    }

    fn instruction(&mut self, guard: Option<(Predicate, bool)>, opcode: String) -> PtxResult<()> {
        let text_line = self.parser.tokens[self.parser.at - 1].1;
        let mut operands = Vec::new();
        while !self.parser.takes(';') {
            operands.push(self.operand()?);
            if !self.parser.takes(',') {
                self.parser.expect(';')?;
                break;
            }
        }
        let source = self.parser.source;
        self.function.instructions.push(RawInstruction { guard, opcode, operands, source, text_line });
        Ok(())
    }

    fn operand(&mut self) -> PtxResult<PtxOperand> {
        match self.parser.next() {
            Token::Mark('{') => {
                let mut all = Vec::new();
                while !self.parser.takes('}') {
                    all.push(self.operand()?);
                    self.parser.takes(',');
                }
                Ok(PtxOperand::Vector(all))
            }
            // The arguments of a call.
            Token::Mark('(') => {
                let mut all = Vec::new();
                while !self.parser.takes(')') {
                    all.push(self.operand()?);
                    self.parser.takes(',');
                }
                Ok(PtxOperand::Vector(all))
            }
            Token::Mark('[') => {
                let base = self.operand()?;
                if self.parser.takes(',') {
                    let mut coordinates = Vec::new();
                    loop {
                        match self.operand()? {
                            PtxOperand::Vector(all) => coordinates.extend(all),
                            one => coordinates.push(one),
                        }
                        if !self.parser.takes(',') {
                            break;
                        }
                    }
                    self.parser.expect(']')?;
                    return Ok(PtxOperand::TensorAddress(Box::new(base), coordinates));
                }
                self.parser.expect(']')?;
                Ok(match base {
                    PtxOperand::Symbol(name, offset) => {
                        PtxOperand::Address(Box::new(PtxOperand::Symbol(name, 0)), offset)
                    }
                    PtxOperand::Address(..) => base,
                    base => PtxOperand::Address(Box::new(base), 0),
                })
            }
            Token::Mark('!') => {
                let name = self.parser.word()?;
                match self.predicate(&name) {
                    Some(predicate) => Ok(PtxOperand::Predicate(predicate, true)),
                    None => self.parser.error(format!("unknown predicate {name}")),
                }
            }
            Token::Mark('-') => match self.parser.next() {
                Token::Integer(number) => Ok(PtxOperand::Integer(-i128::from(number))),
                Token::Double(number) => Ok(PtxOperand::Double(-number)),
                Token::Single(bits) => Ok(PtxOperand::Single(bits ^ 0x8000_0000)),
                other => self.parser.error(format!("expected a number, found {other:?}")),
            },
            Token::Integer(number) => Ok(PtxOperand::Integer(i128::from(number))),
            Token::Double(number) => Ok(PtxOperand::Double(number)),
            Token::Single(bits) => Ok(PtxOperand::Single(bits)),
            Token::Word(name) => self.named_operand(name),
            other => self.parser.error(format!("expected an operand, found {other:?}")),
        }
    }

    fn named_operand(&mut self, name: String) -> PtxResult<PtxOperand> {
        if self.parser.takes('|') {
            let second = self.parser.word()?;
            let mut pair = [None; 2];
            for (place, name) in pair.iter_mut().zip([&name, &second]) {
                *place = match name.as_str() {
                    "_" => None,
                    name => match self.predicate(name) {
                        Some(predicate) => Some(predicate),
                        // The result of a shuffle or an election is a register.
                        None if self.register(name).is_some() => None,
                        None => return self.parser.error(format!("unknown predicate {name}")),
                    },
                };
            }
            if let Some((register, scalar)) = self.register(&name) {
                let second = PtxOperand::PredicatePair(None, pair[1]);
                return Ok(PtxOperand::Vector(vec![PtxOperand::Register(register, scalar), second]));
            }
            return Ok(PtxOperand::PredicatePair(pair[0], pair[1]));
        }
        if name == "_" {
            return Ok(PtxOperand::Sink);
        }
        if let Some(predicate) = self.predicate(&name) {
            return Ok(PtxOperand::Predicate(predicate, false));
        }
        let offset = self.offset()?;
        if let Some((register, scalar)) = self.register(&name) {
            let register = PtxOperand::Register(register, scalar);
            return Ok(match offset {
                None => register,
                Some(offset) => PtxOperand::Address(Box::new(register), offset),
            });
        }
        if name.starts_with('%') {
            return Ok(PtxOperand::Special(name));
        }
        if let Some(label) = self.label(&name) {
            return Ok(PtxOperand::Label(label));
        }
        Ok(PtxOperand::Symbol(name, offset.unwrap_or(0)))
    }

    /// `+8`, `+-8`, `-8` after a register or a variable.
    fn offset(&mut self) -> PtxResult<Option<i64>> {
        let sign = match self.parser.peek() {
            Token::Mark('+') => 1,
            Token::Mark('-') => -1,
            _ => return Ok(None),
        };
        self.parser.at += 1;
        let sign = if self.parser.takes('-') { -sign } else { sign };
        let number = self.parser.integer()?;
        Ok(Some(sign * number as i64))
    }
}
