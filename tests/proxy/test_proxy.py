"""The proxy between S3 clients and servers: what it passes on, and what it does to the rest.

The store's answer to lost replies, late requests and spoilt bodies is tried through it; clients are
s3fs and boto3, the server is moto."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
import torch
from botocore.config import Config
from botocore.exceptions import ClientError
from http_recorder import recorder
from hypothesis import given
from hypothesis import strategies as st
from object_servers import BUCKET, REGION, S3Server, moto

from seatrial.chaos.errors import FaultSyntaxError
from seatrial.chaos.proxy import HttpFault, HttpProxy
from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import NoValidCheckpointError, SaveError
from seatrial.recovery.storage import s3_client
from seatrial.recovery.storage.retry import RetryPolicy

MANIFEST = "method=PUT path=*/manifest.json*"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="module")
def open_proxy(server: S3Server) -> Iterator[HttpProxy]:
    with HttpProxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(open_proxy: HttpProxy) -> HttpProxy:
    open_proxy.plan()
    open_proxy.seen.clear()
    return open_proxy


class State:
    """Three tensors."""

    def __init__(self, value: float) -> None:
        self.live = {name: torch.full((50,), value) for name in "abc"}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def shared_objects(self) -> dict[str, object]:
        return {}

    def rank_objects(self) -> dict[str, object]:
        return {}

    def prepare(self, stored: Any) -> None:
        pass

    def load_objects(self, shared: Any, ranks: Any, rank: int) -> None:
        pass

    @property
    def value(self) -> float:
        (value,) = {float(each) for tensor in self.live.values() for each in tensor}
        return value


MakeStore = Callable[[], CheckpointStore]


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def make_store(server: S3Server, proxy: HttpProxy, url: str) -> MakeStore:
    """A store that reaches moto through the proxy."""
    options = server.options | {"endpoint_url": proxy.url}
    return lambda: CheckpointStore(url, storage_options=options)


def valid(server: S3Server, url: str) -> int | None:
    return inspect_store(url, storage_options=server.options).latest_valid


def client(endpoint: str, key: str, secret: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=REGION,
        config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
    )


class TestPassingOn:
    def test_a_request_arrives_as_it_was_sent(self, server: S3Server, proxy: HttpProxy) -> None:
        through = client(proxy.url, server.key, server.key)
        for key in ("plain", "with space+plus", "ü=1&2/%41//x"):
            through.put_object(Bucket=BUCKET, Key=key, Body=b"content", Metadata={"m": "v"})
            direct = server.client().get_object(Bucket=BUCKET, Key=key)
            assert (direct["Body"].read(), direct["Metadata"]) == (b"content", {"m": "v"})
            assert through.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"content"
            assert through.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == 7
        assert {seen.fault for seen in proxy.seen} == {""}
        assert [seen.status for seen in proxy.seen] == [200] * 9

    def test_signatures_stay_valid(self) -> None:
        """Computed anew from what arrives, by botocore, and so by SigV4's own rules."""
        with recorder() as arrived, HttpProxy(arrived.url) as proxy:
            for key, secret in (("a b/ü+1", "right"), ("plain", "wrong")):
                client(proxy.url, "key", secret).put_object(Bucket=BUCKET, Key=key, Body=b"x" * 99)
        right, wrong = arrived.requests
        assert right.headers["Host"] == f"127.0.0.1:{proxy.port}"
        assert right.body == b"x" * 99
        assert right.is_signed_by("key", "right")
        assert not wrong.is_signed_by("key", "right")
        assert not replace(right, path=right.path + "x").is_signed_by("key", "right")

    def test_a_save_and_a_restore_pass(self, make_store: MakeStore, proxy: HttpProxy) -> None:
        make_store().save(State(1), step=1)
        state = State(0)
        make_store().restore(state)
        assert state.value == 1
        assert {seen.fault for seen in proxy.seen} == {""}

    def test_nothing_is_left_of_a_closed_proxy(self, server: S3Server) -> None:
        with HttpProxy(server.endpoint, ["hold method=PUT"]) as proxy:
            through = client(proxy.url, server.key, server.key)
            with pytest.raises(Exception, match=r"[Cc]onnection"):
                through.put_object(Bucket=BUCKET, Key="never", Body=b"x")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), 5)
        assert "seatrial-proxy" not in [
            thread.name for thread in threading.enumerate() if thread is proxy._thread
        ]
        with pytest.raises(ClientError):
            server.client().head_object(Bucket=BUCKET, Key="never")


class TestTheStore:
    def test_a_manifest_whose_reply_was_lost_is_recognised(
        self, make_store: MakeStore, proxy: HttpProxy, server: S3Server, url: str
    ) -> None:
        proxy.plan(f"lose-reply {MANIFEST}")
        manifest = make_store().save(State(1), step=1)
        assert proxy.never_struck == []
        puts = [seen for seen in proxy.seen if seen.method == "PUT" and "manifest" in seen.path]
        assert (puts[0].status, bool(puts[0].fault)) == (200, True)
        assert {seen.status for seen in puts[1:]} <= {412}  # aiohttp sends it again by itself
        assert (manifest.step, valid(server, url)) == (1, 1)

    @pytest.mark.parametrize(
        "fault",
        [
            f"refuse {MANIFEST} times=3",
            "refuse method=PUT path=*.safetensors* status=500 code=InternalError",
            f"reset {MANIFEST}",
            "reset method=PUT path=*.safetensors* times=2",
            "lose-reply method=PUT path=*.safetensors*",
            "reset method=GET path=*list-type*",
        ],
    )
    def test_a_save_gets_through(
        self, make_store: MakeStore, proxy: HttpProxy, server: S3Server, url: str, fault: str
    ) -> None:
        proxy.plan(fault)
        make_store().save(State(1), step=1)
        assert proxy.never_struck == []
        assert valid(server, url) == 1

    @pytest.mark.parametrize(
        "fault",
        [
            "cut method=GET path=*.safetensors* keep=10",
            "slow method=GET path=*.safetensors* rate=100000",
            "refuse method=GET path=*.safetensors* times=2",
        ],
    )
    def test_a_restore_gets_through(
        self, make_store: MakeStore, proxy: HttpProxy, fault: str
    ) -> None:
        make_store().save(State(1), step=1)
        proxy.plan(fault)
        state = State(0)
        make_store().restore(state)
        assert proxy.never_struck == []
        assert state.value == 1

    def test_a_bit_that_flips_on_the_way_is_found(
        self, make_store: MakeStore, proxy: HttpProxy
    ) -> None:
        make_store().save(State(1), step=1)
        proxy.plan("flip method=GET path=*.safetensors* times=always")
        with pytest.raises(NoValidCheckpointError, match="does not match its digest"):
            make_store().restore(State(0))

    def test_a_manifest_that_lands_late_cannot_touch_the_winner(
        self,
        make_store: MakeStore,
        proxy: HttpProxy,
        server: S3Server,
        url: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        make_store().save(State(1), step=1)
        with monkeypatch.context() as patched:
            patched.setattr(
                s3_client, "REMOTE", RetryPolicy(total_s=0.05, wait_first_s=0.01, wait_max_s=0.01)
            )
            proxy.plan(f"hold {MANIFEST} times=always")
            with pytest.raises(SaveError):
                make_store().save(State(2), step=2)
        proxy.plan()
        successor = make_store()
        assert successor.restore(State(0)).step == 1  # type: ignore[union-attr]
        successor.save(State(3), step=2)
        answers = proxy.release()
        assert answers
        assert set(answers) == {412}
        state = State(0)
        restored = make_store().restore(state)
        assert restored is not None
        assert (restored.step, restored.damaged, state.value) == (2, (), 3)
        assert valid(server, url) == 2

    def test_without_a_condition_a_late_request_does_touch_it(
        self, proxy: HttpProxy, server: S3Server
    ) -> None:
        """What the conditional PUT is for."""
        proxy.plan("hold method=PUT")
        with pytest.raises(Exception, match=r"[Cc]onnection"):
            client(proxy.url, server.key, server.key).put_object(
                Bucket=BUCKET, Key="late", Body=b"first"
            )
        server.client().put_object(Bucket=BUCKET, Key="late", Body=b"second")
        assert proxy.release() == [200]
        assert server.client().get_object(Bucket=BUCKET, Key="late")["Body"].read() == b"first"


def test_a_fault_that_no_request_met_is_told(server: S3Server, proxy: HttpProxy) -> None:
    proxy.plan("reset path=*/never*", "reset nth=2", "refuse method=DELETE")
    client(proxy.url, server.key, server.key).put_object(Bucket=BUCKET, Key="x", Body=b"x")
    assert [str(fault) for fault in proxy.never_struck] == [
        "reset path=*/never*",
        "reset nth=2",
        "refuse method=DELETE",
    ]


_WORDS = st.text("abz/*?[]-_.=", min_size=1)


@given(
    st.builds(
        HttpFault,
        action=st.sampled_from(["reset", "lose-reply", "hold", "flip"]),
        method=_WORDS,
        path=_WORDS,
        nth=st.integers(1, 10**6),
        times=st.integers(0, 10**6),
    )
    | st.builds(
        HttpFault, action=st.just("refuse"), status=st.integers(400, 599), code=_WORDS, path=_WORDS
    )
    | st.builds(HttpFault, action=st.just("slow"), rate=st.floats(1e-3, 1e12))
    | st.builds(HttpFault, action=st.just("cut"), keep=st.integers(0, 10**9))
)
def test_what_a_fault_prints_parses_back_to_it(fault: HttpFault) -> None:
    assert HttpFault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode path=*", "refuse, reset, lose-reply"),
        ("reset path", "'path' should be one KEY=VALUE"),
        ("reset speed=3", "'speed=3' should be one KEY=VALUE"),
        ("reset path=a path=b", "'path=b' should be one KEY=VALUE"),
        ("reset nth=x", "'nth=x' should be a number"),
        ("reset nth=0", "count from 1"),
        ("reset times=0", "should be a number"),
        ("reset keep=3", "it takes no option of its own"),
        ("slow rate=0", "above 0"),
        ("refuse status=200", "400 to 599"),
        ("reset path=", "one word"),
    ],
)
def test_a_wrong_word_is_named(text: str, says: str) -> None:
    with pytest.raises(FaultSyntaxError) as caught:
        HttpFault.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
