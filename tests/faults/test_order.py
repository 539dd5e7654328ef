"""What no kill can show, only a power cut: a file is durable before it gets its name, and then its name is."""

from collections.abc import Sequence
from pathlib import Path

from tests.faults.lives import Lab
from tests.faults.taps import Event

CHANGES = ("write", "truncate")
NAMES = ("rename", "link", "mkdir")
MARKERS = ("meta.toml", "config.toml", "ckpt.pt", "best.pt")  # whoever sees one counts on what came before it


def parent(name: str) -> str:
    return str(Path(name).parent)


def lasting(event: Event) -> bool:
    """Whether an event makes a name that counts: no temporary file, no note of unfinished work, no cache."""
    return "~" not in event.name and ".prepare" not in event.name and not event.name.startswith(".cache")


def faults_of_order(events: Sequence[Event]) -> list[str]:
    """Names that a power cut at the wrong instant could leave with half a file, or take away again."""
    found = []
    for place, event in enumerate(events):
        before, after = events[:place], events[place + 1 :]
        if event.kind in ("rename", "link") and lasting(event):
            of_file = [e.kind for e in before if e.inode == event.inode and e.kind in (*CHANGES, "fsync")]
            if of_file and of_file[-1] != "fsync":
                found.append(f"{event.name} gets its name before its content is durable")
        if event.kind in NAMES and lasting(event):
            folder = parent(event.name)
            later = [
                e for e in after if e[:2] == ("fsync", folder) or (e.kind == "rename" and e.name.endswith(MARKERS))
            ]
            if not later or later[0].kind != "fsync":
                found.append(f"{event.kind} of {event.name} is not made durable by an fsync of {folder}")
        if event[:2] == ("rename", "runs/whole/ckpt.pt"):
            lines = [e.kind for e in before if e.name.endswith("metrics.jsonl") and e.kind in ("write", "fsync")]
            if lines and lines[-1] != "fsync":
                found.append("a checkpoint gets its name before its metrics are durable")
    return found


def test_a_run_is_durable_in_order(lab: Lab) -> None:
    assert sum(event[:2] == ("rename", "runs/whole/ckpt.pt") for event in lab.train_events) > 3
    assert faults_of_order(lab.train_events) == []
    logs = [
        event.kind for event in lab.train_events if event.name == "runs/whole/logs" and event.kind in ("fsync", "mkdir")
    ]
    first_save = lab.train_events.index(next(e for e in lab.train_events if e[:2] == ("rename", "runs/whole/ckpt.pt")))
    assert ("fsync", "runs/whole/logs") in [event[:2] for event in lab.train_events[:first_save]], logs


def test_a_resumed_run_is_durable_in_order(lab: Lab) -> None:
    names = [event.name for event in lab.resume_events if event.kind == "rename"]
    assert {"runs/resumed/config.toml", "runs/resumed/logs/metrics.jsonl", "runs/resumed/best.pt"} <= set(names)
    assert faults_of_order(lab.resume_events) == []


def test_a_data_set_is_durable_in_order(lab: Lab) -> None:
    names = [event.name for event in lab.prepare_events if event.kind == "rename" and lasting(event)]
    assert names[-1] == "data/my/meta.toml"
    assert {"data/my/train.bin", "data/my/val.bin"} <= set(names)
    assert faults_of_order(lab.prepare_events) == []


def test_the_measure_itself() -> None:
    """Each missing call is seen."""
    good = [
        Event("write", "runs/a~", 1),
        Event("fsync", "runs/a~", 1),
        Event("rename", "runs/a", 1),
        Event("fsync", "runs", 2),
    ]
    assert faults_of_order(good) == []
    assert len(faults_of_order([good[0], *good[2:]])) == 1
    assert len(faults_of_order([good[1], good[0], *good[2:]])) == 1
    assert len(faults_of_order(good[:3])) == 1
