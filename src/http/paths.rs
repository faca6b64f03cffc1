//! One path of the API: its method, its handler, its keys, its description. The table of all paths is in
//! [`routes`](crate::routes).

use actix_web::Route;
use actix_web::http::Method;
use pagetide_api::openapi::{Operation, PathAccess};

/// The methods there are. HEAD goes with GET.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    Get,
    Post,
    Put,
    Delete,
}

impl Verb {
    pub fn method(self) -> Method {
        match self {
            Verb::Get => Method::GET,
            Verb::Post => Method::POST,
            Verb::Put => Method::PUT,
            Verb::Delete => Method::DELETE,
        }
    }
}

/// A path: its method, its handler, the keys that may use it, and its entry in the API's description.
#[derive(Clone, Copy)]
pub struct ApiPath {
    pub verb: Verb,
    pub path: &'static str,
    /// The path in the router's syntax.
    pub pattern: &'static str,
    pub access: PathAccess,
    pub handler: fn() -> Route,
    pub describe: fn() -> Operation,
}

pub const fn post(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Post, path, pattern: path, access: PathAccess::Key, handler, describe }
}

pub const fn get(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Get, ..post(path, handler, describe) }
}

pub const fn put(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Put, ..post(path, handler, describe) }
}

pub const fn delete(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Delete, ..post(path, handler, describe) }
}

pub const fn for_all(path: ApiPath) -> ApiPath {
    ApiPath { access: PathAccess::Open, ..path }
}

pub const fn also_for_admin(path: ApiPath) -> ApiPath {
    ApiPath { access: PathAccess::KeyOrAdmin, ..path }
}

pub const fn for_admin(path: ApiPath) -> ApiPath {
    ApiPath { access: PathAccess::Admin, ..path }
}

pub const fn for_watchers(path: ApiPath) -> ApiPath {
    ApiPath { access: PathAccess::Watcher, ..path }
}

/// The path that a request has, or `other`: paths that a client made up are no labels of metrics.
#[derive(Clone, Copy, Debug)]
pub struct MatchedPath {
    pub name: &'static str,
    pub access: PathAccess,
}
