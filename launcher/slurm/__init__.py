"""What the launcher needs of Slurm."""
