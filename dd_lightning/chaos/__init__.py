"""Faults on purpose: plans of what fails when; their injection into processes, real or virtual."""
