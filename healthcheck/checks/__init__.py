"""The checks: small pure functions `(facts, profile) -> Result | Iterable[Result]`, a file for each kind."""
