"""A job's module after whose import torch says that CUDA is initialised, on any machine."""

import torch

torch.cuda.is_initialized = lambda: True
