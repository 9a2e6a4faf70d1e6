"""Workers that torchrun starts again, under keys of their own; an elastic horovodrun."""

import pytest
import torch.distributed as dist

from lm_experiments_tools.backends.process_groups import restarts_store
from lm_experiments_tools.errors import UserError

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}


def test_keys_of_a_restart_are_not_those_of_the_start_before(monkeypatch):
    for name, value in AGENT.items():
        monkeypatch.setenv(name, value)
    assert restarts_store() is None, "the first start"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    url, server = restarts_store(), dist.TCPStore("127.0.0.1", 0, is_master=True)  # the agent's
    server.set("rank0", "an address that was")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    store, rank, world_size = next(dist.rendezvous(url))
    assert (rank, world_size) == (0, 1)
    assert not store.check(["rank0"])
    store.set("rank0", "an address")
    assert server.get("rank0") == b"an address that was"


def test_restarts_on_several_machines_with_one_store_are_refused(monkeypatch):
    for name, value in {**AGENT, "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        restarts_store()


def test_an_elastic_horovodrun_is_refused_with_what_replaces_it(monkeypatch):
    pytest.importorskip("horovod.torch")
    from lm_experiments_tools.backends.horovod import HorovodBackend

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UserError, match="torchrun --max-restarts, both with --reproducible elastic"):
        HorovodBackend()
