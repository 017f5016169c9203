"""The world around a training loop: ranks, run folder, reports. `ray` is imported in this room only."""
