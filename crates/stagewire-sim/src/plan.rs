use serde::Serialize;

use crate::experiment::{Experiment, Layout, SimError};
use crate::report::{Report, simulate};

/// How an experiment does with so many workers at one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trial {
    /// Workers at the stage.
    pub workers: u32,
    /// Smallest part of the jobs of a class that met its bound.
    pub attainment: f64,
    /// Whether that is enough.
    pub enough: bool,
    /// The rest of what it says.
    pub report: Report,
}

/// Finds the fewest workers at a stage with which every class meets its bound for this part of its jobs. The trials are in
/// the order in which they were made; the answer is the smallest one that is enough, and there is none where even `most`
/// are not.
///
/// # Errors
/// As [`simulate`]; [`SimError::Value`] where no class has a bound, or there is no such stage.
pub fn fewest(experiment: &Experiment, stage: &str, target: f64, most: u32) -> Result<Vec<Trial>, SimError> {
    let wrong = |key: &str, value: &str, must: String| SimError::Value {
        key: key.to_owned(),
        value: value.to_owned(),
        must,
    };
    let position = experiment.stage(stage).ok_or_else(|| {
        let names: Vec<_> = experiment.stages.iter().map(|stage| stage.spec.name.as_str()).collect();
        wrong("the stage", stage, format!("one of {}", names.join(", ")))
    })?;
    let mut trials: Vec<Trial> = Vec::new();
    // More workers never harm, so halving finds the fewest.
    let (mut few, mut many) = (0, most + 1);
    let mut next = 1;
    while few + 1 < many {
        let workers = next.clamp(few + 1, many - 1);
        let mut experiment = experiment.clone();
        experiment.stages[position].workers = workers;
        let report = simulate(&experiment, Layout::Disaggregated)?;
        let attainment = report
            .worst_attainment()
            .ok_or_else(|| wrong("slo-s", "missing", "given for a class at least".to_owned()))?;
        let enough = attainment >= target;
        trials.push(Trial {
            workers,
            attainment,
            enough,
            report,
        });
        if enough {
            many = workers;
            next = few + (many - few) / 2;
        } else {
            few = workers;
            next = if many > most {
                workers * 2
            } else {
                few + (many - few) / 2
            };
        }
    }
    Ok(trials)
}
