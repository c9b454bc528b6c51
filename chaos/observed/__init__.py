"""A disk that sees every operation of every program on it, and lets faults strike there.

The file system in user space that stores of trials are on with ``--chaos-disk fuse`` and
``--chaos-powerloss fuse``: whatever a rank or a process that it started does to its files is an
operation ``storage/…``, be it Python, torch's own writer or safetensors.
"""
