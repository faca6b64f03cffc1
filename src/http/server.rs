//! The HTTP server: its settings, and the middleware of every request.

use crate::account::{Account, AccountedBody, Closing, Reporter};
use crate::auth::Keys;
use crate::batches::{Batches, runner};
use crate::body::Parsing;
use crate::compression::{encodings, without_identity};
use crate::connection::Connection;
use crate::console::Feed;
use crate::cors::{cors, deny_quietly};
use crate::error::{HttpError, error_response};
use crate::load_metrics::{ReportFormat, add_report};
use crate::root_path::RootPath;
use crate::routes::{Descriptions, access_to, configure, format_of, is_open_to_all_ports, is_private, matched_path};
use crate::surfaces::sglang::HealthChecks;
use crate::timeouts::{end_stalled_connections, timed_body};
use crate::tls::Certificate;
use crate::unix_socket::{self, SocketFile};
use actix_web::body::MessageBody;
use actix_web::dev::{Server, ServerHandle, ServiceRequest, ServiceResponse};
use actix_web::error::QueryPayloadError;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Method};
use actix_web::middleware::{Compress, Next, from_fn};
use actix_web::web::{Data, QueryConfig};
use actix_web::{App, Error, HttpMessage, HttpServer};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::id::random_hex;
use pagetide_api::live_server::LiveServer;
use pagetide_api::openapi::PathAccess;
use pagetide_api::sglang::session::Sessions;
use pagetide_base::error::{ApiError, StartError};
use pagetide_config::{Config, Dialect, ServerConfig, Surface};
use pagetide_metrics as metrics;
use pagetide_telemetry::trace::Tracer;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tracing::Instrument;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Time to finish writing when the server ends.
pub const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long answers may take when a server ends gracefully. This is long: draining ends the server before.
const CUT_BY_DRAIN: Duration = Duration::from_secs(2 * 86_400);
/// The limit of a TLS handshake if there is to be none: actix has a short default.
const ANY_TIME: Duration = Duration::from_secs(86_400);
/// A client's own request id is echoed up to this length.
const MAX_REQUEST_ID_BYTES: usize = 256;

/// The addresses that the server listens on, and its certificate.
pub struct Listeners {
    public: PublicListener,
    /// Only for `/metrics` and `/admin`.
    admin: Option<TcpListener>,
    certificate: Option<Certificate>,
}

enum PublicListener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Listeners {
    /// Where clients find it.
    pub fn url(&self) -> std::io::Result<String> {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        match &self.public {
            PublicListener::Tcp(listener) => Ok(format!("{scheme}://{}", listener.local_addr()?)),
            PublicListener::Unix(_, file) => Ok(format!("unix:{}", file.path().display())),
        }
    }

    pub fn admin_addr(&self) -> std::io::Result<Option<SocketAddr>> {
        self.admin.as_ref().map(TcpListener::local_addr).transpose()
    }
}

/// Opens the configured addresses, and reads the certificate if there is one.
pub fn listen(config: &Config) -> Result<Listeners, StartError> {
    let server = &config.server;
    let public = if server.unix_socket.is_empty() {
        let failed = |error| {
            let (host, port) = (&server.host, server.port);
            StartError::new(format!("cannot listen on {host}:{port} (server.host, server.port): {error}"))
        };
        PublicListener::Tcp(TcpListener::bind((server.host.as_str(), server.port)).map_err(failed)?)
    } else {
        let path = &server.unix_socket;
        let failed = |error| StartError::new(format!("cannot listen on {path} (server.unix_socket): {error}"));
        let (listener, file) = unix_socket::listen(path.as_ref()).map_err(failed)?;
        PublicListener::Unix(listener, file)
    };
    let bind = |addr: &String| {
        let failed = |error| StartError::new(format!("cannot listen on {addr} (server.admin_listen): {error}"));
        TcpListener::bind(addr).map_err(failed)
    };
    let admin = Some(&server.admin_listen).filter(|addr| !addr.is_empty()).map(bind).transpose()?;
    if server.write_timeout_s > 0 {
        let public = match &public {
            PublicListener::Tcp(listener) => Some(listener),
            PublicListener::Unix(..) => None,
        };
        for listener in public.into_iter().chain(&admin) {
            end_stalled_connections(listener, Duration::from_secs(server.write_timeout_s))?;
        }
    }
    Ok(Listeners { public, admin, certificate: Certificate::read(server)? })
}

/// The servers on both ports. They run while this is awaited or spawned. The admin's server ends after the public one,
/// so that it answers until then.
#[must_use = "the servers run while this is awaited or spawned"]
pub struct Servers {
    handle: ServerHandle,
    run: Pin<Box<dyn Future<Output = std::io::Result<()>>>>,
}

impl Servers {
    /// `file`: the socket's, which is there as long as the server.
    fn new(public: Server, admin: Option<Server>, file: Option<SocketFile>) -> Self {
        let handle = public.handle();
        let run = async move {
            let _file = file;
            let Some(mut admin) = admin else { return public.await };
            let stopper = admin.handle();
            tokio::select! {
                ended = public => {
                    let (_, _) = tokio::join!(stopper.stop(true), admin);
                    ended
                }
                ended = &mut admin => ended,
            }
        };
        Self { handle, run: Box::pin(run) }
    }

    /// Stops both. A graceful stop lets answers under way on the public port end, however long they take.
    pub fn handle(&self) -> ServerHandle {
        self.handle.clone()
    }
}

impl Future for Servers {
    type Output = std::io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.run.as_mut().poll(cx)
    }
}

/// Serves on `listeners` until the returned handle of the servers stops them. `live_settings` changes the settings of
/// the engine behind `handle` and of this server. `config` holds the settings at the start.
pub fn serve(
    handle: RuntimeHandle,
    live_settings: LiveSettings,
    config: &Config,
    listeners: Listeners,
    tracer: Option<Arc<Tracer>>,
) -> Result<Servers, StartError> {
    let Listeners { public, admin, certificate } = listeners;
    let (keys, reporter) = (Keys::new(config), Arc::new(Reporter::new(config, tracer)));
    let (renewed_keys, renewed_reporter, renewed_certificate) = (keys.clone(), reporter.clone(), certificate.clone());
    live_settings.on_change(move |config| {
        renewed_keys.renew(config);
        renewed_reporter.renew(config);
        if let Some(certificate) = &renewed_certificate {
            certificate.renew(&config.server);
        }
    });
    let has_admin_port = admin.is_some();
    let root_path = RootPath::new(&config.server.root_path);
    let (handle, live_settings, server_config) = (Data::new(handle), Data::new(live_settings), config.server.clone());
    let feed = Data::new(Feed::default());
    let parsing = Data::new(Parsing::new(&config.limits));
    let batches = Batches::open(&config.batches)?;
    if let Some(open) = batches.get() {
        let (handle, live_settings) = (RuntimeHandle::clone(&handle), LiveSettings::clone(&live_settings));
        runner::start(handle, (keys.clone(), reporter.clone()), live_settings, config.limits.clone(), open)?;
    }
    let batches = Data::new(batches);
    let health_checks = Data::new(HealthChecks::default());
    let sessions = Data::new(Sessions::default());
    let surfaces: Arc<[Surface]> = config.server.surfaces.as_slice().into();
    let descriptions = Data::new(Descriptions::new(surfaces.clone(), root_path.clone(), config.server.dialect));
    let app = move |is_admins: bool| {
        let root_path = root_path.clone();
        let origins: Arc<[String]> = server_config.cors_allowed_origins.as_slice().into();
        let (keys, live, reporter) = (keys.clone(), handle.model().server.clone(), reporter.clone());
        let (surfaces, routed, dialect) = (surfaces.clone(), surfaces.clone(), server_config.dialect);
        // The last middleware is the outermost.
        App::new()
            .app_data(handle.clone())
            .app_data(live_settings.clone())
            .app_data(keys.clone())
            .app_data(feed.clone())
            .app_data(QueryConfig::default().error_handler(|error, _| unreadable_query(&error)))
            .app_data(parsing.clone())
            .app_data(batches.clone())
            .app_data(health_checks.clone())
            .app_data(sessions.clone())
            .app_data(descriptions.clone())
            .wrap(from_fn(encodings))
            .wrap(Compress::default())
            .wrap(from_fn(without_identity))
            .wrap(from_fn(move |request, next| with_limit(live.clone(), request, next)))
            .wrap(from_fn(move |request, next| with_key(keys.clone(), request, next)))
            .wrap(from_fn(move |request, next| on_its_port(has_admin_port, is_admins, request, next)))
            .wrap(cors(&server_config))
            .wrap(from_fn(move |request, next| deny_quietly(origins.clone(), request, next)))
            .wrap(from_fn(move |request, next| {
                around(reporter.clone(), surfaces.clone(), dialect, root_path.clone(), request, next)
            }))
            .configure(move |config| configure(config, &routed, dialect))
    };
    let ServerConfig { header_timeout_s, keep_alive_s, .. } = config.server;
    let most_idle = (header_timeout_s > 0).then(|| Duration::from_secs(keep_alive_s + header_timeout_s));
    let new_server = |is_admins: bool, shutdown_timeout: Duration| {
        let app = app.clone();
        HttpServer::new(move || app(is_admins))
            .keep_alive(Duration::from_secs(keep_alive_s))
            .client_request_timeout(Duration::from_secs(header_timeout_s))
            .tls_handshake_timeout(if header_timeout_s > 0 { Duration::from_secs(header_timeout_s) } else { ANY_TIME })
            .on_connect(move |io, data| Connection::open(io, data, most_idle))
            .tcp_nodelay(true)
            // A client that closes its side is gone: its request is dropped, which cancels it.
            .h1_allow_half_closed(false)
            .shutdown_timeout(shutdown_timeout.as_secs())
            .disable_signals()
    };
    let (num_workers, max_connections) = shares(config.limits.max_connections, config.server.num_workers());
    let server = new_server(false, CUT_BY_DRAIN).workers(num_workers).max_connections(max_connections);
    let (server, file) = match (public, certificate) {
        (PublicListener::Tcp(listener), Some(certificate)) => {
            (server.listen_rustls_0_23(listener, certificate.server_config()?)?, None)
        }
        (PublicListener::Tcp(listener), None) => (server.listen(listener)?, None),
        (PublicListener::Unix(listener, file), _) => (server.listen_uds(listener)?, Some(file)),
    };
    // A server of its own, so that clients that take all connections do not keep the operator out.
    let on_admins = |admin| new_server(true, LAST_WORDS).workers(1).max_connections(usize::MAX).listen(admin);
    let admin = admin.map(on_admins).transpose()?;
    Ok(Servers::new(server.run(), admin.map(HttpServer::run), file))
}

fn unreadable_query(error: &QueryPayloadError) -> Error {
    HttpError::from(ApiError::bad_request(format!("the query cannot be read: {error}"))).into()
}

/// The number of workers, and of connections of each. Together they take the configured number of connections, or
/// somewhat fewer.
fn shares(max_connections: usize, num_workers: usize) -> (usize, usize) {
    if max_connections == 0 {
        return (num_workers, usize::MAX);
    }
    let num_workers = num_workers.min(max_connections);
    (num_workers, max_connections / num_workers)
}

/// If the admin's paths have an address of their own: hides them on the public address, and the others on theirs.
async fn on_its_port(
    has_admin_port: bool,
    is_admins: bool,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    if has_admin_port {
        // The path as the router reads it, so that no spelling of a path leads around this check.
        let path = request.match_info().as_str();
        if is_private(path) != is_admins && !is_open_to_all_ports(path) {
            let error = ApiError::not_found(path);
            return Ok(request.into_response(error_response(error)));
        }
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Bounds the time that a body takes to come.
async fn with_limit(
    server: LiveServer,
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let config = server.get();
    if config.body_timeout_s > 0 {
        let payload = request.take_payload();
        request.set_payload(timed_body(payload, Duration::from_secs(config.body_timeout_s)));
    }
    next.call(request).await
}

/// Lets in requests with a key, and all requests to open paths. The client's identity goes with the request.
async fn with_key(
    keys: Keys,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    let known = keys.get();
    let who = known.clients.who(request.headers());
    let may_ask = match access_to(request.path()) {
        PathAccess::Key => who.is_some(),
        PathAccess::KeyOrAdmin => who.is_some() || known.operators.check_admin(request.headers()).is_ok(),
        // Handlers of these check the key themselves.
        PathAccess::Admin | PathAccess::Watcher | PathAccess::Open => true,
    };
    if !may_ask {
        return Ok(request.into_response(error_response(ApiError::unauthorized())));
    }
    let (caller, keyed) = who.unwrap_or_default();
    if let Some(connection) = connection_of(&request)
        && let Err(error) = connection.belong_to(&keyed)
    {
        let mut refused = error_response(error);
        refused.head_mut().set_connection_type(ConnectionType::Close);
        connection.end_with_answer();
        return Ok(request.into_response(refused));
    }
    if let Some(account) = request.extensions().get::<Arc<Account>>() {
        account.set_key(&keyed);
    }
    request.extensions_mut().insert(caller);
    request.extensions_mut().insert(keyed);
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Gives every request its id and its account, and counts it.
async fn around(
    reporter: Arc<Reporter>,
    surfaces: Arc<[Surface]>,
    dialect: Dialect,
    root_path: RootPath,
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    root_path.cut_off(&mut request);
    let id = request_id(request.headers());
    let shown_id = id.to_str().unwrap_or_default();
    let path = matched_path(request.match_pattern().as_deref());
    let account = Account::open(reporter, shown_id, request.method().as_str(), path, request.headers());
    let connection = connection_of(&request);
    // This also closes the account if the client leaves before there is an answer.
    let closing = Closing::new(account.clone(), connection.as_ref().map(Connection::begin_request));
    request.extensions_mut().insert(account.clone());
    let handle: Data<RuntimeHandle> = request.app_data::<Data<RuntimeHandle>>().expect("every app has one").clone();
    let report = ReportFormat::asked(request.headers()).filter(|_| request.method() == Method::POST);
    let format = format_of(&surfaces, dialect, request.path(), request.headers());
    // Only the request tells. actix-http reuses the heads of answers and leaves the HTTP version of the previous answer
    // in them, so every head that was once used for HTTP/1.0 would seem to end its connection.
    let is_clients_last = request.head().connection_type() == ConnectionType::Close;
    let span = tracing::info_span!("request", id = shown_id);
    let mut answer = next.call(request).instrument(span.clone()).await?.map_into_boxed_body();
    if let Some(format) = format {
        answer = format.apply(answer, &id);
    }
    let (path, status) = (matched_path(answer.request().match_pattern().as_deref()), answer.status().as_u16());
    let head = answer.response_mut().head_mut();
    if handle.model().server.get().request_id_headers {
        head.headers_mut().insert(REQUEST_ID, id.clone());
    }
    // Some clients of llama.cpp look for its headers by their exact letters.
    head.set_camel_case_headers(dialect == Dialect::LlamaCpp);
    account.answered(path, status, head.headers_mut());
    if let Some(report) = report.filter(|_| status == 200) {
        add_report(report, &handle, head.headers_mut()).await;
    }
    // The next request needs another connection: the rest of a body that was given up may still come on this one.
    let is_servers_last = handle.is_draining() || status == 408;
    if is_servers_last {
        head.set_connection_type(ConnectionType::Close);
    }
    if let Some(connection) = connection.filter(|_| is_clients_last || is_servers_last) {
        connection.end_with_answer();
    }
    metrics::http_request(path.name, status);
    Ok(answer.map_body(|_, body| AccountedBody::new(body, closing, span)).map_into_boxed_body())
}

/// `None` if a request came on no connection, in a test.
fn connection_of(request: &ServiceRequest) -> Option<Rc<Connection>> {
    request.conn_data::<Rc<Connection>>().cloned()
}

/// The client's own id, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID);
    let usable = given.filter(|id| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len()) && id.to_str().is_ok());
    usable.cloned().unwrap_or_else(|| HeaderValue::try_from(random_hex()).expect("it has only hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_the_maximum_of_connections() {
        assert_eq!(shares(1, 4), (1, 1));
        assert_eq!(shares(3, 4), (3, 1));
        assert_eq!(shares(10, 4), (4, 2));
        assert_eq!(shares(0, 4), (4, usize::MAX));
    }
}
