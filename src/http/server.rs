//! The HTTP server: settings, and what is done to every request.

use crate::actors::live::LiveServer;
use crate::actors::runtime::RuntimeHandle;
use crate::actors::tuner::Tuner;
use crate::config::ServerConfig;
use crate::error::{ApiError, StartError};
use crate::http::anthropic;
use crate::http::auth::Keys;
use crate::http::compression::{encodings, without_identity};
use crate::http::console::Feed;
use crate::http::cors::cors;
use crate::http::openai::response::new_id;
use crate::http::routes::{Access, access_to, configure, metrics_path};
use crate::metrics;
use actix_web::body::MessageBody;
use actix_web::dev::{Extensions, Server, ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::{Compress, Next, from_fn};
use actix_web::web::{Data, PayloadConfig};
use actix_web::{App, Error, HttpMessage, HttpServer, ResponseError};
use std::net::TcpListener;
use std::rc::Rc;
use std::time::{Duration, Instant};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// A client's own request id is echoed up to this length.
const MAX_REQUEST_ID_BYTES: usize = 256;
/// Idle connections are kept for this long: longer than a load balancer's usual minute, so that it is not us who
/// closes one just as a request comes.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// Opens the configured address.
pub fn listen(config: &ServerConfig) -> Result<TcpListener, StartError> {
    TcpListener::bind((config.host.as_str(), config.port)).map_err(|error| {
        StartError::new(format!("cannot listen on {}:{} (server.host, server.port): {error}", config.host, config.port))
    })
}

/// Serves on `listener` until the returned server's handle is told to stop: a graceful stop lets answers under way
/// end, for `server.drain_timeout_s` at most. The server runs while it is awaited or spawned. `tuner` changes the settings
/// of `handle`'s engine, and those here.
pub fn serve(handle: RuntimeHandle, tuner: Tuner, listener: TcpListener) -> Result<Server, StartError> {
    let config = handle.model().server.get();
    let keys = Keys::new(&config);
    let renewed = keys.clone();
    tuner.on_change(move |config| renewed.renew(&config.server));
    let (handle, tuner, server_config) = (Data::new(handle), Data::new(tuner), config.clone());
    let feed = Data::new(Feed::default());
    let app = move || {
        let (keys, live) = (keys.clone(), handle.model().server.clone());
        // The last is the outermost.
        App::new()
            .app_data(handle.clone())
            .app_data(tuner.clone())
            .app_data(keys.clone())
            .app_data(feed.clone())
            .wrap(from_fn(encodings))
            .wrap(Compress::default())
            .wrap(from_fn(without_identity))
            .wrap(from_fn(move |request, next| with_limit(live.clone(), request, next)))
            .wrap(from_fn(move |request, next| with_key(keys.clone(), request, next)))
            .wrap(cors(&server_config))
            .wrap(from_fn(around))
            .configure(configure)
    };
    let server = HttpServer::new(app)
        .workers(config.num_workers())
        .keep_alive(KEEP_ALIVE)
        .tcp_nodelay(true)
        // A client that closes its side is gone: its request is dropped, which cancels it.
        .h1_allow_half_closed(false)
        .shutdown_timeout(config.drain_timeout_s)
        .disable_signals()
        .listen(listener)?;
    Ok(server.run())
}

/// Bounds the request's body.
async fn with_limit(
    server: LiveServer,
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let mut data = Extensions::new();
    data.insert(PayloadConfig::new(server.get().max_body_bytes));
    request.add_data_container(Rc::new(data));
    next.call(request).await
}

/// Lets a request with a key in, and all to paths that are open; who sent it goes with it.
async fn with_key(
    keys: Keys,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    let caller = keys.get().0.caller(request.headers());
    // Handlers of the admin's paths look at the key themselves.
    if caller.is_none() && access_to(request.path()) == Access::Key {
        return Ok(request.into_response(ApiError::unauthorized().error_response()));
    }
    request.extensions_mut().insert(caller.unwrap_or_default());
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// What is done to every request: request ids, counting, the log.
async fn around(request: ServiceRequest, next: Next<impl MessageBody + 'static>) -> Result<ServiceResponse, Error> {
    let started = Instant::now();
    let id = request_id(request.headers());
    let is_anthropics = anthropic::is_spoken(request.path(), request.headers());
    let mut answer = next.call(request).await?.map_into_boxed_body();
    if is_anthropics {
        answer = anthropic::error::in_its_format(answer, &id);
    }
    answer.headers_mut().insert(REQUEST_ID, id.clone());
    let status = answer.status().as_u16();
    metrics::http_request(metrics_path(answer.request().match_pattern().as_deref()), status);
    tracing::debug!(
        method = %answer.request().method(),
        path = answer.request().path(),
        status,
        elapsed_ms = started.elapsed().as_millis() as u64,
        request_id = id.to_str().unwrap_or_default(),
        "answered"
    );
    Ok(answer)
}

/// The client's own id, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID);
    let usable = given.filter(|id| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len()) && id.to_str().is_ok());
    usable
        .cloned()
        .unwrap_or_else(|| HeaderValue::try_from(new_id("req")).expect("an id has only letters, digits and a hyphen"))
}
