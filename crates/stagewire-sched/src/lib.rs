//! The orchestrator's mind: a deterministic state machine without I/O, clock or randomness. Pure.
