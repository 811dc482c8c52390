"""Requests of many callers, stepped by the callers themselves: what every engine core has in common.

An engine core has no thread of its own: one of the callers that wait steps the engine for all requests, under one lock.

A stream that is garbage collected cancels its request in a finalizer, which may run during a step in the thread that
holds the lock. A finalizer therefore takes no lock: `request_cancel` appends to a queue that is processed before and
after every step.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from birkhoff.engine.language_model import LanguageModel
from birkhoff.engine.request import Request
from birkhoff.errors import ContextError, EngineClosed


class _Waiter:
    """A thread that waits for its request."""

    def __init__(self, ready: Callable[[], bool]):
        self.ready = ready
        self.wake = threading.Event()


class RequestLoop(ABC):
    """`placement` moves experts between steps, if the engine has one."""

    model: LanguageModel
    placement: Any = None

    def __init__(self, max_context: int):
        self.max_context = max_context
        self._lock = threading.Lock()
        self._stepping = threading.Lock()  # held by the thread that steps for all waiting ones
        self._waiters: list[_Waiter] = []
        self._waiters_lock = threading.Lock()
        self._cancellations: deque[Request] = deque()
        self._closed = False

    @abstractmethod
    def submit(self, *requests: Request) -> None:
        """Queue all requests of one call; raises when one of them can never run, and queues none."""

    @abstractmethod
    def step(self) -> bool:
        """Compute what can be computed now. Returns False when there was nothing to do."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all requests and release what the engine holds."""

    @abstractmethod
    def reuse(self) -> dict[str, Any]:
        """Statistics of the prefix cache and of speculation; a part that is off is None."""

    @property
    @abstractmethod
    def max_requests(self) -> int:
        """Maximum number of requests that run at once."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What of the scheduling determines the bits of an activation row."""

    @abstractmethod
    def _cancel(self, request: Request) -> None:
        """End a request at any stage, with the lock held; no effect when it is done."""

    def check_context(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise `ContextError` when a prompt and its answer cannot fit. Called before anything is planned for them, so
        that the cost of a refusal does not depend on the numbers in it."""
        total_tokens = prompt_tokens + max_tokens
        if total_tokens > self.max_context:
            raise ContextError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together {total_tokens}, the "
                f"context holds {self.max_context}. Shorten the prompt, lower max_tokens, or raise max_context."
            )

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this engine was closed. Load the model again.")

    def step_until_output(self, request: Request) -> None:
        """Step until `request` has an event or is done."""
        self._step_until(lambda: bool(request.events) or request.done, request)

    def step_until_done(self, request: Request) -> None:
        """Step until `request` is done; its token events are discarded."""
        self._step_until(lambda: request.done, request)
        request.events.clear()

    def _step_until(self, ready: Callable[[], bool], request: Request) -> None:
        """Step, or wait while another thread steps, until `ready`.

        Of several waiting threads one steps for all of them until its own request is ready, then another takes over.
        Threads that stepped in turn would hand the lock over after every step, which costs more than a step does."""
        waiter = _Waiter(ready)
        with self._waiters_lock:
            self._waiters.append(waiter)
        try:
            while not ready():
                if not self._stepping.acquire(blocking=False):
                    waiter.wake.wait()
                    waiter.wake.clear()
                    continue
                try:
                    while not ready():
                        if not self.step() and not ready():
                            raise AssertionError(f"request {request.id} waits but nothing can run")
                        self._wake_waiters()
                finally:
                    self._stepping.release()
        finally:
            with self._waiters_lock:
                self._waiters.remove(waiter)
                if self._waiters:  # one of them steps from now on
                    self._waiters[0].wake.set()

    def _wake_waiters(self) -> None:
        with self._waiters_lock:
            for waiter in self._waiters:
                if waiter.ready():
                    waiter.wake.set()

    def cancel(self, request: Request) -> None:
        """End a request at any stage; no effect when it is done."""
        with self._locked():
            self._cancel(request)

    def request_cancel(self, request: Request) -> None:
        """`cancel` for finalizers: takes no lock; takes effect before the next step."""
        if not request.done:
            self._cancellations.append(request)

    def process_cancellations(self) -> None:
        """Apply `request_cancel` now, unless another thread holds the lock and will apply it."""
        if self._cancellations and self._lock.acquire(blocking=False):
            try:
                self._cancel_requested()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and process cancellations before and after."""
        with self._lock:
            self._cancel_requested()
            try:
                yield
            finally:
                self._cancel_requested()

    def _cancel_requested(self) -> None:
        while self._cancellations:
            self._cancel(self._cancellations.popleft())
