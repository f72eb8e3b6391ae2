"""Shared ground: error classes, atomic files, hashes, versions, schemas. Needs no torch."""
