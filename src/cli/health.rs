//! `pagetide health`: for containers, whose images have no other HTTP client.

use clap::Args;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::output;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Args)]
pub struct HealthArgs {
    #[command(flatten)]
    config: ConfigOptions,
    /// Check that requests are accepted (/ready), not only that the process answers (/health)
    #[arg(long)]
    ready: bool,
    /// Time to wait for the answer in seconds
    #[arg(long, value_name = "S", default_value_t = 5)]
    timeout: u64,
}

pub fn run(args: &HealthArgs) -> Result<ExitCode, StartError> {
    let resolved = args.config.resolve()?;
    let config = &resolved.config;
    let url = format!("{}/{}", base_url(config), if args.ready { "ready" } else { "health" });
    let failed = |error: reqwest::Error| StartError::new(format!("{url}: {error:#}"));
    let client = reqwest::blocking::Client::builder()
        .timeout(Duration::from_secs(args.timeout))
        .no_proxy()
        // The request goes to this machine, whose certificate is for another name.
        .danger_accept_invalid_certs(true);
    let client = match &*config.server.unix_socket {
        "" => client,
        socket => client.unix_socket(socket),
    };
    let client = client.build().map_err(failed)?;
    // Neither path needs a key. None is sent, because another server might listen there.
    let answer = client.get(&url).send().map_err(failed)?;
    let (status, text) = (answer.status(), answer.text().map_err(failed)?);
    if status.is_success() {
        return output::print(text + "\n");
    }
    Err(StartError::new(format!("{url}: {status}: {text}")))
}

/// An address at which a server with this configuration answers. For a server on all addresses it is the loopback.
fn base_url(config: &Config) -> String {
    let server = &config.server;
    let scheme = if server.tls_cert.is_empty() { "http" } else { "https" };
    let host = match server.host.parse() {
        Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) => Ipv4Addr::LOCALHOST.to_string(),
        Ok(IpAddr::V6(Ipv6Addr::UNSPECIFIED)) => format!("[{}]", Ipv6Addr::LOCALHOST),
        Ok(IpAddr::V6(addr)) => format!("[{addr}]"),
        _ => server.host.clone(),
    };
    format!("{scheme}://{host}:{}", server.port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_looked_for_where_it_would_listen() {
        let url = |host: &str, tls_cert: &str| {
            let mut config = Config::default();
            (config.server.host, config.server.tls_cert) = (host.into(), tls_cert.into());
            base_url(&config)
        };
        assert_eq!(url("0.0.0.0", ""), "http://127.0.0.1:8000");
        assert_eq!(url("::", "cert.pem"), "https://[::1]:8000");
        assert_eq!(url("::1", ""), "http://[::1]:8000");
        assert_eq!(url("server.example", ""), "http://server.example:8000");
    }
}
