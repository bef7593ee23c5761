"""Measurements of Everstep against what people have today: `python -m benchmarks.recovery`."""
