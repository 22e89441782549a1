"""Models that a user would bring, each with the command that profiles it."""
