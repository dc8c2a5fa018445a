"""The queue of tasks: every task once, files begun side by side, help only where it is needed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from reshard.execution.blocks import Task
from reshard.execution.queue import FileQueue


def tasks(file: int, count: int) -> list[Task]:
    return [Task(file, 0, number, ()) for number in range(count)]


def drained(queue: FileQueue, worker: int, into: list[Task]) -> None:
    while (task := queue.take(worker)) is not None:
        into.append(task)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("counts", [(), (0, 0), (1,), (30,), (3, 0, 7, 1, 0), (1,) * 40])
def test_every_task_is_given_once(workers: int, counts: Sequence[int]) -> None:
    queue = FileQueue(range(len(counts)), lambda file: tasks(file, counts[file]))
    taken: list[list[Task]] = [[] for _ in range(workers)]
    threads = [
        threading.Thread(target=drained, args=(queue, number, taken[number]))
        for number in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    found = Counter((task.file, task.number) for part in taken for task in part)
    assert found == Counter((f, n) for f, count in enumerate(counts) for n in range(count))


def test_files_are_begun_side_by_side() -> None:
    both = threading.Barrier(2)

    def begin(file: int) -> list[Task]:
        both.wait(10)  # broken, and an error, unless a second thread is in here at the same time
        return tasks(file, 1)

    queue = FileQueue([0, 1], begin)
    other: list[Task] = []
    thread = threading.Thread(target=drained, args=(queue, 1, other))
    thread.start()
    mine: list[Task] = []
    drained(queue, 0, mine)
    thread.join(10)
    assert sorted(task.file for task in mine + other) == [0, 1]


def test_an_idle_worker_waits_for_a_file_that_is_being_begun() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def begin(file: int) -> list[Task]:
        begun.set()
        go_on.wait(10)
        return tasks(file, 2)

    queue = FileQueue([0], begin)
    slow: list[Task | None] = []
    thread = threading.Thread(target=lambda: slow.append(queue.take(0)))
    thread.start()
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    helped = queue.take(1)
    thread.join(10)
    numbers = [task.number for task in (helped, *slow) if task is not None]
    assert sorted(numbers) == [0, 1]


def test_a_file_that_cannot_be_begun_lets_nobody_wait() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def begin(_: int) -> list[Task]:
        begun.set()
        go_on.wait(10)
        raise OSError("no room")

    queue = FileQueue([0], begin)
    caught: list[BaseException] = []

    def first() -> None:
        try:
            queue.take(0)
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert queue.take(1) is None
    thread.join(10)
    assert [str(error) for error in caught] == ["no room"]
