//! Grammars that crash or hang the compiler: only the helper process ends.

use pagetide::budget::{Budget, Cancelled};
use pagetide::error::ApiError;
use pagetide::rules::ConstraintSource;
use pagetide::text::grammar::sandbox::{self, GrammarLimits};
use pagetide::text::grammar::{GrammarCompiler, GrammarRequest, GrammarSpec};
use pagetide::text::tokenizer::Tokenizer;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Generous in time, for slow machines.
const LIMITS: GrammarLimits =
    GrammarLimits { cpu: Duration::from_secs(20), memory_bytes: 128 << 20, work_per_token: None };

fn compiler(limits: GrammarLimits) -> GrammarCompiler {
    sandbox::use_program(env!("CARGO_BIN_EXE_pagetide"));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), Some(&read("tokenizer_config.json"))).unwrap();
    let end = tokenizer.special_tokens().eos.as_ref().unwrap().id;
    let vocab_size = tokenizer.vocab_size();
    GrammarCompiler::new(Arc::new(tokenizer), vocab_size, &[end], limits)
}

fn compile(compiler: &GrammarCompiler, spec: GrammarSpec) -> Result<Arc<dyn ConstraintSource>, ApiError> {
    let budget = Budget::time(Duration::from_secs(600), Cancelled::default());
    compiler.compile(&GrammarRequest::new(spec, "grammar"), &budget)
}

fn still_works(compiler: &GrammarCompiler) {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    compile(compiler, GrammarSpec::JsonSchema(schema)).unwrap();
    let error = compile(compiler, GrammarSpec::Regex("(".into())).unwrap_err();
    assert!(error.message.contains("is not supported"), "{error}");
}

#[test]
fn a_stack_overflow_ends_the_helper_alone() {
    let compiler = compiler(LIMITS);
    still_works(&compiler);
    // These pass the first checks: a schema inside a client's Lark grammar.
    for schema in [
        json!({"const": i64::MIN}),
        json!({"properties": {"a": {"enum": [1, i64::MIN]}}}),
        json!({"type": "integer", "minimum": -1e30, "maximum": -1e29}),
    ] {
        let error = compile(&compiler, GrammarSpec::Grammar(format!("start: %json {schema}"))).unwrap_err();
        // With overflow checks in the compiler, it may find the overflow first.
        assert_eq!(error.status, 400, "{error}");
        still_works(&compiler);
    }
}

#[test]
fn what_takes_too_much_is_refused_with_the_limit_and_its_setting() {
    let patterns: Vec<_> = (1..=30).map(|i| json!({"pattern": format!("^(.*a.{{{i}}})*$")})).collect();
    let patterns = GrammarSpec::JsonSchema(json!({ "type": "string", "allOf": patterns }));
    let little_memory = GrammarLimits { memory_bytes: 32 << 20, ..LIMITS };
    let little_time = GrammarLimits { cpu: Duration::from_millis(50), memory_bytes: 1 << 40, ..LIMITS };
    for (limits, setting) in [(little_memory, "intake.grammar_memory_mib"), (little_time, "intake.grammar_cpu_s")] {
        let compiler = compiler(limits);
        let error = compile(&compiler, patterns.clone()).unwrap_err();
        assert_eq!((error.status, error.code), (400, Some("too_complex")), "{error}");
        assert!(error.message.contains(setting), "{error}");
    }
}

/// By one of the system's counts, a process begins with the memory peak of its parent. That count must not be used.
#[test]
fn a_large_server_has_no_larger_helpers() {
    let large = vec![1_u8; 512 << 20];
    let compiler = compiler(GrammarLimits { memory_bytes: 4 << 20, ..LIMITS });
    let properties: serde_json::Map<_, _> = (0..1500)
        .map(|i| (format!("p{i}"), json!({"type": "string", "pattern": format!("^[a-z]{{3,{}}}$", 9 + i % 50)})))
        .collect();
    let error = compile(&compiler, GrammarSpec::JsonSchema(json!({ "properties": properties }))).unwrap_err();
    assert!(error.message.contains("intake.grammar_memory_mib"), "{error}");
    assert_eq!(large[large.len() / 2], 1);
}

/// Memory that one grammar leaves in the helper does not affect the next one.
#[test]
fn a_helper_is_used_again_and_replaced_where_it_has_grown() {
    let compiler = compiler(GrammarLimits { memory_bytes: 24 << 20, ..LIMITS });
    for i in 0..40 {
        let properties: serde_json::Map<_, _> =
            (0..100).map(|j| (format!("p{i}_{j}"), json!({"type": "string", "pattern": "^[a-z]{3,9}$"}))).collect();
        compile(&compiler, GrammarSpec::JsonSchema(json!({ "properties": properties }))).unwrap();
    }
}
