"""Faults on purpose: plans of what fails when, and their injection into real processes."""
