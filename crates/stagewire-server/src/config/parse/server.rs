//! `[server]`.

use std::net::SocketAddr;
use std::time::Duration;

use stagewire_core::ByteCount;
use toml::Spanned;

use super::Source;
use crate::config::{ConfigError, ServerSettings, file};
use crate::inputs::LEAST;

pub(super) fn read(source: &Source<'_>, raw: file::Server) -> Result<ServerSettings, ConfigError> {
    let listen = match &raw.listen {
        None => SocketAddr::from(([127, 0, 0, 1], 0)),
        Some(text) => text.get_ref().parse().map_err(|_| {
            let message = format!(
                "\"listen\" is {:?}; write an address and a port, for instance \"127.0.0.1:7070\" (port 0 takes a free one)",
                text.get_ref()
            );
            source.error(&text.span(), message)
        })?,
    };
    let input_bytes = input_bytes(source, raw.input_bytes.as_ref())?;
    let settings = ServerSettings {
        listen,
        token_file: raw.token_file.as_deref().map(|path| source.resolve(path)),
        allowed_hosts: raw.allowed_hosts,
        store_bytes: raw.store_bytes.unwrap_or(ByteCount(256 << 20)),
        arena_bytes: raw.arena_bytes.unwrap_or(ByteCount(1 << 30)),
        data_dir: raw.data_dir.as_deref().map(|path| source.resolve(path)),
        max_body: max_body(source, raw.max_body.as_ref())?,
        max_queued: raw.max_queued.unwrap_or(10_000),
        max_input: max_input(source, raw.max_input.as_ref(), input_bytes)?,
        input_bytes,
        input_idle: raw.input_idle.map_or(Duration::from_hours(1), |idle| idle.0),
        affinity_step: raw.affinity_step.map(|step| step.0),
    };
    if !settings.is_loopback() && settings.token_file.is_none() {
        let span = raw.listen.map_or(0..0, |listen| listen.span());
        let message = format!(
            "\"listen\" = {listen} can be reached from other hosts, so clients must show a token: \
             set \"token-file\", or listen on 127.0.0.1"
        );
        return Err(source.error(&span, message));
    }
    Ok(settings)
}

/// Parameters travel to a worker in one message of the gRPC stream, beside the handles of its inputs.
const LONGEST_BODY: ByteCount = ByteCount(16 << 20);

fn max_body(source: &Source<'_>, raw: Option<&Spanned<ByteCount>>) -> Result<ByteCount, ConfigError> {
    match raw {
        None => Ok(ByteCount(1 << 20)),
        Some(bytes) if *bytes.get_ref() <= LONGEST_BODY => Ok(*bytes.get_ref()),
        Some(bytes) => Err(source.error(
            &bytes.span(),
            format!("\"max-body\" is {}; it must be at most {LONGEST_BODY}", bytes.get_ref()),
        )),
    }
}

fn input_bytes(source: &Source<'_>, raw: Option<&Spanned<ByteCount>>) -> Result<ByteCount, ConfigError> {
    match raw {
        None => Ok(ByteCount(4 << 30)),
        Some(bytes) if bytes.get_ref().0 >= LEAST => Ok(*bytes.get_ref()),
        Some(bytes) => Err(source.error(
            &bytes.span(),
            format!(
                "\"input-bytes\" is {}; it must be at least {}, what the smallest input counts for",
                bytes.get_ref(),
                ByteCount(LEAST)
            ),
        )),
    }
}

/// Without a word in the file it is what fits.
fn max_input(
    source: &Source<'_>,
    raw: Option<&Spanned<ByteCount>>,
    input_bytes: ByteCount,
) -> Result<ByteCount, ConfigError> {
    match raw {
        None => Ok(input_bytes.min(ByteCount(256 << 20))),
        Some(bytes) if *bytes.get_ref() <= input_bytes => Ok(*bytes.get_ref()),
        Some(bytes) => Err(source.error(
            &bytes.span(),
            format!(
                "\"max-input\" is {}, more than \"input-bytes\" has for all inputs together ({input_bytes})",
                bytes.get_ref()
            ),
        )),
    }
}
