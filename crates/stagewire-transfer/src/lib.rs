//! Moves registered memory between processes: the Transport trait, shm and cma.
