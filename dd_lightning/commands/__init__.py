"""The commands of `dd-lightning` that have no room of their own."""
