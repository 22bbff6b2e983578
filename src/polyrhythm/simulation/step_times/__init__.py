"""Distributions of compute time: each file is one."""
