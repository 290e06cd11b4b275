use std::time::Duration;

use crate::Random;
use crate::experiment::{Arrivals, Experiment};

/// A job that comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coming {
    pub(crate) at: Duration,
    pub(crate) class: usize,
    pub(crate) scale: f64,
}

/// Everybody who comes, in order of time.
pub(crate) fn all(experiment: &Experiment) -> Vec<Coming> {
    match &experiment.arrivals {
        Arrivals::Trace(arrivals) => arrivals
            .iter()
            .map(|arrival| Coming {
                at: arrival.at,
                class: arrival.class,
                scale: arrival.scale * experiment.classes[arrival.class].scale,
            })
            .collect(),
        Arrivals::Model { jobs, rate, burst } => {
            let mut random = Random::branch(experiment.seed, "arrivals");
            let mean = Duration::from_secs_f64(burst / rate);
            let mut at = Duration::ZERO;
            let mut all = Vec::new();
            while (all.len() as u64) < *jobs {
                at += random.exponential(mean);
                // Geometric: another one comes along, and then perhaps another one.
                loop {
                    let class = pick(experiment, random.fraction());
                    let scale = experiment.classes[class].scale;
                    all.push(Coming { at, class, scale });
                    if all.len() as u64 == *jobs || !random.chance(1.0 - 1.0 / burst) {
                        break;
                    }
                }
            }
            all
        }
    }
}

fn pick(experiment: &Experiment, fraction: f64) -> usize {
    let total: f64 = experiment.classes.iter().map(|class| class.share).sum();
    let mut left = fraction * total;
    let position = experiment.classes.iter().position(|class| {
        left -= class.share;
        left < 0.0
    });
    position.unwrap_or_default()
}
