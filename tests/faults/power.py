"""Power cuts: every state that a disk may be in after one, made from the order in which a command wrote and synced.

A model of file systems as POSIX describes them: of a file lasts what an fsync of it found, of names what an fsync of
their folder found, and of all that came later some, in the order of time or of each kind alone. A rename is whole.
"""

import bisect
import os
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.taps import Event, Tap, When, real_write

SKIPPED = (".streams", ".cache", ".mplconfig")
UNIMPORTANT = ("train.log", "samples.jsonl", "environment.toml", ".lock")
Names = dict[int, dict[str, int]]  # folders by number: what lies in them
State = dict[str, tuple[int, int]]  # what a disk holds: path to number of a file and which of its contents


@dataclass
class Step:
    """The disk after an operation, where it differs from before."""

    event: Event
    names: Names
    contents: dict[int, bytes]


@dataclass(frozen=True)
class Film:
    """Writes down, in the file `target`, what the working folder holds after every operation."""

    target: Path

    def install(self, folder: Path) -> None:
        """Begin."""
        real_open, known, seen, held = os.open, Names(), dict[int, tuple[int, int]](), set[int]()
        film = real_open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def hold(path: str, number: int) -> int | None:
            """Keeps a number from being given to another file, and what it stands for readable."""
            if number in held:
                return None
            held.add(number)
            return real_open(path, os.O_RDONLY)

        def look(event: Event) -> None:
            names, contents, waiting = Names(), dict[int, bytes](), [str(folder)]
            while waiting:
                place = waiting.pop()
                number = Path(place).stat().st_ino
                hold(place, number)
                names[number] = {}
                for entry in os.scandir(place):
                    if entry.name in SKIPPED or entry.is_symlink():
                        continue
                    names[number][entry.name] = inode = entry.inode()
                    if entry.is_dir():
                        waiting.append(entry.path)
                        continue
                    found = entry.stat()
                    if seen.get(inode) != (found.st_mtime_ns, found.st_size) or inode == event.inode:
                        seen[inode] = found.st_mtime_ns, found.st_size
                        hold(entry.path, inode)
                        contents[inode] = Path(entry.path).read_bytes()
            changed = {number: there for number, there in names.items() if known.get(number) != there}
            known.update(changed)
            real_write(film, pickle.dumps(Step(event, changed, contents)))

        look(Event("begin", ""))

        def act(event: Event, when: When) -> None:
            if when != "before":
                look(event if when == "after" else event._replace(kind=when))

        Tap(folder, act)

    def steps(self) -> list[Step]:
        """What was written down."""
        found = []
        with self.target.open("rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
        return found


@dataclass
class History:
    """How one file or folder changed: after which operations, and when it was synced."""

    changes: list[int] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)  # when, and up to which time that makes it last
    _lasting: dict[int, int] = field(default_factory=dict)

    def lasting(self, now: int) -> int:
        """The time up to which changes last if the power fails after `now`; what was there at the beginning does."""
        if now not in self._lasting:
            self._lasting[now] = max((until for when, until in self.syncs if when <= now), default=0)
        return self._lasting[now]

    def at(self, time: int) -> int:
        """The change that holds at a time, -1 before the first one."""
        return bisect.bisect_right(self.changes, time) - 1


class Disk:
    """All that may be left of what was filmed."""

    def __init__(self, steps: list[Step], root: Path) -> None:
        self.root, self.steps = root.stat().st_ino, steps
        self.names: dict[int, list[dict[str, int]]] = {}
        self.contents: dict[int, list[bytes]] = {}
        self.folders: dict[int, History] = {}
        self.files: dict[int, History] = {}
        for time, step in enumerate(steps):
            for number, names in step.names.items():
                self.names.setdefault(number, []).append(names)
                self.folders.setdefault(number, History()).changes.append(time)
            for number, content in step.contents.items():
                versions = self.contents.setdefault(number, [])
                if not versions or versions[-1] != content:
                    versions.append(content)
                    self.files.setdefault(number, History()).changes.append(time)
            if step.event.kind == "fsync":
                for histories in (self.folders, self.files):
                    if step.event.inode in histories:
                        histories[step.event.inode].syncs.append((time, time))
        self.together = {number: {number} for number in (*self.folders, *self.files)}
        for time, step in enumerate(steps):
            if step.event.kind == "rename" and len(step.names) == 2:
                self._keep_together(time, *step.names)

    def _keep_together(self, time: int, one: int, other: int) -> None:
        """A rename from one folder to another is in both or in none, and lasts when either is synced."""
        both = self.folders[one], self.folders[other]
        if syncs := [when for history in both for when, until in history.syncs if until >= time]:
            for history in both:
                history.syncs.append((min(syncs), time))
        self.together[one] = self.together[other] = self.together[one] | self.together[other]

    def state(self, now: int, names: int, contents: int, lost: Collection[int] = ()) -> State:
        """What lasts of `now`, with later names up to a time and later contents up to a time; nothing late of `lost`.

        Args:
            lost: numbers of files and folders of which no more than what was synced is there.
        """
        found: State = {}
        waiting = [("", self.root)]
        while waiting:
            path, number = waiting.pop()
            history = self.folders[number]
            late = -1 if number in lost else min(names, now)
            place = history.at(max(late, history.lasting(now)))
            if path:
                found[path] = (number, -1)
            for name, inside in (self.names[number][place] if place >= 0 else {}).items():
                full = f"{path}/{name}" if path else name
                if inside in self.folders:
                    waiting.append((full, inside))
                    continue
                history = self.files[inside]
                late = -1 if inside in lost else min(contents, now)
                found[full] = (inside, history.at(max(late, history.lasting(now))))
        return found

    def states(self, promised: Callable[[int], object]) -> Iterator[tuple[int, State]]:
        """All states, each with the operation after which the power fails to lead there.

        One that many operations lead to comes once for each thing that is `promised` after them.
        """
        seen = set()
        for now in range(len(self.steps)):
            promise = promised(now)
            unsynced = [
                number
                for histories in (self.folders, self.files)
                for number, history in histories.items()
                if any(history.lasting(now) < change <= now for change in history.changes)
            ]
            times = {change for number in unsynced for change in self._history(number).changes if change <= now}
            cuts = sorted({0, now, *(change - 1 for change in times if change), *times})
            late = [(*times, ()) for cut in cuts for times in ((cut, cut), (now, cut), (cut, now))]
            for names, contents, lost in [*late, *((now, now, self.together[number]) for number in unsynced)]:
                state = self.state(now, names, contents, lost)
                key = promise, frozenset(state.items())
                if key not in seen:
                    seen.add(key)
                    yield now, state

    def _history(self, number: int) -> History:
        return self.folders.get(number) or self.files[number]

    def build(self, state: State, folder: Path, made: tuple[str, ...]) -> None:
        """Make in `folder` what a state has of some folders, and of temporary ones beside them."""
        links: dict[int, Path] = {}
        for name in sorted(state):
            if not belongs(name, made):
                continue
            (number, version), path = state[name], folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if version == -1 and number in self.folders:
                path.mkdir(exist_ok=True)
            elif number in links:
                os.link(links[number], path)
            else:
                path.write_bytes(self.contents[number][version] if version >= 0 else b"")
                links[number] = path

    def said(self, now: int, name: str) -> str:
        """What stood in a file at a time, whether it lasts or not."""
        state = self.state(now, now, now)
        number, version = state.get(name, (0, -1))
        return self.contents[number][version].decode() if version >= 0 else ""


def belongs(name: str, made: tuple[str, ...]) -> bool:
    """Whether a path lies in one of some folders, or is a temporary one beside them."""
    parents = {str(Path(one).parent) for one in made}
    beside = ".nanogpt-tmp-" in name and str(Path(name.partition("/.nanogpt-tmp-")[0])) in parents
    return beside or any(name == one or name.startswith(f"{one}/") for one in made)


def important(state: State, made: tuple[str, ...]) -> frozenset[tuple[str, tuple[int, int]]]:
    """A state without what nothing rests on: states that are alike in it need not all be gone on from."""
    kept = {name: held for name, held in state.items() if belongs(name, made) and ".nanogpt-tmp-" not in name}
    return frozenset((name, held) for name, held in kept.items() if not name.endswith(UNIMPORTANT))
