"""Launches of the decode kernels that choose entries (topk.cu) and attend to them (attend.cu)."""

from __future__ import annotations

import torch

from birkhoff.kernels.cuda.compile import Module


class EntryAttention:
    """Part of `CudaBackend`."""

    pdl: bool
    _topk: Module
    _attend: Module

    def topk(self, scores: torch.Tensor, positions: torch.Tensor, topk_indices: torch.Tensor) -> None:
        """As `index.decode.topk_entries`, which is called beyond 262,144 entries (1M tokens)."""
        n, max_entries = scores.shape
        cluster = max_entries > 256 * 32  # then eight blocks of 1,024 threads share a sequence
        blocks, threads = (8, 1024) if cluster else (1, 256)
        per_thread = next((c for c in (4, 8, 16, 32) if max_entries <= blocks * threads * c), None)
        if per_thread is None:
            from birkhoff.kernels.index.decode import topk_entries

            topk_entries(scores, positions, topk_indices)
            return
        self._topk.launch(
            f"topk_{'cluster_' if cluster else ''}{per_thread}",
            (n * blocks, 1),
            threads,
            scores,
            positions,
            topk_indices,
            max_entries,
            topk_indices.shape[1],
            pdl=self.pdl,
        )

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        window: int,
        pages: torch.Tensor | None,
        ratio: int,
        table: torch.Tensor,
        topk_indices: torch.Tensor | None,
        slots: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        partial_out: torch.Tensor,
        partial_max: torch.Tensor,
        partial_sum: torch.Tensor,
        sink: torch.Tensor,
        split: int,
        scale: float,
        eps: float,
        out: torch.Tensor,
        out_fp16: torch.Tensor | None,
        rules: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """As `attend.decode.attend`, which is called for 16 rows or more, other widths and dtypes, and with rules."""
        n, splits, heads, width = partial_out.shape
        rope_dim = 2 * cos.shape[-1]
        small = n < 16 and split % 32 == 0 and keys.dtype is torch.bfloat16 and rules is None
        aligned = heads % 16 == 0 and rope_dim % 8 == 0 and queries.stride(0) % 8 == 0
        if not small or not aligned or width not in (128, 512) or rope_dim > width:
            from birkhoff.kernels.attend.decode import attend

            attend(
                queries,
                keys,
                window,
                pages,
                ratio,
                table,
                topk_indices,
                slots,
                positions,
                cos,
                sin,
                partial_out,
                partial_max,
                partial_sum,
                sink,
                split,
                scale,
                eps,
                out,
                out_fp16,
                self.pdl,
                rules,
            )
            return
        stages = 1 if split == 32 else 2
        warps = width // 64  # each needs 4 KiB of keys per stage and 2 KiB of scores
        self._attend.launch(
            f"attend_{width}",
            (n, heads // 16, splits),
            warps * 32,
            queries,
            queries.stride(0),
            keys,
            keys.shape[1],
            window,
            pages if ratio else None,
            max(ratio.bit_length() - 1, 0),
            table,
            table.stride(0),
            topk_indices,
            1 if topk_indices is None else topk_indices.shape[1],
            slots,
            positions,
            cos,
            sin,
            rope_dim,
            partial_out,
            partial_max,
            partial_sum,
            heads,
            split,
            stages,
            float(scale),
            float(eps),
            pdl=self.pdl,
            shared=warps * (4096 * stages + 2048),
        )
        self._attend.launch(
            f"combine_{width}",
            (n, heads * (width // 128)),
            256,
            partial_out,
            partial_max,
            partial_sum,
            sink,
            cos,
            sin,
            rope_dim,
            out,
            out_fp16,
            heads,
            splits,
            pdl=self.pdl,
        )
