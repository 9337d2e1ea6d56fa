"""Measurements against other engines: tools of the repository, not part of the package."""
