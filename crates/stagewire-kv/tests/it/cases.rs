//! The numeric cases of `cases.json`.
//!
//! `peer_routes` are those of the peers, redundant replicas included; ours are those of `minimal_slices`. A case's first
//! descriptor is that of the first token; ours come by destination offset, so it stands somewhere among them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use stagewire_core::DType;
use stagewire_kv::{Component, Descriptor, Engine, Geometry, Pair, Plan, PlanRequest, handshake};

struct Case(Value);

impl Case {
    fn all() -> Vec<Self> {
        let cases: Vec<Value> = serde_json::from_str(include_str!("cases.json")).unwrap();
        cases.into_iter().map(Self).collect()
    }

    fn name(&self) -> &str {
        self.0["name"].as_str().unwrap()
    }

    fn number(&self, field: &str) -> u64 {
        self.0[field].as_u64().unwrap()
    }

    fn components(&self) -> Vec<Component> {
        let component = |value: &Value| {
            let number = |field: &str| u32::try_from(value[field].as_u64().unwrap()).unwrap();
            assert_eq!(number("esize"), 2);
            let name = value["kind"].as_str().unwrap();
            let dims = [number("k_dim"), number("v_dim")];
            Component {
                window: (name == "swa").then(|| self.number("window")),
                ..Component::mha(name, number("layers"), number("heads"), dims, DType::BF16)
            }
        };
        self.0["comps"].as_array().unwrap().iter().map(component).collect()
    }

    fn pair(&self) -> Pair {
        let engine = |tp: &str| {
            let size = u32::try_from(self.number(tp)).unwrap();
            let page = u32::try_from(self.number("page")).unwrap();
            Engine::new(Geometry::new(size, page, self.components())).unwrap()
        };
        handshake(&engine("P"), &engine("D")).unwrap()
    }

    fn tables(&self) -> BTreeMap<&'static str, [Vec<i64>; 2]> {
        let table = |field: &str| {
            let pages = self.0[field].as_array().unwrap().iter();
            pages.map(|page| page.as_i64().unwrap()).collect::<Vec<_>>()
        };
        let mut tables = BTreeMap::from([("full", [table("p_full"), table("d_full")])]);
        if self.0["comps"].as_array().unwrap().len() > 1 {
            tables.insert("swa", [table("p_swa"), table("d_swa")]);
        }
        tables
    }

    fn plan(&self, pair: &Pair, (src, dst): (u32, u32), exact_window: bool) -> Plan {
        let tables = self.tables();
        let mut request = PlanRequest::new(src, dst, self.number("seq_len"));
        request.exact_window = exact_window;
        for (name, [src, dst]) in &tables {
            request = request.pages(name, src, dst);
            request.prefix.insert(name, self.number(&format!("{name}_prefix")));
        }
        pair.plan(&request).unwrap()
    }

    fn pairs(&self, field: &str) -> BTreeSet<(u32, u32)> {
        serde_json::from_value(self.0[field].clone()).unwrap()
    }
}

#[test]
fn routes_are_the_peers_without_redundant_writers() {
    for case in Case::all() {
        let pair = case.pair();
        let mut minimal = BTreeSet::new();
        for (component, slices) in case.0["minimal_slices"].as_object().unwrap() {
            for slice in slices.as_array().unwrap() {
                let number = |field: &str| u32::try_from(slice[field].as_u64().unwrap()).unwrap();
                let (src, dst) = (number("src"), number("dst"));
                minimal.insert((src, dst));
                let ours = pair.slice(component, src, dst).unwrap();
                let ours = (ours.src_head_start, ours.dst_head_start, ours.num_heads);
                let published = ("src_head_start", "dst_head_start", "num_heads");
                let published = (number(published.0), number(published.1), number(published.2));
                assert_eq!(ours, published, "{}: {component} {src} -> {dst}", case.name());
            }
        }
        let routes: BTreeSet<_> = pair.routes().into_iter().collect();
        assert_eq!(routes, minimal, "{}", case.name());
        assert!(routes.is_subset(&case.pairs("peer_routes")), "{}", case.name());
    }
}

#[test]
fn totals_and_ranges() {
    for case in Case::all() {
        let pair = case.pair();
        for (exact, rows, bytes) in [
            (false, "coalesced_page_granular", "bytes_page_granular"),
            (true, "coalesced_exact", "bytes_exact"),
        ] {
            let plans: Vec<_> = pair
                .routes()
                .into_iter()
                .map(|route| case.plan(&pair, route, exact))
                .collect();
            let found: usize = plans.iter().map(|plan| plan.descriptors().unwrap().len()).sum();
            assert_eq!(found as u64, case.number(rows), "{}: {rows}", case.name());
            let counted: usize = plans.iter().map(Plan::descriptor_count).sum();
            assert_eq!(counted, found);
            let moved: u64 = plans.iter().map(Plan::nbytes).sum();
            assert_eq!(moved, case.number(bytes), "{}: {bytes}", case.name());
            for section in plans.iter().flat_map(Plan::sections) {
                let range = section.token_range();
                let published: [u64; 3] =
                    serde_json::from_value(case.0["token_range"][section.name()].clone()).unwrap();
                assert_eq!([range.page_start, range.start, range.end], published, "{}", case.name());
            }
        }
    }
}

#[test]
fn naive_descriptors_are_one_for_each_token_of_the_peers_routes() {
    for case in Case::all() {
        let pair = case.pair();
        let plan = case.plan(&pair, pair.routes()[0], false);
        let (page, routes) = (case.number("page"), case.pairs("peer_routes").len() as u64);
        let each = plan
            .sections()
            .iter()
            .zip(case.components())
            .map(|(section, component)| {
                let range = section.token_range();
                let tokens = range.end.next_multiple_of(page) - range.page_start;
                tokens * 2 * u64::from(component.layers) * routes
            });
        assert_eq!(each.sum::<u64>(), case.number("naive_descriptors"), "{}", case.name());
    }
}

#[test]
fn first_descriptors() {
    for case in Case::all() {
        let pair = case.pair();
        for published in case.0["first_descriptor_per_pair_comp_kv"].as_array().unwrap() {
            let wide = |field: &str| published[field].as_u64().unwrap();
            let number = |field: &str| u32::try_from(wide(field)).unwrap();
            let route = (number("src_rank"), number("dst_rank"));
            if !pair.routes().contains(&route) {
                assert!(case.pairs("peer_routes").contains(&route));
                continue;
            }
            let wanted = Descriptor {
                component: number("comp"),
                src_layer: number("src_layer"),
                dst_layer: number("dst_layer"),
                kv: number("kv"),
                src_off: wide("src_off"),
                dst_off: wide("dst_off"),
                nbytes: wide("len"),
            };
            let all = case.plan(&pair, route, false).descriptors().unwrap();
            assert!(all.contains(&wanted), "{}: {wanted:?}", case.name());
        }
    }
}

#[test]
fn descriptors_are_in_order() {
    for case in Case::all() {
        let pair = case.pair();
        for route in pair.routes() {
            let all = case.plan(&pair, route, true).descriptors().unwrap();
            assert!(
                all.is_sorted_by_key(|d| (d.component, d.kv, d.dst_layer, d.dst_off)),
                "{}",
                case.name()
            );
        }
    }
}
