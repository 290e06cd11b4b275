use serde_json::{Map, Value};
use stagewire_core::StageName;
use stagewire_sched::CacheKey;

/// What the outputs of stages depend on, where they are made once for all jobs: `cache` and `cache-version` of the stages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caches(pub(super) Vec<Cached>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cached {
    pub(super) stage: StageName,
    pub(super) version: String,
    /// Sorted.
    pub(super) params: Vec<String>,
}

impl Caches {
    /// The keys of what the stages of a job with these parameters make. Defaults count as well as what was given.
    pub(crate) fn of(&self, params: &Map<String, Value>) -> Vec<(StageName, CacheKey)> {
        let keys = self.0.iter().map(|cached| (cached.stage.clone(), cached.key(params)));
        keys.collect()
    }
}

impl Cached {
    fn key(&self, params: &Map<String, Value>) -> CacheKey {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(self.stage.as_str().as_bytes());
        part(self.version.as_bytes());
        for name in &self.params {
            part(name.as_bytes());
            part(params.get(name).map_or_else(String::new, Value::to_string).as_bytes());
        }
        let mut digest = [0; 16];
        hasher.finalize_xof().fill(&mut digest);
        CacheKey(u128::from_le_bytes(digest))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cached(stage: &str, version: &str, params: &[&str]) -> Cached {
        Cached {
            stage: StageName::new(stage).unwrap(),
            version: version.to_owned(),
            params: params.iter().map(|&param| param.to_owned()).collect(),
        }
    }

    #[test]
    fn whatever_counts_makes_another_key_and_nothing_else_does() {
        let params = |prompt: &str, seed: i64| {
            let Value::Object(map) = json!({"prompt": prompt, "negative": "", "seed": seed}) else {
                unreachable!()
            };
            map
        };
        let encode = cached("encode", "1", &["negative", "prompt"]);
        let key = encode.key(&params("a cat", 1));
        assert_eq!(encode.key(&params("a cat", 2)), key, "the seed is not named");
        assert_ne!(encode.key(&params("a dog", 1)), key);
        assert_ne!(
            cached("encode", "2", &["negative", "prompt"]).key(&params("a cat", 1)),
            key
        );
        assert_ne!(
            cached("refine", "1", &["negative", "prompt"]).key(&params("a cat", 1)),
            key
        );
        assert_ne!(cached("encode", "1", &["prompt"]).key(&params("a cat", 1)), key);
        assert_eq!(Caches(vec![encode]).of(&params("a cat", 1))[0].1, key);
    }
}
