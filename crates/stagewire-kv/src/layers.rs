//! Which layer of one side is which layer of the other, and on which pipeline stage each of them is.

use std::collections::BTreeMap;

use crate::{Component, Layout};

/// Positions (source, destination) in the components' lists of layers, in the order of the destination; `None` where the
/// two sides do not have the same layers.
pub(crate) fn pairs(src: &Component, dst: &Component) -> Option<Vec<(u32, u32)>> {
    if src.layers != dst.layers {
        return None;
    }
    match (&src.layer_ids, &dst.layer_ids) {
        (None, None) => Some((0..dst.layers).map(|layer| (layer, layer)).collect()),
        (Some(from), Some(to)) => {
            let mut places: Vec<(u32, u32)> = from.iter().copied().zip(0..).collect();
            places.sort_unstable();
            let source = |id: &u32| {
                let found = places.binary_search_by_key(id, |&(id, _)| id).ok()?;
                Some(places[found].1)
            };
            to.iter()
                .zip(0..)
                .map(|(id, layer)| Some((source(id)?, layer)))
                .collect()
        }
        _ => None,
    }
}

/// Layers that one pipeline stage has of a component.
pub(crate) fn per_stage(component: &Component, stages: u32) -> u32 {
    component.layers / stages
}

/// The pairs between each two stages that have any, as positions in each stage's own list.
pub(crate) fn by_stage(
    pairs: &[(u32, u32)],
    (src, src_stages): (&Component, u32),
    (dst, dst_stages): (&Component, u32),
) -> BTreeMap<(u32, u32), Vec<(u32, u32)>> {
    if dst.layout == Layout::PageMajor {
        // One buffer for all layers of a stage.
        return (0..dst_stages).map(|stage| ((stage, stage), vec![(0, 0)])).collect();
    }
    let (src_each, dst_each) = (per_stage(src, src_stages), per_stage(dst, dst_stages));
    let mut stages: BTreeMap<(u32, u32), Vec<(u32, u32)>> = BTreeMap::new();
    for &(from, to) in pairs {
        let here = stages.entry((from / src_each, to / dst_each)).or_default();
        here.push((from % src_each, to % dst_each));
    }
    stages
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;

    use super::*;

    fn with_ids(ids: &[u32]) -> Component {
        let layers = u32::try_from(ids.len()).unwrap();
        Component {
            layer_ids: Some(ids.to_vec()),
            ..Component::mha("full", layers, 1, [1, 1], DType::U8)
        }
    }

    #[test]
    fn layers_are_paired_by_id() {
        let found = pairs(&with_ids(&[10, 20]), &with_ids(&[20, 10]));
        assert_eq!(found, Some(vec![(1, 0), (0, 1)]));
        assert_eq!(pairs(&with_ids(&[10, 20]), &with_ids(&[10, 30])), None);
    }

    #[test]
    fn stages_hold_equal_parts() {
        let component = Component::mha("full", 6, 1, [1, 1], DType::U8);
        let all = pairs(&component, &component).unwrap();
        let found = by_stage(&all, (&component, 2), (&component, 1));
        let layers = [[(0, 0), (1, 1), (2, 2)], [(0, 3), (1, 4), (2, 5)]].map(Vec::from);
        assert_eq!(
            found,
            BTreeMap::from([(0, 0), (1, 0)].map(|stage| (stage, layers[stage.0 as usize].clone())))
        );
        let alone = by_stage(&all, (&component, 2), (&component, 2));
        assert_eq!(alone.into_keys().collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    }
}
