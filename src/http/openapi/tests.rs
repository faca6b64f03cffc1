use super::*;
use crate::paths::Verb;
use crate::routes::paths_of;
use pagetide_api::body::BodyFields;
use pagetide_api::body::refused::{RefusedField, RefusedTable};
use pagetide_config::{Dialect, Surface};

fn all_paths() -> impl Iterator<Item = &'static ApiPath> {
    paths_of(Surface::ALL)
}

#[test]
fn every_path_is_described_once() {
    let document = document(all_paths(), "/", Dialect::OpenAi, |access| access);
    let items = document["paths"].as_object().unwrap().values().flat_map(|item| item.as_object().unwrap().values());
    let mut ids: Vec<&str> = items.map(|operation| operation["operationId"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), all_paths().count());
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all_paths().count(), "each has a name of its own");
}

/// Every `$ref` of the document.
fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn every_schema_is_referred_to_and_every_reference_resolves() {
    for dialect in [Dialect::OpenAi, Dialect::Vllm, Dialect::LlamaCpp] {
        let document = document(all_paths(), "/", dialect, |access| access);
        let mut found = Vec::new();
        references(&document, &mut found);
        let name = |reference: &'_ str| reference.strip_prefix("#/components/schemas/").unwrap().to_owned();
        let mut named: Vec<String> = found.into_iter().map(name).collect();
        named.sort_unstable();
        named.dedup();
        let schemas: Vec<String> = document["components"]["schemas"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(named, schemas, "{dialect:?}");
    }
}

#[test]
fn errors_are_described_in_the_servers_dialect() {
    let schema = |dialect, path: &str| {
        let document = document(all_paths(), "/", dialect, |access| access);
        let error = &document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"];
        error["$ref"].as_str().unwrap().rsplit('/').next().unwrap().to_owned()
    };
    let [openai, chat, embed] = ["ErrorAnswer", "/v1/chat/completions", "/v2/embed"];
    assert_eq!((schema(Dialect::OpenAi, chat), schema(Dialect::OpenAi, embed)), (openai.into(), "CohereError".into()));
    assert_eq!((schema(Dialect::Vllm, chat), schema(Dialect::Vllm, embed)), ("VllmError".into(), "VllmError".into()));
    assert_eq!(schema(Dialect::LlamaCpp, chat), "NativeError");
    assert_eq!(schema(Dialect::LlamaCpp, embed), "CohereError");
    assert_eq!(schema(Dialect::Vllm, "/v1/messages"), "MessageError");
}

#[test]
fn every_field_says_what_it_is() {
    for (name, schema) in
        document(all_paths(), "/", Dialect::OpenAi, |access| access)["components"]["schemas"].as_object().unwrap()
    {
        for (field, described) in schema["properties"].as_object().into_iter().flatten() {
            let is_request = name.ends_with("Request");
            assert!(!is_request || described["description"].is_string(), "{name}.{field} has no description");
        }
    }
}

/// The fields of a path's body in its description.
fn described(path: &str) -> Vec<String> {
    let path = all_paths().find(|known| known.path == path && known.verb == Verb::Post).unwrap();
    (path.describe)().body_fields()
}

/// The fields that are read of a body. Those that are refused by name need no description.
fn read<B: BodyFields>(path: &str, refused: &[&[RefusedField]]) -> (Vec<&'static str>, Vec<String>) {
    let (mut names, mut described) = (Vec::new(), described(path));
    B::add_names(&mut names);
    let is_refused = |name: &str| refused.iter().flat_map(|table| table.iter()).any(|field| field.name == name);
    names.retain(|name| described.iter().any(|known| known == name) || !is_refused(name));
    names.sort_unstable();
    names.dedup();
    described.sort_unstable();
    described.dedup();
    (names, described)
}

#[test]
fn every_field_that_is_read_is_described() {
    use pagetide_api::anthropic::request::{CountedBody, MessagesBody, UnsupportedInMessages};
    use pagetide_api::batches;
    use pagetide_api::cohere::{self, embed::UnsupportedInEmbed};
    use pagetide_api::fields::unsupported::UnsupportedFields;
    use pagetide_api::llama_cpp;
    use pagetide_api::ollama::{self, fields::UnsupportedInOllama};
    use pagetide_api::openai::{chat, completion, embeddings, tokenize};
    use pagetide_api::responses::request::{ChatFieldsOfPeers, ResponsesBody, StoredFields};
    use pagetide_api::sglang::{self, generate::UnsupportedInGenerate};
    use pagetide_api::vllm::{generate, rerank, score};
    let refused = &[UnsupportedFields::FIELDS] as &[_];
    let ollamas = &[UnsupportedInOllama::FIELDS] as &[_];
    let generated = &[generate::RenderedFields::FIELDS, UnsupportedFields::FIELDS] as &[_];
    for (path, (read, described)) in [
        ("/v1/chat/completions", read::<chat::ChatBody>("/v1/chat/completions", refused)),
        ("/v1/completions", read::<completion::CompletionBody>("/v1/completions", refused)),
        ("/v1/chat/completions/batch", read::<chat::BatchBody>("/v1/chat/completions/batch", refused)),
        ("/inference/v1/generate", read::<generate::TokenIdsBody>("/inference/v1/generate", generated)),
        ("/pooling", read::<embeddings::PoolingBody>("/pooling", refused)),
        ("/score", read::<score::ScoreBody>("/score", refused)),
        ("/rerank", read::<rerank::RerankBody>("/rerank", refused)),
        ("/v1/embeddings", read::<embeddings::EmbeddingBody>("/v1/embeddings", refused)),
        (
            "/v1/responses",
            read::<ResponsesBody>(
                "/v1/responses",
                &[StoredFields::FIELDS, ChatFieldsOfPeers::FIELDS, UnsupportedFields::FIELDS],
            ),
        ),
        (
            "/v1/responses/input_tokens",
            read::<ResponsesBody>(
                "/v1/responses/input_tokens",
                &[StoredFields::FIELDS, ChatFieldsOfPeers::FIELDS, UnsupportedFields::FIELDS],
            ),
        ),
        (
            "/v1/messages",
            read::<MessagesBody>("/v1/messages", &[UnsupportedInMessages::FIELDS, UnsupportedFields::FIELDS]),
        ),
        ("/v1/messages/count_tokens", read::<CountedBody>("/v1/messages/count_tokens", &[])),
        ("/v1/batches", read::<batches::openai::BatchFields>("/v1/batches", &[])),
        ("/v1/messages/batches", read::<batches::anthropic::MessageBatchFields>("/v1/messages/batches", &[])),
        ("/tokenize", read::<tokenize::TokenizeBody>("/tokenize", refused)),
        ("/detokenize", read::<tokenize::DetokenizeBody>("/detokenize", refused)),
        ("/v1/chat/completions/input_tokens", read::<chat::ChatBody>("/v1/chat/completions/input_tokens", refused)),
        ("/completion", read::<llama_cpp::completion::NativeCompletionBody>("/completion", refused)),
        ("/infill", read::<llama_cpp::infill::InfillBody>("/infill", refused)),
        ("/embedding", read::<llama_cpp::embedding::NativeEmbeddingBody>("/embedding", refused)),
        ("/apply-template", read::<chat::ChatBody>("/apply-template", refused)),
        ("/api/chat", read::<ollama::chat::OllamaChatBody>("/api/chat", ollamas)),
        ("/api/generate", read::<ollama::generate::OllamaGenerateBody>("/api/generate", ollamas)),
        ("/api/embed", read::<ollama::embed::OllamaEmbedBody>("/api/embed", ollamas)),
        ("/api/embeddings", read::<ollama::embed::OllamaEmbeddingsBody>("/api/embeddings", ollamas)),
        ("/api/show", read::<ollama::models::OllamaShowBody>("/api/show", ollamas)),
        ("/generate", read::<sglang::generate::GenerateBody>("/generate", &[UnsupportedInGenerate::FIELDS])),
        ("/v2/chat", read::<cohere::chat::CohereChatBody>("/v2/chat", &[])),
        ("/v2/embed", read::<cohere::embed::CohereEmbedBody>("/v2/embed", &[UnsupportedInEmbed::FIELDS])),
    ] {
        assert_eq!(read, described, "{path}");
    }
}
