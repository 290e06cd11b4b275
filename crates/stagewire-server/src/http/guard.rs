//! Who may ask, under which name, and in which form.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use stagewire_core::ErrorClass;

use super::{App, error::ApiError, inputs};
use crate::secret::{Secret, Shown};

/// Paths that need no token: they say nothing but that the server lives.
const OPEN: [&str; 2] = ["/healthz", "/readyz"];
/// The service of the workers, which have a token of their own.
const GRPC: &str = "/stagewire.v1.Orchestrator/";

/// The rules.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    /// Bearer token of clients, where one is required.
    token: Option<Secret>,
    /// Names besides the loopback ones under which the server may be addressed; `None` is any.
    hosts: Option<Vec<String>>,
}

impl Guard {
    /// The rules of a server that listens there.
    ///
    /// On a loopback address only loopback names and `allowed` pass, so that no web page can reach the server through
    /// a name of its own that points here. Elsewhere the token does that, and names are checked only where some are
    /// allowed.
    pub(crate) fn new(token: Option<Secret>, listen: SocketAddr, allowed: &[String]) -> Self {
        let mut hosts: Vec<String> = allowed.iter().map(|host| plain(host)).collect();
        let any = !listen.ip().is_loopback() && hosts.is_empty();
        hosts.push(listen.ip().to_string());
        Self {
            token,
            hosts: (!any).then_some(hosts),
        }
    }

    fn allows_host(&self, host: &str) -> bool {
        let Some(hosts) = &self.hosts else { return true };
        let host = plain(host);
        let loopback = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        loopback || host == "localhost" || hosts.contains(&host)
    }

    fn check_host(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let header = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let host = uri
            .authority()
            .map(|authority| authority.as_str())
            .or(header)
            .unwrap_or_default();
        if self.allows_host(host) {
            return Ok(());
        }
        let host: String = host.chars().take(100).collect();
        Err(denied(
            "http.host",
            format!(
                "this server does not answer to the name {host:?}; use 127.0.0.1, or add the name to \"allowed-hosts\" in [server]"
            ),
        ))
    }

    /// A page of somebody else's site must not act through the browser of who visits it.
    fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(origin) = headers.get(header::ORIGIN) else {
            return Ok(());
        };
        let origin = origin.to_str().unwrap_or_default();
        let host = origin.split_once("://").map(|(_, host)| host);
        if host.is_some_and(|host| self.allows_host(host)) {
            return Ok(());
        }
        let origin: String = origin.chars().take(100).collect();
        Err(denied(
            "http.origin",
            format!("requests from pages of {origin:?} are not taken"),
        ))
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(right) = &self.token else { return Ok(()) };
        let shown = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let problem = match right.judge(shown) {
            Shown::Right => return Ok(()),
            Shown::Wrong => "this token is wrong",
            Shown::Nothing => "a token is required",
        };
        Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            ErrorClass::Unauthenticated,
            "http.token",
            format!("{problem}; send `Authorization: Bearer TOKEN` with the content of the server's \"token-file\""),
        ))
    }
}

fn denied(reason: &str, message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, ErrorClass::Denied, reason, message)
}

/// A host as it is compared: no port, no brackets, no final dot, lower case.
fn plain(host: &str) -> String {
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        // More than one colon is an IPv6 address without brackets.
        None if host.matches(':').count() == 1 => host.split(':').next().unwrap_or_default(),
        None => host,
    };
    host.trim_end_matches('.').to_ascii_lowercase()
}

/// Only JSON is taken, but for inputs; a form of a web page cannot send it unasked.
fn check_content_type(request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let shown = headers
        .get(header::CONTENT_TYPE)
        .map(|value| value.to_str().unwrap_or_default());
    let empty = http_body_is_empty(request);
    let json = |shown: &str| {
        let essence = shown.split(';').next().unwrap_or_default().trim();
        essence.eq_ignore_ascii_case("application/json")
    };
    match shown {
        None if empty => Ok(()),
        Some(shown) if json(shown) => Ok(()),
        shown => Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorClass::Invalid,
            "http.content_type",
            format!(
                "the body must be JSON: send `Content-Type: application/json`, not {:?}",
                shown.unwrap_or("none").chars().take(100).collect::<String>()
            ),
        )),
    }
}

fn http_body_is_empty(request: &Request) -> bool {
    use axum::body::HttpBody;
    request.body().is_end_stream()
}

pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    let guard = &app.guard;
    let path = request.uri().path();
    guard.check_host(request.uri(), request.headers())?;
    if path.starts_with(GRPC) {
        return Ok(next.run(request).await);
    }
    if !OPEN.contains(&path) {
        guard.check_token(request.headers())?;
    }
    if *request.method() != Method::GET && *request.method() != Method::HEAD {
        guard.check_origin(request.headers())?;
        if path != inputs::PATH {
            check_content_type(&request)?;
        }
    }
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_server_answers_to_loopback_names_only() {
        let guard = Guard::new(None, ([127, 0, 0, 1], 7070).into(), &["gpu1.lan".to_owned()]);
        for good in [
            "localhost",
            "LOCALHOST:7070",
            "127.0.0.1:7070",
            "[::1]:7070",
            "127.8.8.8",
            "gpu1.lan:80",
            "gpu1.lan.",
        ] {
            assert!(guard.allows_host(good), "{good}");
        }
        for bad in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]:1",
            "2130706433",
        ] {
            assert!(!guard.allows_host(bad), "{bad}");
        }
    }

    #[test]
    fn elsewhere_names_are_checked_where_some_are_allowed() {
        let listen = ([0, 0, 0, 0], 7070).into();
        assert!(Guard::new(Some(Secret::new(String::new())), listen, &[]).allows_host("gpu1.lan"));
        let guard = Guard::new(Some(Secret::new(String::new())), listen, &["gpu1.lan".to_owned()]);
        assert!(guard.allows_host("gpu1.lan:7070") && !guard.allows_host("gpu2.lan"));
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let guard = Guard::new(None, ([127, 0, 0, 1], 7070).into(), &[]);
        let check = |origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            guard.check_origin(&headers).is_ok()
        };
        assert!(check("http://localhost:3000") && check("http://127.0.0.1:7070"));
        assert!(!check("https://evil.example") && !check("null"));
    }
}
