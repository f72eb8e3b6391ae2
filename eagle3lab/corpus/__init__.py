"""Prompts, chat rendering, loss mask, responses written by the target itself, draft vocabulary."""
