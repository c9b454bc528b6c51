"""The questions of the suite about the store's own protocol, and those that are only told.

Torch-free; asked after those of `seatrial.chaos.certify.suite`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import statistics
import time
from contextlib import suppress
from secrets import token_bytes

from seatrial.recovery.errors import AlreadyPublishedError, CheckpointError, SaveError
from seatrial.recovery.storage import Attempt

from .certificate import Outcome
from .subject import GET_MAX, Answer, Guarantee, Subject, at_once

__all__ = ["GUARANTEES"]

RACERS = 4
SMALL = 20
FLOW_BYTES = 16 << 20
_FILE = "rank-00000.json"


def publishing_once(subject: Subject) -> Answer:
    """Attempts of one step race through the store's whole protocol."""
    subject.storage.prove()
    attempts = [_attempt(subject, 1) for _ in range(RACERS)]
    results = at_once(lambda n: attempts[n].publish(b'{"attempt": %d}' % n, {_FILE: 2}), RACERS)
    for attempt in attempts:
        attempt.close()
    won = [n for n, result in enumerate(results) if result is None]
    lost = [result for result in results if isinstance(result, AlreadyPublishedError)]
    content = subject.storage.read_manifest(1, 100)
    if len(won) != 1 or len(lost) != RACERS - 1 or content != b'{"attempt": %d}' % won[0]:
        return Outcome.BROKEN, f"attempts {won} of {RACERS} published one step: {results}"
    return Outcome.KEPT, f"one of {RACERS} attempts published, the others were told"


def fencing(subject: Subject) -> Answer:
    """An attempt whose files were collected comes back, and must not publish."""
    attempt = _attempt(subject, 2)
    subject.storage.delete(subject.storage.leftovers(), [])
    try:
        attempt.publish(b"{}", {_FILE: 2})
    except SaveError:
        published = 2 in subject.storage.published()
    else:
        published = True
    finally:
        attempt.close()
    if published:
        return Outcome.BROKEN, "an attempt published after its files had been collected"
    return Outcome.KEPT, "an attempt that was taken for dead could not publish any more"


def _attempt(subject: Subject, step: int) -> Attempt:
    attempt = subject.storage.begin(step)
    files = subject.storage.files(step, attempt.name)
    with files.create(_FILE, 2) as sink:
        sink.write_at(b"{}", 0)
        sink.finish()
        sink.fsync()
    files.fsync()
    return attempt


def survives_a_kill(subject: Subject) -> Answer:
    if subject.restart is None:
        return Outcome.NOT_TRIED, "nobody here may kill the server or cut the power"
    contents = {f"durable/{number}": token_bytes(10_000) for number in range(SMALL)}
    for name, content in contents.items():
        subject.names.put(name, content)
    subject.restart()
    lost = []
    for name, content in contents.items():
        try:
            intact = subject.names.get(name, GET_MAX) == content
        except (OSError, CheckpointError):
            intact = False
        lost += [] if intact else [name]
    if lost:
        return Outcome.BROKEN, f"{len(lost)} of {SMALL} acknowledged objects are gone: {lost[0]}"
    return Outcome.KEPT, f"{SMALL} of {SMALL} acknowledged objects after SIGKILL of the server"


def abandoned_uploads(subject: Subject) -> Answer:
    client = subject.client
    if client is None:
        return Outcome.NOT_OFFERED, "no multipart uploads; an unfinished file is a leftover"
    name = "abandoned"
    upload = str(client.call("create_multipart_upload", name)["UploadId"])
    client.call("upload_part", name, UploadId=upload, PartNumber=1, Body=b"part")
    if name in subject.second.sizes(name):
        return Outcome.BROKEN, "an upload that was not completed is visible"
    names = subject.names
    if (name, upload) not in names.uploads():  # type: ignore[attr-defined]
        names.abort(name, upload)  # type: ignore[attr-defined]
        return Outcome.BROKEN, "an upload that was not completed is invisible, but cannot be found"
    names.abort(name, upload)  # type: ignore[attr-defined]
    if (name, upload) in names.uploads():  # type: ignore[attr-defined]
        return Outcome.BROKEN, "an upload that was aborted is still there"
    return Outcome.KEPT, "invisible, listed as unfinished, and gone when aborted"


def digests(subject: Subject) -> Answer:
    if subject.client is None:
        return Outcome.NOT_OFFERED, "no digests on the way; the store's own are checked on reading"
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    try:
        subject.client.call_once("put_object", "digested", Body=b"content", ContentMD5=wrong)
    except OSError as error:
        return Outcome.KEPT, f"content with another Content-MD5 was refused ({error.strerror})"
    return Outcome.BROKEN, "content with another Content-MD5 was accepted; reading finds it"


def renaming(subject: Subject) -> Answer:
    if not subject.is_directory:
        return Outcome.NOT_OFFERED, "no renames; tombstones stand in for them"
    root = subject.names.root  # type: ignore[attr-defined]
    (root / "one").write_bytes(b"one")
    (root / "two").write_bytes(b"two")
    os.rename(root / "one", root / "two")
    if (root / "one").exists() or (root / "two").read_bytes() != b"one":
        return Outcome.BROKEN, "rename() did not replace the file"
    (root / "full").mkdir()
    (root / "full" / "x").write_bytes(b"x")
    (root / "other").mkdir()
    with suppress(OSError):
        os.rename(root / "other", root / "full")
        return Outcome.BROKEN, "rename() replaced a directory that is not empty"
    return Outcome.KEPT, "a file is replaced at once, a directory that is not empty never"


def speed(subject: Subject) -> Answer:
    waits = []
    for number in range(SMALL):
        began = time.perf_counter()
        subject.names.put(f"small/{number}", b"x" * 100)
        waits.append((time.perf_counter() - began) * 1e3)
    content = token_bytes(FLOW_BYTES)
    began = time.perf_counter()
    subject.names.put("flow", content)
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    read = subject.names.get("flow", GET_MAX)
    get_s = time.perf_counter() - began
    if read != content:
        return Outcome.BROKEN, f"{FLOW_BYTES} bytes were read back as something else"
    figures = {
        "small_put_median_ms": round(statistics.median(waits), 3),
        "small_put_max_ms": round(max(waits), 3),
        "put_mb_per_s": round(FLOW_BYTES / 1e6 / put_s, 1),
        "get_mb_per_s": round(FLOW_BYTES / 1e6 / get_s, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }
    said = (
        f"small put {figures['small_put_median_ms']:g} ms (at most "
        f"{figures['small_put_max_ms']:g}), one stream: put {figures['put_mb_per_s']:g} MB/s, get "
        f"{figures['get_mb_per_s']:g} MB/s"
    )
    return Outcome.KEPT, said, figures


GUARANTEES = [
    Guarantee("publish a step once", "of several attempts exactly one publishes", True,
              publishing_once),
    Guarantee("fencing", "an attempt that was taken for dead cannot publish", True, fencing),
    Guarantee("durable across a kill", "what was acknowledged survives SIGKILL of the server",
              False, survives_a_kill),
    Guarantee("abandoned uploads", "they are invisible, and can be found and aborted", False,
              abandoned_uploads),
    Guarantee("digest checks", "content that changed on its way is refused", False, digests),
    Guarantee("rename", "a rename is atomic", False, renaming),
    Guarantee("speed", "latency of small objects, throughput of a large one", False, speed),
]  # fmt: skip
