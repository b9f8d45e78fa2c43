"""Faults on purpose: plans of what fails when, and their injection into processes, real or virtual."""
