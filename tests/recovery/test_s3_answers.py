"""What a server may answer, or not answer, and what the store makes of it, over real connections.

The server is moto, with a fault in front of it. What is transient is tried again for a bounded
time; what is permanent is raised at once; a reply that was lost is found by reading back."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from seatrial.recovery import CheckpointStore
from seatrial.recovery.errors import (
    AlreadyPublishedError,
    CheckpointError,
    SaveError,
    StorageUnsupportedError,
)
from seatrial.recovery.storage import s3_client, s3_upload
from seatrial.recovery.storage.retry import RetryPolicy, StillFailingError
from seatrial.recovery.storage.s3 import S3Objects

from .places import Place

Fault = Callable[[str, str], str | None]


@pytest.fixture
def objects(moto_place: Place) -> S3Objects:
    made = S3Objects(moto_place.location, moto_place.options)
    made.client.policy = RetryPolicy(total_s=2, wait_first_s=0.01, wait_max_s=0.1)
    return made


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = RetryPolicy(total_s=2, wait_first_s=0.01, wait_max_s=0.1)
    monkeypatch.setattr(s3_client, "REMOTE", quick)


def times(number: int, fault: str, method: str, what: str) -> Fault:
    """The first ``number`` requests of ``method`` whose place contains ``what`` fail."""
    left = iter(range(number))

    def answer(asked: str, place: str) -> str | None:
        hit = asked == method and what in place
        return fault if hit and next(left, None) is not None else None

    return answer


def always(fault: str, method: str, what: str) -> Fault:
    return lambda asked, place: fault if asked == method and what in place else None


def requests_of(place: Place, method: str, what: str) -> int:
    assert place.server is not None
    return sum(asked == method and what in where for asked, where in place.server.requests)


@pytest.fixture
def server(moto_place: Place) -> Iterator[Any]:
    assert moto_place.server is not None
    moto_place.server.requests.clear()
    return moto_place.server


@pytest.mark.parametrize("fault", ["503 SlowDown", "500 InternalError", "429 Throttling", "cut"])
def test_a_transient_answer_is_tried_again_until_it_succeeds(
    moto_place: Place, server: Any, make_state: Any, same_tensors: Any, fault: str
) -> None:
    server.fault = times(2, fault, "PUT", "rank-00000.safetensors")
    moto_place.store().save(make_state(1), step=1)
    assert requests_of(moto_place, "PUT", "rank-00000.safetensors") == 3
    server.fault = times(2, fault, "GET", "rank-00000.safetensors")
    state = make_state(0)
    moto_place.store().restore(state)
    assert same_tensors(state, make_state(1))


@pytest.mark.parametrize(
    ("fault", "number"),
    [("403 AccessDenied", 13), ("404 NoSuchBucket", 19), ("400 InvalidArgument", 22)],
)
def test_a_permanent_answer_is_raised_at_once(
    moto_place: Place, server: Any, make_state: Any, fault: str, number: int
) -> None:
    server.fault = always(fault, "PUT", "rank-00000.safetensors")
    with pytest.raises(SaveError, match=rf"\[Errno {number}\] put_object: .*{fault.split()[1]}"):
        moto_place.store().save(make_state(1), step=1)
    assert requests_of(moto_place, "PUT", "rank-00000.safetensors") == 1
    assert moto_place.inspect().latest_published is None


def test_what_stays_transient_gives_up_and_says_how_often_and_how_long_it_tried(
    objects: S3Objects, server: Any, moto_place: Place
) -> None:
    server.fault = always("503 SlowDown", "PUT", "name")
    with pytest.raises(StillFailingError, match=r"SlowDown") as caught:
        objects.put("name", b"1")
    found = re.search(r"tried ([0-9]+) times in ([0-9.]+) s", str(caught.value))
    assert found is not None
    assert int(found[1]) == requests_of(moto_place, "PUT", "name") >= 3
    assert float(found[2]) <= 2.5
    assert f"{moto_place.location}/name" in str(caught.value)


def test_an_outage_is_no_damage(moto_place: Place, server: Any, make_state: Any) -> None:
    store = moto_place.store()
    for step in (1, 2):
        store.save(make_state(step), step=step)
    server.fault = always("503 SlowDown", "GET", "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="SlowDown") as caught:
        moto_place.store().restore(make_state(0))
    assert type(caught.value) is CheckpointError
    server.fault = lambda method, place: None
    assert moto_place.inspect().quarantined == ()
    assert moto_place.store().restore(make_state(0)).step == 2


@pytest.mark.parametrize("fault", ["403 AccessDenied", "404 NoSuchBucket"])
def test_a_refusal_while_reading_is_no_damage(
    moto_place: Place, server: Any, make_state: Any, fault: str
) -> None:
    moto_place.store().save(make_state(1), step=1)
    server.fault = always(fault, "GET", "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=fault.split()[1]) as caught:
        moto_place.store().restore(make_state(0))
    assert type(caught.value) is CheckpointError


# Publishing


@pytest.mark.parametrize(
    "fault", ["lost", "applied 500 InternalError", "503 SlowDown", "500 InternalError", "cut"]
)
def test_a_manifest_whose_acknowledgement_was_lost_is_published_once(
    moto_place: Place, server: Any, make_state: Any, fault: str
) -> None:
    server.fault = times(1, fault, "PUT", "manifest.json")
    manifest = moto_place.store().save(make_state(1), step=1)
    assert moto_place.inspect().latest_valid == 1
    assert moto_place.read("step-00000001/manifest.json") == manifest.to_bytes()


def test_a_lost_acknowledgement_is_found_by_reading_back_and_not_by_writing_again(
    moto_place: Place, server: Any, make_state: Any
) -> None:
    server.fault = times(1, "applied 503 SlowDown", "PUT", "manifest.json")
    moto_place.store().save(make_state(1), step=1)
    assert requests_of(moto_place, "PUT", "manifest.json") == 1


@pytest.mark.parametrize(
    "refusal", ["412 PreconditionFailed", "409 ConditionalRequestConflict", "400 InvalidArgument"]
)
def test_whoever_is_refused_looks_at_what_is_there(
    objects: S3Objects, server: Any, refusal: str
) -> None:
    objects.put("theirs", b"theirs")
    objects.put("ours", b"ours")
    server.fault = always(refusal, "PUT", "s")
    assert objects.create("theirs", b"ours") is False
    assert objects.create("ours", b"ours") is True


def test_a_conflict_with_nothing_there_is_tried_again(objects: S3Objects, server: Any) -> None:
    server.fault = times(2, "409 ConditionalRequestConflict", "PUT", "name")
    assert objects.create("name", b"1") is True


def test_a_manifest_that_is_not_acknowledged_for_long_is_told_as_such(
    moto_place: Place, server: Any, make_state: Any
) -> None:
    def fault(method: str, place: str) -> str | None:
        if "manifest.json" not in place:
            return None
        return {"PUT": "lost", "GET": "503 SlowDown" if not over else None}.get(method)

    over: list[bool] = []
    server.fault = fault
    with pytest.raises(SaveError, match=r"tried [0-9]+ times in"):
        moto_place.store().save(make_state(1), step=1)
    over.append(True)
    server.fault = lambda method, place: None
    assert moto_place.inspect().latest_valid == 1
    with pytest.raises(AlreadyPublishedError):
        moto_place.store().save(make_state(2), step=1)


@pytest.mark.parametrize("answer", ["501 NotImplemented", "400 InvalidArgument"])
def test_a_server_that_refuses_the_condition_is_refused(
    moto_place: Place, server: Any, make_state: Any, answer: str
) -> None:
    server.fault = always(answer, "PUT", ".probe.")
    with pytest.raises(SaveError, match="cannot publish a checkpoint exactly once"):
        moto_place.store().save(make_state(1), step=1)
    assert moto_place.names() == []


def test_a_server_that_ignores_the_condition_is_refused(
    objects: S3Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = objects.client.call

    def without(operation: str, name: str, **arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        return real(operation, name, **arguments)

    monkeypatch.setattr(objects.client, "call", without)
    with pytest.raises(StorageUnsupportedError, match="ignores If-None-Match"):
        objects.prove()
    assert objects.sizes() == {}


# Large objects


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "PART_BYTES", 5 << 20)


def large_state(make_state: Any, seed: int) -> Any:
    state = make_state(seed)
    state.live["large"] = torch.arange(seed, seed + (4 << 20), dtype=torch.float32)
    return state


@pytest.mark.usefixtures("small_parts")
def test_a_large_shard_goes_in_parts_and_comes_back_bitwise(
    s3_place: Place, make_state: Any, same_tensors: Any
) -> None:
    s3_place.store().save(large_state(make_state, 1), step=1)
    state = large_state(make_state, 2)
    s3_place.store().restore(state)
    assert same_tensors(state, large_state(make_state, 1))
    assert s3_place.uploads() == []
    if s3_place.server is not None and s3_place.server.requests:
        assert requests_of(s3_place, "PUT", "partNumber=4") == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["503 SlowDown", "cut"])
def test_a_part_that_fails_for_a_while_is_sent_again(
    moto_place: Place, server: Any, make_state: Any, same_tensors: Any, fault: str
) -> None:
    server.fault = times(3, fault, "PUT", "partNumber=2")
    moto_place.store().save(large_state(make_state, 1), step=1)
    state = large_state(make_state, 2)
    moto_place.store().restore(state)
    assert same_tensors(state, large_state(make_state, 1))


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_is_refused_fails_the_save_and_aborts_the_upload(
    moto_place: Place, server: Any, make_state: Any
) -> None:
    server.fault = always("403 AccessDenied", "PUT", "partNumber=3")
    with pytest.raises(SaveError, match="AccessDenied"):
        moto_place.store().save(large_state(make_state, 1), step=1)
    assert moto_place.uploads() == []
    assert moto_place.inspect().latest_published is None


@pytest.mark.usefixtures("small_parts")
def test_a_completion_whose_reply_was_lost_is_recognised(
    moto_place: Place, server: Any, make_state: Any, same_tensors: Any
) -> None:
    server.fault = times(1, "lost", "POST", "uploadId=")
    moto_place.store().save(large_state(make_state, 1), step=1)
    state = large_state(make_state, 2)
    moto_place.store().restore(state)
    assert same_tensors(state, large_state(make_state, 1))


def test_only_uploads_below_the_prefix_are_collected(s3_place: Place, make_state: Any) -> None:
    assert s3_place.server is not None
    client = s3_place.server.client()
    prefix = s3_place.location.removeprefix("s3://seatrial/")
    elsewhere = f"{secrets.token_hex(8)}/run/step-00000001/attempt-dead/rank-00000.safetensors"
    beside = f"{prefix}-2/step-00000001/attempt-dead/rank-00000.safetensors"
    ours = f"{prefix}/step-00000001/attempt-dead/rank-00000.safetensors"
    mine = f"{prefix}/notes/mine"
    for key in (elsewhere, beside, ours, mine):
        client.create_multipart_upload(Bucket="seatrial", Key=key)
    s3_place.store().save(make_state(1), step=2)
    left = {each["Key"] for each in client.list_multipart_uploads(Bucket="seatrial")["Uploads"]}
    assert {elsewhere, beside, mine} <= left
    assert ours not in left


def test_memory_does_not_grow_with_the_shard(
    moto_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_upload, "PART_BYTES", 5 << 20)
    held: list[int] = []
    sent = S3Objects(moto_place.location, moto_place.options)
    sink = sent.upload("step-00000001/attempt-a/file", 60 << 20)
    piece = bytes(1 << 20)
    for number in range(60):
        sink.write_at(piece, number << 20)
        under_way = sum(not part.done() for part in sink._parts)
        held.append(under_way)
    sink.finish()
    assert max(held) <= s3_upload.PARTS_UNDER_WAY
    assert sent.sizes("step-")["step-00000001/attempt-a/file"] == 60 << 20


def test_without_s3fs_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'seatrial[s3]'")):
        CheckpointStore("s3://bucket/prefix")


def test_secrets_are_in_no_message(moto_place: Place, server: Any, make_state: Any) -> None:
    server.fault = always("403 AccessDenied", "PUT", "rank-00000.safetensors")
    options = {**moto_place.options, "secret": "correct-horse"}
    with pytest.raises(SaveError) as caught:
        replace(moto_place, options=options).store().save(make_state(1), step=1)
    assert "correct-horse" not in str(caught.value)


def test_a_save_that_deletes_nothing_takes_twelve_requests(
    moto_place: Place, make_state: Any
) -> None:
    """Whoever adds one to every save of every run should know."""
    store = moto_place.store(keep_last=2)
    store.save(make_state(1), step=1)
    assert store.restore(make_state(0)).step == 1  # type: ignore[union-attr]
    store.save(make_state(2), step=2)
    assert moto_place.server is not None
    moto_place.server.requests.clear()
    store.save(make_state(3), step=3)
    asked = list(moto_place.server.requests)
    assert len(asked) == 12, asked
    assert [info.step for info in store.list()] == [1, 2, 3]  # 1 is known to be good
