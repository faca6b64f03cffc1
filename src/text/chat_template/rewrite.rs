//! Wraps every operation of a template whose cost depends on its operands in a function of [`super::meter`]. The
//! engine's own fuel counts operations, but a single one (`"a" * 100000000`, or a concatenation that doubles) can take
//! any amount of work and memory.
//!
//! It works on the engine's syntax tree, before constants are folded.

use minijinja::machinery::{CodeGenerator, Instructions, Span, ast, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};
use std::collections::BTreeMap;

/// A compiled template.
#[derive(Debug)]
pub struct TemplateProgram<'s> {
    pub instructions: Instructions<'s>,
    pub blocks: BTreeMap<&'s str, Instructions<'s>>,
}

/// Names of the functions. A template cannot write any of them.
pub const TIMES: &str = "<times>";
pub const COMPARE: &str = "<compare>";
pub const TERM: &str = "<term>";
pub const TEXT: &str = "<text>";
pub const CONTAINER: &str = "<container>";
pub const MADE: &str = "<made>";
pub const INDEXED: &str = "<indexed>";
pub const ITERATED: &str = "<iterated>";
pub const SLICED: &str = "<sliced>";
pub const HELD: &str = "<held>";
pub const WEIGHED: &str = "<weighed>";
pub const NO_TEMPLATES: &str = "<no templates>";

/// Maximum size of a template in bytes. The longest published ones have a tenth.
const MAX_SOURCE: usize = 256 << 10;
/// Maximum nesting of statements and expressions. A chain of operators nests too.
const MAX_DEPTH: usize = 1000;
/// Address space, not memory. A template that consists only of operators is as deep as it is long until it is rejected.
const STACK_BYTES: usize = 256 << 20;

/// Compiles a template with the wrapped operations.
pub fn compile<'s>(name: &'s str, source: &'s str, syntax: &SyntaxConfig) -> Result<TemplateProgram<'s>, Error> {
    if source.len() > MAX_SOURCE {
        return Err(too_large(format!("{} bytes: at most {MAX_SOURCE} are supported", source.len())));
    }
    let compile = || {
        let tree = parse(source, name, syntax.clone())?;
        let tree = Rewrite { depth: 0 }.stmt(&tree)?;
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (instructions, blocks) = generator.finish();
        Ok(TemplateProgram { instructions, blocks })
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("pagetide-template".into()).stack_size(STACK_BYTES);
        let thread = thread
            .spawn_scoped(scope, compile)
            .map_err(|error| too_large(format!("no thread can be started to compile it: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(too_large("the template engine panics".into())))
    })
}

fn too_large(why: String) -> Error {
    Error::new(ErrorKind::SyntaxError, why)
}

struct Rewrite {
    depth: usize,
}

type Rewritten<T> = Result<T, Error>;

fn spanned<T>(node: T, span: Span) -> ast::Spanned<T> {
    ast::Spanned::new(node, span)
}

fn constant<'s>(value: impl Into<Value>, span: Span) -> ast::Expr<'s> {
    ast::Expr::Const(spanned(ast::Const { value: value.into() }, span))
}

fn call<'s>(function: &'static str, args: Vec<ast::Expr<'s>>, span: Span) -> ast::Spanned<ast::Call<'s>> {
    let expr = ast::Expr::Var(spanned(ast::Var { id: function }, span));
    spanned(ast::Call { expr, args: args.into_iter().map(ast::CallArg::Pos).collect() }, span)
}

/// `function(expr)`. A constant is only as large as the template.
fn through<'s>(function: &'static str, expr: ast::Expr<'s>) -> ast::Expr<'s> {
    let span = expr.span();
    ast::Expr::Call(call(function, vec![expr], span))
}

fn unless_constant<'s>(function: &'static str, expr: ast::Expr<'s>) -> ast::Expr<'s> {
    if matches!(expr, ast::Expr::Const(_)) { expr } else { through(function, expr) }
}

impl Rewrite {
    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Rewritten<T>) -> Rewritten<T> {
        if self.depth == MAX_DEPTH {
            return Err(too_large(format!(
                "it is nested deeper than {MAX_DEPTH}, or has that many operators in a row"
            )));
        }
        self.depth += 1;
        let result = work(self);
        self.depth -= 1;
        result
    }

    fn stmts<'s>(&mut self, stmts: &[ast::Stmt<'s>]) -> Rewritten<Vec<ast::Stmt<'s>>> {
        stmts.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt<'s>(&mut self, stmt: &ast::Stmt<'s>) -> Rewritten<ast::Stmt<'s>> {
        self.deeper(|this| this.one_stmt(stmt))
    }

    fn one_stmt<'s>(&mut self, stmt: &ast::Stmt<'s>) -> Rewritten<ast::Stmt<'s>> {
        use ast::Stmt;
        let no_templates = |span| Stmt::Do(spanned(ast::Do { call: call(NO_TEMPLATES, Vec::new(), span) }, span));
        Ok(match stmt {
            Stmt::Template(node) => {
                Stmt::Template(spanned(ast::Template { children: self.stmts(&node.children)? }, node.span()))
            }
            Stmt::EmitExpr(node) => {
                Stmt::EmitExpr(spanned(ast::EmitExpr { expr: self.expr(&node.expr)? }, node.span()))
            }
            // As a value it passes through the formatter, which counts.
            Stmt::EmitRaw(node) => {
                let expr = constant(node.raw, node.span());
                Stmt::EmitExpr(spanned(ast::EmitExpr { expr }, node.span()))
            }
            Stmt::ForLoop(node) => {
                let filter_expr = node.filter_expr.as_ref().map(|expr| self.expr(expr)).transpose()?;
                let for_loop = ast::ForLoop {
                    target: self.target(&node.target)?,
                    iter: through(ITERATED, self.expr(&node.iter)?),
                    filter_expr,
                    recursive: node.recursive,
                    body: self.stmts(&node.body)?,
                    else_body: self.stmts(&node.else_body)?,
                };
                Stmt::ForLoop(spanned(for_loop, node.span()))
            }
            Stmt::IfCond(node) => {
                let if_cond = ast::IfCond {
                    expr: self.expr(&node.expr)?,
                    true_body: self.stmts(&node.true_body)?,
                    false_body: self.stmts(&node.false_body)?,
                };
                Stmt::IfCond(spanned(if_cond, node.span()))
            }
            Stmt::WithBlock(node) => {
                let assign = |(target, expr): &(ast::Expr<'s>, ast::Expr<'s>)| self.assignment(target, expr);
                let assignments = node.assignments.iter().map(assign).collect::<Rewritten<_>>()?;
                Stmt::WithBlock(spanned(ast::WithBlock { assignments, body: self.stmts(&node.body)? }, node.span()))
            }
            Stmt::Set(node) => {
                let (target, expr) = self.assignment(&node.target, &node.expr)?;
                Stmt::Set(spanned(ast::Set { target, expr }, node.span()))
            }
            Stmt::SetBlock(node) => {
                let filter = node.filter.as_ref().map(|filter| self.expr(filter)).transpose()?;
                let set = ast::SetBlock { target: self.target(&node.target)?, filter, body: self.stmts(&node.body)? };
                Stmt::SetBlock(spanned(set, node.span()))
            }
            Stmt::AutoEscape(node) => {
                let escape = ast::AutoEscape { enabled: self.expr(&node.enabled)?, body: self.stmts(&node.body)? };
                Stmt::AutoEscape(spanned(escape, node.span()))
            }
            Stmt::FilterBlock(node) => {
                let block = ast::FilterBlock { filter: self.expr(&node.filter)?, body: self.stmts(&node.body)? };
                Stmt::FilterBlock(spanned(block, node.span()))
            }
            Stmt::Block(node) => {
                let block = ast::Block { name: node.name, required: node.required, body: self.stmts(&node.body)? };
                Stmt::Block(spanned(block, node.span()))
            }
            // There are no other templates, as in transformers. This fails when it is executed.
            Stmt::Import(node) => no_templates(node.span()),
            Stmt::FromImport(node) => no_templates(node.span()),
            Stmt::Extends(node) => no_templates(node.span()),
            Stmt::Include(node) => no_templates(node.span()),
            Stmt::Macro(node) => Stmt::Macro(self.macro_decl(node)?),
            Stmt::CallBlock(node) => {
                let block =
                    ast::CallBlock { call: self.call(&node.call)?, macro_decl: self.macro_decl(&node.macro_decl)? };
                Stmt::CallBlock(spanned(block, node.span()))
            }
            Stmt::Continue(node) => Stmt::Continue(spanned(ast::Continue, node.span())),
            Stmt::Break(node) => Stmt::Break(spanned(ast::Break, node.span())),
            Stmt::Do(node) => Stmt::Do(spanned(ast::Do { call: self.call(&node.call)? }, node.span())),
        })
    }

    fn macro_decl<'s>(&mut self, node: &ast::Spanned<ast::Macro<'s>>) -> Rewritten<ast::Spanned<ast::Macro<'s>>> {
        let args = node.args.iter().map(|arg| self.target(arg)).collect::<Rewritten<_>>()?;
        let (defaults, body) = (self.exprs(&node.defaults)?, self.stmts(&node.body)?);
        Ok(spanned(ast::Macro { name: node.name, args, defaults, body }, node.span()))
    }

    /// A value that is assigned to a namespace must not contain it, because the two would never be freed.
    fn assignment<'s>(
        &mut self,
        target: &ast::Expr<'s>,
        expr: &ast::Expr<'s>,
    ) -> Rewritten<(ast::Expr<'s>, ast::Expr<'s>)> {
        let expr = self.expr(expr)?;
        let expr = if matches!(target, ast::Expr::GetAttr(_)) { unless_constant(HELD, expr) } else { expr };
        Ok((self.target(target)?, expr))
    }

    /// The target of an assignment: names, tuples of them, members of a namespace.
    fn target<'s>(&mut self, target: &ast::Expr<'s>) -> Rewritten<ast::Expr<'s>> {
        use ast::Expr;
        self.deeper(|this| {
            let targets = |this: &mut Self, items: &[Expr<'s>]| {
                items.iter().map(|item| this.target(item)).collect::<Rewritten<_>>()
            };
            Ok(match target {
                Expr::Var(node) => Expr::Var(spanned(ast::Var { id: node.id }, node.span())),
                Expr::List(node) => Expr::List(spanned(ast::List { items: targets(this, &node.items)? }, node.span())),
                Expr::Tuple(node) => {
                    Expr::Tuple(spanned(ast::Tuple { items: targets(this, &node.items)? }, node.span()))
                }
                Expr::GetAttr(node) => {
                    let attr = ast::GetAttr { expr: this.target(&node.expr)?, name: node.name };
                    Expr::GetAttr(spanned(attr, node.span()))
                }
                other => return Err(too_large(format!("a {} cannot be assigned to", other.description()))),
            })
        })
    }

    fn exprs<'s>(&mut self, exprs: &[ast::Expr<'s>]) -> Rewritten<Vec<ast::Expr<'s>>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn expr<'s>(&mut self, expr: &ast::Expr<'s>) -> Rewritten<ast::Expr<'s>> {
        self.deeper(|this| this.one_expr(expr))
    }

    fn one_expr<'s>(&mut self, expr: &ast::Expr<'s>) -> Rewritten<ast::Expr<'s>> {
        use ast::{BinOpKind, CompareOpKind, Expr, UnaryOpKind};
        let some = |this: &mut Self, expr: &Option<Expr<'s>>| expr.as_ref().map(|expr| this.expr(expr)).transpose();
        Ok(match expr {
            Expr::Var(node) => Expr::Var(spanned(ast::Var { id: node.id }, node.span())),
            Expr::Const(node) => constant(node.value.clone(), node.span()),
            Expr::Slice(node) => {
                let slice = ast::Slice {
                    expr: through(INDEXED, self.expr(&node.expr)?),
                    start: some(self, &node.start)?,
                    stop: some(self, &node.stop)?,
                    step: some(self, &node.step)?,
                };
                through(SLICED, Expr::Slice(spanned(slice, node.span())))
            }
            Expr::UnaryOp(node) => {
                let is_not = matches!(node.op, UnaryOpKind::Not);
                let op = if is_not { UnaryOpKind::Not } else { UnaryOpKind::Neg };
                Expr::UnaryOp(spanned(ast::UnaryOp { op, expr: self.expr(&node.expr)? }, node.span()))
            }
            Expr::BinOp(node) => {
                let (left, right, span) = (self.expr(&node.left)?, self.expr(&node.right)?, node.span());
                let compared = |op: &'static str, left, right| {
                    Expr::Call(call(COMPARE, vec![left, constant(op, span), right], span))
                };
                let plain = |op, left, right| Expr::BinOp(spanned(ast::BinOp { op, left, right }, span));
                match node.op {
                    BinOpKind::Mul => Expr::Call(call(TIMES, vec![left, right], span)),
                    BinOpKind::Add => plain(BinOpKind::Add, through(TERM, left), through(TERM, right)),
                    BinOpKind::Concat => plain(BinOpKind::Concat, through(TEXT, left), through(TEXT, right)),
                    BinOpKind::In => plain(BinOpKind::In, left, unless_constant(CONTAINER, right)),
                    BinOpKind::Eq => compared("==", left, right),
                    BinOpKind::Ne => compared("!=", left, right),
                    BinOpKind::Lt => compared("<", left, right),
                    BinOpKind::Lte => compared("<=", left, right),
                    BinOpKind::Gt => compared(">", left, right),
                    BinOpKind::Gte => compared(">=", left, right),
                    // These take numbers, or return one of their operands.
                    op @ (BinOpKind::ScAnd
                    | BinOpKind::ScOr
                    | BinOpKind::Sub
                    | BinOpKind::Div
                    | BinOpKind::FloorDiv
                    | BinOpKind::Rem
                    | BinOpKind::Pow) => plain(op, left, right),
                }
            }
            Expr::Compare(node) => {
                let mut args = vec![self.expr(&node.expr)?];
                for op in &node.ops {
                    let name = match op.op {
                        CompareOpKind::Eq => "==",
                        CompareOpKind::Ne => "!=",
                        CompareOpKind::Lt => "<",
                        CompareOpKind::Lte => "<=",
                        CompareOpKind::Gt => ">",
                        CompareOpKind::Gte => ">=",
                        CompareOpKind::In => "in",
                        CompareOpKind::NotIn => "not in",
                    };
                    args.extend([constant(name, node.span()), self.expr(&op.expr)?]);
                }
                Expr::Call(call(COMPARE, args, node.span()))
            }
            Expr::IfExpr(node) => {
                let if_expr = ast::IfExpr {
                    test_expr: self.expr(&node.test_expr)?,
                    true_expr: self.expr(&node.true_expr)?,
                    false_expr: some(self, &node.false_expr)?,
                };
                Expr::IfExpr(spanned(if_expr, node.span()))
            }
            Expr::Filter(node) => {
                let filter =
                    ast::Filter { name: node.name, expr: some(self, &node.expr)?, args: self.args(&node.args)? };
                Expr::Filter(spanned(filter, node.span()))
            }
            Expr::Test(node) => {
                let test = ast::Test { name: node.name, expr: self.expr(&node.expr)?, args: self.args(&node.args)? };
                Expr::Test(spanned(test, node.span()))
            }
            Expr::GetAttr(node) => {
                Expr::GetAttr(spanned(ast::GetAttr { expr: self.expr(&node.expr)?, name: node.name }, node.span()))
            }
            Expr::GetItem(node) => {
                let (expr, subscript_expr) = (self.expr(&node.expr)?, self.expr(&node.subscript_expr)?);
                let is_name = matches!(&subscript_expr, Expr::Const(key) if key.value.as_str().is_some());
                let expr = if is_name { expr } else { through(INDEXED, expr) };
                Expr::GetItem(spanned(ast::GetItem { expr, subscript_expr }, node.span()))
            }
            Expr::Call(node) => Expr::Call(self.call(node)?),
            Expr::List(node) => {
                let list = Expr::List(spanned(ast::List { items: self.exprs(&node.items)? }, node.span()));
                if node.as_const().is_some() { list } else { through(MADE, list) }
            }
            Expr::Tuple(node) => {
                let tuple = Expr::Tuple(spanned(ast::Tuple { items: self.exprs(&node.items)? }, node.span()));
                if node.as_const().is_some() { tuple } else { through(MADE, tuple) }
            }
            Expr::Map(node) => {
                let map = ast::Map { keys: self.exprs(&node.keys)?, values: self.exprs(&node.values)? };
                let map = Expr::Map(spanned(map, node.span()));
                if node.as_const().is_some() { map } else { through(MADE, map) }
            }
        })
    }

    fn call<'s>(&mut self, node: &ast::Spanned<ast::Call<'s>>) -> Rewritten<ast::Spanned<ast::Call<'s>>> {
        // The name of a function or a method is not a value.
        let expr = match &node.expr {
            ast::Expr::GetAttr(method) => {
                let attr = ast::GetAttr { expr: self.expr(&method.expr)?, name: method.name };
                ast::Expr::GetAttr(spanned(attr, method.span()))
            }
            other => self.expr(other)?,
        };
        let mut args = self.args(&node.args)?;
        // `loop.changed` compares with its previous argument.
        if matches!(&node.expr, ast::Expr::GetAttr(method) if method.name == "changed") {
            let weigh = |arg| match arg {
                ast::CallArg::Pos(expr) => ast::CallArg::Pos(unless_constant(WEIGHED, expr)),
                other => other,
            };
            args = args.into_iter().map(weigh).collect();
        }
        Ok(spanned(ast::Call { expr, args }, node.span()))
    }

    fn args<'s>(&mut self, args: &[ast::CallArg<'s>]) -> Rewritten<Vec<ast::CallArg<'s>>> {
        let arg = |arg: &ast::CallArg<'s>| {
            Ok(match arg {
                ast::CallArg::Pos(expr) => ast::CallArg::Pos(self.expr(expr)?),
                ast::CallArg::Kwarg(name, expr) => ast::CallArg::Kwarg(name, self.expr(expr)?),
                ast::CallArg::PosSplat(expr) => ast::CallArg::PosSplat(through(SLICED, self.expr(expr)?)),
                ast::CallArg::KwargSplat(expr) => ast::CallArg::KwargSplat(self.expr(expr)?),
            })
        };
        args.iter().map(arg).collect()
    }
}
