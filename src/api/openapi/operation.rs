//! What the description says of one path.

use crate::openai::error::ErrorAnswer;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Whom a path answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathAccess {
    /// Everybody. As with vLLM these are the paths that tell nothing of the model, its load or its texts.
    Open,
    /// Clients with one of `server.api_keys`, where there are any.
    Key,
    /// The same, and those with `server.admin_key`, who are told more.
    KeyOrAdmin,
    /// Clients with `server.admin_key`.
    Admin,
    /// Clients that may see what is told of all requests: `Watcher`.
    Watcher,
}

/// What the paths are sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tag {
    Generation,
    Text,
    Batches,
    Models,
    Server,
}

impl Tag {
    pub const ALL: [Tag; 5] = [Tag::Generation, Tag::Text, Tag::Batches, Tag::Models, Tag::Server];

    pub fn name(self) -> &'static str {
        match self {
            Tag::Generation => "Generation",
            Tag::Text => "Text and tokens",
            Tag::Batches => "Files and batches",
            Tag::Models => "Models",
            Tag::Server => "Server",
        }
    }

    pub fn about(self) -> &'static str {
        match self {
            Tag::Generation => "Text from the model",
            Tag::Text => "What the tokenizer makes of a text, and back",
            Tag::Batches => "Requests that are answered when there is time",
            Tag::Models => "What is served",
            Tag::Server => "How the server is, and what it offers",
        }
    }
}

type Schemas = Vec<(String, RefOr<Schema>)>;

/// An object that a body may be.
struct Form {
    name: &'static str,
    properties: Map<String, Value>,
    required: Vec<&'static str>,
}

/// What one path takes and gives. Made by the module that answers it: see `describe` in [`crate::openai::chat`].
pub struct Operation {
    tag: Tag,
    id: &'static str,
    summary: &'static str,
    about: String,
    /// Forms of the request body.
    request: Vec<Form>,
    /// A form with a file: its name and its schema.
    upload: Option<(&'static str, Value)>,
    path_parameters: Vec<(&'static str, &'static str)>,
    /// Names with what they are and their schemas.
    query_parameters: Vec<(&'static str, &'static str, Value)>,
    /// Media types of the answer with their schemas.
    answer: Map<String, Value>,
    answer_about: &'static str,
    errors: Vec<u16>,
    /// Name of the errors' schema.
    error: Cow<'static, str>,
    schemas: Schemas,
}

impl Operation {
    /// `id`: its name in generated clients.
    pub fn new(tag: Tag, id: &'static str, summary: &'static str) -> Self {
        Self {
            tag,
            id,
            summary,
            about: String::new(),
            request: Vec::new(),
            upload: None,
            path_parameters: Vec::new(),
            query_parameters: Vec::new(),
            answer: Map::new(),
            answer_about: "Done.",
            errors: Vec::new(),
            error: ErrorAnswer::name(),
            schemas: Vec::new(),
        }
    }

    /// More than the summary.
    pub fn about(mut self, about: impl Into<String>) -> Self {
        self.about = about.into();
        self
    }

    /// A JSON body, `name` in generated clients; [`Operation::fields`] says what is in it. A path may have several.
    pub fn body(mut self, name: &'static str) -> Self {
        self.request.push(Form { name, properties: Map::new(), required: Vec::new() });
        self.errors.extend([400, 404, 408, 413, 415]);
        self
    }

    /// A form as `multipart/form-data`, `name` in generated clients.
    pub fn form(mut self, name: &'static str, schema: Value) -> Self {
        self.upload = Some((name, schema));
        self.errors.extend([400, 408, 413]);
        self
    }

    /// The body is that of another operation, and errors are told as there.
    pub fn takes_body_of(mut self, other: Operation) -> Self {
        self.request.extend(other.request);
        self.errors.extend([400, 404, 408, 413, 415]);
        self.error = other.error;
        self.schemas.extend(other.schemas);
        self
    }

    /// The body is that of any of these operations, and the answer is the one that it has there.
    pub fn any_of(mut self, others: Vec<Operation>) -> Self {
        for mut other in others {
            self.errors.append(&mut other.errors);
            for (media, answer) in std::mem::take(&mut other.answer) {
                match self.answer.get_mut(&media) {
                    None => drop(self.answer.insert(media, answer)),
                    Some(known) => add_alternative(&mut known["schema"], answer["schema"].clone()),
                }
            }
            self = self.takes_body_of(other);
        }
        self
    }

    /// The body has the fields that `T` parses. A field that two structs have is described by the first.
    pub fn fields<T: ToSchema>(self) -> Self {
        self.fields_where::<T>(|_| true)
    }

    /// The body has these of the fields that `T` parses.
    pub fn some_fields<T: ToSchema>(self, names: &[&str]) -> Self {
        self.fields_where::<T>(|name| names.contains(&name))
    }

    /// The body has the fields that `T` parses, but for these.
    pub fn fields_but<T: ToSchema>(self, names: &[&str]) -> Self {
        self.fields_where::<T>(|name| !names.contains(&name))
    }

    fn fields_where<T: ToSchema>(mut self, is_one: impl Fn(&str) -> bool) -> Self {
        let Form { properties, .. } = self.request.last_mut().expect("body() comes before fields()");
        let schema = json_of(T::schema());
        let Value::Object(fields) = schema["properties"].clone() else {
            panic!("{} is not a struct of fields", T::name());
        };
        let fields: Map<String, Value> = fields.into_iter().filter(|(name, _)| is_one(name)).collect();
        for (name, field) in fields {
            properties.entry(name).or_insert_with(|| optional(field));
        }
        T::schemas(&mut self.schemas);
        self
    }

    /// The body has these fields too, each with its schema.
    pub fn described_fields(mut self, fields: impl Iterator<Item = (String, Value)>) -> Self {
        let Form { properties, .. } = self.request.last_mut().expect("body() comes before described_fields()");
        properties.extend(fields.map(|(name, field)| (name, optional(field))));
        self
    }

    /// Fields that cannot be left out.
    pub fn requires(mut self, names: &[&'static str]) -> Self {
        let form = self.request.last_mut().expect("body() comes before requires()");
        form.required.extend(names);
        for name in names {
            not_null(form.properties.get_mut(*name).expect("a required field is one of the fields"));
        }
        self
    }

    pub fn path_parameter(mut self, name: &'static str, about: &'static str) -> Self {
        self.path_parameters.push((name, about));
        self.errors.push(404);
        self
    }

    /// One that may be left out.
    pub fn query_parameter(mut self, name: &'static str, about: &'static str, schema: Value) -> Self {
        self.query_parameters.push((name, about, schema));
        self
    }

    /// Answered with `T` as JSON.
    pub fn answers<T: ToSchema>(self, about: &'static str) -> Self {
        self.media::<T>("application/json", reference(&T::name()), about)
    }

    /// May also be answered with this `T`.
    pub fn or_answers<T: ToSchema>(mut self) -> Self {
        let known = self.answer.get_mut("application/json").expect("answers() comes before or_answers()");
        add_alternative(&mut known["schema"], reference(&T::name()));
        self.schemas.push((T::name().into(), T::schema()));
        T::schemas(&mut self.schemas);
        self
    }

    /// Answered without a body.
    pub fn answers_nothing(mut self, about: &'static str) -> Self {
        self.answer_about = about;
        self
    }

    /// Answered with an array of `T`.
    pub fn answers_several<T: ToSchema>(self, about: &'static str) -> Self {
        self.media::<T>("application/json", json!({"type": "array", "items": reference(&T::name())}), about)
    }

    /// With `stream: true` answered with server-sent events, each a `T`.
    pub fn streams<T: ToSchema>(self) -> Self {
        let about = self.answer_about;
        let data = json!({
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": reference(&T::name()),
        });
        let event = json!({
            "type": "object",
            "description": "One event. The last of some streams has the data [DONE].",
            "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}, "event": {"type": "string"}},
            "required": ["data"],
        });
        self.media::<T>("text/event-stream", event, about)
    }

    /// With `stream: true`, which is the default, answered with lines of JSON, each a `T`.
    pub fn streams_lines<T: ToSchema>(self) -> Self {
        let about = self.answer_about;
        self.media::<T>("application/x-ndjson", reference(&T::name()), about)
    }

    fn media<T: ToSchema>(mut self, media: &str, schema: Value, about: &'static str) -> Self {
        self.answer.insert(media.into(), json!({ "schema": schema }));
        self.answer_about = about;
        self.schemas.push((T::name().into(), T::schema()));
        T::schemas(&mut self.schemas);
        self
    }

    /// With `stream: true` answered with server-sent events that have no schema here.
    pub fn streams_json(mut self) -> Self {
        let event = json!({"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]});
        self.answer.insert("text/event-stream".into(), json!({ "schema": event }));
        self
    }

    /// Answered with server-sent events that have no schema here.
    pub fn answers_events(self, about: &'static str) -> Self {
        Self { answer_about: about, ..self }.streams_json()
    }

    /// Answered with JSON that has no schema here.
    pub fn answers_json(mut self, about: &'static str) -> Self {
        self.answer.insert("application/json".into(), json!({"schema": {"type": "object"}}));
        self.answer_about = about;
        self
    }

    /// May also be answered with bytes.
    pub fn answers_bytes(mut self) -> Self {
        let schema = json!({"type": "string", "format": "binary"});
        self.answer.insert("application/octet-stream".into(), json!({ "schema": schema }));
        self
    }

    /// Answered with text of this type.
    pub fn answers_text(mut self, media: &'static str, about: &'static str) -> Self {
        self.answer.insert(media.into(), json!({"schema": {"type": "string"}}));
        self.answer_about = about;
        self
    }

    /// Errors besides those that a body brings and 401.
    pub fn fails(mut self, errors: &[u16]) -> Self {
        self.errors.extend(errors);
        self
    }

    /// Errors are told as `T`, not as OpenAI does.
    pub fn errors_as<T: ToSchema>(mut self) -> Self {
        let before = std::mem::replace(&mut self.error, T::name());
        self.schemas.retain(|(name, _)| *name != before);
        self.schemas.push((T::name().into(), T::schema()));
        T::schemas(&mut self.schemas);
        self
    }

    /// Whether errors are told as `T`.
    pub fn tells_errors_as<T: ToSchema>(&self) -> bool {
        self.error == T::name()
    }

    /// What every request to the engine can meet.
    pub fn generates(self) -> Self {
        self.fails(&[429, 500, 503, 504])
    }

    /// The fields that a body may have.
    pub fn body_fields(&self) -> Vec<String> {
        self.request.iter().flat_map(|form| form.properties.keys().cloned()).collect()
    }

    /// The operation in the document; the schemas it names go to `schemas`.
    pub fn json(mut self, access: PathAccess, schemas: &mut Map<String, Value>) -> Value {
        let mut responses = Map::new();
        let mut answer = json!({"description": self.answer_about, "headers": request_id_header()});
        if !self.answer.is_empty() {
            answer["content"] = self.answer.into();
        }
        responses.insert("200".into(), answer);
        let security = match access {
            PathAccess::Open => json!([]),
            PathAccess::Key => json!([{"key": []}]),
            PathAccess::KeyOrAdmin => json!([{"key": []}, {"admin_key": []}]),
            PathAccess::Admin => json!([{"admin_key": []}]),
            PathAccess::Watcher => json!([{"metrics_key": []}, {"admin_key": []}]),
        };
        if access != PathAccess::Open {
            self.errors.push(401);
        }
        self.errors.sort_unstable();
        self.errors.dedup();
        for status in self.errors {
            responses.insert(status.to_string(), error(status, &self.error));
        }
        if self.error == ErrorAnswer::name() {
            self.schemas.push((ErrorAnswer::name().into(), ErrorAnswer::schema()));
            ErrorAnswer::schemas(&mut self.schemas);
        }
        for (name, schema) in self.schemas {
            let schema = json_of(schema);
            let known = schemas.entry(name.as_str()).or_insert_with(|| schema.clone());
            assert!(*known == schema, "two types are both described as {name}: give one another name, schema(as = …)");
        }
        let mut operation = json!({
            "tags": [self.tag.name()],
            "operationId": self.id,
            "summary": self.summary,
        });
        if !self.about.is_empty() {
            operation["description"] = self.about.into();
        }
        let in_path = self.path_parameters.iter().map(|(name, about)| {
            json!({"name": name, "in": "path", "required": true, "description": about, "schema": {"type": "string"}})
        });
        let in_query = self.query_parameters.iter().map(|(name, about, schema)| {
            json!({"name": name, "in": "query", "required": false, "description": about, "schema": schema})
        });
        let parameters: Vec<Value> = in_path.chain(in_query).collect();
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let [first, others @ ..] = &self.request[..] {
            for form in &self.request {
                let schema = json!({"type": "object", "properties": form.properties, "required": form.required});
                schemas.insert(form.name.into(), schema);
            }
            let forms: Vec<Value> = self.request.iter().map(|form| reference(form.name)).collect();
            let schema = if others.is_empty() { reference(first.name) } else { json!({ "anyOf": forms }) };
            let content = json!({"application/json": {"schema": schema}});
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        if let Some((name, schema)) = self.upload {
            schemas.insert(name.into(), schema);
            let content = json!({"multipart/form-data": {"schema": reference(name)}});
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        operation["responses"] = responses.into();
        operation["security"] = security;
        operation
    }
}

/// A value may follow `other` as well.
fn add_alternative(schema: &mut Value, other: Value) {
    if *schema == other {
        return;
    }
    match schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        Some(alternatives) if alternatives.contains(&other) => {}
        Some(alternatives) => alternatives.push(other),
        None => *schema = json!({"anyOf": [schema.take(), other]}),
    }
}

fn error(status: u16, schema: &str) -> Value {
    let about = match status {
        400 => "A field is missing, or has a wrong type or value; param names it.",
        401 => "The key is missing or wrong.",
        403 => {
            "The path is closed on this server: server.admin_key, server.metrics_key or batches.folder is not set, or \
             server.debug_endpoints is false."
        }
        404 => "There is no model, or nothing else, with this name.",
        408 => "The body did not arrive within server.body_timeout_s.",
        409 => "It cannot be done now: nothing is recorded (recorder.minutes), or a batch has ended or has not.",
        413 => "The body is longer than server.max_body_bytes, or a file than batches.max_file_mib.",
        415 => "The body has a Content-Encoding that is not known.",
        429 => {
            "The server holds the maximum number of requests, files or batches, or a rate limit of the key or of the \
             server is used up. Retry-After says when to try again, if that is known."
        }
        500 => "The engine failed under this request.",
        501 => "The path is known from another server, and what it asks for is not served.",
        503 => "The server is shutting down.",
        504 => "The answer was not complete within server.request_timeout_s.",
        other => unreachable!("no path fails with {other}"),
    };
    let mut headers = request_id_header();
    if matches!(status, 429 | 503) {
        headers["Retry-After"] = json!({"description": "Seconds.", "schema": {"type": "integer"}});
    }
    let content = json!({"application/json": {"schema": reference(schema)}});
    json!({"description": about, "headers": headers, "content": content})
}

fn request_id_header() -> Value {
    json!({"X-Request-Id": {"description": "The request's own, or a new one.", "schema": {"type": "string"}}})
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// A schema as JSON, with each description on one line and no default of null (which says nothing).
fn json_of(schema: RefOr<Schema>) -> Value {
    let mut json = serde_json::to_value(schema).expect("a schema has only string keys and plain values");
    tidy(&mut json);
    json
}

fn tidy(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if fields.get("default").is_some_and(Value::is_null) {
                fields.shift_remove("default");
            }
            hoist_description(fields);
            if let Some(Value::String(about)) = fields.get_mut("description") {
                *about = about.replace('\n', " ");
            }
            fields.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// A field's description stands at its top, not at the one of its alternatives that is not null.
fn hoist_description(fields: &mut Map<String, Value>) {
    let alternatives = fields.get_mut("oneOf").and_then(Value::as_array_mut);
    if let Some([Value::Object(one), other]) = alternatives.map(Vec::as_mut_slice)
        && *other == json!({"type": "null"})
        && let Some(about) = one.shift_remove("description")
    {
        fields.insert("description".into(), about);
    }
}

/// A field that may be left out may be null as well.
fn optional(mut field: Value) -> Value {
    if let Some(Value::String(name)) = field.get("type") {
        field["type"] = json!([name, "null"]);
    }
    if let Value::Object(fields) = &mut field
        && let Some(target) = fields.shift_remove("$ref")
    {
        fields.insert("oneOf".into(), json!([{"$ref": target}, {"type": "null"}]));
    }
    field
}

/// Takes null away again.
fn not_null(field: &mut Value) {
    if let Some(Value::Array(types)) = field.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            field["type"] = only.clone();
        }
    }
    if let Some(Value::Array(alternatives)) = field.get_mut("oneOf") {
        alternatives.retain(|schema| *schema != json!({"type": "null"}));
    }
}
