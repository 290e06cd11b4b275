use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::StageName;

use super::{EdgeSpec, Flow, Link, StageIndex, StageKind, StageSpec, Topology, TopologyError};

/// Names to positions, with the checks that need no edges.
pub(super) fn index(stages: &[StageSpec]) -> Result<BTreeMap<StageName, StageIndex>, TopologyError> {
    if stages.is_empty() {
        return Err(TopologyError::NoStage);
    }
    if stages.len() > Topology::MAX_STAGES {
        return Err(TopologyError::TooManyStages { count: stages.len() });
    }
    let mut index = BTreeMap::new();
    for (position, stage) in stages.iter().enumerate() {
        let zero = |field| TopologyError::ZeroBound {
            stage: stage.name.clone(),
            field,
        };
        if stage.max_held == 0 {
            return Err(zero("max-held"));
        }
        if stage.max_attempts == 0 {
            return Err(zero("max-attempts"));
        }
        if stage.no_progress.is_zero() {
            return Err(zero("no-progress"));
        }
        if stage.checkpoint && stage.kind != StageKind::Admission {
            let stage = stage.name.clone();
            return Err(TopologyError::Checkpoint { stage });
        }
        if index.insert(stage.name.clone(), StageIndex::new(position)).is_some() {
            let stage = stage.name.clone();
            return Err(TopologyError::DuplicateStage { stage });
        }
    }
    Ok(index)
}

/// Kahn's algorithm; among stages that are free at once the one declared first comes first.
pub(super) fn upstream_first(
    stages: &[StageSpec],
    inputs: &[Vec<Link>],
    consumers: &[Vec<StageIndex>],
) -> Result<Vec<StageIndex>, TopologyError> {
    let mut missing: Vec<usize> = inputs.iter().map(Vec::len).collect();
    let mut free: BTreeSet<usize> = (0..stages.len()).filter(|stage| missing[*stage] == 0).collect();
    let mut order = Vec::with_capacity(stages.len());
    while let Some(stage) = free.pop_first() {
        order.push(StageIndex::new(stage));
        for consumer in &consumers[stage] {
            missing[consumer.get()] -= 1;
            if missing[consumer.get()] == 0 {
                free.insert(consumer.get());
            }
        }
    }
    if order.len() == stages.len() {
        return Ok(order);
    }
    Err(TopologyError::Cycle {
        stages: cycle(stages, inputs, &missing),
    })
}

/// Walks from consumer to producer among the stages that were never free, until a stage comes again.
fn cycle(stages: &[StageSpec], inputs: &[Vec<Link>], missing: &[usize]) -> Vec<StageName> {
    let stuck = |stage: &usize| missing[*stage] > 0;
    let mut path = Vec::new();
    let mut next = (0..stages.len()).find(stuck);
    while let Some(stage) = next {
        if let Some(start) = path.iter().position(|seen| *seen == stage) {
            path.drain(..start);
            break;
        }
        path.push(stage);
        next = inputs[stage].iter().map(|link| link.from.get()).find(stuck);
    }
    path.reverse();
    path.extend(path.first().copied());
    path.into_iter().map(|stage| stages[stage].name.clone()).collect()
}

/// Every stage can be reached from the first one, whichever way the edges point.
pub(super) fn connected(
    stages: &[StageSpec],
    inputs: &[Vec<Link>],
    consumers: &[Vec<StageIndex>],
) -> Result<(), TopologyError> {
    let mut reached = BTreeSet::from([0]);
    let mut open = vec![0];
    while let Some(stage) = open.pop() {
        let producers = inputs[stage].iter().map(|link| link.from);
        for next in producers.chain(consumers[stage].iter().copied()) {
            if reached.insert(next.get()) {
                open.push(next.get());
            }
        }
    }
    let named = |inside: bool| {
        let chosen = (0..stages.len()).filter(|stage| reached.contains(stage) == inside);
        chosen.map(|stage| stages[stage].name.clone()).collect()
    };
    if reached.len() == stages.len() {
        Ok(())
    } else {
        Err(TopologyError::Disconnected {
            apart: named(false),
            rest: named(true),
        })
    }
}

/// A stage publishes once, so its edges agree on the mode and on the chunks.
pub(super) fn agreeing(stages: &[StageSpec], edges: &[EdgeSpec]) -> Result<(), TopologyError> {
    for stage in stages {
        let outgoing = || edges.iter().filter(|edge| edge.from == stage.name);
        let modes = outgoing().map(|edge| edge.mode);
        if modes.clone().zip(modes.skip(1)).any(|(a, b)| a != b) {
            let stage = stage.name.clone();
            return Err(TopologyError::MixedModes { stage });
        }
        let streams = outgoing().filter_map(|edge| match edge.flow {
            Flow::Stream { chunks, chunk_dim } => Some((chunks, chunk_dim)),
            Flow::Whole => None,
        });
        if let Some((a, b)) = streams.clone().zip(streams.skip(1)).find(|(a, b)| a != b) {
            return Err(TopologyError::MixedChunks {
                stage: stage.name.clone(),
                first: a.0,
                second: b.0,
            });
        }
    }
    Ok(())
}

/// Of each stage all that consume from it, or from one of those, in the order of their positions.
pub(super) fn below(upstream_first: &[StageIndex], consumers: &[Vec<StageIndex>]) -> Vec<Vec<StageIndex>> {
    let mut below = vec![Vec::new(); consumers.len()];
    for stage in upstream_first.iter().rev() {
        let mut all: Vec<StageIndex> = consumers[stage.get()].clone();
        for consumer in &consumers[stage.get()] {
            all.extend(below[consumer.get()].iter().copied());
        }
        all.sort_unstable();
        all.dedup();
        below[stage.get()] = all;
    }
    below
}
