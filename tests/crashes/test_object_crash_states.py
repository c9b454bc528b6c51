"""Every state of an object store that a crash can leave: ours always recover, broken protocols are
always caught. Requests are recorded in memory, and once on a server that speaks S3."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from crash_protocols import without
from object_servers import BUCKET, moto

from seatrial.chaos.crashes.explore import Exploration, explore_objects
from seatrial.chaos.crashes.hearing import Messages
from seatrial.chaos.crashes.operations import Operation, Recording
from seatrial.chaos.crashes.own_store import SmallState, record_store, restore
from seatrial.chaos.crashes.requests import record_objects
from seatrial.chaos.crashes.table import table
from seatrial.recovery import CheckpointStore
from seatrial.recovery.directory import CheckpointDirectory
from seatrial.recovery.errors import SaveError
from seatrial.recovery.exchange import SoloExchange
from seatrial.recovery.files import file_problems
from seatrial.recovery.probe import listen
from seatrial.recovery.restoring import Restorer
from seatrial.recovery.retention import collect
from seatrial.recovery.storage import s3_upload
from seatrial.recovery.storage.generic import FsspecObjects
from seatrial.recovery.storage.objects import Objects, ObjectStorage


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def saved() -> Recording:
    return record_store(f"memory://{secrets.token_hex(8)}", ranks=4)


def assert_all_recover(found: Exploration) -> None:
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"1", "2"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_crash_state_of_this_projects_save_recovers(url: str, ranks: int) -> None:
    recording = record_store(url, ranks=ranks)
    assert_all_recover(explore_objects(recording, restore(ranks), old=1, new=2))


def test_with_symmetric_ranks_exchanged_eight_come_to_the_same(url: str, saved: Recording) -> None:
    plain = explore_objects(saved, restore(4), old=1, new=2)
    folded = explore_objects(saved, restore(4), old=1, new=2, symmetric=True)
    assert_all_recover(folded)
    assert folded.classes == ((1, 2, 3),)
    assert folded.runs < plain.runs
    eight = explore_objects(record_store(url, ranks=8), restore(8), old=1, new=2, symmetric=True)
    assert_all_recover(eight)
    assert eight.classes == ((1, 2, 3, 4, 5, 6, 7),)


def is_a_report(operation: Operation) -> bool:
    return operation.kind == "hear" and operation.rank == 0


def answers_to_shards(recording: Recording) -> Callable[[Operation], bool]:
    requests = {
        o.request for ops in recording.ranks for o in ops if o.path.endswith(".safetensors")
    }
    return lambda operation: operation.kind == "answer" and operation.request in requests


def answer_to_the_manifest(recording: Recording) -> Callable[[Operation], bool]:
    (request,) = [o.request for o in recording.ranks[0] if o.kind == "put new"]
    return lambda operation: operation.kind == "answer" and operation.request == request


@pytest.mark.parametrize(
    ("left_out", "culprit"),
    [
        (lambda _: is_a_report, ".safetensors"),
        (answers_to_shards, ".safetensors"),
        (answer_to_the_manifest, "manifest.json"),
    ],
    ids=["no barrier", "shards not acknowledged", "manifest not acknowledged"],
)
def test_a_save_that_does_not_wait_is_caught(
    saved: Recording, left_out: Callable[[Recording], Callable[[Operation], bool]], culprit: str
) -> None:
    shortened = without(saved, left_out(saved))
    found = explore_objects(shortened, restore(4), old=1, new=2)
    assert found.counterexample is not None
    assert "the save had returned, and recovery returns 1" in found.counterexample.reason
    assert culprit in table(found.counterexample).partition("what was left")[2]


# Two jobs that save the same step


def restore_value(objects: Objects) -> float | None:
    state = SmallState({"w": torch.zeros(8)})
    directory = CheckpointDirectory(ObjectStorage(objects))
    found = Restorer(directory, SoloExchange()).restore(state, step=None)
    return None if found is None else float(state.live["w"][0])


def record_race(url: str) -> tuple[Recording, list[float]]:
    """Both write before either publishes; the recording, and whose save returned."""
    CheckpointStore(url, exchange=SoloExchange()).save(
        SmallState({"w": torch.full((8,), 1.0)}), step=1
    )
    both = threading.Barrier(2)
    won = []

    def wait(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            both.wait(30)

    def save(value: float) -> Callable[[Messages], object]:
        def run(_: Messages) -> None:
            store = CheckpointStore(url, exchange=SoloExchange())
            try:
                store.save(SmallState({"w": torch.full((8,), value)}), step=2)
                won.append(value)
            except SaveError:
                pass

        return run

    stop = listen(wait)
    try:
        return record_objects(url, [save(2.0), save(3.0)]), won
    finally:
        stop()


def explore_race(recording: Recording, value: float) -> Exploration:
    """Whether the job that saved ``value`` finds it again once its save has returned."""
    rank = int(value) - 2

    def others_return(operation: Operation) -> bool:
        return operation.kind == "acknowledge" and operation.rank != rank

    def whose(objects: Objects) -> str:
        return "its own" if restore_value(objects) == value else "another's"

    alone = without(recording, others_return)
    return explore_objects(alone, whose, old="another's", new="its own")


def test_of_two_jobs_that_publish_one_step_only_the_winner_s_is_ever_there(url: str) -> None:
    recording, won = record_race(url)
    assert len(won) == 1
    found = explore_objects(recording, restore_value, old=1.0, new=won[0])
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"1.0", str(won[0])}
    assert explore_race(recording, won[0]).counterexample is None


def test_a_store_that_ignores_the_condition_is_caught(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(objects: FsspecObjects, name: str, data: bytes) -> bool:
        objects._pipe(name, data, "storage/publish")
        return True

    monkeypatch.setattr(FsspecObjects, "create", create)
    recording, won = record_race(url)
    assert sorted(won) == [2.0, 3.0]
    for value in won:
        found = explore_race(recording, value)
        assert found.counterexample is not None
        expected = "the save had returned, and recovery returns another's instead of its own"
        assert found.counterexample.reason == expected
        shown = table(found.counterexample, context=99)
        assert shown.count("step-00000002/manifest.json, which must be new") == 2


# Deleting


def whole_steps(objects: Objects) -> tuple[int, ...]:
    """The published steps; raises if a file of one is not there."""
    directory = CheckpointDirectory(ObjectStorage(objects))
    steps = directory.storage.published()
    for step in steps:
        manifest = directory.read_manifest(step).manifest
        problems = file_problems(directory.files(manifest), manifest)
        assert not problems, f"step {step} is published, and {problems[0]}"
    return tuple(steps)


@pytest.fixture
def pruned(url: str) -> Recording:
    store = CheckpointStore(url, exchange=SoloExchange(), keep_last=2)
    for step in (1, 2):
        store.save(SmallState({"w": torch.full((8,), float(step))}), step=step)
    store.restore(SmallState({"w": torch.zeros(8)}))
    last = CheckpointStore(url, exchange=SoloExchange(), keep_last=1)
    return record_objects(url, [lambda _: last.prune()])


def test_a_step_is_whole_or_gone_at_every_moment_of_its_deletion(pruned: Recording) -> None:
    found = explore_objects(pruned, whole_steps, old=(1, 2), new=(2,))
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"(1, 2)", "(2,)"}


def test_files_that_are_deleted_before_the_tombstone_are_caught(pruned: Recording) -> None:
    (operations,) = pruned.ranks
    (tombstone,) = [o.request for o in operations if o.kind == "put" and "manifest" in o.path]
    moved = [o for o in operations if o.request == tombstone]
    rest = [o for o in operations if o.request != tombstone]
    late = [*rest[:-1], *moved, rest[-1]]
    broken = [replace(o, number=number) for number, o in enumerate(late)]
    found = explore_objects(
        Recording([broken], pruned.before, pruned.nodes), whole_steps, old=(1, 2), new=(2,)
    )
    assert found.counterexample is not None
    assert "step 1 is published, and " in found.counterexample.reason


def test_deleting_the_previous_checkpoint_before_the_new_one_is_published_is_caught(
    url: str,
) -> None:
    store = CheckpointStore(url, exchange=SoloExchange())
    store.save(SmallState({"w": torch.full((8,), 1.0)}), step=1)

    def save(_: Messages) -> None:
        CheckpointDirectory.at(url).storage.delete([], [1])
        store.save(SmallState({"w": torch.full((8,), 2.0)}), step=2)

    found = explore_objects(record_objects(url, [save]), restore_value, old=1.0, new=2.0)
    assert found.counterexample is not None
    assert found.counterexample.reason.startswith("recovery returns None, which is neither")
    # The tombstone alone is enough.
    assert [str(o).partition(" to ")[0] for o in found.counterexample.done] == ["put 26 bytes"]


# Requests that happen after their client has died


def restore_and_collect(objects: Objects) -> int | None:
    """As a job that is started anew; what is published then is whole, whatever comes late."""
    found = restore(2)(objects)
    collect(CheckpointDirectory(ObjectStorage(objects)), keep_last=4)
    steps = whole_steps(objects)
    assert found in steps, f"{found} was restored, and {steps} are left"
    return found


def test_no_request_that_lands_late_publishes_what_was_collected(url: str) -> None:
    recording = record_store(url, ranks=2)
    found = explore_objects(recording, restore_and_collect, old=1, new=2, late=True)
    assert_all_recover(found)


def test_leftovers_that_are_deleted_without_a_tombstone_are_caught(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(storage: ObjectStorage, leftovers: list[str], steps: list[int]) -> list[str]:
        names = storage.objects.sizes()
        storage.objects.delete([n for each in leftovers for n in names if n.startswith(each)])
        return leftovers

    monkeypatch.setattr(ObjectStorage, "delete", delete)
    recording = record_store(url, ranks=2)
    found = explore_objects(recording, restore_and_collect, old=1, new=2, late=True)
    assert found.counterexample is not None
    assert "step 2 is published, and " in found.counterexample.reason
    # All that has landed before recovery begins is right.
    assert_all_recover(explore_objects(recording, restore_and_collect, old=1, new=2))


# S3 itself


def test_requests_of_s3_are_recorded_with_uploads_in_parts_and_deletions_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_upload, "PART_BYTES", 5 << 20)
    with moto() as server:
        place = f"s3://{BUCKET}/{secrets.token_hex(8)}"

        def save(step: int) -> Callable[[Messages], object]:
            def run(_: Messages) -> None:
                store = CheckpointStore(
                    place, exchange=SoloExchange(), keep_last=1, storage_options=server.options
                )
                store.save(SmallState({"w": torch.full((3 << 19,), float(step))}), step=step)
                store.restore(SmallState({"w": torch.zeros(3 << 19)}))

            return run

        record_objects(place, [save(1)], options=server.options)
        recording = record_objects(place, [save(2)], options=server.options)
    (operations,) = recording.ranks
    assert sum(o.path == o.upload != "" for o in operations) == 1
    deleted = [o.request for o in operations if o.kind == "delete" and "step-" in o.path]
    assert len(deleted) == 4
    assert len(set(deleted)) == 1

    def recover(objects: Objects) -> float | None:
        state = SmallState({"w": torch.zeros(3 << 19)})
        directory = CheckpointDirectory(ObjectStorage(objects))
        found = Restorer(directory, SoloExchange()).restore(state, step=None)
        return None if found is None else float(state.live["w"][-1])

    found = explore_objects(recording, recover, old=1.0, new=2.0)
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"1.0", "2.0"}
