"""Follow a detached run, and collect its results.

    python -m training.watch --work DIR --seconds 540                    print progress until the run or the time ends
    python -m training.watch --work DIR --out DIR --collect DEST         ... and collect the files when it has ended

Collecting copies the weight shards and puts all small files (config, index, tokenizer, record, logs) into one tar
file, for destinations that accept only a few files. Exit status: 0 the run finished, 1 it failed, 3 it is still
running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path

SHORT = (
    "step",
    "progress",
    "loss",
    "mtp_loss",
    "index_loss",
    "grad_norm",
    "busiest_expert",
    "tokens_per_second",
)
LEFT_OUT = ("kind", "time", "settings")


def brief(line: dict) -> str:
    """Format one log line for display."""
    kind, label = line["kind"], line.get("run", "")
    if kind in ("held-out", "unrounded", "stored"):
        both = line["both"]
        files = " ".join(f"{name} {part['nats_per_token']:.4f}" for name, part in line["files"].items())
        return (
            f"{label} {kind} step {line.get('step', '-')}: {both['nats_per_token']:.4f} nats/token "
            f"{both['bits_per_byte']:.4f} bits/byte, accepted {both['mtp_acceptance']:.3f} ({files})"
        ).strip()
    if kind == "alive":
        pairs = (("write", "write"), ("from identity", "from_identity"), ("from uniform", "from_uniform"))
        gates = ", ".join(f"{word} {line[f'attn_{key}']:.2f} {line[f'ffn_{key}']:.2f}" for word, key in pairs)
        index = f", index kept {line['index_kept']} of {line['index_best']}" if "index_kept" in line else ""
        share = f"mean share {line['stream_mean_share']:.3f}"
        return f"{label} alive layer {line['layer']}: {share}, {gates}{index}".strip()
    if kind == "train":
        return f"{label} " + " ".join(f"{key} {line[key]}" for key in SHORT if line.get(key) is not None)
    return f"{label} {kind} " + json.dumps({key: value for key, value in line.items() if key not in LEFT_OUT})


def follow(work: Path, seconds: float, every: int = 4) -> int:
    """Print new lines until the run or the time ends; training lines are thinned to one in `every`."""
    end = time.monotonic() + seconds
    seen = 0
    train_lines = 0
    log = work / "log.jsonl"
    while True:
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        for text in lines[seen:]:
            line = json.loads(text)
            train_lines += line["kind"] == "train"
            if line["kind"] != "train" or train_lines % every == 1:
                print(brief(line)[:300], flush=True)
            if line["kind"] == "done":
                return 0
        seen = len(lines)
        if not _running(work):
            print("the run has ended without finishing; its last words:", flush=True)
            print(_tail(work.parent / "output.txt"), flush=True)
            return 1
        if time.monotonic() >= end:
            return 3
        time.sleep(1)


def collect(work: Path, out: Path, target: Path) -> list[Path]:
    """Copy shards one by one and everything else in `small.tar`; without a checkpoint, only logs and caches."""
    target.mkdir(parents=True, exist_ok=True)
    files = [Path(shutil.copy(shard, target / shard.name)) for shard in sorted(out.glob("*.safetensors"))]
    cache = work / "compile-cache.bin"
    if cache.is_file() and cache.stat().st_size < 16 << 20:
        files.append(Path(shutil.copy(cache, target / cache.name)))
    with tarfile.open(target / "small.tar", "w") as tar:
        small = [path for path in out.glob("*") if path.suffix != ".safetensors"] if out.is_dir() else []
        for path in (*small, work / "log.jsonl", work.parent / "output.txt", work / "probes.json"):
            if path.is_file():
                tar.add(path, path.name)
    return [*files, target / "small.tar"]


def _running(work: Path) -> bool:
    """Return whether the process in `pid` is alive; a run that has not started counts as running."""
    path = work / "pid"
    if not path.is_file():
        return True
    try:
        os.kill(int(path.read_text()), 0)
        state = Path(f"/proc/{path.read_text()}/stat").read_text().rsplit(")", 1)[-1].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # no /proc: the signal was accepted, so it is alive
        return True
    return state != "Z"


def _tail(path: Path, count: int = 40) -> str:
    if not path.is_file():
        return "(no output)"
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="scratch/work")
    parser.add_argument("--out", default="scratch/out")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--collect", help="folder for the results")
    options = parser.parse_args(arguments)
    work, out = Path(options.work), Path(options.out)
    status = follow(work, options.seconds)
    if options.collect:
        for path in collect(work, out, Path(options.collect)):
            print(f"{path.stat().st_size:>10} {path.name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
