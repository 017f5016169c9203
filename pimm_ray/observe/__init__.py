"""What a run tells the world: trackers."""
