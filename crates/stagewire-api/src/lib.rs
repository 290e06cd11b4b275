//! The wire between orchestrator and workers: protobuf messages, generated code, typed client.
