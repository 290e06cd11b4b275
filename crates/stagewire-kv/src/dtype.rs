//! Element types of a cache by name: PyTorch's, and those of the engines' options.

use serde::{Deserialize, Deserializer, Serializer, de};
use stagewire_core::{DType, SchemaError};

/// Other names of what is stored. A scale of MXFP8, `float8_e8m0fnu`, is moved as the byte that it is.
const ALIASES: [(&str, DType); 7] = [
    ("bf16", DType::BF16),
    ("fp16", DType::F16),
    ("half", DType::F16),
    ("fp8", DType::F8E4M3),
    ("fp8_e4m3", DType::F8E4M3),
    ("fp8_e5m2", DType::F8E5M2),
    ("float8_e8m0fnu", DType::U8),
];

/// The type of this name: `bfloat16` and the other names of PyTorch, with or without `torch.`, and those which
/// `--kv-cache-dtype` of SGLang and vLLM takes. Not `auto`: what it stands for is known to the engine alone.
///
/// # Errors
/// The name is none of them.
pub fn dtype(name: &str) -> Result<DType, SchemaError> {
    let name = name.strip_prefix("torch.").unwrap_or(name);
    let alias = ALIASES.iter().find(|alias| alias.0 == name);
    alias.map_or_else(|| name.parse(), |alias| Ok(alias.1))
}

pub(crate) fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let name = String::deserialize(deserializer)?;
    dtype(&name).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve() {
        for name in ["bfloat16", "torch.bfloat16", "bf16"] {
            assert_eq!(dtype(name), Ok(DType::BF16));
        }
        assert_eq!(dtype("fp8_e4m3"), dtype("float8_e4m3fn"));
        assert!(dtype("auto").is_err());
    }
}
