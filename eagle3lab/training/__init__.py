"""Loss, trainer, resume, several ranks."""
