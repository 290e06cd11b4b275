//! Blocking packets with descriptors. A directory may have any path, although that of a socket is short.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg, sendmsg,
    socket_with,
};

use super::message::MAX;
use super::{SOCKET, message};

/// How long one packet may take.
const PATIENCE: Duration = Duration::from_secs(2);

fn socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// The directory, and an address in it that goes through its descriptor.
fn address(dir: &Path) -> io::Result<(OwnedFd, SocketAddrUnix)> {
    let dir = open(dir, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())?;
    let path = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
    Ok((dir, SocketAddrUnix::new(path)?))
}

/// Listens in `dir`, in the place of a keeper that is dead.
pub(super) fn listen_in(dir: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(dir.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (_dir, address) = address(dir)?;
    let listener = socket()?;
    bind(&listener, &address)?;
    listen(&listener, 8)?;
    Ok(listener)
}

/// Connects to the keeper of `dir`.
pub(super) fn connect_in(dir: &Path) -> io::Result<OwnedFd> {
    let (_dir, address) = address(dir)?;
    let socket = socket()?;
    connect(&socket, &address)?;
    bound(&socket)?;
    Ok(socket)
}

/// Bounds every wait on a socket.
pub(super) fn bound(socket: &OwnedFd) -> io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, Some(PATIENCE))?;
    set_socket_timeout(socket, Timeout::Send, Some(PATIENCE))?;
    Ok(())
}

/// The user at the other end.
pub(super) fn peer(socket: impl AsFd) -> io::Result<u32> {
    Ok(socket_peercred(socket)?.uid.as_raw())
}

/// Sends one message, with a descriptor if there is one.
pub(super) fn send(
    socket: impl AsFd,
    message: &impl serde::Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let packet = message::encode(message);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.as_slice();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    sendmsg(socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message, with the descriptor that came along; `None` where the other end is gone.
pub(super) fn receive<T: serde::de::DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut buffer = [0; MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(&mut buffer)];
        match recvmsg(&socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "a packet was cut, or its descriptor lost: too many open files?",
        ));
    }
    let message = message::decode(&buffer[..received.bytes]).map_err(io::Error::other)?;
    Ok(Some((message, descriptor)))
}
