//! The published table of real models: bf16, pages of 64 tokens, TP 1 to TP 4 and back, all ranks.

use stagewire_core::DType;
use stagewire_kv::{Component, Engine, Geometry, Pair, Plan, PlanRequest, handshake};

/// Full layers and those of the window: layers, heads; dims of K and V; past tokens of the window.
struct Model {
    layers: [u32; 2],
    heads: [u32; 2],
    dims: [u32; 2],
    window: u64,
}

/// What the table says of a number of tokens.
struct Row {
    tokens: u64,
    /// A descriptor for each token, of the full layers and of the window.
    naive: [usize; 2],
    kib: [u64; 2],
    /// Records where no two pages follow each other, and where all do.
    records: [usize; 2],
}

const fn row(tokens: u64, naive: [usize; 2], kib: [u64; 2], records: [usize; 2]) -> Row {
    Row {
        tokens,
        naive,
        kib,
        records,
    }
}

impl Model {
    fn pair(&self, src_tp: u32, dst_tp: u32) -> Pair {
        let full = Component::mha("full", self.layers[0], self.heads[0], self.dims, DType::BF16);
        let swa = Component {
            window: Some(self.window),
            ..Component::mha("swa", self.layers[1], self.heads[1], self.dims, DType::BF16)
        };
        let engine = |tp| Engine::new(Geometry::new(tp, 64, vec![full.clone(), swa.clone()])).unwrap();
        handshake(&engine(src_tp), &engine(dst_tp)).unwrap()
    }

    #[track_caller]
    fn has(&self, rows: &[Row]) {
        for (src_tp, dst_tp) in [(1, 4), (4, 1)] {
            let pair = self.pair(src_tp, dst_tp);
            for row in rows {
                let run: Vec<i64> = (1..=i64::try_from(row.tokens / 64).unwrap()).collect();
                let scattered: Vec<i64> = run.iter().map(|page| 2 * page).collect();
                for (src, records) in [(&scattered, row.records[0]), (&run, row.records[1])] {
                    let plans: Vec<Plan> = pair
                        .routes()
                        .into_iter()
                        .map(|(from, to)| {
                            let request = PlanRequest::new(from, to, row.tokens);
                            let request = request.pages("full", src, &run).pages("swa", src, &run);
                            pair.plan(&request).unwrap()
                        })
                        .collect();
                    let each = |name: &'static str| plans.iter().map(move |plan| plan.section(name).unwrap());
                    for (at, name) in ["full", "swa"].into_iter().enumerate() {
                        let naive: usize = each(name).map(|section| section.descriptor_count()).sum();
                        let bytes: u64 = each(name).map(|section| section.nbytes()).sum();
                        let found = (naive, bytes);
                        assert_eq!(
                            found,
                            (row.naive[at], row.kib[at] << 10),
                            "{name}, {} tokens",
                            row.tokens
                        );
                    }
                    assert_eq!(plans.iter().map(Plan::record_count).sum::<usize>(), records);
                }
            }
        }
    }
}

#[test]
fn gpt_oss() {
    let model = |layers| Model {
        layers,
        heads: [8, 8],
        dims: [64, 64],
        window: 127,
    };
    model([12, 12]).has(&[
        row(2_048, [196_608, 12_288], [48 << 10, 3 << 10], [3_264, 192]),
        row(8_192, [786_432, 12_288], [192 << 10, 3 << 10], [12_480, 192]),
        row(32_768, [3_145_728, 12_288], [768 << 10, 3 << 10], [49_344, 192]),
        row(131_072, [12_582_912, 12_288], [3_072 << 10, 3 << 10], [196_800, 192]),
    ]);
    model([18, 18]).has(&[
        row(8_192, [1_179_648, 18_432], [288 << 10, 4_608], [18_720, 288]),
        row(131_072, [18_874_368, 18_432], [4_608 << 10, 4_608], [295_200, 288]),
    ]);
}

#[test]
fn gemma_3_27b() {
    let model = Model {
        layers: [10, 52],
        heads: [16, 16],
        dims: [128, 128],
        window: 1023,
    };
    model.has(&[
        row(8_192, [655_360, 425_984], [640 << 10, 416 << 10], [16_896, 496]),
        row(
            131_072,
            [10_485_760, 425_984],
            [10_240 << 10, 416 << 10],
            [170_496, 496],
        ),
    ]);
}

#[test]
fn llama_4_scout() {
    let model = Model {
        layers: [12, 36],
        heads: [8, 8],
        dims: [128, 128],
        window: 8192,
    };
    model.has(&[
        row(8_192, [786_432, 2_359_296], [384 << 10, 1_152 << 10], [49_152, 384]),
        row(
            131_072,
            [12_582_912, 2_359_296],
            [6_144 << 10, 1_152 << 10],
            [233_472, 384],
        ),
    ]);
}

#[test]
fn ministral_8b() {
    let model = Model {
        layers: [9, 27],
        heads: [8, 8],
        dims: [128, 128],
        window: 32_767,
    };
    model.has(&[row(
        32_768,
        [2_359_296, 7_077_888],
        [1_152 << 10, 3_456 << 10],
        [147_456, 288],
    )]);
}

/// Other heads in the window, and K and V of different dimension. The table rounds 24.4 MiB of the window to 24.
#[test]
fn mimo_v2_flash() {
    let model = Model {
        layers: [9, 39],
        heads: [4, 8],
        dims: [192, 128],
        window: 127,
    };
    model.has(&[row(8_192, [589_824, 39_936], [180 << 10, 24_960], [9_840, 384])]);
}
