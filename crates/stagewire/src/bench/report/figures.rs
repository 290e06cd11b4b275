use serde::Serialize;

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Figures {
    Measured(Box<Measured>),
    Skipped { skipped: String },
}

#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) value: f64,
    pub(super) value_quartiles: Option<[f64; 2]>,
    pub(super) unit: &'static str,
    pub(super) reference: Option<String>,
    pub(super) reference_value: Option<f64>,
    /// Median of the ratios of the pairs: value by reference, both in the unit of the row.
    pub(super) ratio: Option<f64>,
    pub(super) ratio_quartiles: Option<[f64; 2]>,
    pub(super) pairs: usize,
    pub(super) target: Option<String>,
    pub(super) met: Option<bool>,
}

/// What a row must reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// As people read it.
    pub(crate) text: &'static str,
    pub(crate) goal: Goal,
}

/// When a target is met, as the median over the pairs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    /// Milliseconds by which the value may exceed its reference.
    ExcessMs(f64),
    RatioAtLeast(f64),
    RatioAtMost(f64),
    RatioBetween(f64, f64),
    /// In the unit of the row.
    AtMost(f64),
    /// In the unit of the row.
    AtLeast(f64),
}

impl Goal {
    /// Whether this ratio is one that is wanted; false for what is no goal of a ratio.
    pub(super) fn met_by_ratio(self, ratio: f64) -> bool {
        match self {
            Self::RatioAtLeast(least) => ratio >= least,
            Self::RatioAtMost(most) => ratio <= most,
            Self::RatioBetween(least, most) => (least..=most).contains(&ratio),
            Self::ExcessMs(_) | Self::AtMost(_) | Self::AtLeast(_) => false,
        }
    }
}

/// How times are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Milliseconds,
    Microseconds,
    /// For each of so many things in the time.
    NanosecondsEach {
        count: u32,
    },
    /// Of so many bytes in the time.
    GigabytesPerSecond {
        bytes: u64,
    },
    /// Of so many operations in the time.
    OperationsPerSecond {
        count: u32,
    },
    /// Of so many jobs in the time.
    JobsPerSecond {
        count: u32,
    },
}

impl Unit {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
            Self::Microseconds => "us",
            Self::NanosecondsEach { .. } => "ns",
            Self::GigabytesPerSecond { .. } => "GB/s",
            Self::OperationsPerSecond { .. } => "op/s",
            Self::JobsPerSecond { .. } => "jobs/s",
        }
    }

    pub(super) fn of(self, seconds: f64) -> f64 {
        match self {
            Self::Seconds => seconds,
            Self::Milliseconds => seconds * 1e3,
            Self::Microseconds => seconds * 1e6,
            Self::NanosecondsEach { count } => seconds * 1e9 / f64::from(count),
            #[expect(clippy::cast_precision_loss, reason = "far fewer bytes than 2^52")]
            Self::GigabytesPerSecond { bytes } => bytes as f64 / seconds / 1e9,
            Self::OperationsPerSecond { count } | Self::JobsPerSecond { count } => f64::from(count) / seconds,
        }
    }
}

impl Measured {
    /// One value with nothing beside it.
    pub(super) const fn of(value: f64, unit: &'static str) -> Self {
        Self {
            value,
            value_quartiles: None,
            unit,
            reference: None,
            reference_value: None,
            ratio: None,
            ratio_quartiles: None,
            pairs: 1,
            target: None,
            met: None,
        }
    }
}

impl Figures {
    /// Median, reference, ratio, target, whether it is met.
    pub(super) fn cells(&self) -> [String; 5] {
        let none = String::new;
        match self {
            // The reason stands last, where it makes no column wider.
            Self::Skipped { skipped } => ["skipped".to_owned(), none(), none(), none(), skipped.clone()],
            Self::Measured(row) => {
                let digits = match row.unit {
                    "GB/s" | "s" => 2,
                    "op/s" | "records" => 0,
                    "workers" | "% of jobs" => 1,
                    _ => 3,
                };
                let with_unit = |value: f64| format!("{value:.digits$} {}", row.unit);
                let reference = row.reference.as_ref().zip(row.reference_value);
                let quartiles = row.ratio_quartiles;
                let quartiles = quartiles.map_or_else(none, |[low, high]| format!(" ({low:.2} to {high:.2})"));
                [
                    with_unit(row.value),
                    reference.map_or_else(none, |(name, value)| format!("{name} {}", with_unit(value))),
                    row.ratio.map_or_else(none, |ratio| format!("{ratio:.2}{quartiles}")),
                    row.target.clone().unwrap_or_default(),
                    row.met.map_or("", |met| if met { "met" } else { "MISSED" }).to_owned(),
                ]
            }
        }
    }
}
