"""Kernels written for Hopper in Gluon: compute capability 9.0 alone."""
