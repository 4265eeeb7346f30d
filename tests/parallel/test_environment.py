"""Which GPU a process takes, by what its environment says; no GPU is needed to ask."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from dpexp.errors import UserError
from dpexp.parallel import environment, joined


class Met(Exception):
    """The process has chosen its GPU, and would wait for the others now."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the second of two processes on a machine, the numbers of the GPUs that it takes; it finds one GPU."""
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)

    def met(*arguments: object, **named: object) -> None:
        raise Met

    monkeypatch.setattr(environment, "rendezvous", met)
    here = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return numbers


def test_a_task_that_was_given_one_gpu_takes_it(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with srun --gpus-per-task=1, where every task counts its GPUs from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(Met), joined():
        pass
    assert chosen == [0]


@pytest.mark.parametrize("told", [{}, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}])
def test_processes_that_share_one_gpu_are_refused(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch, told: dict[str, str]
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="process 1 of this machine finds 1 GPUs"), joined():
        pass
    assert not chosen


def test_one_process_of_torchrun_wraps_its_model_as_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun goes on with fewer processes than it began with, and the script is the same."""
    here = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with joined("cpu") as ranks:
        assert not ranks.several
        DistributedDataParallel(torch.nn.Linear(2, 2))
    assert not torch.distributed.is_initialized()


def ends_with_an_error(rank: int, port: int, said: Path) -> None:
    """Rank 0 takes its time to say what all have found; the exit status of the other tells whether it has waited."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with joined("cpu") as ranks:
            try:
                ranks.agree("the data", rank)
            except UserError:
                if ranks.writes:
                    time.sleep(0.5)
                    said.touch()
                raise
    except UserError:
        os._exit(0 if said.exists() else 1)
    os._exit(2)


def test_who_says_an_error_ends_first(tmp_path: Path) -> None:
    """torchrun ends all processes as soon as one has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=ends_with_an_error, args=(rank, port, tmp_path / "said")) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


def test_a_numbered_gpu_is_for_one_process(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UserError, match=r"cuda:1 names one GPU for all.*runtime\.device=cuda,"),
        joined("cuda:1"),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined("cuda:1") as ranks:
        assert not ranks.several
    assert not chosen
