"""Variables of ranks."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from keepstep.agent.environment import free_port, rank_environment, shared_environment
from keepstep.agent.launch_spec import Launch
from keepstep.config import Config
from keepstep.config.settings import RestartSettings


def _launch(**changes: object) -> Launch:
    spec = Launch(
        nproc=4,
        mode="script",
        target="train.py",
        args=[],
        config=Config(),
        run_id="r1",
        run_dir=Path("/runs/r1"),
        log_dir=Path("/runs/r1/logs"),
        tee={},
        redirects={},
        local_ranks_filter=None,
        master_addr="10.0.0.1",
        master_port=0,
        environ={},
        argv=[],
        role="trainer",
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def test_every_variable_of_torchrun_is_there_and_restarts_count_from_zero() -> None:
    assert rank_environment(_launch(), rank=3, round=2, port=2345) == {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2345",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1000000",
        "TORCHELASTIC_RUN_ID": "r1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "KEEPSTEP_RUN_ID": "r1",
        "KEEPSTEP_RUN_DIR": "/runs/r1",
    }


def test_a_limit_of_restarts_is_told() -> None:
    config = dataclasses.replace(Config(), restart=RestartSettings(max_restarts=3))
    variables = rank_environment(_launch(config=config), rank=0, round=1, port=1)
    assert variables["TORCHELASTIC_MAX_RESTARTS"] == "3"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_free_port_can_be_bound_on_its_address(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    port = free_port(address)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((address, port))
        sock.listen()


def test_several_ranks_share_the_cores_unless_the_user_says_otherwise() -> None:
    assert shared_environment({"A": "b"}, 2) == {"A": "b", "OMP_NUM_THREADS": "1"}
    assert shared_environment({"OMP_NUM_THREADS": "8"}, 2) == {"OMP_NUM_THREADS": "8"}
    assert shared_environment({}, 1) == {}
