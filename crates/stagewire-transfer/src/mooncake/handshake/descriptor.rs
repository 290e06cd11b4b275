use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{HandshakeError, MAX_MESSAGE, MessageKind, parse_json};

/// The version of the data protocol that acknowledges writes and refusals.
pub(crate) const PROTOCOL: u64 = 2;

/// How a peer of Mooncake describes itself: where its data port is, and which memory it lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// What others call it: `host:port` of its handshake port.
    pub(crate) name: String,
    /// The host of its data port, where it says one.
    pub(crate) data_host: Option<String>,
    pub(crate) data_port: u16,
    pub(crate) buffers: Vec<Buffer>,
}

/// Memory that a peer lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Buffer {
    pub(crate) addr: u64,
    pub(crate) length: u64,
    #[serde(default)]
    pub(crate) name: String,
    /// Only in descriptors of several protocols.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
}

impl Buffer {
    pub(crate) fn new(addr: u64, length: u64, name: String) -> Self {
        let protocol = None;
        Self {
            addr,
            length,
            name,
            protocol,
        }
    }
}

/// Why a descriptor cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DescriptorError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("it speaks version {found} of the data protocol, which acknowledges nothing; version {PROTOCOL} is needed")]
    Version { found: u64 },
    #[error("it offers {offered}, not tcp")]
    Protocol { offered: String },
    #[error("its data port is {0}")]
    Port(u64),
    #[error("it lists {length} bytes of memory at {addr:#x}")]
    Buffer { addr: u64, length: u64 },
}

/// As it is on the wire. `protocol` is a name, several names with commas, or a list of names.
#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(default)]
    name: String,
    #[serde(default)]
    protocol: Value,
    #[serde(default)]
    tcp_data_host: String,
    #[serde(default)]
    tcp_data_port: u64,
    #[serde(default = "before_versions")]
    tcp_proto_version: u64,
    #[serde(default)]
    rdma_server_name: String,
    #[serde(default)]
    buffers: Option<Vec<Buffer>>,
}

fn before_versions() -> u64 {
    1
}

impl Descriptor {
    /// Reads and checks what a peer answered.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, DescriptorError> {
        let wire: Wire = parse_json(MessageKind::Metadata, json)?;
        if !offers_tcp(&wire.protocol) {
            let offered = wire.protocol.to_string();
            return Err(DescriptorError::Protocol { offered });
        }
        if wire.tcp_proto_version < PROTOCOL {
            let found = wire.tcp_proto_version;
            return Err(DescriptorError::Version { found });
        }
        let data_port = match u16::try_from(wire.tcp_data_port) {
            Ok(port) if port > 0 => port,
            _ => return Err(DescriptorError::Port(wire.tcp_data_port)),
        };
        let mut buffers = wire.buffers.unwrap_or_default();
        buffers.retain(|buffer| buffer.protocol.as_deref().is_none_or(|protocol| protocol == "tcp"));
        for &Buffer { addr, length, .. } in &buffers {
            if length == 0 || addr.checked_add(length).is_none() {
                return Err(DescriptorError::Buffer { addr, length });
            }
        }
        Ok(Self {
            name: wire.name,
            data_host: Some(wire.tcp_data_host).filter(|host| !host.is_empty()),
            data_port,
            buffers,
        })
    }

    /// How many regions fit into the message that describes this process, whatever their addresses and lengths.
    pub(crate) fn room(&self) -> usize {
        let with = |count: usize| {
            let buffers = vec![Buffer::new(u64::MAX, u64::MAX, self.name.clone()); count];
            let of = Self {
                buffers,
                ..self.clone()
            };
            of.to_json().len()
        };
        // What the second one adds, a comma included.
        let each = with(2) - with(1);
        // One byte of the message is its kind.
        (MAX_MESSAGE as usize - 1).saturating_sub(with(0)) / each
    }

    /// How this process describes itself.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        super::to_json(&Wire {
            name: self.name.clone(),
            protocol: Value::from("tcp"),
            tcp_data_host: self.data_host.clone().unwrap_or_default(),
            tcp_data_port: self.data_port.into(),
            tcp_proto_version: PROTOCOL,
            rdma_server_name: String::new(),
            buffers: Some(self.buffers.clone()),
        })
    }
}

fn offers_tcp(protocol: &Value) -> bool {
    match protocol {
        Value::String(names) => names.split(',').any(|name| name.trim() == "tcp"),
        Value::Array(names) => names.iter().any(|name| name == "tcp"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::frame;
    use super::*;

    /// As release 0.3.13.post1 wrote it.
    const ENGINE: &str = r#"{"buffers":[{"addr":140057609498640,"length":1048576,"name":"127.0.0.1:16986"}],"name":"127.0.0.1:16986","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":15113,"tcp_proto_version":2,"timestamp":"2026-11-29 21:45:03.956511"}
"#;

    fn parse(text: &str) -> Result<Descriptor, DescriptorError> {
        Descriptor::parse(text.as_bytes())
    }

    #[test]
    fn as_many_regions_as_there_is_room_for_fit_into_a_message() {
        let mut descriptor = parse(ENGINE).expect("a descriptor");
        let name = descriptor.name.clone();
        descriptor.buffers.clear();
        let room = descriptor.room();
        assert!(room > 5000, "{room}");
        descriptor.buffers = vec![Buffer::new(u64::MAX, u64::MAX, name.clone()); room];
        frame(MessageKind::Metadata, &descriptor.to_json()).expect("it fits");
        descriptor.buffers.push(Buffer::new(u64::MAX, u64::MAX, name));
        frame(MessageKind::Metadata, &descriptor.to_json()).expect_err("one too many");
    }

    #[test]
    fn a_descriptor_of_the_engine_reads_as_it_stands() {
        let found = parse(ENGINE).expect("valid");
        assert_eq!(found.name, "127.0.0.1:16986");
        assert_eq!(
            (found.data_host.as_deref(), found.data_port),
            (Some("127.0.0.1"), 15113)
        );
        let [buffer] = &found.buffers[..] else {
            panic!("{found:?}");
        };
        assert_eq!((buffer.addr, buffer.length), (140_057_609_498_640, 1 << 20));
        assert_eq!(Descriptor::parse(&found.to_json()), Ok(found));
    }

    #[test]
    fn several_protocols_and_none_of_memory() {
        let several = r#"{"protocol":["rdma","tcp"],"tcp_data_port":1,"tcp_proto_version":2,
            "buffers":[{"addr":1,"length":2,"protocol":"tcp"},{"addr":0,"length":0,"protocol":"cxl"}]}"#;
        assert_eq!(parse(several).expect("valid").buffers.len(), 1);
        let none = r#"{"protocol":"rdma,tcp","tcp_data_port":65535,"tcp_proto_version":3,"buffers":null}"#;
        assert_eq!(parse(none).expect("valid").buffers, []);
    }

    #[test]
    fn what_is_refused() {
        let version = parse(&ENGINE.replace(r#""tcp_proto_version":2,"#, ""));
        assert_eq!(version, Err(DescriptorError::Version { found: 1 }));
        let port = parse(&ENGINE.replace("15113", "70000"));
        assert_eq!(port, Err(DescriptorError::Port(70_000)));
        assert_eq!(parse(&ENGINE.replace("15113", "0")), Err(DescriptorError::Port(0)));
        let protocol = parse(&ENGINE.replace(r#""tcp","#, r#""rdma","#));
        assert!(
            matches!(protocol, Err(DescriptorError::Protocol { .. })),
            "{protocol:?}"
        );
        let wrapped = parse(&ENGINE.replace("140057609498640", &u64::MAX.to_string()));
        assert!(matches!(wrapped, Err(DescriptorError::Buffer { .. })), "{wrapped:?}");
        let empty = parse(&ENGINE.replace("1048576", "0"));
        assert!(
            matches!(empty, Err(DescriptorError::Buffer { length: 0, .. })),
            "{empty:?}"
        );
        for text in [
            "",
            "{",
            "[]",
            "{}",
            "null",
            r#"{"protocol":7}"#,
            &ENGINE.replace("15113", "-1"),
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        let deep = format!(r#"{{"protocol":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert!(matches!(
            parse(&deep),
            Err(DescriptorError::Handshake(HandshakeError::Json { .. }))
        ));
    }

    proptest! {
        #[test]
        fn descriptors_survive(
            name in ".*",
            host in prop::option::of(".+"),
            data_port in 1_u16..,
            buffers in prop::collection::vec((0..u64::MAX / 2, 1..u64::MAX / 2, ".*"), 0..5),
        ) {
            let buffers = buffers.into_iter().map(|(addr, length, name)| Buffer::new(addr, length, name)).collect();
            let sent = Descriptor { name, data_host: host, data_port, buffers };
            prop_assert_eq!(Descriptor::parse(&sent.to_json()), Ok(sent));
        }
    }
}
