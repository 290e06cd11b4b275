//! What the RFC asks to be measured: stages apart against all on each worker, what overlapping transfer and decoding
//! gains, and how many decoders denoisers share. Simulated, and measured with real processes where two cores can.

mod deployment;
mod measured;
mod overlap;
mod served;
mod simulated;
mod validated;

use std::collections::BTreeSet;
use std::time::Duration;

use super::Options;
use super::report::{Case, Report, Target, Unit};
use super::stats::Pairs;
use crate::exit::Fault;
use crate::output::Output;

/// What the three parts share.
struct Bench<'a> {
    options: &'a Options,
    output: &'a Output,
    report: Report,
    offered: BTreeSet<String>,
}

pub(super) async fn run(options: &Options, output: &Output) -> Result<Report, Fault> {
    let mut bench = Bench {
        options,
        output,
        report: Report::new("rfc"),
        offered: BTreeSet::new(),
    };
    simulated::colocated(&mut bench)?;
    let point = measured::run(&mut bench).await?;
    overlap::run(&mut bench).await?;
    simulated::shared(&mut bench)?;
    validated::run(&mut bench, point)?;
    bench.report.of(options.only.as_deref(), bench.offered)
}

impl Bench<'_> {
    /// Whether any of these rows is asked for.
    fn wants(&mut self, names: &[String]) -> bool {
        self.offered.extend(names.iter().cloned());
        names.iter().any(|name| self.is_named(name))
    }

    fn is_named(&self, name: &str) -> bool {
        self.options.only.as_deref().is_none_or(|only| name.contains(only))
    }

    fn add(
        &mut self,
        name: &str,
        metric: &'static str,
        unit: Unit,
        reference: &str,
        target: Option<Target>,
        pairs: &Pairs,
    ) {
        if self.is_named(name) {
            let case = Case {
                name: name.to_owned(),
                metric,
                unit,
                reference: reference.to_owned(),
                target,
            };
            self.report.add(case, pairs);
        }
    }

    /// A row of milliseconds whose value and reference are of all rounds together.
    fn pool(
        &mut self,
        name: &str,
        metric: &'static str,
        reference: &str,
        target: Option<Target>,
        all: [Duration; 2],
        pairs: &Pairs,
    ) {
        if self.is_named(name) {
            let case = Case {
                name: name.to_owned(),
                metric,
                unit: Unit::Milliseconds,
                reference: reference.to_owned(),
                target,
            };
            self.report.pool(case, all, pairs);
        }
    }

    fn skip(&mut self, names: &[String], metric: &'static str, why: &str) {
        for name in names {
            if self.is_named(name) {
                self.report.skip(name.clone(), metric, why.to_owned());
            }
        }
    }
}
