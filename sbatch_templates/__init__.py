"""Batch scripts that are submitted as they are, after setting two or three variables at their top."""
