//! What the commands need of the runtime and of the HTTP server, where those are not there yet.

use super::progress::LoadProgress;
use crate::actors::runtime::RuntimeHandle;
use crate::config::Config;
use crate::error::{ApiError, StartError};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;

/// What runs, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeSummary {
    /// `cpu`, or the GPU's name.
    pub device: String,
    /// Instruction set of the CPU kernels, or the GPU's architecture.
    pub isa: String,
    pub threads: usize,
    pub dtype: &'static str,
    pub block_size: usize,
    pub block_bytes: usize,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
}

pub enum Runtime {}

impl Runtime {
    pub fn start(_config: Config, _progress: LoadProgress) -> Result<Self, StartError> {
        Err(StartError::new("the engine is not part of this build"))
    }

    pub fn handle(&self) -> RuntimeHandle {
        match *self {}
    }

    pub fn summary(&self) -> RuntimeSummary {
        match *self {}
    }

    /// Admits nothing new and waits until what runs has finished; false if that took longer than `timeout`.
    pub async fn drain(&self, _timeout: Duration) -> bool {
        match *self {}
    }

    pub fn shutdown(self) {
        match self {}
    }
}

/// A bound server: it answers once [`HttpServer::run`] is polled.
pub enum HttpServer {}

impl HttpServer {
    /// `http::serve`: binds `server.host:server.port`; installs no signal handlers.
    pub fn bind(_handle: RuntimeHandle, _config: &Config) -> Result<Self, StartError> {
        Err(StartError::new("the HTTP server is not part of this build"))
    }

    pub fn addrs(&self) -> Vec<SocketAddr> {
        match *self {}
    }

    /// Ends the server when called: open answers are finished first.
    pub fn stopper(&self) -> actix_web::dev::ServerHandle {
        match *self {}
    }

    pub async fn run(self) -> std::io::Result<()> {
        match self {}
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    ChatCompletions,
    Completions,
}

/// `http::openai::complete`
pub async fn complete(_handle: &RuntimeHandle, _endpoint: Endpoint, _body: Value) -> Result<Value, ApiError> {
    Err(ApiError::engine("the API is not part of this build"))
}
