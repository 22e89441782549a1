"""An unmodified script, run as Python would run it, and followed while it trains or infers.

Nothing in here imports torch before the script does: what it sets beforehand (visible devices,
allocator settings, threads) must still count.
"""
