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
    /// A class without queue deadline.
    pub const fn new(name: StageName, weight: u32) -> Self {
        Self {
            name,
            weight,
            queue_deadline: None,
        }
    }

    /// `interactive`, `standard` and `batch`, with weights 8, 4 and 1 and no queue deadline.
    pub fn defaults() -> Vec<Self> {
        let class = |(name, weight)| Self::new(StageName::new(name).expect("these names are allowed"), weight);
        [("interactive", 8), (STANDARD, 4), ("batch", 1)].map(class).into()
    }
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
    /// to [`Topology::MAX_WEIGHT`], and a queue deadline of 0.
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
        }
        Ok(Self { classes, ..self })
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
