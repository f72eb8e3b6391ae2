"""Imported by the fork server of `tests.training.jobs`: what every job would import, once, and on one thread."""

import importlib

import torch

torch.set_num_threads(1)  # before anything computes: threads do not survive a fork

for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp", "tests.training.jobs"):
    importlib.import_module(name)
tiny = importlib.import_module("tests.tiny")
tiny.tiny_drafter(tiny.tiny_target())
