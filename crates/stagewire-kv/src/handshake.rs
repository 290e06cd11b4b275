//! What is known from the geometry alone is refused here, once, before anything moves.

use crate::heads::divides;
use crate::{Component, Engine, Geometry, Incompatible, Kind, Layout, Pair, layers};

/// Pairs a prefill engine with a decode engine.
///
/// Pools may have different sizes, and the two tensor-parallel sizes need not divide each other.
///
/// # Errors
/// [`Incompatible`], with both sides' values, where some room could not be handed over byte for byte.
pub fn handshake(prefill: &Engine, decode: &Engine) -> Result<Pair, Incompatible> {
    let (src, dst) = (prefill.geometry(), decode.geometry());
    engines(src, dst)?;
    for (from, to) in src.components.iter().zip(&dst.components) {
        models(from, to)?;
        ranks(from, src, dst)?;
        stages(from, src, dst)?;
    }
    Ok(Pair::new(prefill.clone(), decode.clone()))
}

fn engines(src: &Geometry, dst: &Geometry) -> Result<(), Incompatible> {
    if src.page_size != dst.page_size {
        return Err(Incompatible::PageSize {
            prefill: src.page_size,
            decode: dst.page_size,
        });
    }
    let names = |geometry: &Geometry| -> Vec<(String, Kind)> {
        geometry.components.iter().map(|c| (c.name.clone(), c.kind)).collect()
    };
    if names(src) != names(dst) {
        return Err(Incompatible::Components {
            prefill: Incompatible::list(&src.components),
            decode: Incompatible::list(&dst.components),
        });
    }
    if src.cp_size != 1 || dst.cp_size != 1 {
        return Err(Incompatible::Context {
            prefill: src.cp_size,
            decode: dst.cp_size,
        });
    }
    if dst.pp_size != 1 && dst.pp_size != src.pp_size {
        return Err(Incompatible::Pipeline {
            prefill: src.pp_size,
            decode: dst.pp_size,
        });
    }
    Ok(())
}

/// Both hold the same model in the same form.
fn models(src: &Component, dst: &Component) -> Result<(), Incompatible> {
    let component = || dst.name.clone();
    if src.dtype != dst.dtype {
        let shown = |c: &Component| format!("{} of {} bytes", c.dtype, c.dtype.size());
        return Err(Incompatible::DType {
            component: component(),
            prefill: shown(src),
            decode: shown(dst),
        });
    }
    if src.layout != dst.layout {
        return Err(Incompatible::Layout {
            component: component(),
            prefill: src.layout,
            decode: dst.layout,
        });
    }
    let shown = |value: Option<u64>| value.map_or("none".to_owned(), |value| value.to_string());
    let number = |c: &Component| {
        [
            ("KV heads", c.kv_heads.to_string()),
            ("K dim", c.k_dim.to_string()),
            ("V dim", c.v_dim.to_string()),
            ("window", shown(c.window)),
            ("elements per scale", shown(c.scales.map(u64::from))),
        ]
    };
    for ((what, prefill), (_, decode)) in number(src).into_iter().zip(number(dst)) {
        if prefill != decode {
            return Err(Incompatible::Model {
                component: component(),
                what,
                prefill,
                decode,
            });
        }
    }
    let pairs = layers::pairs(src, dst);
    // A page that holds all layers moves as it is, so they must stand in the same order.
    let as_they_are =
        |pairs: &Vec<(u32, u32)>| src.layout != Layout::PageMajor || pairs.iter().all(|two| two.0 == two.1);
    if !pairs.as_ref().is_some_and(as_they_are) {
        let shown = |c: &Component| match &c.layer_ids {
            Some(ids) => format!("{ids:?}"),
            None => format!("0 to {}", c.layers - 1),
        };
        return Err(Incompatible::Layers {
            component: component(),
            prefill: shown(src),
            decode: shown(dst),
        });
    }
    Ok(())
}

/// The heads can be cut for these tensor-parallel sizes.
fn ranks(shared: &Component, src: &Geometry, dst: &Geometry) -> Result<(), Incompatible> {
    let component = || shared.name.clone();
    let (prefill_tp, decode_tp) = (src.tp_size, dst.tp_size);
    let latent = src.components.iter().any(|c| c.kind == Kind::Mla);
    let splits = divides(shared.kv_heads, prefill_tp) && divides(shared.kv_heads, decode_tp);
    if !shared.kind.is_replicated() && !splits {
        return Err(Incompatible::HeadSplit {
            component: component(),
            heads: shared.kv_heads,
            prefill_tp,
            decode_tp,
        });
    }
    if prefill_tp == decode_tp {
        return Ok(());
    }
    let whole = shared.kind.is_replicated() && shared.layout != Layout::PageMajor;
    if !shared.layout.is_sliceable() && !whole {
        return Err(Incompatible::LayoutTp {
            component: component(),
            layout: shared.layout,
            prefill_tp,
            decode_tp,
        });
    }
    // Beside a latent, one head of scales is as replicated as the latent itself.
    let whole = shared.kind == Kind::Mla || (latent && shared.kv_heads == 1);
    if shared.is_block_scaled() && !whole {
        return Err(Incompatible::BlockScale {
            component: component(),
            prefill_tp,
            decode_tp,
        });
    }
    if shared.kind == Kind::Mamba || (shared.kind == Kind::Dsa && !latent) {
        return Err(Incompatible::State {
            component: component(),
            kind: shared.kind,
            prefill_tp,
            decode_tp,
        });
    }
    Ok(())
}

/// The layers of each pipeline stage are known.
fn stages(shared: &Component, src: &Geometry, dst: &Geometry) -> Result<(), Incompatible> {
    let component = || shared.name.clone();
    let (prefill_pp, decode_pp) = (src.pp_size, dst.pp_size);
    if prefill_pp == 1 && decode_pp == 1 {
        return Ok(());
    }
    let latent = src.components.iter().any(|c| c.kind == Kind::Mla);
    let window = shared.window.is_some() && !shared.kind.is_replicated() && src.tp_size != dst.tp_size;
    let envelope = shared.layout == Layout::PageMajor && prefill_pp != decode_pp;
    if window || envelope || (shared.kind == Kind::Dsa && !latent) {
        return Err(Incompatible::StatePipeline {
            component: component(),
            kind: shared.kind,
            prefill_pp,
            decode_pp,
            prefill_tp: src.tp_size,
            decode_tp: dst.tp_size,
        });
    }
    if !shared.layers.is_multiple_of(prefill_pp) || !shared.layers.is_multiple_of(decode_pp) {
        return Err(Incompatible::PipelineSplit {
            component: component(),
            layers: shared.layers,
            prefill_pp,
            decode_pp,
        });
    }
    Ok(())
}
