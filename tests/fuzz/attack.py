"""A client that sends hostile requests to one server and judges the answers."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEAK = re.compile(r"Traceback|File \"|0x[0-9a-f]{6}|/(?:usr|tmp|home|var)/")


def is_ours(text: str, path: str) -> bool:
    """Whether an error has one of the two documented shapes and leaks nothing about the server."""
    body = json.loads(text)
    error = body["error"]
    if path.startswith("/v1/messages"):
        shaped = body["type"] == "error" and set(error) == {"type", "message"} and bool(body["request_id"])
    else:
        shaped = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    return shaped and not LEAK.search(text) and len(error["message"]) <= 1000


class Attacker:
    """One kept connection to a server on this machine. `verdict` is empty for an answer that is as it should be."""

    def __init__(self, port: int, seconds: float = 300):
        self._port = port
        self._seconds = seconds
        self._connection: http.client.HTTPConnection | None = None
        self.statuses: Counter[int] = Counter()

    def post(self, path: str, raw: bytes) -> tuple[int, str]:
        """Send a body; the status and the text of the answer. A dropped connection is opened again once."""
        for last in (False, True):
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._seconds)
            try:
                self._connection.request("POST", path, raw, {"content-type": "application/json"})
                answer = self._connection.getresponse()
                text = answer.read().decode()
                self.statuses[answer.status] += 1
                return answer.status, text
            except (http.client.HTTPException, ConnectionError):
                self.close()
                if last:
                    raise
        raise AssertionError

    def verdict(self, path: str, raw: bytes) -> str:
        """What is wrong with the answer to a body, or nothing."""
        try:
            status, text = self.post(path, raw)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return f"no answer: {error!r}"
        if status >= 500:
            return f"{status}: {text[:300]}"
        if status >= 400 and not _shaped(text, path):
            return f"{status} in another shape: {text[:300]}"
        if status == 200 and '"error"' in text and '"code":"defect"' in text:
            return f"an error inside a stream: {text[-300:]}"
        return ""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _shaped(text: str, path: str) -> bool:
    try:
        return is_ours(text, path)
    except (ValueError, KeyError, TypeError):
        return False


@dataclass
class ProcessMeter:
    """Memory and processor time of another process, from /proc."""

    pid: int
    _threads: dict[str, int] = field(default_factory=dict)

    def reset_peak(self) -> int:
        """Forget the peak; returns the resident kilobytes now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak(self) -> int:
        """The largest resident kilobytes since `reset_peak`."""
        return self._status("VmHWM")

    def resident(self) -> int:
        return self._status("VmRSS")

    def _status(self, key: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
        raise KeyError(key)

    def thread_seconds(self) -> dict[int, float]:
        """Processor seconds of every thread since it began, by thread id."""
        result = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                result[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
            except OSError:  # the thread has ended
                continue
        return result


def as_case(path: str, raw: bytes, found: str) -> dict[str, Any]:
    """A finding as it is stored in `cases/`."""
    case: dict[str, Any] = {"path": path, "found": found[:500]}
    try:
        return case | {"body": json.loads(raw)}
    except ValueError:
        return case | {"raw": raw.decode("latin-1")}


def store(case: dict[str, Any], folder: Path) -> Path:
    """Write a finding under a name made of its route and the time."""
    name = re.sub(r"[^a-z0-9]+", "-", case["path"].lower()).strip("-")
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1000:03d}.json"
    path.write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    return path
