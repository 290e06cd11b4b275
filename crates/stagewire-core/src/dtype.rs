use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::SchemaError;

/// Element type of a tensor. Names are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each variant is the type that its name says")]
pub enum DType {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    BF16,
    F32,
    F64,
    F8E4M3,
    F8E5M2,
    C64,
}

const NAMES: [(DType, &str, u64); 16] = [
    (DType::Bool, "bool", 1),
    (DType::I8, "int8", 1),
    (DType::I16, "int16", 2),
    (DType::I32, "int32", 4),
    (DType::I64, "int64", 8),
    (DType::U8, "uint8", 1),
    (DType::U16, "uint16", 2),
    (DType::U32, "uint32", 4),
    (DType::U64, "uint64", 8),
    (DType::F16, "float16", 2),
    (DType::BF16, "bfloat16", 2),
    (DType::F32, "float32", 4),
    (DType::F64, "float64", 8),
    (DType::F8E4M3, "float8_e4m3fn", 1),
    (DType::F8E5M2, "float8_e5m2", 1),
    (DType::C64, "complex64", 8),
];

impl DType {
    /// Every element type, in the order of declaration.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.iter().map(|row| row.0)
    }

    /// PyTorch's name without the `torch.` prefix, such as `bfloat16`.
    pub const fn name(self) -> &'static str {
        NAMES[self as usize].1
    }

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        NAMES[self as usize].2
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = SchemaError;

    fn from_str(name: &str) -> Result<Self, SchemaError> {
        NAMES
            .iter()
            .find(|row| row.1 == name)
            .map(|row| row.0)
            .ok_or_else(|| SchemaError::UnknownDType { name: name.to_owned() })
    }
}

/// Where a tensor's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// Memory of the CUDA device with this index.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back() {
        for (index, dtype) in DType::all().enumerate() {
            assert_eq!(dtype as usize, index, "{dtype} stands in the wrong row");
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
        }
    }
}
