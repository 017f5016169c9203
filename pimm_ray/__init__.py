"""Preempt any of it at any time, resume on any number of GPUs, lose nothing: checkpoints for PyTorch on Ray Train."""

from __future__ import annotations
