#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stagewire_transfer::fuzzing::lane(bytes);
});
