"""Hidden states to and from disk."""
