"""Memory plans, compared with models that are actually built and with published numbers."""

from __future__ import annotations

import pytest
import torch

from birkhoff.convert.presets import preset
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cache_plan import default_cache_bytes
from birkhoff.engine.memory_plan import plan_budget, spare_slots, weight_bytes
from birkhoff.engine.speed_bounds import distinct_experts, tokens_per_second
from birkhoff.errors import CapacityError
from birkhoff.kernels.select import select
from birkhoff.model.cache_size import (
    cache_by_kind,
    context_bytes,
    page_bytes,
    pages_for,
    slot_bytes,
    step_cache_bytes,
)
from birkhoff.model.linear import Linear
from birkhoff.model.mhc import Mixer
from birkhoff.model.state import State
from tests.interpreter import DEVICE, packed_model
from tests.models import TINY, variant

GIB = 2**30
FLASH = preset("flash", mtp=False)


@pytest.fixture(scope="module")
def flash():
    return weight_bytes(FLASH)


def test_tokens_per_second_equals_the_published_limits(flash):
    """Batch 1, 8 and 64 on an H200 with misses over a bus of 55 GB/s, computed from the sizes of V4-Flash."""
    published = {
        0.0: (384, 1036, 2243),
        0.005: (343, 800, 1648),
        0.01: (310, 651, 1302),
        0.02: (260, 475, 917),
        0.04: (197, 308, 576),
        0.075: (138, 190, 349),
        0.5: (30, 34, 60),
    }
    for misses, limits in published.items():
        for batch, limit in zip((1, 8, 64), limits):
            assert tokens_per_second(FLASH, misses, batch, flash.read) == pytest.approx(limit, rel=0.01)
    assert [round(distinct_experts(FLASH, batch), 1) for batch in (1, 8, 64)] == [6.0, 44.2, 199.9]


def test_the_experts_of_v4_flash_are_137_gib(flash):
    assert flash.experts * flash.expert / GIB == pytest.approx(137.06, abs=0.01)
    assert weight_bytes(preset("flash"), mtp=True).experts == 44 * 256


def test_cache_bytes_by_kind_sum_to_page_and_slot_bytes():
    for config in (FLASH, preset("pro"), TINY):
        for item in (2, 4):
            kinds = cache_by_kind(config, item)
            assert sum(each.per_token for each in kinds.values()) * 128 == page_bytes(config, item)
            assert sum(each.per_sequence for each in kinds.values()) == slot_bytes(config, item)
            assert sum(context_bytes(config, 1000, item).values()) == slot_bytes(
                config, item
            ) + 8 * page_bytes(config, item)
        back = cache_by_kind(config, 2, lookback=3)
        assert sum(each.per_sequence for each in back.values()) == slot_bytes(config, 2, lookback=3)
    by_kind = {kind: each.per_token for kind, each in cache_by_kind(FLASH).items()}
    assert by_kind == {"swa": 0.0, "csa": 6720.0, "hca": 160.0}


def test_a_state_allocates_the_planned_bytes():
    tokens, kinds = 700, {0: "swa", 4: "csa", 128: "hca"}
    state = State.contiguous(TINY, 1, tokens)
    real = dict.fromkeys(kinds.values(), 0)
    for layer in state.layers:
        tensors = (layer.keys.rows, *(ring.rows for ring in layer.raw.values()), *layer.pages.values())
        real[kinds[layer.ratio]] += sum(tensor.nbytes for tensor in tensors)
    assert real == context_bytes(TINY, tokens, 4)


def test_cache_bytes_of_a_long_context_by_kind_of_layer():
    """One request of 128K tokens: CSA layers hold most of the bytes, and a step reads mostly index keys."""
    stored, read = context_bytes(FLASH, 131_072), step_cache_bytes(FLASH, 131_072)
    assert {kind: round(size / 2**20, 2) for kind, size in stored.items()} == {
        "swa": 0.25,
        "csa": 844.27,
        "hca": 32.5,
    }
    assert read["csa"] == 21 * 2 * (128 * 512 + 512 * 512 + 32_768 * 128)
    assert sum(read.values()) / 1e9 == pytest.approx(0.214, abs=0.001)
    assert step_cache_bytes(FLASH, 100)["swa"] == 2 * 2 * 100 * 512, "the window is not full yet"


def bytes_of_tensors(*roots) -> int:
    """Bytes of the storages of all reachable tensors, each storage once."""
    seen, storages, pending = set(), {}, list(roots)
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (list, tuple)):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif hasattr(item, "__dict__") and type(item).__module__.startswith(("birkhoff", "torch.nn")):
            pending += vars(item).values()
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_planned_weight_bytes_cover_a_model_and_its_kernel_copies(dtype):
    config = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)
    planned = weight_bytes(config, dtype)
    model = packed_model(config, dtype=dtype)
    alone = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    routed = sum(tensor.nbytes for stack in model.expert_stacks() for tensor in stack.buffers())
    dense = sum(size for kind, size in planned.dense.items() if kind != "copies for kernels")
    assert dense == alone - routed, "exact"
    state = State.contiguous(config, 1, 128, device=DEVICE, dtype=dtype)
    decoder = Decoder(model, state, fast=False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.packed_weight()  # the layout that prefill reads
        elif isinstance(module, Mixer):
            module.kernels = select("triton")
            module.read(torch.zeros(1, config.hc_mult, config.hidden_size, dtype=dtype, device=DEVICE))
    copies = bytes_of_tensors(model, decoder.layers, decoder.head) - alone
    tables = 3 * config.n_routed_experts * 4 * 8 + 64  # expert addresses and rotary frequencies
    assert 0.9 * planned.dense["copies for kernels"] < copies - tables <= planned.dense["copies for kernels"]


def test_a_budget_fills_the_device_without_exceeding_it():
    needed = plan_budget(FLASH, 400 * GIB, GIB)
    assert (
        needed.hot == needed.experts and needed.spare == 0 and needed.share == 1.0 and needed.host_bytes == 0
    )
    shares = []
    for memory in (24, 32, 48, 80, 139, 200):
        budget = plan_budget(FLASH, memory * GIB, default_cache_bytes(FLASH, memory * GIB, 8))
        used = budget.dense_bytes + budget.cache_bytes + budget.working_bytes + budget.hot_bytes
        assert used + budget.left_bytes == memory * GIB and budget.left_bytes >= 0
        assert budget.left_bytes < 2 * budget.expert_bytes or budget.share == 1.0, (
            "remaining memory is used for experts"
        )
        assert budget.spare == spare_slots(budget.experts - budget.hot, 43)
        assert budget.host_bytes == (budget.experts - budget.hot + budget.spare) * budget.expert_bytes
        shares.append(budget.share)
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] == 1.0


def test_a_requested_number_of_experts_is_planned_or_refused():
    half = plan_budget(FLASH, 139 * GIB, GIB, share=0.5)
    assert half.hot == 5504 and half.left_bytes > 40 * GIB
    some = plan_budget(FLASH, 139 * GIB, GIB, expert_bytes=10 * GIB)
    assert some.hot == 10 * GIB // some.expert_bytes
    with pytest.raises(
        CapacityError, match=r"11008 experts and places to move through take 137\.06 GiB, beside weights"
    ):
        plan_budget(FLASH, 100 * GIB, GIB, share=1.0)
    with pytest.raises(CapacityError, match=r"without a single routed expert \(weights .*may use 8\.00 GiB"):
        plan_budget(FLASH, 8 * GIB, GIB)


@pytest.mark.parametrize(("cold", "spare"), [(0, 0), (1, 1), (5, 5), (100, 8), (860, 40), (11_008, 64)])
def test_spare_slots_hold_two_layers_of_cold_experts_within_limits(cold, spare):
    assert spare_slots(cold, 43) == spare


def test_the_default_cache_size():
    assert default_cache_bytes(FLASH, 24 * GIB, 100) == 3 * GIB, "an eighth of the device"
    assert default_cache_bytes(FLASH, 139 * GIB, 1) == sum(context_bytes(FLASH, 32_768).values())
    assert default_cache_bytes(FLASH, 24 * GIB, 1, 2**30) == sum(context_bytes(FLASH, 2**20).values()), (
        "the model's limit"
    )
    assert pages_for(32_768) == 256
