use std::collections::BTreeMap;

use stagewire_core::{Incarnation, Timestamp};

use crate::experiment::Network;

/// Bytes of a flow are counted in billionths, so that a rate in bytes per second times nanoseconds is whole.
const BYTE: u128 = 1_000_000_000;

/// Where a flow begins or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    Worker(Incarnation),
    Store,
}

/// Bytes on their way. Flows that share an end, or the network, have equal parts of it.
#[derive(Debug)]
pub(crate) struct Links {
    network: Network,
    flows: BTreeMap<u64, Flow>,
    next: u64,
    at: Timestamp,
    /// Bytes of all flows that have begun.
    pub(crate) moved: u64,
}

#[derive(Debug)]
struct Flow {
    from: End,
    to: End,
    left: u128,
    rate: u128,
}

impl Links {
    pub(crate) const fn new(network: Network) -> Self {
        Self {
            network,
            flows: BTreeMap::new(),
            next: 0,
            at: Timestamp(0),
            moved: 0,
        }
    }

    /// Begins a flow and returns its number.
    pub(crate) fn begin(&mut self, now: Timestamp, from: End, to: End, nbytes: u64) -> u64 {
        self.advance(now);
        self.moved += nbytes;
        let left = u128::from(nbytes) * BYTE;
        self.flows.insert(
            self.next,
            Flow {
                from,
                to,
                left,
                rate: 0,
            },
        );
        self.share();
        self.next += 1;
        self.next - 1
    }

    /// Ends a flow before it is done.
    pub(crate) fn stop(&mut self, now: Timestamp, flow: u64) {
        self.advance(now);
        self.flows.remove(&flow);
        self.share();
    }

    /// Takes out a flow that is done by now.
    pub(crate) fn take_done(&mut self, now: Timestamp) -> Option<u64> {
        self.advance(now);
        let done = *self.flows.iter().find(|(_, flow)| flow.left == 0)?.0;
        self.flows.remove(&done);
        self.share();
        Some(done)
    }

    /// When the next flow is done, if none begins or stops before.
    pub(crate) fn next_done(&self) -> Option<Timestamp> {
        let ends = self.flows.values().map(|flow| flow.left.div_ceil(flow.rate));
        let nanos = ends.min()?;
        Some(Timestamp(
            self.at.0.saturating_add(u64::try_from(nanos).unwrap_or(u64::MAX)),
        ))
    }

    fn advance(&mut self, now: Timestamp) {
        let nanos = now.since(self.at).as_nanos();
        for flow in self.flows.values_mut() {
            flow.left = flow.left.saturating_sub(flow.rate * nanos);
        }
        self.at = self.at.max(now);
    }

    fn share(&mut self) {
        let (mut out, mut into) = (BTreeMap::new(), BTreeMap::new());
        for flow in self.flows.values() {
            *out.entry(flow.from).or_insert(0_u64) += 1;
            *into.entry(flow.to).or_insert(0_u64) += 1;
        }
        let all = self.flows.len() as u64;
        let network = self.network;
        let capacity = |end: End| match end {
            End::Worker(_) => network.nic,
            End::Store => network.store,
        };
        for flow in self.flows.values_mut() {
            let rate = (capacity(flow.from) / out[&flow.from]).min(capacity(flow.to) / into[&flow.to]);
            flow.rate = rate.min(network.shared / all).max(1).into();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;

    fn end(n: u128) -> End {
        End::Worker(Incarnation(Uuid::from_u128(n)))
    }

    fn links(shared: u64) -> Links {
        Links::new(Network {
            nic: 1_000,
            store: 4_000,
            shared,
            latency: Duration::ZERO,
        })
    }

    fn seconds(at: f64) -> Timestamp {
        Timestamp(0) + Duration::from_secs_f64(at)
    }

    #[test]
    fn flows_share_what_they_have_in_common() {
        let mut links = links(u64::MAX);
        let first = links.begin(seconds(0.0), end(1), end(2), 1_000);
        assert_eq!(links.next_done(), Some(seconds(1.0)));
        // From half a second on both leave the same worker.
        let second = links.begin(seconds(0.5), end(1), end(3), 1_000);
        assert_eq!(links.next_done(), Some(seconds(1.5)));
        assert_eq!(links.take_done(seconds(1.5)), Some(first));
        assert_eq!(links.take_done(seconds(1.5)), None);
        // Half of the second one is there, and it has the link for itself.
        assert_eq!(links.next_done(), Some(seconds(2.0)));
        // Others are not in its way.
        links.begin(seconds(1.5), End::Store, end(9), 4_000);
        assert_eq!(links.take_done(seconds(2.0)), Some(second));
        assert_eq!((links.next_done(), links.moved), (Some(seconds(5.5)), 6_000));
    }

    #[test]
    fn a_network_that_all_share_is_the_limit_of_all() {
        let mut links = links(1_000);
        links.begin(seconds(0.0), end(1), end(2), 1_000);
        let other = links.begin(seconds(0.0), end(3), end(4), 1_000);
        assert_eq!(links.next_done(), Some(seconds(2.0)));
        links.stop(seconds(1.0), other);
        assert_eq!(links.next_done(), Some(seconds(1.5)));
    }
}
