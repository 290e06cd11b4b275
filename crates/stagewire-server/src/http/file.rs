//! Files that the server keeps, as answers.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;

/// An answer that is a file: data, never a page of this server.
pub(super) fn response(body: Body, nbytes: u64, media_type: &str, name: &str) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    let value = |text: &str| HeaderValue::from_str(text);
    headers.insert(header::CONTENT_LENGTH, nbytes.into());
    headers.insert(
        header::CONTENT_TYPE,
        value(media_type).unwrap_or(HeaderValue::from_static("application/octet-stream")),
    );
    if let Ok(disposition) = value(&disposition(media_type, name)) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    response
}

/// Pictures and films may be shown; everything else is saved. The name is encoded as RFC 8187 says.
fn disposition(media_type: &str, name: &str) -> String {
    let kind = media_type.split('/').next().unwrap_or_default();
    let shown = matches!(kind, "image" | "video" | "audio");
    let encoded: String = name
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect();
    format!(
        "{}; filename*=UTF-8''{encoded}",
        if shown { "inline" } else { "attachment" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_cannot_break_out_of_the_header() {
        assert_eq!(
            disposition("video/mp4", "a red cat.mp4"),
            "inline; filename*=UTF-8''a%20red%20cat.mp4"
        );
        assert_eq!(
            disposition("text/html", "x\"\r\n/ü"),
            "attachment; filename*=UTF-8''x%22%0D%0A%2F%C3%BC"
        );
    }
}
