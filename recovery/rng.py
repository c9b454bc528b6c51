"""The random number generators of one rank, as plain data.

Guarantees: `capture_rng` then `restore_rng` on the same rank continues every stream exactly:
Python's ``random``, NumPy's global generator where NumPy is installed, torch's CPU generator, the
generator of the current CUDA device once CUDA is in use, and every named ``torch.Generator``.
Capturing draws nothing and copies about 10 kB.

Does not: cover NumPy ``Generator`` objects, generators of other devices than the current one, or
anything that a data-loader worker process holds.

Anyone may call these functions. After a fork call `seed_everything`: a forked rank starts with its
parent's streams, and every rank with the same ones.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import StateError

try:
    import numpy
except ImportError:  # a torch without NumPy has no NumPy stream to lose
    numpy = None  # type: ignore[assignment]

BUILT_IN_STREAMS = ("python", "numpy", "torch", "cuda")
"""Stream names that a named generator may not take."""

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def derive_seed(seed: int, name: str, index: int) -> int:
    """A 63-bit seed: the BLAKE2b digest of ``seed/name/index``, independent for every triple.

    Sums such as ``seed + rank`` give rank 1 of seed 0 the stream of rank 0 of seed 1; a hash does
    not.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(
    seed: int, rank: int, *, generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Seed every stream of this process with ``derive_seed(seed, stream, rank)``.

    CUDA is seeded lazily: a process that never uses it does not touch the driver.
    """
    for name in BUILT_IN_STREAMS:
        seed_stream(name, derive_seed(seed, name, rank))
    for name, generator in (generators or {}).items():
        generator.manual_seed(derive_seed(seed, name, rank))


def capture_rng(
    *, generators: Mapping[str, torch.Generator] | None = None
) -> dict[str, dict[str, object]]:
    """The state of every stream by name, as plain data of bytes and numbers."""
    streams: dict[str, dict[str, object]] = {"python": _capture_python()}
    if numpy is not None:
        streams["numpy"] = _capture_numpy()
    streams["torch"] = {"state": _tensor_bytes(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        streams["cuda"] = {"state": _tensor_bytes(torch.cuda.get_rng_state())}
    for name, generator in (generators or {}).items():
        streams[name] = {"state": _tensor_bytes(generator.get_state())}
    return streams


def owned_streams(
    ranks: Mapping[int, Mapping[str, object]], rank: int, owners: Mapping[str, str]
) -> dict[str, object]:
    """Of the ``rng/<stream>`` objects of all ranks that saved, those that ``rank`` continues.

    A stream with an owner is the one saved under that owner, by the lowest rank that has it. Any
    other is the one that the same rank saved, as are all in a checkpoint without owners.
    """
    found: dict[str, object] = {}
    for saver in sorted(ranks, key=lambda each: (each != rank, each)):
        for full_name, state in ranks[saver].items():
            name = full_name.removeprefix("rng/")
            if name == full_name:
                continue
            saved_owner = state.get("owner") if isinstance(state, Mapping) else None
            wanted = owners.get(name)
            same_rank = saver == rank and None in (saved_owner, wanted)
            if same_rank or (wanted is not None and saved_owner == wanted):
                found.setdefault(name, state)
    return found


def restore_rng(
    saved: Mapping[str, object],
    *,
    generators: Mapping[str, torch.Generator] | None = None,
    fallback_seed: int | Callable[[str], int],
) -> list[str]:
    """Continue every stream of ``saved``; returns the names of streams that had no saved state.

    Those are seeded with ``derive_seed(fallback_seed, stream, 0)``, so that the outcome is defined;
    a function gives each stream a ``fallback_seed`` of its own.

    Raises:
        StateError: a saved stream does not exist here, or a state is malformed.
    """
    named = dict(generators or {})
    present = [*capture_rng(generators=named)]
    # A checkpoint of a GPU run holds a CUDA state, and this process may not have used CUDA yet.
    if "cuda" in saved and "cuda" not in present and torch.cuda.is_available():
        torch.cuda.init()
        present.append("cuda")
    # Without a GPU there is nothing that could draw from the CUDA stream.
    unknown = set(saved) - set(present) - {"cuda"}
    if unknown:
        raise StateError(
            f"the checkpoint holds RNG streams that do not exist here: "
            f"{', '.join(sorted(unknown))}; this rank has {', '.join(present)}"
        )
    derived = []
    for name in present:
        if name in saved:
            _restore_stream(name, saved[name], named)
            continue
        derived.append(name)
        base = fallback_seed(name) if callable(fallback_seed) else fallback_seed
        stream_seed = derive_seed(base, name, 0)
        if name in named:
            named[name].manual_seed(stream_seed)
        else:
            seed_stream(name, stream_seed)
    return derived


def seed_stream(name: str, stream_seed: int) -> None:
    if name == "python":
        random.seed(stream_seed)
    elif name == "torch":
        torch.default_generator.manual_seed(stream_seed)
    elif name == "cuda":
        # The call is kept for later with its stack, which takes 4 ms, even if no GPU can come.
        if torch.backends.cuda.is_built():
            torch.cuda.manual_seed(stream_seed)
    elif numpy is not None:
        numpy.random.seed([stream_seed & 0xFFFFFFFF, stream_seed >> 32])


def _restore_stream(name: str, state: object, generators: Mapping[str, torch.Generator]) -> None:
    try:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a mapping, got {type(state).__name__}")
        if name == "python":
            _restore_python(state)
        elif name == "numpy":
            _restore_numpy(state)
        elif name == "torch":
            torch.set_rng_state(_bytes_tensor(state["state"]))
        elif name == "cuda":
            torch.cuda.set_rng_state(_bytes_tensor(state["state"]))
        else:
            generators[name].set_state(_bytes_tensor(state["state"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise StateError(f"the saved state of the RNG stream {name!r} is malformed: {error}") from (
            error
        )


def _capture_python() -> dict[str, object]:
    version, words, gauss_next = random.getstate()
    return {
        "version": version,
        "words": struct.pack(f"<{_PYTHON_WORDS}I", *words),
        "gauss_next": gauss_next,
    }


def _restore_python(state: Mapping[str, object]) -> None:
    words = struct.unpack(f"<{_PYTHON_WORDS}I", _bytes(state["words"]))
    random.setstate((state["version"], words, state["gauss_next"]))


def _capture_numpy() -> dict[str, object]:
    # The stubs call every element a string or an array.
    state: Any = numpy.random.get_state(legacy=True)
    algorithm, key, position, has_gauss, cached = state
    return {
        "algorithm": str(algorithm),
        "key": key.astype("<u4").tobytes(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached_gaussian": float(cached),
    }


def _restore_numpy(state: Mapping[str, object]) -> None:
    key = numpy.frombuffer(_bytes(state["key"]), dtype="<u4", count=_NUMPY_WORDS)
    numpy.random.set_state(
        (
            str(state["algorithm"]),
            key.astype(numpy.uint32),
            state["position"],
            state["has_gauss"],
            state["cached_gaussian"],
        )  # type: ignore[arg-type]
    )


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, got {type(value).__name__}")
    return value


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _bytes_tensor(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(value)), dtype=torch.uint8)
