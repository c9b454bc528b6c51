"""A proxy between any S3 client and any S3 server that loses, delays and spoils on the way.

Needs aiohttp (the extras ``s3`` and ``proxy`` bring it). Torch-free.
"""

from __future__ import annotations

from .proxy import HttpProxy, Seen
from .rule import HttpFault

__all__ = ["HttpFault", "HttpProxy", "Seen"]
