use std::time::Duration;

/// Random numbers that a seed decides, now and in every later version: SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The numbers of this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Numbers of their own for one purpose, so that another one's draws do not change them.
    pub fn branch(seed: u64, purpose: &str) -> Self {
        let mut state = Self::new(seed);
        for byte in purpose.bytes() {
            state = Self::new(state.next().wrapping_add(u64::from(byte)));
        }
        Self::new(state.next())
    }

    /// Any number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below the bound; 0 where that is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }

    /// A place in a list of this length; 0 for an empty one.
    #[expect(clippy::cast_possible_truncation, reason = "below a usize")]
    pub const fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from 0 to below 1.
    pub const fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with this probability.
    pub const fn chance(&mut self, probability: f64) -> bool {
        self.fraction() < probability
    }

    /// A time in these bounds, the longer one left out.
    pub fn between(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let span = u64::try_from(longest.saturating_sub(shortest).as_nanos()).unwrap_or(u64::MAX);
        shortest + Duration::from_nanos(self.below(span))
    }

    /// A time until the next of many independent events that are this far apart on average; at most 40 times that.
    pub fn exponential(&mut self, mean: Duration) -> Duration {
        // ln(2^-53) is -36.7.
        mean.mul_f64(-(1.0 - self.fraction()).ln())
    }

    /// A factor of mean 1 with this coefficient of variation, log-normally distributed.
    pub fn log_normal(&mut self, variation: f64) -> f64 {
        if variation <= 0.0 {
            return 1.0;
        }
        let variance = variation.mul_add(variation, 1.0).ln();
        // Box and Muller, 1958.
        let (radius, angle) = (
            (-2.0 * (1.0 - self.fraction()).ln()).sqrt(),
            std::f64::consts::TAU * self.fraction(),
        );
        (variance.sqrt() * radius * angle.cos() - variance / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_paper() {
        // Reference values of the public-domain splitmix64.c for seed 1234567.
        let mut random = Random::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!([random.next(), random.next(), random.next()], expected);
    }

    #[test]
    fn bounds_and_means_hold() {
        let mut random = Random::branch(1, "test");
        let mut sum = Duration::ZERO;
        let (mut low, mut high) = (u64::MAX, 0);
        for _ in 0..10_000 {
            let below = random.below(10);
            (low, high) = (low.min(below), high.max(below));
            sum += random.exponential(Duration::from_millis(10));
            let between = random.between(Duration::from_secs(1), Duration::from_secs(2));
            assert!(Duration::from_secs(1) <= between && between < Duration::from_secs(2));
        }
        assert_eq!((low, high), (0, 9));
        let mean = sum / 10_000;
        assert!(
            Duration::from_micros(9_700) < mean && mean < Duration::from_micros(10_300),
            "{mean:?}"
        );
        let factors: Vec<f64> = (0..20_000).map(|_| random.log_normal(0.5)).collect();
        let mean = factors.iter().sum::<f64>() / 20_000.0;
        let variance = factors.iter().map(|factor| (factor - mean).powi(2)).sum::<f64>() / 20_000.0;
        assert!(
            (0.98..1.02).contains(&mean) && (0.46..0.54).contains(&variance.sqrt()),
            "{mean} {variance}"
        );
        assert_ne!(Random::branch(1, "a").next(), Random::branch(1, "b").next());
    }
}
