//! Deficit round robin between the classes that wait at a stage.
//!
//! The classes take turns. At its turn a class gets its quantum, [`QUANTUM`] times its weight, and starts jobs for as long
//! as its credit covers their predicted time, which it pays. Many rounds in which nobody can pay are taken in one step.
//! A class that has nothing waiting loses the credit that it has saved up. A job that starts out of turn, so that jobs do
//! not wait for each other, is paid for, too. Once an attempt has ended, its class pays the rest, or gets back what was too
//! much. None of that leaves a class more than one attempt's time in debt, nor with more than that saved up.
//!
//! # No class starves
//!
//! Let *L* be the longest time that an attempt at the stage is predicted to take or takes (an hour at most), *q(c)* the
//! quantum of class *c*, and *R(c)* = ⌈2 *L* / *q(c)*⌉ + 1. From the time at which class *c* has a job waiting until one of
//! its jobs starts, another class *d* starts jobs of at most
//!
//! > *R(c)* · *q(d)* + 2 *L* + *q(d)*
//!
//! predicted seconds in its turns, more only by what it gets back in the meantime: because its attempts took less, or an
//! offer was not taken. For small quanta that
//! is 2 *L* (1 + *w(d)* / *w(c)*): with the default classes and steps of 5 s a batch job waits, behind any number of
//! interactive ones, for 90 s of their work, divided by the workers of the stage. Inside a class a job is overtaken by jobs
//! that are due earlier; one that has no deadline counts as due an hour after it was submitted, so that it is overtaken
//! only by jobs submitted within that hour.

use std::time::Duration;

use crate::estimate::nanos;
use crate::{ClassSpec, Topology};

/// What a class of weight 1 gets at each of its turns, in nanoseconds of an attempt.
pub(crate) const QUANTUM: i64 = 10_000_000;

/// What the first job of each class is predicted to take; `None` is a class without jobs.
pub(crate) type Heads = [Option<Duration>; Topology::MAX_CLASSES];

/// Who has how much credit at a stage, and whose turn it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Nanoseconds by class; negative is a debt.
    credit: Vec<i64>,
    turn: usize,
    /// Starts by class that attempts have yielded for: they come first, in the order of the classes.
    owed: Vec<u32>,
}

/// The class that starts a job next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    /// It is not owed a start.
    pub(crate) in_turn: bool,
    /// How many turns it gets until then.
    pub(crate) turns: i64,
    /// How many classes are asked until then in the last round; the one whose turn it is comes last.
    distance: usize,
    pub(crate) class: usize,
}

impl Shares {
    pub(crate) fn new(classes: usize) -> Self {
        Self {
            credit: vec![0; classes],
            turn: 0,
            owed: vec![0; classes],
        }
    }

    /// Who is next. Reads only, so that deciding and applying come to the same.
    pub(crate) fn next(&self, classes: &[ClassSpec], heads: &Heads) -> Option<Turn> {
        self.turns(classes, heads).min()
    }

    /// When each class that has jobs starts one, were it not for the others: the least is next.
    pub(crate) fn turns(&self, classes: &[ClassSpec], heads: &Heads) -> impl Iterator<Item = Turn> {
        (0..classes.len()).filter_map(move |class| {
            let missing = cost(heads[class]?) - self.credit[class];
            let owed = self.owed[class] > 0;
            let (turns, distance) = if owed || (missing <= 0 && class == self.turn) {
                (0, 0)
            } else {
                let quantum = quantum(&classes[class]);
                let turns = ((missing + quantum - 1) / quantum).max(1);
                (turns, self.distance(class))
            };
            Some(Turn {
                in_turn: !owed,
                turns,
                distance,
                class,
            })
        })
    }

    /// Gives every class that has jobs its turns until then, and takes the price of its first job from the one that is
    /// next.
    pub(crate) fn pay(&mut self, classes: &[ClassSpec], heads: &Heads, next: Turn) {
        for (class, spec) in classes.iter().enumerate() {
            if heads[class].is_none() {
                self.forfeit(class);
            } else if next.turns > 0 {
                let missed = i64::from(self.distance(class) > next.distance);
                self.credit[class] += (next.turns - missed) * quantum(spec);
            }
        }
        if let Some(left) = self.owed[next.class].checked_sub(1) {
            self.owed[next.class] = left;
        } else {
            self.turn = next.class;
        }
        if let Some(price) = heads[next.class] {
            self.charge(next.class, price);
        }
    }

    /// Takes the price of a job that starts out of turn, which leaves its class no more than that in debt.
    pub(crate) fn charge(&mut self, class: usize, price: Duration) {
        let (price, credit) = (cost(price), &mut self.credit[class]);
        *credit = (*credit - price).max((*credit).min(-price));
    }

    /// The class has nothing waiting.
    pub(crate) fn forfeit(&mut self, class: usize) {
        self.credit[class] = self.credit[class].min(0);
        self.owed[class] = 0;
    }

    /// An attempt has yielded for the sake of this class: its next job starts out of turn, and is paid for as any other.
    pub(crate) fn owe(&mut self, class: usize) {
        self.owed[class] = self.owed[class].saturating_add(1);
    }

    /// Starts that the class is owed.
    pub(crate) fn owed(&self, class: usize) -> u32 {
        self.owed[class]
    }

    /// Corrects a price after the attempt has ended, or takes it back where there was none.
    pub(crate) fn correct(&mut self, class: usize, price: Duration, took: Option<Duration>) {
        let (price, took) = (cost(price), took.map_or(0, cost));
        let credit = &mut self.credit[class];
        *credit = if took > price {
            (*credit - (took - price)).max((*credit).min(-took))
        } else {
            (*credit + (price - took)).min((*credit).max(price))
        };
    }

    /// How many classes are asked until this one is, itself included.
    fn distance(&self, class: usize) -> usize {
        let count = self.credit.len();
        match (class + count - self.turn) % count {
            0 => count,
            distance => distance,
        }
    }
}

fn quantum(class: &ClassSpec) -> i64 {
    QUANTUM * i64::from(class.weight)
}

fn cost(time: Duration) -> i64 {
    i64::try_from(nanos(time)).expect("an hour has fewer nanoseconds than 2^63")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn heads(of: impl IntoIterator<Item = Option<Duration>>) -> Heads {
        let mut heads = Heads::default();
        heads.iter_mut().zip(of).for_each(|(head, of)| *head = of);
        heads
    }

    /// Serves classes that always have jobs of one length, and says how long each was served.
    fn serve(classes: &[ClassSpec], lengths: &[Duration], starts: usize) -> Vec<Duration> {
        let mut shares = Shares::new(classes.len());
        let mut served = vec![Duration::ZERO; classes.len()];
        for _ in 0..starts {
            let heads = heads(lengths.iter().copied().map(Some));
            let next = shares.next(classes, &heads).expect("somebody waits");
            shares.pay(classes, &heads, next);
            served[next.class] += lengths[next.class];
        }
        served
    }

    #[test]
    fn classes_are_served_by_weight_whatever_their_jobs_take() {
        let classes = ClassSpec::defaults();
        for lengths in [
            [ms(100), ms(100), ms(100)],
            [ms(50), ms(2_000), ms(5_000)],
            [ms(9_000), ms(30), ms(1)],
        ] {
            let served = serve(&classes, &lengths, 100_000);
            let unit = served[2].as_secs_f64();
            let ratios = [0, 1].map(|class| served[class].as_secs_f64() / unit);
            assert!(
                (7.5..8.5).contains(&ratios[0]) && (3.75..4.25).contains(&ratios[1]),
                "{ratios:?} of {lengths:?}"
            );
        }
    }

    #[test]
    fn who_comes_into_an_idle_class_goes_before_a_backlog_of_long_jobs() {
        let classes = ClassSpec::defaults();
        let mut shares = Shares::new(classes.len());
        let alone = heads([None, None, Some(ms(5_000))]);
        for _ in 0..10 {
            let next = shares.next(&classes, &alone).expect("batch waits");
            shares.pay(&classes, &alone, next);
        }
        let both = heads([Some(ms(200)), None, Some(ms(5_000))]);
        assert_eq!(shares.next(&classes, &both).map(|next| next.class), Some(0));
    }

    #[test]
    fn jobs_that_start_out_of_turn_leave_one_attempts_time_of_debt() {
        let mut shares = Shares::new(1);
        for price in [1_000, 3_000, 2_000, 3_000] {
            shares.charge(0, ms(price));
            assert!(
                (-3_000_000_000..=-1_000_000_000).contains(&shares.credit[0]),
                "{shares:?}"
            );
        }
        assert_eq!(shares.credit[0], -3_000_000_000);
    }

    #[test]
    fn a_wrong_prediction_is_paid_for_and_no_more_than_that() {
        let mut shares = Shares::new(1);
        shares.charge(0, ms(1_000));
        shares.correct(0, ms(1_000), Some(ms(3_000)));
        assert_eq!(shares.credit[0], -3_000_000_000);
        shares.correct(0, ms(1_000), Some(ms(3_000)));
        assert_eq!(shares.credit[0], -3_000_000_000, "a debt is at most one attempt's time");
        shares.correct(0, ms(1_000), None);
        assert_eq!(
            shares.credit[0], -2_000_000_000,
            "an offer that was not taken is paid back"
        );
        for _ in 0..10 {
            shares.correct(0, ms(1_000), Some(ms(200)));
        }
        assert_eq!(
            shares.credit[0], 1_000_000_000,
            "no more than one attempt's time is saved up"
        );
        shares.forfeit(0);
        assert_eq!(shares.credit[0], 0);
    }

    #[derive(Debug, Clone)]
    enum Op {
        /// Jobs of a class come, each of this length.
        Come(usize, u64),
        Start,
        /// A job of a class starts out of turn.
        OutOfTurn(usize),
        /// A class learns that an attempt took so much of what was predicted.
        End(usize, u64, u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0..4_usize, 1..20_000_u64).prop_map(|(class, length)| Op::Come(class, length)),
            5 => Just(Op::Start),
            1 => (0..4_usize).prop_map(Op::OutOfTurn),
            1 => (0..4_usize, 1..20_000_u64, 1..20_000_u64).prop_map(|(class, price, took)| Op::End(class, price, took)),
        ];
        prop::collection::vec(op, 1..400)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// The bound at the top of this file.
        #[test]
        fn no_class_starves(weights in prop::collection::vec(1..=1000_u32, 4), ops in ops()) {
            const L: i64 = 20_000_000_000;
            let name = |n: usize| stagewire_core::StageName::new(&format!("c{n}")).expect("a name");
            let classes: Vec<_> = (0..4).map(|n| ClassSpec::new(name(n), weights[n])).collect();
            let mut shares = Shares::new(4);
            let mut queues: Vec<std::collections::VecDeque<u64>> = vec![Default::default(); 4];
            // For each class that waits: what each other one has started since, less what it got back.
            let mut since = [[0_i64; 4]; 4];
            for op in ops {
                match op {
                    Op::Come(class, length) => queues[class].push_back(length),
                    Op::OutOfTurn(class) => {
                        let Some(length) = queues[class].pop_front() else { continue };
                        shares.charge(class, ms(length));
                        since[class] = [0; 4];
                    }
                    Op::End(class, price, took) => {
                        let before = shares.credit[class];
                        shares.correct(class, ms(price), Some(ms(took)));
                        let back = (shares.credit[class] - before).max(0);
                        since.iter_mut().for_each(|since| since[class] -= back);
                    }
                    Op::Start => {
                        let heads = heads(queues.iter().map(|queue| queue.front().map(|length| ms(*length))));
                        let Some(next) = shares.next(&classes, &heads) else { continue };
                        shares.pay(&classes, &heads, next);
                        let length = queues[next.class].pop_front().expect("it has a head");
                        since.iter_mut().for_each(|since| since[next.class] += cost(ms(length)));
                        since[next.class] = [0; 4];
                    }
                }
                for class in 0..4 {
                    if queues[class].is_empty() {
                        since[class] = [0; 4];
                    }
                    let rounds = (2 * L).div_euclid(quantum(&classes[class])) + 2;
                    for other in (0..4).filter(|other| *other != class) {
                        let bound = rounds * quantum(&classes[other]) + 2 * L + quantum(&classes[other]);
                        prop_assert!(since[class][other] <= bound, "{class} waits for {other}: {since:?}");
                    }
                    prop_assert!(shares.credit[class].abs() <= L + quantum(&classes[class]), "{shares:?}");
                }
            }
        }
    }
}
