//! The stagewire command line.
fn main() {}
