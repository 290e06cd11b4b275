use serde_json::json;

use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "rdma";
const PATH: &str = "/sys/class/infiniband";

/// A port of a device.
#[derive(Debug, PartialEq, Eq)]
struct Port {
    device: String,
    number: String,
    active: bool,
    /// `ACTIVE`, `DOWN`, …
    state: String,
    /// `InfiniBand` or `Ethernet`.
    layer: String,
    /// Such as `100 Gb/sec (4X EDR)`.
    rate: String,
}

pub(super) fn look(root: &Root) -> Vec<Check> {
    let devices = match root.names(PATH) {
        Ok(devices) => devices.unwrap_or_default(),
        Err(why) => return vec![Check::unknown(NAME, why, "see `ibv_devices`")],
    };
    if devices.is_empty() {
        let why = format!(
            "{PATH} lists none: no RDMA hardware, its driver is not loaded, or it was not given to this container"
        );
        let advice = "nothing: tcp carries the bytes. With such hardware, load its driver (mlx5_ib, irdma, efa)";
        return vec![Check::missing(NAME, "no device", why, advice).with("ports", json!([]))];
    }
    let ports: Vec<Port> = devices.iter().flat_map(|device| ports(root, device)).collect();
    vec![judge(root, &devices, &ports)]
}

fn ports(root: &Root, device: &str) -> Vec<Port> {
    let numbers = root.names(&format!("{PATH}/{device}/ports")).ok().flatten();
    let port = |number: String| {
        let read = |file| root.text(&format!("{PATH}/{device}/ports/{number}/{file}"));
        // Such as "4: ACTIVE".
        let state = read("state")?;
        let state = state
            .split_once(": ")
            .map_or(state.clone(), |(_, name)| name.to_owned());
        let unknown = || "unknown".to_owned();
        Some(Port {
            device: device.to_owned(),
            active: state == "ACTIVE",
            state,
            layer: read("link_layer").unwrap_or_else(unknown),
            rate: read("rate").unwrap_or_else(unknown),
            number,
        })
    };
    numbers.unwrap_or_default().into_iter().filter_map(port).collect()
}

fn judge(root: &Root, devices: &[String], ports: &[Port]) -> Check {
    let shown: Vec<String> = ports
        .iter()
        .map(|port| {
            let Port {
                device,
                number,
                state,
                layer,
                rate,
                ..
            } = port;
            format!("{device} port {number} {state} ({layer}, {rate})")
        })
        .collect();
    let data: Vec<_> = ports
        .iter()
        .map(|port| {
            json!({
                "device": port.device, "port": port.number, "state": port.state,
                "link_layer": port.layer, "rate": port.rate,
            })
        })
        .collect();
    let value = if shown.is_empty() {
        devices.join(", ")
    } else {
        shown.join("; ")
    };
    let check = Check::ok(NAME, value).with("ports", data);
    if !ports.iter().any(|port| port.active) {
        let why = "no port has an active link";
        return check.but(
            State::Note,
            why,
            "look at cable, switch and `ibstat`; on RoCE bring the interface up",
        );
    }
    let verbs = root.names("/dev/infiniband").ok().flatten().unwrap_or_default();
    let verbs: Vec<_> = verbs.into_iter().filter(|name| name.starts_with("uverbs")).collect();
    if verbs.is_empty() {
        let why = "there is no /dev/infiniband/uverbs*, through which programs use it";
        let advice = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK; on a host load ib_uverbs";
        return check.but(State::Note, why, advice);
    }
    let usable = |name: &String| {
        let path = root.path(format!("/dev/infiniband/{name}"));
        rustix::fs::access(path, rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_ok()
    };
    if verbs.iter().any(usable) {
        return check;
    }
    let why = format!("this user may not open /dev/infiniband/{}", verbs[0]);
    check.but(
        State::Note,
        why,
        "add the user to the group that owns the device, usually rdma",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    fn device(state: &str) -> Fixture {
        let path = |file| format!("{PATH}/mlx5_0/ports/1/{file}");
        Fixture::new(&[
            (&path("state"), state),
            (&path("link_layer"), "InfiniBand\n"),
            (&path("rate"), "400 Gb/sec (4X NDR)\n"),
        ])
    }

    #[test]
    fn an_active_port_with_its_device_file_is_ok() {
        let fixture = device("4: ACTIVE\n");
        let check = &look(&fixture.root())[0];
        assert_eq!(check.state, State::Note);
        assert!(check.why.as_deref().unwrap().contains("uverbs"));
        fixture.write("/dev/infiniband/uverbs0", "");
        let check = &look(&fixture.root())[0];
        assert_eq!(check.value, "mlx5_0 port 1 ACTIVE (InfiniBand, 400 Gb/sec (4X NDR))");
        assert_eq!(check.state, State::Ok);
        assert_eq!(check.data["ports"][0]["state"], "ACTIVE");
    }

    #[test]
    fn a_link_that_is_down_is_noted() {
        let check = &look(&device("1: DOWN\n").root())[0];
        assert_eq!(check.state, State::Note);
        assert!(check.value.contains("mlx5_0 port 1 DOWN"));
    }

    #[test]
    fn none_and_unreadable() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Missing);
        fixture.refuse_directory(PATH);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
    }
}
