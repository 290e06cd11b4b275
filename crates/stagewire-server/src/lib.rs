//! Drives the scheduler: journal, gRPC for workers, HTTP for people, metrics.
