use crate::buffers::Buffers;
use crate::heads::owned;
use crate::pair::Place;
use crate::{Engine, Incompatible, Layout, handshake, layers};

/// One buffer of one rank's memory: K or V of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankBuffer {
    /// Index of the component in the engine's list.
    pub component: u32,
    /// 0 = K, 1 = V; 2 and 3 are their scales, of components that have them.
    pub kv: u32,
    /// The layer, counted in the rank's own. 0 where one buffer holds all of them.
    pub layer: u32,
    /// Bytes of one page.
    pub page_bytes: u64,
}

impl Engine {
    /// The buffers that a rank has, by (component, kv, layer): `[K_0 .. K_n, V_0 .. V_n]` for each component.
    ///
    /// # Errors
    /// [`Incompatible`] where this engine could not even be paired with one like itself.
    pub fn buffers(&self, rank: u32) -> Result<Vec<RankBuffer>, Incompatible> {
        handshake(self, self)?;
        let geometry = self.geometry();
        let tp = Place::of(rank, geometry).tp;
        let mut all = Vec::new();
        for (index, component) in (0..).zip(&geometry.components) {
            let here = layers::per_stage(component, geometry.pp_size);
            let buffers = Buffers::of(component, geometry.page_size, here).expect("checked when the engine was made");
            let heads = if component.kind.is_replicated() {
                component.kv_heads
            } else {
                owned(component.kv_heads, geometry.tp_size, tp).len()
            };
            let layers = if component.layout == Layout::PageMajor { 1 } else { here };
            for buffer in &buffers.list {
                all.extend((0..layers).map(|layer| RankBuffer {
                    component: index,
                    kv: buffer.kv,
                    layer,
                    page_bytes: buffer.head * u64::from(heads) * buffers.tokens,
                }));
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;

    use super::*;
    use crate::{Component, Geometry};

    #[test]
    fn a_rank_has_the_buffers_of_its_heads_and_its_stage() {
        let full = Component::mha("full", 4, 8, [64, 32], DType::BF16);
        let latent = Component::mla("latent", 2, 576, DType::BF16);
        let mut geometry = Geometry::new(2, 16, vec![full, latent]);
        geometry.pp_size = 2;
        let engine = Engine::new(geometry).expect("sizes");
        let found = engine.buffers(3).expect("it splits");
        let shown: Vec<_> = found
            .iter()
            .map(|b| (b.component, b.kv, b.layer, b.page_bytes))
            .collect();
        let (k, v) = (16 * 4 * 64 * 2, 16 * 4 * 32 * 2);
        let latent = 16 * 576 * 2;
        assert_eq!(
            shown,
            [
                (0, 0, 0, k),
                (0, 0, 1, k),
                (0, 1, 0, v),
                (0, 1, 1, v),
                (1, 0, 0, latent)
            ]
        );
        let odd = Component::mha("full", 1, 6, [8, 8], DType::BF16);
        let odd = Engine::new(Geometry::new(4, 16, vec![odd])).expect("sizes");
        assert!(odd.buffers(0).is_err(), "6 heads over 4 ranks");
    }
}
