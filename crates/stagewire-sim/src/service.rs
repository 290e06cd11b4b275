use std::collections::BTreeMap;

/// Times and sizes of one workload, from a published measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// What an experiment calls it.
    pub name: &'static str,
    /// What was measured, where, and who says so.
    pub source: &'static str,
    /// Name, seconds of one job, bytes that it hands on.
    pub stages: &'static [(&'static str, f64, u64)],
}

/// The workloads that an experiment can name. Where a source gives no sizes, they follow from the shapes of the model:
/// text embeddings of UMT5 for both branches of guidance, latents in bf16.
pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "wan-dfx",
        source: "Wan in the DFX benchmark of vllm-omni (PR 7737), one job at a time, H-class GPU: text 0.07 s and VAE encode \
                 1.38 s, denoise 20.35 s, decode 2.40 s; sizes as of 1280x720, 121 frames",
        stages: &[
            ("encode", 1.45, 8_388_608),
            ("denoise", 20.35, 14_284_800),
            ("decode", 2.40, 0),
        ],
    },
    Workload {
        name: "wan-1.3b",
        source: "Wan2.1-T2V-1.3B, 81 frames of 1024x1024, 50 steps, H200, layerwise offload (SGLang documentation)",
        stages: &[
            ("encode", 2.3, 8_388_608),
            ("denoise", 312.8, 11_010_048),
            ("decode", 7.1, 0),
        ],
    },
    Workload {
        name: "ltx-2.3",
        source: "LTX-2.3 in two stages, 24 frames, H100 (SGLang PR 24304): encode 1.04 s, denoise 5.41 and 0.39 s, 7.74 s in all",
        stages: &[
            ("encode", 1.04, 7_864_320),
            ("denoise", 5.80, 1_572_864),
            ("decode", 0.90, 0),
        ],
    },
];

/// Seconds and output bytes of a stage, as measured: from a [`Workload`] or a file.
pub(crate) type Measured = BTreeMap<String, (f64, u64)>;

/// The workload of this name.
pub(crate) fn workload(name: &str) -> Option<Measured> {
    let found = WORKLOADS.iter().find(|workload| workload.name == name)?;
    let stages = found.stages.iter();
    Some(
        stages
            .map(|(stage, seconds, nbytes)| ((*stage).to_owned(), (*seconds, *nbytes)))
            .collect(),
    )
}
