//! Structured output as clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
//! `guided_*`, and the names that llama.cpp and SGLang have. Each becomes a [`GrammarRequest`]; a request has one of
//! them at most.

use super::sampling::SamplingFields;
use crate::body::body_fields;
use crate::checks::shown;
use pagetide_base::error::ApiError;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec, Whitespace, check_regex, close_objects};
use serde_json::Value;
use utoipa::ToSchema;

body_fields! {
    /// The fields that are read here, described: they are taken apart by hand, for errors that say where.
    pub struct StructuredFields {
        /// What the answer's text has to be.
        #[schema(value_type = Option<ResponseFormat>)]
        response_format: Option<Value>,
        /// vLLM's way to say what the answer's text has to be: one of its fields is given.
        #[schema(value_type = Option<StructuredOutputs>)]
        structured_outputs: Option<Value>,
        /// A JSON schema, or one in a string. See structured_outputs, which is newer.
        #[schema(value_type = Option<SchemaOrText>)]
        guided_json: Option<Value>,
        /// A regular expression for the whole text. See structured_outputs, which is newer.
        #[schema(value_type = Option<String>)]
        guided_regex: Option<Value>,
        /// The text is one of these. See structured_outputs, which is newer.
        #[schema(value_type = Option<Vec<String>>)]
        guided_choice: Option<Value>,
        /// A grammar. See structured_outputs, which is newer.
        #[schema(value_type = Option<String>)]
        guided_grammar: Option<Value>,
        /// Any JSON object. See structured_outputs, which is newer.
        #[schema(value_type = Option<bool>)]
        guided_json_object: Option<Value>,
        /// With guided_json: white space between JSON's parts, a regular expression.
        #[schema(value_type = Option<String>)]
        guided_whitespace_pattern: Option<Value>,
        /// llama.cpp's name for a grammar: GBNF, EBNF in its style, or Lark.
        #[schema(value_type = Option<String>)]
        grammar: Option<Value>,
        /// SGLang's name for a regular expression for the whole text.
        #[schema(value_type = Option<String>)]
        regex: Option<Value>,
        /// SGLang's name for a grammar.
        #[schema(value_type = Option<String>)]
        ebnf: Option<Value>,
        /// The name of SGLang and llama.cpp for a JSON schema, or one in a string.
        #[schema(value_type = Option<SchemaOrText>)]
        json_schema: Option<Value>,
        /// SGLang's name for free text with structured parts: what response_format has with the type structural_tag, or
        /// the same in a string.
        #[schema(value_type = Option<TagOrText>)]
        structural_tag: Option<Value>,
    }
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum ResponseFormat {
    /// Anything.
    Text,
    /// Any JSON object; with a schema, as llama.cpp has it, JSON that the schema accepts.
    JsonObject {
        /// llama.cpp's way to give a JSON schema.
        #[schema(value_type = Option<Object>)]
        schema: Option<Value>,
    },
    /// JSON that the schema accepts.
    JsonSchema { json_schema: NamedSchema },
    /// Free text with structured parts: format, or structures and triggers.
    StructuralTag(StructuralTag),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct StructuralTag {
    /// A format of xgrammar: an object with a type, which may contain others.
    #[schema(value_type = Option<Object>)]
    format: Option<Value>,
    /// The older form: wherever the text reaches a trigger, it goes on as one of these that begin with it.
    structures: Option<Vec<TagStructure>>,
    triggers: Option<Vec<String>>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct TagStructure {
    /// It begins with one of the triggers.
    begin: String,
    /// The JSON schema of what is between begin and end; any JSON without it.
    #[schema(value_type = Option<Object>)]
    schema: Option<Value>,
    end: String,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum TagOrText {
    Tag(StructuralTag),
    Text(String),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct NamedSchema {
    /// It changes nothing. OpenAI demands it.
    name: Option<String>,
    description: Option<String>,
    /// The JSON schema.
    #[schema(value_type = Object)]
    schema: Value,
    /// Objects have no properties but those that the schema names, even where server.schema_objects = "open". The
    /// schema is kept to either way.
    strict: Option<bool>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct StructuredOutputs {
    /// A JSON schema, or one in a string.
    json: Option<SchemaOrText>,
    /// A regular expression for the whole text.
    regex: Option<String>,
    /// The text is one of these.
    choice: Option<Vec<String>>,
    /// A grammar: GBNF, EBNF in its style, or Lark.
    grammar: Option<String>,
    /// Any JSON object.
    json_object: Option<bool>,
    /// Free text with structured parts: what response_format has with the type structural_tag, or the same in a string.
    structural_tag: Option<TagOrText>,
    /// White space between JSON's parts, a regular expression.
    whitespace_pattern: Option<String>,
    /// No white space between JSON's parts.
    disable_any_whitespace: Option<bool>,
    /// Objects have no properties but those that the schema names.
    disable_additional_properties: Option<bool>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum SchemaOrText {
    #[schema(value_type = Object)]
    Schema(Value),
    Text(String),
}

impl StructuredFields {
    /// What the body demands of the output's text.
    pub fn check(&self, sampling: &SamplingFields) -> Result<Option<GrammarRequest>, ApiError> {
        self.check_with(response_format(self.response_format.as_ref())?, sampling)
    }

    /// The same, with the answer's `format` as another API says it.
    pub fn check_with(
        &self,
        format: Option<GrammarRequest>,
        sampling: &SamplingFields,
    ) -> Result<Option<GrammarRequest>, ApiError> {
        let outputs = structured_outputs(self.structured_outputs.as_ref())?;
        let mut given = [format, outputs, self.guided()?, self.of_peers()?].into_iter().flatten();
        let Some(first) = given.next() else { return Ok(None) };
        if let Some(second) = given.next() {
            return Err(exclusive(&second.param, &first.param));
        }
        if sampling.use_beam_search {
            return Err(exclusive("use_beam_search", &first.param));
        }
        if sampling.allowed_token_ids.is_some() {
            return Err(exclusive("allowed_token_ids", &first.param));
        }
        Ok(Some(first))
    }

    fn guided(&self) -> Result<Option<GrammarRequest>, ApiError> {
        let all = [
            ("json", "guided_json", &self.guided_json),
            ("regex", "guided_regex", &self.guided_regex),
            ("choice", "guided_choice", &self.guided_choice),
            ("grammar", "guided_grammar", &self.guided_grammar),
            ("json_object", "guided_json_object", &self.guided_json_object),
        ];
        let asked = |(kind, param, value): (&'static str, &'static str, &'_ Option<Value>)| {
            Some((kind, param, value.as_ref().filter(|value| asks(kind, value))?.clone()))
        };
        let given: Vec<(&str, &str, Value)> = all.into_iter().filter_map(asked).collect();
        let (kind, param, value) = match &given[..] {
            [] => return Ok(None),
            [one] => one,
            [(_, first, _), (_, second, _), ..] => return Err(exclusive(second, first)),
        };
        let mut request = constraint(kind, param, value)?;
        const WHITESPACE: &str = "guided_whitespace_pattern";
        request.whitespace = whitespace(WHITESPACE, self.guided_whitespace_pattern.as_ref(), None)?;
        Ok(Some(request))
    }

    /// The fields of llama.cpp and SGLang.
    fn of_peers(&self) -> Result<Option<GrammarRequest>, ApiError> {
        let all = [
            ("grammar", "grammar", &self.grammar),
            ("regex", "regex", &self.regex),
            ("grammar", "ebnf", &self.ebnf),
            ("json", "json_schema", &self.json_schema),
            ("structural_tag", "structural_tag", &self.structural_tag),
        ];
        let mut given = all
            .into_iter()
            .filter_map(|(kind, param, value)| Some((kind, param, value.as_ref().filter(|value| asks(kind, value))?)));
        let Some((kind, param, value)) = given.next() else { return Ok(None) };
        match given.next() {
            Some((_, second, _)) => Err(exclusive(second, param)),
            None => constraint(kind, param, value).map(Some),
        }
    }
}

fn exclusive(param: &str, other: &str) -> ApiError {
    ApiError::invalid(param, format!("{param} and {other} cannot be combined; leave one of them out"))
}

/// A field that is not null.
fn given_field<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn wrong(param: &str, expected: &str, got: Option<&Value>) -> ApiError {
    let got = got.map_or("nothing".into(), shown);
    ApiError::invalid(param, format!("{param} must be {expected}, got {got}"))
}

fn response_format(given: Option<&Value>) -> Result<Option<GrammarRequest>, ApiError> {
    let Some(format) = given else { return Ok(None) };
    if !format.is_object() {
        return Err(wrong("response_format", "an object with a type", Some(format)));
    }
    if format.get("type").is_some_and(|kind| kind == "structural_tag") {
        return constraint("structural_tag", "response_format", format).map(Some);
    }
    const TYPES: &str = "one of text, json_object, json_schema, structural_tag";
    text_format("response_format", format, TYPES, || {
        const PARAM: &str = "response_format.json_schema";
        match given_field(format, "json_schema") {
            Some(given) if given.is_object() => json_schema(PARAM, given),
            other => Err(wrong(PARAM, "an object with a schema", other)),
        }
    })
}

/// The format at `path`, by its type, which must be one of `types`; `schema` reads what there is beside the type
/// json_schema.
pub fn text_format(
    path: &str,
    format: &Value,
    types: &str,
    schema: impl FnOnce() -> Result<GrammarRequest, ApiError>,
) -> Result<Option<GrammarRequest>, ApiError> {
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match given_field(format, "schema") {
            None => Ok(Some(GrammarRequest::new(GrammarSpec::JsonObject, path))),
            Some(schema) => constraint("json", &format!("{path}.schema"), schema).map(Some),
        },
        Some("json_schema") => schema().map(Some),
        _ => Err(wrong(&format!("{path}.type"), types, format.get("type"))),
    }
}

/// A schema, perhaps with a name, at `path`. `strict: true` closes its objects, whatever the server's setting is.
/// Without it the output keeps to the schema too.
pub fn json_schema(path: &str, given: &Value) -> Result<GrammarRequest, ApiError> {
    for (name, is_right, expected) in [
        ("name", Value::is_string as fn(&Value) -> bool, "a string"),
        ("description", Value::is_string as fn(&Value) -> bool, "a string"),
        ("strict", Value::is_boolean as fn(&Value) -> bool, "a boolean"),
    ] {
        if let Some(value) = given_field(given, name).filter(|value| !is_right(value)) {
            return Err(wrong(&format!("{path}.{name}"), expected, Some(value)));
        }
    }
    let param = format!("{path}.schema");
    let schema = given_field(given, "schema").ok_or_else(|| wrong(&param, "a JSON schema", None))?;
    let mut schema = schema.clone();
    if given.get("strict") == Some(&Value::Bool(true)) {
        close_objects(&mut schema);
    }
    Ok(GrammarRequest::new(GrammarSpec::JsonSchema(schema), param))
}

/// vLLM's kinds of constraints and how each is read; its older fields have the same after `guided_`.
const KINDS: [&str; 6] = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"];

fn structured_outputs(given: Option<&Value>) -> Result<Option<GrammarRequest>, ApiError> {
    const PARAM: &str = "structured_outputs";
    let fields = match given {
        None => return Ok(None),
        Some(Value::Object(fields)) => fields,
        Some(other) => return Err(wrong(PARAM, "an object", Some(other))),
    };
    let kinds: Vec<&str> =
        KINDS.into_iter().filter(|kind| fields.get(*kind).is_some_and(|value| asks(kind, value))).collect();
    let kind = match kinds[..] {
        [kind] => kind,
        [first, second, ..] => return Err(exclusive(&format!("{PARAM}.{second}"), &format!("{PARAM}.{first}"))),
        [] => return Err(wrong(PARAM, &format!("an object with one of {}", KINDS.join(", ")), given)),
    };
    let mut request = constraint(kind, &format!("{PARAM}.{kind}"), &fields[kind])?;
    let flag = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(wrong(&format!("{PARAM}.{name}"), "a boolean", Some(other))),
    };
    if flag("disable_additional_properties")? {
        request.spec.close_objects();
    }
    // There is one backend, which either keeps to the schema or refuses it.
    flag("disable_fallback")?;
    let (pattern, none) = (format!("{PARAM}.whitespace_pattern"), format!("{PARAM}.disable_any_whitespace"));
    let none = flag("disable_any_whitespace")?.then_some(none.as_str());
    request.whitespace = whitespace(&pattern, fields.get("whitespace_pattern"), none)?;
    Ok(Some(request))
}

/// `param`: the field of the pattern. `none`: the field that says that there is no white space.
fn whitespace(param: &str, given: Option<&Value>, none: Option<&str>) -> Result<Whitespace, ApiError> {
    match (given, none) {
        (None | Some(Value::Null), Some(_)) => Ok(Whitespace::Compact),
        (None | Some(Value::Null), None) => Ok(Whitespace::default()),
        (Some(Value::String(_)), Some(none)) => Err(exclusive(param, none)),
        (Some(Value::String(pattern)), None) if pattern.is_empty() => Ok(Whitespace::Compact),
        (Some(Value::String(pattern)), None) => match check_regex(pattern) {
            Ok(()) => Ok(Whitespace::Pattern(pattern.clone())),
            Err(error) => Err(ApiError::invalid(param, format!("{param}: {error}"))),
        },
        (Some(other), _) => Err(wrong(param, "a regular expression in a string", Some(other))),
    }
}

/// Clients send empty texts, and `false` where a flag is due, for "none".
fn asks(kind: &str, value: &Value) -> bool {
    let is_off = *value == Value::Bool(false) && kind == "json_object";
    !is_off && !value.is_null() && value.as_str() != Some("")
}

fn constraint(kind: &str, param: &str, value: &Value) -> Result<GrammarRequest, ApiError> {
    let text = || value.as_str().map(str::to_owned).ok_or_else(|| wrong(param, "a string", Some(value)));
    // vLLM takes JSON as text too.
    let json = |expected: &str| match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| ApiError::invalid(param, format!("{param} is not JSON: {error}"))),
        object if object.is_object() => Ok(object.clone()),
        other => Err(wrong(param, expected, Some(other))),
    };
    let spec = match kind {
        "json" => GrammarSpec::JsonSchema(json("a JSON schema, or one in a string")?),
        "json_object" if *value == Value::Bool(true) => GrammarSpec::JsonObject,
        "json_object" => return Err(wrong(param, "a boolean", Some(value))),
        "regex" => GrammarSpec::Regex(text()?),
        "choice" => GrammarSpec::Choice(choices(param, value)?),
        "structural_tag" => GrammarSpec::StructuralTag(json("a structural tag, or one in a string")?),
        _ => GrammarSpec::Grammar(text()?),
    };
    Ok(GrammarRequest::new(spec, param))
}

fn choices(param: &str, value: &Value) -> Result<Vec<String>, ApiError> {
    let items = value.as_array().filter(|items| !items.is_empty());
    let items = items.ok_or_else(|| wrong(param, "an array of at least one string", Some(value)))?;
    let text = |(i, item): (usize, &Value)| {
        item.as_str().map(str::to_owned).ok_or_else(|| wrong(&format!("{param}[{i}]"), "a string", Some(item)))
    };
    items.iter().enumerate().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{body, read_value};
    use serde_json::json;

    body! {
        struct GrammarBody {
            structured: StructuredFields,
            sampling: SamplingFields,
        }
    }

    fn grammar(body: &Value) -> Result<Option<GrammarRequest>, ApiError> {
        let GrammarBody { structured, sampling } = read_value(body)?.body;
        structured.check(&sampling)
    }

    #[test]
    fn each_way_to_ask_is_read() {
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let json_schema = GrammarSpec::JsonSchema(schema.clone());
        let tag = json!({ "type": "structural_tag", "format": { "type": "json_schema", "json_schema": schema } });
        let cases = [
            (json!({"response_format": {"type": "json_object"}}), GrammarSpec::JsonObject, "response_format"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": false}}}),
                json_schema.clone(),
                "response_format.json_schema.schema",
            ),
            (json!({"structured_outputs": {"json": schema}}), json_schema.clone(), "structured_outputs.json"),
            (
                json!({"structured_outputs": {"json": schema.to_string()}}),
                json_schema.clone(),
                "structured_outputs.json",
            ),
            (
                json!({"structured_outputs": {"json_object": true, "json": null}}),
                GrammarSpec::JsonObject,
                "structured_outputs.json_object",
            ),
            (json!({"guided_json": schema}), json_schema.clone(), "guided_json"),
            (json!({"guided_regex": "a+", "grammar": ""}), GrammarSpec::Regex("a+".into()), "guided_regex"),
            (json!({"guided_choice": ["a", "b"]}), GrammarSpec::Choice(vec!["a".into(), "b".into()]), "guided_choice"),
            (json!({"grammar": "root ::= \"a\""}), GrammarSpec::Grammar("root ::= \"a\"".into()), "grammar"),
            (json!({"ebnf": "root ::= \"a\"", "regex": null}), GrammarSpec::Grammar("root ::= \"a\"".into()), "ebnf"),
            (json!({"regex": "a+"}), GrammarSpec::Regex("a+".into()), "regex"),
            (json!({"json_schema": schema.to_string()}), json_schema.clone(), "json_schema"),
            (json!({ "response_format": tag }), GrammarSpec::StructuralTag(tag.clone()), "response_format"),
            (
                json!({"structured_outputs": {"structural_tag": tag.to_string()}}),
                GrammarSpec::StructuralTag(tag.clone()),
                "structured_outputs.structural_tag",
            ),
            (json!({ "structural_tag": tag }), GrammarSpec::StructuralTag(tag.clone()), "structural_tag"),
            (
                json!({"response_format": {"type": "json_object", "schema": schema}}),
                json_schema.clone(),
                "response_format.schema",
            ),
        ];
        for (body, spec, param) in cases {
            let request = grammar(&body).unwrap().unwrap_or_else(|| panic!("{body}"));
            assert_eq!((request.spec, &*request.param), (spec, param));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_nothing() {
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}, "structured_outputs": null, "guided_json": null}),
            json!({"grammar": "", "guided_regex": ""}),
        ] {
            assert_eq!(grammar(&body).unwrap(), None, "{body}");
        }
    }

    #[test]
    fn a_flag_is_no_schema() {
        for (body, param) in [
            (json!({"guided_json": false}), "guided_json"),
            (json!({"guided_json": true}), "guided_json"),
            (json!({"structured_outputs": {"json": false}}), "structured_outputs.json"),
            (json!({"grammar": false}), "grammar"),
            (json!({"guided_regex": false}), "guided_regex"),
        ] {
            assert_eq!(grammar(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn options_reach_the_grammar() {
        let of = |fields: Value| grammar(&json!({ "structured_outputs": fields })).unwrap().unwrap();
        assert_eq!(of(json!({"json_object": true})).whitespace, Whitespace::Limited);
        assert_eq!(of(json!({"json_object": true, "disable_any_whitespace": true})).whitespace, Whitespace::Compact);
        assert_eq!(
            of(json!({"json_object": true, "whitespace_pattern": " ?"})).whitespace,
            Whitespace::Pattern(" ?".into())
        );
        let open =
            json!({"properties": {"a": {"properties": {}}, "b": {"properties": {}, "additionalProperties": true}}});
        let closed = of(json!({"json": open, "disable_additional_properties": true, "backend": "xgrammar"}));
        let expected = json!({"properties": {
            "a": {"properties": {}, "additionalProperties": false},
            "b": {"properties": {}, "additionalProperties": true},
        }, "additionalProperties": false});
        assert_eq!(closed.spec, GrammarSpec::JsonSchema(expected.clone()));
        let tag = |schema: &Value| {
            let format = json!({"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]});
            json!({"format": format, "structures": [{"schema": schema}]})
        };
        let closed = of(json!({"structural_tag": tag(&open), "disable_additional_properties": true}));
        assert_eq!(closed.spec, GrammarSpec::StructuralTag(tag(&expected)));
        let guided = json!({"guided_json": {}, "guided_whitespace_pattern": ""});
        assert_eq!(grammar(&guided).unwrap().unwrap().whitespace, Whitespace::Compact);
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let format = |format: Value| json!({ "response_format": format });
        let schema = |fields: Value| format(json!({"type": "json_schema", "json_schema": fields}));
        for (body, param) in [
            (format(json!("json")), "response_format"),
            (format(json!({})), "response_format.type"),
            (format(json!({"type": "yaml"})), "response_format.type"),
            (json!({"structural_tag": "{"}), "structural_tag"),
            (json!({"structured_outputs": {"structural_tag": []}}), "structured_outputs.structural_tag"),
            (format(json!({"type": "json_schema"})), "response_format.json_schema"),
            (schema(json!({"name": 5, "schema": {}})), "response_format.json_schema.name"),
            (schema(json!({"name": "n"})), "response_format.json_schema.schema"),
            (schema(json!({"name": "n", "schema": {}, "strict": "yes"})), "response_format.json_schema.strict"),
            (json!({"structured_outputs": {}}), "structured_outputs"),
            (json!({"structured_outputs": "json"}), "structured_outputs"),
            (json!({"structured_outputs": {"regex": 5}}), "structured_outputs.regex"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
            (
                json!({"structured_outputs": {"regex": "a", "disable_any_whitespace": 1}}),
                "structured_outputs.disable_any_whitespace",
            ),
            (
                json!({"structured_outputs": {"json_object": true, "whitespace_pattern": "["}}),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": ["a", 1]}), "guided_choice[1]"),
            (json!({"guided_choice": ["a"], "guided_regex": "a"}), "guided_choice"),
            (json!({"guided_regex": "a", "grammar": "root ::= \"a\""}), "grammar"),
            (json!({"guided_regex": "a", "use_beam_search": true}), "use_beam_search"),
            (json!({"guided_regex": "a", "allowed_token_ids": [1]}), "allowed_token_ids"),
        ] {
            let error = grammar(&body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
            assert!(error.message.contains(param), "{error}");
        }
    }
}
