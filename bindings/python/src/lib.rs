//! The Python face of Stagewire.
