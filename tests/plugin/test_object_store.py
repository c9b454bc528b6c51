"""The pre-flight on an object store: a URL for ``--chaos-store``, with moto behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_servers import BUCKET, S3Server, moto

RunPytest = Callable[..., pytest.RunResult]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.client().put_object(Bucket=BUCKET, Key="run/precious", Body=b"x")
    return f"s3://{BUCKET}/run"


def keys(server: S3Server) -> list[str]:
    # What moto holds is the process's, so other tests have their own beside it.
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix="run/").get("Contents", [])
    return [each["Key"] for each in found]


def test_kills_and_damage_recover_and_nothing_is_left(
    run_pytest: RunPytest, server: S3Server, url: str, temporary: Path
) -> None:
    result = run_pytest(
        *("tiny", f"--chaos-store={url}"),
        "--chaos-fault=kill rank=0 at=step:4/checkpoint/manifest/link",
        "--chaos-fault=flip rank=1 at=step:5/optimizer; kill rank=1 at=step:5/optimizer when=after",
        "--chaos-fault=remove rank=1 at=step:5/optimizer part=manifest; "
        "kill rank=1 at=step:5/optimizer when=after",
    )
    result.assert_outcomes(passed=3)
    assert keys(server) == ["run/precious"]
    assert list(temporary.iterdir()) == []
    assert any("/flip" not in place and "manifest.json" in place for _, place in server.requests)


def test_a_control_is_noticed_and_what_has_no_such_event_is_said_not_to_be_run(
    run_pytest: RunPytest, server: S3Server, url: str
) -> None:
    result = run_pytest("tiny", f"--chaos-store={url}", "-k", "control[model] or fsync")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(["not run, an object store has no *: *shard-fsync*manifest-fsync*"])
    assert keys(server) == ["run/precious"]


def test_a_fault_at_an_event_that_does_not_exist_there_is_refused(
    run_pytest: RunPytest, url: str
) -> None:
    result = run_pytest(
        "tiny", f"--chaos-store={url}", "--chaos-fault=kill rank=0 at=checkpoint/manifest/fsync"
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stdout.str() + result.stderr.str()
    assert "an object store has no checkpoint/manifest/fsync" in said


def test_a_bucket_that_does_not_exist_is_refused(run_pytest: RunPytest, url: str) -> None:
    result = run_pytest("tiny", "--chaos-store=s3://no-such-bucket/run")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "NoSuchBucket" in result.stdout.str() + result.stderr.str()
