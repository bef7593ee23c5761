"""A file for each source: bytes in, plain data out. No commands and no files here."""
