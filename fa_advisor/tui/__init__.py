"""The dashboard: a Textual app over a report; never imports torch."""
