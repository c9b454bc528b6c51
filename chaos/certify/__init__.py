"""Certificates: what a place for checkpoints was observed to guarantee, and whether it suffices.

`certify` runs the conformance suite against a URL or directory; ``pytest --chaos-certify URL`` does
so from the command line. Torch-free.
"""

from __future__ import annotations

from .certificate import Certificate, Observation, Outcome
from .subject import Subject, open_subject
from .suite import GUARANTEES, certify

__all__ = [
    "GUARANTEES",
    "Certificate",
    "Observation",
    "Outcome",
    "Subject",
    "certify",
    "open_subject",
]
