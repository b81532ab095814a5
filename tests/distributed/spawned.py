"""Processes that are ranks of a group: started, listened to, and gone at the end whatever they did."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Work = Callable[..., Any]


class Answer(NamedTuple):
    """What a rank says of one work: its result, or the error that it raised."""

    rank: int
    work: str
    result: Any
    error: str | None


def run(
    works: Sequence[Work], world: int, *args: Any, backend: str = "gloo", timeout: float = 240, patience: float = 60,
    wanted: int | None = None,
) -> list[Answer]:  # fmt: skip
    """Each of the works by every rank, work(rank, world, *args), one after another.

    timeout: seconds after which ranks that have not ended are killed, as they are after so many `wanted` answers.
    patience: seconds that collectives wait.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        places = (os.path.join(folder, "store"), backend, world, patience)
        ranks = [context.Process(target=_rank, args=(rank, places, works, args, answers)) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            return _listen(ranks, answers, time.monotonic() + timeout, wanted or len(works) * world)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            assert not any(process.is_alive() for process in ranks)


def results(answers: Sequence[Answer]) -> list[Any]:
    """Results of all ranks and works; raises what any of them raised."""
    wrong = [f"{x.work}, rank {x.rank}: {x.error}" for x in answers if x.error]
    assert not wrong, "\n".join(wrong)
    return [x.result for x in answers]


def _listen(ranks: Sequence[Any], answers: Any, until: float, wanted: int) -> list[Answer]:
    """All answers, until there are as many as wanted, or every rank has ended."""
    found: list[Answer] = []
    while time.monotonic() < until and len(found) < wanted:
        alive = any(process.is_alive() for process in ranks)  # before looking, or an answer between could be lost
        try:
            while True:
                found.append(answers.get(timeout=0.1))
        except queue.Empty:
            if not alive:
                break
    return found


def _rank(rank: int, places: tuple[str, str, int, float], works: Sequence[Work], args: Any, answers: Any) -> None:
    store, backend, world, patience = places
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=patience),
        device_id=device,
    )  # fmt: skip
    for work in works:
        try:
            answers.put(Answer(rank, work.__name__, work(rank, world, *args), None))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            answers.put(Answer(rank, work.__name__, f"{type(error).__name__}: {error}", text))
    answers.close()
    answers.join_thread()
    if backend == "gloo":  # which waits for nobody
        os._exit(0)
    dist.destroy_process_group()
