"""What one request captures and edits, as a checked `Plan`, for any engine.

A `RequestPlanner` holds everything of an engine that requests refer to by name: capture consumers, named vectors, saved
runs, attached dictionaries. It needs the hook schema of the model and nothing else of it, so an engine that is not ours
makes the same plans; the steps are then run by the contract of `hooks/step_hooks.py`. In a distributed engine every
rank has a planner: `layers` are those the rank computes, `file_options` carry its rank."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from birkhoff.capture.planner import CapturePlanner, CaptureRequestSpec
from birkhoff.hooks.call_use import CallUse
from birkhoff.hooks.digest import DIGEST_BYTES, salt
from birkhoff.hooks.plan import Edit, Job, Plan
from birkhoff.hooks.results import RequestResults
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.signals import SignalJob
from birkhoff.hooks.vector_table import Tables
from birkhoff.sae.feature_edits import ResolvedSae
from birkhoff.sae.feature_gate import feature_gate
from birkhoff.sae.resolver import SaeResolver, split_edits
from birkhoff.sae.sae_fields import PARSERS
from birkhoff.steering.call import split_calls
from birkhoff.steering.modules import Identity
from birkhoff.steering.resolver import SteeringResolver


class RequestPlanner:
    """`model` is the name written to capture files; `identity` returns the model's name and digest, for vectors;
    `capture_queues` are options of the capture `Dispatcher`. `captures` replaces the planner that they would make,
    `tables` the tables of vectors."""

    def __init__(
        self,
        schema: Schema,
        num_layers: int,
        model: str = "",
        device: torch.device | str = "cpu",
        *,
        identity: Identity | None = None,
        capture_root: str | Path | None = None,
        file_options: Mapping[str, Any] | None = None,
        layers: Collection[int] | None = None,
        captures: CapturePlanner | None = None,
        tables: Tables | None = None,
        **capture_queues: Any,
    ):
        self._schema = schema
        self._num_layers = num_layers
        self.captures = captures or CapturePlanner(
            schema,
            num_layers,
            model,
            capture_root,
            file_options=file_options,
            layers=layers,
            **capture_queues,
        )
        self.steering = SteeringResolver(schema, num_layers, identity, tables or Tables(device))
        self.steering.parsers |= PARSERS
        self.saes = SaeResolver(schema, num_layers, device)
        self.steering.features = partial(feature_gate, self.saes.registry)
        self.saes.gate = self.steering.gate

    def edits(self, steer: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[Edit, ...]:
        """The edits of one prompt, those of all requests included, resolved against the model. Immutable: choices share
        them."""
        others, calls = split_calls(steer)
        vectors, features = split_edits(others)
        return (
            *self.steering.edits(vectors, prompt_ids, max_tokens),
            *self.saes.edits(features, prompt_ids, max_tokens),
            *(call.resolve(self._schema, self._num_layers, prompt_ids, max_tokens) for call in calls),
        )

    def plan(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        edits: Sequence[Edit] = (),
        capture: CaptureRequestSpec | None = None,
        suffix: str = "",
        *,
        captures: CapturePlanner | None = None,
        jobs: Sequence[Job] = (),
        signals: SignalJob | None = None,
    ) -> Plan | None:
        """The plan of one request, unopened; None if it captures and edits nothing.

        `suffix` keeps the names of captures of several prompts or choices apart. `captures` replaces the planner's own.
        `jobs` are further jobs, `signals` the one of them whose frames the caller reads."""
        ids = tuple(prompt_ids)
        captured = (
            Plan() if capture is None else (captures or self.captures).plan(capture, ids, max_tokens, suffix)
        )
        every = (*captured.jobs, *self.captures.global_jobs(ids, max_tokens), *jobs)
        if not every and not edits:
            return None
        return Plan(
            every,
            tuple(edits),
            reservations=self.saes.reservations([edit for edit in edits if isinstance(edit, ResolvedSae)]),
            table=self.steering.table(edits),
            results=RequestResults(captured.results.captures, signals),
        )

    def from_json(
        self, fields: Mapping[str, Any], prompt_ids: Sequence[int], max_tokens: int, suffix: str = ""
    ) -> Plan | None:
        """The plan of a request given as JSON: the steering fields, and `capture` keyed by consumer."""
        steer = self.steering.parse_wire({name: value for name, value in fields.items() if name != "capture"})
        edits = self.edits(steer, prompt_ids, max_tokens)
        return self.plan(prompt_ids, max_tokens, edits, fields.get("capture"), suffix)

    def close(self) -> None:
        """Complete capture files and shut down the consumers."""
        self.captures.close()


def cache_salt(plan: Plan | None, prompt_len: int) -> str | None:
    """What the cached state of a request depends on besides its tokens; None if plain requests may share it."""
    if plan is None:
        return None
    if any(isinstance(site, CallUse) for edit in plan.edits for site in edit.sites.values()):
        return f"function {secrets.token_hex(DIGEST_BYTES)}"  # functions have no digest
    return salt(plan.prefill_digest, plan.decode_digest, prompt_len)
