"""A link between two network namespaces of this machine, shaped and cut at will; needs CAP_NET_ADMIN, `ip` and `tc`."""

import ctypes
import os
import shutil
import subprocess

import pytest

_BURST_BYTES = 128 << 10  # a larger bucket would let short transfers through unshaped
_QUEUE_BYTES = 4 << 20
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_PRIVATE_RECURSIVE, _MNT_DETACH = (1 << 18) | (1 << 14), 2


def why_not():
    """What is missing for network namespaces; empty where nothing is."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    name = f"scd{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs CAP_NET_ADMIN: {made.stderr.strip()}"
    run("ip", "netns", "del", name)
    return ""


def require_namespaces():
    """Skip, and say why, where namespaces cannot be made."""
    if reason := why_not():
        pytest.skip(f"network namespaces: {reason}")


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


class Link:
    """Two namespaces `names`, each with the device `device` and the address of the same index in `addresses`."""

    device = "scdlink"
    addresses = ("10.211.0.1", "10.211.0.2")

    def __init__(self):
        self.names = tuple(f"scd{os.getpid()}{side}" for side in "ab")

    def __enter__(self):
        for name in self.names:
            run("ip", "netns", "add", name)
        first, second = self.names
        peer = ("peer", "name", self.device, "netns", second)
        run("ip", "-n", first, "link", "add", self.device, "type", "veth", *peer)
        for name, address in zip(self.names, self.addresses, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", self.device)
            for device in ("lo", self.device):
                run("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            run("ip", "netns", "del", name)

    def shape(self, gigabits):
        """Limit both directions."""
        rate = ("rate", f"{gigabits * 1e9:.0f}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
        for name in self.names:
            run("tc", "-n", name, "qdisc", "replace", "dev", self.device, "root", "tbf", *rate)

    def cut(self):
        """Nothing passes any more; connections stay open on both sides and are told nothing."""
        run("ip", "-n", self.names[0], "link", "set", self.device, "down")

    def mend(self):
        run("ip", "-n", self.names[0], "link", "set", self.device, "up")


def enter_namespace(name):
    """Move this thread, and those that it starts from now on, into a network namespace of that name.

    /sys comes along, because UCX looks up devices there.
    """
    with open(f"/run/netns/{name}") as namespace:
        _checked("setns", namespace.fileno(), _CLONE_NEWNET)
    _checked("unshare", _CLONE_NEWNS)
    _checked("mount", b"none", b"/", None, _MS_PRIVATE_RECURSIVE, None)
    _checked("umount2", b"/sys", _MNT_DETACH)
    _checked("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _checked(function, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}{arguments}")
