"""Formats: how files hold shards.

One module a format, each with a reader (path -> :class:`~reshard.formats.checkpoint.Checkpoint`)
and, where the format is a target, a writer (checkpoint -> :class:`~reshard.formats.target.Target`).
A concrete format never imports another one; what they share is `checkpoint`, `target`, `dtypes`,
`naming` and the torch archive.
"""
