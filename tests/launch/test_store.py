"""From an agreed address to a store that serves on it and nowhere else."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from test_address_agreement import FIRST, SECOND, listening, receive

import launchers
from mpiddp.launch.mpi.world import World
from mpiddp.launch.rendezvous import store
from mpiddp.launch.rendezvous.store import Meeting


def test_the_store_serves_on_the_socket_and_on_no_other():
    before = listening()
    with receive(FIRST, SECOND) as host:
        offer = host.offers[1]
        descriptor = host.hand_over(1)
    meeting = Meeting(offer.candidate.address, offer.port, "ib0", host.token.hex())
    world = World(0, 1, 0, 1, 0, 1, "node1", "node1")
    server = store.make_store(meeting, world, descriptor, 10, "secret")
    assert listening() - before == {("127.0.0.3", offer.port)}

    from torch.distributed import TCPStore

    client = TCPStore("127.0.0.3", offer.port, is_master=False, timeout=timedelta(seconds=10))
    server.set("who", "server")
    # What ranks tell each other stands where nobody finds it by chance.
    assert client.get("mpiddp/secret/who") == b"server" and not client.check(["who"])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", offer.port), 5)
    del client, server
    assert listening() == before


@pytest.mark.parametrize("chosen", [None, "0"])
def test_gloo_asks_at_once_unless_the_user_said_otherwise(monkeypatch, chosen):
    import torch
    import torch.distributed as distributed

    seen = []

    def init(*_, **__):
        seen.append(os.environ["GLOO_ENABLE_STORE_V2_API"])
        raise RuntimeError("as far as this test goes")

    launchers.set_variables(monkeypatch, {"GLOO_ENABLE_STORE_V2_API": chosen})
    monkeypatch.setattr(distributed, "init_process_group", init)
    world = World(0, 1, 0, 1, 0, 1, "node1", "node1")
    memory = distributed.HashStore()
    with pytest.raises(RuntimeError, match="as far as"):
        store.make_group(memory, world, "gloo", torch.device("cpu"), 10)
    assert seen == [chosen or "1"]
    assert os.environ.get("GLOO_ENABLE_STORE_V2_API") == chosen
