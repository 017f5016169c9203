"""How a run goes on after its size changed: plan, random streams, loader positions. No Ray, no storage."""
