"""A job's module whose import does what counting GPUs without NVML does, on any machine."""

import os

import torch

_BEFORE = os.getpid()
torch._C._cuda_isInBadFork = lambda: os.getpid() != _BEFORE
