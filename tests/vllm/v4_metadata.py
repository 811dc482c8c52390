"""Tests only: the metadata kernels of vLLM 0.32's DeepSeek-V4 in plain PyTorch, for CPUs without Triton.

They say which token belongs to which request and where its cache entry is. The arithmetic of the model is vLLM's own
native code. Kernels whose results the CPU attention does not read do nothing."""

from __future__ import annotations

import itertools

import torch


def install(monkeypatch):
    """Replace the kernels in vLLM's modules until the test has ended."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    for module in (metadata, sparse_swa):
        monkeypatch.setattr(module, "compute_token_to_req_indices", request_of_token)
    monkeypatch.setattr(compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL", compressed_slots)
    for module, name in (
        (sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"),
        (sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL"),
        (indexer, "_PREPARE_UNIFORM_DECODE_KERNEL"),
        (indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"),
    ):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(metadata, "_indexer_decode_metadata_kernel", Launched())
    # The builder for CPUs returns three entries and five are read.
    kinds = ("swaonly", "c4a", "c128a", "c1a", "c2a")
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    monkeypatch.setattr(builder, "build_tile_scheduler", lambda self, count: dict.fromkeys(kinds))


def nothing(*given, **named):
    return None


class Launched:
    def __getitem__(self, grid):
        return nothing


def request_of_token(query_start_loc, out, num_mapped_tokens, num_tokens):
    counts = query_start_loc.diff().long()
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)[:num_mapped_tokens]
    out[:num_tokens] = 0
    out[: len(owners)] = owners.to(out.dtype)
    return out[:num_tokens]


def compressed_slots(out, slot_mapping, query_start_loc, seq_lens, block_table, block_size, ratio, *parallel):
    """A token that completes a block of `ratio` tokens has an entry; the others have slot -1."""
    starts = query_start_loc.tolist()
    for request, (first, stop) in enumerate(itertools.pairwise(starts)):
        end = int(seq_lens[request])
        for row, position in zip(range(first, stop), range(end - (stop - first), end)):
            entry, rest = divmod(position + 1, ratio)
            if rest or int(slot_mapping[row]) == -1:
                out[row] = -1
            else:
                page, offset = divmod(entry - 1, block_size)
                out[row] = int(block_table[request, page]) * block_size + offset
