//! Runs the probes, each against its deadline.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures::future::join_all;

use super::check::Check;
use crate::output::duration;

/// A probe under way.
pub(crate) struct Probe {
    /// The checks that it answers with, in order.
    names: &'static [&'static str],
    answer: Pin<Box<dyn Future<Output = Vec<Check>> + Send>>,
}

/// A probe that can be dropped.
pub(crate) fn probe(
    names: &'static [&'static str],
    answer: impl Future<Output = Vec<Check>> + Send + 'static,
) -> Probe {
    let answer = Box::pin(answer);
    Probe { names, answer }
}

/// A probe that reads files, on a thread of its own: a file system that does not answer holds that thread alone.
pub(crate) fn files(names: &'static [&'static str], look: impl FnOnce() -> Vec<Check> + Send + 'static) -> Probe {
    probe(names, async move {
        let looked = tokio::task::spawn_blocking(look).await;
        looked.unwrap_or_else(|error| {
            let failed = |name| {
                let why = format!("the probe failed: {error}");
                Check::unknown(name, why, "please report this as a defect of Stagewire")
            };
            names.iter().copied().map(failed).collect()
        })
    })
}

/// The answers of all probes in their order. One that does not answer in time is given up, and its checks say so.
pub(crate) async fn all(probes: Vec<Probe>, limit: Duration) -> Vec<Check> {
    let bounded = probes.into_iter().map(async |Probe { names, answer }| {
        tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
            let late = |name| {
                let why = format!("the probe did not answer within {}", duration(limit));
                Check::unknown(name, why, "try again with a longer --timeout")
            };
            names.iter().copied().map(late).collect()
        })
    });
    join_all(bounded).await.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::doctor::check::State;

    #[test]
    fn a_probe_that_hangs_holds_nobody_up() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        let (release, held) = mpsc::channel::<()>();
        let probes = vec![
            probe(&["pending"], std::future::pending()),
            files(&["blocked", "too"], move || {
                let _ = held.recv();
                Vec::new()
            }),
            files(&["quick"], || vec![Check::ok("quick", "here")]),
            files(&["failing"], || panic!("on purpose")),
        ];
        let checks = runtime.block_on(all(probes, Duration::from_millis(300)));
        let states: Vec<_> = checks.iter().map(|check| (check.name, check.state)).collect();
        assert_eq!(
            states,
            [
                ("pending", State::Unknown),
                ("blocked", State::Unknown),
                ("too", State::Unknown),
                ("quick", State::Ok),
                ("failing", State::Unknown)
            ]
        );
        let why = checks[0].why.as_deref().unwrap();
        assert_eq!(why, "the probe did not answer within 300 ms");
        drop(release);
    }
}
