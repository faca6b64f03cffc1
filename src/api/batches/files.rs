//! OpenAI's files.

use super::page::{Page, QueryParameters};
use crate::checks::{in_range, one_of};
use pagetide_base::error::ApiError;
use pagetide_batches::file::{FileRecord, Purpose};
use serde::Serialize;
use utoipa::ToSchema;

const MAX_LIMIT: usize = 10_000;
const MIN_EXPIRES_S: i64 = 3600;
const MAX_EXPIRES_S: i64 = 2_592_000;

#[derive(Serialize, ToSchema)]
pub struct FileObject {
    id: String,
    /// Always file.
    object: &'static str,
    bytes: u64,
    /// Unix time.
    created_at: u64,
    /// Unix time.
    expires_at: u64,
    filename: String,
    /// batch, or batch_output.
    purpose: &'static str,
    /// Always processed.
    status: &'static str,
}

impl From<FileRecord> for FileObject {
    fn from(file: FileRecord) -> Self {
        Self {
            id: file.id,
            object: "file",
            bytes: file.bytes,
            created_at: file.created_at,
            expires_at: file.expires_at,
            filename: file.filename,
            purpose: file.purpose.name(),
            status: "processed",
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct FileList {
    /// Always list.
    object: &'static str,
    data: Vec<FileObject>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

#[derive(Serialize, ToSchema)]
pub struct FileDeleted {
    id: String,
    /// Always file.
    object: &'static str,
    deleted: bool,
}

impl FileDeleted {
    pub fn new(id: String) -> Self {
        Self { id, object: "file", deleted: true }
    }
}

/// The page of `files` (oldest first) that a query asks for.
pub fn list(query: &QueryParameters, mut files: Vec<FileRecord>) -> Result<FileList, ApiError> {
    let order = query.get("order").map(String::as_str);
    one_of("order", order, &["asc", "desc"])?;
    let page = Page::asked(query, (MAX_LIMIT, MAX_LIMIT), "after", None)?;
    if let Some(purpose) = query.get("purpose") {
        files.retain(|file| file.purpose.name() == purpose);
    }
    if order != Some("asc") {
        files.reverse();
    }
    let (files, has_more) = page.of(files, |file| &file.id)?;
    let id = |file: Option<&FileRecord>| file.map(|file| file.id.clone());
    let (first_id, last_id) = (id(files.first()), id(files.last()));
    Ok(FileList {
        object: "list",
        data: files.into_iter().map(FileObject::from).collect(),
        first_id,
        last_id,
        has_more,
    })
}

/// The fields of a form that uploads a file, besides the file.
#[derive(Debug, Default)]
pub struct UploadFields {
    pub purpose: Option<String>,
    pub anchor: Option<String>,
    pub seconds: Option<String>,
}

impl UploadFields {
    /// Where the form's field `name` goes; `None`: there is no such field.
    pub fn place(&mut self, name: &str) -> Option<&mut Option<String>> {
        match name {
            "purpose" => Some(&mut self.purpose),
            "expires_after[anchor]" => Some(&mut self.anchor),
            "expires_after[seconds]" => Some(&mut self.seconds),
            _ => None,
        }
    }

    /// Seconds that the file is to be kept; `None`: as long as this server keeps files.
    pub fn check(&self) -> Result<Option<u64>, ApiError> {
        let purpose = self.purpose.as_deref().ok_or_else(|| ApiError::invalid("purpose", "purpose is required"))?;
        one_of("purpose", Some(purpose), &[Purpose::Batch.name()])?;
        let seconds = self.seconds.as_deref().map(|text| {
            let wrong = || {
                ApiError::invalid(
                    "expires_after.seconds",
                    format!("expires_after.seconds must be an integer, got {text:?}"),
                )
            };
            text.parse::<i64>().map_err(|_| wrong())
        });
        expires_after(self.anchor.as_deref(), seconds.transpose()?, "expires_after")
    }
}

/// Checks when a file is to expire. `path`: the field that says it.
pub fn expires_after(anchor: Option<&str>, seconds: Option<i64>, path: &str) -> Result<Option<u64>, ApiError> {
    one_of(&format!("{path}.anchor"), anchor, &["created_at"])?;
    match (anchor, seconds) {
        (None, None) => Ok(None),
        (None, _) => Err(ApiError::invalid(format!("{path}.anchor"), format!("{path}.anchor is required"))),
        (_, None) => Err(ApiError::invalid(format!("{path}.seconds"), format!("{path}.seconds is required"))),
        (_, Some(seconds)) => {
            let seconds = in_range(&format!("{path}.seconds"), seconds, MIN_EXPIRES_S..=MAX_EXPIRES_S)?;
            Ok(Some(seconds.unsigned_abs()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_an_upload_are_checked() {
        let fields = |given: &[(&str, &str)]| {
            let mut fields = UploadFields::default();
            for (name, value) in given {
                *fields.place(name).unwrap() = Some((*value).to_owned());
            }
            fields.check()
        };
        assert_eq!(fields(&[("purpose", "batch")]).unwrap(), None);
        let (anchor, seconds) = ("expires_after[anchor]", "expires_after[seconds]");
        assert_eq!(fields(&[("purpose", "batch"), (anchor, "created_at"), (seconds, "3600")]).unwrap(), Some(3600));
        for (given, param) in [
            (vec![], "purpose"),
            (vec![("purpose", "vision")], "purpose"),
            (vec![("purpose", "batch"), (anchor, "now")], "expires_after.anchor"),
            (vec![("purpose", "batch"), (seconds, "3600")], "expires_after.anchor"),
            (vec![("purpose", "batch"), (anchor, "created_at")], "expires_after.seconds"),
            (vec![("purpose", "batch"), (anchor, "created_at"), (seconds, "1")], "expires_after.seconds"),
            (vec![("purpose", "batch"), (anchor, "created_at"), (seconds, "x")], "expires_after.seconds"),
        ] {
            assert_eq!(fields(&given).unwrap_err().param.as_deref(), Some(param), "{given:?}");
        }
        assert!(UploadFields::default().place("file_id").is_none());
    }
}
