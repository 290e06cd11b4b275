use std::time::Duration;

use proptest::prelude::*;
use stagewire_core::{Classify, ErrorClass, Lease, LeaseError};

#[test]
fn leases_are_written_as_they_are_read() {
    for (text, lease) in [
        ("delete_on_consume", Lease::DeleteOnConsume),
        ("ttl(30s)", Lease::Ttl(Duration::from_secs(30))),
        ("ttl(1500ms)", Lease::Ttl(Duration::from_millis(1500))),
        ("ttl(1ns)", Lease::Ttl(Duration::from_nanos(1))),
        ("pinned", Lease::Pinned),
        ("cached", Lease::Cached),
    ] {
        assert_eq!((text.parse(), lease.to_string().as_str()), (Ok(lease), text));
    }
    assert_eq!("ttl(2m)".parse(), Ok(Lease::Ttl(Duration::from_secs(120))));
    assert_eq!("ttl(1h)".parse(), Ok(Lease::Ttl(Duration::from_secs(3600))));
    assert_eq!(Lease::default(), Lease::DeleteOnConsume);
}

#[test]
fn what_is_no_lease_is_named() {
    for text in ["", "ttl", "ttl(", "ttl(30s", "Pinned", "delete-on-consume", "cached "] {
        let error = text.parse::<Lease>().expect_err("no lease");
        assert!(
            matches!(&error, LeaseError::Unknown { text: said } if said == text),
            "{error}"
        );
        assert_eq!((error.class(), error.reason()), (ErrorClass::Invalid, "payload.lease"));
    }
    for text in ["", "0s", "30", "s", "-1s", "1.5s", "1d", "99999999999999999999h", "+1s"] {
        let error = format!("ttl({text})").parse::<Lease>().expect_err("no time");
        assert!(
            matches!(&error, LeaseError::Ttl { text: said } if said == text),
            "{error}"
        );
    }
}

proptest! {
    #[test]
    fn every_time_to_live_comes_back(seconds in any::<u64>(), nanos in 0_u32..1_000_000_000) {
        let ttl = Duration::new(seconds, nanos);
        prop_assume!(!ttl.is_zero());
        let lease = Lease::Ttl(ttl);
        prop_assert_eq!(lease.to_string().parse(), Ok(lease));
        let json = serde_json::to_string(&lease).expect("text");
        prop_assert_eq!(serde_json::from_str::<Lease>(&json).expect("as written"), lease);
        let bytes = postcard::to_stdvec(&lease).expect("text");
        prop_assert_eq!(postcard::from_bytes::<Lease>(&bytes).expect("as written"), lease);
    }

    #[test]
    fn no_text_is_a_panic(text in "(ttl\\()?[0-9a-z]{0,12}\\)?") {
        let _ = text.parse::<Lease>();
    }
}
