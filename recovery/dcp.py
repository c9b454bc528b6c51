"""Storage for `torch.distributed.checkpoint` (DCP): change one argument, keep the manifest store.

    dcp.save(state_dict, storage_writer=SeatrialWriter(directory, step=10))
    dcp.load(state_dict, storage_reader=SeatrialReader(directory))

Guarantees, and what is not guaranteed: see `SeatrialWriter` and `SeatrialReader`, whose home is
`seatrial.recovery.dcp_writer` and `seatrial.recovery.dcp_reader`. Anyone may call it.
"""

from __future__ import annotations

from .dcp_reader import SeatrialReader
from .dcp_writer import SeatrialWriter

__all__ = ["SeatrialReader", "SeatrialWriter"]
