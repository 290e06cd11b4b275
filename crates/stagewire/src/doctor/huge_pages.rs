use super::check::{Check, State};
use super::root::Root;
use crate::output::bytes;

const PRIVATE: &str = "huge-pages";
const SHARED: &str = "shm-huge-pages";
const POOL: &str = "hugetlb";

pub(super) fn look(root: &Root) -> Vec<Check> {
    vec![private(root), shared(root), pool(root)]
}

/// Private memory: destinations of 2 MiB and more ask for huge pages.
fn private(root: &Root) -> Check {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let (check, setting) = match setting(root, PRIVATE, path) {
        Ok(found) => found,
        Err(check) => return check,
    };
    match setting.as_str() {
        "always" | "madvise" => check,
        _ => check.but(
            State::Note,
            "destinations of 2 MiB and more ask for huge pages and do not get them; their first use takes about three \
             times as long",
            format!("as root: echo madvise > {path}"),
        ),
    }
}

/// Shared memory: the arena takes them where the kernel gives them by itself.
fn shared(root: &Root) -> Check {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let (check, setting) = match setting(root, SHARED, path) {
        Ok(found) => found,
        Err(check) => return check,
    };
    match setting.as_str() {
        "always" | "within_size" | "force" => check,
        _ => check.but(
            State::Note,
            "segments of the arena have pages of 4 KiB; filling a new one takes about 0.5 s per GiB, once, as segments \
             are used again",
            format!("nothing; or as root: echo within_size > {path}"),
        ),
    }
}

/// The setting in brackets, as in `always [madvise] never`.
fn setting(root: &Root, name: &'static str, path: &str) -> Result<(Check, String), Check> {
    let text = match root.read(path) {
        Ok(Some(text)) => text,
        Ok(None) => {
            let why = format!("there is no {path}: the kernel was built without");
            return Err(Check::missing(name, "none", why, "nothing; large transfers are slower"));
        }
        Err(why) => return Err(Check::unknown(name, why, "run it where /sys can be read")),
    };
    let chosen = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    match chosen {
        Some(chosen) => Ok((Check::ok(name, chosen).with("setting", chosen), chosen.to_owned())),
        None => {
            let why = format!("{path} says {text:?}");
            Err(Check::unknown(name, why, "nothing, if all else is ok"))
        }
    }
}

/// Pages that were set aside. Nothing of Stagewire takes from them.
fn pool(root: &Root) -> Check {
    let path = "/sys/kernel/mm/hugepages";
    let sizes = match root.names(path) {
        Ok(Some(sizes)) => sizes,
        Ok(None) => {
            let why = format!("there is no {path}");
            return Check::missing(POOL, "none", why, "nothing: Stagewire uses none");
        }
        Err(why) => return Check::unknown(POOL, why, "nothing: Stagewire uses none"),
    };
    let mut pools = Vec::new();
    let mut data = Vec::new();
    for size in &sizes {
        let page = size
            .strip_prefix("hugepages-")
            .and_then(|size| size.strip_suffix("kB")?.parse::<u64>().ok());
        let number = |file| root.text(&format!("{path}/{size}/{file}"))?.parse::<u64>().ok();
        let (Some(page), Some(total)) = (page.map(|kib| kib * 1024), number("nr_hugepages")) else {
            continue;
        };
        let free = number("free_hugepages");
        if total > 0 {
            let free = free.map_or_else(String::new, |free| format!(" ({free} free)"));
            pools.push(format!("{total} of {}{free}", bytes(page)));
        }
        data.push(serde_json::json!({"page_bytes": page, "total": total, "free": free}));
    }
    let value = if pools.is_empty() {
        "none set aside; Stagewire uses none".to_owned()
    } else {
        pools.join(", ") + "; Stagewire uses none"
    };
    Check::ok(POOL, value).with("pools", data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    const SHMEM: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

    #[test]
    fn settings_are_in_brackets() {
        let look = |text| private(&Fixture::new(&[(ENABLED, text)]).root());
        assert_eq!(look("always [madvise] never").value, "madvise");
        assert_eq!(look("always [madvise] never").state, State::Ok);
        assert_eq!(look("always madvise [never]").state, State::Note);
        assert_eq!(look("what").state, State::Unknown);
        let shared = |text| shared(&Fixture::new(&[(SHMEM, text)]).root()).state;
        assert_eq!(shared("always within_size advise [never] deny force"), State::Note);
        assert_eq!(shared("always [within_size] advise never deny force"), State::Ok);
    }

    #[test]
    fn pools_are_counted() {
        let fixture = Fixture::new(&[
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
            ("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ]);
        let check = pool(&fixture.root());
        assert_eq!(check.value, "512 of 2.0 MiB (500 free); Stagewire uses none");
        assert_eq!(check.data["pools"][0]["page_bytes"], 1_u64 << 30);
    }

    #[test]
    fn absent_and_unreadable_are_told_apart() {
        let fixture = Fixture::new(&[]);
        let states = |root| look(&root).iter().map(|check| check.state).collect::<Vec<_>>();
        assert_eq!(states(fixture.root()), [State::Missing; 3]);
        fixture.refuse_file(ENABLED);
        fixture.refuse_file(SHMEM);
        fixture.refuse_directory("/sys/kernel/mm/hugepages");
        assert_eq!(states(fixture.root()), [State::Unknown; 3]);
    }
}
