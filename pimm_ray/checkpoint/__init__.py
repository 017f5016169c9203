"""The bytes on disk: names, manifest, shards, codec, and what goes into a checkpoint. No Ray, no process groups."""
