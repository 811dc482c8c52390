"""A writer to be killed: captures without end and prints one line per acknowledged capture.

python -m tests.capture.victim ROOT SEED
"""

from __future__ import annotations

import json
import random
import sys
import threading

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.writer import CaptureWriter
from tests.capture.sample_chunks import chunk

SITES = [("mhc_streams_pre_attn", 1), ("mhc_attn_res_mix", 1), ("post_attn", 4)]


def main(root: str, seed: int) -> None:
    chance = random.Random(seed)
    coalesce = chance.choice([0, 2000, 1 << 20])
    files = CaptureWriter(
        FileOptions(root, num_shards=2, shard_max_bytes=20_000, coalesce_max_bytes=coalesce)
    )
    print_lock = threading.Lock()

    def work(worker: int) -> None:
        rng = random.Random(seed * 100 + worker)
        for index in range(10_000):
            request = f"{seed}-{worker}-{index}"
            layout = rng.choice(["packed", "per_file", "sharded", "sharded"])
            files.begin(CaptureRequest(request, request, "run", layout))
            rows = rng.randint(1, 30)
            for start in range(0, rows, 4):
                for hook, layer in SITES:
                    files.append(chunk(request, hook, layer, start, min(4, rows - start)))
            result = files.finish(CaptureFinish(request, "stop")).result()
            line = {
                "request": request,
                "rows": rows,
                "layout": layout,
                "status": result.status,
                "error": result.error,
            }
            with print_lock:
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
