mod figures;

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;

use super::machine::Machine;
use super::stats::{Pairs, Summary};
use crate::exit::Fault;
use crate::output::Output;

use figures::{Figures, Measured};
pub(crate) use figures::{Goal, Target, Unit};

/// The result of one benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    bench: &'static str,
    machine: Machine,
    rows: Vec<Row>,
}

/// One case beside one reference.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    case: String,
    metric: &'static str,
    #[serde(flatten)]
    figures: Figures,
}

/// What a row of pairs says besides its figures.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) metric: &'static str,
    pub(crate) unit: Unit,
    pub(crate) reference: String,
    /// `None` where the reference only gives an idea.
    pub(crate) target: Option<Target>,
}

impl Report {
    pub(crate) fn new(bench: &'static str) -> Self {
        Self {
            schema: 1,
            bench,
            machine: Machine::here(),
            rows: Vec::new(),
        }
    }

    /// The report, unless it has no row because none is called what was asked for.
    ///
    /// # Errors
    /// A usage error with all the rows that there are.
    pub(crate) fn of(self, only: Option<&str>, offered: BTreeSet<String>) -> Result<Self, Fault> {
        match only {
            Some(only) if self.rows.is_empty() => {
                let offered: Vec<_> = offered.into_iter().collect();
                let offered = offered.join("\n  ");
                Err(Fault::usage(format_args!(
                    "no row is called `{only}`; there are:\n  {offered}"
                )))
            }
            _ => Ok(self),
        }
    }

    /// A row of pairs of times.
    pub(crate) fn add(&mut self, case: Case, pairs: &Pairs) {
        let quartiles = |summary: Summary| [summary.first_quartile, summary.third_quartile];
        let unit = case.unit;
        let value = pairs.value_by(|seconds| unit.of(seconds));
        let ratio = pairs.ratio_by(|seconds| unit.of(seconds));
        let measured = Measured {
            value: value.median,
            value_quartiles: Some(quartiles(value)),
            unit: unit.name(),
            reference: Some(case.reference),
            reference_value: Some(pairs.reference_by(|seconds| unit.of(seconds)).median),
            ratio: Some(ratio.median),
            ratio_quartiles: (pairs.len() > 1).then(|| quartiles(ratio)),
            pairs: pairs.len(),
            target: case.target.map(|target| target.text.to_owned()),
            met: case.target.map(|target| match target.goal {
                Goal::ExcessMs(most) => pairs.excess().median * 1e3 <= most,
                Goal::AtMost(most) => value.median <= most,
                Goal::AtLeast(least) => value.median >= least,
                of_ratio => of_ratio.met_by_ratio(ratio.median),
            }),
        };
        self.push(case.name, case.metric, Figures::Measured(Box::new(measured)));
    }

    /// A row that counts something, with no reference.
    pub(crate) fn count(&mut self, name: String, metric: &'static str, value: f64, unit: &'static str, target: Target) {
        let met = match target.goal {
            Goal::AtMost(most) => value <= most,
            Goal::AtLeast(least) => value >= least,
            _ => false,
        };
        let measured = Measured {
            target: Some(target.text.to_owned()),
            met: Some(met),
            ..Measured::of(value, unit)
        };
        self.push(name, metric, Figures::Measured(Box::new(measured)));
    }

    /// A row whose value and reference are of all rounds together; `pairs` has those of each round.
    pub(crate) fn pool(&mut self, case: Case, all: [Duration; 2], pairs: &Pairs) {
        let unit = case.unit;
        let [value, reference] = all.map(|time| unit.of(time.as_secs_f64()));
        let ratios = pairs.ratio_by(|seconds| unit.of(seconds));
        let measured = Measured {
            reference: Some(case.reference),
            reference_value: Some(reference),
            ratio: Some(value / reference),
            ratio_quartiles: Some([ratios.first_quartile, ratios.third_quartile]),
            pairs: pairs.len(),
            target: case.target.map(|target| target.text.to_owned()),
            met: case.target.map(|target| target.goal.met_by_ratio(value / reference)),
            ..Measured::of(value, unit.name())
        };
        self.push(case.name, case.metric, Figures::Measured(Box::new(measured)));
    }

    /// A row of one figure beside another: the value, what it stands beside, and that one's value.
    pub(crate) fn figure(
        &mut self,
        name: String,
        metric: &'static str,
        unit: &'static str,
        (value, reference, reference_value): (f64, &str, f64),
    ) {
        let measured = Measured {
            reference: Some(reference.to_owned()),
            reference_value: Some(reference_value),
            ratio: Some(value / reference_value),
            ..Measured::of(value, unit)
        };
        self.push(name, metric, Figures::Measured(Box::new(measured)));
    }

    /// A row that could not be measured here, and why.
    pub(crate) fn skip(&mut self, case: String, metric: &'static str, why: String) {
        self.push(case, metric, Figures::Skipped { skipped: why });
    }

    fn push(&mut self, case: String, metric: &'static str, figures: Figures) {
        self.rows.push(Row { case, metric, figures });
    }

    pub(crate) fn print(&self, output: &Output) -> Result<(), Fault> {
        let machine = &self.machine;
        output.data(format_args!(
            "{}: {}, {} cores, {}, Linux {}, load {}",
            self.bench,
            machine.cpu,
            machine.cores,
            crate::output::bytes(machine.memory),
            machine.kernel,
            machine.load
        ))?;
        let rows: Vec<_> = self.rows.iter().map(Row::cells).collect();
        output.table(["CASE", "MEDIAN", "REFERENCE", "RATIO", "TARGET", ""], &rows)
    }
}

impl Row {
    fn cells(&self) -> [String; 6] {
        let [median, reference, ratio, target, met] = self.figures.cells();
        [self.case.clone(), median, reference, ratio, target, met]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(value: u64, reference: u64) -> Pairs {
        let mut pairs = Pairs::default();
        pairs.push(Duration::from_millis(value), Duration::from_millis(reference));
        pairs
    }

    fn case(unit: Unit, target: Option<Target>) -> Case {
        Case {
            name: "shm, whole".to_owned(),
            metric: "handover",
            unit,
            reference: "memcpy".to_owned(),
            target,
        }
    }

    #[test]
    fn rows_have_the_published_fields() {
        let mut report = Report::new("quick");
        let target = Target {
            text: "at most 1 ms + one memcpy",
            goal: Goal::ExcessMs(1.0),
        };
        report.add(case(Unit::Milliseconds, Some(target)), &pairs(3, 2));
        report.skip("cma, whole".to_owned(), "handover", "ptrace is forbidden".to_owned());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (json["schema"].as_u64(), json["bench"].as_str()),
            (Some(1), Some("quick"))
        );
        for field in [
            "case",
            "metric",
            "value",
            "unit",
            "reference",
            "reference_value",
            "ratio",
            "target",
            "met",
        ] {
            assert!(json["rows"][0].get(field).is_some(), "{field} is missing");
        }
        for field in ["cpu", "cores", "memory", "kernel", "load"] {
            assert!(json["machine"].get(field).is_some(), "{field} is missing");
        }
        assert_eq!(json["rows"][0]["met"], true);
        assert_eq!(json["rows"][1]["skipped"], "ptrace is forbidden");
    }

    #[test]
    fn throughput_counts_upwards() {
        let mut report = Report::new("transfer");
        let unit = Unit::GigabytesPerSecond { bytes: 4_000_000 };
        let at_least = |least| Target {
            text: "",
            goal: Goal::RatioAtLeast(least),
        };
        // Twice the time is half the throughput.
        report.add(case(unit, Some(at_least(0.5))), &pairs(4, 2));
        report.add(case(unit, Some(at_least(0.6))), &pairs(4, 2));
        report.add(case(unit, None), &pairs(4, 2));
        let json = serde_json::to_value(&report).unwrap();
        let row = |index: usize| &json["rows"][index];
        assert_eq!(
            (row(0)["value"].as_f64(), row(0)["ratio"].as_f64()),
            (Some(1.0), Some(0.5))
        );
        assert_eq!(row(0)["reference_value"].as_f64(), Some(2.0));
        assert_eq!((&row(0)["met"], &row(1)["met"]), (&true.into(), &false.into()));
        assert!(row(2)["met"].is_null() && row(2)["target"].is_null());
    }

    #[test]
    fn counted_rows_have_no_reference() {
        let mut report = Report::new("transfer");
        let target = Target {
            text: "0",
            goal: Goal::AtMost(0.0),
        };
        report.count("shm map".to_owned(), "copied", 0.0, "B", target);
        report.count("shm map".to_owned(), "copied", 1.0, "B", target);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["rows"][0]["met"], &json["rows"][1]["met"]),
            (&true.into(), &false.into())
        );
        assert!(json["rows"][0]["reference"].is_null());
    }
}
