"""Read-only views of a report; none imports torch."""
