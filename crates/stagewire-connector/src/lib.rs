//! Publish and consume payloads, chunk by chunk; the worker runtime on top.
