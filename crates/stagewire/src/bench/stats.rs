use std::time::Duration;

/// Median and quartiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) first_quartile: f64,
    pub(crate) median: f64,
    pub(crate) third_quartile: f64,
}

impl Summary {
    /// Of at least one value; quantiles between two values are interpolated.
    ///
    /// # Panics
    /// Where there is no value.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        assert!(!values.is_empty(), "nothing was measured");
        values.sort_by(f64::total_cmp);
        Self {
            first_quartile: quantile(&values, 0.25),
            median: quantile(&values, 0.5),
            third_quartile: quantile(&values, 0.75),
        }
    }
}

/// Of at least one time.
pub(crate) fn quantile_of(times: &[Duration], q: f64) -> Duration {
    let mut seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
    seconds.sort_by(f64::total_cmp);
    Duration::from_secs_f64(quantile(&seconds, q))
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far fewer values than 2^52")]
    let place = q * (sorted.len() - 1) as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index of the slice"
    )]
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

/// One thing and its reference, measured right after each other, again and again: what slows the machine down for a
/// while slows both.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    value: Vec<f64>,
    reference: Vec<f64>,
}

impl Pairs {
    /// Of values and references that were measured in the same rounds.
    pub(crate) fn of(values: &[Duration], references: &[Duration]) -> Self {
        let mut pairs = Self::default();
        for (value, reference) in values.iter().zip(references) {
            pairs.push(*value, *reference);
        }
        pairs
    }

    pub(crate) fn push(&mut self, value: Duration, reference: Duration) {
        self.value.push(value.as_secs_f64());
        self.reference.push(reference.as_secs_f64());
    }

    /// Beside so many times the reference.
    pub(crate) fn with_reference_times(mut self, factor: f64) -> Self {
        self.reference.iter_mut().for_each(|seconds| *seconds *= factor);
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.value.len()
    }

    /// Of the values, each turned from seconds into another unit.
    pub(crate) fn value_by(&self, unit: impl Fn(f64) -> f64) -> Summary {
        Summary::of(self.value.iter().map(|seconds| unit(*seconds)))
    }

    /// As [`Pairs::value_by`], of the references.
    pub(crate) fn reference_by(&self, unit: impl Fn(f64) -> f64) -> Summary {
        Summary::of(self.reference.iter().map(|seconds| unit(*seconds)))
    }

    /// Of the ratios of the pairs, which is not the ratio of the medians.
    pub(crate) fn ratio_by(&self, unit: impl Fn(f64) -> f64) -> Summary {
        Summary::of(self.paired().map(|(value, reference)| unit(value) / unit(reference)))
    }

    /// Seconds by which the value exceeds its reference, pair by pair.
    pub(crate) fn excess(&self) -> Summary {
        Summary::of(self.paired().map(|(value, reference)| value - reference))
    }

    fn paired(&self) -> impl Iterator<Item = (f64, f64)> {
        self.value.iter().copied().zip(self.reference.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let summary = Summary::of([4.0, 1.0, 3.0, 2.0]);
        assert_eq!(
            (summary.first_quartile, summary.median, summary.third_quartile),
            (1.75, 2.5, 3.25)
        );
        let times = [4, 1, 3, 2, 5].map(Duration::from_secs);
        assert_eq!(quantile_of(&times, 0.75), Duration::from_secs(4));
        let one = Summary::of([7.0]);
        assert_eq!((one.first_quartile, one.median, one.third_quartile), (7.0, 7.0, 7.0));
    }

    #[test]
    fn ratios_are_paired() {
        let mut pairs = Pairs::default();
        let ms = Duration::from_millis;
        // A machine that is slow half of the time: the ratio stays 2.
        for (value, reference) in [(2, 1), (20, 10), (2, 1), (20, 10), (2, 1)] {
            pairs.push(ms(value), ms(reference));
        }
        assert!((pairs.ratio_by(|seconds| seconds).median - 2.0).abs() < 1e-9);
        assert!((pairs.excess().median - 0.001).abs() < 1e-9);
        assert_eq!(pairs.len(), 5);
    }
}
