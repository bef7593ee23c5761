"""Everstep's health checks: facts -> checks -> policy -> report.

`examine` runs the checks on this node or on a recorded one; `result` is what they say.
torch is imported by the active checks alone, in a process of their own.
"""
