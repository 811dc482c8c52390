"""vLLM's scheduler with one more duty: state that depends on edits is not shared with text that is not edited so.

It is done here and not in a front, because every request passes here, from any front. A request that cannot be read
must not raise: that would end the engine for all requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from birkhoff.vllm.spec import FIELD, RequestMark


class SaltingScheduler(Scheduler):  # type: ignore[misc]
    """Selected with `--scheduler-cls`. It is a synchronous scheduler, so asynchronous scheduling is off."""

    def add_request(self, request: Any) -> None:
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        if extra and FIELD in extra and request.request_id not in self.requests:
            mark = _mark(extra, request.request_id)
            if mark.salt is not None:
                # Hashes of the prompt's blocks were computed by the constructor, with the old salt.
                request.cache_salt = f"{request.cache_salt or ''}|{mark.salt}"
                request.block_hashes.clear()
                request.update_block_hashes()
            if not mark.reads_cache:
                request.skip_reading_prefix_cache = True
        super().add_request(request)


def _mark(extra: dict[str, Any], request_id: str) -> RequestMark:
    """The mark of a request; one that cannot be read shares nothing with any other."""
    try:
        mark = RequestMark.of(extra)
        assert mark is not None
    except (TypeError, ValueError):
        return RequestMark("", request_id, False)
    return mark
