//! A prefix that paths may have (`server.root_path`).

use actix_web::dev::ServiceRequest;
use actix_web::http::Uri;
use actix_web::http::uri::PathAndQuery;
use std::sync::Arc;

/// Empty, or a path without a slash at its end.
#[derive(Clone, Debug)]
pub struct RootPath(Arc<str>);

impl RootPath {
    pub fn new(path: &str) -> Self {
        Self(path.into())
    }

    /// What the paths of the API's description are below.
    pub fn url(&self) -> &str {
        if self.0.is_empty() { "/" } else { &self.0 }
    }

    /// The request has its path without the prefix from now on. Other paths stay as they are.
    pub fn cut_off(&self, request: &mut ServiceRequest) {
        let Some(rest) = self.rest_of(request.uri().path_and_query().map_or("", PathAndQuery::as_str)) else { return };
        let mut parts = request.uri().clone().into_parts();
        // What remains of a path is one, so neither fails.
        let Ok(rest) = rest.parse() else { return };
        parts.path_and_query = Some(rest);
        let Ok(uri) = Uri::from_parts(parts) else { return };
        request.match_info_mut().get_mut().update(&uri);
        request.head_mut().uri = uri;
    }

    /// `path`, which may have a query, without the prefix.
    fn rest_of(&self, path: &str) -> Option<String> {
        if self.0.is_empty() {
            return None;
        }
        match path.strip_prefix(&*self.0)? {
            rest if rest.starts_with('/') => Some(rest.to_owned()),
            rest if rest.is_empty() || rest.starts_with('?') => Some(format!("/{rest}")),
            // Another path that begins with the same letters.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    #[test]
    fn the_prefix_is_cut_off() {
        let root = RootPath::new("/llm");
        for (path, rest) in [
            ("/llm/v1/models", "/v1/models"),
            ("/llm/v1/models?a=/llm/b", "/v1/models?a=/llm/b"),
            ("/llm/llm/health", "/llm/health"),
            ("/llm", "/"),
            ("/llm?a=1", "/?a=1"),
            ("/llm//health", "//health"),
            ("/v1/models", "/v1/models"),
            ("/llms/health", "/llms/health"),
            ("/", "/"),
        ] {
            let mut request = TestRequest::with_uri(path).to_srv_request();
            root.cut_off(&mut request);
            assert_eq!(request.uri().to_string(), rest, "{path}");
            assert_eq!(request.match_info().unprocessed(), rest.split('?').next().unwrap(), "{path}");
        }
        let mut request = TestRequest::with_uri("/llm/health").to_srv_request();
        RootPath::new("").cut_off(&mut request);
        assert_eq!(request.path(), "/llm/health");
        assert_eq!((RootPath::new("").url(), root.url()), ("/", "/llm"));
    }
}
