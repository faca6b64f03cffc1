//! Translates structural tags to Lark: free text and the places in it that have a form, as xgrammar describes them.
//!
//! There are two forms: `format`, a tree of formats, and the older `structures` with `triggers`, which is the same as
//! one format `triggered_tags`.

mod fields;
mod schemas;
mod special;
mod tokens;
mod writer;

use super::gbnf;
use super::json_in_lark;
use super::request::Whitespace;
use super::schema::check_regex;
use super::vocabulary::Vocabulary;
use fields::{TagFields, texts, wrong};
use llguidance::regex_to_lark;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
pub use schemas::each_schema;
use serde_json::{Value, json};
use special::{SpecialNames, TextMark};
use writer::{ANY_TEXT, Beginning, Following, FreeText, TagWriter, join};

/// Maximum number of formats, tags and structures.
const MAX_FORMATS: usize = 2000;
/// Maximum nesting of formats.
const MAX_DEPTH: usize = 50;
/// Maximum length of an expression in bytes, and of a grammar.
const MAX_REGEX_BYTES: usize = 1 << 13;
const MAX_GRAMMAR_BYTES: usize = 1 << 16;
/// Maximum number of characters of free text whose length is limited: the lexer has states for each.
const MAX_CHARS: i64 = 5000;
/// Maximum number of repetitions, and of tokens whose number is limited.
const MAX_REPETITIONS: i64 = 10_000;
/// Maximum number of blanks between two parts of JSON.
const MAX_BLANKS: i64 = 100;

const FORMATS: [&str; 20] = [
    "any_text",
    "any_tokens",
    "const_string",
    "dispatch",
    "exclude_token",
    "grammar",
    "json_schema",
    "optional",
    "or",
    "plus",
    "regex",
    "repeat",
    "sequence",
    "star",
    "tag",
    "tags_with_separator",
    "token",
    "token_dispatch",
    "token_triggered_tags",
    "triggered_tags",
];

const TAG: [&str; 3] = ["begin", "content", "end"];

/// The grammar of a structural tag, the value of the request's field `param`. `whitespace` is that of its JSON.
///
/// # Errors
/// 400, with the place in the tag.
pub fn to_lark(tag: &Value, param: &str, whitespace: &Whitespace, vocabulary: &Vocabulary) -> Result<String, ApiError> {
    let fields = TagFields::new(tag, param, &["format", "structures", "triggers"])?;
    if let Some(other) = fields.get("type").filter(|kind| *kind != "structural_tag") {
        return Err(wrong(&fields.below("type"), "structural_tag", Some(other)));
    }
    let writer = TagWriter::new(SpecialNames::new(vocabulary), param);
    let mut translator = Translator { vocabulary, whitespace, param, writer, num_formats: 0, depth: 0 };
    let whole = match fields.get("format") {
        Some(format) => {
            if let Some(name) = ["structures", "triggers"].into_iter().find(|name| fields.get(name).is_some()) {
                let message = format!("{0}.{name} and {0}.format cannot be combined; leave one of them out", param);
                return Err(ApiError::invalid(fields.below(name), message));
            }
            translator.format(format, &fields.below("format"), Following::end())?
        }
        None if fields.get("structures").is_some() || fields.get("triggers").is_some() => {
            translator.triggered_tags(&fields, "structures", Following::end())?
        }
        None => return Err(wrong(&fields.below("format"), "an object with a type", None)),
    };
    Ok(translator.writer.finish(&whole))
}

struct Translator<'a> {
    vocabulary: &'a Vocabulary,
    whitespace: &'a Whitespace,
    param: &'a str,
    writer: TagWriter,
    num_formats: usize,
    depth: usize,
}

/// A tag's beginning.
enum Begin<'a> {
    Text(&'a str),
    Token(TokenId),
}

type Translated = Result<Following, ApiError>;

impl Translator<'_> {
    fn count(&mut self) -> Result<(), ApiError> {
        self.num_formats += 1;
        if self.num_formats > MAX_FORMATS {
            let message = format!("{} must have at most {MAX_FORMATS} formats", self.param);
            return Err(ApiError::invalid(self.param, message));
        }
        Ok(())
    }

    /// A format, and then what follows.
    fn format(&mut self, format: &Value, place: &str, next: Following) -> Translated {
        self.count()?;
        if self.depth == MAX_DEPTH {
            return Err(ApiError::invalid(place, format!("{place}: formats are nested more than {MAX_DEPTH} deep")));
        }
        self.depth += 1;
        let translated = self.by_type(format, place, next);
        self.depth -= 1;
        translated
    }

    fn by_type(&mut self, format: &Value, place: &str, next: Following) -> Translated {
        let fields = |known: &[&str]| TagFields::new(format, place, known);
        let kind = format.get("type").and_then(Value::as_str);
        match kind {
            Some("any_text") => self.any_text(&fields(&["excludes", "max_chars"])?, &next),
            Some("any_tokens") => self.any_tokens(&fields(&["exclude_tokens", "max_tokens"])?, &next),
            Some("const_string") => self.writer.literal(fields(&["value"])?.text("value")?, next),
            Some("dispatch") => self.dispatch(&fields(&["rules", "loop", "excludes"])?, next),
            Some("exclude_token") => {
                let fields = fields(&["exclude_tokens"])?;
                let free = self.free_token(fields.optional_list("exclude_tokens")?, &next.beginnings)?;
                Ok(next.behind(&free))
            }
            Some("grammar") => self.grammar(&fields(&["grammar"])?, next),
            Some("json_schema") => {
                let known = ["json_schema", "style", "any_order", "max_whitespace_cnt"];
                self.json_schema(&fields(&known)?, next)
            }
            Some("optional") => {
                let content = self.content(&fields(&["content"])?, next.clone())?;
                self.writer.either(vec![content, next])
            }
            Some("or") => {
                let elements = fields(&["elements"])?.list("elements")?;
                let option = |(place, element): (String, &_)| self.format(element, &place, next.clone());
                let options = elements.into_iter().map(option).collect::<Result<Vec<_>, _>>()?;
                self.writer.either(options)
            }
            Some("plus") => self.repeat(&fields(&["content"])?, 1, None, next),
            Some("regex") => self.regex(&fields(&["pattern"])?, &next),
            Some("repeat") => {
                let fields = fields(&["min", "max", "content"])?;
                let needed = |name| fields.required(name, "an integer").map(|_| ());
                needed("min").and_then(|()| needed("max"))?;
                let least = fields.number("min", 0..=MAX_REPETITIONS)?.unwrap_or(0);
                let most = fields.number("max", -1..=MAX_REPETITIONS)?.filter(|most| *most >= 0);
                if let Some(most) = most.filter(|most| *most < least) {
                    return Err(wrong(&fields.below("max"), "at least min, or -1", Some(&json!(most))));
                }
                self.repeat(&fields, least, most, next)
            }
            Some("sequence") => {
                let elements = fields(&["elements"])?.list("elements")?;
                elements.into_iter().rev().try_fold(next, |next, (place, element)| self.format(element, &place, next))
            }
            Some("star") => self.repeat(&fields(&["content"])?, 0, None, next),
            Some("tag") => {
                let fields = fields(&TAG)?;
                let (begin, content) = self.tag(&fields, next)?;
                self.begun(&begin, content)
            }
            Some("tags_with_separator") => {
                self.tags_with_separator(&fields(&["tags", "separator", "at_least_one", "stop_after_first"])?, next)
            }
            Some("token") => {
                let token = self.token_of(&fields(&["token"])?)?;
                self.writer.marked(TextMark::of_token(token), "", &next)
            }
            Some("token_dispatch") => self.token_dispatch(&fields(&["rules", "loop", "exclude_tokens"])?, next),
            Some("token_triggered_tags") => {
                let known = ["trigger_tokens", "tags", "exclude_tokens", "at_least_one", "stop_after_first"];
                self.token_triggered_tags(&fields(&known)?, next)
            }
            Some("triggered_tags") => {
                let known = ["triggers", "tags", "excludes", "at_least_one", "stop_after_first"];
                self.triggered_tags(&fields(&known)?, "tags", next)
            }
            _ if !format.is_object() => Err(wrong(place, "an object with a type", Some(format))),
            _ => {
                let expected = format!("one of {}", FORMATS.join(", "));
                Err(wrong(&format!("{place}.type"), &expected, format.get("type")))
            }
        }
    }

    fn content(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let content = fields.required("content", "an object with a type")?;
        self.format(content, &fields.below("content"), next)
    }

    fn json_schema(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        if let Some(style) = fields.get("style").filter(|style| *style != "json") {
            return Err(wrong(&fields.below("style"), "json, the one style that is supported", Some(style)));
        }
        // The order of the schema is one of those that are allowed.
        fields.flag("any_order", false)?;
        let whitespace = match fields.number("max_whitespace_cnt", 0..=MAX_BLANKS)? {
            None => self.whitespace.clone(),
            Some(0) => Whitespace::Compact,
            Some(most) => Whitespace::Pattern(format!("[ \\t\\r\\n]{{1,{most}}}")),
        };
        let schema = fields.required("json_schema", "a JSON schema")?;
        self.schema(schema, &fields.below("json_schema"), &whitespace, next)
    }

    fn schema(&mut self, schema: &Value, place: &str, whitespace: &Whitespace, next: Following) -> Translated {
        let json = self.writer.rule(&json_in_lark(schema, whitespace, place)?)?;
        Ok(next.behind(&json))
    }

    fn grammar(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let (text, place) = (fields.text("grammar")?, fields.below("grammar"));
        let invalid = |message: String| ApiError::invalid(&place, message);
        if text.len() > MAX_GRAMMAR_BYTES {
            return Err(invalid(format!("{place} must have at most {MAX_GRAMMAR_BYTES} bytes, got {}", text.len())));
        }
        let lark = gbnf::to_lark(text).map_err(|error| invalid(format!("{place}: {error}")))?;
        let rule = self.writer.rule(&format!("%lark {{\n{lark}}}"))?;
        Ok(next.behind(&rule))
    }

    fn regex(&mut self, fields: &TagFields<'_>, next: &Following) -> Translated {
        let (pattern, place) = (fields.text("pattern")?, fields.below("pattern"));
        let invalid = |message: String| ApiError::invalid(&place, message);
        if pattern.is_empty() || pattern.len() > MAX_REGEX_BYTES {
            let got = pattern.len();
            return Err(invalid(format!("{place} must have from 1 to {MAX_REGEX_BYTES} bytes, got {got}")));
        }
        check_regex(pattern).map_err(|error| invalid(format!("{place}: {error}")))?;
        let body = format!("/{}/", regex_to_lark(pattern, ""));
        if next.is_open {
            return Ok(next.clone().behind(&body));
        }
        self.up_to(&FreeText { body, excludes: None }, next)
    }

    fn any_text(&mut self, fields: &TagFields<'_>, next: &Following) -> Translated {
        let excludes = texts(fields.optional_list("excludes")?)?;
        let body = match fields.number("max_chars", 0..=MAX_CHARS)? {
            None => ANY_TEXT.to_owned(),
            Some(most) => format!("/(?s:.{{0,{most}}})/"),
        };
        closed(&fields.place, next)?;
        let excludes = excludes.into_iter().map(str::to_owned).collect();
        self.up_to(&FreeText { body, excludes: Some(excludes) }, next)
    }

    fn up_to(&mut self, text: &FreeText, next: &Following) -> Translated {
        let (_, alternatives) = self.writer.free_text(text, &[], next)?;
        let lark = self.writer.one_of(alternatives)?;
        Ok(Following::elsewhere().behind(&lark))
    }

    /// `most`: no limit if it is missing.
    fn repeat(&mut self, fields: &TagFields<'_>, least: i64, most: Option<i64>, next: Following) -> Translated {
        let content = self.content(fields, Following::elsewhere())?;
        if most == Some(0) {
            return Ok(next);
        }
        let rule = self.writer.rule(&content.lark)?;
        let times = |least: i64, most: Option<i64>| match (least, most) {
            (_, Some(0)) => String::new(),
            (0, None) => format!("{rule}*"),
            (least, None) => format!("{rule}{{{least},}}"),
            (least, Some(most)) => format!("{rule}{{{least},{most}}}"),
        };
        let all = join(&times(least, most), &next.lark);
        let more = join(&times((least - 1).max(0), most.map(|most| most - 1)), &next.lark);
        let more = self.writer.short(more)?;
        let begin = |beginning: Beginning| Beginning { after: join(&beginning.after, &more), ..beginning };
        let mut beginnings: Vec<Beginning> = content.beginnings.into_iter().map(begin).collect();
        if least > 0 {
            return Ok(Following { lark: all, beginnings, may_end: false, is_open: content.is_open });
        }
        beginnings.extend(next.beginnings);
        Ok(Following { lark: all, beginnings, may_end: next.may_end, is_open: content.is_open || next.is_open })
    }

    /// A tag's beginning, and its content with its end and what follows.
    fn tag<'v>(&mut self, fields: &TagFields<'v>, next: Following) -> Result<(Begin<'v>, Following), ApiError> {
        let end = match fields.get("end") {
            Some(Value::String(end)) => self.writer.literal(end, next)?,
            Some(Value::Array(_)) => {
                let end = |(place, end): (String, &Value)| match end {
                    Value::String(end) => self.writer.literal(end, next.clone()),
                    other => Err(wrong(&place, "a string", Some(other))),
                };
                let ends = fields.list("end")?.into_iter().map(end).collect::<Result<Vec<_>, _>>()?;
                self.writer.either(ends)?
            }
            Some(end @ Value::Object(_)) => {
                let token = self.token_of(&TagFields::new(end, &fields.below("end"), &["token"])?)?;
                self.writer.marked(TextMark::of_token(token), "", &next)?
            }
            other => return Err(wrong(&fields.below("end"), "a string, an array of strings or a token", other)),
        };
        let content = self.content(fields, end)?;
        let begin = match fields.get("begin") {
            Some(Value::String(begin)) => Begin::Text(begin),
            Some(begin @ Value::Object(_)) => {
                Begin::Token(self.token_of(&TagFields::new(begin, &fields.below("begin"), &["token"])?)?)
            }
            other => return Err(wrong(&fields.below("begin"), "a string or a token", other)),
        };
        Ok((begin, content))
    }

    /// The tags of a list; each begins with what `begin_of` makes of its beginning.
    fn tags<'v, T>(
        &mut self,
        fields: &TagFields<'v>,
        next: &Following,
        begin_of: impl Fn(Begin<'v>) -> Result<T, &'static str>,
    ) -> Result<Vec<(String, T, Following)>, ApiError> {
        let mut tags = Vec::new();
        for (place, tag) in fields.list("tags")? {
            self.count()?;
            let fields = TagFields::new(tag, &place, &TAG)?;
            if let Some(other) = fields.get("type").filter(|kind| *kind != "tag") {
                return Err(wrong(&fields.below("type"), "tag", Some(other)));
            }
            let (begin, content) = self.tag(&fields, next.clone())?;
            let place = fields.below("begin");
            let begin = begin_of(begin).map_err(|expected| wrong(&place, expected, fields.get("begin")))?;
            tags.push((place, begin, content));
        }
        Ok(tags)
    }

    fn begun(&mut self, begin: &Begin<'_>, content: Following) -> Translated {
        match begin {
            Begin::Text(text) => self.writer.literal(text, content),
            Begin::Token(token) => self.writer.marked(TextMark::of_token(*token), "", &content),
        }
    }

    /// `list`: the field of the tags, `tags` or `structures`.
    fn triggered_tags(&mut self, fields: &TagFields<'_>, list: &str, next: Following) -> Translated {
        let triggers = texts(fields.list("triggers")?)?;
        triggers.iter().try_for_each(|_| self.count())?;
        let mut excludes = texts(fields.optional_list("excludes")?)?;
        let (at_least_one, stops) = (fields.flag("at_least_one", false)?, fields.flag("stop_after_first", false)?);
        let inside = if stops { next.clone() } else { Following::elsewhere() };
        let tags = match list {
            "tags" => self.tags(fields, &inside, |begin| match begin {
                Begin::Text(text) => Ok(text),
                Begin::Token(_) => Err("a string"),
            })?,
            _ => self.structures(fields, &inside)?,
        };
        let (mut beginnings, mut whole, mut used) = (Vec::new(), Vec::new(), vec![false; triggers.len()]);
        for (place, begin, content) in tags {
            let mut fitting = (0..triggers.len()).filter(|i| begin.starts_with(triggers[*i]));
            let trigger = match (fitting.next(), fitting.next()) {
                (Some(trigger), None) => trigger,
                (None, _) => {
                    return Err(wrong(&place, "a text that begins with one of the triggers", Some(&begin.into())));
                }
                _ => {
                    return Err(wrong(&place, "a text that begins with only one of the triggers", Some(&begin.into())));
                }
            };
            used[trigger] = true;
            let content = Following { lark: self.writer.short(content.lark)?, ..content };
            let end = self.writer.special.whole_token(begin, triggers[trigger].len());
            let (mut mark, rest) = self.writer.special.split(&begin[..end]);
            if mark.spelled.len() > triggers[trigger].len() {
                mark.spelled = triggers[trigger].to_owned();
            }
            let after = self.writer.literal(&begin[end..], content.clone())?;
            beginnings.push(Beginning { mark, after: join(&rest, &after.lark) });
            whole.push((begin, content));
        }
        excludes.extend(triggers.iter().zip(used).filter(|(_, used)| !used).map(|(trigger, _)| trigger));
        let among_text = match (at_least_one, stops) {
            (true, true) => String::new(),
            _ => self.among_text(&fields.place, &beginnings, excludes, stops, &next)?,
        };
        if !at_least_one {
            return Ok(Following::elsewhere().behind(&among_text));
        }
        let mut first = Vec::new();
        for (begin, content) in whole {
            first.push(self.writer.literal(begin, Following { lark: join(&content.lark, &among_text), ..content })?);
        }
        self.writer.either(first)
    }

    /// The older form of tags.
    fn structures<'v>(
        &mut self,
        fields: &TagFields<'v>,
        next: &Following,
    ) -> Result<Vec<(String, &'v str, Following)>, ApiError> {
        let mut tags = Vec::new();
        for (place, structure) in fields.list("structures")? {
            self.count()?;
            let fields = TagFields::new(structure, &place, &["begin", "schema", "end"])?;
            let end = self.writer.literal(fields.text("end")?, next.clone())?;
            let any = json!({});
            let schema = fields.get("schema").unwrap_or(&any);
            let content = self.schema(schema, &fields.below("schema"), self.whitespace, end)?;
            tags.push((fields.below("begin"), fields.text("begin")?, content));
        }
        Ok(tags)
    }

    /// Free text in which something begins at some places, and what follows it; `stops`: behind the first.
    fn among_text(
        &mut self,
        place: &str,
        beginnings: &[Beginning],
        excludes: Vec<&str>,
        stops: bool,
        next: &Following,
    ) -> Result<String, ApiError> {
        closed(place, next)?;
        let excludes = excludes.into_iter().map(str::to_owned).collect();
        let text = FreeText { body: ANY_TEXT.to_owned(), excludes: Some(excludes) };
        let (mut parts, last) = self.writer.free_text(&text, beginnings, next)?;
        if stops {
            parts.extend(last);
            return self.writer.one_of(parts);
        }
        let (part, last) = (self.writer.one_of(parts)?, self.writer.one_of(last)?);
        Ok(format!("{part}* {last}"))
    }

    fn dispatch(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let stops = !fields.flag("loop", true)?;
        let excludes = texts(fields.optional_list("excludes")?)?;
        let inside = if stops { next.clone() } else { Following::elsewhere() };
        let mut beginnings = Vec::new();
        for (place, rule) in fields.list("rules")? {
            let (pattern, format) = pair(&place, rule)?;
            let pattern = texts(vec![(format!("{place}[0]"), pattern)])?.concat();
            let content = self.format(format, &format!("{place}[1]"), inside.clone())?;
            beginnings.extend(self.writer.literal(&pattern, content)?.beginnings);
        }
        let lark = self.among_text(&fields.place, &beginnings, excludes, stops, &next)?;
        Ok(Following::elsewhere().behind(&lark))
    }

    fn tags_with_separator(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let separator = fields.text("separator")?;
        let (at_least_one, stops) = (fields.flag("at_least_one", false)?, fields.flag("stop_after_first", false)?);
        let inside = if stops { next.clone() } else { Following::elsewhere() };
        let mut tags = self.tags(fields, &inside, Ok)?;
        if !stops {
            let mut any = Vec::new();
            for (_, begin, content) in &mut tags {
                content.lark = self.writer.short(std::mem::take(&mut content.lark))?;
                any.push(self.begun(begin, content.clone())?.lark);
            }
            let any = self.writer.one_of(any)?;
            let another = self.writer.literal(separator, Following::elsewhere().behind(&any))?.lark;
            let another = self.writer.rule(&another)?;
            let more = self.writer.short(join(&format!("{another}*"), &next.lark))?;
            tags.iter_mut().for_each(|(_, _, content)| content.lark = join(&content.lark, &more));
        }
        let mut options = Vec::new();
        for (_, begin, content) in tags {
            options.push(self.begun(&begin, content)?);
        }
        options.extend((!at_least_one).then_some(next));
        self.writer.either(options)
    }
}

/// The two elements of a rule of a dispatch.
fn pair<'v>(place: &str, rule: &'v Value) -> Result<(&'v Value, &'v Value), ApiError> {
    match rule.as_array().map(Vec::as_slice) {
        Some([pattern, format]) => Ok((pattern, format)),
        _ => Err(wrong(place, "an array of what begins it and its format", Some(rule))),
    }
}

/// Free text at `place` needs to know where it ends.
fn closed(place: &str, next: &Following) -> Result<(), ApiError> {
    if !next.is_open {
        return Ok(());
    }
    let message = format!(
        "{place}: where this free text ends cannot be told; behind it there must be a const_string, a tag, a token or \
         the end"
    );
    Err(ApiError::invalid(place, message))
}
