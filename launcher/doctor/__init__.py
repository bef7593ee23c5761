"""`everstep doctor`: facts are gathered, judged by pure checks, and shown on one screen."""
