"""Reading experts while others wait: order, waiting, errors, closing."""

from __future__ import annotations

import queue
import threading

import pytest

from birkhoff.errors import TensorValue
from birkhoff.offload.read_gate import BackgroundReader, ReadGate

EXPERTS = [(layer, index) for layer in range(3) for index in range(4)]


def test_experts_are_taken_in_order_and_wanted_ones_first():
    gate = ReadGate(EXPERTS)
    assert gate.take() == (0, 0)
    waiting = threading.Thread(target=gate.wait, args=([(2, 1), (0, 0)],))
    waiting.start()
    while gate.wanted != ((2, 1),):  # (0, 0) is being read already
        pass
    assert gate.take() == (2, 1) and gate.take() == (0, 1)
    gate.done((0, 0))
    assert waiting.is_alive(), "it waits for both"
    gate.done((2, 1))
    waiting.join(300)
    assert not waiting.is_alive() and not gate.complete and gate.num_unread == 10


def test_a_step_leaves_one_thread_to_experts_that_nobody_waits_for():
    gate = ReadGate(EXPERTS)
    taken: queue.Queue = queue.Queue()
    proceed = {expert: threading.Event() for expert in EXPERTS}

    def read(expert):
        taken.put(expert)
        assert proceed[expert].wait(300)

    with gate.step():
        reader = BackgroundReader(gate, read, 3)
        assert taken.get(timeout=300) == (0, 0)
        waiting = threading.Thread(target=gate.wait, args=([(2, 1), (2, 2)],))
        waiting.start()  # the other two threads take what it wants, and then nothing
        assert {taken.get(timeout=300), taken.get(timeout=300)} == {(2, 1), (2, 2)}
        for expert in ((2, 1), (2, 2)):
            proceed[expert].set()
        waiting.join(300)
        assert not waiting.is_alive() and taken.empty()
        proceed[0, 0].set()
        assert taken.get(timeout=300) == (0, 1)
    assert {taken.get(timeout=300), taken.get(timeout=300)} == {(0, 2), (0, 3)}, (
        "without a step all threads read ahead"
    )
    for event in proceed.values():
        event.set()
    gate.wait(EXPERTS)
    reader.close()


def test_nobody_waits_for_what_was_read():
    gate = ReadGate(EXPERTS[:2])
    gate.wait([(5, 5)])  # was never unread
    while (expert := gate.take()) is not None:
        gate.done(expert)
    gate.wait(EXPERTS)
    assert gate.complete and gate.take() is None


def test_every_expert_is_read_once_by_several_threads():
    read: list[tuple[int, int]] = []
    gate = ReadGate(EXPERTS)
    reader = BackgroundReader(gate, read.append, 4)
    gate.wait(EXPERTS)
    reader.close()
    assert sorted(read) == EXPERTS and gate.complete


def test_an_error_reaches_those_who_wait_and_those_who_come_later():
    gate = ReadGate(EXPERTS)

    def read(expert):
        if expert == (1, 2):
            raise TensorValue("layers.1.ffn.experts.2.w1.scale[0, 0] is NaN.")

    reader = BackgroundReader(gate, read, 1)
    for _ in range(2):
        with pytest.raises(TensorValue, match=r"experts\.2"):
            gate.wait([(1, 2)])
    gate.wait([(0, 0)])
    reader.close()


def test_closing_ends_the_threads_after_their_current_expert():
    started, proceed = threading.Event(), threading.Event()
    read: list[tuple[int, int]] = []

    def slow(expert):
        started.set()
        proceed.wait(300)
        read.append(expert)

    reader = BackgroundReader(ReadGate(EXPERTS), slow, 1)
    assert started.wait(300)
    reader.gate.close()
    proceed.set()
    reader.close()
    assert read == [(0, 0)]
