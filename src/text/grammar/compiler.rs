//! Compiles grammars to constraints and caches them.

use super::constraint::{CompiledGrammar, RequestGrammar};
use super::engine::GrammarEngine;
use super::lexers::LexerMemory;
use super::request::{GrammarLimits, GrammarRequest};
use super::sandbox::Sandbox;
use super::vocabulary::Vocabulary;
use crate::tokenizer::Tokenizer;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::rules::ConstraintSource;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum number of cached grammars, and of bytes of their texts together.
const MAX_CACHED: usize = 64;
const MAX_CACHED_BYTES: usize = 4 << 20;

/// Compiles grammars for one model. The tables for the model's vocabulary are built for the first grammar and not at
/// startup; they take a second for a large vocabulary.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    /// The end tokens of the model. That of the tokenizer comes first.
    end_tokens: Vec<TokenId>,
    limits: GrammarLimits,
    engine: OnceLock<Result<Sandboxed, String>>,
    cache: Mutex<GrammarCache>,
}

/// llguidance, and the sandbox in which grammars are compiled first.
struct Sandboxed {
    engine: GrammarEngine,
    /// `None`: the authors of the grammars are trusted.
    sandbox: Option<Sandbox>,
}

impl GrammarCompiler {
    /// `vocab_size` is that of the model, which may have more rows than there are tokens, or fewer. `limits` apply to
    /// compiling a grammar if there is a [`sandbox`](super::sandbox).
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_tokens: &[TokenId], limits: GrammarLimits) -> Self {
        let own = tokenizer.special_tokens().eos.as_ref().map(|token| token.id);
        let mut end_tokens = end_tokens.to_vec();
        // The token that ends a turn in the chat template is the best end.
        end_tokens.sort_by_key(|token| Some(*token) != own);
        Self { tokenizer, vocab_size, end_tokens, limits, engine: OnceLock::new(), cache: Mutex::default() }
    }

    /// The constraint of a grammar that is in the cache.
    pub fn known(&self, request: &GrammarRequest) -> Option<Arc<dyn ConstraintSource>> {
        let known = self.cache().get(&key(request))?;
        Some(RequestGrammar::new(known, self.work_per_token()))
    }

    /// Compiles a grammar. This takes from microseconds, for a cached grammar, to seconds, so it must not run on a
    /// thread that must not block. It fails early when `budget` is used up.
    ///
    /// # Errors
    /// 400, with the field of the request and, for a schema, the place in it.
    pub fn compile(&self, request: &GrammarRequest, budget: &Budget) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        let key = key(request);
        if let Some(known) = self.cache().get(&key) {
            return Ok(RequestGrammar::new(known, self.work_per_token()));
        }
        let invalid = |message: String| ApiError::invalid(&request.param, format!("{}: {message}", request.param));
        let engine = self.engine.get_or_init(|| self.make_engine()).as_ref().map_err(|error| invalid(error.clone()))?;
        let Sandboxed { engine, sandbox } = engine;
        if let Some(sandbox) = sandbox {
            sandbox.check(request, budget)?;
        }
        budget.look().map_err(|why| why.in_param(&request.param))?;
        let compiled = Arc::new(engine.compile(request)?);
        self.cache().insert(key, request.spec.len(), compiled.clone());
        Ok(RequestGrammar::new(compiled, self.work_per_token()))
    }

    /// Finding a mask walks through the vocabulary, so it takes longer for a larger one.
    fn work_per_token(&self) -> u32 {
        self.limits.work_per_token.unwrap_or(500 + self.vocab_size as u32 / 16)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, GrammarCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_engine(&self) -> Result<Sandboxed, String> {
        let vocabulary = Vocabulary::new(self.tokenizer.clone(), self.vocab_size, &self.end_tokens);
        let engine = GrammarEngine::new(vocabulary)?;
        let GrammarEngine { vocabulary, .. } = &engine;
        let sandbox = Sandbox::new(self.limits, vocabulary.words(), vocabulary.ends());
        if sandbox.is_none() {
            tracing::warn!(
                "grammars and schemas are compiled only in this process, which a malicious one can end: accept \
                 them only from trusted clients (pagetide::text::grammar::sandbox::use_program)"
            );
        }
        Ok(Sandboxed { engine, sandbox })
    }
}

/// The cache key: equal for equal constraints.
fn key(request: &GrammarRequest) -> blake3::Hash {
    let GrammarRequest { spec, param: _, starts_after, whitespace } = request;
    let mut hasher = blake3::Hasher::new();
    // The encoding is unambiguous. Writing to a hasher never fails.
    let written = serde_json::to_writer(&mut hasher, &(spec, starts_after, whitespace));
    written.expect("a grammar is made of strings and JSON, which JSON can say");
    hasher.finalize()
}

/// The most recently used grammars.
#[derive(Default)]
struct GrammarCache {
    /// The most recently used one is last.
    entries: Vec<CachedGrammar>,
}

struct CachedGrammar {
    key: blake3::Hash,
    bytes: usize,
    grammar: Arc<CompiledGrammar>,
}

impl GrammarCache {
    fn get(&mut self, key: &blake3::Hash) -> Option<Arc<CompiledGrammar>> {
        let index = self.entries.iter().position(|entry| entry.key == *key)?;
        let entry = self.entries.remove(index);
        let grammar = entry.grammar.clone();
        self.entries.push(entry);
        Some(grammar)
    }

    fn insert(&mut self, key: blake3::Hash, bytes: usize, grammar: Arc<CompiledGrammar>) {
        // Two threads may have compiled the same grammar.
        self.entries.retain(|entry| entry.key != key);
        self.entries.push(CachedGrammar { key, bytes, grammar });
        let memory = LexerMemory::of_process();
        while self.entries.len() > MAX_CACHED
            || self.bytes() > MAX_CACHED_BYTES
            || self.entries.len() > 1 && memory.is_over()
        {
            self.entries.remove(0);
        }
    }

    fn bytes(&self) -> usize {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}
