"""Why is acceptance zero? Facts read from artefacts, checks over facts, findings."""
