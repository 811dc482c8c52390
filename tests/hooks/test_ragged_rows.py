"""Delivery of ragged rows: every row has the labels of its token, and labels are made once for all sites and rows."""

from __future__ import annotations

import torch

from birkhoff.hooks import sites
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Plan, SiteRows, Span


class Ids(list):
    """Token ids that count how often one is read."""

    reads = 0

    def __getitem__(self, index):
        type(self).reads += 1
        return super().__getitem__(index)


class Everything:
    """A job that takes ragged rows of three layers at every token."""

    keys = tuple(("attn_weights", layer) for layer in range(3))
    after = False

    def __init__(self):
        self.delivered: list[SiteRows] = []

    def offsets(self, start, token_ids, prompt_len):
        return range(len(token_ids))

    def deliver(self, rows):
        self.delivered.append(rows)


def test_labels_of_ragged_rows_take_a_time_in_proportion_to_the_rows():
    ids, job = Ids(range(100, 140)), Everything()
    tap = arm(StepStaging(), [Span(Plan(jobs=(job,)), 0, 0, ids, len(ids))])

    def weights(rows):
        return [torch.full((row + 1, 4), float(row)) for row in rows]  # token i attends to i + 1 keys

    for layer in range(3):
        tap.at(layer).read(sites.ATTN_WEIGHTS, weights)
    Ids.reads = 0
    tap.deliver()
    assert Ids.reads <= 3 * len(ids)
    assert [rows.layer for rows in job.delivered] == [0, 1, 2]
    for rows in job.delivered:
        assert rows.positions == tuple(token for token in range(40) for _ in range(token + 1))
        assert rows.token_ids == tuple(100 + position for position in rows.positions)
        assert rows.tensor[:, 0].tolist() == list(rows.positions)
