"""``--chaos-store-option``: how ranks reach an object store that no environment names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from object_servers import BUCKET, S3Server, moto

RunPytest = Callable[..., pytest.RunResult]

# What moto holds is the process's, and other tests have their own stores in it.
URL = f"s3://{BUCKET}/options"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture
def options(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in server.environment:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OURS", "correct-horse")
    words = [
        f"endpoint_url={server.endpoint}",
        "key=testing",
        "secret=env:OURS",
        "client_kwargs.region_name=us-east-1",
        "config_kwargs.s3.addressing_style=path",
    ]
    return [
        f"--chaos-store={URL}",
        *(f"--chaos-store-option={word}" for word in words),
    ]


def said_by(result: pytest.RunResult) -> str:
    return result.stdout.str() + result.stderr.str()


def test_ranks_reach_the_store_and_the_replay_line_has_the_options_without_the_secret(
    run_pytest: RunPytest, server: S3Server, options: list[str]
) -> None:
    fault = "kill rank=0 at=step:4/checkpoint/manifest/link"
    result = run_pytest("tiny", *options, f"--chaos-fault={fault}", "--chaos-max-restarts=0")
    result.assert_outcomes(failed=1)
    (replay,) = [line for line in result.stdout.lines if line.strip().startswith("replay: ")]
    for option in options:
        name, _, value = option.partition("=")
        assert f"{name} {value}" in replay
    assert "correct-horse" not in said_by(result)
    assert any("/options/" in place and "begun.json" in place for _, place in server.requests)
    assert (
        server.client().list_objects_v2(Bucket=BUCKET, Prefix="options/").get("Contents", []) == []
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [f"--chaos-store={URL}", "--chaos-store-option=secret=horse"],
            "--chaos-store-option: secret is a secret",
        ),
        (["--chaos-store="], "--chaos-store names no place (is a variable not set?)"),
        (["--chaos-store-option=key=a"], "is for a URL: give one with --chaos-store"),
        (["--chaos-certify=s3://b/run", "--chaos-store-option=secret=horse"], "secret is a secret"),
        (["--chaos-store=ftp://me:horse@host/x"], "--chaos-store: the URL has a secret in it"),
        (["--chaos-certify=ftp://me:horse@host/x"], "--chaos-certify: the URL has a secret in it"),
        (
            [f"--chaos-store={URL}", "--chaos-store-option=secret=env:NOT_SET"],
            "'NOT_SET', which is not set",
        ),
    ],
)
def test_options_that_cannot_be_used_are_a_usage_error(
    run_pytest: RunPytest, words: list[str], said: str
) -> None:
    result = run_pytest("tiny", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in said_by(result)
    assert "horse" not in said_by(result)
