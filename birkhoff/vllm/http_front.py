"""Captures and edits of HTTP requests to `vllm serve`: planned and prepared here, in the process of its API server.

One `HttpFront` per server, made by the endpoint plugin (`http_plugin.py`) and used by the middleware
(`http_fields.py`). The planner and the calls to the ranks are synchronous, so they run in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from birkhoff.dtype_names import dtype_name
from birkhoff.planning.plan_results import capture_results_json, plan_report
from birkhoff.vllm.armed_sites import armed_schema
from birkhoff.vllm.compatibility import armed_of, check_config, own_config
from birkhoff.vllm.front_planner import RemotePlan, VllmPlanner
from birkhoff.vllm.ranks import Ranks

RESULT_SECONDS = 600.0  # limit of a call to the ranks


class HttpFront:
    """`client` is vLLM's `EngineClient`."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop):
        self._client = client
        self._loop = loop
        self._room = asyncio.Condition()  # told when a request has released its table rows
        config = client.vllm_config
        check_config(config)
        own = own_config(config)
        model_config = config.model_config
        raw = model_config.hf_text_config.to_dict()
        self.armed = armed_of(config)
        self.max_context: int = model_config.max_model_len
        self.num_layers: int = model_config.get_total_num_hidden_layers()
        self.schema = armed_schema(raw, dtype_name(model_config.dtype), self.armed)
        self.ranks = Ranks(self._call)
        self.planner = VllmPlanner(
            self.schema,
            self.num_layers,
            own.get("model", model_config.model),
            self.armed,
            self._call,
            capture_root=own.get("capture_root"),
        )

    def _call(self, method: str, *given: Any) -> list[Any]:
        """Call a method of every worker. Not from the event loop's thread, which has to run the call."""
        future = asyncio.run_coroutine_threadsafe(
            self._client.collective_rpc(method, RESULT_SECONDS, given), self._loop
        )
        results: list[Any] = future.result(RESULT_SECONDS)
        return results

    async def counts(self) -> list[Any]:
        """Counters of every rank."""
        counts: list[Any] = await self._client.collective_rpc("birkhoff_counts", RESULT_SECONDS)
        return counts

    async def prepare(
        self, fields: Mapping[str, Any], prompt_ids: Sequence[int], max_tokens: int, hold: bool
    ) -> RemotePlan | None:
        """The plan of a request, prepared on every rank, once its edits fit the tables; None if it does nothing."""

        def plan() -> RemotePlan | None:
            made = self.planner.from_json(fields, prompt_ids, max_tokens)
            assert made is None or isinstance(made, RemotePlan)
            return made

        made = await asyncio.to_thread(plan)
        if made is None:
            return None
        async with self._room:
            await self._room.wait_for(made.reserve)
        try:
            await asyncio.to_thread(self.ranks.prepare, [made], [hold])
        except BaseException:
            await self._release(made)
            raise
        return made

    async def finish(self, plan: RemotePlan, reason: str, num_tokens: int) -> dict[str, Any]:
        """What became of the request: fields of its response."""
        try:
            await asyncio.to_thread(plan.finish, reason, num_tokens)
        finally:
            await self._release(plan)
        extras: dict[str, Any] = {}
        report = plan_report(plan)
        if report:
            extras["interp"] = report
        if plan.results.captures:
            extras["capture_results"] = await asyncio.to_thread(capture_results_json, plan)
        return extras

    async def discard(self, plan: RemotePlan) -> None:
        """The request did not run."""
        await asyncio.to_thread(self.ranks.discard, plan)
        await self._release(plan)

    async def _release(self, plan: RemotePlan) -> None:
        plan.release()
        async with self._room:
            self._room.notify_all()

    def close(self) -> None:
        self.planner.close()
