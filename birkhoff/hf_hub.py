"""Models on the Hugging Face hub: names, the local cache of `huggingface_hub`, and downloads into it.

A name is `org/name`, optionally with a path inside the repository and a revision: `org/name/folder/file@revision`. A
local path of the same spelling wins. `resolve` answers from local files and the cache alone and never uses the
network; `RemoteRepo` does, and is used only by `birkhoff pull` and by callers that ask for a download. Cache location,
token, endpoint and offline mode are those of `huggingface_hub` (HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import fcntl
import fnmatch
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from birkhoff.byte_size import format_bytes
from birkhoff.errors import HubError, OptionError, quoted
from birkhoff.free_disk import check_free_disk, naming_full_disk
from birkhoff.small_file import INDEX_BYTES, read_json

INDEX = "model.safetensors.index.json"
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_WEIGHT_SUFFIXES = tuple(
    ".safetensors .bin .pt .pth .gguf .ggml .h5 .msgpack .onnx .onnx_data .ckpt .npz .npy .ot .tflite .mlmodel".split()
)
_GGUF_PART = re.compile(r"(.+?)(?:-\d{5}-of-(\d{5}))?\.gguf")
_MAX_SIDE_FILE = 64 * 2**20  # a larger file beside the weights is taken only if it is asked for
_DISK_RESERVE = 2**28  # left free after a download
OTHER_CACHE = "Free some, or put the cache on another disk: HF_HUB_CACHE=/path."
CONTINUE = "The same command continues with the files that are not there yet."
_WORKERS = 4

ProgressCallback = Callable[[int, int], None]  # (bytes done, bytes in total)


@dataclass(frozen=True)
class RepoPath:
    """A repository `org/name` at a revision, and a path inside it ("" for all of it)."""

    repo: str
    inside: str = ""
    revision: str = "main"

    @classmethod
    def parse(cls, text: str | Path, revision: str | None = None) -> RepoPath | None:
        """Read `org/name[/path][@revision]`; None for a text that cannot be the name of a repository."""
        name, _, suffix = str(text).partition("@")
        parts = name.split("/")
        named = len(parts) >= 2 and all(_PART.fullmatch(part) and "--" not in part for part in parts[:2])
        if (
            not named
            or any(part in ("", ".", "..") for part in parts[2:])
            or ("@" in str(text) and not suffix)
        ):
            return None
        if suffix and revision is not None and suffix != revision:
            raise OptionError(
                f"{quoted(str(text))} names a revision, and revision is {quoted(revision)}. Give one of them."
            )
        return cls("/".join(parts[:2]), "/".join(parts[2:]), suffix or revision or "main")

    def __str__(self) -> str:
        inside = f"/{self.inside}" if self.inside else ""
        return f"{self.repo}{inside}" + ("" if self.revision == "main" else f"@{self.revision}")

    @property
    def pull_command(self) -> str:
        return f"birkhoff pull {self}"


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """The local path of a model: an existing path as it is, a hub name as its cached snapshot.

    A text that is neither is returned as a path, for the caller to refuse. Raises `HubError`, with the command that
    downloads it, if a hub name is not in the cache or only partly."""
    path = Path(model).expanduser()
    where = None if path.exists() else RepoPath.parse(model, revision)
    if where is None:
        if revision is not None:
            raise OptionError(
                f"revision is {quoted(revision)}, but {model} is a local path, which has one version. Leave it out."
            )
        return path
    snapshot = _cached_snapshot(where)
    if snapshot is None:
        raise HubError(
            f"{where} is neither a local path nor in the hub cache ({cache_folder()}). Check the path, or download it: "
            f"{where.pull_command}"
        )
    found = snapshot / where.inside
    if not found.exists():
        raise HubError(f"the cached {where.repo} has no {where.inside}. Download it: {where.pull_command}")
    missing = missing_shards(found)
    if missing:
        raise HubError(
            f"the download of {where} is not complete: {len(missing)} shards are missing, the first {missing[0]}. "
            f"Continue it: {where.pull_command}"
        )
    return found


def cache_folder() -> Path:
    """The folder of the hub cache (HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def missing_shards(folder: Path) -> list[str]:
    """The shards that the safetensors index of a folder names and the folder lacks."""
    try:
        shards = set(read_json(folder / INDEX, INDEX_BYTES)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # no index, or one that the loader refuses with a better message
    return sorted(str(name) for name in shards if not (folder / str(name)).is_file())


def _cached_snapshot(where: RepoPath) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:  # the empty pattern list asks for the folder without a check of its files
        return Path(
            snapshot_download(where.repo, revision=where.revision, local_files_only=True, allow_patterns=[])
        )
    except LocalEntryNotFoundError:
        return None


class RemoteRepo:
    """One revision of a repository on the hub: its files with sizes, single files, ranges of bytes, downloads."""

    def __init__(self, where: RepoPath, commit: str, files: Mapping[str, int], blobs: Mapping[str, str]):
        self.where = where
        self.commit = commit
        self.files = files
        self._blobs = blobs  # file -> name of its contents in the cache

    @classmethod
    def open(cls, where: RepoPath) -> RemoteRepo:
        """Ask the hub for the files of a repository."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api = HfApi(library_name="birkhoff")
        with _hub_errors(where):
            commit = api.repo_info(where.repo, revision=where.revision).sha
            tree = [
                entry
                for entry in api.list_repo_tree(where.repo, recursive=True, revision=commit)
                if isinstance(entry, RepoFile)
            ]
        files = {entry.path: entry.size for entry in tree}
        blobs = {entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in tree}
        return cls(where, str(commit), files, blobs)

    def fetch(self, file: str) -> Path:
        """Download one file into the cache (nothing if it is there) and return its path."""
        return self._download_file(file, None)

    def read_start(self, file: str, size: int) -> bytes:
        """The first `size` bytes of a file, without downloading the rest."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        size = min(size, self.files[file])
        url = hf_hub_url(self.where.repo, file, revision=self.commit)
        headers = build_hf_headers(library_name="birkhoff") | {"range": f"bytes=0-{size - 1}"}
        parts: list[bytes] = []
        with _hub_errors(self.where), get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            for part in response.iter_bytes():  # a server may ignore the range and send the whole file
                parts.append(part)
                if sum(map(len, parts)) >= size:
                    break
        return b"".join(parts)[:size]

    def missing(self, files: Iterable[str]) -> list[str]:
        """The files whose contents are not in the cache."""
        blobs = self._storage / "blobs"
        return [file for file in files if not (blobs / self._blobs[file]).exists()]

    def check_disk(self, files: Iterable[str]) -> tuple[int, int]:
        """Bytes to download and bytes free; raises `DiskFull` if the disk of the cache is too small."""
        needed = self._missing_bytes(files)
        return needed, check_free_disk(self.where, cache_folder(), needed, OTHER_CACHE, _DISK_RESERVE)

    def _missing_bytes(self, files: Iterable[str]) -> int:
        return sum(self.files[file] for file in self.missing(files))

    def download(self, files: Sequence[str], progress: ProgressCallback | None = None) -> Path:
        """Download files into the cache and return the snapshot folder.

        Files that are complete are not downloaded again, and a broken connection continues where it broke. A process
        that is killed loses the files it was writing; what it left of them is removed by the next download."""
        self._remove_leftovers()
        counter = _ByteCounter(sum(self.files[file] for file in files), progress)
        pending = set(self.missing(files))
        counter.add(sum(self.files[file] for file in files if file not in pending))
        pool = ThreadPoolExecutor(_WORKERS)
        try:
            tasks = [pool.submit(self._download_file, file, counter) for file in files]
            with naming_full_disk(
                self.where, cache_folder(), lambda: self._missing_bytes(files), f"{OTHER_CACHE} {CONTINUE}"
            ):
                for task in tasks:
                    task.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        snapshot = _cached_snapshot(self.where)
        assert snapshot is not None, "a file was just written to it"
        return snapshot

    def _download_file(self, file: str, counter: _ByteCounter | None) -> Path:
        from huggingface_hub import hf_hub_download

        with _hub_errors(self.where):
            return Path(
                hf_hub_download(
                    self.where.repo,
                    file,
                    revision=self.where.revision,
                    library_name="birkhoff",
                    tqdm_class=_bar_class(counter),
                )
            )

    @property
    def _storage(self) -> Path:
        from huggingface_hub.file_download import repo_folder_name

        return cache_folder() / repo_folder_name(repo_id=self.where.repo, repo_type="model")

    def _remove_leftovers(self) -> None:
        """Remove partial files of killed downloads: those whose lock no process holds."""
        locks = cache_folder() / ".locks" / self._storage.name
        for partial in (self._storage / "blobs").glob("*.incomplete"):
            lock = locks / f"{partial.name.split('.')[0]}.lock"
            if not lock.exists():
                continue
            with open(lock, "rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # another process is writing it
                partial.unlink(missing_ok=True)


def select_files(repo: RemoteRepo, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """The files of a repository to download, in order.

    With `include` (patterns as of the shell, `*` also matches `/`) or a path inside the repository: what matches.
    Otherwise the safetensors of a model with the small files beside them. `exclude` removes from either."""
    inside = repo.where.inside
    if include or inside:
        prefix = f"{inside}/" if inside else ""
        patterns = [prefix + pattern for pattern in include] or _inside_patterns(inside)
        chosen = [
            file for file in repo.files if any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
        ]
        seen = f"no file of {repo.where.repo} matches {', '.join(patterns)}"
    else:
        chosen = _model_files(repo)
        seen = f"{repo.where.repo} holds no safetensors model"
    chosen = [file for file in chosen if not any(fnmatch.fnmatchcase(file, pattern) for pattern in exclude)]
    if not chosen:
        total = format_bytes(sum(repo.files.values()))
        examples = ", ".join(sorted(repo.files, key=lambda file: -repo.files[file])[:4])
        raise HubError(
            f"{seen}; it holds {len(repo.files)} files of {total}, such as {examples}. Say which to take: "
            "--include 'PATTERN', or org/name/path."
        )
    return chosen


def _inside_patterns(inside: str) -> list[str]:
    """Patterns of a file or folder; of a GGUF file also its other parts and its MTP block."""
    gguf = _GGUF_PART.fullmatch(inside)
    if gguf is None:
        return [inside, f"{inside}/*"]
    parts = [f"{gguf[1]}-?????-of-{gguf[2]}.gguf"] if gguf[2] else [inside]
    return [*parts, f"{gguf[1]}-mtp.gguf"]


def _model_files(repo: RemoteRepo) -> list[str]:
    weights = {file for file in repo.files if file.endswith(".safetensors") and "/" not in file}
    if INDEX in repo.files:
        try:
            named = set(read_json(repo.fetch(INDEX), INDEX_BYTES)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise HubError(f"{INDEX} of {repo.where} names no shards. Choose files with --include.") from None
        absent = sorted(named - weights)
        if absent:
            raise HubError(
                f"{INDEX} of {repo.where} names {len(absent)} shards that the repository lacks, the first {absent[0]}. "
                "Choose another revision, or files with --include."
            )
        weights = named
    if not weights:
        return []
    beside = [
        file
        for file, size in repo.files.items()
        if not file.endswith(_WEIGHT_SUFFIXES) and size <= _MAX_SIDE_FILE
    ]
    return [*beside, *sorted(weights)]


class _ByteCounter:
    """Sums the bytes of several downloads and reports them."""

    def __init__(self, total: int, progress: ProgressCallback | None):
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


def _bar_class(counter: _ByteCounter | None) -> type[Any]:
    """A class with the part of tqdm's interface that `huggingface_hub` uses, which adds its bytes to `counter`."""

    class Bar:
        def __init__(self, *arguments: Any, total: int | None = None, initial: int = 0, **options: Any):
            self.n = initial
            self.total = total

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            if counter is not None:
                counter.add(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes received, of which `update` tells once they are written."""

        def set_postfix_str(self, *arguments: Any, **options: Any) -> None: ...

        def set_transfer_postfix_str(self, *arguments: Any, **options: Any) -> None: ...

        def set_description_str(self, *arguments: Any, **options: Any) -> None: ...

        def refresh(self, *arguments: Any, **options: Any) -> None: ...

        def close(self) -> None: ...

    return Bar


@contextmanager
def _hub_errors(where: RepoPath) -> Iterator[None]:
    """Turn errors of `huggingface_hub` and its transport into `HubError`; disk errors pass."""
    from huggingface_hub import constants, errors

    # the base class of the HTTP library's errors, which differs between versions
    transport = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{where.repo} is gated: accept its terms on {constants.ENDPOINT}/{where.repo}, then set HF_TOKEN or run "
            "hf auth login."
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{constants.ENDPOINT} has no model {where.repo} that this token may read. Check the name; for a private "
            "one set HF_TOKEN or run hf auth login."
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{where.repo} has no revision {quoted(where.revision)}. Give a branch, tag or commit it has."
        ) from None
    except errors.OfflineModeIsEnabled:
        raise HubError(
            f"HF_HUB_OFFLINE is set, so {where} is not downloaded. Unset it to use the network."
        ) from None
    except errors.HFValidationError as error:
        raise HubError(f"{where.repo} is no name of a repository ({error}). Expected org/name.") from None
    except (errors.LocalEntryNotFoundError, transport) as error:
        cause = error.__cause__ or error
        raise HubError(
            f"{where} could not be read from {constants.ENDPOINT} ({type(cause).__name__}: {cause}). Check the network "
            "and HF_ENDPOINT; run the same command again to continue."
        ) from None
