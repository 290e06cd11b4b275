use serde::Serialize;

use super::machine::Machine;
use super::stats::{Pairs, Summary};
use crate::exit::Fault;
use crate::output::Output;

/// The result of one benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    bench: &'static str,
    machine: Machine,
    rows: Vec<Row>,
}

/// One case. Times are in milliseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    case: String,
    metric: &'static str,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Figures {
    Measured(Box<Measured>),
    Skipped { skipped: String },
}

#[derive(Debug, Serialize)]
struct Measured {
    value: f64,
    value_quartiles: [f64; 2],
    unit: &'static str,
    reference: &'static str,
    reference_value: f64,
    /// Median of the ratios of the pairs.
    ratio: f64,
    ratio_quartiles: [f64; 2],
    pairs: usize,
    target: String,
    met: bool,
}

/// What a row must reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// As people read it.
    pub(crate) text: &'static str,
    /// Milliseconds by which the value may exceed its reference, as the median over the pairs.
    pub(crate) excess_ms: f64,
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

    /// A row of pairs of times.
    pub(crate) fn add(
        &mut self,
        case: String,
        metric: &'static str,
        pairs: &Pairs,
        reference: &'static str,
        target: Target,
    ) {
        let (value, ratio) = (pairs.value(), pairs.ratio());
        let quartiles = |summary: Summary, scale: f64| [summary.first_quartile * scale, summary.third_quartile * scale];
        let measured = Measured {
            value: value.median * 1e3,
            value_quartiles: quartiles(value, 1e3),
            unit: "ms",
            reference,
            reference_value: pairs.reference().median * 1e3,
            ratio: ratio.median,
            ratio_quartiles: quartiles(ratio, 1.0),
            pairs: pairs.len(),
            target: target.text.to_owned(),
            met: pairs.excess().median * 1e3 <= target.excess_ms,
        };
        self.rows.push(Row {
            case,
            metric,
            figures: Figures::Measured(Box::new(measured)),
        });
    }

    /// A row that could not be measured here, and why.
    pub(crate) fn skip(&mut self, case: String, metric: &'static str, why: String) {
        self.rows.push(Row {
            case,
            metric,
            figures: Figures::Skipped { skipped: why },
        });
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
        match &self.figures {
            Figures::Skipped { skipped } => {
                let none = String::new;
                [
                    self.case.clone(),
                    format!("skipped: {skipped}"),
                    none(),
                    none(),
                    none(),
                    none(),
                ]
            }
            Figures::Measured(row) => {
                let [low, high] = row.ratio_quartiles;
                [
                    self.case.clone(),
                    format!("{:.3} {}", row.value, row.unit),
                    format!("{} {:.3} {}", row.reference, row.reference_value, row.unit),
                    format!("{:.2} ({low:.2} to {high:.2})", row.ratio),
                    row.target.clone(),
                    if row.met { "met" } else { "MISSED" }.to_owned(),
                ]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn rows_have_the_published_fields() {
        let mut report = Report::new("quick");
        let mut pairs = Pairs::default();
        pairs.push(Duration::from_millis(3), Duration::from_millis(2));
        let target = Target {
            text: "at most 1 ms + one memcpy",
            excess_ms: 1.0,
        };
        report.add("shm, whole".to_owned(), "handover", &pairs, "memcpy", target);
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
}
