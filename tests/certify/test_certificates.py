"""Certificates: the same suite on every backend, and each question answered wrongly on purpose.

What a real backend cannot be made to do is done to memory:// by faults of single operations."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from object_servers import BUCKET, S3Server, moto, s3rver, seaweedfs

from seatrial.chaos.certify import (
    GUARANTEES,
    Certificate,
    Observation,
    Outcome,
    certify,
    open_subject,
)
from seatrial.chaos.certify.suite import observe
from seatrial.chaos.errors import UsageError
from seatrial.chaos.storage import striking

NEEDED = [guarantee.name for guarantee in GUARANTEES if guarantee.needed]


class Conformance:
    """What holds of every backend that is safe; a subclass is one backend.

    A subclass has the fixture ``certificate`` and says what else was found.
    """

    others: ClassVar[Mapping[str, Outcome]]

    def test_it_is_safe(self, certificate: Certificate) -> None:
        assert certificate.is_safe, certificate.verdict

    @pytest.mark.parametrize("guarantee", NEEDED)
    def test_what_checkpoints_need_is_kept(self, certificate: Certificate, guarantee: str) -> None:
        assert certificate.observed(guarantee).outcome is Outcome.KEPT

    def test_what_they_do_not_need_is_told(self, certificate: Certificate) -> None:
        found = {each.guarantee: each.outcome for each in certificate.observations}
        assert {name: found[name] for name in found if name not in NEEDED} == self.others

    def test_its_speed_is_told(self, certificate: Certificate) -> None:
        figures = certificate.observed("speed").figures
        assert set(figures) > {"small_put_median_ms", "put_mb_per_s", "get_mb_per_s"}
        assert all(value >= 0 for value in figures.values())


class TestDirectory(Conformance):
    others: ClassVar[Mapping[str, Outcome]] = {
        "durable across a kill": Outcome.NOT_TRIED,
        "abandoned uploads": Outcome.NOT_OFFERED,
        "digest checks": Outcome.NOT_OFFERED,
        "rename": Outcome.KEPT,
        "speed": Outcome.KEPT,
    }

    @pytest.fixture(scope="class")
    @classmethod
    def certificate(cls, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
        directory = tmp_path_factory.mktemp("certified")
        certificate = certify(str(directory / "not" / "there"))
        assert list(directory.iterdir()) == []
        return certificate

    def test_it_says_that_a_power_cut_was_not_tried(self, certificate: Certificate) -> None:
        assert "power cut" in certificate.notes[0]


class TestMemory(Conformance):
    others = TestDirectory.others | {"rename": Outcome.NOT_OFFERED}

    @pytest.fixture(scope="class")
    @classmethod
    def certificate(cls) -> Certificate:
        return certify("memory://certified")

    def test_it_says_that_one_process_sees_it(self, certificate: Certificate) -> None:
        assert "one process only" in certificate.notes[0]


class TestMoto(Conformance):
    others = TestMemory.others | {
        "abandoned uploads": Outcome.KEPT,
        "digest checks": Outcome.BROKEN,
    }

    @pytest.fixture(scope="class")
    @classmethod
    def certificate(cls) -> Iterator[Certificate]:
        with moto() as server:
            prefix = secrets.token_hex(8)  # moto's servers in one process share their objects
            yield certify(f"s3://{BUCKET}/{prefix}", options=server.options)
            left = server.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
            assert "Contents" not in left


class TestSeaweedFS(Conformance):
    others = TestMemory.others | {
        "durable across a kill": Outcome.KEPT,
        "abandoned uploads": Outcome.KEPT,
        "digest checks": Outcome.KEPT,
    }

    @pytest.fixture(scope="class")
    @classmethod
    def certificate(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certificate]:
        with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
            url = f"s3://{BUCKET}/run"
            yield certify(url, options=server.options, restart=server.restart)


class TestS3rver:
    """A server that ignores If-None-Match, and so must be refused."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
        try:
            with s3rver(tmp_path_factory.mktemp("s3rver")) as server:
                yield server
        except FileNotFoundError as error:
            pytest.skip(f"{error}: run ci/npm where npm can install s3rver")

    def test_it_is_refused_with_the_race_that_shows_why(self, server: S3Server) -> None:
        certificate = certify(f"s3://{BUCKET}/run", options=server.options)
        assert not certificate.is_safe
        evidence = certificate.observed("exclusive publish").evidence
        assert evidence.startswith("in race 1 racers [0, 1, 2, 3, 4, 5] of 6 were told")
        assert "and it holds what 'racer" in evidence
        assert evidence in certificate.verdict


LIES = [
    ("exclusive publish", "corrupt rank=0 at=storage/publish path=*/race-2"),
    ("read after write", "lose rank=0 at=storage/write path=*/new-3"),
    ("read after write", "corrupt rank=0 at=storage/write path=*/new-3"),
    ("list after write", "stale rank=0 at=storage/list path=*/listed/ nth=4"),
    ("overwrite", "lose rank=0 at=storage/write path=*/again nth=7"),
    ("overwrite", "stale rank=0 at=storage/read path=*/again nth=7"),
    ("delete", "lose rank=0 at=storage/delete path=*/gone/5"),
    ("delete", "stale rank=0 at=storage/list path=*/gone/ nth=2; lose rank=0 at=storage/delete"),
    ("atomic large put", "short rank=0 at=storage/write path=*/large times=always keep=100"),
    ("publish a step once", "lose rank=0 at=storage/publish path=*/step-00000001/*"),
    ("publish a step once", "fail rank=0 at=storage/publish path=*/step-00000001/* error=ENOSPC"),
    ("fencing", "lose rank=0 at=storage/publish path=*/step-00000002/*"),
]


@pytest.mark.parametrize(("guarantee", "lie"), LIES)
def test_a_storage_that_lies_is_not_safe(guarantee: str, lie: str) -> None:
    subject = open_subject("memory://lying")
    asked = next(each for each in GUARANTEES if each.name == guarantee)
    try:
        assert observe(subject, asked).outcome is Outcome.KEPT
        subject.clean_up()
        with striking(lie) as struck:
            found = observe(subject, asked)
        assert struck.changes
        assert (found.outcome, found.is_fatal) == (Outcome.BROKEN, True), found
    finally:
        subject.clean_up()


def test_a_server_that_forgets_what_it_acknowledged_is_told() -> None:
    subject = open_subject("memory://forgetful")
    asked = next(each for each in GUARANTEES if each.name == "durable across a kill")
    forgetful = replace(subject, restart=lambda: subject.names.delete(["durable/3"]))
    found = observe(forgetful, asked)
    subject.clean_up()
    assert found.outcome is Outcome.BROKEN
    assert found.evidence == "1 of 20 acknowledged objects are gone: durable/3"


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.KEPT])
def test_what_was_not_seen_to_be_kept_is_not_safe(outcome: Outcome) -> None:
    kept = Observation(guarantee="a", needed=True, outcome=Outcome.KEPT, evidence="seen")
    other = replace(kept, guarantee="b", outcome=outcome, evidence="why")
    assert Certificate(url="x", observations=(kept,)).is_safe
    assert Certificate(url="x", observations=(kept, replace(other, needed=False))).is_safe
    unsafe = Certificate(url="x", observations=(kept, other))
    assert (unsafe.is_safe, unsafe.verdict) == (False, "NOT SAFE: b: why")
    assert not Certificate(url="x", observations=()).is_safe


def test_a_certificate_is_saved_as_json(tmp_path: Path) -> None:
    seen = Observation(
        guarantee="a", needed=True, outcome=Outcome.KEPT, evidence="seen", figures={"ms": 1.5}
    )
    Certificate(url="x://y", observations=(seen,), notes=("n",)).save(tmp_path / "d" / "c.json")
    read: dict[str, Any] = json.loads((tmp_path / "d" / "c.json").read_text())
    assert (read["url"], read["safe"], read["notes"]) == ("x://y", True, ["n"])
    assert read["observations"][0]["outcome"] == "kept"
    assert read["observations"][0]["figures"] == {"ms": 1.5}
    assert "python" in read["client"]


@pytest.mark.parametrize(
    "url", ["zork://x", "s3://", "chaos::memory://x", "/proc/not-there", "file:///proc/not-there"]
)
def test_what_cannot_be_used_at_all_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(UsageError, match="cannot be certified") as caught:
        open_subject(url)
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_to_the_end_is_left_as_it_was(tmp_path: Path) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="No space left"):
            open_subject(str(tmp_path / "new" / "store"))
    assert list(tmp_path.iterdir()) == []


RunPytest = Callable[..., pytest.RunResult]


class TestCommand:
    def test_it_prints_and_saves_a_certificate(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile("def test_x(): raise AssertionError('not to be run')")
        pytester.makeconftest(
            "import sys\ndef pytest_unconfigure(): print('torch:', 'torch' in sys.modules)"
        )
        result = pytester.runpytest_subprocess("--chaos-certify", "store", "-p", "no:cacheprovider")
        result.assert_outcomes(passed=len(GUARANTEES) - 3, skipped=3)
        result.stdout.fnmatch_lines(["exclusive publish * kept *needed *one winner*", "SAFE: *"])
        result.stdout.fnmatch_lines(["torch: False"])
        saved = json.loads((pytester.path / "certificate-store.json").read_text())
        assert saved["safe"]
        assert len(saved["observations"]) == len(GUARANTEES)
        assert not (pytester.path / "store").exists()

    def test_a_part_of_the_questions_makes_no_certificate(self, pytester: pytest.Pytester) -> None:
        result = pytester.runpytest_subprocess("--chaos-certify=store", "-k", "delete")
        result.assert_outcomes(passed=1, deselected=len(GUARANTEES) - 1)
        result.stdout.fnmatch_lines(["not every guarantee was tried: no certificate"])
        assert list(pytester.path.glob("certificate-*")) == []

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--chaos-certify=zork://x"],
            ["--chaos-certify=x", "-n2"],
            ["--chaos-certify="],  # as from a variable that is not set
            ["--chaos-certify=x", "--chaos-artifacts=/dev/null/x"],
        ],
    )
    def test_bad_input_is_a_usage_error(
        self, pytester: pytest.Pytester, arguments: list[str]
    ) -> None:
        pytester.makepyfile("def test_x(): pass")
        result = pytester.runpytest_subprocess(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: --chaos-certify*"])
        result.stderr.no_fnmatch_line("*Traceback*")
