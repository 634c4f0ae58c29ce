"""Network interfaces of this machine."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

# Linux's request for the IPv4 address of an interface, and where the address is in its answer.
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


def is_named_loopback() -> bool:
    """Whether the machine's own name means a loopback address, or none: gloo would listen there."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_towards(host: str, port: int) -> str | None:
    """The interface through which this machine reaches another one.

    None outside of Linux, for IPv6, and for an address on the loopback interface.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, but chooses the route.
        probe.connect((host, port))
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex() if _address_of(name, probe) == own]
        return names[0] if names and not own.startswith("127.") else None
    return None


def _address_of(name: str, probe: socket.socket) -> str | None:
    import fcntl

    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        # It has no address.
        return None
    return socket.inet_ntoa(answer[_ADDRESS])
