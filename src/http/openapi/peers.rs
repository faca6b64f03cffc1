//! The fields that the peers' servers know, against those that this one reads.

use pagetide_api::anthropic::request::MessagesBody;
use pagetide_api::body::BodyFields;
use pagetide_api::llama_cpp::completion::NativeCompletionBody;
use pagetide_api::llama_cpp::embedding::NativeEmbeddingBody;
use pagetide_api::llama_cpp::infill::InfillBody;
use pagetide_api::llama_cpp::slots::SlotFileFields;
use pagetide_api::openai::{chat, completion, embeddings, tokenize};
use pagetide_api::responses::request::ResponsesBody;
use pagetide_api::vllm::{derender, generate, generative_score, render, rerank, score};
use serde_json::Value;

fn names<B: BodyFields>() -> Vec<&'static str> {
    let mut names = Vec::new();
    B::add_names(&mut names);
    names
}

/// Paths of the peers, and the fields that the same path reads here.
fn served() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("/v1/chat/completions", names::<chat::ChatBody>()),
        ("/v1/completions", names::<completion::CompletionBody>()),
        ("/v1/embeddings", names::<embeddings::EmbeddingBody>()),
        ("/v1/responses", names::<ResponsesBody>()),
        ("/v1/messages", names::<MessagesBody>()),
        // The fields that shape no prompt do not matter to the count.
        ("/v1/messages/count_tokens", names::<MessagesBody>()),
        ("/inference/v1/generate", names::<generate::TokenIdsBody>()),
        ("/inference/v1/generate sampling_params", names::<generate::SamplingParamsBody>()),
        ("/v1/chat/completions/batch", names::<chat::BatchBody>()),
        ("/v1/chat/completions/render", names::<render::RenderChatBody>()),
        ("/v1/completions/render", names::<render::RenderCompletionBody>()),
        ("/v1/chat/completions/derender", names::<derender::DerenderChatBody>()),
        ("/v1/completions/derender", names::<derender::DerenderCompletionBody>()),
        ("/generative_scoring", names::<generative_score::GenerativeScoringBody>()),
        ("/v1/responses/render", names::<ResponsesBody>()),
        ("/v1/messages/render", names::<MessagesBody>()),
        ("/pooling", names::<embeddings::PoolingBody>()),
        ("/score", names::<score::ScoreBody>()),
        ("/v1/score", names::<score::ScoreBody>()),
        ("/rerank", names::<rerank::RerankBody>()),
        ("/v1/rerank", names::<rerank::RerankBody>()),
        ("/v2/rerank", names::<rerank::RerankBody>()),
        ("/reranking", names::<rerank::RerankBody>()),
        ("/completion", names::<NativeCompletionBody>()),
        ("/infill", names::<InfillBody>()),
        ("/embedding", names::<NativeEmbeddingBody>()),
        ("/apply-template", names::<chat::ChatBody>()),
        ("/v1/chat/completions/input_tokens", names::<chat::ChatBody>()),
        ("/slots/:id_slot", names::<SlotFileFields>()),
        ("/tokenize", names::<tokenize::TokenizeBody>()),
        ("/detokenize", names::<tokenize::DetokenizeBody>()),
    ]
}

/// A field that a peer knows is read, or refused by name: none is ignored. The list is made by
/// `scripts/peer-fields.py`.
#[test]
fn no_field_that_a_peer_knows_is_ignored() {
    let peers: Value = serde_json::from_str(include_str!("../../../tests/data/peer_fields.json")).unwrap();
    let mut ignored = Vec::new();
    for (peer, paths) in peers.as_object().unwrap() {
        for (path, read) in served() {
            let known = paths[path].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
            let missing = known.filter(|name| !read.contains(name));
            ignored.extend(missing.map(|name| format!("{peer} {path}: {name}")));
        }
    }
    assert!(ignored.is_empty(), "{}", ignored.join("\n"));
}
