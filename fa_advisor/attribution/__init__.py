"""Attribution: what the op stream's events say about every byte. Pure: no torch."""
