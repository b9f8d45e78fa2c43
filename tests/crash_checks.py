"""What must hold on disk of any finished run, whoever died in it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.checkpoint import newest_checkpoint, parameters_sha256, read_checkpoint

Event = dict[str, Any]


def check_run(folder: Path, fired: list[str]) -> list[Event]:
    """All of it; `fired` are the points that were planned, in order. The tape's events."""
    events = list(read_tape(folder / "run" / "tape.jsonl"))
    assert points(folder) == fired
    check_versions_grow(events)
    merges = final_lineage(events)
    check_nothing_twice(events, merges)
    check_ledger(folder)
    end = events[-1]
    assert (end["event"], end["status"]) == ("run_end", "finished")
    newest = newest_checkpoint(folder / "run" / "syncer", verify=True)
    found = read_checkpoint(newest)
    assert parameters_sha256(found.parameters) == end["parameters_sha256"]
    assert found.state["core"]["merges"] == len(merges)
    return events


def points(folder: Path) -> list[str]:
    """Planned faults that fired, in order."""
    file = folder / "fired.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["point"] for line in lines]


def check_versions_grow(events: list[Event]) -> None:
    """Within an epoch a fragment's versions only grow; epochs grow too."""
    newest: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    epochs = [event["epoch"] for event in events if event["event"] == "syncer_start"]
    assert epochs == sorted(set(epochs))
    for event in events:
        if event["event"] == "merge":
            version = (event["version"][0], event["version"][1])
            assert version > newest[event["fragment"]]
            newest[event["fragment"]] = version


def final_lineage(events: list[Event]) -> set[tuple[int, int]]:
    """(epoch, round) of the merges that no restart has undone."""
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events:
        if event["event"] == "syncer_start":
            counts = [version[1] for version in event["versions"]]
            kept = {
                key: (fragment, count)
                for key, (fragment, count) in kept.items()
                if fragment < len(counts) and count <= counts[fragment]
            }
        elif event["event"] == "merge":
            key = (event["epoch"], event["round"])
            kept[key] = (event["fragment"], event["version"][1])
    return set(kept)


def check_nothing_twice(events: list[Event], merges: set[tuple[int, int]]) -> None:
    """Token intervals of merged contributions of an incarnation and fragment do not overlap."""
    epoch, lives = 0, {}
    intervals: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["event"] == "syncer_start":
            epoch = event["epoch"]
        elif event["event"] == "join":
            lives[epoch, event["learner"], event["generation"]] = event["incarnation"]
        elif event["event"] == "contribution" and event["verdict"] == "accepted":
            key = (event["epoch"], event["round"])
            if key in merges:
                life = lives[event["epoch"], event["learner"], event["generation"]]
                upto = event["odometer"]
                intervals[life, event["fragment"]].append((upto - event["tokens"], upto))
    assert intervals
    for (life, fragment), found in intervals.items():
        found.sort()
        for (_, end), (begin, _) in itertools.pairwise(found):
            assert end <= begin, f"tokens of {life} merged twice into fragment {fragment}: {found}"


def check_ledger(folder: Path) -> None:
    """processed = merged + lost + pending, and nothing is pending once the run has ended."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and sorted(summary["per_learner"]) == ["0", "1"]
    for learner in summary["per_learner"].values():
        for row in learner["ledger"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"] > 0
            assert row["pending"] == 0


def processed(folder: Path, learner: str) -> set[int]:
    """Tokens of the learner, per fragment."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {row["processed"] for row in summary["per_learner"][learner]["ledger"]}
