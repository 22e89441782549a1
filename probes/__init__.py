"""Probes: everything that touches the outside to learn a fact. Import-free on purpose."""
