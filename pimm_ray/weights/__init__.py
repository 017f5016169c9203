"""Weights in and out: sources, key rules, the Hub, exports."""
