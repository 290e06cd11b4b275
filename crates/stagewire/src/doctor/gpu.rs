use serde_json::Value;

use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "gpu";
const DRIVER: &str = "/proc/driver/nvidia";

pub(super) fn look(root: &Root) -> Vec<Check> {
    let (devices, version) = match (root.names("/dev"), root.read(&format!("{DRIVER}/version"))) {
        (Ok(devices), Ok(version)) => (numbered(devices.unwrap_or_default()), version),
        (Err(why), _) | (_, Err(why)) => return vec![Check::unknown(NAME, why, "see `nvidia-smi`")],
    };
    let version = version.map(|text| parse_version(&text).unwrap_or(text));
    let models = models(root);
    let check = Check::ok(NAME, value(version.as_deref(), &devices, &models))
        .with("driver", version.as_deref().map_or(Value::Null, Value::from))
        .with("devices", devices.clone())
        .with("models", models)
        .with("rdma_to_gpu", root.exists("/sys/module/nvidia_peermem"));
    vec![judge(root, check, version.is_some(), &devices)]
}

fn judge(root: &Root, check: Check, driver: bool, devices: &[String]) -> Check {
    match (driver, devices) {
        (false, []) => {
            let other = root.exists("/dev/kfd");
            let why = if other {
                "no NVIDIA driver and no /dev/nvidia*; there is /dev/kfd of AMD, which Stagewire does not look at further"
            } else {
                "no NVIDIA driver (/proc/driver/nvidia/version) and no /dev/nvidia*"
            };
            let advice = "nothing for tensors in host memory; in a container, docker run --gpus all";
            check.but(State::Missing, why, advice)
        }
        (true, []) => {
            let why = "the driver is loaded, but no /dev/nvidia* is here";
            check.but(
                State::Note,
                why,
                "docker run --gpus all; on a host `nvidia-modprobe -c 0`",
            )
        }
        (false, _) => {
            let why = "there are device files, but no /proc/driver/nvidia/version";
            check.but(State::Note, why, "load the driver: `modprobe nvidia`")
        }
        (true, devices) => {
            let refused = devices.iter().find(|device| {
                let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
                rustix::fs::access(root.path(format!("/dev/{device}")), access).is_err()
            });
            match refused {
                Some(device) => {
                    let why = format!("this user may not open /dev/{device}");
                    check.but(
                        State::Note,
                        why,
                        "add the user to the group that owns the device, usually video",
                    )
                }
                None => check,
            }
        }
    }
}

fn value(version: Option<&str>, devices: &[String], models: &[String]) -> String {
    let driver = version.map(|version| format!("driver {version}"));
    let devices = match devices {
        [] => None,
        devices => Some(format!("/dev/{}", devices.join(", /dev/"))),
    };
    let models = Some(models.join(", ")).filter(|models| !models.is_empty());
    let parts: Vec<String> = [models, driver, devices].into_iter().flatten().collect();
    if parts.is_empty() {
        return "none".to_owned();
    }
    parts.join(", ")
}

/// The names that are `nvidia` and a number: the others are of the driver as a whole.
fn numbered(names: Vec<String>) -> Vec<String> {
    let is_device = |name: &String| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names.into_iter().filter(is_device).collect()
}

/// The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 …`.
fn parse_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn models(root: &Root) -> Vec<String> {
    let gpus = root.names(&format!("{DRIVER}/gpus")).ok().flatten().unwrap_or_default();
    let model = |gpu: &String| {
        let text = root.text(&format!("{DRIVER}/gpus/{gpu}/information"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(line.trim().to_owned())
    };
    gpus.iter().filter_map(model).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const VERSION: &str = "\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
";
    const OPEN: &str = "\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)
GCC version:  gcc version 13.3.0
";

    #[test]
    fn both_kinds_of_driver_tell_their_version() {
        assert_eq!(parse_version(VERSION).as_deref(), Some("550.54.15"));
        assert_eq!(parse_version(OPEN).as_deref(), Some("570.86.15"));
        assert_eq!(parse_version("something else"), None);
    }

    #[test]
    fn a_gpu_is_named_with_its_driver() {
        let fixture = Fixture::new(&[
            ("/proc/driver/nvidia/version", VERSION),
            (
                "/proc/driver/nvidia/gpus/0000:19:00.0/information",
                "Model: \t\t NVIDIA H200\nIRQ:   1\n",
            ),
        ]);
        let check = &look(&fixture.root())[0];
        assert_eq!(check.state, State::Note, "no device file yet");
        for name in ["nvidia0", "nvidiactl", "nvidia-uvm"] {
            fixture.write(&format!("/dev/{name}"), "");
        }
        let check = &look(&fixture.root())[0];
        assert_eq!(check.value, "NVIDIA H200, driver 550.54.15, /dev/nvidia0");
        assert_eq!(check.state, State::Ok);
        assert_eq!(check.data["devices"], serde_json::json!(["nvidia0"]));
    }

    #[test]
    fn none_half_and_unreadable() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Missing);
        fixture.write("/dev/kfd", "");
        assert!(look(&fixture.root())[0].why.as_deref().unwrap().contains("AMD"));
        fixture.write("/dev/nvidia0", "");
        assert_eq!(look(&fixture.root())[0].state, State::Note, "files without a driver");
        fixture.refuse_file("/proc/driver/nvidia/version");
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
    }
}
