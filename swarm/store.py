"""Checkpoints that are kept: model folders by their content, and the names and pins that hold them.

    checkpoints/
      names.json      name → id; id → who pins it
      objects/<id>/   a plain Hugging Face folder with its card (`swarm.store_card`)
      incoming/       what is being written

    write incoming/… ─ card ─ flush ─ [ lock: sweep ─ rename to objects/<id> ─ replace names.json ─ sweep ]

A folder goes when no name and no pin refers to it. names.json is the only truth and is replaced in one step, so a kill
leaves the store as it was or as it should be, and perhaps a folder that nothing refers to: the next command that
writes sweeps it away. Readers take no lock. Not here: when a run publishes (`recipes.publish.rules`).
"""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from swarm.folders import CheckpointError, flush, line
from swarm.store_card import Card, Origin, fault_of, read_card, seal
from swarm.store_intake import copy, origin_of
from swarm.types import CheckpointRef

STORE = Path("checkpoints")
"""The store of a working folder."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{8,64}")
_OWN = frozenset({"names.json", "names.json.new", "store.lock", "objects", "incoming"})
_LOCK_SECONDS = 60.0


class _Index(msgspec.Struct):
    names: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    pins: dict[str, list[str]] = msgspec.field(default_factory=dict[str, list[str]])
    format: int = 1

    @property
    def ids(self) -> list[str]:
        """All that is referred to, each once."""
        return list(dict.fromkeys([*self.names.values(), *self.pins]))


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as the store has it. `fault`: what is wrong with it, "" if nothing; `card` is None if unreadable."""

    id: str
    path: Path
    names: tuple[str, ...]
    pins: tuple[str, ...]
    card: Card | None
    fault: str


@dataclass(frozen=True, slots=True)
class Store:
    """`Store(Path("checkpoints")).get("wide_search/best")`. Nothing is made on disk before something is written.

    Where a method takes `text`, it is a name, or 8 or more letters that the sha256 of one checkpoint, or of its
    weights, begins with. Methods raise CheckpointError, one line for the user: no such checkpoint or more than one, a
    name that is none, a folder that is no store, a damaged checkpoint; and OSError where the disk refuses, the store
    being as it was.
    """

    root: Path = STORE

    def publish(self, names: Sequence[str], write: Callable[[Path], CheckpointRef], origin: Origin) -> Stored:
        """Has `write` make a model folder, as `swarm.checkpoint.save` does, and gives it these names.

        A name that another checkpoint had moves. What is in the store already keeps its card.
        """
        check_names(names)
        with self._staged() as folder:
            card = seal(folder, write(folder), origin, int(time.time()))
            with self._held() as index:
                home = self._path(card.id)
                if _inspect(home, thorough=True)[1]:
                    shutil.rmtree(home, ignore_errors=True)
                    folder.rename(home)
                    flush(home.parent)
                index.names.update(dict.fromkeys(names, card.id))
                return self._stored(index, card.id)

    def add(self, folder: Path, names: Sequence[str]) -> Stored:
        """Takes in a copy of a folder from elsewhere; one that a store has published keeps its origin. See
        `swarm.store_intake.copy` for what is refused."""
        origin = origin_of(folder)
        return self.publish(names, lambda into: copy(folder, into), origin)

    def entries(self, *, thorough: bool = False) -> list[Stored]:
        """All checkpoints, damaged ones with their fault, in the order of their names. `thorough` hashes every file;
        otherwise only those whose size or time is not the card's."""
        index = self._read()
        found = [self._stored(index, i, thorough=thorough) for i in index.ids]
        return sorted(found, key=lambda s: (not s.names, s.names, s.id))

    def show(self, text: str, *, thorough: bool = False) -> Stored:
        """One checkpoint."""
        index = self._read()
        return self._stored(index, self._find(index, text), thorough=thorough)

    def get(self, text: str, *, pin: str = "") -> CheckpointRef:
        """A checkpoint to load, every file hashed. With `pin`, it is pinned first in this holder's name, so that it
        stays when the name moves on."""
        found = self.pin(text, pin) if pin else self.show(text)
        card, fault = _inspect(found.path, thorough=True)
        if card is None or fault:
            raise CheckpointError(f"{self.root}: {text}: {fault}; publish or add it again, or delete it")
        return CheckpointRef(found.path, card.weights_sha256, card.version)

    def pin(self, text: str, holder: str) -> Stored:
        """Keeps a checkpoint for `holder`, whatever its names do."""
        if not holder.strip():
            raise CheckpointError("pin: no holder, want who needs it, for example the folder of a run")
        with self._held() as index:
            i = self._find(index, text)
            index.pins[i] = sorted({*index.pins.get(i, []), holder})
            return self._stored(index, i)

    def unpin(self, text: str, holder: str) -> bool:
        """Lets it go; returns whether the checkpoint is still there, for others or by name."""
        with self._held() as index:
            i = self._find(index, text)
            pins = index.pins.pop(i, [])
            if holder not in pins:
                raise CheckpointError(f"{self.root}: {text} is not pinned by {holder!r}, {_holders(pins)}")
            if len(pins) > 1:
                index.pins[i] = [p for p in pins if p != holder]
            return i in index.ids

    def delete(self, text: str) -> bool:
        """Takes a name away, or by hash all names of a checkpoint; returns whether the checkpoint is still there.

        Raises CheckpointError, naming who pins it, where it would have to go and is pinned.
        """
        with self._held() as index:
            i = self._find(index, text)
            gone = {text} if text in index.names else {n for n, j in index.names.items() if j == i}
            left = {n: j for n, j in index.names.items() if n not in gone}
            if i not in left.values() and i in index.pins:
                raise CheckpointError(f"{self.root}: {text} stays: {_holders(index.pins[i])}, want it unpinned first")
            index.names = left
            return i in index.ids

    # --- what is where ---------------------------------------------------------------------

    def _path(self, i: str) -> Path:
        return self.root / "objects" / i

    def _stored(self, index: _Index, i: str, *, thorough: bool = False) -> Stored:
        names = tuple(sorted(n for n, j in index.names.items() if j == i))
        return Stored(
            i, self._path(i), names, tuple(index.pins.get(i, [])), *_inspect(self._path(i), thorough=thorough)
        )

    def _find(self, index: _Index, text: str) -> str:
        if text in index.names:
            return index.names[text]
        if not _HASH.fullmatch(text):
            near = difflib.get_close_matches(text, index.names, n=3, cutoff=0.5)
            known = f"nearest: {', '.join(near)}" if near else f"it has {', '.join(sorted(index.names)[:5]) or 'none'}"
            raise CheckpointError(f"{self.root}: no checkpoint {text!r}, {known}")
        found = [i for i in index.ids if i.startswith(text) or self._weights(i).startswith(text)]
        if len(found) != 1:
            seen = f"{len(found)} checkpoints begin with {text}" if found else f"no checkpoint begins with {text}"
            raise CheckpointError(f"{self.root}: {seen}, want one{': ' if found else ''}{', '.join(found)}")
        return found[0]

    def _weights(self, i: str) -> str:
        card, _ = _inspect(self._path(i), thorough=False)
        return card.weights_sha256 if card else ""

    def _read(self) -> _Index:
        path = self.root / "names.json"
        try:
            index = msgspec.json.decode(path.read_bytes(), type=_Index)
        except FileNotFoundError:
            self._check_own()
            return _Index()
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{path}: corrupt: {line(e)}; the folders in objects/ are untouched") from e
        if index.format != 1:
            raise CheckpointError(f"{path}: format {index.format}, want 1")
        return index

    def _check_own(self) -> None:
        """Without names.json it is a new store, or none; what is in objects/ then must not be swept away."""
        strange = sorted(p.name for p in self.root.iterdir() if p.name not in _OWN) if self.root.exists() else []
        if strange:
            raise CheckpointError(f"{self.root}: not a store, it has {strange[0]}, want a new or an empty folder")
        objects = self.root / "objects"
        if objects.is_dir() and any(objects.iterdir()):
            raise CheckpointError(f"{self.root}: names.json is missing; the folders in objects/ are untouched")

    # --- writing ---------------------------------------------------------------------------

    @contextmanager
    def _held(self) -> Generator[_Index]:
        """The index, changed by nobody else meanwhile; written back when it was changed, and the store swept."""
        with self._locked():
            index = self._read()
            before = msgspec.json.encode(index)
            self._sweep(index)
            yield index
            after = msgspec.json.encode(index)
            if after != before:
                self._write(after)
                self._sweep(index)

    @contextmanager
    def _locked(self) -> Generator[None]:
        self._read()
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.root / "store.lock", timeout=_LOCK_SECONDS):
                index = self._read()
                for name in ("objects", "incoming"):
                    (self.root / name).mkdir(exist_ok=True)
                if not (self.root / "names.json").exists():
                    self._write(msgspec.json.encode(index))
                yield
        except Timeout as e:
            raise CheckpointError(f"{self.root}: in use by another process for {_LOCK_SECONDS:.0f} s") from e

    def _write(self, index: bytes) -> None:
        path = self.root / "names.json"
        new = path.with_name("names.json.new")
        new.write_bytes(msgspec.json.format(index, indent=1) + b"\n")
        flush(new)
        new.replace(path)
        flush(self.root)

    def _sweep(self, index: _Index) -> None:
        """Removes folders that nothing refers to, and what dead writers left; the lock is held."""
        wanted = set(index.ids)
        for path in (self.root / "objects").iterdir():
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)
        for stage in (self.root / "incoming").iterdir():
            try:
                with FileLock(stage / "lock", timeout=0):
                    shutil.rmtree(stage, ignore_errors=True)
            except Timeout:
                continue

    @contextmanager
    def _staged(self) -> Generator[Path]:
        """A place to make a folder in, this process's as long as it lives."""
        with self._locked():
            stage = Path(tempfile.mkdtemp(dir=self.root / "incoming"))
            lock = FileLock(stage / "lock", timeout=0)
            lock.acquire()
        try:
            yield stage / "folder"
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            lock.release()


def check_names(names: Sequence[str]) -> None:
    """Raises CheckpointError for none, and for one that is no name: `wide_search/best` is, a hash is not."""
    if not names:
        raise CheckpointError("store: no name, want one or more, for example wide_search/best")
    for name in names:
        if not _NAME.fullmatch(name) or _HASH.fullmatch(name):
            raise CheckpointError(
                f"store: name {name!r}, want letters, digits, . _ - and /, for example wide_search/best"
            )


def resolve(text: str, store: Path = STORE) -> Path:
    """The folder of a checkpoint: a path of a folder, or else a name in the store. Options also know those that ship.

    A checkpoint of the store is verified. Raises CheckpointError where it is neither.
    """
    if Path(text).is_dir():
        return Path(text)
    try:
        return Store(store).get(text).path
    except CheckpointError as e:
        raise CheckpointError(f"{text}: no such folder; {e}") from e


def _inspect(folder: Path, *, thorough: bool) -> tuple[Card | None, str]:
    """The card, and what is wrong with the folder."""
    if not folder.is_dir():
        return None, "its folder is missing"
    try:
        card = read_card(folder)
        if card.id != folder.name:
            return card, f"its card is that of {card.id[:12]}"
        return card, fault_of(folder, card, thorough=thorough)
    except (CheckpointError, OSError) as e:
        return None, line(e)


def _holders(pins: Sequence[str]) -> str:
    return f"pinned by {', '.join(pins)}" if pins else "by nobody"
