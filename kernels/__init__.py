"""Attention kernels.

Import-free on purpose: from the repository's root, `import kernels` finds this folder.
"""
