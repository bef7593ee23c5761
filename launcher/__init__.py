"""Everstep's launcher: Slurm outside, processes inside."""
