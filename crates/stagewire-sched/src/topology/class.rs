use std::time::Duration;

use stagewire_core::StageName;

use super::{Topology, TopologyError};

/// A class of jobs: how much of the workers it gets while others want them too, and how long its jobs may wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassSpec {
    /// Its name, unique in the pipeline.
    pub name: StageName,
    /// Its share of the workers' time, in proportion to the weights of the other classes that wait at a stage.
    pub weight: u32,
    /// A job of the class that has not begun so long after it was submitted is dropped, unless it says otherwise itself.
    pub queue_deadline: Option<Duration>,
    /// Classes whose running attempts are asked to yield where a job of this class waits for nothing but their worker. Of
    /// effect at stages with checkpoints.
    pub preempts: Vec<StageName>,
}

/// Position of a class in [`Topology::classes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct ClassIndex(u8);

impl ClassIndex {
    pub(crate) fn new(position: usize) -> Self {
        Self(u8::try_from(position).expect("a topology has at most 16 classes"))
    }

    pub(crate) const fn get(self) -> usize {
        self.0 as usize
    }
}

impl ClassSpec {
    /// A class without queue deadline that preempts no other.
    pub const fn new(name: StageName, weight: u32) -> Self {
        Self {
            name,
            weight,
            queue_deadline: None,
            preempts: Vec::new(),
        }
    }

    /// `interactive`, `standard` and `batch`, with weights 8, 4 and 1 and no queue deadline; `interactive` preempts `batch`.
    pub fn defaults() -> Vec<Self> {
        let name = |name| StageName::new(name).expect("these names are allowed");
        let [mut interactive, standard, batch] =
            [("interactive", 8), (STANDARD, 4), ("batch", 1)].map(|(class, weight)| Self::new(name(class), weight));
        interactive.preempts.push(batch.name.clone());
        vec![interactive, standard, batch]
    }
}

/// For each class the positions of those that it preempts.
pub(super) fn preempted(classes: &[ClassSpec]) -> Vec<Vec<ClassIndex>> {
    let position = |name: &StageName| classes.iter().position(|class| class.name == *name);
    let of = |class: &ClassSpec| {
        let positions = class.preempts.iter().filter_map(position);
        positions.map(ClassIndex::new).collect()
    };
    classes.iter().map(of).collect()
}

/// Follows who preempts whom from each class, and comes back to none.
fn no_circle(classes: &[ClassSpec]) -> Result<(), TopologyError> {
    let below = preempted(classes);
    for first in 0..classes.len() {
        let mut path = vec![first];
        let mut open = vec![below[first].iter()];
        while let Some(next) = open.last_mut() {
            match next.next().map(|class| class.get()) {
                Some(class) if class == first => {
                    let names = path.iter().chain([&first]);
                    let classes = names.map(|class| classes[*class].name.clone()).collect();
                    return Err(TopologyError::PreemptionCycle { classes });
                }
                Some(class) if !path.contains(&class) => {
                    path.push(class);
                    open.push(below[class].iter());
                }
                Some(_) => (),
                None => {
                    path.pop();
                    open.pop();
                }
            }
        }
    }
    Ok(())
}

/// The class of jobs that name none, where there is one of this name.
const STANDARD: &str = "standard";

impl Topology {
    /// Highest number of classes of a pipeline.
    pub const MAX_CLASSES: usize = 16;
    /// Highest weight of a class.
    pub const MAX_WEIGHT: u32 = 1000;

    /// The same pipeline with these classes in place of [`ClassSpec::defaults`].
    ///
    /// # Errors
    /// [`TopologyError`] for no class or more than [`Topology::MAX_CLASSES`], one declared twice, a weight that is not 1
    /// to [`Topology::MAX_WEIGHT`], a queue deadline of 0, and for classes that preempt one that is not there, or each other.
    pub fn with_classes(self, classes: Vec<ClassSpec>) -> Result<Self, TopologyError> {
        if !(1..=Self::MAX_CLASSES).contains(&classes.len()) {
            return Err(TopologyError::ClassCount { count: classes.len() });
        }
        for (position, class) in classes.iter().enumerate() {
            let name = || class.name.clone();
            if classes[..position].iter().any(|other| other.name == class.name) {
                return Err(TopologyError::DuplicateClass { class: name() });
            }
            if !(1..=Self::MAX_WEIGHT).contains(&class.weight) {
                let (class, weight) = (name(), class.weight);
                return Err(TopologyError::Weight { class, weight });
            }
            if class.queue_deadline.is_some_and(|deadline| deadline.is_zero()) {
                return Err(TopologyError::ZeroQueueDeadline { class: name() });
            }
            let known = |wanted: &&StageName| classes.iter().any(|class| class.name == **wanted);
            if let Some(preempts) = class.preempts.iter().find(|preempts| !known(preempts)) {
                return Err(TopologyError::UnknownPreempted {
                    class: name(),
                    preempts: preempts.clone(),
                    known: classes.iter().map(|class| class.name.clone()).collect(),
                });
            }
        }
        no_circle(&classes)?;
        let preempted = preempted(&classes);
        Ok(Self {
            classes,
            preempted,
            ..self
        })
    }

    /// The classes, in the order in which they were declared.
    pub fn classes(&self) -> &[ClassSpec] {
        &self.classes
    }

    /// The class of this name.
    pub fn class(&self, name: &str) -> Option<&ClassSpec> {
        self.classes.iter().find(|class| class.name.as_str() == name)
    }

    /// The class of a job that names none: `standard`, or the first where there is no such class.
    pub fn default_class(&self) -> &ClassSpec {
        &self.classes[self.default_index().get()]
    }

    fn default_index(&self) -> ClassIndex {
        let standard = self.classes.iter().position(|class| class.name.as_str() == STANDARD);
        ClassIndex::new(standard.unwrap_or_default())
    }

    pub(crate) fn class_indices(&self) -> impl Iterator<Item = ClassIndex> + use<> {
        (0..self.classes.len()).map(ClassIndex::new)
    }

    /// The class of this name; the default one for a name that the pipeline does not have any more.
    pub(crate) fn class_index(&self, name: &StageName) -> ClassIndex {
        let position = self.classes.iter().position(|class| class.name == *name);
        position.map_or_else(|| self.default_index(), ClassIndex::new)
    }
}
