//! What an engine gives to anybody: a client of its protocol with nothing around it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

/// The type of a message that asks for a peer's descriptor.
const METADATA: u8 = 1;

/// Version 2 of a read.
const READ: u8 = 0x80;

/// Version 2 of success.
const DONE: [u8; 8] = *b"\0\0\0\0VTCM";

/// One connection, on which each call blocks until it has its bytes.
#[derive(Debug)]
pub(super) struct Client {
    stream: TcpStream,
}

impl Client {
    /// Asks the handshake port where the data port is, and connects to that.
    pub(super) fn connect(segment: &str) -> anyhow::Result<Self> {
        let mut handshake = TcpStream::connect(segment)?;
        let json = b"{}";
        let mut message = (1 + json.len() as u64).to_le_bytes().to_vec();
        message.push(METADATA);
        message.extend_from_slice(json);
        handshake.write_all(&message)?;
        let mut len = [0; 8];
        handshake.read_exact(&mut len)?;
        let mut descriptor = Vec::new();
        handshake.take(u64::from_le_bytes(len)).read_to_end(&mut descriptor)?;
        let json = descriptor.get(1..).context("an empty answer")?;
        let descriptor: Value = serde_json::from_slice(json)?;
        let port = descriptor["tcp_data_port"].as_u64().context("no data port")?;
        let (host, _) = segment.rsplit_once(':').context("no port")?;
        let stream = TcpStream::connect((host, u16::try_from(port)?))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Reads the memory at an address.
    pub(super) fn read(&mut self, address: u64, into: &mut [u8]) -> anyhow::Result<Duration> {
        let mut head = [0; 24];
        head[..8].copy_from_slice(&(into.len() as u64).to_le_bytes());
        head[8..16].copy_from_slice(&address.to_le_bytes());
        head[16] = READ;
        let mut status = [0; DONE.len()];
        let begin = Instant::now();
        self.stream.write_all(&head)?;
        self.stream.read_exact(&mut status)?;
        ensure!(
            status == DONE,
            "the engine refuses {} bytes at {address:#x}",
            into.len()
        );
        self.stream.read_exact(into)?;
        Ok(begin.elapsed())
    }
}
