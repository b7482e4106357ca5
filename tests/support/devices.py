"""The devices that tests of the ops run on: the CPU and, where there is one, a GPU."""

from __future__ import annotations

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if GPU else [])]
