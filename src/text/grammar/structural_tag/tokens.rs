//! The formats of structural tags that are about tokens.

use super::fields::{TagFields, wrong};
use super::special::TextMark;
use super::writer::{Beginning, Following, join};
use super::{Begin, MAX_REPETITIONS, Translated, Translator, pair};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use serde_json::Value;

impl Translator<'_> {
    pub(super) fn token_of(&self, fields: &TagFields<'_>) -> Result<TokenId, ApiError> {
        if let Some(other) = fields.get("type").filter(|kind| *kind != "token") {
            return Err(wrong(&fields.below("type"), "token", Some(other)));
        }
        let token = fields.required("token", "a token's id or text")?;
        self.token(token, &fields.below("token"))
    }

    pub(super) fn token(&self, given: &Value, place: &str) -> Result<TokenId, ApiError> {
        let size = self.vocabulary.len();
        let id = match given {
            Value::String(text) => self.writer.special.id(text).or_else(|| self.vocabulary.text_token(text)),
            id => id.as_u64().filter(|id| *id < size as u64).map(|id| id as TokenId),
        };
        let expected = || format!("the text of a token, or an id below {size}");
        id.ok_or_else(|| wrong(place, &expected(), Some(given)))
    }

    pub(super) fn tokens(&self, given: Vec<(String, &Value)>) -> Result<Vec<TokenId>, ApiError> {
        given.into_iter().map(|(place, token)| self.token(token, &place)).collect()
    }

    /// Any token but these, those that begin what follows, and those that end the output.
    pub(super) fn free_token(&self, excluded: Vec<(String, &Value)>, next: &[Beginning]) -> Result<String, ApiError> {
        let mut excluded = self.tokens(excluded)?;
        excluded.extend(next.iter().filter(|next| next.mark.text.is_empty()).filter_map(|next| next.mark.token));
        excluded.extend(self.vocabulary.ends());
        excluded.sort_unstable();
        excluded.dedup();
        let excluded: Vec<String> = excluded.iter().map(TokenId::to_string).collect();
        Ok(format!("<[^{}]>", excluded.join(",")))
    }

    /// What ends free tokens, as alternatives.
    pub(super) fn behind_tokens(&self, place: &str, next: &Following) -> Result<Vec<String>, ApiError> {
        let is_token = |beginning: &Beginning| beginning.mark.token.is_some() && beginning.mark.text.is_empty();
        if next.is_open || !next.beginnings.iter().all(is_token) {
            let message = format!(
                "{place}: where these free tokens end cannot be told; behind them there must be a token, a tag that \
                 begins or ends with one, or the end"
            );
            return Err(ApiError::invalid(place, message));
        }
        let mut alternatives: Vec<String> =
            next.beginnings.iter().map(|Beginning { mark, after }| join(&mark.lark(), after)).collect();
        alternatives.extend(next.may_end.then(String::new));
        Ok(alternatives)
    }

    pub(super) fn any_tokens(&mut self, fields: &TagFields<'_>, next: &Following) -> Translated {
        let free = self.free_token(fields.optional_list("exclude_tokens")?, &next.beginnings)?;
        let free = match fields.number("max_tokens", 0..=MAX_REPETITIONS)? {
            None => format!("{free}*"),
            Some(0) => String::new(),
            Some(most) => format!("{}{{0,{most}}}", self.writer.rule(&free)?),
        };
        let last = self.behind_tokens(&fields.place, next)?;
        let last = self.writer.one_of(last)?;
        Ok(Following::elsewhere().behind(&join(&free, &last)))
    }

    pub(super) fn token_triggered_tags(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let triggers = self.tokens(fields.list("trigger_tokens")?)?;
        let (at_least_one, stops) = (fields.flag("at_least_one", false)?, fields.flag("stop_after_first", false)?);
        let inside = if stops { next.clone() } else { Following::elsewhere() };
        let tags = self.tags(fields, &inside, |begin| match begin {
            Begin::Token(token) if triggers.contains(&token) => Ok(token),
            _ => Err("one of the trigger tokens"),
        })?;
        let mut whole = Vec::new();
        for (_, token, content) in tags {
            whole.push(self.writer.marked(TextMark::of_token(token), "", &content)?);
        }
        let without_tag = triggers.into_iter().map(TextMark::of_token);
        let marks = without_tag.map(|mark| Beginning { mark, after: String::new() }).collect();
        let first = self.writer.either(whole)?;
        let among_tokens = match (at_least_one, stops) {
            (true, true) => String::new(),
            _ => self.among_tokens(fields, &first.lark, marks, stops, &next)?,
        };
        if !at_least_one {
            return Ok(Following::elsewhere().behind(&among_tokens));
        }
        let mut beginnings = first.beginnings;
        for beginning in &mut beginnings {
            beginning.after = join(&beginning.after, &among_tokens);
        }
        Ok(Following { lark: join(&first.lark, &among_tokens), beginnings, may_end: false, is_open: false })
    }

    pub(super) fn token_dispatch(&mut self, fields: &TagFields<'_>, next: Following) -> Translated {
        let stops = !fields.flag("loop", true)?;
        let inside = if stops { next.clone() } else { Following::elsewhere() };
        let mut options = Vec::new();
        for (place, rule) in fields.list("rules")? {
            let (token, format) = pair(&place, rule)?;
            let token = self.token(token, &format!("{place}[0]"))?;
            let content = self.format(format, &format!("{place}[1]"), inside.clone())?;
            options.push(self.writer.marked(TextMark::of_token(token), "", &content)?);
        }
        let any = self.writer.either(options)?;
        let lark = self.among_tokens(fields, &any.lark, any.beginnings, stops, &next)?;
        Ok(Following::elsewhere().behind(&lark))
    }

    /// Free tokens, and `part` at some places among them, which begins with one of `marks`.
    pub(super) fn among_tokens(
        &mut self,
        fields: &TagFields<'_>,
        part: &str,
        mut marks: Vec<Beginning>,
        stops: bool,
        next: &Following,
    ) -> Result<String, ApiError> {
        let last = self.behind_tokens(&fields.place, next)?;
        marks.extend(next.beginnings.iter().cloned());
        let free = self.free_token(fields.optional_list("exclude_tokens")?, &marks)?;
        let last = self.writer.one_of(last)?;
        if stops {
            let behind = self.writer.one_of(vec![part.to_owned(), last])?;
            return Ok(format!("{free}* {behind}"));
        }
        let item = self.writer.one_of(vec![free, part.to_owned()])?;
        Ok(format!("{item}* {last}"))
    }
}
