"""The run directory: who owns it, which checkpoints in it are whole, whether training is done.

    <storage>/<name>/OWNER.json                         the attempt that may write here
    <storage>/<name>/checkpoint_step_00000100/          torch's distributed checkpoint
    <storage>/<name>/checkpoint_step_00000100/MANIFEST.json   written last: this checkpoint is whole
    <storage>/<name>/checkpoint_manager_snapshot.json   Ray Train's record of checkpoints
    <storage>/<name>/DONE.json                          the last step was reached

One code path for directories and object stores: everything goes through `pyarrow.fs`, as in Ray
Train. Needs no Ray.
"""

import json
import posixpath
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import pyarrow.fs

from trainingjob_trainer import contract, errors

MANIFEST = "MANIFEST.json"
OWNER = "OWNER.json"
DONE = "DONE.json"
SNAPSHOT = "checkpoint_manager_snapshot.json"
CHECKPOINT = re.compile(r"checkpoint_step_(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint after `step` steps."""
    return f"checkpoint_step_{step:08d}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole checkpoint holds; written after all its files."""

    step: int
    consumed_samples: int
    world_size: int
    global_batch_size: int
    state_digest: str
    """Digest of the names and shapes of the state, to notice another model."""
    data_digest: str
    """Digest of the training tokens, to notice data that changed between attempts."""
    start_validation_loss: float | None
    validation_loss: float | None
    loss: float | None
    time: str
    uid: str
    attempt: int
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """File name -> (bytes, CRC-32)."""


@dataclass(frozen=True, slots=True)
class Done:
    """That training reached its last step."""

    uid: str
    step: int
    total_steps: int
    start_validation_loss: float | None
    validation_loss: float | None
    checkpoint: str


class RunDirectory:
    """One job's directory in the storage, seen from the driver or from a worker.

    `path` is a local directory or a URI that pyarrow knows (s3://, gs://, abfs://, hdfs://).
    Raises TrainingError (exit 66) when the storage cannot be used.
    """

    def __init__(self, storage: str, name: str) -> None:
        self.url = f"{storage.rstrip('/')}/{name}"
        with self._explained("open"):
            self.fs, root = pyarrow.fs.FileSystem.from_uri(storage)
        self.path = posixpath.join(root.rstrip("/"), name)
        self.is_local = isinstance(self.fs, pyarrow.fs.LocalFileSystem)

    # --- files -----------------------------------------------------------------------------------

    def join(self, *parts: str) -> str:
        """A path below the run directory, as the file system wants it."""
        return posixpath.join(self.path, *parts)

    def read(self, *parts: str) -> bytes | None:
        """A small file's content, None if it does not exist."""
        with self._explained("read from"):
            try:
                with self.fs.open_input_stream(self.join(*parts)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def read_json(self, *parts: str) -> dict[str, Any] | None:
        """A JSON object, None if the file is absent or holds no such thing."""
        content = self.read(*parts)
        try:
            value = json.loads(content) if content is not None else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def write(self, content: bytes, *parts: str) -> None:
        """Write a file as a whole or not at all."""
        path = self.join(*parts)
        # An object store shows an object only once it is complete; a file system needs the rename.
        target = f"{path}.tmp" if self.is_local else path
        with self._explained("write to"):
            with self.fs.open_output_stream(target) as stream:
                stream.write(content)
            if self.is_local:
                self.fs.move(target, path)

    def write_json(self, value: object, *parts: str) -> None:
        """Write JSON as a whole or not at all."""
        self.write(json.dumps(value, indent=1, allow_nan=False).encode(), *parts)

    def sizes(self, *parts: str) -> dict[str, int]:
        """Name -> bytes of the files directly in a directory; empty if it does not exist."""
        selector = pyarrow.fs.FileSelector(self.join(*parts), allow_not_found=True)
        return {i.base_name: i.size or 0 for i in self.fs.get_file_info(selector) if i.is_file}

    def delete_directory(self, *parts: str) -> None:
        """Delete a directory with all in it; it may be absent."""
        with suppress(FileNotFoundError):
            self.fs.delete_dir(self.join(*parts))

    # --- preflight and ownership -----------------------------------------------------------------

    def preflight(self) -> None:
        """Write, read and delete a file. Raises TrainingError (exit 66)."""
        probe = f".preflight-{socket.gethostname()}"
        with self._explained("write to"):
            self.fs.create_dir(self.path, recursive=True)
        self.write(b"ok", probe)
        if self.read(probe) != b"ok":
            raise errors.storage(
                f"a file just written to {self.url} cannot be read back",
                "check the storage: it lost a write",
            )
        with self._explained("delete from"):
            self.fs.delete_file(self.join(probe))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except errors.TrainingError:
            raise
        except Exception as error:  # pyarrow raises OSError, ArrowInvalid, ArrowNotImplementedError
            cause = " ".join(str(error).split())
            raise errors.storage(
                f"cannot {what} the storage {self.url} on {socket.gethostname()}: {cause}",
                _storage_remedy(error, self.url),
            ) from error

    def claim(self, job: contract.Job) -> str:
        """Write this attempt's mark. Returns a line to print, empty if there is nothing to say.

        Raises TrainingError: exit 66 where the directory belongs to a job of another name or
        namespace, exit 74 where a later attempt of this job stands.
        """
        mark = self.read_json(OWNER)
        note = ""
        if mark is not None:
            theirs = (mark.get("namespace"), mark.get("name"))
            if theirs != (job.namespace, job.name):
                raise errors.storage(
                    f"{self.url} belongs to the job {theirs[0]}/{theirs[1]}, "
                    f"this is {job.namespace}/{job.name}",
                    "give each job a storage of its own (another subPath, prefix or name)",
                )
            if mark.get("uid") != job.uid:
                note = f"taking over {self.url} from an earlier job of the same name"
        self.check_owner(job)
        owner = {k: getattr(job, k) for k in ("namespace", "name", "uid", "attempt")}
        self.write_json({**owner, "time": contract.now()}, OWNER)
        return note

    def check_owner(self, job: contract.Job) -> None:
        """Raise TrainingError (exit 74) where a later attempt of this job owns the directory."""
        mark = self.read_json(OWNER) or {}
        attempt = mark.get("attempt")
        if mark.get("uid") == job.uid and isinstance(attempt, int) and attempt > job.attempt:
            raise errors.infrastructure(
                f"attempt {job.attempt} is superseded: attempt {attempt} owns {self.url}",
                "nothing to do: the later attempt goes on",
            )

    def check_visible(self, job: contract.Job, where: str, patience_seconds: float = 5.0) -> None:
        """Raise TrainingError (exit 66) where the driver's mark is not seen from this node."""
        deadline = time.monotonic() + patience_seconds
        while True:
            mark = self.read_json(OWNER) or {}
            if mark.get("uid") == job.uid and mark.get("attempt", 0) >= job.attempt:
                return
            if time.monotonic() > deadline:
                raise errors.storage(
                    f"{where} does not see what the driver wrote to {self.url}",
                    "use storage that all nodes share: a ReadWriteMany claim or an object store",
                )
            time.sleep(0.5)

    # --- checkpoints -----------------------------------------------------------------------------

    def checkpoints(self) -> dict[str, Manifest]:
        """The whole checkpoints by name, oldest first: manifest there, every file of its size."""
        found = {}
        for name in self._checkpoint_directories():
            manifest = self.manifest(name)
            if manifest is not None:
                sizes = self.sizes(name)
                if all(sizes.get(file) == size for file, (size, _) in manifest.files.items()):
                    found[name] = manifest
        return dict(sorted(found.items(), key=lambda item: item[1].step))

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint, None if it is absent or not one of ours."""
        value = self.read_json(name, MANIFEST)
        if value is None:
            return None
        try:
            files = {file: (int(size), int(crc)) for file, (size, crc) in value["files"].items()}
            return Manifest(**{**value, "files": files}) if files else None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def write_manifest(self, name: str, manifest: Manifest) -> None:
        """Declare a checkpoint whole."""
        self.write_json(asdict(manifest), name, MANIFEST)

    def checksum(self, name: str, file: str) -> tuple[int, int]:
        """(bytes, CRC-32) of one file of a checkpoint, read in pieces of 4 MiB."""
        size = crc = 0
        with self.fs.open_input_stream(self.join(name, file)) as stream:
            while piece := stream.read(4 << 20):
                size, crc = size + len(piece), zlib.crc32(piece, crc)
        return size, crc

    def set_aside(self, name: str) -> None:
        """Take a damaged checkpoint out of use; the doctor deletes it at the next start."""
        with suppress(FileNotFoundError):
            self.fs.delete_file(self.join(name, MANIFEST))

    def _checkpoint_directories(self) -> list[str]:
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        infos = self.fs.get_file_info(selector)
        return [i.base_name for i in infos if not i.is_file and CHECKPOINT.fullmatch(i.base_name)]

    def doctor(self) -> list[str]:
        """Bring the directory into a state that Ray Train can start from; what was done, in lines.

        Deletes checkpoints that are not whole and makes Ray Train's record name exactly those that
        are: Ray writes the record in place and refuses to start from one that is cut or names a
        checkpoint that is gone (`CheckpointManagerInitializationError`).
        """
        notes = []
        whole = self.checkpoints()
        for name in self._checkpoint_directories():
            if name not in whole:
                self.delete_directory(name)
                notes.append(f"removed {name}, which is not complete")
        recorded = self.read(SNAPSHOT)
        if recorded is None and not whole:
            return notes
        if _recorded_names(recorded) == list(whole):
            return notes
        if recorded is not None:
            self.write(recorded, f"{SNAPSHOT}.corrupt-{int(time.time())}")
            notes.append("rebuilt the record of checkpoints, which did not match them")
        self.write_json(_snapshot(whole), SNAPSHOT)
        return notes

    # --- the end ---------------------------------------------------------------------------------

    def done(self) -> Done | None:
        """The end marker, None if training has not ended."""
        value = self.read_json(DONE)
        try:
            return Done(**value) if value else None
        except TypeError:
            return None

    def write_done(self, done: Done) -> None:
        """Declare training finished."""
        self.write_json(asdict(done), DONE)


def _storage_remedy(error: BaseException, url: str) -> str:
    text = str(error).lower()
    if isinstance(error, PermissionError) or "permission denied" in text or "access_denied" in text:
        return "give the training pods write access (fsGroup of the volume, or the bucket's policy)"
    if "read-only" in text:
        return "mount the volume writable"
    if "no space left" in text or "quota" in text:
        return "free space or enlarge the volume"
    if isinstance(error, NotADirectoryError | FileExistsError) or "not a directory" in text:
        return "name a directory: a file stands in the way"
    if "://" in url and ("unrecognized" in text or "not built" in text or "scheme" in text):
        return "use a directory or a URI with a scheme that pyarrow knows: s3, gs, abfs, hdfs"
    return "check that the storage exists, is mounted on this node and is writable"


def _recorded_names(snapshot: bytes | None) -> list[str] | None:
    try:
        value = json.loads(snapshot or b"")
        names = [str(result["checkpoint_dir_name"]) for result in value["checkpoint_results"]]
        latest = value["latest_checkpoint_result"]
        ok = (latest or {}).get("checkpoint_dir_name") == (names[-1] if names else None)
        known = value["ray_version"] == metadata.version("ray")
        counted = len(value["checkpoint_report_indices"]) == len(names)
        idle = value["pending_training_results"] == [] == value["pending_validation_specs"]
        return names if ok and known and counted and idle else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _snapshot(checkpoints: dict[str, Manifest]) -> dict[str, Any]:
    """Ray Train's record (`_CheckpointManagerState`, ray 2.60), naming `checkpoints`."""
    results = [
        {"version": 0, "checkpoint_dir_name": name, "metrics": {"step": manifest.step}}
        for name, manifest in checkpoints.items()
    ]
    return {
        "ray_version": metadata.version("ray"),
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(results))),
        "latest_checkpoint_result": results[-1] if results else None,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(results),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
