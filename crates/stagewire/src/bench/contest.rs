use std::time::Duration;

use crate::bench::stats::Pairs;

/// A sample of short operations is the mean of so many that they take about this long.
const SAMPLE: Duration = Duration::from_micros(300);

/// Operations of one sample at most.
const MAX_OPERATIONS: u32 = 64;

/// Operations above this are run once per sample, without one before that warms the caches.
const LONG: Duration = Duration::from_millis(20);

/// Operations above this are paired [`FEW`] times.
const VERY_LONG: Duration = Duration::from_secs(1);

const FEW: usize = 5;

/// Times of several ways to do the same, taken in the same rounds.
#[derive(Debug)]
pub(super) struct Contest<W> {
    ways: Vec<(W, Vec<Duration>)>,
}

impl<W: Copy + PartialEq> Contest<W> {
    /// Times every way in every round, each round in another order, so that no way has always the same one before it.
    pub(super) async fn run(
        ways: &[W],
        rounds: usize,
        mut once: impl AsyncFnMut(W) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Self> {
        let mut entries = Vec::new();
        let mut longest = Duration::ZERO;
        for way in ways {
            // The first makes connections and mappings.
            once(*way).await?;
            let time = once(*way).await?;
            longest = longest.max(time);
            entries.push((*way, time, Vec::new()));
        }
        let rounds = if longest > VERY_LONG { FEW } else { rounds };
        for round in 0..rounds {
            let count = entries.len();
            for step in 0..count {
                let forward = (round + step) % count;
                let index = if round % 2 == 0 { forward } else { count - 1 - forward };
                let (way, typical, times) = &mut entries[index];
                times.push(sample(*way, *typical, &mut once).await?);
            }
        }
        Ok(Self {
            ways: entries.into_iter().map(|(way, _, times)| (way, times)).collect(),
        })
    }

    fn times(&self, way: W) -> &[Duration] {
        let found = self.ways.iter().find(|(other, _)| *other == way);
        found.map_or(&[], |(_, times)| times)
    }

    /// One way beside another.
    pub(super) fn pairs(&self, value: W, reference: W) -> Pairs {
        Pairs::of(self.times(value), self.times(reference))
    }

    /// The fastest of some ways, by its median.
    pub(super) fn best(&self, among: impl IntoIterator<Item = W>) -> Option<W> {
        let median = |way: W| {
            let mut times = self.times(way).to_vec();
            times.sort_unstable();
            times.get(times.len() / 2).copied()
        };
        let timed = among.into_iter().filter_map(|way| Some((median(way)?, way)));
        timed.min_by_key(|(time, _)| *time).map(|(_, way)| way)
    }
}

async fn sample<W: Copy>(
    way: W,
    typical: Duration,
    once: &mut impl AsyncFnMut(W) -> anyhow::Result<Duration>,
) -> anyhow::Result<Duration> {
    if typical > LONG {
        return once(way).await;
    }
    once(way).await?;
    let wanted = SAMPLE.as_nanos() / typical.as_nanos().max(1);
    let operations = u32::try_from(wanted).unwrap_or(MAX_OPERATIONS).clamp(1, MAX_OPERATIONS);
    let mut total = Duration::ZERO;
    for _ in 0..operations {
        total += once(way).await?;
    }
    Ok(total / operations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_way_is_timed_in_every_round() {
        let mut before: Option<char> = None;
        let mut orders = std::collections::BTreeSet::new();
        let contest = Contest::run(&['a', 'b', 'c'], 21, async |way| {
            orders.insert((before.replace(way), way));
            Ok(Duration::from_millis(if way == 'b' { 30 } else { 60 }))
        });
        let contest = contest.await.expect("no error");
        assert_eq!(contest.pairs('a', 'b').len(), 21);
        assert!((contest.pairs('a', 'b').ratio_by(|seconds| seconds).median - 2.0).abs() < 1e-9);
        assert_eq!(contest.best(['a', 'b', 'c']), Some('b'));
        assert_eq!(contest.best(['x']), None);
        assert!(
            orders.contains(&(Some('a'), 'b')) && orders.contains(&(Some('c'), 'b')),
            "{orders:?}"
        );
    }

    #[tokio::test]
    async fn operations_of_more_than_a_second_are_paired_less_often() {
        let contest = Contest::run(&[1, 2], 21, async |_| Ok(Duration::from_secs(2)));
        assert_eq!(contest.await.expect("no error").pairs(1, 2).len(), 5);
    }
}
