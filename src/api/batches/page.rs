//! Pages of lists, as the query of a request asks for them.

use crate::checks::in_range;
use pagetide_base::error::ApiError;
use std::collections::HashMap;

/// The parameters of a request's query.
pub type QueryParameters = HashMap<String, String>;

/// Which part of a list is asked for.
#[derive(Debug, PartialEq)]
pub struct Page {
    pub limit: usize,
    /// The page begins behind this one.
    pub after: Option<PagePlace>,
    /// The page ends in front of this one.
    pub before: Option<PagePlace>,
}

/// An item, and the parameter that names it.
#[derive(Debug, PartialEq)]
pub struct PagePlace {
    param: &'static str,
    id: String,
}

impl Page {
    /// `after` and `before`: the names of these parameters. A list without one has no such parameter.
    pub fn asked(
        query: &QueryParameters,
        (default, most): (usize, usize),
        after: &'static str,
        before: Option<&'static str>,
    ) -> Result<Self, ApiError> {
        let limit = match query.get("limit") {
            None => default,
            Some(text) => {
                let wrong =
                    || ApiError::invalid("limit", format!("limit must be an integer in [1, {most}], got {text:?}"));
                in_range("limit", text.parse().map_err(|_| wrong())?, 1..=most)?
            }
        };
        let place = |param: &'static str| query.get(param).map(|id| PagePlace { param, id: id.clone() });
        Ok(Self { limit, after: place(after), before: before.and_then(place) })
    }

    /// The items of the page, and whether more follow.
    pub fn of<T>(&self, mut items: Vec<T>, id: impl Fn(&T) -> &str) -> Result<(Vec<T>, bool), ApiError> {
        let find = |items: &[T], place: &PagePlace| {
            let index = items.iter().position(|item| id(item) == place.id);
            let PagePlace { param, id } = place;
            index.ok_or_else(|| ApiError::invalid(*param, format!("{param}: the list has no item {id:?}")))
        };
        if let Some(place) = &self.before {
            let end = find(&items, place)?;
            items.truncate(end);
            // The page that is nearest to the item.
            let has_more = items.len() > self.limit;
            items.drain(..items.len().saturating_sub(self.limit));
            return Ok((items, has_more));
        }
        if let Some(place) = &self.after {
            items.drain(..=find(&items, place)?);
        }
        let has_more = items.len() > self.limit;
        items.truncate(self.limit);
        Ok((items, has_more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &[(&str, &str)]) -> Result<(String, bool), ApiError> {
        let query = query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let items = ["a", "b", "c", "d", "e"].to_vec();
        let (items, has_more) = Page::asked(&query, (2, 4), "after", Some("before"))?.of(items, |item| item)?;
        Ok((items.concat(), has_more))
    }

    #[test]
    fn pages_follow_each_other() {
        assert_eq!(page(&[]).unwrap(), ("ab".into(), true));
        assert_eq!(page(&[("after", "b")]).unwrap(), ("cd".into(), true));
        assert_eq!(page(&[("after", "d")]).unwrap(), ("e".into(), false));
        assert_eq!(page(&[("after", "e")]).unwrap(), (String::new(), false));
        assert_eq!(page(&[("limit", "4"), ("after", "a")]).unwrap(), ("bcde".into(), false));
        assert_eq!(page(&[("before", "d")]).unwrap(), ("bc".into(), true));
        assert_eq!(page(&[("before", "b")]).unwrap(), ("a".into(), false));
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (name, value) in [("limit", "0"), ("limit", "5"), ("limit", "x"), ("after", "z"), ("before", "")] {
            assert_eq!(page(&[(name, value)]).unwrap_err().param.as_deref(), Some(name), "{name}={value}");
        }
    }
}
