//! What carries the bytes of payloads.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use stagewire_core::{Classify, Device, ErrorClass, TransportAddress};
use stagewire_transfer::decorate::{Throttle, ThrottleOptions};
use stagewire_transfer::{
    Host, Memory, Mooncake, MooncakeOptions, Network, NetworkOptions, Nixl, NixlOptions, Transport,
};

use crate::StartError;

/// A transport that a connector may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// Consumers on this host map the arena.
    Shm,
    /// Consumers on this host read memory where it is, by cross-memory attach. Where the kernel forbids that, it is copied
    /// once into the arena, if `shm` is named as well and there is room.
    Cma,
    /// This process sends the bytes, to any host.
    Tcp,
    /// Mooncake's wire protocol, spoken natively, to any host.
    Mooncake,
    /// NIXL, where it is installed, to any host; also memory of devices.
    Nixl,
}

impl Carrier {
    /// For the processes of one host.
    pub const DEFAULT: [Self; 3] = [Self::Shm, Self::Cma, Self::Tcp];

    const ALL: [Self; 5] = [Self::Shm, Self::Cma, Self::Tcp, Self::Mooncake, Self::Nixl];

    /// As it stands in handles: `shm`, `cma`, `tcp`, `mooncake`, `nixl`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of a [`Carrier`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown transport {name:?}; a connector has shm, cma, tcp, mooncake and nixl")]
pub struct UnknownCarrier {
    name: String,
}

impl Classify for UnknownCarrier {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "connector.transports"
    }
}

impl FromStr for Carrier {
    type Err = UnknownCarrier;

    fn from_str(name: &str) -> Result<Self, UnknownCarrier> {
        let found = Self::ALL.into_iter().find(|carrier| carrier.name() == name);
        found.ok_or_else(|| UnknownCarrier { name: name.to_owned() })
    }
}

/// The transports of a connector, the preferred one first.
#[derive(Debug)]
pub(crate) struct Carriers {
    /// Without a transport: the kernel forbids it.
    all: Vec<(Carrier, Option<Arc<dyn Transport>>)>,
}

impl Carriers {
    /// Starts those that are named.
    pub(crate) async fn start(
        named: &[Carrier],
        host: &Arc<Host>,
        network: &Arc<Network>,
        options: &NetworkOptions,
    ) -> Result<Self, StartError> {
        let mut all: Vec<(Carrier, Option<Arc<dyn Transport>>)> = Vec::with_capacity(named.len());
        let mut forbidden = None;
        for &carrier in named {
            if all.iter().any(|(known, _)| *known == carrier) {
                continue;
            }
            let transport: Arc<dyn Transport> = match carrier {
                Carrier::Shm => host.shm(),
                Carrier::Cma => match host.cma() {
                    Ok(cma) => cma,
                    Err(error) => {
                        tracing::info!(%error, "cma carries nothing here");
                        forbidden = Some(error);
                        all.push((carrier, None));
                        continue;
                    }
                },
                Carrier::Tcp => network.tcp(),
                Carrier::Mooncake => {
                    let options = MooncakeOptions {
                        bind: SocketAddr::new(options.bind.ip(), 0),
                        advertise: options.advertise,
                        ..MooncakeOptions::default()
                    };
                    let started = Mooncake::start(Arc::clone(network), options).await;
                    started.map_err(StartError::Mooncake)?
                }
                Carrier::Nixl => {
                    let started = Nixl::start(network, NixlOptions::default()).await;
                    started.map_err(StartError::Nixl)?
                }
            };
            all.push((carrier, Some(transport)));
        }
        match forbidden {
            _ if all.iter().any(|(_, transport)| transport.is_some()) => Ok(Self { all }),
            Some(error) => Err(StartError::Cma(error)),
            None => Err(StartError::NoTransport),
        }
    }

    /// The same, each over a line of its own that is as slow as that.
    pub(crate) fn throttled(mut self, options: ThrottleOptions) -> Self {
        if options != ThrottleOptions::default() {
            for transport in self.all.iter_mut().filter_map(|(_, transport)| transport.as_mut()) {
                *transport = Arc::new(Throttle::new(Arc::clone(transport), options));
            }
        }
        self
    }

    /// Those that are there.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Transport>> + Clone {
        self.all.iter().filter_map(|(_, transport)| transport.as_ref())
    }

    /// The first: the one to ask for a reason where none takes a memory.
    pub(crate) fn first(&self) -> &dyn Transport {
        self.iter()
            .next()
            .expect("one is there, or it had not started")
            .as_ref()
    }

    /// The first that takes memory as it is. `None` where the kernel forbids the one whose turn it is, and the memory may
    /// be copied instead.
    pub(crate) fn preferred(&self, memory: &Memory) -> Option<&dyn Transport> {
        let wanted = |(_, transport): &&(Carrier, Option<Arc<dyn Transport>>)| match transport {
            Some(transport) => takes(transport.as_ref(), memory),
            None => self.copies(memory).is_some(),
        };
        self.all
            .iter()
            .find(wanted)
            .and_then(|(_, transport)| transport.as_deref())
    }

    /// The first that takes memory as it is, of those that are there.
    pub(crate) fn any(&self, memory: &Memory) -> Option<&dyn Transport> {
        let taker = self.iter().find(|transport| takes(transport.as_ref(), memory));
        taker.map(Arc::as_ref)
    }

    /// `shm`, where memory may be copied into the arena for it.
    pub(crate) fn copies(&self, memory: &Memory) -> Option<&dyn Transport> {
        if !matches!(memory, Memory::Borrowed(borrowed) if borrowed.device() == Device::Cpu) {
            return None;
        }
        let found = self.all.iter().find(|(carrier, _)| *carrier == Carrier::Shm);
        found.and_then(|(_, transport)| transport.as_deref())
    }

    pub(crate) fn addresses(&self) -> Vec<TransportAddress> {
        self.iter().map(|transport| transport.address()).collect()
    }
}

/// Whether a transport takes memory where it is: what others map must be in the arena.
fn takes(transport: &dyn Transport, memory: &Memory) -> bool {
    let abilities = transport.abilities();
    let device = match memory {
        Memory::Borrowed(borrowed) => borrowed.device(),
        _ => Device::Cpu,
    };
    (abilities.device || device == Device::Cpu) && (!abilities.map || matches!(memory, Memory::Arena(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for carrier in Carrier::ALL {
            assert_eq!(carrier.to_string().parse(), Ok(carrier));
        }
        let error = "rdma".parse::<Carrier>().expect_err("unknown");
        assert!(
            error.to_string().contains("\"rdma\"") && error.to_string().contains("nixl"),
            "{error}"
        );
    }
}
