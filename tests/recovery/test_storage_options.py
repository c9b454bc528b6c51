"""Options of storage in words: what they mean; no secret is given or shown in the clear."""

from __future__ import annotations

from typing import Any

import fsspec.config
import pytest

from seatrial.recovery import __main__ as command
from seatrial.recovery.errors import CheckpointError
from seatrial.recovery.storage import open_storage
from seatrial.recovery.storage.objects import ObjectStorage
from seatrial.recovery.storage.options import (
    offered,
    offered_options,
    parse_options,
    resolved_options,
)
from seatrial.recovery.storage.s3 import S3Objects
from seatrial.recovery.storage.secret import Secret

from .places import Place


def test_words_become_what_fsspec_takes() -> None:
    assert parse_options(
        [
            "endpoint_url=https://host:9000/?a=b",
            "client_kwargs.region_name=eu-west-1",
            "client_kwargs.verify=false",
            "config_kwargs.s3.addressing_style=path",
            "max_concurrency=8",
            'tags=["a", 1]',
            "secret=env:OURS",
            "account_name=00:11",
        ]
    ) == {
        "endpoint_url": "https://host:9000/?a=b",
        "client_kwargs": {"region_name": "eu-west-1", "verify": False},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "max_concurrency": 8,
        "tags": ["a", 1],
        "secret": "env:OURS",
        "account_name": "00:11",
    }


@pytest.mark.parametrize(
    "text",
    [
        "secret=correct-horse",
        "secret=12345",
        "client_kwargs.aws_secret_access_key=correct-horse",
        'client_kwargs={"aws_session_token": "correct-horse"}',
        'endpoints=[{"password": "correct-horse"}]',
        "account_key=correct-horse",
        "endpoint_url=https://me:correct-horse@host",
        "connection_string=Key=correct-horse",
        "client_kwargs.headers.Authorization=Bearer correct-horse",
        "s3_additional_kwargs.SSECustomerKey=correct-horse",
        "access_key=correct-horse",
        "passphrase=correct-horse",
        "pwd=correct-horse",
        "cookie=correct-horse",
        'client_kwargs={"auth": ["user", "correct-horse"]}',
        'client_kwargs={"password": 12345}',
        "endpoint_url=https://correct-horse@host",
        "endpoint_url=https://host/?sv=1&sig=correct-horse",
        "endpoint_url=https://host/?X-Amz-Signature=correct-horse",
        "proxies=http://correct-horse@proxy:3128",
        "secret=env:correct-horse",
    ],
)
def test_a_secret_in_the_clear_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"is a secret.*=env:NAME") as caught:
        parse_options([text])
    assert "correct-horse" not in str(caught.value)
    assert "12345" not in str(caught.value)


def test_names_and_urls_that_are_like_those_of_secrets_are_taken() -> None:
    texts = [
        "key=a",
        "aws_access_key_id=a",
        "config_kwargs.signature_version=s3v4",
        "author=me",
        "use_oauth=false",
        'client_kwargs={"auth": null}',
        "endpoint_url=https://host:9000/a@b",
        "other=sftp://user@host/a",
    ]
    assert len(parse_options(texts)) == len(texts)


@pytest.mark.parametrize(
    "text", ["secret:correct-horse", "correct-horse", "https://me:correct-horse@host/?a=b"]
)
def test_what_is_no_option_is_not_repeated_for_it_may_be_a_secret(text: str) -> None:
    with pytest.raises(CheckpointError, match="option 2 of 2 is not KEY=VALUE") as caught:
        parse_options(["key=a", text])
    assert "horse" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["endpoint_url"], "is not KEY=VALUE"),
        (["=x"], "is not KEY=VALUE"),
        (["client_kwargs..x=1"], "is not KEY=VALUE"),
        (["a=1", "a=2"], "a was given twice"),
        (["a=1", "a.b=2"], "a.b: a was given a value before"),
        (["a.b=1", "a=2"], "a was given twice"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(texts: list[str], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_options(texts)


def test_a_variable_is_looked_up_at_any_depth_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = parse_options(
        [
            "secret=env:OURS",
            "client_kwargs.region_name=env:REGION",
            'client_kwargs.x=["env:OURS", {"y": ["env:OURS"]}]',
        ]
    )
    monkeypatch.setenv("OURS", "correct-horse")
    with pytest.raises(CheckpointError, match=r"client_kwargs\.region_name .*'REGION'.*not set"):
        resolved_options(options)
    monkeypatch.setenv("REGION", "here")
    horse = "correct-horse"
    inner = {"region_name": "here", "x": [horse, {"y": [horse]}]}
    assert resolved_options(options) == {"secret": horse, "client_kwargs": inner}


def test_the_value_of_a_variable_is_not_shown_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OURS", "correct-horse")
    options = resolved_options(parse_options(["secret=env:OURS", 'x=["env:OURS"]']))
    assert "horse" not in repr(options)
    assert f"{options['secret']}" == "correct-horse"


class _Strict(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "strict"

    def __init__(self, secret: str, **others: object) -> None:
        raise TypeError(f"unexpected keyword argument 'bogus' for {secret}")


@pytest.mark.parametrize("url", ["s3://bucket/run", "strict://run"])
def test_options_that_a_file_system_does_not_know_are_one_sentence_without_secrets(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("strict", _Strict, clobber=True)
    monkeypatch.setenv("OURS", "correct-horse")
    texts = ["key=a", "secret=env:OURS", "client_kwargs.bogus=1"]
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'bogus'") as caught:
        open_storage(url, options=resolved_options(parse_options(texts))).prove()
    assert "horse" not in str(caught.getrepr(style="short", showlocals=True, chain=True))


def test_what_a_file_system_says_of_its_options_is_told_without_their_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OURS", "http//correct-horse")
    options = resolved_options(parse_options(["endpoint_url=env:OURS", "key=a", "secret=env:OURS"]))
    with pytest.raises(CheckpointError, match=r"Invalid endpoint: \*\*\*"):
        open_storage("s3://bucket/run", options=options).prove()


def test_clients_with_other_secrets_are_not_shared() -> None:
    def made(secret: str) -> Any:
        storage = open_storage("s3://bucket/run", options={"key": "a", "secret": Secret(secret)})
        assert isinstance(storage, ObjectStorage)
        assert isinstance(storage.objects, S3Objects)
        return storage.objects.client._file_system()

    assert made("one") is made("one")
    assert made("one") is not made("two")


def test_options_are_offered_to_stores_below_one_url_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "correct-horse")
    with offered("s3://bucket/run", {"secret": "env:OURS"}):
        with offered("s3://bucket/run/inner/", {"key": "inner"}):
            assert offered_options("s3://bucket/run/inner/x") == {"key": "inner"}
        for url in ("s3://bucket/run", "s3://bucket/run/a/b", "s3://bucket/run/inner/x"):
            assert offered_options(url) == {"secret": "correct-horse"}
        for url in ("s3://bucket/run-2", "s3://bucket", "s3://other/run"):
            assert offered_options(url) == {}
    assert offered_options("s3://bucket/run") == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"s3://a": 1}', '{"s3://a": "b"}'])
def test_an_environment_that_makes_no_sense_is_named(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEATRIAL_STORAGE_OPTIONS", text)
    with pytest.raises(CheckpointError, match="SEATRIAL_STORAGE_OPTIONS is no JSON object"):
        open_storage("memory://x")


def _client_options(url: str) -> dict[str, Any]:
    storage = open_storage(url)
    assert isinstance(storage, ObjectStorage)
    assert isinstance(storage.objects, S3Objects)
    return dict(storage.objects.client._made().storage_options)


def test_the_configuration_of_fsspec_is_heeded_and_joined_with_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured = {
        "endpoint_url": "http://configured",
        "key": "configured",
        "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 7},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", configured)
    with offered("s3://bucket/run", {"key": "offered"}):
        made = _client_options("s3://bucket/run")
    assert (made["endpoint_url"], made["key"]) == ("http://configured", "offered")
    assert made["config_kwargs"]["s3"] == {"addressing_style": "path"}
    assert made["config_kwargs"]["read_timeout"] == 7
    assert made["config_kwargs"]["retries"]["total_max_attempts"] == 1


def test_the_command_takes_options_and_no_secret(
    moto_place: Place, make_state: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert moto_place.server is not None
    moto_place.store().save(make_state(1), step=1)
    monkeypatch.setenv("OURS", moto_place.server.key)
    words = [
        f"endpoint_url={moto_place.server.endpoint}",
        "key=testing",
        "client_kwargs.region_name=us-east-1",
    ]
    given = [part for word in words for part in ("--option", word)]
    assert command.main(["verify", moto_place.location, *given, "--option", "secret=env:OURS"]) == 0
    assert "step 1: " in capsys.readouterr().out
    assert command.main(["list", moto_place.location, *given, "--option", "secret=horse"]) == 2
    refused = capsys.readouterr()
    assert "secret is a secret" in refused.err
    assert "horse" not in refused.err + refused.out
    for url in ("ftp://me:horse@host/x", "s3://b/x?token=horse", "https://horse@host/x"):
        assert command.main(["list", url]) == 2
        refused = capsys.readouterr()
        assert "the URL has a secret in it" in refused.err
        assert "horse" not in refused.err + refused.out
    assert command.main(["list", "directory", "--option", "key=a"]) == 2
    assert "--option is for URLs" in capsys.readouterr().err
