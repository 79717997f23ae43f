"""Built plans on disk: loaded where everything that decides about them is as it was, otherwise rebuilt with a reason.

A plan's file: 8 bytes `cudnnpln`; the number of bytes after this prefix (uint64, little-endian); their sha256 (32
bytes); metadata as one line of JSON; the plan as cuDNN serializes it. Nothing is pickled. The file's name is the
graph's signature and a hash of the environment, so one folder serves several GPUs and versions.

Loading a plan loads native code: whoever can write to the folder can run code as you. The store makes its folder
private (mode 0700) and uses neither a folder nor a file that others may write to or that is someone else's. The sha256
finds damage, not forgery.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
import warnings
from pathlib import Path

import cudnn

from . import bench
from .autotune import replay
from .graph import Plan, Step, graph_name
from .graph import build as build_graph
from .libcudnn import cache_folder
from .signature import canonical, difference, environment, graph_signature
from .target import target

FORMAT = 1  # of the metadata; to be raised as well when helpers.build begins to refuse a plan that it once built
MAGIC = b"cudnnpln"
PREFIX = struct.Struct("<8sQ32s")
ABANDONED_S = 3600  # a temporary file of this age was left by a process that was killed while it wrote
OURS = re.compile(r"[0-9a-f]{64}-[\w-]+\.plan|cudnnpln-\w+\.tmp")  # no other file of the folder is touched
METADATA = {"format", "graph", "plan", "bytes", "winner", "decides"}


class RefusedError(Exception):
    """A plan is not loaded or not stored; the message is the reason, in one line. The store's methods catch it."""


class PlanStore:
    """Plans in a folder. Trouble with the folder or a damaged file costs one warning and a rebuild, never the run.

    folder         default: cudnn-notebooks/plans under $XDG_CACHE_HOME or ~/.cache; without a home folder,
                   cudnn-notebooks-UID/plans under the system's for temporary files. Made, private, at the first save.
    limit_bytes    size of all plans together; beyond it, each save removes those that were not used for longest.
    ahead_of_time  True: also loads plans that were built without a GPU for exactly this GPU, cuDNN and frontend.
    reason         in one line, why the last call loaded a plan or did not.

    There is one plan for a graph in an environment: the last one saved, however it was chosen. Plans of the frontend's
    own Python engines are not stored. Any number of processes may use a folder at once.
    """

    def __init__(self, folder=None, limit_bytes=256 * 2**20, ahead_of_time=False):
        self.folder = Path(folder).expanduser().absolute() if folder else _default_folder()
        self.limit_bytes, self.ahead_of_time = limit_bytes, ahead_of_time
        self.reason, self._warned = "", set()

    def get(self, graph, build=build_graph):
        """The Plan of `graph`: loaded, or built with `build(graph)` and saved. Its first step says which, and why.

        graph  a described graph, or a function that returns one: then a rebuild starts from a fresh one.

        Raises what `build` raises; TypeError for what is no graph, and for a `build` that returns no Plan.
        """
        make_graph = graph if callable(graph) else lambda: graph
        started = time.perf_counter()
        plan, why = self.load(make_graph())
        if plan is None:
            ms = (time.perf_counter() - started) * 1e3
            plan = build(make_graph())
            self.save(plan)
            plan.steps.insert(0, Step("load", ms, f"not loaded: {why}"))
            self.reason = f"built: {why}"
        return plan

    def load(self, graph):
        """(Plan, reason) of a described graph, which becomes the plan's; (None, reason) where none may be loaded.

        Either way the graph is lowered: nothing can be added to it any more, and `build` takes it. Raises TypeError for
        what is no graph, such as the function that describes it.
        """
        started, plan = time.perf_counter(), None
        try:
            found = self._stored(_signed(graph), self.ahead_of_time)
            if not found:
                raise RefusedError("not stored yet")
            path, header, blob, why = found[0]
            if why:
                raise RefusedError(f"{why}; that plan was tuned: retune" if header["winner"] else why)
            plan = _deserialized(graph, header["plan"], blob)
        except RefusedError as refused:
            self.reason = str(refused)
        else:
            with contextlib.suppress(OSError):  # a plan of a read-only folder keeps its time of last use
                os.utime(path)
            what = f"{plan.name}, {len(blob):,} bytes"
            plan.steps.append(Step("load", (time.perf_counter() - started) * 1e3, what))
            self.reason = f"loaded: {what}"
        return plan, self.reason

    def save(self, plan, winner=None):
        """Writes `plan`, with the `winner` of the tuning that chose it if there is one, and returns the file's path.

        winner  as Tuning.winner: engine and knobs. A place in cuDNN's list means nothing in another process.

        Returns None, after a warning, where the plan can't be stored. Raises ValueError where `winner` is of another
        plan, and for one of several plans built on one graph (a tuning's candidates): cuDNN saves the last one built.
        Raises TypeError for what is no Plan.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"a built Plan is saved (build(graph) returns one), got {type(plan).__name__}")
        if plan.index is not None:
            raise ValueError(f"{plan.name} shares its graph with other plans: save the plan of replay(graph, winner)")
        named = isinstance(winner, dict) and {"engine", "knobs"} <= winner.keys() and winner.get("name") == plan.name
        if winner is not None and not named:
            raise ValueError(f"a winner is given by engine, knobs and the plan's name, {plan.name}; got {winner!r:.99}")
        try:
            signature, blob = _signed(plan.graph), _serialized(plan.graph)
            here = environment() | {"graph signature": signature}
            header = {"format": FORMAT, "graph": graph_name(plan.graph), "plan": plan.name}
            header |= {"bytes": len(blob), "winner": winner, "decides": here}
            path = self.folder / f"{signature}-{hashlib.sha256(canonical(here)).hexdigest()[:16]}.plan"
            self._write(path, canonical(header) + b"\n" + blob)
        except RefusedError as refused:
            self._warn(str(refused))
            return None
        return path

    def winner(self, graph):
        """(winner, reason): the tuned candidate that is stored for `graph` and valid here, or None and why."""
        try:
            tuned = [(header["winner"], why) for _, header, _, why in self._stored(_signed(graph)) if header["winner"]]
        except RefusedError as refused:
            return None, str(refused)
        if not tuned:
            return None, "no winner is stored: tune"
        winner, why = tuned[0]
        if why:
            return None, f"the winner {winner['name']} is stale ({why}): tune again"
        return winner, f"{winner['name']} was tuned for this GPU, driver, cuDNN and frontend"

    def retune(self, make_graph, tune):
        """The Plan of the stored winner; where there is none, or GPU, driver, cuDNN or frontend changed, of a new one.

        make_graph  function that returns the described graph.
        tune        function that returns the new Tuning, such as lambda: autotune(make_graph, tensors). It is called
                    only where it is needed; its winner is saved beside its plan, and `get` loads it from then on.

        Raises ValueError where the tuning has no winner, and what `tune` and `replay` raise.
        """
        winner, why = self.winner(make_graph())
        if winner is None:
            tuning = tune()
            winner = tuning.winner
            if winner is None:
                raise ValueError(tuning.summary)
        else:
            plan, why = self.load(make_graph())
            if plan is not None and plan.name == winner["name"]:
                return plan
        plan = replay(make_graph(), winner)
        self.save(plan, winner)
        self.reason = f"built: {why}"
        return plan

    @property
    def table(self):
        """The stored plans as a bench.Table, most recently used first; a damaged file's defect stands for its plan."""
        columns, rows, files = ("GPU", "cuDNN", "driver"), [], self._files()
        for _, size, path in files:
            try:
                header, _ = _read(path)
                cells = [header["graph"], header["plan"], "yes" if header["winner"] else "no"]
                cells += [header["decides"].get(column) for column in columns]
            except FileNotFoundError:
                continue
            except RefusedError as damage:
                cells = [path.name[:8], damage, *[""] * 4]
            rows.append([*cells, f"{size:,}"])
        caption = f"{len(rows)} plans, {sum(size for _, size, _ in files):,} of at most {self.limit_bytes:,} bytes"
        return bench.Table(["graph", "plan", "tuned", *columns, "bytes"], rows, caption)

    def clear(self):
        """Removes every plan from the folder, damaged ones and those of other versions too; returns how many.

        Other files of the folder stay.
        """
        files = self._files()
        for _, _, path in files:
            path.unlink(missing_ok=True)
        return len(files)

    # --- files ---

    def _stored(self, signature, ahead_of_time=False):
        """[(path, header, blob, why it is not for here or "")] of a graph's plans: those for here, then the latest."""
        try:
            self._check_folder()
            files = self._files(f"{signature}-*.plan")
        except FileNotFoundError:  # nothing was saved yet
            return []
        except OSError as error:
            raise self._warn(self._trouble(error)) from None
        found, here = [], environment() | {"graph signature": signature}
        for _, _, path in files:
            header, blob = {"winner": None}, None
            try:
                header, blob = _read(path)
                why = difference(header["decides"], here, ahead_of_time)
            except FileNotFoundError:
                continue
            except RefusedError as damage:
                why = str(damage)
                self._warn(f"{why}: {path}")
            found.append((path, header, blob, why))
        return sorted(found, key=lambda item: (item[3] != "", item[1].get("decides") != here))

    def _files(self, pattern="*.plan"):
        """[(mtime in ns, bytes, path)], most recently used first. Other processes may remove files meanwhile."""
        found = []
        for path in self.folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                info = path.stat()
                if OURS.fullmatch(path.name) and stat.S_ISREG(info.st_mode):
                    found.append((info.st_mtime_ns, info.st_size, path))
        return sorted(found, reverse=True)

    def _check_folder(self):
        info = self.folder.stat()
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError("it is a file")
        _check_private(info)

    def _write(self, path, content):
        """Writes a file that other processes see whole or not at all, then removes what exceeds the limit."""
        if PREFIX.size + len(content) > self.limit_bytes:
            raise RefusedError(f"{PREFIX.size + len(content):,} bytes exceed limit_bytes ({self.limit_bytes:,})")
        try:
            try:
                self._check_folder()
            except FileNotFoundError:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_folder()
            number, temporary = tempfile.mkstemp(dir=self.folder, prefix="cudnnpln-", suffix=".tmp")
            try:
                with open(number, "wb") as file:
                    file.write(PREFIX.pack(MAGIC, len(content), hashlib.sha256(content).digest()) + content)
                    file.flush()
                    os.fsync(file.fileno())  # or a crash of the machine may leave the name without the content
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RefusedError(self._trouble(error)) from None
        try:
            self._evict(path)
        except OSError as error:  # the plan is stored all the same
            self._warn(self._trouble(error))

    def _evict(self, keep):
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in reversed(files):
            if total > self.limit_bytes and path != keep:
                path.unlink(missing_ok=True)
                total -= size
        for written, _, path in self._files("*.tmp"):
            if time.time() - written / 1e9 > ABANDONED_S:
                path.unlink(missing_ok=True)

    def _trouble(self, error):
        return f"{self.folder} can't be used: {_text(error)}"

    def _warn(self, message):
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"plan store: {message}", stacklevel=2)
        return RefusedError(message)


# --- bytes and plans --------------------------------------------------------------------------------------------------


def _default_folder():
    """For users without a home folder, as in some containers, under the system's folder for temporary files."""
    try:
        return cache_folder().absolute() / "plans"
    except OSError:
        return Path(tempfile.gettempdir(), f"cudnn-notebooks-{os.getuid()}", "plans")


def _signed(graph):
    if not isinstance(graph, cudnn.pygraph):
        hint = "; call it, and give what it returns" if callable(graph) else ""
        raise TypeError(f"a described graph (cudnn.pygraph) is looked up, got {type(graph).__name__}{hint}")
    try:
        return graph_signature(graph)
    except Exception as error:
        raise RefusedError(f"the graph has no signature: {_text(error)}") from None


def _serialized(graph):
    if graph.selected_engine is not None:
        raise RefusedError(f"{graph.selected_engine.name} is a Python engine, which the frontend caches itself")
    try:
        return graph.serialize(as_bytes=True)
    except Exception as error:
        raise RefusedError(f"cuDNN does not serialize it: {_text(error)}") from None


def _deserialized(graph, name, blob):
    try:
        graph.deserialize(*([target.handle()] if target.live else []), blob)
        return Plan(graph, name=name)
    except Exception as error:  # cuDNN and the frontend raise several types
        raise RefusedError(f"cuDNN refuses it: {_text(error)}") from None


def _check_private(info):
    """Raises PermissionError for a file or folder (its os.stat_result) of which someone else may decide the content."""
    if info.st_uid != os.getuid():
        raise PermissionError("it belongs to another user, and loading a plan loads native code")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = "700" if stat.S_ISDIR(info.st_mode) else "600"
        raise PermissionError(f"others may write to it, and loading a plan loads native code: chmod {mode}")


def _read(path):
    """(metadata, blob) of a whole, undamaged, private file. Raises RefusedError for any other, FileNotFoundError."""
    try:
        _check_private(path.stat())
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RefusedError(f"the file can't be used ({_text(error)})") from None
    content = data[PREFIX.size :]
    magic, size, digest = PREFIX.unpack_from(data.ljust(PREFIX.size, b"\0"))
    if magic != MAGIC:
        raise RefusedError(f"the file is cut or is no plan ({len(data):,} bytes)")
    if len(content) != size:
        raise RefusedError(f"the file is cut ({len(content):,} of {size:,} bytes)")
    if hashlib.sha256(content).digest() != digest:
        raise RefusedError("the file is damaged (its sha256 differs)")
    line, _, blob = content.partition(b"\n")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise RefusedError("the metadata is no JSON object")
    if header.get("format") != FORMAT:
        raise RefusedError(f"the metadata has format {header.get('format')}, {FORMAT} is read here")
    if header.keys() != METADATA or header["bytes"] != len(blob) or not isinstance(header["decides"], dict):
        raise RefusedError("the metadata is not complete")
    return header, blob


def _text(error):
    """An exception in one short line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]
