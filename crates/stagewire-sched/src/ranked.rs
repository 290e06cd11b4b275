use std::fmt;

/// Items of a leaf, and children of a branch.
const WIDTH: usize = 32;

/// A sorted set that also knows how many of its items come before a given one: a B+ tree whose branches count what is
/// below them. Every operation takes time in proportion to the logarithm of its size at its largest. What grows at its end,
/// as queues and deadlines do, costs less than in a set of the standard library, which looks at each key on the way there.
#[derive(Clone)]
pub(crate) struct Ranked<T>(Node<T>);

#[derive(Clone)]
enum Node<T> {
    Leaf(Vec<T>),
    Branch(Vec<Child<T>>),
}

#[derive(Clone)]
struct Child<T> {
    len: usize,
    /// No item of the child is below.
    least: T,
    node: Node<T>,
}

impl<T: Ord + Copy> Ranked<T> {
    /// Returns false where it was there.
    pub(crate) fn insert(&mut self, item: T) -> bool {
        let (added, split) = self.0.insert(item);
        if let Some(right) = split {
            let left = std::mem::replace(&mut self.0, Node::Leaf(Vec::new()));
            let children = [Child::of(left), Some(right)];
            self.0 = Node::Branch(children.into_iter().flatten().collect());
        }
        added
    }

    /// Returns false where it was not there.
    pub(crate) fn remove(&mut self, item: &T) -> bool {
        let removed = self.0.remove(item);
        loop {
            let only = match &mut self.0 {
                Node::Branch(children) if children.len() <= 1 => children.pop(),
                Node::Branch(_) | Node::Leaf(_) => return removed,
            };
            self.0 = only.map_or(Node::Leaf(Vec::new()), |child| child.node);
        }
    }

    /// The lowest item.
    pub(crate) fn first(&self) -> Option<&T> {
        let mut node = &self.0;
        loop {
            match node {
                Node::Leaf(items) => return items.first(),
                Node::Branch(children) => node = &children.first()?.node,
            }
        }
    }

    /// Number of items below this one.
    pub(crate) fn below(&self, item: &T) -> usize {
        let (mut node, mut below) = (&self.0, 0);
        loop {
            match node {
                Node::Leaf(items) => return below + items.partition_point(|other| other < item),
                Node::Branch(children) => {
                    let at = children.partition_point(|child| child.least <= *item).saturating_sub(1);
                    below += children[..at].iter().map(|child| child.len).sum::<usize>();
                    node = &children[at].node;
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        // A branch without items goes.
        matches!(&self.0, Node::Leaf(items) if items.is_empty())
    }

    /// In order.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = &T> + '_> {
        self.0.iter()
    }
}

impl<T: Ord + Copy> Node<T> {
    fn len(&self) -> usize {
        match self {
            Self::Leaf(items) => items.len(),
            Self::Branch(children) => children.iter().map(|child| child.len).sum(),
        }
    }

    fn iter(&self) -> Box<dyn Iterator<Item = &T> + '_> {
        match self {
            Self::Leaf(items) => Box::new(items.iter()),
            Self::Branch(children) => Box::new(children.iter().flat_map(|child| child.node.iter())),
        }
    }

    /// Whether it was added, and the part that is one too many then.
    fn insert(&mut self, item: T) -> (bool, Option<Child<T>>) {
        match self {
            Self::Leaf(items) => {
                let Err(at) = items.binary_search(&item) else {
                    return (false, None);
                };
                items.insert(at, item);
                (true, split(items, at).and_then(|right| Child::of(Self::Leaf(right))))
            }
            Self::Branch(children) => {
                let at = children.partition_point(|child| child.least <= item).saturating_sub(1);
                let child = &mut children[at];
                let (added, right) = child.node.insert(item);
                child.len += usize::from(added);
                child.least = child.least.min(item);
                let Some(right) = right else { return (added, None) };
                child.len -= right.len;
                children.insert(at + 1, right);
                (
                    added,
                    split(children, at + 1).and_then(|right| Child::of(Self::Branch(right))),
                )
            }
        }
    }

    fn remove(&mut self, item: &T) -> bool {
        match self {
            Self::Leaf(items) => {
                let found = items.binary_search(item);
                found.map(|at| items.remove(at)).is_ok()
            }
            Self::Branch(children) => {
                let at = children.partition_point(|child| child.least <= *item);
                let Some(child) = at.checked_sub(1).map(|at| &mut children[at]) else {
                    return false;
                };
                let removed = child.node.remove(item);
                child.len -= usize::from(removed);
                if child.len == 0 {
                    children.remove(at - 1);
                }
                removed
            }
        }
    }
}

/// Takes away what is too much after an addition at a place. What grows at its end, as queues do, is left full.
fn split<T>(items: &mut Vec<T>, added: usize) -> Option<Vec<T>> {
    if items.len() <= WIDTH {
        return None;
    }
    let at = if added + 1 == items.len() { added } else { WIDTH / 2 };
    let mut right = Vec::with_capacity(WIDTH + 1);
    right.extend(items.drain(at..));
    Some(right)
}

impl<T: Ord + Copy> Child<T> {
    /// `None` for a node without items.
    fn of(node: Node<T>) -> Option<Self> {
        let least = match &node {
            Node::Leaf(items) => *items.first()?,
            Node::Branch(children) => children.first()?.least,
        };
        let len = node.len();
        Some(Self { len, least, node })
    }
}

impl<T> Default for Ranked<T> {
    fn default() -> Self {
        Self(Node::Leaf(Vec::new()))
    }
}

impl<T: Ord + Copy> PartialEq for Ranked<T> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<T: Ord + Copy> Eq for Ranked<T> {}

impl<T: Ord + Copy + fmt::Debug> fmt::Debug for Ranked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_is_a_sorted_set_that_counts(ops in prop::collection::vec((any::<bool>(), 0_u16..2_000), 0..6_000)) {
            let (mut ranked, mut oracle) = (Ranked::default(), BTreeSet::new());
            for (add, item) in ops {
                if add {
                    prop_assert_eq!(ranked.insert(item), oracle.insert(item));
                } else {
                    prop_assert_eq!(ranked.remove(&item), oracle.remove(&item));
                }
                prop_assert_eq!(ranked.first(), oracle.first());
                prop_assert_eq!(ranked.below(&item), oracle.range(..item).count());
            }
            prop_assert!(ranked.iter().eq(oracle.iter()));
            prop_assert_eq!(ranked.len(), oracle.len());
            for item in oracle {
                prop_assert!(ranked.remove(&item));
            }
            prop_assert_eq!(ranked.len(), 0);
            prop_assert!(ranked.is_empty());
        }
    }

    #[test]
    fn a_queue_stays_shallow_for_ever() {
        let mut ranked = Ranked::default();
        for number in 0..200_000_u32 {
            ranked.insert(number);
            if number >= 1_000 {
                ranked.remove(&(number - 1_000));
            }
        }
        let mut depth = 0;
        let mut node = &ranked.0;
        while let Node::Branch(children) = node {
            depth += 1;
            node = &children[0].node;
        }
        assert_eq!(ranked.len(), 1_000);
        assert!(depth <= 3, "{depth} branches above a leaf");
    }
}
