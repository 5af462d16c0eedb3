"""A small Internet on one machine: network namespaces, each with a TUN device, and a process that carries the packets
between them at a rate, after a delay, or not at all. Needs root.

The kernel's own netem, which would do the same, is missing in many containers.
"""

import fcntl
import heapq
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.training.swarm.nursery import ROOT, enter_namespace

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "wire"
MTU = 1400
LONGEST_QUEUE_S = 0.5
"""A sender's queue drops packets that would wait longer."""


class Wires:
    """Network namespaces of these names, all in one network.

    Args:
        bits_per_s: of what each of them sends.
        delay_s: on the way, each way.
    """

    def __init__(self, names: Sequence[str], *, bits_per_s: float, delay_s: float):
        namespaces = {name: f"dalle-{os.getpid()}-{number}" for number, name in enumerate(names)}
        self.hosts = {name: (namespaces[name], f"10.77.0.{number}") for number, name in enumerate(names, start=1)}
        """(namespace, address) by name, as Swarm takes them."""
        self.process: subprocess.Popen | None = None
        try:
            for namespace, _ in self.hosts.values():
                subprocess.run(["ip", "netns", "add", namespace], check=True)
            plan = {"hosts": list(self.hosts.values()), "bits_per_s": bits_per_s, "delay_s": delay_s}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.swarm.wires", json.dumps(plan)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self.process.stdout.readline() == "ready\n"
            for namespace, address in self.hosts.values():
                for command in (
                    f"addr add {address}/24 dev {DEVICE}",
                    f"link set {DEVICE} mtu {MTU} up",
                    "link set lo up",
                ):
                    subprocess.run(["ip", "-n", namespace, *command.split()], check=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Wires":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **command: object) -> dict:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def part(self, *groups: Sequence[str]) -> None:
        """Deliver packets only within groups of names; without groups, to everybody again."""
        self.ask(groups=[[self.hosts[name][1] for name in group] for group in groups])

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that each has sent so far, headers included."""
        sent = self.ask()["sent_bytes"]
        return {name: sent.get(address, 0) for name, (_, address) in self.hosts.items()}

    def close(self) -> None:
        """Remove the network."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(10)
            self.process.stdout.close()
        for namespace, _ in self.hosts.values():
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)


def why_not() -> str:
    """Why this machine cannot have such a network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    name = f"dalle-{os.getpid()}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "no network namespaces here"


def carry(hosts: list[tuple[str, str]], bits_per_s: float, delay_s: float) -> None:
    """Forward packets until stdin ends."""
    devices: dict[bytes, int] = {}
    for namespace, address in hosts:
        enter_namespace(namespace)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        devices[socket.inet_aton(address)] = device
    address_of = {device: address for address, device in devices.items()}
    group: dict[bytes, int] = {}
    sent: Counter[bytes] = Counter()
    free_at: dict[bytes, float] = dict.fromkeys(devices, 0.0)
    on_the_way: list[tuple[float, int, bytes, bytes]] = []
    number = 0
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else 1.0
        readable, _, _ = select.select([sys.stdin, *address_of], [], [], wait_s)
        now = time.monotonic()
        for source in readable:
            if source is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                command = json.loads(line)
                if "groups" in command:
                    group = {socket.inet_aton(a): n for n, names in enumerate(command["groups"]) for a in names}
                print(json.dumps({"sent_bytes": {socket.inet_ntoa(a): n for a, n in sent.items()}}), flush=True)
                continue
            sender = address_of[source]
            for packet in packets(source):
                receiver = packet[16:20]
                if receiver not in devices:
                    continue
                sent[sender] += len(packet)
                start = max(now, free_at[sender])
                if start - now > LONGEST_QUEUE_S or group.get(sender) != group.get(receiver):
                    continue
                free_at[sender] = start + 8 * len(packet) / bits_per_s
                number += 1
                heapq.heappush(on_the_way, (free_at[sender] + delay_s, number, receiver, packet))
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(on_the_way)
            try:
                os.write(devices[receiver], packet)
            except OSError:
                continue  # its queue is full, or the device is not up yet


def packets(device: int, limit: int = 64) -> list[bytes]:
    """The packets that wait at a device."""
    found = []
    for _ in range(limit):
        try:
            packet = os.read(device, 2 * MTU)
        except BlockingIOError:
            break
        if packet[0] >> 4 == 4:
            found.append(packet)
    return found


if __name__ == "__main__":
    carry(**json.loads(sys.argv[1]))
