//! Failures of downloads, and what the user can do about them.

use super::request::HubRequest;
use hf_hub::api::tokio::ApiError;
use pagetide_base::error::StartError;
use reqwest::StatusCode;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

#[derive(Debug)]
pub enum Failure {
    /// There is no such model, or the token has no access. The hub does not say which.
    NoModel,
    /// The terms of the model have to be accepted first.
    Gated,
    BadToken,
    NoRevision,
    NoConfig,
    /// The weights are only in these files.
    NoSafetensors {
        files: Vec<String>,
    },
    /// The model is in GGUF files, and in none of safetensors.
    OnlyGguf,
    /// No GGUF file has the quantisation, or there are several and none was asked for.
    NoQuant {
        quant: Option<String>,
        found: Vec<String>,
    },
    /// A part of a GGUF model is not there.
    NoSplit(String),
    BadIndex(PathBuf),
    NoShard(String),
    /// `HF_HUB_OFFLINE` is set.
    Offline,
    /// The connection failed.
    Network(String),
    Status(StatusCode),
    /// An unexpected answer.
    Answer(String),
    Disk(io::Error),
    /// Another program holds the lock on a file.
    Locked(PathBuf),
}

impl Failure {
    /// The failure that an answer's status and headers mean.
    pub fn of_answer(status: StatusCode, header: impl Fn(&str) -> Option<String>) -> Self {
        let code = header("x-error-code").unwrap_or_default();
        let message = header("x-error-message").unwrap_or_default();
        match code.as_str() {
            "GatedRepo" => Self::Gated,
            "RevisionNotFound" => Self::NoRevision,
            "RepoNotFound" => Self::NoModel,
            _ if message.contains("Invalid credentials") => Self::BadToken,
            // Without a token, the hub gives this answer for a model that does not exist.
            _ if [StatusCode::UNAUTHORIZED, StatusCode::NOT_FOUND].contains(&status) => Self::NoModel,
            _ if status == StatusCode::FORBIDDEN => Self::Gated,
            _ => Self::Status(status),
        }
    }

    /// A failed download of a file. The model exists, because its files have been listed.
    pub fn of_download(error: ApiError) -> Self {
        match error {
            ApiError::RequestError(error) => match error.status() {
                Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Self::Gated,
                _ => error.into(),
            },
            ApiError::IoError(error) => Self::Disk(error),
            ApiError::LockAcquisition(path) => Self::Locked(path),
            ApiError::TooManyRetries(error) => Self::of_download(*error),
            other => Self::Answer(other.to_string()),
        }
    }

    /// The hub was not asked, or could not be; or the cache cannot be written.
    pub fn is_no_answer(&self) -> bool {
        matches!(self, Self::Offline | Self::Network(_) | Self::Disk(_))
    }

    /// May be gone a moment later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Network(_) | Self::Locked(_) => true,
            Self::Status(status) => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            _ => false,
        }
    }

    /// The message for the user: what happened, and what to do.
    pub fn of(&self, hub: &HubRequest) -> StartError {
        let HubRequest { access, model, revision, .. } = hub;
        let (endpoint, cache) = (&access.endpoint, access.cache.display());
        let page = format!("{endpoint}/{model}");
        let has_token = access.token.is_some();
        let elsewhere = || {
            format!(
                "On a machine with a network, run 'hf download {model} --local-dir DIR', copy DIR here and give \
                 it as --model; or copy the folder {} into {cache}",
                hub.folder_name()
            )
        };
        StartError::new(match self {
            Self::NoModel => format!(
                "model: there is no directory '{model}', and {endpoint} shows no model of that name{}. {}",
                if has_token { " to this token" } else { "" },
                if has_token {
                    "Check the name, and whether the token may read it"
                } else {
                    "Check the name; if the model is private, set HF_TOKEN to a token that may read it"
                }
            ),
            Self::Gated if has_token => {
                format!("model: '{model}' is gated, and the account of this token has no access: ask for it at {page}")
            }
            Self::Gated => format!(
                "model: '{model}' is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account, \
                 or run 'hf auth login'"
            ),
            Self::BadToken => format!(
                "model: {endpoint} does not know the token of HF_TOKEN or of 'hf auth login': make a new one, or \
                 unset it"
            ),
            Self::NoRevision => {
                format!("model.revision: '{model}' has no branch, tag or commit '{revision}': see {page}")
            }
            Self::NoConfig => format!("model: '{model}' holds no config.json at {revision}: see {page}"),
            Self::NoSafetensors { files } => format!(
                "model: '{model}' has no model.safetensors{}; only safetensors can be read: see {page} for a \
                 converted one",
                if files.is_empty() { String::new() } else { format!(", but {}", files.join(", ")) }
            ),
            Self::OnlyGguf => format!("model: '{model}' holds GGUF files only: see {page}"),
            Self::NoQuant { found, .. } if found.is_empty() => {
                format!("model: '{model}' holds no GGUF files at {revision}: see {page}")
            }
            Self::NoQuant { quant, found } => format!(
                "model: '{model}' {}; there are {}: give one as {model}:{}",
                match quant {
                    Some(quant) => format!("has no GGUF file of {quant}"),
                    None => "has GGUF files of several quantisations".into(),
                },
                found.join(", "),
                found[0]
            ),
            Self::NoSplit(file) => {
                format!("model: '{model}' has other parts of the GGUF file {file}, but not this one")
            }
            Self::BadIndex(path) => format!("model: {}: no index of safetensors files", path.display()),
            Self::NoShard(shard) => format!("model: '{model}' lists {shard} in its index, but has no such file"),
            Self::Offline => format!(
                "model: HF_HUB_OFFLINE is set, and '{model}' at {revision} is missing or incomplete in the cache \
                 {cache}. {}",
                elsewhere()
            ),
            Self::Network(why) => format!(
                "model: '{model}' at {revision} is missing or incomplete in the cache {cache}, and {endpoint} \
                 cannot be reached: {why}. Files that were downloaded are kept. {}",
                elsewhere()
            ),
            Self::Disk(error) if error.kind() == ErrorKind::StorageFull => format!(
                "model: the disk of the cache {cache} is full. Free some space, or set HF_HUB_CACHE to a folder \
                 on another disk. Files that were downloaded are kept"
            ),
            Self::Disk(error) => {
                format!("model: cannot write to the cache {cache}: {error}. HF_HUB_CACHE can name another folder")
            }
            other => format!("model: cannot fetch '{model}' from {endpoint}: {other}"),
        })
    }
}

/// A short description, for the log.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoModel => f.write_str("no such model"),
            Self::Gated => f.write_str("the model is gated"),
            Self::BadToken => f.write_str("the token is not known"),
            Self::NoRevision => f.write_str("no such revision"),
            Self::NoConfig => f.write_str("no config.json"),
            Self::NoSafetensors { .. } => f.write_str("no safetensors"),
            Self::OnlyGguf => f.write_str("only GGUF files"),
            Self::NoQuant { found, .. } => write!(f, "no such quantisation among {}", found.join(", ")),
            Self::NoSplit(file) => write!(f, "{file} is missing"),
            Self::BadIndex(path) => write!(f, "{} is no index", path.display()),
            Self::NoShard(shard) => write!(f, "{shard} is missing"),
            Self::Offline => f.write_str("HF_HUB_OFFLINE is set"),
            Self::Network(why) => f.write_str(why),
            Self::Status(status) => write!(f, "it answers {status}"),
            Self::Answer(what) => write!(f, "an unexpected answer: {what}"),
            Self::Disk(error) => write!(f, "the cache cannot be written: {error}"),
            Self::Locked(path) => write!(f, "another program holds {}", path.display()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Disk(error)
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        match error.status() {
            Some(status) => Self::Status(status),
            None if error.is_builder() || error.is_redirect() => Self::Answer(causes(&error)),
            None => Self::Network(causes(&error)),
        }
    }
}

/// An error with its causes, which reqwest's own text leaves out.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text += &format!(": {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::access::HubAccess;
    use super::*;
    use std::sync::Arc;

    fn hub(token: Option<&str>) -> HubRequest {
        let access = HubAccess {
            endpoint: "https://huggingface.co".into(),
            cache: "/cache".into(),
            token: token.map(str::to_owned),
            offline: false,
        };
        HubRequest { access, model: "o/n".into(), revision: "main".into(), progress: Arc::new(|_, _| {}) }
    }

    #[test]
    fn a_failed_download_is_classified_by_its_code_then_by_its_status() {
        let of = |status: u16, code: &str, message: &str| {
            let header = |name: &str| Some(if name == "x-error-code" { code } else { message }.to_owned());
            Failure::of_answer(StatusCode::from_u16(status).unwrap(), header).of(&hub(None)).to_string()
        };
        assert!(of(401, "GatedRepo", "").contains("accept its terms at https://huggingface.co/o/n"));
        assert!(of(403, "", "").contains("accept its terms"));
        assert!(of(401, "RepoNotFound", "").contains("no model of that name. Check the name; if the model is private"));
        assert!(of(401, "", "Invalid username or password.").contains("no model of that name"));
        assert!(of(404, "RevisionNotFound", "").contains("model.revision: 'o/n' has no branch, tag or commit 'main'"));
        assert!(of(401, "", "Invalid credentials in Authorization header").contains("does not know the token"));
        assert!(of(503, "", "").contains("it answers 503"));
    }

    #[test]
    fn the_advice_depends_on_the_token_and_never_shows_it() {
        for failure in [Failure::NoModel, Failure::Gated, Failure::BadToken] {
            let text = failure.of(&hub(Some("secret"))).to_string();
            assert!(text.contains("token") && !text.contains("secret"), "{text}");
        }
        assert!(Failure::Gated.of(&hub(Some("secret"))).to_string().contains("has no access: ask for it"));
    }

    #[test]
    fn a_full_disk_is_told_from_one_that_cannot_be_written() {
        let text = |kind: ErrorKind| Failure::from(io::Error::from(kind)).of(&hub(None)).to_string();
        assert!(text(ErrorKind::StorageFull).contains("the disk of the cache /cache is full"));
        assert!(text(ErrorKind::PermissionDenied).contains("cannot write to the cache /cache: permission denied"));
    }
}
