"""A process that reads a ring and prints, line by line, what it read."""

from __future__ import annotations

import hashlib
import json
import sys
import time

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.sinks.shm_ring import RingReader
from birkhoff.errors import CaptureError


def main(name: str, pause: float) -> None:
    assert "torch" not in sys.modules  # reading needs no torch
    try:
        with RingReader(name) as reader:
            print("open", flush=True)
            for item in reader.items():
                time.sleep(pause)
                print(json.dumps(described(item)), flush=True)
            print(json.dumps({"kind": "end", "dropped": reader.dropped_rows}), flush=True)
    except CaptureError as error:
        print(json.dumps({"kind": "error", "words": str(error)}), flush=True)


def described(item: CaptureRequest | Chunk | CaptureFinish) -> dict[str, object]:
    if isinstance(item, Chunk):
        scales = item.scales()
        return {
            "kind": "chunk",
            "request": item.request_id,
            "hook": item.hook,
            "layer": item.layer,
            "dtype": item.dtype,
            "row_shape": list(item.row_shape),
            "positions": list(item.positions or ()),
            "offset": item.row_offset,
            "token_ids": list(item.token_ids or ()),
            "phases": item.letters(),
            "rows": item.num_rows,
            "sha256": hashlib.sha256(item.data()).hexdigest(),
            "scale": None if scales is None else scales.tolist(),
        }
    if isinstance(item, CaptureFinish):
        return {
            "kind": "finish",
            "request": item.key,
            "dropped": item.dropped_rows,
            "reason": item.finish_reason,
        }
    return {"kind": "begin", "request": item.key, "id": item.request_id, "meta": dict(item.meta)}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
