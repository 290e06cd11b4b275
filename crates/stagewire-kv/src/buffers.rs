use crate::{Component, Kind, Layout};

/// One buffer of a layer, whose pages hold so many bytes of each token and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// 0 = K, 1 = V, 2 = scales of K, 3 = scales of V.
    pub(crate) kv: u32,
    /// Bytes of one head of one token.
    pub(crate) head: u64,
}

/// The buffers of a layer of one component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buffers {
    pub(crate) list: Vec<Buffer>,
    /// Tokens of a page: 1 for state, which a request has once.
    pub(crate) tokens: u64,
}

impl Buffers {
    /// The buffers of one rank's layer, where the rank holds `layers` layers; `None` where a page of all heads has more bytes than offsets reach.
    pub(crate) fn of(component: &Component, page_size: u32, layers: u32) -> Option<Self> {
        let tokens = if component.kind == Kind::Mamba {
            1
        } else {
            page_size.into()
        };
        let element = component.dtype.size();
        let share = component.scales.map_or(1, u64::from);
        let dims = [u64::from(component.k_dim), u64::from(component.v_dim)];
        let mut bytes = Vec::with_capacity(4);
        if component.kind == Kind::BlockScale {
            bytes.extend(dims.map(|dim| dim / share * element));
        } else {
            bytes.extend(dims.map(|dim| dim * element));
            if component.scales.is_some() {
                bytes.extend(dims.map(|dim| dim / share));
            }
        }
        let mut list: Vec<Buffer> = (0..)
            .zip(bytes)
            .filter(|&(_, head)| head > 0)
            .map(|(kv, head)| Buffer { kv, head })
            .collect();
        if component.layout == Layout::PageMajor {
            let layer: u64 = list.iter().map(|buffer| buffer.head).sum();
            let head = layer.checked_mul(layers.into())?;
            list = vec![Buffer { kv: 0, head }];
        }
        for buffer in &list {
            let token = buffer.head.checked_mul(component.kv_heads.into())?;
            token.checked_mul(tokens)?;
        }
        Some(Self { list, tokens })
    }

    /// [`Buffers::of`] a rank that holds every layer.
    pub(crate) fn whole(component: &Component, page_size: u32) -> Option<Self> {
        Self::of(component, page_size, component.layers)
    }
}
